"""Descriptors that are closed with the last reference to them, whatever exception came in between."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Self


class Held:
    """Some descriptors with one owner. Ctrl-C comes between any two lines: what is put in here in the line that makes it is not lost."""

    def __init__(self, fds: Iterable[int] = ()) -> None:
        self.fds = list(fds)

    def __repr__(self) -> str:
        return f"<Held {self.fds}>"

    def add(self, fd: int) -> int:
        """Take one more; returned as it is."""
        self.fds.append(fd)
        return fd

    def give(self) -> list[int]:
        """All of them, to whoever calls: they are his to close."""
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
