"""System calls that Python has no name for when it was built against an old C library, as conda's
and uv's are.

Such a Python runs on every Linux of the last ten years, and leaves out what its C library did not
have. The kernel beneath it is mostly a newer one, and is asked directly. Numbers:
include/uapi/asm-generic/unistd.h and the tables of the architectures.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import sys
from collections.abc import Callable

P_PIDFD = 3
"""Kind of id for waitid(2): a pidfd."""

MFD_CLOEXEC, MFD_ALLOW_SEALING = 1, 2
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_WRITE = 1, 2, 4, 8

_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434  # everywhere
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "riscv64": 279, "ppc64le": 360, "s390x": 350}

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


def _ask(number: int, *arguments: object) -> int:
    answer = int(_syscall(ctypes.c_long(number), *arguments))
    if answer < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return answer


def _pidfd_open(pid: int) -> int:
    return _ask(_PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0))


def _pidfd_send_signal(pidfd: int, number: int) -> None:
    _ask(_PIDFD_SEND_SIGNAL, ctypes.c_int(pidfd), ctypes.c_int(number), None, ctypes.c_uint(0))


def _memfd_create(name: str, flags: int = MFD_CLOEXEC) -> int:
    machine = os.uname().machine
    if machine not in _MEMFD_CREATE:  # this Python lacks the call, and its number is not known
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return _ask(_MEMFD_CREATE[machine], os.fsencode(name), ctypes.c_uint(flags))


_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def map_memory(fd: int, size: int, offset: int = 0, *, private: bool = False) -> int:
    """Map `size` bytes of a file to read and write; return the address. mmap(2). Raises OSError.

    Python's own `mmap.mmap` keeps a duplicate of the descriptor (until Python 3.13), and unmaps
    when Python ends.
    """
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(address)


def unmap_memory(address: int, size: int) -> None:
    """Undo `map_memory`. munmap(2)."""
    _libc.munmap(address, size)


def signalfd(number: int) -> int:
    """Return a descriptor (close-on-exec, does not wait) that is readable when a signal which this
    thread blocks has come; 128 bytes of it are one such signal. signalfd(2). Raises OSError."""
    mask = (1 << (number - 1)).to_bytes(
        128, sys.byteorder
    )  # sigset_t; the C library passes on what the kernel wants of it
    fd = _libc.signalfd(-1, mask, os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(fd)


pidfd_open: Callable[[int], int] = getattr(os, "pidfd_open", _pidfd_open)
"""A descriptor (close-on-exec) for a process, readable when that has ended. pidfd_open(2), Linux
5.3. Raises OSError."""

pidfd_send_signal: Callable[[int, int], None] = getattr(
    signal, "pidfd_send_signal", _pidfd_send_signal
)
"""Signal exactly the process behind a pidfd. pidfd_send_signal(2), Linux 5.1. Raises OSError."""

memfd_create: Callable[[str, int], int] = getattr(os, "memfd_create", _memfd_create)
"""A file in memory without a name, gone with its last user. memfd_create(2), Linux 3.17. Raises
OSError."""
