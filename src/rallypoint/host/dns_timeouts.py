"""Short look-ups in the DNS, for one thread and for as long as it says."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

OPTIONS = "timeout:1 attempts:1"
"""Value of `RES_OPTIONS` of a process that is ours alone. A lost answer costs the resolver's 5 s
otherwise."""

SECONDS, ATTEMPTS = 1, 1  # the same
_INITIALISED = 0x1  # RES_INIT


class _State(ctypes.Structure):
    """The beginning of glibc's `struct __res_state` (resolv.h), which each thread has."""

    _fields_ = (("retrans", ctypes.c_int), ("retry", ctypes.c_int), ("options", ctypes.c_ulong))


@contextlib.contextmanager
def quick_lookups() -> Iterator[None]:
    """Let the resolver ask once, for a second, when this thread wants a name. Other threads, and
    what comes afterwards, have their retries. Nothing changes where the user has set `RES_OPTIONS`,
    or with another C library than glibc."""
    state = None if "RES_OPTIONS" in os.environ else _state()
    if state is None:
        yield
        return
    before = state.retrans, state.retry
    state.retrans, state.retry = SECONDS, ATTEMPTS
    try:
        yield
    finally:
        state.retrans, state.retry = before


def _state() -> _State | None:
    libc: Any = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version") or not hasattr(libc, "__res_state"):
        return None
    libc.__res_state.restype = ctypes.POINTER(_State)
    state: _State = libc.__res_state().contents
    if not state.options & _INITIALISED and not hasattr(
        libc, "__res_init"
    ):  # before glibc 2.34 it is in a library of its own
        return None
    if not state.options & _INITIALISED and libc.__res_init() != 0:
        return None
    return state
