"""Bytes of a log to the lines that are worth reading, at the speed of a search. No file, no clock.

A log of a week has a billion lines, and the ten that matter. `Sifter` looks for the words that
failures are told in, hands out those lines with their numbers, and only counts the rest; while a
reader has something open (a traceback), it hands out every line.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rallypoint.diagnosis import render

LINE_LIMIT = 1 << 16
"""Bytes of one line that are read: more than any message. What a line has beyond that is passed
over, so memory stays bounded.
"""

BEFORE = 12
"""Lines that may be asked for from before a line: what a process said last."""

MOST_SHAPES = 20_000
"""Kinds of lines that are known to say nothing: a program has some hundreds, and each takes up to
`SHAPE_BYTES`.
"""

SHAPE_BYTES = 400  # of a line without its digits; longer lines are read each time

_BEFORE_BYTES = (
    4096  # kept of what was fed before, so that a line at the start of a chunk has lines before it
)

# One of these is in every line that tells of a failure. Endings of words, so that their first
# letters are few and rare ones decide: the search runs at about 90 MB/s where
# "Error|error|Exception|exception|..." does 20. One branch for each first letter, and no new letter
# without need: each costs a tenth of the speed.
_WORTH = re.compile(
    rb"r(?:r(?:or|no)|e(?:start|turn code)|mina|ash(?<=crash))|a(?:iled|ilure|nnot|tchdog|lled(?<=[Ss]talled)|ble to(?<=nable to))"
    rb"|i(?:lled|gnal|med out|ed(?<=\bdied)|cted(?<=Evicted))|e(?:mory|xit|fused|nied|xpectedly)|x(?:ception)|s(?:sert)"
    rb"|n(?:terrupt|itializing d)|T(?:raceback)|S(?:IG)|C(?:ANCELLED|ould not resolve)|o(?:om|rt(?<=bort)| NVIDIA driver)|O(?:OM)"
    rb"|W(?:ARN)|A(?:ILED|TAL|BORT)|R(?:oot Cause|MINA)|c(?:ore d|ommunication with)|D(?:uplicate GPU)"
    rb"|\xc9(?:rror)|\x00"
)
_END = re.compile(rb"[\r\n]")
# Fields of a JSON object: the first of these holds the line, and each of those holds a traceback.
_MESSAGES = ("log", "message", "msg", "textPayload", "event")
_TRACES = ("exception", "exc_info", "exc_text", "traceback", "stack_trace", "error.stack_trace")
_RANKS = ("rank", "global_rank", "RANK")
_DIGITS = b"0123456789"


class Line(NamedTuple):
    """A line, or one state of a line that redrew itself, as people see it: no colours, no
    controls.
    """

    number: int  # counts from 1, as editors do
    text: str


class Sifter:
    """One log. Feed it bytes; it gives the lines worth reading, in order.

    `attentive`: hand out every line until it is False again; the reader sets it between two lines.
    `passed`: lines of what was fed last that were only counted since the line before.
    """

    def __init__(self) -> None:
        self.attentive = False
        self.passed = 0
        self._passed_from = 0
        self.number = 1  # of the line that begins at `_at`
        self._data = b""
        self._at = 0
        self._too_long = False
        self._line_start = self._line_ended = (
            0  # of the line that was handed out last: its offset, and whether a newline ended it
        )
        self._shape = b""
        self._dull: set[bytes] = set()

    def call_dull(self) -> None:
        """The line that was handed out last says nothing: those that differ from it by their
        numbers alone are passed from now on.
        """
        if self._shape:
            if len(self._dull) >= MOST_SHAPES:
                self._dull.clear()
            self._dull.add(self._shape)

    def feed(self, chunk: bytes) -> Iterator[Line]:
        """What is worth reading in the lines that are whole by now."""
        rest = self._data[self._at :]
        kept = self._data[max(self._at - _BEFORE_BYTES, 0) : self._at]
        self._data, self._at = kept + rest + chunk, len(kept)
        self.passed, self._passed_from, self._line_start = 0, self._at, self._at
        last = max(self._data.rfind(b"\n"), self._data.rfind(b"\r"))
        yield from self._until(last + 1)
        if (
            len(self._data) - self._at > LINE_LIMIT
        ):  # one line without an end: what was read of it is enough
            if not self._too_long:
                yield self._line(self._at, self._at + LINE_LIMIT)
            self._too_long = True
            self._data, self._at, self._line_start = b"", 0, 0

    def close(self) -> Iterator[Line]:
        """The last line, when it has no newline."""
        self.passed, self._passed_from, self._line_start = 0, self._at, self._at
        yield from self._until(len(self._data))

    @property
    def passed_bytes(self) -> bytes:
        """The lines that `passed` counts."""
        return (
            self._data[self._passed_from : max(self._line_start, self._passed_from)]
            if self.passed
            else b""
        )

    @property
    def ended(self) -> bool:
        """Whether everything that was fed is handed out or passed, and no line is begun: the number
        is then that of none.
        """
        return self._at >= len(self._data) and (
            not self._data or self._data.endswith((b"\n", b"\r"))
        )

    def before(self, count: int = BEFORE) -> list[Line]:
        """Up to `count` lines before the one that was handed out last, oldest first; fewer near the
        start of what is still in memory.
        """
        found: list[Line] = []
        end, number = self._line_start, self.number - self._line_ended
        while end > 0 and len(found) < count:
            start = (
                max(self._data.rfind(b"\n", 0, end - 1), self._data.rfind(b"\r", 0, end - 1)) + 1
            )
            if self._data[end - 1 : end] == b"\n":
                number -= 1
            if start < end - 1 and (start or number <= 1):
                found.append(Line(number, shown(self._data[start : end - 1])[-1]))
            end = start
        return found[::-1]

    def _until(self, end: int) -> Iterator[Line]:
        while self._at < end:
            start = self._at
            if not self.attentive:
                found = _WORTH.search(self._data, start, end)
                at = found.start() if found else end
                start = (
                    max(self._data.rfind(b"\n", start, at), self._data.rfind(b"\r", start, at)) + 1
                    if found
                    else end
                )
                if start < self._at:
                    start = self._at
                if start > self._at:
                    passed = self._data.count(b"\n", self._at, start)
                    self.number += passed
                    self.passed += passed
                    self._at = start
                    self._too_long = False  # what was passed ends with the end of a line
                if found is None:
                    self._line_start = self._at
                    return
            close = _END.search(self._data, start, end)
            stop = close.end() if close else end
            self._at = stop
            ended = self._data[stop - 1 : stop] == b"\n"
            body = self._data[start : stop - 1] if close else self._data[start:stop]
            if not self.attentive and not self._too_long:
                self._shape = body.translate(None, _DIGITS) if len(body) <= SHAPE_BYTES else b""
                if self._shape in self._dull:
                    self.number += ended
                    self.passed += ended
                    self._line_start = stop
                    continue
            else:
                self._shape = b""
            self._line_start, self._line_ended = start, int(ended)
            number, self.number = self.number, self.number + ended
            if self._too_long:
                self._too_long = False  # the rest of a line whose start was read
            elif body:
                for text in shown(body[:LINE_LIMIT]):
                    yield Line(number, text)
                    self.passed, self._passed_from = 0, stop

    def _line(self, start: int, stop: int) -> Line:
        self._line_start, self._line_ended = start, 0
        return Line(self.number, _cleaned(self._data[start:stop]))


def shown(data: bytes) -> list[str]:
    """Clean a line as people see it. A JSON object, or a traceback that a collector of logs has put
    into one line, becomes several.
    """
    if data.startswith(b'{"') and (inner := _unwrapped(data)):
        return [text for line in inner for text in shown(line.encode())]
    if b"call last):\\n" in data:
        lines = data.replace(b'\\"', b'"').split(b"\\n")
        return [_cleaned(line) for line in lines]
    return [_cleaned(data)]


def _cleaned(data: bytes) -> str:
    """Remove colours and controls. What is no UTF-8 is taken for Latin-1, in which every byte is a
    letter.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    text = text.replace("\0", "")
    return text.rstrip() if text.isprintable() else render.plain(text)


