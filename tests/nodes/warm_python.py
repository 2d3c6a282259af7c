"""Python that has imported what a launcher imports: each program of the nodes is a fork of it, as
two fifths of what a small job takes is that import.

It is a program, too. Each line on its stdin asks for one process, as JSON; that process writes its
pid to stdout. It is then a child of the one that has asked, as if that had started it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import pkgutil
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)

_PR_SET_CHILD_SUBREAPER = 36


class Fork:
    """A process that was forked elsewhere and is a child of this one; what is used of `Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return its exit status (negative: its signal), None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._pidfd)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status when it has ended."""
        if self.poll() is None:
            select.select([self._pidfd], [], [], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmPython:
    """The process that is forked."""

    def __init__(self, path: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )

    def start(self, **asked: object) -> Fork:
        """Start `python` with `words` in the namespaces of the process `node`, its output added to
        a file.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # until it is a child of this process
        try:
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            self._process.stdin.flush()
            return Fork(int(self._process.stdout.readline()))
        finally:
            _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        self._process.communicate()


@cache
def warm_python(path: str) -> WarmPython:
    """Return the one with this PYTHONPATH; it lives as long as this process."""
    made = WarmPython(path)
    atexit.register(made.close)
    return made


_IMPORTED = (
    "diagnosis.causes",
    "diagnosis.error_patterns",
    "launcher.agent",
    "launcher.nodes",
    "record",
    "store.client",
    "store.server",
)
"""Packages all of whose modules a job of several nodes needs."""


def _import() -> None:
    import_module("rallypoint.cli.run")
    import_module("rallypoint.cli.commands")
    for name in _IMPORTED:
        package = import_module(f"rallypoint.{name}")
        for module in pkgutil.iter_modules(package.__path__, f"rallypoint.{name}."):
            import_module(module.name)


def _serve() -> dict[str, Any]:
    """Return in each process that is asked for, in which nothing of this one is open."""
    for line in sys.stdin:
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            continue
        between = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.0005)
        os.write(1, b"%d\n" % os.getpid())
        asked: dict[str, Any] = json.loads(line)
        return asked
    sys.exit()


def _enter(asked: Mapping[str, Any]) -> None:
    """Be in the node, with the output, the variables and the folder that were asked for."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(asked["output"], os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 64)
    for kind in ("net", "uts", "mnt"):
        fd = os.open(f"/proc/{asked['node']}/ns/{kind}", os.O_RDONLY)
        if _LIBC.setns(fd, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns: {kind}")
        os.close(fd)
    if asked["quota"]:
        Path(asked["quota"], "cgroup.procs").write_text(str(os.getpid()))
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])


def _run(words: list[str]) -> None:
    """Do what `python` does with these words: a module that is rallypoint, or a script."""
    sys.orig_argv[:] = [sys.executable, *words]
    if words[:2] == ["-m", "rallypoint"]:
        command = sys.modules["rallypoint.__main__"]
        sys.argv[:] = [str(command.__file__), *words[2:]]
        sys.exit(command.main())
    sys.argv[:] = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    del sys.path[0]  # this folder
    import_module("rallypoint.__main__")
    _import()
    gc.freeze()
    asked = _serve()
    _enter(asked)
    _run(asked["words"])
