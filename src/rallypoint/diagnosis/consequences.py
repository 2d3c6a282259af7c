"""What the ranks show together when none of them shows a cause."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from rallypoint.diagnosis import (
    classify,
    early_ranks,
    late_ranks,
    reachability,
    rendezvous_mismatch,
    stacks,
)
from rallypoint.diagnosis.bystanders import then_told
from rallypoint.diagnosis.causes import case as cases
from rallypoint.diagnosis.causes import collectives, endings, exceptions, rendezvous, stops
from rallypoint.diagnosis.causes.case import Case
from rallypoint.diagnosis.evidence import (
    Frame,
    JobEvidence,
    Meeting,
    NodeEvidence,
    Raised,
    RankEvidence,
)
from rallypoint.diagnosis.rank_kinds import (
    AFTERMATH,
    HURT,
    Kind,
    Verdict,
    kind_of,
    moment,
    place_in_order,
)
from rallypoint.diagnosis.report import Confidence, Help, Report
from rallypoint.host.loopback import is_loopback


def case_of(
    job: JobEvidence,
    verdicts: list[Verdict],
    at_fault: Sequence[Verdict],
    confidence: Confidence,
    *,
    known: Sequence[Verdict] = (),
    acquit: bool = True,
) -> Case:
    """Return the case of these ranks. `known`: others of which the report tells by itself.
    `acquit`: say of the rest that they are not at fault.
    """
    then = then_told(job, verdicts, [*at_fault, *known], (), acquit=acquit)
    return Case(job, tuple(v.rank for v in at_fault), then, confidence)


class Scene(NamedTuple):
    """A job in which no rank shows a cause of its own."""

    job: JobEvidence
    verdicts: list[Verdict]
    hurt: list[Verdict]  # that speak of a peer, the first one first
    errors: list[tuple[Verdict, Raised]]  # of these, where they show one
    waited: list[tuple[Verdict, Raised]]  # of these, those that waited
    late: dict[int, float]  # by rank, seconds from the first timeout of `waited` until it came

    def case(self, at_fault: Sequence[Verdict], confidence: Confidence = "likely") -> Case:
        return case_of(self.job, self.verdicts, at_fault, confidence)


def scene_of(job: JobEvidence, verdicts: list[Verdict]) -> Scene:
    """Return what those show that speak of a peer."""
    hurt = sorted((v for v in verdicts if v.kind in HURT), key=place_in_order)
    errors = [(v, v.error) for v in hurt if v.error is not None]
    waited = [(v, error) for v, error in errors if v.kind is Kind.WAITED]
    late = late_ranks.late(verdicts, waited, job.clock_error)
    return Scene(job, verdicts, hurt, errors, waited, late)


def of_consequences(job: JobEvidence, verdicts: list[Verdict]) -> Report:
    """Tell what the ranks show together where no rank shows a cause of its own, or that the cause
    is not known.
    """
    scene = scene_of(job, verdicts)
    return next(filter(None, (told(scene) for told in _TOGETHER)), None) or _unknown(scene)


def _addresses_differ(scene: Scene) -> Report | None:
    """Tell that ranks of the whole job's group look for each other at different places. Only calls
    of one turn are to meet: a rank that has gone on to its next group looks elsewhere for good
    reason."""
    turns: dict[int, dict[str, tuple[Meeting, list[Verdict]]]] = {}
    size = scene.job.world_size
    for verdict in scene.verdicts:
        at = verdict.rank.meeting
        if at and at.address and at.method != "store" and at.world_size in (-1, size):
            place = re.sub(r"^(localhost|127\.0\.0\.1|\[?::1\]?):", "loopback:", at.address)
            turns.setdefault(at.turn, {}).setdefault(place, (at, []))[1].append(verdict)
    for _, places in sorted(turns.items()):
        if len(places) > 1:
            found = list(places.values())
            told = [(at, tuple(v.rank.rank for v in there)) for at, there in found]
            named = {rank for _, ranks in told for rank in ranks}
            at_fault = [v for v in scene.verdicts if v.rank.rank in named]
            return rendezvous.address_differs(scene.case(at_fault, "certain"), told)
    return None


def _meet_at_home(scene: Scene) -> Report | None:
    """Tell of ranks of other machines than rank 0's that look for it at an address that is each
    machine's own.
    """
    job = scene.job
    home = job.node_of(0)
    at_fault = [
        v
        for v in scene.verdicts
        if v.rank.phase == "joining"
        and v.rank.meeting is not None
        and is_loopback(v.rank.meeting.address.rpartition(":")[0])
        and v.rank.meeting.world_size in (-1, job.world_size)
        and job.node_of(v.rank.rank).host != home.host
    ]
    if not at_fault or all(rank.rank for rank in home.ranks):  # nothing is known of rank 0
        return None
    case = scene.case(at_fault, "certain")
    return rendezvous.meet_at_home(case, cases.node_name(job, home.node))


def _stale_file(scene: Scene) -> Report | None:
    """Tell of a file:// rendezvous that sent gloo to processes which are gone."""
    stale = [
        (v, error, v.rank.meeting.address)
        for v, error in scene.errors
        if v.rank.meeting is not None
        and v.rank.meeting.method.startswith("file:")
        and error.call in ("", "init_process_group")
        and "connectFullMesh" in error.message
        and "refused" in error.message
    ]
    if not stale:
        return None
    _, error, path = stale[0]
    return rendezvous.stale_file(scene.case([v for v, _, _ in stale]), error, path)


