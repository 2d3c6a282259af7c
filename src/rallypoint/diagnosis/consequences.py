"""What the ranks show together when none of them shows a cause, and what became of those that are
not at fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from rallypoint.diagnosis import classify, reachability, stacks
from rallypoint.diagnosis.causes import case as cases
from rallypoint.diagnosis.causes import collectives, endings, exceptions, rendezvous, stops
from rallypoint.diagnosis.causes.case import Case
from rallypoint.diagnosis.evidence import Frame, JobEvidence, Meeting, Raised
from rallypoint.diagnosis.rank_kinds import (
    HEARD_LATE,
    Kind,
    Verdict,
    moment,
    place_in_order,
)
from rallypoint.diagnosis.report import Confidence, Report
from rallypoint.world import ranks_phrase


def of_consequences(job: JobEvidence, verdicts: list[Verdict]) -> Report:
    """No rank shows a cause of its own: what the ranks show together, or that the cause is not
    known.
    """
    hurt = sorted((v for v in verdicts if v.kind in (Kind.LOST, Kind.WAITED)), key=place_in_order)
    meetings = _meetings(job)
    if meetings:
        ranks = {rank for _, numbers in meetings for rank in numbers}
        return rendezvous.address_differs(
            case_of(job, verdicts, [v for v in verdicts if v.rank.rank in ranks], "certain"),
            meetings,
        )
    stale = [v for v in hurt if v.error is not None and _by_stale_file(v)]
    if stale:
        meeting, error = stale[0].rank.meeting, stale[0].error
        assert meeting is not None
        assert error is not None
        return rendezvous.stale_file(
            case_of(job, verdicts, stale, "likely"), error, meeting.address
        )
    if (unmet := _unmet(job, verdicts) or _store_lost(job, verdicts, hurt)) is not None:
        return unmet
    beyond = [(v, counted) for v in hurt if (counted := _waits_for_more(v, job)) is not None]
    if beyond and beyond[0][0].error is not None:
        verdict, counted = beyond[0]
        return rendezvous.store_waits(
            case_of(job, verdicts, [verdict], "likely"), beyond[0][0].error
        )
    left = _left_before(verdicts, hurt)
    if left:
        hid = [v for v in left if v.error is not None]
        error = hid[0].error if hid else None
        if error is not None and len(hid) == len(left):
            return exceptions.swallowed(case_of(job, verdicts, hid, "likely"), error)
        return endings.left_early(
            case_of(job, verdicts, [v for v in left if v.error is None], "likely")
        )
    if (calls := different_collectives(verdicts)) and any(v.kind is Kind.WAITED for v in hurt):
        return collectives.collective_mismatch(case_of(job, verdicts, verdicts, "likely"), calls)
    waited = [v for v in hurt if v.kind is Kind.WAITED and v.error is not None]
    if (named := _named_as_missing(job, verdicts, waited)) is not None:
        return named
    absent = [
        v for v in verdicts if v.kind in (Kind.ALIVE, Kind.STOPPED) and v.rank.phase != "joining"
    ]
    if (
        waited
        and waited[0].error is not None
        and len(waited) == len(hurt) == len(verdicts)
        and all(_waits_for_own_key(v) for v in waited)
    ):
        return never_set(case_of(job, verdicts, waited, "likely"), waited[0].error)
    if waited and waited[0].error is not None and _waits_alone(waited, absent):
        case = Case(
            job,
            tuple(v.rank for v in waited),
            then_told(job, verdicts, waited, (), acquit=False),
            "likely",
        )
        return never_set(case, waited[0].error)
    if waited and waited[0].error is not None and absent and len(waited) == len(hurt):
        case = Case(
            job,
            tuple(v.rank for v in absent),
            then_told(job, verdicts, [*absent, *waited], ()),
            "likely",
        )
        return collectives.missing(case, [v.rank for v in waited], waited[0].error)
    first = (
        hurt[:1]
        or [
            v
            for v in verdicts
            if v.kind is Kind.STOPPED and v.rank.ended is not None and not v.rank.sent
        ][:1]
    )
    # Who is alive may be at fault: an exception that is still on its way through a `finally` has
    # not been seen.
    case = Case(
        job,
        tuple(v.rank for v in first),
        then_told(job, verdicts, first, (), acquit=False),
        "possible" if first else "certain",
    )
    error = first[0].error if first else None
    if error is not None and classify.nccl_gave_up(error):
        return exceptions.raised(msgspec.structs.replace(case, confidence="likely"), error)
    return stops.unknown(case, error)


def _waits_for_more(verdict: Verdict, job: JobEvidence) -> tuple[int, int] | None:
    """How many processes came to a TCPStore, and how many it waited for, of one that waited for
    more than the job has.
    """
    counted = classify.came_short(verdict.error.message) if verdict.error is not None else None
    own = verdict.error is not None and not verdict.error.call
    return counted if counted is not None and own and counted[1] > job.world_size else None


def _named_as_missing(
    job: JobEvidence, verdicts: list[Verdict], waited: list[Verdict]
) -> Report | None:
    """Those whom `monitored_barrier` names: its rank 0 asks each of the others, and what those say
    in turn is that rank 0 has gone.
    """
    for one in waited:
        numbers = classify.not_at_barrier(one.error.message) if one.error is not None else ()
        missing = [
            v for v in verdicts if v.rank.rank in numbers and v.kind in (Kind.ALIVE, Kind.STOPPED)
        ]
        if one.error is not None and missing and job.world_size == len(verdicts):
            others = [v for v in verdicts if v.kind in (Kind.WAITED, Kind.LOST)]
            case = Case(
                job,
                tuple(v.rank for v in missing),
                then_told(job, verdicts, [*missing, *others], ()),
                "likely",
            )
            return collectives.missing(case, [v.rank for v in others], one.error)
    return None


def _waits_alone(waited: list[Verdict], absent: list[Verdict]) -> bool:
    """Whether these waited for a key of the store, while all the others stand in a collective and
    wait for them.
    """
    own = all(
        v.error is not None and not v.error.call and "keys:" in v.error.message for v in waited
    )
    return own and bool(absent) and all(stacks.collective(v.rank.stack) is not None for v in absent)


def never_set(case: Case, error: Raised) -> Report:
    """A wait for a key of torch's store, while nobody shows that it was to set that key."""
    report, keys = exceptions.raised(case, error), classify.keys_of_program(error.message)
    if not keys:
        return report
    named = ", ".join(f'"{key}"' for key in keys)
    what = f"nobody set {named}" if len(keys) == 1 else f"{named} were not all set"
    return msgspec.structs.replace(report, why=f"{what} in time, and no rank shows who was to")


