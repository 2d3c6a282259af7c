"""Ranks that came to a call when those that waited for them there had given up. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from rallypoint.diagnosis import stacks
from rallypoint.diagnosis.evidence import Raised
from rallypoint.diagnosis.rank_kinds import HURT, Kind, Verdict, kind_of, moment


def call_of(error: Raised) -> str:
    """Return the call in which the rank met the others, "" when it is not known."""
    return error.call or stacks.waits_in_ddp(error.frames)


def gave_up(waited: Iterable[tuple[Verdict, Raised]]) -> float:
    """Return when the first of those that waited gave up; 0 when none did, or nobody knows."""
    return min((moment(v) - error.wait[1] for v, error in waited), default=0.0)


def late(
    verdicts: Iterable[Verdict], waited: Iterable[tuple[Verdict, Raised]], slack: float
) -> dict[int, float]:
    """Return the ranks that began the call of those that waited after these had given up, and how
    many seconds later. A rank that had been in it before is none of them: it tried again.
    """
    waited = list(waited)
    calls, since, found = {call_of(error) for _, error in waited} - {""}, gave_up(waited), {}
    for verdict in verdicts:
        began = [
            error.at - error.wait[0] if error.wait[0] else 0.0 for error in _ends(verdict, calls)
        ]
        if not began and verdict.rank.phase == "joining" and "init_process_group" in calls:
            began = [verdict.rank.phase_at]
        if verdict.kind in (Kind.LOST, Kind.ALIVE, Kind.STOPPED) and began:
            found[verdict.rank.rank] = min(began) - since
    return {rank: after for rank, after in found.items() if after > slack}


def stood(verdict: Verdict, calls: set[str]) -> Verdict:
    """Return what a late rank shows with the stack of where it was when the others gave up.

    It was asked before it came, or perhaps after it had caught the error: then no more is known
    than the line of the call.
    """
    error = next(reversed(_ends(verdict, calls)), None)
    if error is None or (verdict.rank.stack and error.caught_at is None):
        return verdict
    return replace(verdict, rank=replace(verdict.rank, stack=error.frames))


def _ends(verdict: Verdict, calls: set[str]) -> list[Raised]:
    """Return by which errors the rank left one of these calls."""
    seen = (*verdict.rank.handled, *filter(None, (verdict.error,)))
    return [error for error in seen if call_of(error) in calls and kind_of(error) in HURT]