def _unmet(scene: Scene) -> Report | None:
    """Tell of ranks that could not reach their meeting point, and what was seen there. Not while
    rank 0, which should listen there, is elsewhere.
    """
    return next(filter(None, (_unmet_on(node, scene) for node in scene.job.nodes)), None)


def _unmet_on(node: NodeEvidence, scene: Scene) -> Report | None:
    """Tell the same of the ranks of one node, which looks from there."""
    reached, here = node.reached, {rank.rank for rank in node.ranks}
    if reached is None or not reachability.explains(reached):
        return None
    verdicts = [v for v in scene.verdicts if v.rank.rank in here]
    at = (reached.host, reached.port)
    said = [v for v in verdicts if v.error and reachability.where(v.error, v.rank.meeting) == at]
    spoke = {v.rank.rank for v in said}
    silent = [
        v for v in verdicts if v.rank.rank not in spoke and reachability.waits_at(v.rank, reached)
    ]
    late = any(
        v.kind in (Kind.ALIVE, Kind.STOPPED) and v.rank.rank == 0 and v.rank.meeting is None
        for v in scene.verdicts
    )
    # Without any meeting they are not looked into, and nobody knows who has come.
    met = any(v.rank.meeting is not None for v in scene.verdicts)
    if not (said or silent) or (late and met and reached.outcome == "refused"):
        return None
    at_fault = sorted(said, key=place_in_order) + silent
    error = said[0].error if said else None
    return reachability.report(scene.case(at_fault, "certain"), reached, error)


def _store_lost(scene: Scene) -> Report | None:
    """Tell of ranks whose connection to a store of torch's broke, and what was seen where it
    was.
    """
    for node in scene.job.nodes:
        reached, here = node.reached, {rank.rank for rank in node.ranks}
        broken = [
            (v, error)
            for v, error in scene.errors
            if v.rank.rank in here
            and reached is not None
            and reachability.store_of(error, v.rank.said) == (reached.host, reached.port)
        ]
        if broken and reached is not None:
            case = scene.case([v for v, _ in broken], "certain")
            return reachability.store_lost(case, reached, broken[0][1])
    return None


def _store_waits(scene: Scene) -> Report | None:
    """Tell of a TCPStore that waits for more processes than the job has."""
    for verdict, error in scene.errors:
        counted = None if error.call else classify.came_short(error.message)
        if counted is not None and counted[1] > scene.job.world_size:
            return rendezvous.store_waits(scene.case([verdict]), error)
    return None


def _larger_group(scene: Scene) -> Report | None:
    """Tell of ranks that waited for more ranks than the job has, at an address of this machine."""
    met = [v.rank.meeting for v in scene.verdicts if v.rank.phase == "joining"]
    here = [at for at in met if at is not None and is_loopback(at.address.rpartition(":")[0])]
    size = scene.job.world_size
    if not scene.waited or len(here) < size or any(at.world_size <= size for at in here):
        return None
    # A launcher beside this one may start the others.
    report = rendezvous_mismatch.world_size_differs(scene.case(scene.verdicts, "possible"))
    why = "a group is complete when as many ranks have come as its world_size says"
    return replace(report, why=why)


