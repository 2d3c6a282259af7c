"""A long traceback in few lines: what each exception of a chain says, and the program's own frames,
before those of libraries.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rallypoint.diagnosis import stacks
from rallypoint.diagnosis.evidence import Frame

_HEADER = "Traceback (most recent call last):"
_JOINTS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+)(?:, in (?P<function>.*))?$')
# What torch adds to a message for those who look into torch: it says less than any frame of the
# program.
_NATIVE = re.compile(r"^(frame #\d+|Exception raised from |C\+\+ CapturedTraceback|\[W\d)")
# of the named exception's message beyond its first line: torch names there the tensor that does not
# fit
_MESSAGE_PARTS = 2
# parts that are tried for their room: many times what a report has, and a recursion has thousands
_TRIED = 100

_Part = tuple[
    int, ...
]  # indexes of lines that say something together: a frame and its source line, or one line alone


@dataclass
class _Block:
    """One exception of a chain, as Python prints it."""

    header: _Part
    joint: _Part = ()  # the sentence before it, which says how it follows from the one above
    own: list[_Part] = field(default_factory=list)  # the program's frames, outermost first
    others: list[_Part] = field(default_factory=list)  # those of libraries
    words: _Part = ()  # the line that names the exception
    more: list[_Part] = field(
        default_factory=list
    )  # the further lines of its message; what introduces a line together with it


def abridged(lines: Sequence[str], kind: str, most: int, elsewhere: str = "") -> list[str]:
    """At most so many of the lines, those left out counted where they stood. `kind`: the type of
    the exception that a report is about, "" for the last one; `elsewhere`: where the rest stands ("
    in rank1.log:40"), said once. Lines that underline are left to the caller."""
    if len(lines) <= most:
        return list(lines)
    blocks = _blocks(lines)
    if not any(block.words and (block.own or block.others) for block in blocks):
        return _ends(lines, kind, most, elsewhere)
    kept: set[int] = set()
    for part in itertools.islice(_by_weight(blocks, kind, lines), _TRIED):
        wider = kept.union(part)
        if part and sum(1 for _ in _shown(lines, wider, elsewhere)) <= most:
            kept = wider
        if len(kept) >= most - 1:
            break
    return list(_shown(lines, kept, elsewhere))


def _blocks(lines: Sequence[str]) -> list[_Block]:
    found: list[_Block] = []
    joint: _Part = ()
    at = 0
    while at < len(lines):
        line, start = lines[at], at
        at += 1
        block = found[-1] if found else None
        if line == _HEADER:
            found.append(_Block((start,), joint))
            joint = ()
        elif line in _JOINTS:
            joint = (start,)
        elif block is None or not line.strip():
            continue
        elif not block.words and (frame := _FRAME.match(line)) is not None:
            while at < len(lines) and lines[at].startswith(("    ", "  [Previous line")):
                at += 1
            one = Frame(frame["file"], int(frame["line"]), frame["function"] or "")
            (block.others if stacks.library(one) or stacks.hidden(one) else block.own).append(
                tuple(range(start, at))
            )
        elif not block.words:
            block.words = (start,)
        elif block.more and lines[block.more[-1][-1]].endswith(":"):  # it introduces this one
            block.more[-1] += (start,)
        else:
            block.more.append((start,))
    return found


def _by_weight(blocks: list[_Block], kind: str, lines: Sequence[str]) -> Iterator[_Part]:
    """The parts of a traceback, those first that a reader misses most."""
    whole = [i for i, block in enumerate(blocks) if block.words]
    at = next((i for i in whole if kind and lines[blocks[i].words[0]].startswith(kind)), whole[-1])
    named, causes, later = (
        blocks[at],
        [blocks[i] for i in reversed(whole) if i < at],
        [blocks[i] for i in whole if i > at],
    )
    yield named.words
    yield blocks[0].header
    yield from (block.words for block in causes)
    yield from named.own[-1:]
    yield from (block.joint for block in [named, *causes][: len(causes)])
    yield from (block.own[-1] for block in causes if block.own)
    message = list(itertools.takewhile(lambda part: not _NATIVE.match(lines[part[0]]), named.more))
    yield from message[:_MESSAGE_PARTS]
    yield from named.own[-2:-1]
    yield from named.own[:1]
    yield from reversed(named.own)
    yield from named.others[-1:]
    yield from (block.words for block in later)
    yield from (part for block in causes for part in reversed(block.own))
    yield from reversed(named.others)
    yield from message


def _shown(lines: Sequence[str], kept: set[int], elsewhere: str) -> Iterator[str]:
    left_out: list[str] = []
    for i in range(len(lines) + 1):
        if i < len(lines) and i not in kept:
            left_out.append(lines[i])
            continue
        if any(line.strip() for line in left_out) and i < len(
            lines
        ):  # what follows the last line that is kept is not spoken of
            number = len(left_out)
            yield f"... {number} more line{'s' * (number > 1)}{elsewhere}"
            elsewhere = ""
        left_out.clear()
        if i < len(lines):
            yield lines[i]


def _ends(lines: Sequence[str], kind: str, most: int, elsewhere: str) -> list[str]:
    """Of something else than a traceback of frames, as of a group of exceptions, the beginning and
    the end.
    """
    end = next(
        (i for i, line in enumerate(lines) if kind and line.startswith(kind)), len(lines) - 1
    )
    head = 3 if end > 5 else 1
    tail = lines[max(head, end - (most - head - 2)) : end + 1]
    return [*lines[:head], f"... {len(lines) - head - len(tail)} more lines{elsewhere}", *tail]
