"""A descriptor on its way to another process, inside a pickle.

While `multiprocessing` starts a process (spawn, forkserver) the new process inherits it, and needs nobody afterwards. At all other
times, through a queue, a pipe, a pool or `cloudpickle`, the receiver opens `/proc/<sender>/fd/<number>`: the sender must still have it
then. Unlike `multiprocessing.reduction.DupFd`, which has a duplicate served by a thread of the sender, this may be unpickled any number
of times, and no duplicate is ever closed in the sender: closing one would drop the sender's record locks on that file (fcntl(2)).
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from rallypoint.errors import UsageError


class ByAddress:
    """Where a descriptor is, for whoever has a right to it: a process of the same user."""

    __slots__ = ("_fd", "_file", "_host", "_pid")

    def __init__(self, fd: int) -> None:
        found = os.fstat(fd)
        self._fd, self._file = fd, (found.st_dev, found.st_ino)
        self._pid, self._host = os.getpid(), os.uname().nodename

    def __repr__(self) -> str:
        return f"<descriptor {self._fd} of pid {self._pid} on {self._host}>"

    def __getstate__(self) -> tuple[Any, ...]:
        return self._fd, self._file, self._pid, self._host

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._fd, self._file, self._pid, self._host = state

    def detach(self) -> int:
        """A descriptor of this process for the same open file, close-on-exec. UsageError when the sender has it no more."""
        try:
            fd = os.open(f"/proc/{self._pid}/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise self._gone(os.strerror(error.errno or 0)) from None
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != self._file:
            # Closed at once, which is no danger to a lock: whatever it is, no lock of ours is on it.
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
            why=("through a queue, a pipe or a file goes only where the memory is: the sender must have it until the receiver does",),
            help=(
                ("give it to the process when that starts", "multiprocessing.Process(target=work, args=(shared,))"),
                ("or keep it, and the process, in the sender until it has arrived", ""),
            ),
        )


def sent(fd: int, *, alone: bool = True) -> Any:
    """What goes into the pickle for this descriptor, which stays the caller's.

    `alone=False`: somebody else may put the same descriptor into this pickle, and a process cannot be started with one twice. A duplicate
    goes then, which is closed with the `Process` object; not for a file that has record locks.
    """
    import multiprocessing.context
    import multiprocessing.reduction

    starting = multiprocessing.context.get_spawning_popen()
    if starting is None:
        return ByAddress(fd)
    if not alone:
        fd = os.dup(fd)
        weakref.finalize(starting, os.close, fd).atexit = False
    return multiprocessing.reduction.DupFd(fd)


def received(passed: Any) -> int:
    """The descriptor that arrived: the caller's from now on, close-on-exec. UsageError when the sender has it no more."""
    fd: int = passed.detach()
    os.set_inheritable(fd, False)  # what a spawned process inherits is inheritable
    return fd
