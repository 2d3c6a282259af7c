"""What a log shows where no process of it shows a cause: its watchdogs, its timeouts, and those who
never came.
"""

from __future__ import annotations

import msgspec

from rallypoint.diagnosis import classify, reachability, stacks
from rallypoint.diagnosis.causes import collectives, stops
from rallypoint.diagnosis.causes.case import Case
from rallypoint.diagnosis.consequences import case_of, never_set, then_told
from rallypoint.diagnosis.evidence import JobEvidence
from rallypoint.diagnosis.log_events import Findings, Sign
from rallypoint.diagnosis.rank_kinds import (
    Kind,
    Verdict,
    place_in_order,
)
from rallypoint.diagnosis.report import Report
from rallypoint.world import ranks_phrase


def watched_calls(job: JobEvidence, verdicts: list[Verdict]) -> Report | None:
    """Ranks whose watchdog names another call under the same number."""
    last: dict[int, Verdict] = {}
    for verdict in verdicts:
        if verdict.rank.collective is not None and verdict.rank.rank >= 0:
            last.setdefault(verdict.rank.rank, verdict)
    calls = {
        rank: verdict.rank.collective
        for rank, verdict in last.items()
        if verdict.rank.collective is not None
    }
    for number in sorted({call.sequence for call in calls.values()}):
        groups: dict[tuple[str, int], list[int]] = {}
        for rank, call in calls.items():
            if call.sequence == number:
                groups.setdefault((call.kind, call.elements), []).append(rank)
        kinds = {kind for kind, _ in groups}
        sized = kinds <= _OF_ONE_SIZE and all(elements >= 0 for _, elements in groups)
        named = [{calls[rank].group for rank in ranks} - {""} for ranks in groups.values()]
        apart = any(one and other and not one & other for one in named for other in named)
        if apart or (len(kinds) < 2 and not (len(groups) > 1 and sized)):
            continue
        told = sorted(
            ((tuple(sorted(ranks)), calls[ranks[0]]) for ranks in groups.values()),
            key=lambda one: len(one[0]),
        )
        odd = min(told, key=lambda one: len(one[0]))[0]
        if len({len(ranks) for ranks, _ in told}) == 1:  # as many on each side: none is the odd one
            odd = tuple(sorted(rank for ranks, _ in told for rank in ranks))
        first = min((last[rank] for ranks, _ in told for rank in ranks), key=place_in_order)
        at_fault = [first, *(last[rank] for rank in odd if last[rank] is not first)]
        case = case_of(job, verdicts, at_fault, "certain" if all(named) else "likely")
        return collectives.watched_calls_differ(case, told, odd)
    return None


_OF_ONE_SIZE = {"ALLREDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE", "BROADCAST", "REDUCE"}
"""Collectives to which every rank of the group brings as much; to the others they may rightly bring
different sizes.
"""


def refused_value(job: JobEvidence, log: Findings, verdicts: list[Verdict]) -> Report | None:
    """A value that torch's store refused for its size, and the rank whose connection was reset."""
    refused = next((s for s in log.sightings if s.sign is Sign.TOO_LARGE), None)
    lost = [v for v in verdicts if v.kind in (Kind.LOST, Kind.WAITED)]
    if refused is None or not lost:
        return None
    cut_off = [
        v
        for v in lost
        if v.error is not None
        and v.error.type.endswith("DistNetworkError")
        and "reset by peer" in v.error.message
    ]
    ranks = {v.rank.rank: v for v in cut_off if v.rank.rank >= 0}
    case = case_of(job, verdicts, list(ranks.values()) if len(ranks) == 1 else [], "certain")
    return reachability.too_large_in_log(case, refused)


