"""A diagnosis as data."""

from __future__ import annotations

from typing import Literal

import msgspec

TEMPORARY = 75
"""Exit status of EX_TEMPFAIL of sysexits.h: the same may go well a minute later."""

Confidence = Literal["certain", "likely", "possible"]


class Help(msgspec.Struct, frozen=True):
    """One thing to do: an imperative, and the line to type (may be empty)."""

    sentence: str
    command: str = ""


class Moment(msgspec.Struct, frozen=True):
    """One line of the timeline: seconds since the job's start, who, what."""

    at: float
    who: str  # "rank 2", "launcher"
    what: str


class Said(msgspec.Struct, frozen=True):
    """Somebody's words, verbatim."""

    who: str  # "rank 2"
    lines: tuple[str, ...]


class Report(msgspec.Struct, frozen=True):
    """One cause, with what shows it and what to do. Rendering comes last (`render.py`)."""

    code: str
    headline: str
    where: str = ""
    why: str = ""
    confidence: Confidence = "certain"
    evidence: tuple[str, ...] = ()
    then: str = ""
    timeline: tuple[Moment, ...] = ()
    said: tuple[Said, ...] = ()
    help: tuple[Help, ...] = ()
    logs: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()  # the ranks at fault
    here: str = ""  # of several nodes: the part in it of the node that shows this
    exit_status: int = 1  # what the launcher leaves with when this is the first cause
