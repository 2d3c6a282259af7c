"""Which line of a preload module makes the template unfit to be forked.

The template only sees that it is so after an import. Here a throw-away interpreter repeats that import, and looks after every line
of Python outside of torch and the standard library. `sys.addaudithook` alone would be cheaper, but it hears nothing of what native code
does: the thread pool that a first matrix product starts, the driver that a CUDA call opens. It tells when a library was loaded.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from rallypoint.host import devices, processes, system_calls
from rallypoint.launcher import boot, program, template, words

if TYPE_CHECKING:
    from rallypoint.launcher.channel import Ready
    from rallypoint.launcher.job import Job

Trace = Callable[[FrameType, str, Any], Any]  # what sys.settrace takes; each call answers with the function for the next event

# Seconds for the repeated import. Most of it is torch's; a module that then takes this long is reported without its line.
DEADLINE = 30.0


class Search:
    """A throw-away interpreter that repeats imports; `fileno()` becomes readable when it has an answer or has ended."""

    def __init__(self, modules: Sequence[str], folder: str, environment: Mapping[str, str]) -> None:
        """`modules`: what the template imported after torch, in its order; the last one is suspected. `folder`: the program's."""
        self._reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_inheritable(writer, True)
        self.pid = boot.spawn(
            ["-c", boot.CULPRIT, str(writer), str(os.getpid()), folder, *modules],
            dict(environment),
            file_actions=[(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)],
        )
        self._pidfd = system_calls.pidfd_open(self.pid)
        os.close(writer)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._reader

    def answer(self) -> str:
        """`pkg/ops.py:12`, or "" when it was not found (by now). Does not wait."""
        if not select.select([self._reader], [], [], 0)[0]:
            return ""
        return os.read(self._reader, 4096).decode("utf-8", "replace")

    def end(self) -> None:
        """SIGKILL, and give every descriptor back. It is left to be reaped by whoever reaps this process's children."""
        processes.send(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)
        os.close(self._reader)


class Suspicion:
    """The template is unfit to be forked, and the line is looked for while the job starts all the same. The notice waits for that, at most
    until the job is over."""

    def __init__(self, job: Job, ready: Ready) -> None:
        self._job = job
        self._ready: Ready | None = ready  # until it has been said
        self._search: Search | None = None
        plan = job.plan
        if ready.module not in plan.preload:  # torch itself
            self.tell()
            return
        modules = plan.preload[: plan.preload.index(ready.module) + 1]
        environment = {**os.environ, **plan.environment, "OPENBLAS_NUM_THREADS": "1"}  # the template's
        self._search = Search(modules, program.folder(plan.program), environment)
        job.loop.watch(self._search.fileno(), self.tell)
        job.loop.at("culprit", job.loop.now + DEADLINE, lambda now: self.tell())

    @property
    def pid(self) -> int:
        """Of the throw-away interpreter, 0 when there is none (any more)."""
        return self._search.pid if self._search is not None else 0

    def tell(self) -> None:
        """Say what spoilt the template, with the line if it is known by now. Only once."""
        ready, search, self._ready, self._search = self._ready, self._search, None, None
        self._job.loop.cancel("culprit")
        line = ""
        if search is not None:
            line = search.answer()
            self._job.loop.unwatch(search.fileno())
            search.end()
        if ready is not None:
            self._job.account.say_unclean(ready, line)


def main() -> None:
    """Entry of the throw-away interpreter: where to write, whose child it is, the program's folder, and the modules."""
    writer, parent, folder, *modules = sys.argv[1:]
    processes.die_with(int(parent))
    import torch.distributed  # noqa: F401  # as in the template, where it was no cause

    if not sys.flags.safe_path:
        sys.path.insert(0, folder)
    for name in modules[:-1]:
        __import__(name)
    sys.addaudithook(_driver.on_event)
    watch = _Watch(int(writer))
    sys.settrace(watch.on_call)
    __import__(modules[-1])
    sys.settrace(None)
    watch.look()


class _Watch:
    """A trace function: after each line it looks whether that line spoilt the process, and if so says which and leaves."""

    def __init__(self, writer: int) -> None:
        self._writer = writer
        self._line: tuple[str, int] = ("", 0)  # what is running since the last look
        self._libraries: dict[str, bool] = {}
        self._seen = _signature()

    def on_call(self, frame: FrameType, event: str, argument: object) -> Trace | None:
        """A function begins; torch's and the standard library's run untraced, as a part of the line that called them."""
        name = frame.f_code.co_filename
        if name not in self._libraries:
            self._libraries[name] = _is_library(name)
        return None if self._libraries[name] else self._on_line

    def _on_line(self, frame: FrameType, event: str, argument: object) -> Trace:
        self.look()
        running: FrameType | None = frame
        if event == "return":  # what runs next belongs to the line that called
            running = frame.f_back
            while running is not None and self._libraries.get(running.f_code.co_filename, True):
                running = running.f_back
        self._line = (running.f_code.co_filename, running.f_lineno) if running is not None else ("", 0)
        return self._on_line

    def look(self) -> None:
        """Has the process become unfit since the last look? The thorough question is asked only when something has changed."""
        signature = _signature()
        if signature != self._seen:
            self._seen = signature
            if template.unclean():
                self._leave()

    def _leave(self) -> NoReturn:
        name, number = self._line
        if name:
            os.write(self._writer, f"{words.shown_path(name)}:{number}".encode())
        os._exit(0)


def _signature() -> tuple[int, int, bool, bool]:
    """Changes with every thread and open file, and with CUDA; costs microseconds, since it is taken for every line."""
    torch_has = sys.modules["torch.cuda"].is_initialized()
    return os.stat("/proc/self/task").st_nlink, len(os.listdir("/proc/self/fd")), torch_has, _driver.is_up()


class _Driver:
    """CUDA's driver library in this process. Looking for it costs a tenth of a millisecond: only after another one was loaded."""

    def __init__(self) -> None:
        self._loaded = True

    def on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook: ctypes opens a library, or the import system an extension module, which may bring the driver along."""
        if event == "ctypes.dlopen" or (event == "import" and arguments[1] is not None):
            self._loaded = True

    def is_up(self) -> bool:
        """Whether it is there and was initialised, by whomever."""
        if self._loaded:
            self._loaded = False
            self._there = devices.driver_is_loaded()
        return self._there and devices.cuda_is_up()


_driver = _Driver()


def _is_library(filename: str) -> bool:
    if filename.startswith("<frozen") or words.is_ours(filename):
        return True
    if f"{os.sep}site-packages{os.sep}" in filename or f"{os.sep}dist-packages{os.sep}" in filename:
        return f"{os.sep}torch{os.sep}" in filename
    return filename.startswith(sysconfig.get_path("stdlib") + os.sep)
