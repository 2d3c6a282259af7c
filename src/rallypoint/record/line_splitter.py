"""Cut a rank's bytes into lines, updates and parts. No file, no clock.

A rank writes bytes; what people read are lines. `LineSplitter` decides where one ends, what is only
an update of the line before (a progress bar), and when an unfinished line has waited long enough to
be shown. `log_pump.py` does the reading and writing around it.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

PART_AFTER = 1.0
"""Seconds until an unfinished line is shown. Long enough that a line written in pieces comes out
whole, short enough that whoever waits at an `input()` prompt sees it."""

UPDATE_EVERY = 0.5
"""Seconds between two shown updates of one stream. tqdm writes ten a second; eyes and log viewers
need two."""

THINNED_TO = 60.0
"""Seconds between two updates of a stream at most, where they are thinned: often enough to see that
a job of days goes on."""

THINNED_BY = 60.0
"""Divisor where updates are thinned: the time between two of them is the time since the first one,
divided by this: two a second for half a minute, one in ten seconds after ten minutes."""

UPDATE_SETTLES = 0.05
"""Seconds before a first update is shown: the `\\n` of a `\\r\\n`, or the rest of the bar, is on
its way by then.
"""

LINE_LIMIT = 1 << 20
"""Bytes of an unfinished line that are kept. A longer one flows through as it comes, so memory is
bounded by this per stream; 1 MiB is more than any line that a person reads."""

INTERRUPTED = re.compile(rb"\[W[^\n]* TCPStore\.cpp:\d+\] [^\n]*: Interrupted system call\r?\n")
"""Lines that torch writes when a signal ends its pause between two attempts to connect; the stack
follows, and an empty line."""


class Piece(NamedTuple):
    """Something to show.

    lines: whole lines, the data ends with a newline. part: text of a line that goes on. update:
    what the current line shows now, without a newline; only the newest counts. `continues`: the
    data starts in the middle of a line of which a part was given out before.
    """

    kind: Literal["lines", "part", "update"]
    data: bytes
    continues: bool = False


class LineSplitter:
    """One stream of one rank. Feed it bytes and the time; it gives back what to show, in order.

    A `\\r` that no `\\n` follows ends an update: of all updates of one line only the last is part of
    a "lines" piece. Bytes are never decoded.
    """

    def __init__(self, thins: bool = False) -> None:
        """`thins`: updates come ever more rarely, for a reader that keeps each of them."""
        self._thins = thins
        self._first_update: float | None = None
        # the unfinished line; with updates in it: the last whole one, \r, the one being written
        self._pending = b""
        self._open = False  # a part of the unfinished line was given out
        self._shown: bytes | None = None  # the update given out last for this line
        self._shown_at = float("-inf")
        self.due: float | None = None
        """Time when `expire` will have something to give, if nothing is fed before; None: never."""
        self._flowing = False  # the unfinished line is too long to be kept: given out as it comes

    def feed(self, data: bytes, now: float) -> list[Piece]:
        """Take bytes that the rank wrote; return what became whole by them."""
        if b"\r" in data or b"\r" in self._pending:
            return self._feed_updates(data, now)
        head, newline, rest = data.rpartition(b"\n")
        if not newline:
            return self._wait(self._pending + data, now)
        pieces = [self._whole(self._pending + head + b"\n")]
        self._pending = b""
        return pieces + self._wait(rest, now)

    def expire(self, now: float) -> list[Piece]:
        """Return what has waited long enough by now."""
        if self.due is None or now < self.due:
            return []
        self.due = None
        if b"\r" not in self._pending:
            return [self._part()]
        update = _last_update(self._pending)
        if update == self._shown:
            return []
        self._shown, self._shown_at = update, now
        return [Piece("update", update)]

    def finish(self) -> list[Piece]:
        """End the stream: an unfinished line is given out with a newline added. May be fed again
        after."""
        if not self._pending and not self._open:
            return []
        text, self._pending = _last_update(self._pending), b""
        return [self._whole(text + b"\n")]

    def _feed_updates(self, data: bytes, now: float) -> list[Piece]:
        text = (self._pending + data).replace(b"\r\n", b"\n")
        pieces = []
        if self._open:
            # What was shown of this line cannot be taken back (a log keeps it): the updates start a
            # line of their own.
            first = text.find(b"\r")
            if b"\n" not in text[:first] and first >= 0:
                pieces.append(self._whole(text[:first] + b"\n"))
                text = text[first:]
        head, newline, rest = text.rpartition(b"\n")
        if newline:
            pieces.append(
                self._whole(b"".join(_last_update(line) + b"\n" for line in head.split(b"\n")))
            )
        self._pending = b""
        return pieces + self._wait(rest, now)

    def _wait(self, text: bytes, now: float) -> list[Piece]:
        """Keep the beginning of a line, or let it flow when it is too long."""
        if b"\r" in text:
            done, _, current = text.rpartition(b"\r")
            text = _last_update(done) + b"\r" + current
            if len(text) <= LINE_LIMIT:
                if self.due is None:
                    self.due = max(now + UPDATE_SETTLES, self._shown_at + self._every(now))
                self._pending = text
                return []
            text = current
        if not text:
            return []
        if not self._pending and not self._flowing:
            self.due = now + PART_AFTER
        self._pending = text
        if self._flowing or len(text) > LINE_LIMIT:
            self._flowing = True
            return [self._part()]
        return []

    def _every(self, now: float) -> float:
        """Return seconds from one update to the next."""
        if self._first_update is None:
            self._first_update = now
        return (
            min(THINNED_TO, max(UPDATE_EVERY, (now - self._first_update) / THINNED_BY))
            if self._thins
            else UPDATE_EVERY
        )

    def _part(self) -> Piece:
        piece = Piece("part", self._pending, self._open)
        self._open, self._pending, self.due = True, b"", None
        return piece

    def _whole(self, data: bytes) -> Piece:
        piece = Piece("lines", data, self._open)
        self._open = self._flowing = False
        self._shown = self.due = None
        return piece


class Interruptions:
    """Takes out of a stream what torch writes when a signal of ours interrupts its wait for the
    store. Nothing else is ever taken."""

    def __init__(self) -> None:
        self._inside = False  # such a block has begun
        self._mid_line = False  # the stream stands in the middle of a line
        self._taking = False  # which is taken out

    def feed(self, data: bytes) -> bytes:
        """Return what is to be shown of these bytes."""
        if not self._inside and not self._taking and b"Interrupted system call" not in data:
            self._mid_line = not data.endswith(b"\n") if data else self._mid_line
            return data
        kept = []
        for line in re.findall(rb"[^\n]*\n|[^\n]+", data):
            if not self._mid_line:
                self._taking = self._takes(line)
            if not self._taking:
                kept.append(line)
            self._mid_line = not line.endswith(b"\n")
            self._taking = self._taking and self._mid_line
        return b"".join(kept)

    def _takes(self, line: bytes) -> bool:
        if INTERRUPTED.fullmatch(line):
            self._inside = True
            return True
        taken = self._inside and (
            not line.strip()
            or line.startswith((b"Exception raised from ", b"frame #", b"<omitting python frames>"))
        )
        self._inside = taken and bool(line.strip())
        return taken


def _last_update(line: bytes) -> bytes:
    """Return what a line shows after its updates: the last that is not empty (`50%\\r60%\\r` shows
    `60%`).
    """
    if b"\r" not in line:
        return line
    return next((update for update in reversed(line.split(b"\r")) if update), b"")
