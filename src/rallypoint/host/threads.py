"""Threads of ours, which a program does not know of."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable

BEGIN_SECONDS = 5.0
"""Longest wait, at the interpreter's end, for a thread that another thread is starting."""

_starting = threading.Lock()  # held by a thread that starts another one; never by the main thread
_ended = False


class OwnThread(threading.Thread):
    """Thread of ours, which does not keep the process alive. No signal is delivered to it: one that
    the kernel gave to it would not wake the main thread, which has to handle it."""

    def __init__(self, run: Callable[[], object], name: str) -> None:
        super().__init__(target=run, name=f"rallypoint: {name}", daemon=True)

    def start(self) -> None:
        """Start it. Raises RuntimeError when the machine has no more threads, or, in a thread of
        ours, when the interpreter is ending. Another daemon thread then waits here for ever."""
        if threading.current_thread() is threading.main_thread():
            self._start_without_signals()  # returns when it runs: the interpreter cannot end before
            return
        with _starting:
            if not _ended:
                self._start_without_signals()
                return
        if not is_ours():
            stay()  # a daemon thread of the program's: the others were joined before
        raise RuntimeError("the interpreter ends")

    def _start_without_signals(self) -> None:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:  # a handler may raise in the next call
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _end_starting() -> None:
    """Wait for a thread that is being started, at most BEGIN_SECONDS, and let no other start.
    Before Python 3.11.6 and 3.12.1, a thread that first runs after the interpreter's end reads
    freed memory (SIGSEGV, https://github.com/python/cpython/issues/108987)."""
    global _ended
    _ended = True
    if _starting.acquire(timeout=BEGIN_SECONDS):
        _starting.release()


def _start_anew() -> None:
    """Replace the lock in a forked child: a thread of the parent may have held it."""
    global _starting
    _starting = threading.Lock()


atexit.register(_end_starting)
os.register_at_fork(after_in_child=_start_anew)


def start(run: Callable[[], object], name: str) -> OwnThread:
    """Run this in a thread of ours. Raises and waits as `OwnThread.start` does."""
    thread = OwnThread(run, name)
    thread.start()
    return thread


def stay() -> None:
    """Block the calling thread for ever. For daemon threads at the interpreter's end: an error
    there would be printed at the end of a healthy job.
    """
    never = threading.Lock()
    never.acquire()
    never.acquire()


def is_ours() -> bool:
    """Tell whether the caller runs in a thread of ours."""
    return isinstance(threading.current_thread(), OwnThread)