def _waits_for_own_key(verdict: Verdict) -> bool:
    """Whether it waited for a key that no call of torch's waits for."""
    error = verdict.error
    return error is not None and not error.call and bool(classify.keys_of_program(error.message))


def different_collectives(verdicts: list[Verdict]) -> dict[int, tuple[str, Frame]]:
    """By rank the collective that it stood in or that its error left, and the program's line; {}
    when any was elsewhere, or all in one.

    The error's own name for the call is not enough: of `all_gather_object` torch names the
    `all_gather` inside.
    """
    found: dict[int, tuple[str, Frame]] = {}
    for verdict in verdicts:
        frames = (
            verdict.error.frames
            if verdict.error is not None
            else verdict.rank.stack
            if verdict.rank.ended is None
            else ()
        )
        call, own = stacks.collective(frames), stacks.own_frame(frames)
        if call is None or own is None or stacks.library(own):
            return {}
        found[verdict.rank.rank] = call[0], own
    return found if len({name for name, _ in found.values()}) > 1 else {}


def case_of(
    job: JobEvidence, verdicts: list[Verdict], at_fault: list[Verdict], confidence: Confidence
) -> Case:
    return Case(
        job, tuple(v.rank for v in at_fault), then_told(job, verdicts, at_fault, ()), confidence
    )


