"""Bytes of a log to the lines that are worth reading, at the speed of a search. No file, no clock.

A log of a week has a billion lines, and the ten that matter. `Sifter` looks for the words that
failures are told in, hands out those lines with their numbers, and only counts the rest; while a
reader has something open (a traceback), it hands out every line.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from rallypoint.diagnosis import render
from rallypoint.diagnosis.report import Report

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

# One of these is in every line that tells of a failure. Endings of words, so that their first
# letters are few and rare ones decide: the search runs at about 90 MB/s where
# "Error|error|Exception|exception|..." does 20. One branch for each first letter, and no new letter
# without need: each costs a tenth of the speed.
_WORTH = re.compile(
    rb"r(?:r(?:or|no|Image)|e(?:start|turn code)|mina|ash(?<=crash))|a(?:iled|ilure|nnot|tchdog|lled(?<=[Ss]talled)|ble to(?<=nable to)"
    rb"|ult(?<=tation fault)|p(?<=ce trap))|i(?:lled|gnal|nst(?<=(?:al|re) inst)|med out|ed(?<=\bdied)|cted(?<=Evicted)"
    rb"|nvalid (?:pointer|size|next))"
    rb"|e(?:mory|empted|d symbol| detected in|xit|fused|nied|xpectedly|tected an attempt|PullBackOff)"
    rb"|x(?:ception|ecution has been|ceeded (?:wallc|MEM)|it (?=[1-9] )|it ?[Cc]ode)"
    rb"|s(?:sert|tuck: |mashing|ed too many h|h: connect to)|n(?:terrupt|terpreter|ew process before|itializing d|consistent [0-9]"
    rb"|recognized opt|valid opt|known opt)|T(?:raceback|hread (?:\w+ \((?:active|idle)|0x))|S(?:IG)"
    rb"|C(?:ANCELLED|ould not resolve|trl-C|ommunication with the)"
    rb"|o(?:om|gs   /|t found|t enough slots| such file|rt(?<=bort)| NVIDIA driver| module named)|O(?:OM)"
    rb"|W(?:ARN)|A(?:ILED|TAL|BORT)|R(?:oot Cause|MINA|ROR[]_: ])|c(?:ore d|ommunication with|orrupt)|D(?:uplicate GPU)"
    rb"|\xc9(?:rror)"
)
# Fields of a JSON object: the first of these holds the line, and each of those holds a traceback.
_MESSAGES = ("log", "message", "msg", "textPayload", "event")
_TRACES = ("exception", "exc_info", "exc_text", "traceback", "stack_trace", "error.stack_trace")
_TYPED = (
    ("exception_type", "exception_message"),
    ("exception.type", "exception.message"),
    ("error.type", "error.message"),
)  # OpenTelemetry, and Elastic's schema
_RANKS = ("rank", "global_rank", "RANK")
# Quotation marks that a page makes of those of a log.
_QUOTES = str.maketrans("\u201c\u201d\u2018\u2019", "\"\"''")
# Colours with the escape character written out, by syslog or a terminal.
_SPELLED = re.compile(r"(?:#033|\^\[|\\(?:x1b|033|u001b|e))\[[\d;]{0,20}m")
_DIGITS = b"0123456789"
_MARKS = {  # the longer one first: it begins with the shorter
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


class Line(NamedTuple):
    """A line, or one state of a line that redrew itself, as people see it: no colours, no
    controls.
    """

    number: int  # counts from 1, as editors do
    text: str


class Sifter:
    """A filter for one log: bytes go in, the lines worth reading come out, in order.

    `attentive`: hand out every line until it is False again; the reader sets it between two lines.
    `passed`: lines of the last bytes that were not handed out since the line before.
    """

    def __init__(self) -> None:
        self.attentive = False
        self.number = 1  # of the line that is begun
        self.passed: list[bytes] = []
        self._before: deque[tuple[int, bytes]] = deque(maxlen=BEFORE)
        self._body = b""  # of the line that was handed out last
        self._rest = b""  # of a line whose end is still to come
        self._too_long = False  # the start of that line was handed out
        self._dull: set[bytes] = set()

    def call_dull(self) -> None:
        """Pass from now on what differs from the line that was handed out last by its numbers
        alone: it says nothing.
        """
        if not self.attentive and len(self._body) <= SHAPE_BYTES:
            if len(self._dull) >= MOST_SHAPES:
                self._dull.clear()
            self._dull.add(self._body.translate(None, _DIGITS))

    def feed(self, chunk: bytes) -> Iterator[Line]:
        """Hand out what is worth reading in the lines that are whole by now."""
        self.passed.clear()
        *whole, last = (self._rest + chunk).split(b"\n")
        *redrawn, self._rest = last.split(b"\r")
        for states in (*(line.split(b"\r") for line in whole), redrawn):
            for body in states:
                if self._too_long:
                    self._too_long = False  # the rest of a line whose start was handed out
                elif body and (self.attentive or self._tells(body)):
                    self._body = body
                    for text in shown(body[:LINE_LIMIT]):
                        yield Line(self.number, text)
                        self.passed.clear()
                    self._before.append((self.number, body))
                elif body:
                    self.passed.append(body)
                    self._before.append((self.number, body))
            self.number += 1
        self.number -= 1  # the last one has not ended
        if len(self._rest) > LINE_LIMIT:  # a line without an end: its start is enough
            if not self._too_long:
                yield Line(self.number, _cleaned(self._rest[:LINE_LIMIT]))
            self._too_long, self._rest = True, b""

    def _tells(self, body: bytes) -> bool:
        if _WORTH.search(body, 0, LINE_LIMIT) is None:
            return False
        return len(body) > SHAPE_BYTES or body.translate(None, _DIGITS) not in self._dull

    def close(self) -> Iterator[Line]:
        """Hand out the last line, when it has no newline."""
        if self._rest:
            yield from self.feed(b"\n")

    def before(self, count: int = BEFORE) -> list[Line]:
        """Up to `count` lines before the one that was handed out last, oldest first."""
        return [Line(number, shown(body)[-1]) for number, body in list(self._before)[-count:]]


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
    text = _SPELLED.sub("", text.translate(_QUOTES))
    return text.rstrip() if text.isprintable() else render.plain(text)


def _unwrapped(data: bytes) -> list[str]:
    """Read the lines that a container runtime, a collector of logs or a logger has put into a JSON
    object, with torch's mark of the rank where the object has a field for it; or the reports that
    rallypoint writes with `--error-format json`.
    """
    try:
        told = json.loads(data.decode(errors="replace"))
    except ValueError:
        return []
    if "exit_status" in told and "reports" in told:
        with contextlib.suppress(msgspec.ValidationError):
            reports = msgspec.convert(told["reports"], list[Report])
            return render.text(reports).split("\n")
    fields = [next((name for name in _MESSAGES if isinstance(told.get(name), str)), ""), *_TRACES]
    rank = next((told[name] for name in _RANKS if isinstance(told.get(name), int)), None)
    mark = "" if rank is None else f"[rank{rank}]: "
    texts = [told[name].rstrip("\n") for name in fields if isinstance(told.get(name), str)]
    if not any(told.get(name) for name in _TRACES):
        pairs = [(told.get(kind), told.get(words)) for kind, words in _TYPED]
        texts += [f"{kind}: {words}" for kind, words in pairs if kind and words]
    return [mark + line for text in texts for line in text.split("\n")]


def as_utf8(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """UTF-16 and UTF-32 (what PowerShell's `>` writes) to UTF-8; everything else as it is, without
    a byte order mark. Nulls are left out.
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
        text = decoder.decode(chunk).encode("utf-8", "replace") if decoder is not None else chunk
        yield text.replace(b"\0", b"")


def _encoding(head: bytes) -> str:
    return next((name for mark, name in _MARKS.items() if head.startswith(mark)), "")


def is_text(chunk: bytes) -> bool:
    """Tell whether the start of a file looks like something that was written for people."""
    # What was truncated while it was written begins with a hole, and a file on NFS may have some.
    head = (chunk.replace(b"\0", b"") if b"\0" * 64 in chunk else chunk)[:4096]
    if not head or _encoding(head):
        return True
    # A progress bar has many backspaces. Random bytes have one control in eleven, which once was
    # taken for a text.
    controls = sum(byte < 7 or 13 < byte < 27 or 27 < byte < 32 for byte in head)
    return controls <= 0.05 * len(head)
