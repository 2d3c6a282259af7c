"""Form of a line by which a launcher, a scheduler, a shell or a library tells something."""

from __future__ import annotations

from typing import NamedTuple

from rallypoint.diagnosis.log_events import Sign
from rallypoint.diagnosis.pattern import Pattern

NAMES = "Killed|Segmentation fault|Aborted|Bus error|Terminated|Floating point exception|Illegal instruction|已杀死|段错误|已放弃"
SERVICE = "the service that ran it"
ARGPARSE = "argparse"


class KnownLine(NamedTuple):
    """A line by which a launcher, a scheduler or a shell tells something; its groups have the
    facts.
    """

    # that a line must hold before the pattern is tried: a search for it is fifty times quicker
    word: str
    words: Pattern
    sign: Sign = Sign.ENDED
    by: str = ""  # the one that says so
    first: bool = False  # of the process that failed first, as it says
    signal: int = 0  # where no group names it
    code: int = 0  # the same


def line(
    word: str,
    words: str,
    sign: Sign = Sign.ENDED,
    by: str = "",
    *,
    first: bool = False,
    signal: int = 0,
    code: int = 0,
) -> KnownLine:
    """Make a line of a table from the text of its pattern."""
    return KnownLine(word, Pattern(words), sign, by, first, signal, code)
