"""What a log shows where no process of it shows a cause: its watchdogs, its timeouts, and those who
never came.
"""

from __future__ import annotations

from msgspec.structs import replace

from rallypoint.diagnosis import classify, reachability, stacks
from rallypoint.diagnosis.bystanders import then_told
from rallypoint.diagnosis.causes import collectives, exceptions, stops
from rallypoint.diagnosis.causes.case import Case, was
from rallypoint.diagnosis.consequences import Scene
from rallypoint.diagnosis.log_events import Findings, Sign
from rallypoint.diagnosis.rank_kinds import Kind, Verdict, place_in_order
from rallypoint.diagnosis.report import Report
from rallypoint.world import ranks_phrase


def watched_calls(scene: Scene) -> Report | None:
    """Tell of ranks whose watchdog names another call under the same number."""
    watched: dict[int, dict[int, Verdict]] = {}  # by number, then by rank
    seen: set[int] = set()
    for verdict in scene.verdicts:
        rank = verdict.rank
        if rank.collective is not None and rank.rank >= 0 and rank.rank not in seen:
            seen.add(rank.rank)
            watched.setdefault(rank.collective.sequence, {})[rank.rank] = verdict
    for _, by_rank in sorted(watched.items()):
        groups: dict[tuple[str, int], list[int]] = {}
        named: dict[tuple[str, int], set[str]] = {}  # the process groups, where the log has them
        calls = {r: v.rank.collective for r, v in by_rank.items() if v.rank.collective is not None}
        for number, call in calls.items():
            key = (call.kind, call.elements)
            groups.setdefault(key, []).append(number)
            named.setdefault(key, set()).update({call.group} - {""})
        kinds = {kind for kind, _ in groups}
        sized = kinds <= _OF_ONE_SIZE and all(elements >= 0 for _, elements in groups)
        known = [names for names in named.values() if names]
        apart = any(not one & other for one in known for other in known)
        if apart or not (len(kinds) > 1 or (len(groups) > 1 and sized)):
            continue
        told = [(tuple(sorted(ranks)), calls[ranks[0]]) for ranks in groups.values()]
        told.sort(key=lambda one: len(one[0]))
        odd = told[0][0]
        if len(odd) == len(told[-1][0]):  # as many on each side: none is the odd one
            odd = tuple(sorted(by_rank))
        first = min(by_rank.values(), key=place_in_order)
        at_fault = [first, *(by_rank[rank] for rank in odd if by_rank[rank] is not first)]
        sure = all(named.values())
        return collectives.watched_calls_differ(
            scene.case(at_fault, "certain" if sure else "likely"), told, odd
        )
    return None


_OF_ONE_SIZE = {"ALLREDUCE", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE", "BROADCAST", "REDUCE"}
"""Collectives to which every rank of the group brings as much; to the others they may rightly bring
different sizes.
"""


def refused_value(scene: Scene, log: Findings) -> Report | None:
    """Tell of a value that torch's store refused for its size, and of the rank whose connection was
    reset.
    """
    refused = next((s for s in log.sightings if s.sign is Sign.TOO_LARGE), None)
    if refused is None or not scene.hurt:
        return None
    cut_off = {
        v.rank.rank: v
        for v, error in scene.errors
        if v.rank.rank >= 0
        and error.type.endswith("DistNetworkError")
        and "reset by peer" in error.message
    }
    at_fault = list(cut_off.values()) if len(cut_off) == 1 else []
    return reachability.too_large_in_log(scene.case(at_fault, "certain"), refused)


def not_reached(scene: Scene, log: Findings) -> Report | None:
    """Tell the reason why a connection that was given up did not come about, when the log has
    it.
    """
    told = [
        (v, v.message if v.error is not None else " ".join(v.rank.said)) for v in scene.verdicts
    ]
    gave_up = ("timed out", "failed to connect to any network address")
    given_up = [v for v, words in told if any(one in words for one in gave_up)]
    unreached = [s for s in log.sightings if s.sign is Sign.UNREACHED]
    said = [(s.place.log, s.place.line, s.text) for s in unreached]
    said = said or [
        (v.rank.log, v.rank.order, words) for v, words in told if reachability.attempted(words)
    ]
    if not said:
        return None
    file, line, words = said[-1]
    reached = reachability.attempted(words)
    alone = bool(log.only_unreached())
    if reached is None or not (given_up or alone):
        return None
    if alone:
        report = reachability.report(scene.case(scene.verdicts[:1]), reached, None)
        doubt = "the log does not say whether a later try went well"
        return replace(report, why=report.why or doubt, ranks=(), then="")
    case = scene.case(given_up[:1], "certain")
    report = reachability.report(case, reached, given_up[0].error)
    return replace(report, ranks=(), then="", logs=(f"{file}:{line}",) if file else ())


def absent_in_log(scene: Scene, log: Findings) -> Report:
    """Tell which rank never came, as far as the others name it, or that the cause is not known."""
    job, verdicts, late = scene.job, scene.verdicts, scene.waited
    for sighting in log.sightings:
        if sighting.sign is Sign.STALLED and not scene.hurt:
            return collectives.stalled(sighting)
        if sighting.sign is Sign.SAME_RANK:
            return replace(stops.same_rank(sighting), then=then_told(job, verdicts, [], ()))
    waiters = Case(job, tuple(v.rank for v, _ in late), "")
    by_rank = {classify.not_met(error.message): error for _, error in late}
    unmet = sorted(by_rank.keys() - {-1} - {v.rank.rank for v, _ in late})
    barred = sorted({rank for _, error in late for rank in classify.not_at_barrier(error.message)})
    if unmet:
        return collectives.missing_in_log(waiters, tuple(unmet), by_rank[unmet[0]], "")
    if barred:
        why = "why they did not come is not in the log"
        return collectives.missing_in_log(waiters, tuple(barred), late[0][1], why)
    short = [(classify.came_short(error.message), v.rank, error) for v, error in late]
    if late and all(counted is not None for counted, _, _ in short):
        _, rank, error = max(short, key=lambda one: one[0] or (0, 0))
        return collectives.came_short(Case(job, (rank,), ""), error)
    # The program itself waited for a key: the call that raised stands in its own line.
    if late and all(
        error.frames
        and not stacks.library(error.frames[-1])
        and classify.keys_of_program(error.message)
        for _, error in late
    ):
        return exceptions.never_set(replace(waiters, confidence="likely"), late[0][1])
    named = [(v.rank, error) for v, error in late if v.rank.rank >= 0]
    stopped = {v.rank.rank: v.rank for v in verdicts if v.kind is Kind.STOPPED}
    if stopped and named:
        waiters = Case(job, tuple(rank for rank, _ in named), "")
        absent = tuple(sorted(stopped))
        why = f"{ranks_phrase(absent)} said nothing of it, and {was(list(stopped.values()))} alive when the launcher ended the job"
        return collectives.missing_in_log(waiters, absent, named[0][1], why)
    first = scene.hurt or [v for v in verdicts if v.rank.ended is not None]
    case = Case(job, tuple(v.rank for v in first), "")
    return stops.unknown_in_log(case, first[0].error if first else None)