def _meetings(job: JobEvidence) -> list[tuple[Meeting, tuple[int, ...]]]:
    """The different places at which ranks of the whole job's group look for each other. Only calls
    of one turn are to meet: a rank that has gone on to its next group looks elsewhere for good
    reason."""
    found: dict[int, dict[str, tuple[Meeting, list[int]]]] = {}
    for rank in job.ranks:
        meeting = rank.meeting
        if (
            meeting is None
            or not meeting.address
            or meeting.method == "store"
            or meeting.world_size not in (-1, job.world_size)
        ):
            continue
        place = re.sub(r"^(localhost|127\.0\.0\.1|\[?::1\]?):", "loopback:", meeting.address)
        found.setdefault(meeting.turn, {}).setdefault(place, (meeting, []))[1].append(rank.rank)
    differing = next((places for _, places in sorted(found.items()) if len(places) > 1), {})
    return [(meeting, tuple(ranks)) for meeting, ranks in differing.values()]


def _unmet(job: JobEvidence, verdicts: list[Verdict]) -> Report | None:
    """Ranks that could not reach their meeting point, and what was seen there. Not while rank 0,
    who should listen there, is elsewhere.
    """
    reached = job.reached
    if reached is None or not reachability.explains(reached):
        return None
    said = [
        v
        for v in verdicts
        if v.error is not None
        and reachability.where(v.error, v.rank.meeting) == (reached.host, reached.port)
    ]
    silent = [v for v in verdicts if v not in said and reachability.waits_at(v.rank, reached)]
    late = [
        v
        for v in verdicts
        if v.kind in (Kind.ALIVE, Kind.STOPPED) and v.rank.rank == 0 and v.rank.meeting is None
    ]
    met = any(
        rank.meeting is not None for rank in job.ranks
    )  # else they are not looked into, and nobody knows who has come
    if not (said or silent) or (late and met and reached.outcome == "refused"):
        return None
    at_fault = sorted(said, key=place_in_order) + silent
    return reachability.report(
        case_of(job, verdicts, at_fault, "certain"), reached, said[0].error if said else None
    )


def _store_lost(job: JobEvidence, verdicts: list[Verdict], hurt: list[Verdict]) -> Report | None:
    """Ranks whose connection to a store of torch's broke, and what was seen where it was."""
    reached = job.reached
    if reached is None:
        return None
    at = (reached.host, reached.port)
    broken = [
        v for v in hurt if v.error is not None and reachability.store_of(v.error, v.rank.said) == at
    ]
    error = broken[0].error if broken else None
    return (
        reachability.store_lost(case_of(job, verdicts, broken, "certain"), reached, error)
        if error is not None
        else None
    )


def _by_stale_file(verdict: Verdict) -> bool:
    meeting, error = verdict.rank.meeting, verdict.error
    if meeting is None or error is None or not meeting.method.startswith("file:"):
        return False
    return (
        error.call in ("", "init_process_group")
        and "connectFullMesh" in error.message
        and "refused" in error.message
    )


def _left_before(verdicts: list[Verdict], hurt: list[Verdict]) -> list[Verdict]:
    """Ranks that had done with the others before the first of those that were hurt lost them: ended
    well, come to their end (torch takes a quarter of a second to close down), or with their group
    closed. All that ended well when the others are still there."""
    finished = [v for v in verdicts if v.kind is Kind.FINISHED]
    if len(finished) == len(verdicts):
        return []
    ends = [v.rank.ended.order for v in hurt if v.rank.ended is not None]
    ended = [
        v
        for v in finished
        if not ends or (v.rank.ended is not None and v.rank.ended.order < min(ends))
    ]
    if not hurt:
        return ended
    first = min(hurt, key=place_in_order)
    # Who had closed its own group was not hurt by those who closed theirs. Nor was who waits to
    # join one: it may be another. But who has the others' addresses, and loses them, joins the
    # same: a group is open in one rank a moment before it is in all.
    in_it = not 0 < first.rank.closed_at <= moment(first) and (
        first.rank.phase != "joining" or first.kind is Kind.LOST
    )
    done = {v.rank.rank: _had_done(v, closing=in_it) for v in verdicts}
    before = [v for v in verdicts if v in ended or 0 < done[v.rank.rank] <= moment(first)]
    return before or [v for v in verdicts if 0 < done[v.rank.rank] <= moment(first) + HEARD_LATE]


