"""Descriptors that travel with a pickle.

While an object is pickled on its way into a process of ours, whatever of it is a descriptor (shared memory, a lock file) goes beside the
bytes: `add` takes a duplicate and returns the number under which `take` gives it out on the other side. Outside of that, `active()` is
False, and a descriptor has to find another way, or none.

Not for a file on which this process holds record locks: the duplicate is closed when it was sent, and closing any descriptor of a file
drops them (fcntl(2)). `handover` is for those.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class _Here(threading.local):
    """What this thread is doing."""

    leaving: list[int] | None = None
    arriving: list[int] | None = None
    taken: frozenset[int] = frozenset()


_here = _Here()


@contextmanager
def collecting() -> Iterator[list[int]]:
    """For the time of pickling: a list that fills with what is added. Its descriptors are the caller's; after an exception they are
    closed. What is pickled inside by other means may add to it, too."""
    fds: list[int] = []
    before, _here.leaving = _here.leaving, fds
    try:
        yield fds
    except BaseException:
        _close(fds)
        fds.clear()
        raise
    finally:
        _here.leaving = before


def active() -> bool:
    """Whether this thread pickles for a process of ours, so that descriptors, and secrets, may go along."""
    return _here.leaving is not None


def add(fd: int) -> int:
    """Send a duplicate of this descriptor along; the number to `take` it by. Raises OSError when there is no descriptor left."""
    leaving = _here.leaving
    if leaving is None:
        raise RuntimeError("passing.add() outside of passing.collecting()")
    leaving.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
    return len(leaving) - 1


@contextmanager
def arriving(fds: Sequence[int]) -> Iterator[None]:
    """For the time of unpickling: takes these descriptors over, and closes those that nobody took."""
    before = _here.arriving, _here.taken
    mine = list(fds)
    _here.arriving, _here.taken = mine, frozenset()
    try:
        yield
    finally:
        taken = _here.taken
        _here.arriving, _here.taken = before
        _close(fd for index, fd in enumerate(mine) if index not in taken)


def take(index: int) -> int:
    """The descriptor that `add` gave this number: the caller's from now on. Who takes it a second time gets a duplicate."""
    fds = _here.arriving
    if fds is None:
        raise RuntimeError("passing.take() outside of passing.arriving()")
    if index in _here.taken:
        return fcntl.fcntl(fds[index], fcntl.F_DUPFD_CLOEXEC, 3)
    fd = fds[index]
    _here.taken |= {index}
    return fd


def _close(fds: Iterator[int] | Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