def not_reached(job: JobEvidence, log: Findings, verdicts: list[Verdict]) -> Report | None:
    """The reason why a connection that was given up did not come about, when the log has it."""
    told = [
        (v, v.error.message if v.error is not None else " ".join(v.rank.said)) for v in verdicts
    ]
    given_up = [
        v
        for v, words in told
        if "timed out" in words or "failed to connect to any network address" in words
    ]
    said = [(s.place.log, s.place.line, s.text) for s in log.sightings if s.sign is Sign.UNREACHED]
    said = said or [
        (v.rank.log, v.rank.order, words) for v, words in told if reachability.attempted(words)
    ]
    reached = reachability.attempted(said[-1][2]) if said else None
    alone = all(s.sign is Sign.UNREACHED for s in log.sightings)
    if reached is None or not (given_up or alone):
        return None
    if alone:
        doubt = "the log does not say whether a later try went well"
        report = reachability.report(case_of(job, verdicts, verdicts[:1], "likely"), reached, None)
        return msgspec.structs.replace(report, why=report.why or doubt, ranks=(), then="")
    report = reachability.report(
        case_of(job, verdicts, given_up[:1], "certain"), reached, given_up[0].error
    )
    place = (f"{said[-1][0]}:{said[-1][1]}",) if said[-1][0] else ()
    return msgspec.structs.replace(report, ranks=(), then="", logs=place)


def absent_in_log(
    job: JobEvidence, log: Findings, verdicts: list[Verdict], *, lost: bool
) -> Report:
    """No rank shows a cause: who never came, as far as the others name it, or that the cause is not
    known.
    """
    hurt = sorted((v for v in verdicts if v.kind in (Kind.LOST, Kind.WAITED)), key=place_in_order)
    stall = next((s for s in log.sightings if s.sign is Sign.STALLED), None)
    if stall is not None and not lost:
        return collectives.stalled(stall)
    twice = next((s for s in log.sightings if s.sign is Sign.SAME_RANK), None)
    if twice is not None:
        return msgspec.structs.replace(
            stops.same_rank(twice), then=then_told(job, verdicts, [], ())
        )
    late = [v for v in hurt if v.kind is Kind.WAITED and v.error is not None]
    by_rank = {classify.not_met(v.error.message): v for v in late if v.error is not None}
    unmet = sorted(by_rank.keys() - {-1} - {v.rank.rank for v in late})
    barred = sorted(
        {
            rank
            for v in late
            if v.error is not None
            for rank in classify.not_at_barrier(v.error.message)
        }
    )
    stopped = sorted({v.rank.rank for v in verdicts if v.kind is Kind.STOPPED})
    named = [v for v in late if v.rank.rank >= 0]
    short = [
        v for v in late if v.error is not None and classify.came_short(v.error.message) is not None
    ]
    if unmet:
        return _missing_in_log(job, unmet, late, by_rank[unmet[0]], "")
    if barred:
        return _missing_in_log(
            job, barred, late, late[0], "why they did not come is not in the log"
        )
    if short and len(short) == len(late):
        most = max(
            short,
            key=lambda v: (
                classify.came_short(v.error.message if v.error is not None else "") or (0, 0)
            ),
        )
        assert most.error is not None
        return collectives.came_short(Case(job, (most.rank,), ""), most.error)
    if late and late[0].error is not None and all(_waits_in_own_line(v) for v in late):
        case = Case(job, tuple(v.rank for v in late), "", "likely")
        return never_set(case, late[0].error)
    if stopped and named:
        were = "was" if len(stopped) == 1 else "were"
        why = f"{ranks_phrase(stopped)} said nothing of it, and {were} alive when the launcher ended the job"
        return _missing_in_log(job, stopped, named, named[0], why)
    first = hurt or [v for v in verdicts if v.rank.ended is not None]
    return stops.unknown_in_log(
        Case(job, tuple(v.rank for v in first), ""), first[0].error if first else None
    )


def _missing_in_log(
    job: JobEvidence, absent: list[int], waited: list[Verdict], first: Verdict, why: str
) -> Report:
    assert first.error is not None
    waiters = Case(job, tuple(v.rank for v in waited), "")
    return collectives.missing_in_log(waiters, tuple(absent), first.error, why)


def _waits_in_own_line(verdict: Verdict) -> bool:
    """Tell whether the program itself waited for a key: the call that raised stands in its own
    line.
    """
    error = verdict.error
    if error is None or not error.frames or stacks.library(error.frames[-1]):
        return False
    return bool(classify.keys_of_program(error.message))
