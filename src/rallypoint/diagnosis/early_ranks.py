"""Ranks that had done with the others before these were done with them. Pure."""

from __future__ import annotations

from rallypoint.diagnosis.rank_kinds import HEARD_LATE, Kind, Verdict, moment


def left_before(verdicts: list[Verdict], hurt: list[Verdict], slack: float) -> list[Verdict]:
    """Return the ranks that had done with the others before the first of those that were hurt lost
    them: ended well, come to their end (torch takes a quarter of a second to close down), or with
    their group closed. All that ended well when the others are still there."""
    finished = [v for v in verdicts if v.kind is Kind.FINISHED]
    if len(finished) == len(verdicts):
        return []
    last = min((v.rank.ended.order for v in hurt if v.rank.ended is not None), default=None)
    ended = {
        v.rank.rank
        for v in finished
        if last is None or (v.rank.ended is not None and v.rank.ended.order < last)
    }
    if not hurt:
        return [v for v in finished if v.rank.rank in ended]
    first = hurt[0]
    # A rank that had closed its own group was not hurt by those that closed theirs. Nor was one
    # that waits to join a group: it may be another. But one that has the others' addresses, and
    # loses them, joins the same: a group is open in one rank a moment before it is in all.
    in_it = not 0 < first.rank.closed_at <= moment(first) and (
        first.rank.phase != "joining" or first.kind is Kind.LOST
    )
    done = [(v, _had_done(v, closing=in_it)) for v in verdicts]
    until = moment(first) + HEARD_LATE + slack
    if first.kind is Kind.LOST:  # one that ran on after the loss is not its reason
        ended -= {v.rank.rank for v, at in done if at > until}
    before = [v for v, at in done if v.rank.rank in ended or 0 < at <= moment(first)]
    return before or [v for v, at in done if 0 < at <= until]


def _had_done(verdict: Verdict, *, closing: bool) -> float:
    """Return when a rank that shows no error came to its end, or (`closing`) closed its group; 0
    when neither is known.
    """
    rank = verdict.rank
    well = verdict.kind in (Kind.ALIVE, Kind.STOPPED, Kind.FINISHED)
    if not well or verdict.error is not None or rank.handled or rank.left_at:
        return 0.0
    if closing and rank.closed_at:
        return rank.closed_at
    return rank.phase_at if rank.phase in ("finishing", "done") else 0.0
