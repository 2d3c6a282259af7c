"""Composer where lines of many ranks become one text: a terminal, a pipe or a log. Composing only;
nothing is written here.

A `Sink` knows which stream has begun the line in which its text stands, so that a line is continued
without a prefix when nothing came between, and broken off when something did. A `Screen` is a sink
for people; on a terminal it also keeps an area at the bottom, one row for each rank that is in the
middle of a progress bar and one for the launcher, which is rewritten in place and is erased before
anything else is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from rallypoint.record.line_splitter import Piece

MOVEMENT = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-ln-~]|\x1b[78DEHMc]")
"""Control sequences other than colours (`m`): they move the cursor or erase, which several ranks
cannot do on one screen."""

CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)

MOST_ROWS = 12
"""Rows of the area at the bottom: half of a small terminal. Further ranks are counted in one more
row."""


class Sink:
    """A text that several streams write to. `take()` hands over what has been composed since the
    last time."""

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self._open: object = None  # the stream that has begun the line in which the text stands

    def show(self, stream: object, prefix: bytes, piece: Piece) -> None:
        """Add a piece of a stream's text."""
        if piece.kind == "lines":
            self._lines(stream, prefix, piece.data, piece.continues)
        elif piece.kind == "part":
            self._part(stream, prefix, piece.data)

    def raw(self, stream: object, data: bytes) -> None:
        """Add bytes as they are."""
        self.break_line(unless=stream)
        self.out.append(data)
        self._open = None if data.endswith(b"\n") else stream

    def break_line(self, unless: object = None) -> None:
        """End the line that somebody else has begun."""
        if self._open is not None and self._open is not unless:
            self.out.append(b"\n")
            self._open = None

    def take(self) -> bytes:
        """Return what has been composed, once."""
        text = b"".join(self.out)
        self.out.clear()
        return text

    def _lines(self, stream: object, prefix: bytes, data: bytes, continues: bool) -> None:
        if self._open is not None and self._open is stream:
            head, _, data = data.partition(b"\n")
            self.out.append(head + b"\n")
            self._open = None
        elif continues and data.startswith(b"\n"):
            data = data[1:]  # the line was broken off already, and there is no more of it
        if data:
            self.break_line()
            # One replace for thousands of lines: this is what keeps the pump cheap.
            self.out.append(
                (prefix + data[:-1].replace(b"\n", b"\n" + prefix) + b"\n") if prefix else data
            )

    def _part(self, stream: object, prefix: bytes, data: bytes) -> None:
        self.break_line(unless=stream)
        self.out.append(data if self._open is not None else prefix + data)
        self._open = stream


class Screen(Sink):
    """A sink for people. `size` is None when it is no terminal, else a function that gives
    (columns, rows)."""

    def __init__(self, size: Callable[[], tuple[int, int]] | None = None) -> None:
        super().__init__()
        self._size = size
        self._updates: dict[
            object, tuple[bytes, bytes]
        ] = {}  # stream -> prefix, what its line shows now
        self._live = ""
        self._drawn = 0  # rows of the area that stand on the terminal
        self._stale = False  # the area on the terminal is not what it should be

    @property
    def terminal(self) -> bool:
        """Tell whether this is a terminal that can be rewritten in place."""
        return self._size is not None

    def show(self, stream: object, prefix: bytes, piece: Piece) -> None:
        if piece.kind == "update":
            self._update(stream, prefix, piece.data)
            return
        shown = self._updates.pop(stream, None)
        if shown is not None:
            self._stale = True
            if (
                not self.terminal
                and piece.kind == "lines"
                and piece.data.startswith(shown[1] + b"\n")
            ):
                piece = piece._replace(data=piece.data[len(shown[1]) + 1 :])  # stands there already
        if self.terminal and b"\x1b" in piece.data:
            piece = piece._replace(data=without_movements(piece.data))
        super().show(stream, prefix, piece)

    def live(self, text: str) -> None:
        """Set the launcher's row ("": none). Nothing on what is no terminal."""
        if self.terminal and text != self._live:
            self._live, self._stale = text, True

    def take(self) -> bytes:
        text = super().take()
        if not self.terminal or not (text or self._stale):
            return text
        erased = self._erase()
        self._stale = False
        rows = [] if self._open is not None else self._rows()
        self._drawn = len(rows)
        return erased + text + "\r\n".join(rows).encode(errors="replace")

    def _update(self, stream: object, prefix: bytes, data: bytes) -> None:
        if self.terminal:
            self._stale = True
            if data.strip():
                self._updates[stream] = (prefix, data)
            else:
                self._updates.pop(stream, None)
        elif data.strip():
            self._lines(stream, prefix, data + b"\n", False)
            self._updates[stream] = (prefix, data)

    def _erase(self) -> bytes:
        if not self._drawn:
            return b""
        return b"\r\x1b[2K" + b"\x1b[A\x1b[2K" * (self._drawn - 1)

    def _rows(self) -> list[str]:
        assert self._size is not None
        columns, height = self._size()
        by_rank = sorted(self._updates.values(), key=lambda update: (len(update[0]), update[0]))
        bars = [(prefix + data).decode(errors="replace") for prefix, data in by_rank]
        most = max(1, min(MOST_ROWS, height - 3))
        if len(bars) > most:
            bars[most - 1 :] = [f"... and {len(bars) - most + 1} more"]
        return [fit(row, columns - 1) for row in (*bars, self._live) if row]


def without_movements(data: bytes) -> bytes:
    """Return the text without control sequences that move the cursor or erase; colours stay, and
    are switched off at the end."""
    data = MOVEMENT.sub(b"", data)
    if b"\x1b[" not in data:
        return data
    return data[:-1] + b"\x1b[0m\n" if data.endswith(b"\n") else data


def plain(data: bytes) -> str:
    """Return bytes of a rank as text that is safe to print: no control sequences; what is not UTF-8
    is replaced."""
    return CONTROL.sub("", data.decode(errors="replace"))


def fit(text: str, columns: int) -> str:
    """Return as much of a text as fits into one row, without control sequences, wide characters
    counted twice."""
    import unicodedata

    kept, used = [], 0
    for char in CONTROL.sub("", text).replace("\t", " "):
        if unicodedata.combining(char):
            kept.append(char)
            continue
        used += 2 if unicodedata.east_asian_width(char) in "WF" else 1
        if used > columns:
            break
        kept.append(char)
    return "".join(kept)