def _left_early(scene: Scene) -> Report | None:
    """Tell of ranks that left before the others had done."""
    left = early_ranks.left_before(scene.verdicts, scene.hurt, scene.job.clock_error)
    hid = [v for v in left if v.error is not None]
    if left and len(hid) == len(left):
        return exceptions.swallowed(scene.case(hid), hid[0].error)
    quiet = [v for v in left if v.error is None]
    return endings.left_early(scene.case(quiet)) if quiet else None


def mismatch(scene: Scene) -> Report | None:
    """Tell of ranks that waited for each other in different collectives, at last or earlier."""
    met = [late_ranks.meanwhile(v, scene.waited) for v in scene.verdicts]
    calls = different_collectives(met)
    late = scene.late and met == scene.verdicts
    if not calls or late or not any(v.kind is Kind.WAITED for v in scene.hurt):
        return None
    # One that came too late, and to another group, is not told from it where nobody timed its call.
    timed = all(error.wait[0] for v, error in scene.errors if v.kind is Kind.LOST)
    confidence: Confidence = "likely" if timed or scene.job.log is not None else "possible"
    return collectives.collective_mismatch(scene.case(scene.verdicts, confidence), calls)


def _named_as_missing(scene: Scene) -> Report | None:
    """Tell of those that `monitored_barrier` names: its rank 0 asks each of the others, and what
    those say in turn is that rank 0 has gone.
    """
    for _, error in scene.waited:
        numbers = classify.not_at_barrier(error.message)
        if not numbers:
            continue
        lost = [v for v in scene.hurt if v.kind is Kind.LOST and v.rank.rank in numbers]
        late, elsewhere = late_ranks.named(lost, error)
        scene = scene._replace(late=late | scene.late)
        absent = [v for v in _absent(scene, joining=True) if v.rank.rank in numbers]
        missing = {v.rank.rank: v for v in (*absent, *elsewhere)}
        if missing and scene.job.world_size == len(scene.verdicts):
            others = [v for v in scene.verdicts if v.kind in HURT and v.rank.rank not in missing]
            return _missing(scene, [*missing.values()], others, error)
    return None


def _absent(scene: Scene, *, joining: bool = False) -> list[Verdict]:
    """Return the ranks that came late, and those without an error that are outside the call. A
    rank that has just caught the error of the same call, or is leaving the call, is not among them.
    """
    calls = {late_ranks.call_of(error) for _, error in scene.errors} - {""}

    def came(rank: RankEvidence) -> bool:
        last = [one for one in rank.handled[-1:] if kind_of(one) in HURT]
        last = [one for one in last if late_ranks.call_of(one) in calls]
        now = scene.job.node_of(rank.rank).now
        return any(now - one.at <= AFTERMATH for one in last) or stacks.leaves_collective(
            rank.stack
        )

    quiet = [
        v
        for v in scene.verdicts
        if v.kind in (Kind.ALIVE, Kind.STOPPED) and (joining or v.rank.phase != "joining")
    ]
    late = [v for v in scene.verdicts if v.rank.rank in scene.late]
    return late + [v for v in quiet if v.rank.rank not in scene.late and not came(v.rank)]


def _missing(scene: Scene, missing: list[Verdict], waiters: list[Verdict], error: Raised) -> Report:
    calls = {late_ranks.call_of(error)}
    stood = [late_ranks.stood(v, calls) if v.rank.rank in scene.late else v for v in missing]
    case = case_of(scene.job, scene.verdicts, stood, "likely", known=waiters)
    return collectives.missing(case, [v.rank for v in waiters], error, scene.late)


