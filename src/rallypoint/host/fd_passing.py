"""Descriptors that are owned, and descriptors on their way to another process inside a pickle.

Three ways lead into another process. A pickle for a process of ours has its descriptors beside the
bytes: `add` takes a duplicate and returns the number under which `take` gives it out on the other
side. While `multiprocessing` starts a process (spawn, forkserver) the new process inherits it. At
all other times, through a queue, a pipe, a pool or `cloudpickle`, the receiver opens
`/proc/<sender>/fd/<number>`: the sender must still have it then, and it may be unpickled any number
of times.
"""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from rallypoint.errors import UsageError


def close_fds(*fds: int) -> None:
    """Close descriptors; a negative number stands for none. Where a signal handler may raise, the
    caller has forgotten a number before: a second close would meet another's descriptor."""
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def file_behind(fd: int) -> tuple[int, int] | None:
    """Return by what the file, socket or process of a descriptor is known again: device and inode.
    None when it is closed. Before Linux 6.9 all pidfds have one inode."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def is_open(fd: int) -> bool:
    """Tell whether this process has the descriptor."""
    return file_behind(fd) is not None


class OwnedFds:
    """Descriptors with one owner, closed with the last reference to it.

    Ctrl-C comes between any two lines: a descriptor that is put in here in the line that makes it
    is not lost.
    """

    def __init__(self, fds: Iterable[int] = ()) -> None:
        self.fds = list(fds)

    def __repr__(self) -> str:
        return f"<OwnedFds {self.fds}>"

    def add(self, fd: int) -> int:
        """Take one more; returned as it is."""
        self.fds.append(fd)
        return fd

    def give(self) -> list[int]:
        """Give all of them to the caller, which closes them."""
        given, self.fds = self.fds, []
        return given

    def close(self) -> None:
        """Close them. May be called twice, and goes on where it was interrupted."""
        while self.fds:
            os.close(self.fds.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


# --- beside a pickle for a process of ours
# -----------------------------------------------------------


class _PickledFds(threading.local):
    """Descriptors of the pickle that this thread makes or reads."""

    leaving: list[int] | None = None
    arriving: list[int] | None = None
    taken: frozenset[int] = frozenset()


_thread = _PickledFds()


@contextmanager
def collecting() -> Iterator[list[int]]:
    """Yield, for the time of pickling, a list that fills with the descriptors that are added.

    They are the caller's; after an exception they are closed. What is pickled inside by other means
    may add to it, too.
    """
    fds: list[int] = []
    before, _thread.leaving = _thread.leaving, fds
    try:
        yield fds
    except BaseException:
        OwnedFds(fds).close()
        fds.clear()
        raise
    finally:
        _thread.leaving = before


def active() -> bool:
    """Tell whether this thread pickles for a process of ours, so that descriptors, and secrets, may
    go along."""
    return _thread.leaving is not None


def add(fd: int) -> int:
    """Send a duplicate of this descriptor along; return the number to `take` it by. Raises OSError
    when there is no descriptor left."""
    leaving = _thread.leaving
    if leaving is None:
        raise RuntimeError("fd_passing.add() outside of fd_passing.collecting()")
    leaving.append(_duplicate(fd))
    return len(leaving) - 1


@contextmanager
def arriving(fds: Sequence[int]) -> Iterator[None]:
    """Take these descriptors over for the time of unpickling, and close those that nobody took."""
    before = _thread.arriving, _thread.taken
    mine = list(fds)
    _thread.arriving, _thread.taken = mine, frozenset()
    try:
        yield
    finally:
        taken = _thread.taken
        _thread.arriving, _thread.taken = before
        OwnedFds(fd for index, fd in enumerate(mine) if index not in taken).close()


def take(index: int) -> int:
    """Return the descriptor that `add` gave this number: the caller's from now on. A second caller
    gets a duplicate."""
    fds = _thread.arriving
    if fds is None:
        raise RuntimeError("fd_passing.take() outside of fd_passing.arriving()")
    if index in _thread.taken:
        return _duplicate(fds[index])
    _thread.taken |= {index}
    return fds[index]


def _duplicate(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


# --- in any other pickle
# -----------------------------------------------------------------------------


class ByAddress:
    """Address of a descriptor, which any process of the same user can open."""

    def __init__(self, fd: int) -> None:
        self._fd, self._file = fd, file_behind(fd)
        self._pid, self._host = os.getpid(), os.uname().nodename

    def __repr__(self) -> str:
        return f"<descriptor {self._fd} of pid {self._pid} on {self._host}>"

    def detach(self) -> int:
        """Return a descriptor of this process for the same open file, close-on-exec. UsageError
        when the sender has it no more."""
        try:
            fd = os.open(f"/proc/{self._pid}/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise self._gone(os.strerror(error.errno or 0)) from None
        if file_behind(fd) != self._file:
            os.close(fd)
            raise self._gone("another file is there now")
        return fd

    def _gone(self, why: str) -> UsageError:
        here, code = os.uname().nodename, "producer-gone"
        if here != self._host:
            code = "usage"
            why = f"this is {here}; memory is shared by the processes of one host"
        return UsageError(
            code,
            f"shared memory that pid {self._pid} on {self._host} sent cannot be taken over: {why}",
            why=(
                "through a queue, a pipe or a file goes only where the memory is: the sender must have it until the receiver does",
            ),
            help=(
                (
                    "give it to the process when that starts",
                    "multiprocessing.Process(target=work, args=(shared,))",
                ),
                ("or keep it, and the process, in the sender until it has arrived", ""),
            ),
        )


def sent(fd: int) -> Any:
    """Return what goes into the pickle for this descriptor, which stays the caller's."""
    import multiprocessing.context
    import multiprocessing.reduction

    starting = multiprocessing.context.get_spawning_popen()
    if starting is None:
        return ByAddress(fd)
    fd = os.dup(fd)  # torch may pass the same one, and a process cannot be started with one twice
    weakref.finalize(starting, os.close, fd).atexit = False
    return multiprocessing.reduction.DupFd(fd)


def received(passed: Any) -> int:
    """Return the descriptor that arrived: the caller's from now on, close-on-exec. UsageError when
    the sender has it no more."""
    fd: int = passed.detach()
    os.set_inheritable(fd, False)  # what a spawned process inherits is inheritable
    return fd
