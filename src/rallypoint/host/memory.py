"""Shared memory segments that die with their last user.

A segment is a memfd: memory with a descriptor and no name. It goes to another process over a Unix
socket, and the kernel frees it when the last descriptor is closed, whoever was killed and however.
Values of the store are written with `pwrite` and read with `pread`, never mapped: a copy through a
system call runs at memory's own speed (measured: 13 GB/s in, 16 GB/s out), and a process that is
handed a bad one gets a short read and not SIGBUS. What several processes compute with is mapped
(`Mapped`): it belongs to one user, and is sealed against shrinking before anybody maps it.

Fresh pages are what costs (1.7 GB/s: the kernel clears each one), so segments are used again.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections import deque
from collections.abc import Callable

from rallypoint.host import system_calls
from rallypoint.host.fd_passing import close_fds

SEALS = system_calls.F_SEAL_SHRINK | system_calls.F_SEAL_GROW
"""A segment keeps its size, whoever holds it."""

ROUNDING = 8
"""Capacities are rounded up to the next eighth of a power of two: at most 12 % of address space
(pages that are never written cost nothing), and a tensor that is a header longer than the last one
still fits its segment."""

SMALLEST = 64 * 1024
"""Bytes; capacities below this are not told apart."""

POOL_BYTES = 256 * 1024 * 1024
"""Bytes that a pool keeps for reuse at most: four values of 64 MiB. What is larger is dear to keep
and, per byte, cheap to clear."""

POOL_SEGMENTS = 64
"""Descriptors a pool keeps at most."""


class Segment:
    """`size` bytes in shared memory. When the last reference to this object goes, `free` gets the
    segment's descriptor, or, without one, the descriptor is closed."""

    __slots__ = ("__weakref__", "_fd", "_free", "capacity", "size")

    def __init__(
        self, fd: int, size: int, capacity: int, free: Callable[[int, int], None] | None = None
    ) -> None:
        """Takes the descriptor over. `free(fd, capacity)` may be called from any thread and must
        not raise."""
        self._fd = fd
        self._free = free
        self.size = size
        self.capacity = capacity

    def __repr__(self) -> str:
        return f"<Segment {self.size} bytes, fd {self._fd}>"

    def fileno(self) -> int:
        """Return the memfd. It stays this object's: duplicate it to keep it."""
        return self._fd

    def write(self, data: bytes | bytearray | memoryview, at: int) -> None:
        """Put `data` at offset `at`. Raises OSError when there is no memory, ValueError when it
        does not fit."""
        view = memoryview(data)
        if at < 0 or at + len(view) > self.capacity:
            raise ValueError(f"{len(view)} bytes at {at} do not fit a segment of {self.capacity}")
        while view:
            done = os.pwrite(self._fd, view, at)
            view, at = view[done:], at + done

    def read(self, into: memoryview, at: int) -> int:
        """Fill `into` from offset `at`, as far as there are bytes; how many it were."""
        return os.preadv(self._fd, [into[: max(0, self.size - at)]], at)

    def abandon(self) -> None:
        """Never use this memory again: another process may still read it. It is freed when that
        process has let go, too."""
        self._free = None

    def close(self) -> None:
        """Close the descriptor now, whoever still has this object. May be called twice, also when a
        signal handler raised in the first call."""
        fd, self._fd = self._fd, -1
        close_fds(fd)

    def __del__(self) -> None:
        if (
            getattr(self, "_fd", -1) < 0
        ):  # a signal handler may have raised in the middle of __init__
            return
        if self._free is not None:
            self._free(self._fd, self.capacity)
        else:
            os.close(self._fd)


class Unfit(Exception):
    """A descriptor that is not a segment; the text says why."""


