"""Processes that a rank's program starts with `multiprocessing`, and that fail without the program
looking at them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from rallypoint.launcher import exception_capture
from rallypoint.launcher.protocol import Child
from rallypoint.launcher.worker.function_hooks import wrap

TOLD_MOST = 100  # of one rank: a program that starts processes for ever must not fill the agent
# multiprocessing calls finalizers below 0 when it has joined the children that the program left to
# it, in order; this one after all others.
_LAST = -100
_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("multiprocessing", "concurrent", "torch"))
_LIBRARIES += (f"{os.sep}threading.py",)  # of a thread in which a Pool replaces a process
_POOL = os.path.join("multiprocessing", "pool.py")

_Tell = Callable[[Sequence[Child], int], object]

_started: dict[int, Child] = {}  # by pid, until their end is seen
_failed: dict[int, Child] = {}  # by pid, until the program asks for their exit code
_beyond = [0]  # how many failed beyond TOLD_MOST
# By line: True when an import of the program would start processes there again.
_unguarded: dict[str, bool] = {}
# Pid of the process that has registered: a child begins without its parent's finalizers.
_registered: list[int] = []
_tells: list[_Tell] = []


def watch(tell: _Tell, starts_interpreter: Callable[[], object]) -> None:
    """Watch how children end, as far as multiprocessing itself looks, here and in forks of this
    process. `tell` is called when the program has ended, and when a Pool has lost a worker: with
    those that failed, and how many more did; `starts_interpreter` before a child starts that is no
    fork."""
    from multiprocessing import process

    kind: Any = process.BaseProcess
    if hasattr(kind.start, "_rallypoint"):
        return
    look = kind.exitcode.fget
    _tells.append(tell)

    def start(original: Callable[[Any], None], self: Any) -> None:
        # Not at the top: multiprocessing is being imported while this module wraps it.
        from multiprocessing import get_start_method

        if (getattr(self, "_start_method", None) or get_start_method()) != "fork":
            starts_interpreter()
        original(self)
        _remember(self, sys._getframe(1), tell)

    def end(original: Callable[[Any], None], self: Any) -> None:
        # However the process ends after that, the program wanted it.
        _started.pop(self.pid, None)
        original(self)

    def exitcode(self: Any) -> int | None:
        code: int | None = look(self)
        if code and self.pid in _failed:
            if sys._getframe(1).f_code.co_filename.endswith(_POOL):  # which tells nobody
                _tell(tell)
            else:
                del _failed[self.pid]
        return code

    wrap(kind, "start", start)
    wrap(kind, "terminate", end)
    wrap(kind, "kill", end)
    kind.exitcode = property(exitcode, doc=kind.exitcode.__doc__)


def _remember(process: Any, frame: FrameType | None, tell: _Tell) -> None:
    popen = process._popen
    if not hasattr(popen, "poll"):  # another start method than multiprocessing's own
        return
    owner = next(kind for kind in type(popen).__mro__ if "poll" in vars(kind))
    wrap(owner, "poll", _poll)
    while frame is not None and (
        exception_capture.is_ours(frame.f_code.co_filename)
        or any(one in frame.f_code.co_filename for one in _LIBRARIES)
    ):
        frame = frame.f_back
    line = exception_capture.line_of(frame)
    # The child is a new interpreter, which imports the program.
    imports = getattr(popen, "method", "fork") != "fork"
    if imports and line not in _unguarded:  # its source is read once
        _unguarded[line] = bool(exception_capture.unguarded_line(frame))
    _failed.pop(process.pid, None)  # an earlier one of that number
    _started[process.pid] = Child(
        exception_capture.sayable(process.name),
        process.pid,
        line=line,
        unguarded=imports and _unguarded[line],
    )
    if _registered != [os.getpid()]:
        from multiprocessing import util

        _registered[:] = [os.getpid()]
        util.Finalize(None, _tell, args=(tell,), exitpriority=_LAST)


def _poll(original: Callable[..., int | None], self: Any, *args: Any, **kwargs: Any) -> int | None:
    code = original(self, *args, **kwargs)
    if code is not None:
        _ended(self.pid, code)
    return code


def _ended(pid: int, code: int) -> None:
    """Note an end that multiprocessing has seen. `code` is as multiprocessing has it: below 0 a
    signal. A child that was told to end by SIGTERM has not failed."""
    import signal

    child = _started.pop(pid, None)
    if child is None or code in (0, -signal.SIGTERM):
        return
    if len(_failed) < TOLD_MOST:
        _failed[pid] = Child(
            child.name, pid, max(code, 0), max(-code, 0), child.line, child.unguarded
        )
    else:
        _beyond[0] += 1


def tell_failed() -> None:
    """Tell of the child processes that have failed so far: the launcher may end this process, and
    them, before the interpreter does."""
    if (_started or _failed) and _registered == [os.getpid()]:
        from multiprocessing import active_children

        active_children()  # looks at all of them
        _tell(_tells[0])


def _tell(tell: _Tell) -> None:
    if _failed:
        # In the order in which they were started.
        tell(tuple(sorted(_failed.values(), key=lambda child: child.pid)), _beyond[0])
