"""Threads of ours, which a program does not know of."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable


class OwnThread(threading.Thread):
    """Thread of ours, which does not keep the process alive. No signal is delivered to it: one that
    the kernel gave to it would not wake the main thread, which has to handle it."""

    def __init__(self, run: Callable[[], object], name: str) -> None:
        super().__init__(target=run, name=f"rallypoint: {name}", daemon=True)

    def start(self) -> None:
        """Start it. Raises RuntimeError when the machine has no more threads."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:  # a handler may raise in the next call
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start(run: Callable[[], object], name: str) -> OwnThread:
    """Run this in a thread of ours. Raises RuntimeError when the machine has no more threads."""
    thread = OwnThread(run, name)
    thread.start()
    return thread


def is_ours() -> bool:
    """Tell whether the caller runs in a thread of ours."""
    return isinstance(threading.current_thread(), OwnThread)
