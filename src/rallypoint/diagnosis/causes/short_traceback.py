"""A long traceback in few lines: what each exception of a chain says, and the program's own frames,
before those of libraries.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from rallypoint.diagnosis import stacks
from rallypoint.diagnosis.evidence import Frame
from rallypoint.diagnosis.pattern import Pattern

_HEADER = "Traceback (most recent call last):"
_JOINTS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_FRAME = Pattern(r'^  File "(?P<file>.*)", line (?P<line>\d+)(?:, in (?P<function>.*))?$')
# of the named exception's message beyond its first line: torch names there the tensor that does not
# fit
_MESSAGE_PARTS = 2
# parts that are tried for their room: many times what a report has, and a recursion has thousands
_TRIED = 100


def abridged(lines: Sequence[str], kind: str, most: int, elsewhere: str = "") -> list[str]:
    """Return at most so many of the lines, those left out counted where they stood.

    `kind`: the type of the exception that a report is about, "" for the last one; `elsewhere`:
    where the rest stands (" in rank1.log:40"), said once. Lines that underline are left to the
    caller.
    """
    if len(lines) <= most:
        return list(lines)
    kept: set[int] = set()
    for part in itertools.islice(_by_weight(lines, kind), _TRIED):
        wider = kept.union(part)
        if len(_shown(lines, wider, elsewhere)) <= most:
            kept = wider
    # Of something else than a traceback of frames the beginning and the end.
    kept = kept or {0, 1, 2, *range(len(lines) - most + 4, len(lines))}
    return _shown(lines, kept, elsewhere)


def _by_weight(lines: Sequence[str], kind: str) -> Iterator[Sequence[int]]:
    """Yield the parts of a traceback, indexes of lines that belong together, those first that a
    reader misses most: what each exception says, and the program's own innermost frames.
    """
    own: list[range] = []
    others: list[range] = []
    names: list[int] = []  # lines that name an exception of the chain
    inner: list[range] = []  # the program's innermost frame for each of these
    for i, line in enumerate(lines):
        if (frame := _FRAME.match(line)) is not None:
            end = next((j for j in range(i + 1, len(lines)) if not lines[j].startswith("    ")), i)
            one = Frame(frame["file"], int(frame["line"]), frame["function"] or "")
            foreign = stacks.library(one) or stacks.hidden(one, first=not own)
            (others if foreign else own).append(range(i, end))
        elif i and lines[i - 1].startswith("  ") and line[:1].strip() and line not in _JOINTS:
            names.append(i)
            inner += own[-1:]
    if not names:
        return
    end = next((i for i in names if kind and lines[i].startswith(kind)), names[-1])
    causes = [part for part in inner if part.start < end]
    # A line that introduces the next one says nothing alone.
    message = [i for i in range(end + 1, len(lines)) if lines[i].strip() and lines[i][-1] != ":"]
    yield [end, names[-1]]
    yield [i for i, line in enumerate(lines) if line == _HEADER][:1]
    yield from ([i] for i in reversed(names) if i < end)
    yield from causes[-1:]
    yield from ([i] for i in range(end) if lines[i] in _JOINTS)
    yield from causes
    for i in itertools.takewhile(lambda i: not _NATIVE.match(lines[i]), message[:_MESSAGE_PARTS]):
        yield range(end, i + 1)
    frames = [part for part in own if part.start < end]
    yield from frames[-2:-1]
    yield from frames[:1]
    yield from reversed(frames)
    yield from others[-1:]
    yield from reversed(others)


# Lines that torch adds to a message for those who look into torch: they say less than any frame of
# the program.
_NATIVE = Pattern(r"^(frame #\d+|Exception raised from |C\+\+ CapturedTraceback|\[W\d)")


def _shown(lines: Sequence[str], kept: set[int], elsewhere: str) -> list[str]:
    """Return the lines that are kept, with a count of those left out before each of them, and of
    what is left out of the last message.
    """
    shown: list[str] = []
    before = -1
    last = max(kept, default=before) + 1
    rest = [*itertools.takewhile(lambda line: not _NATIVE.match(line), lines[last:])]
    for i in (*sorted(kept), *([last + len(rest)] if any(map(str.strip, rest)) else ())):
        number = i - before - 1
        if any(map(str.strip, lines[before + 1 : i])):
            shown.append(f"... {number} more line{'s' * (number > 1)}{elsewhere}")
            elsewhere = ""
        shown += lines[i : i + 1] if i in kept else ()
        before = i
    return shown