def _waited_alone(scene: Scene) -> Report | None:
    """Tell of ranks that waited for a key that nobody set, or for ranks that are elsewhere."""
    if not scene.waited:
        return None
    waited, error = [v for v, _ in scene.waited], scene.waited[0][1]
    met = all(v.rank.phase != "joining" for v in waited)  # one that still joins has not come
    absent, since = _absent(scene, joining=met), late_ranks.gave_up(scene.waited)
    # A rank that gives up closes its connections: the others lose it then.
    only = all(v.kind is Kind.WAITED or moment(v) >= since > 0 for v in scene.hurt)
    own = all(not one.call for _, one in scene.waited)
    keys = all(classify.keys_of_program(one.message) for _, one in scene.waited)
    # All the others stand in a collective, and wait for these.
    elsewhere = bool(absent) and all(stacks.collective(v.rank.stack) is not None for v in absent)
    if own and (
        (keys and only) or (elsewhere and all("keys:" in one.message for _, one in scene.waited))
    ):
        alone = len(waited) == len(scene.verdicts)
        case = case_of(scene.job, scene.verdicts, waited, "likely", acquit=alone)
        report = exceptions.never_set(case, error)
        there = cases.whereabouts(scene.job, [v.rank for v in absent], case.root)
        return replace(report, evidence=(*report.evidence, *there))
    return _missing(scene, absent, waited, error) if absent and only else None


def _all_waited(scene: Scene) -> Report | None:
    """Tell of ranks that were all in collectives of the same name until the timeout. The first that
    gives up closes its connections, and the others may lose it a moment before their own time.
    """
    calls = {late_ranks.call_of(error) for _, error in scene.errors}
    since = late_ranks.gave_up(scene.waited)
    every = len(scene.errors) == len(scene.verdicts) == scene.job.world_size > 1
    together = all(
        v.kind is Kind.WAITED or (error.wait[0] and error.at - error.wait[0] <= since)
        for v, error in scene.errors
    )
    in_pairs = calls <= {"send", "recv"}
    if scene.job.log is not None or not (len(calls) == 1 or in_pairs):
        return None
    if calls & {"", "init_process_group"} or not (scene.waited and every and together):
        return None
    case = scene.case([v for v, _ in scene.errors], "possible")
    report = collectives.all_waited(case, " and ".join(sorted(calls)), scene.waited[0][1])
    if not in_pairs:
        return report
    why = "each rank sent or received what none received or sent: rank, tag or order do not fit"
    step = Help(
        "of two ranks that exchange tensors, let one send first and the other receive first"
    )
    return replace(report, why=why, help=(step,))


_TOGETHER = (
    _meet_at_home,
    _addresses_differ,
    _stale_file,
    _unmet,
    _store_lost,
    _store_waits,
    _larger_group,
    _left_early,
    mismatch,
    _named_as_missing,
    _waited_alone,
    _all_waited,
)
"""What ranks may show together, the more special first."""


def _unknown(scene: Scene) -> Report:
    stopped = [
        v
        for v in scene.verdicts
        if v.kind is Kind.STOPPED and v.rank.ended is not None and not v.rank.sent
    ]
    first = scene.hurt[:1] or stopped[:1]
    # A rank that is alive may be at fault: an exception that is still on its way through a
    # `finally` has not been seen.
    sure: Confidence = "possible" if first else "certain"
    case = case_of(scene.job, scene.verdicts, first, sure, acquit=False)
    error = first[0].error if first else None
    if error is not None and classify.nccl_gave_up(error):
        return exceptions.raised(cases.likely(case), error)
    return stops.unknown(case, error)


def different_collectives(verdicts: list[Verdict]) -> dict[int, tuple[str, Frame]]:
    """Return by rank the collective that it stood in or that its error left, and the program's
    line; {} when any was elsewhere or in init_process_group, or all were in one.

    The error's own name for the call is not enough: of `all_gather_object` torch names the
    `all_gather` inside.
    """
    found: dict[int, tuple[str, Frame]] = {}
    for verdict in verdicts:
        rank, kind = verdict.rank, verdict.kind
        frames = rank.stack if rank.ended is None else ()
        if verdict.error is not None:
            frames = verdict.error.frames
        inside, own = stacks.collective(frames), stacks.own_frame(frames)
        call = inside[0] if inside else stacks.waited_in(frames) if kind in HURT else ""
        if call in ("", "init_process_group") or own is None or stacks.library(own):
            return {}
        found[rank.rank] = call, own
    return found if len({name for name, _ in found.values()}) > 1 else {}