def _had_done(verdict: Verdict, *, closing: bool) -> float:
    """When a rank that shows no error came to its end, or (`closing`) closed its group; 0 when
    neither is known.
    """
    rank = verdict.rank
    if (
        verdict.kind not in (Kind.ALIVE, Kind.STOPPED, Kind.FINISHED)
        or verdict.error is not None
        or rank.handled
        or rank.left_at
    ):
        return 0.0
    if closing and rank.closed_at:
        return rank.closed_at
    return rank.phase_at if rank.phase in ("finishing", "done") else 0.0


def then_told(
    job: JobEvidence,
    verdicts: list[Verdict],
    at_fault: list[Verdict],
    certain: Iterable[Kind],
    *,
    acquit: bool = True,
) -> str:
    """What became of the ranks that are not at fault, in a sentence. `acquit`: and that they are
    not.
    """
    blamed = {verdict.rank.rank for verdict in at_fault}
    kinds: dict[Kind, list[int]] = {}
    of_store: dict[str, list[int]] = {}
    for verdict in verdicts:
        if verdict.rank.rank in blamed or (not at_fault and verdict.kind in certain):
            continue
        if verdict.kind is Kind.DOUBTFUL and verdict.error is not None and verdict.error.code:
            of_store.setdefault(classify.AFTER_ANOTHER[verdict.error.code], []).append(
                verdict.rank.rank
            )
        else:
            kinds.setdefault(verdict.kind, []).append(verdict.rank.rank)
    lost, waited = _ranks(kinds, Kind.LOST, Kind.DOUBTFUL), _ranks(kinds, Kind.WAITED)
    stopped, alive = _ranks(kinds, Kind.STOPPED), _ranks(kinds, Kind.ALIVE)
    going_on = alive if job.on_failure == "continue" else []
    # The sys.exit of these was seen, too, at the same line; what exit code it would have given is
    # not known.
    lines = {verdict.rank.left_at for verdict in at_fault} - {""}
    exiting = sorted(
        {v.rank.rank for v in verdicts if v.rank.left_at in lines}
        & {*stopped, *alive} - {*going_on}
    )
    stopped = sorted({*stopped, *alive} - {*going_on, *exiting})
    innocent = [
        f"{ranks_phrase(lost)} lost the connection to a peer" if lost else "",
        f"{ranks_phrase(waited)} waited for a peer until the timeout" if waited else "",
        *(f"{ranks_phrase(ranks)} {words}" for words, ranks in of_store.items()),
        f"{ranks_phrase(stopped)} {'was' if len(stopped) == 1 else 'were'} stopped"
        if stopped
        else "",
    ]
    told = len(lost) + len(waited) + len(stopped) + sum(map(len, of_store.values()))
    blameless = (
        ""
        if not told or not acquit
        else "it is not at fault"
        if told == 1
        else "they are not at fault"
    )
    others = (
        [f"{ranks_phrase(going_on)} {'goes' if len(going_on) == 1 else 'go'} on"]
        if going_on
        else []
    )
    if exiting:
        others.append(
            f"{ranks_phrase(exiting)} {'was' if len(exiting) == 1 else 'were'} leaving by the same sys.exit, and stopped"
        )
    for kind, words in (
        (Kind.EXITED, "exited with a code that is not 0"),
        (Kind.NCCL, "had an error of NCCL's"),
        (Kind.ABORTED, "aborted"),
    ):
        if kinds.get(kind):
            others.append(f"{ranks_phrase(kinds[kind])} {words}, likely for that reason")
    if job.log is not None and job.log.stopped and not stopped:
        count = len(set(job.log.stopped))
        others.append(f"the launcher stopped {count} other{'s' * (count != 1)}")
    if kinds.get(Kind.FINISHED):
        others.append(f"{ranks_phrase(kinds[Kind.FINISHED])} {cases.went_home(job)}")
    if kinds.get(Kind.SWALLOWED):
        others.append(
            f"{ranks_phrase(kinds[Kind.SWALLOWED])} caught an error and {cases.went_home(job)}"
        )
    return "; ".join(filter(None, (*innocent, blameless, *others)))


def _ranks(kinds: dict[Kind, list[int]], *wanted: Kind) -> list[int]:
    return sorted(rank for kind in wanted for rank in kinds.get(kind, ()))
