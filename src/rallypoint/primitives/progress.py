"""How far an average is, said when it takes long."""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.clock import Clock

FIRST = 5.0
"""Seconds before the first line. A round of 1 GB takes less."""


class Progress:
    """One round's. Says something after 5, 10, 20, ... seconds, if it is asked then."""

    def __init__(self, what: str, say: Callable[[str, str], None]) -> None:
        self._what = what
        self._say = say
        self._clock = Clock()
        self._next = FIRST
        self._doing = ""
        self._done = self._all = 0

    def begin(self, doing: str, size: int) -> None:
        """A part of it begins, of `size` bytes."""
        self._doing, self._done, self._all = doing, 0, size

    def more(self, size: int) -> None:
        """So many bytes more are done."""
        self._done += size
        if self._clock.elapsed() >= self._next:
            share = 100 * self._done // max(1, self._all)
            self._tell("info", f"{self._doing}, {self._done / 1e6:.0f} of {self._all / 1e6:.0f} MB ({share} %)")

    def waiting(self, stage: str, whom: Callable[[], str]) -> None:
        """My part is done, and somebody else's is not."""
        if self._clock.elapsed() >= self._next:
            self._tell("warning", f"waiting for {whom()} ({stage})")

    def _tell(self, level: str, text: str) -> None:
        seconds = self._clock.elapsed()
        while self._next <= seconds:
            self._next *= 2
        self._say(level, f"{self._what}: {text}, after {seconds:.1f} s")
