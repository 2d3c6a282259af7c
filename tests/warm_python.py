"""Python that has imported what a launcher and a store import: a program in a fork of it is spared
that, which is two fifths of a small job, and nearly all of a store's server.

It is a program, too. Each message to it asks for one process, by JSON and three descriptors; that
process answers with its pid. It is then a child of the one that has asked, as if that had started it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)

_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS = 0x20000

_PATH = os.environ.get("PYTHONPATH", "")  # before a test has set its own

_ROOM = 16_384
"""Bytes for the variables of a process, as others see them in /proc."""

_LARGEST = 150_000
"""Bytes of a message: what a Unix socket takes at once."""


class WarmPopen(subprocess.Popen[Any]):
    """`Popen` of `[sys.executable, ...]` that starts it as a fork of a warm Python.

    `-c`, `-m rallypoint` and scripts are understood, and PYTHONPATH, of Python's variables; no
    option of Python is but `-P`, which is passed over: no folder of the caller's is on the path
    anyway. `node`: the process in whose namespaces it is; `quota`: its cgroup; `mounts`: a command
    that changes the mounts which are its own then.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        node: int = 0,
        quota: str = "",
        mounts: Sequence[str] = (),
        **how: Any,
    ) -> None:
        session = how.get("start_new_session", False)
        self._asked = {"node": node, "quota": quota, "mounts": mounts, "session": session}
        super().__init__(argv, **how)

    def _execute_child(self, argv: Sequence[str], *more: Any) -> None:
        cwd, env = more[4:6]
        ends = more[9:15]
        variables = dict(os.environ if env is None else env)
        warm = _warm_python(os.getpid())
        streams = [end if end != -1 else own for own, end in enumerate((ends[0], ends[3], ends[5]))]
        words = [word for at, word in enumerate(argv) if at and (at, word) != (1, "-P")]
        asked = {"words": words, "env": variables, "cwd": os.fspath(cwd or os.getcwd())}
        self._child_created = True
        try:
            self.pid = warm.start({**self._asked, **asked}, streams)
        finally:
            self._close_pipe_fds(*ends)  # type: ignore[attr-defined]


class _WarmPython:
    """The process that is forked."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": _PATH, "ROOM": "-" * _ROOM},
                start_new_session=True,
            )

    def start(self, asked: Mapping[str, object], streams: Sequence[int]) -> int:
        """Return the pid of what was started."""
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # until it is a child of this process
        try:
            socket.send_fds(self._socket, [json.dumps(asked).encode()], streams)
            return int(self._socket.recv(64))
        finally:
            _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@cache
def _warm_python(pid: int) -> _WarmPython:
    """Return the one of this process, whose pid is given; it lives as long."""
    made = _WarmPython()
    atexit.register(lambda: made.close() if os.getpid() == pid else None)
    return made


_IMPORTED = (
    "diagnosis.causes",
    "diagnosis.error_patterns",
    "launcher.agent",
    "launcher.nodes",
    "record",
    "store.client",
    "store.server",
    "store.state",
)
"""Packages all of whose modules a job of several nodes needs, or a store."""


def _import() -> None:
    for name in ("__main__", "cli.run", "cli.commands", "primitives.store"):
        import_module(f"rallypoint.{name}")
    for name in _IMPORTED:
        package = import_module(f"rallypoint.{name}")
        for module in pkgutil.iter_modules(package.__path__, f"rallypoint.{name}."):
            import_module(module.name)
    assert "torch" not in sys.modules


def _folders(path: str) -> list[str]:
    return [folder for folder in path.split(os.pathsep) if folder]


def _serve(calls: socket.socket) -> dict[str, Any]:
    """Return in each process that is asked for, with its three streams."""
    while True:
        message, streams, _, _ = socket.recv_fds(calls, _LARGEST, 3)
        if not message:
            sys.exit()
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for fd in streams:
                os.close(fd)
            continue
        between = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == between:
            time.sleep(0.0005)
        calls.send(b"%d" % os.getpid())
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
        calls.detach()
        os.closerange(3, 256)
        asked: dict[str, Any] = json.loads(message)
        return asked


def _enter(asked: Mapping[str, Any]) -> None:
    """Be where the process was asked for."""
    if asked["session"]:
        os.setsid()
    for kind in ("net", "uts", "mnt") if asked["node"] else ():
        fd = os.open(f"/proc/{asked['node']}/ns/{kind}", os.O_RDONLY)
        if _LIBC.setns(fd, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns: {kind}")
        os.close(fd)
    if asked["quota"]:
        Path(asked["quota"], "cgroup.procs").write_text(str(os.getpid()))
    os.environ.clear()
    os.environ.update(asked["env"])
    _show_variables()
    os.chdir(asked["cwd"])
    if asked["mounts"]:
        if _LIBC.unshare(_CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(asked["mounts"], check=True)
    folders = _folders(os.environ.get("PYTHONPATH", ""))
    sys.path[:] = [*folders, *(one for one in sys.path if one not in _folders(_PATH))]
    if any(Path(folder, "sitecustomize.py").exists() for folder in folders):
        sys.modules.pop("sitecustomize", None)
        import_module("sitecustomize")


def _show_variables() -> None:
    """Put the variables where /proc/PID/environ has those of the process that was forked. Nothing
    reads them there any more: each has been set anew.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    told = b"".join(b"%s=%s\0" % one for one in os.environb.items())[: end - start]
    ctypes.memmove(start, told.ljust(end - start, b"\0"), end - start)


def _run(words: list[str]) -> None:
    """Do what `python` does with these words."""
    sys.orig_argv[:] = [sys.executable, *words]
    if words[:2] == ["-m", "rallypoint"]:
        command = sys.modules["rallypoint.__main__"]
        sys.argv[:] = [str(command.__file__), *words[2:]]
        sys.exit(command.main())
    # What rallypoint.__main__ has set is for the command line.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.set_threshold(*_THRESHOLD)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        sys.argv[:] = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    del sys.path[0]  # this folder
    _THRESHOLD = gc.get_threshold()
    _import()
    gc.freeze()
    _request = _serve(socket.socket(fileno=os.dup(0)))
    _enter(_request)
    _run(_request["words"])
