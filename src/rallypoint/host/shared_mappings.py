"""Memory that this process shares with others, from the kernel's own list."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from typing import NamedTuple


class Mapping(NamedTuple):
    """A file in memory from address `first` to `end`, beginning at its `offset`. `path`: as the
    kernel calls it."""

    first: int
    end: int
    offset: int
    device: int
    inode: int
    path: str

    def open(self) -> int | None:
        """Return a new descriptor of the mapped file; None when this process has none, and its name
        is gone."""
        for number in os.listdir("/proc/self/fd"):
            fd = int(number)
            try:
                found = os.fstat(fd)
                if (found.st_ino, found.st_dev) == (self.inode, self.device) and fcntl.fcntl(
                    fd, fcntl.F_GETFL
                ) & os.O_ACCMODE == os.O_RDWR:
                    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
            except OSError:  # the one that listed them; or another thread closed it
                continue
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        if os.fstat(fd).st_ino != self.inode:
            os.close(fd)
            return None
        return fd


class Mappings:
    """Memory that this process shares with others, from the kernel's list: read once, when it is
    first needed."""

    def __init__(self) -> None:
        self._found: list[Mapping] | None = None

    def shared_at(self, address: int) -> Mapping | None:
        """Return the shared mapping that an address lies in; None when its memory is this process's
        alone."""
        if self._found is None:
            self._found = list(_shared_mappings())
        return next((one for one in self._found if one.first <= address < one.end), None)


def _shared_mappings() -> Iterator[Mapping]:
    with open("/proc/self/maps", "rb") as file:
        for line in file:
            if line[line.index(b" ") + 4 : line.index(b" ") + 5] != b"s":
                continue
            span, _, offset, device, inode, *path = line.rstrip(b"\n").split(maxsplit=5)
            if inode == b"0" or (
                path and path[0].startswith(b"/dev/") and not path[0].startswith(b"/dev/shm")
            ):
                continue  # of a device
            first, end = (int(one, 16) for one in span.split(b"-"))
            major, minor = (int(one, 16) for one in device.split(b":"))
            yield Mapping(
                first,
                end,
                int(offset, 16),
                os.makedev(major, minor),
                int(inode),
                os.fsdecode(path[0]) if path else "",
            )