def _unwrapped(data: bytes) -> list[str]:
    """Read the lines that a container runtime, a collector of logs or a logger has put into a JSON
    object, with torch's mark of the rank where the object has a field for it.
    """
    try:
        told = json.loads(data.decode(errors="replace"))
    except ValueError:
        return []
    fields = [next((name for name in _MESSAGES if isinstance(told.get(name), str)), ""), *_TRACES]
    rank = next((told[name] for name in _RANKS if isinstance(told.get(name), int)), None)
    mark = "" if rank is None else f"[rank{rank}]: "
    texts = (told[name].rstrip("\n") for name in fields if isinstance(told.get(name), str))
    return [mark + line for text in texts for line in text.split("\n")]


def as_utf8(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """UTF-16 and UTF-32 (what PowerShell's `>` writes) to UTF-8; everything else as it is, without
    a byte order mark.
    """
    decoder: codecs.IncrementalDecoder | None = None
    first = True
    for chunk in chunks:
        if first and chunk:
            first = False
            encoding = _encoding(chunk)
            if encoding:
                decoder = codecs.getincrementaldecoder(encoding)("replace")
            chunk = chunk.removeprefix(codecs.BOM_UTF8)
        yield decoder.decode(chunk).encode("utf-8", "replace") if decoder is not None else chunk


def _encoding(head: bytes) -> str:
    for mark, name in (
        (codecs.BOM_UTF32_LE, "utf-32"),
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
    ):
        if head.startswith(mark):
            return name
    even, odd = head[:4096:2].count(0), head[1:4096:2].count(0)
    half = len(head[:4096]) // 2
    if half >= 8 and odd > 0.7 * half and even < 0.1 * half:
        return "utf-16-le"
    return "utf-16-be" if half >= 8 and even > 0.7 * half and odd < 0.1 * half else ""


def is_text(head: bytes) -> bool:
    """Whether the start of a file looks like something that was written for people."""
    if not head or _encoding(head):
        return True
    # A progress bar has many backspaces. Random bytes have one control in eleven, which once was
    # taken for a text.
    controls = sum(byte < 7 or 13 < byte < 27 or 27 < byte < 32 for byte in head)
    return controls <= 0.05 * len(head)
