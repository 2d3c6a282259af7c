"""A line that says how far the reading of a long log is."""

from __future__ import annotations

import os
import sys

from rallypoint.cli.output import write_err
from rallypoint.clock import Clock
from rallypoint.units import size

PROGRESS_AFTER = 1.0
"""Seconds of reading until a terminal is told how far it is: what is done by then needs no
progress.
"""

PROGRESS_EVERY = 0.5
"""Seconds between two states of that line: people read no faster."""


class Progress:
    """Line on a terminal's stderr while a long log is read: how far it is. It is gone when the
    report comes.
    """

    def __init__(self) -> None:
        self._clock = Clock()
        self._next = self._clock.monotonic() + PROGRESS_AFTER
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            write_err("\r\x1b[K")

    def at(self, name: str, done: int, whole: int) -> None:
        """Say that `done` bytes of `whole` were read; 0: not known."""
        now = self._clock.monotonic()
        if now < self._next or not (sys.stderr and sys.stderr.isatty()):
            return
        from rallypoint.diagnosis.render import plain

        of = f" of {size(whole)}" if whole else ""
        write_err(f"\r\x1b[Kreading {plain(os.path.basename(name))}: {size(done)}{of}")
        self._shown, self._next = True, now + PROGRESS_EVERY
