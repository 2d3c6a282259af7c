"""Ranks that wait for others with an exception of their own in hand, which nobody has seen: a
`finally` calls a barrier. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rallypoint.diagnosis import classify, stacks
from rallypoint.diagnosis.causes.wording import named
from rallypoint.diagnosis.evidence import Frame, Raised
from rallypoint.diagnosis.rank_kinds import HURT, Kind, Verdict, kind_of

MOST_LINES = 3  # about such ranks, in a report on a job that somebody stopped


def in_hand(error: Raised | None, root: str = "") -> str:
    """Return `KeyError: 'x', raised at train.py:12 in step`; "" for none, and for one that speaks
    of a lost peer.
    """
    if error is None or kind_of(error) is not Kind.RAISED:
        return ""
    frame = stacks.own_frame(error.frames)
    return named(error) + (f", raised at {stacks.describe(frame, root)}" if frame else "")


def apart(
    places: Mapping[int, tuple[Frame, ...]], holding: Collection[int]
) -> tuple[tuple[int, ...], bool]:
    """Return which of the ranks `holding` an exception wait in a line in which no other rank is,
    and whether all others wait, too. A job that trains in an except clause has its ranks in the
    same lines.
    """
    calls = {
        rank: (frame.file, frame.line)
        for rank, frames in places.items()
        if stacks.waits(frames) and (frame := stacks.own_frame(frames)) is not None
    }
    others = [rank for rank in places if rank not in holding]
    there = {(frame.file, frame.line) for rank in others for frame in places[rank]}
    found = (rank for rank in holding if rank in calls and calls[rank] not in there)
    return tuple(found) if others else (), calls.keys() >= set(others)


def _apart(verdicts: list[Verdict]) -> tuple[tuple[int, ...], bool]:
    """Return the same of the ranks of a job. Those that have failed stood where their error left a
    call, or where they crashed.
    """
    living = [v for v in verdicts if v.kind in (Kind.ALIVE, Kind.STOPPED) and not v.rank.ended]
    places = {
        v.rank.rank: v.error.frames
        if v.error is not None and v.kind in HURT
        else v.rank.stack or stacks.main_frames(v.rank.stack_text)
        for v in verdicts
    }
    return apart(places, [v.rank.rank for v in living if in_hand(v.rank.handles)])


def with_causes(verdicts: list[Verdict]) -> list[Verdict]:
    """Blame such ranks when all others waited elsewhere until their time was up."""
    if not any(v.kind is Kind.WAITED or classify.says_waited(v.rank.said) for v in verdicts):
        return verdicts
    ranks, sure = _apart(verdicts)
    return [
        Verdict(v.rank, Kind.LEAVING, v.rank.handles) if sure and v.rank.rank in ranks else v
        for v in verdicts
    ]


def seen(verdicts: list[Verdict], root: str) -> tuple[str, ...]:
    """Return a line for each such rank of a job that somebody stopped."""
    ranks, sure = _apart(verdicts)
    likely = "likely" if sure else "possible"
    lines = [
        f"{told(one.rank, stacks.place(one.stack, root), in_hand(one.handles, root))} ({likely})"
        for one in (v.rank for v in verdicts)
        if one.rank in ranks
    ]
    return tuple(lines[:MOST_LINES])


def told(rank: int, place: str, held: str) -> str:
    """Return a sentence about such a rank. `held`: what it has in hand."""
    return f"rank {rank} came to {place} while it handled {held}; the others were elsewhere"
