"""Files in memory: they have no name, and are gone with their last user."""

from __future__ import annotations

import os

from rallypoint.host import system_calls

# One read or write moves 2 GiB at most (read(2)). Offsets are shared with whoever has the file, and
# so are not used here.


def create(label: str, content: bytes = b"") -> int:
    """Return a memfd (close-on-exec) with this content. Raises OSError."""
    return _filled(system_calls.memfd_create(label, system_calls.MFD_CLOEXEC), content)


def create_sealed(label: str, content: bytes) -> int:
    """Return a memfd with this content, which no receiver can change any more. Read it with
    `os.pread`: its offset is shared."""
    import fcntl

    flags = system_calls.MFD_CLOEXEC | system_calls.MFD_ALLOW_SEALING
    fd = _filled(system_calls.memfd_create(label, flags), content)
    seals = (
        system_calls.F_SEAL_WRITE
        | system_calls.F_SEAL_GROW
        | system_calls.F_SEAL_SHRINK
        | system_calls.F_SEAL_SEAL
    )
    fcntl.fcntl(fd, system_calls.F_ADD_SEALS, seals)
    return fd


def _filled(fd: int, content: bytes) -> int:
    try:
        replace(fd, content)
    except BaseException:
        os.close(fd)
        raise
    return fd


def replace(fd: int, content: bytes) -> None:
    """Put this in the place of what a file holds."""
    rest, at = memoryview(content), 0
    while at < len(rest):
        at += os.pwrite(fd, rest[at:], at)
    os.ftruncate(fd, at)


def content(fd: int) -> bytes:
    """Return all that a file holds."""
    parts, at = [], 0
    while part := os.pread(fd, max(1, os.fstat(fd).st_size - at), at):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def taken(fd: int) -> bytes:
    """Return all that a file holds, and close it."""
    try:
        return content(fd)
    finally:
        os.close(fd)
