"""Ranks that came to a call after the ranks that waited there had given up. Pure."""

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
    """Return when the first of `waited` gave up, in seconds since the job's start; 0.0 when none
    did, or when that is not known.
    """
    return min((moment(v) - error.wait[1] for v, error in waited), default=0.0)


def late(
    verdicts: Iterable[Verdict], waited: Iterable[tuple[Verdict, Raised]], slack: float
) -> dict[int, float]:
    """Return, by rank, how many seconds after the first of `waited` gave up it began the same call.
    Only ranks that were later by more than `slack` seconds, and were not in the call before.
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
    """Return the verdict of a late rank, with its stack from when the others gave up. That stack
    may be missing, or be from after the error was caught: then it is the call's stack.
    """
    error = next(reversed(_ends(verdict, calls)), None)
    if error is None or (verdict.rank.stack and error.caught_at is None):
        return verdict
    return replace(verdict, rank=replace(verdict.rank, stack=error.frames))


def _ends(verdict: Verdict, calls: set[str]) -> list[Raised]:
    """Return the errors by which the rank left one of these calls."""
    seen = (*verdict.rank.handled, *filter(None, (verdict.error,)))
    return [error for error in seen if call_of(error) in calls and kind_of(error) in HURT]
