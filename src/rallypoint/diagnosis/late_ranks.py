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


def meanwhile(verdict: Verdict, waited: Iterable[tuple[Verdict, Raised]]) -> Verdict:
    """Return the verdict with the timeout that its rank caught while another rank of `waited` waited,
    in place of the call that it made after that; the same verdict when it caught none.

    The traceback of a caught timeout begins in torch. The line that caught it is put before it.
    """
    for one in reversed(verdict.rank.handled):
        met = any(one.at - one.wait[0] / 2 > error.at - error.wait[0] for _, error in waited)
        if met and one.caught_at is not None and kind_of(one) is Kind.WAITED:
            return replace(verdict, error=replace(one, frames=(one.caught_at, *one.frames)))
    return verdict


def named(lost: Iterable[Verdict], error: Raised) -> tuple[dict[int, float], list[Verdict]]:
    """Return, of ranks that monitored_barrier names in `error`, and that lost the others after it:
    by rank, how many seconds after it each came, and the ranks that never came. These lost the
    others in another call, in which they had been all the time, and have its stack.
    """
    late: dict[int, float] = {}
    elsewhere: list[Verdict] = []
    here = ("", _left(error) or "monitored_barrier")
    for verdict in lost:
        own, after = verdict.error, moment(verdict) - error.at
        if after >= 0 and own is not None and _left(own) not in here:
            elsewhere.append(replace(verdict, rank=replace(verdict.rank, stack=own.frames)))
        elif after >= 0:
            late[verdict.rank.rank] = after
    return late, elsewhere


def _left(error: Raised) -> str:
    """Return the call of a library's that an error left, "" when it is not known."""
    return call_of(error) or stacks.called(error.frames)


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
