"""Search for the line of a preload module that makes the template unsafe to fork, in a process of
its own.

The template only sees after an import that it has become unsafe. A throw-away interpreter repeats
that import here and looks at itself after every line of Python outside of torch and the standard
library. `sys.addaudithook` alone would be cheaper, but hears nothing of what native code does: the
thread pool that a first matrix product starts, the driver that a CUDA call opens. It tells when a
library was loaded.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from rallypoint.host import devices, processes
from rallypoint.launcher import exception_capture
from rallypoint.launcher.program import Program
from rallypoint.launcher.template import template
from rallypoint.launcher.worker import run_program

TraceFunction = Callable[
    [FrameType, str, Any], Any
]  # for sys.settrace; returns the one for the next event


def main() -> None:
    """Run the throw-away interpreter. Arguments: a pipe's descriptor for the answer, the parent's
    pid, the program's kind and target, and the modules, of which the last is suspected."""
    writer, parent, kind, target, *modules = sys.argv[1:]
    processes.die_with(int(parent))
    import torch.distributed  # noqa: F401  # as in the template, where it was no cause

    run_program.place_folder(Program(kind, target))  # type: ignore[arg-type]  # as the launcher has it
    for name in modules[:-1]:
        __import__(name)
    sys.addaudithook(_driver.on_event)
    watch = _LineWatch(int(writer))
    sys.settrace(watch.on_call)
    __import__(modules[-1])
    sys.settrace(None)
    watch.look()


class _LineWatch:
    """Trace function that looks after each line whether that line made the process unsafe, and then
    writes it and leaves.
    """

    def __init__(self, writer: int) -> None:
        self._writer = writer
        self._line: tuple[str, int] = ("", 0)  # the one that runs since the last look
        self._libraries: dict[str, bool] = {}
        self._seen = _signature()

    def on_call(self, frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        """Trace a function that begins, but none of torch's or the standard library's: they are
        part of the line that called them.
        """
        name = frame.f_code.co_filename
        if name not in self._libraries:
            self._libraries[name] = _is_library(name)
        return None if self._libraries[name] else self._on_line

    def _on_line(self, frame: FrameType, event: str, argument: object) -> TraceFunction:
        self.look()
        running: FrameType | None = frame
        if event == "return":  # what runs next belongs to the line that called
            running = frame.f_back
            while running is not None and self._libraries.get(running.f_code.co_filename, True):
                running = running.f_back
        self._line = (
            (running.f_code.co_filename, running.f_lineno) if running is not None else ("", 0)
        )
        return self._on_line

    def look(self) -> None:
        """Leave if the process has become unsafe since the last look. The thorough test is made
        only when something has changed.
        """
        signature = _signature()
        if signature != self._seen:
            self._seen = signature
            if template.unclean():
                self._leave()

    def _leave(self) -> NoReturn:
        name, number = self._line
        if name:
            os.write(self._writer, f"{exception_capture.shown_path(name)}:{number}".encode())
        os._exit(0)


def _signature() -> tuple[int, int, bool, bool]:
    """Return a value that changes with every thread and open file, and with CUDA. It costs
    microseconds: it is taken for every line.
    """
    torch_has = sys.modules["torch.cuda"].is_initialized()
    return (
        os.stat("/proc/self/task").st_nlink,
        len(os.listdir("/proc/self/fd")),
        torch_has,
        _driver.is_up(),
    )


class _Driver:
    """CUDA's driver library in this process. It is looked for only after another library was
    loaded: a look takes 0.1 ms.
    """

    def __init__(self) -> None:
        self._loaded = True

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note, as an audit hook, that ctypes or the import system has opened a library, which may
        bring the driver along.
        """
        if event == "ctypes.dlopen" or (event == "import" and arguments[1] is not None):
            self._loaded = True

    def is_up(self) -> bool:
        """Return whether the driver is loaded and initialised."""
        if self._loaded:
            self._loaded = False
            self._there = devices.driver_is_loaded()
        return self._there and devices.cuda_is_up()


_driver = _Driver()


def _is_library(filename: str) -> bool:
    if filename.startswith("<frozen") or exception_capture.is_ours(filename):
        return True
    if f"{os.sep}site-packages{os.sep}" in filename or f"{os.sep}dist-packages{os.sep}" in filename:
        return f"{os.sep}torch{os.sep}" in filename
    return filename.startswith(sysconfig.get_path("stdlib") + os.sep)