def create(capacity: int) -> int:
    """Return a fresh memfd of this many bytes, sealed. Raises OSError when there is no descriptor
    left."""
    fd = system_calls.memfd_create(
        "rallypoint", system_calls.MFD_CLOEXEC | system_calls.MFD_ALLOW_SEALING
    )
    try:
        os.ftruncate(fd, capacity)
        fcntl.fcntl(fd, system_calls.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def received(fd: int, size: int, free: Callable[[int, int], None] | None = None) -> Segment:
    """Return a segment of `size` bytes from a descriptor that came from another process; takes it
    over, also when it raises `Unfit`."""
    try:
        try:
            seals = fcntl.fcntl(fd, system_calls.F_GET_SEALS)
        except OSError as error:
            raise Unfit("the descriptor is not a memfd") from error
        if seals & SEALS != SEALS:
            raise Unfit("the memory is not sealed against shrinking and growing")
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
            raise Unfit("the memory cannot be read")
        capacity = os.fstat(fd).st_size
        if not 0 < size <= capacity:
            raise Unfit(f"{size} bytes are announced, the memory has {capacity}")
    except Unfit:
        os.close(fd)
        raise
    return Segment(fd, size, capacity, free)


def capacity_for(size: int) -> int:
    """Return the capacity in which `size` bytes are kept: not every size has its own, so that
    segments fit again."""
    step = max(SMALLEST, 1 << max(0, size.bit_length() - 1)) // ROUNDING
    return max(SMALLEST, -(-size // step) * step)


class Pool:
    """Segments of our own, used again. Any thread may drop one; the methods belong to one
    thread."""

    def __init__(self, keep_bytes: int = POOL_BYTES) -> None:
        self._keep_bytes = keep_bytes
        self._free: dict[int, list[int]] = {}  # capacity: descriptors
        self._bytes = 0
        self._count = 0
        # A segment is dropped wherever its last reference goes, in the middle of `take` if the
        # collector runs there: so that only appends, which is one step for the interpreter.
        self.dropped: deque[tuple[int, int]] = deque()
        self._back = _Back(self.dropped)

    def __repr__(self) -> str:
        return f"<Pool: {self._count} free segments, {self._bytes} bytes>"

    def take(self, size: int) -> Segment:
        """Return a segment for `size` bytes, which are whatever they were before. Raises OSError
        when no descriptor is left."""
        self.tidy()
        capacity = capacity_for(size)
        same = self._free.get(capacity)
        if same:
            self._bytes -= capacity
            self._count -= 1
            return Segment(same.pop(), size, capacity, self._back)
        return Segment(create(capacity), size, capacity, self._back)

    def tidy(self) -> None:
        """Take in what was dropped, and free what is too much. To be called now and then while
        `dropped` is not empty."""
        while self.dropped:
            fd, capacity = self.dropped.popleft()
            if self._count >= POOL_SEGMENTS or self._bytes + capacity > self._keep_bytes:
                os.close(fd)
                continue
            self._free.setdefault(capacity, []).append(fd)
            self._bytes += capacity
            self._count += 1

    def close(self) -> None:
        """Free what is kept; segments that are still in use are freed when they are dropped. May be
        called twice."""
        self._back.closed = True
        self._keep_bytes = 0
        self.tidy()
        for fds in self._free.values():
            for fd in fds:
                os.close(fd)
        self._free.clear()
        self._bytes = self._count = 0


class _Back:
    """`free` of a pool's segments. Not a method of the pool: a segment must not keep a pool alive
    that nobody uses any more."""

    __slots__ = ("_dropped", "closed")

    def __init__(self, dropped: deque[tuple[int, int]]) -> None:
        self._dropped = dropped
        self.closed = False

    def __call__(self, fd: int, capacity: int) -> None:
        if self.closed:
            os.close(fd)
        else:
            self._dropped.append((fd, capacity))


# --- mapped, and opened by processes that may look into this one ---


class Mapped:
    """A segment of our own that is mapped: tensors can live in it. `memory` is the mapping, `inode`
    tells this memfd from any other.

    Others of the same user open it by our pid and descriptor number (`attach`): there is no name
    and no socket, and it ends with its last user, like every memfd.
    """

    __slots__ = ("__weakref__", "capacity", "fd", "inode", "memory")

    def __init__(self, size: int) -> None:
        """`size` bytes or more, all zero. Raises OSError when there is no memory or no
        descriptor."""
        self.capacity = capacity_for(size)
        self.fd = create(self.capacity)
        try:
            self.inode = os.fstat(self.fd).st_ino
            self.memory = mapped(self.fd, self.capacity)
        except BaseException:
            os.close(self.fd)
            self.fd = -1
            raise

    def __repr__(self) -> str:
        return f"<Mapped {self.capacity} bytes, fd {self.fd}>"

    def close(self) -> None:
        """Close the descriptor: no other process can open it any more. A process that has it mapped
        keeps it. May be called twice."""
        fd, self.fd = self.fd, -1
        close_fds(fd)

    def __del__(self) -> None:
        close_fds(getattr(self, "fd", -1))


def mapped(fd: int, size: int, offset: int = 0, *, private: bool = False) -> memoryview:
    """Map `size` bytes of a segment to read and write, for as long as the view, or a tensor in it,
    lives.

    `private`: what is written is this process's alone.
    """
    import ctypes

    address = system_calls.map_memory(fd, size, offset, private=private)
    array = (ctypes.c_char * size).from_address(address)
    weakref.finalize(array, system_calls.unmap_memory, address, size).atexit = False
    return memoryview(array).cast("B")


def attach(pid: int, fd: int, inode: int, size: int) -> memoryview:
    """Return the segment that process `pid` has as descriptor `fd`, mapped, to read and write.
    Raises OSError when that process may not be looked into or is gone, and Unfit when the
    descriptor is something else than what was published: its inode, and at least `size` bytes.
    """
    path = f"/proc/{pid}/fd/{fd}"
    if os.stat(path).st_ino != inode:  # before it is opened: opening a pipe or a device has effects
        raise Unfit(f"descriptor {fd} of pid {pid} is another one by now")
    here = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(here)
        if (
            found.st_ino != inode
            or fcntl.fcntl(here, system_calls.F_GET_SEALS) & SEALS != SEALS
            or found.st_size < size
        ):
            raise Unfit(f"descriptor {fd} of pid {pid} is not the segment that was published")
        return mapped(here, found.st_size)
    finally:
        os.close(here)


def published(pid: int, fd: int, inode: int) -> bool:
    """Tell whether that process still has that segment open; True as well when we may not look."""
    try:
        return os.stat(f"/proc/{pid}/fd/{fd}").st_ino == inode
    except PermissionError:
        return True
    except OSError:
        return False


def scope() -> bytes:
    """Return equal in two processes that can open each other's segments, as far as that can be told
    beforehand: the boot of the machine, the pid namespace and the user. Where /proc does not tell
    (mounted with subset=pid, in a hardened container), nobody's but the caller's."""
    import hashlib

    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return os.urandom(16)
    return hashlib.blake2b(boot + b"%d %d" % (space, os.getuid()), digest_size=16).digest()
