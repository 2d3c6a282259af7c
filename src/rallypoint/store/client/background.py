"""Threads of the store's own, which a program does not know of."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

_own = threading.local()


def start(run: Callable[[], object], name: str) -> threading.Thread:
    """Run this in a thread of ours. Raises RuntimeError when the machine has no more threads."""
    thread = threading.Thread(target=_within, args=(run,), name=f"rallypoint: {name}", daemon=True)
    thread.start()
    return thread


def is_here() -> bool:
    """Tell whether the caller runs in a thread of ours."""
    return getattr(_own, "here", False)


def _within(run: Callable[[], object]) -> None:
    # A signal that the kernel gave to this thread would not wake the main thread, which has to
    # handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _own.here = True
    run()
