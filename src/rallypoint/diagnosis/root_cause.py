"""Evidence to causes, with confidence.

Ranked by the kind of evidence, never by the clock alone: a signal that nobody of us sent, and an
exception that mentions no lost peer, are causes; "connection closed by peer", an abort after it,
and whatever this launcher sent are consequences. The clock only orders causes of the same kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from math import inf

import msgspec
from msgspec.structs import replace

from rallypoint.diagnosis import (
    classify,
    confidence,
    held_ranks,
    reachability,
    stacks,
    tracebacks,
)
from rallypoint.diagnosis.bystanders import then_told
from rallypoint.diagnosis.causes import case as cases
from rallypoint.diagnosis.causes import endings, exceptions, gpus, nodes, resources, stops
from rallypoint.diagnosis.causes.case import Case, placed, who
from rallypoint.diagnosis.causes.wording import CRASHES
from rallypoint.diagnosis.confidence import answers, doubt_in_log
from rallypoint.diagnosis.consequences import (
    case_of,
    different_collectives,
    mismatch,
    of_consequences,
    scene_of,
)
from rallypoint.diagnosis.error_patterns import slurm_words
from rallypoint.diagnosis.evidence import JobEvidence, Meeting, Raised, RankEvidence
from rallypoint.diagnosis.log_consequences import (
    absent_in_log,
    not_reached,
    refused_value,
    watched_calls,
)
from rallypoint.diagnosis.log_events import NOT_ENDED, Findings, Sighting, Sign
from rallypoint.diagnosis.node_evidence import of_one_clock
from rallypoint.diagnosis.pattern import Pattern
from rallypoint.diagnosis.rank_kinds import (
    CONSEQUENCES,
    HEARD_LATE,
    SAME_MOMENT,
    SIGKILL,
    SIGTERM,
    STRONG,
    Kind,
    Verdict,
    look_at,
    loss_before,
    moment,
    place_in_order,
)
from rallypoint.diagnosis.report import Confidence, Report
from rallypoint.world import ranks_phrase

# causes told in full; more than three errors at once are mostly one that nobody has recognised
MOST_REPORTS = 3
# lines after the word that SIGTERM ended a process: a script that goes on ended a helper of its own
MOST_AFTER = 3
# Seconds between a rank's last words and its exit from which on they are no account of that exit: a
# program that prints a traceback to leave with needs milliseconds.
LINGERED = 0.5

ROWS: tuple[tuple[Kind, ...], ...] = (
    STRONG,
    (Kind.SWALLOWED,),
    (Kind.LEAVING,),
    (Kind.EXITED,),
    (Kind.NCCL,),
    (Kind.ABORTED,),
    (Kind.HANDLED,),
    (Kind.DOUBTFUL,),
)


def diagnose(job: JobEvidence) -> tuple[Report, ...]:
    """Return the causes of a job's failure, the first one first, each with its consequences folded
    in. Never empty; depends on nothing else.
    """
    job, verdicts = look_at(job)
    if job.log is not None:
        first, *more = _of_log(job, job.log, verdicts)
        first = gpus.with_xids(first, job.log)
        reports = (confidence.placed(first, job.log), *more)
        return tuple(replace(one, exit_status=int(one.code == "cause-unknown")) for one in reports)
    died: tuple[Report, ...] = ()
    if job.lost and not (job.interrupted_by or job.overdue):
        return _with_lost_nodes(job, verdicts)
    rows = ROWS[:1] if job.helper or job.interrupted_by or job.overdue else ROWS
    if job.helper is not None:
        died = (stops.launcher_died(job, then_told(job, verdicts, [], STRONG)),)
    shared = {
        rank
        for node in job.nodes
        for rank in devices_shared(
            ((one.rank, one.meeting) for one in node.ranks if one.meeting), job.world_size
        )
    }
    if rows is ROWS:
        verdicts = held_ranks.with_causes(verdicts)
    for row in rows:
        found = [verdict for verdict in verdicts if verdict.kind in row]
        # NCCL refuses a shared GPU, and whatever has a reason of its own comes before that.
        if shared and not died and all(classify.says("device-shared", v.message) for v in found):
            at_fault = [verdict for verdict in verdicts if verdict.rank.rank in shared]
            return (gpus.device_shared(case_of(job, verdicts, at_fault, "certain"), None),)
        if found:
            return (*died, *_reports(job, verdicts, found))
    if died:
        return died
    held = held_ranks.seen(verdicts, Case(job, (), "").root)
    seen = (*_seen_where_they_wait(job), *(held or _seen_apart(verdicts)))
    if job.overdue:
        return (stops.overdue(job, seen),)
    if job.interrupted_by:
        return (stops.interrupted(job, seen),)
    return (of_consequences(job, verdicts),)


_WEAK = [Kind.EXITED, Kind.ABORTED]
"""Ends that mostly are consequences of another rank's failure, and never of one that came later."""


def _ended_before(job: JobEvidence, verdicts: list[Verdict], found: list[Verdict]) -> list[Verdict]:
    """Return the ranks that had exited or aborted clearly before the first of the causes."""
    kind = found[0].kind
    if job.log is not None or kind in CONSEQUENCES:
        return []
    first = min(_earliest(job, v) for v in found)
    return [v for v in verdicts if v.kind in _WEAK and v.kind is not kind and 0 < moment(v) < first]


def _earliest(job: JobEvidence, cause: Verdict) -> float:
    """Return when a cause may have happened at the earliest: by closing its group, a rank fails for
    its peers.
    """
    late = SAME_MOMENT if cause.error and cause.error.at else HEARD_LATE
    return (cause.rank.closed_at or moment(cause)) - late - job.clock_error


# Kinds of evidence of a rank's own that make a node's loss a consequence when they came before it.
_BEFORE_A_LOSS = ROWS[:4]


def _with_lost_nodes(job: JobEvidence, verdicts: list[Verdict]) -> tuple[Report, ...]:
    """Return the causes where nodes were lost: the loss, unless something of a rank's own clearly
    came before. What failed after it may well be a consequence.
    """
    since = min(one.at - one.silent for one in job.lost) - SAME_MOMENT - job.clock_error
    until = min(one.at for one in job.lost)
    then = nodes.lost_then(job)
    for row in _BEFORE_A_LOSS:
        found = [v for v in verdicts if v.kind in row and 0 < moment(v) < since]
        if found:
            first, *more = _reports(job, verdicts, found)
            then = "; ".join(filter(None, (then, first.then)))
            return (replace(first, then=then), *more)
    own = [v for v in verdicts if v.kind in STRONG]
    beside = [v for v in own if moment(v) <= until]
    afterwards = [v.rank.rank for v in own if moment(v) > until]
    others = then_told(job, verdicts, own, ())
    failed = f"{placed(job, afterwards)} failed afterwards" if afterwards else ""
    sure: Confidence = "likely" if beside else "certain"
    case = Case(job, (), "; ".join(filter(None, (others, failed))), sure)
    loss = nodes.lost(case, [v.rank for v in verdicts if v.kind in (Kind.ALIVE, Kind.STOPPED)])
    return (loss, *(_reports(job, verdicts, beside) if beside else ()))[:MOST_REPORTS]


class News(msgspec.Struct, frozen=True):
    """What is new in a job that goes on, and is to be told."""

    reports: tuple[Report, ...] = ()
    followed: tuple[str, ...] = ()  # a line each: ranks that lost one of those at fault


def beginning(job: JobEvidence, reports: Iterable[Report]) -> float:
    """Return when the first of the causes happened, in seconds since the job's start; 0 when no
    rank shows it.
    """
    first = next(iter(reports), None)
    at_fault = set(first.ranks) if first is not None else set[int]()
    ranks = [rank for rank in of_one_clock(job).ranks if rank.rank in at_fault]
    ends = [rank.left_when or (rank.ended.at if rank.ended else 0.0) for rank in ranks]
    ends += [rank.raised.at for rank in ranks if rank.raised is not None]
    if first is not None and first.code == "node-lost":
        ends += [one.at - one.silent for one in job.lost]
    return min(filter(None, ends), default=0.0)


# Exceptions that come from outside the program: the same may go well a minute later.
_FROM_OUTSIDE = Pattern(
    r"Connect|Timeout|gaierror|HTTP|URL|SSL|Network|Socket|Broken|Dist|Memory|Interrupt|Blocking|^OSError|^IOError"
)


def same_again(report: Report) -> str:
    """Return what this report and an equal one have in common: the exception, its words (without
    addresses of memory) and its line. "" for a failure that may not come again, or is not an
    exception of the program's.
    """
    kind, _, words = report.headline.partition(" raised ")[2].partition(":")
    own = report.code == "rank-raised" and report.where and kind
    if not own or _FROM_OUTSIDE.search(kind.rpartition(".")[2]):
        return ""
    return f"{kind}:{re.sub('0x[0-9a-f]+', '0x', words)} at {report.where.partition(',')[0]}"


def news(job: JobEvidence, told: Iterable[int], at_fault: Iterable[int]) -> News:
    """Return what a job that goes on when ranks fail has to tell beyond what was `told`, ranks
    whose failure stands in a report or in a line.

    `at_fault`: of all reports so far. A rank that fails after one of them, and shows nothing but
    that a peer is lost, has followed: no cause of its own is to be looked for, and none to be
    called unknown.
    """
    told, at_fault = set(told), set(at_fault)
    _, verdicts = look_at(job)
    blamed = [(v.rank.rank, moment(v)) for v in verdicts if v.rank.rank in at_fault]
    followed: dict[tuple[str, str], list[int]] = {}
    for verdict in verdicts:
        rank, error = verdict.rank, verdict.error
        heard = moment(verdict) + HEARD_LATE + job.clock_error
        before = [number for number, at in blamed if at <= heard]
        new = rank.rank not in told and verdict.kind in CONSEQUENCES and has_failed(rank)
        if new and before:
            words = classify.in_short(error) if error is not None else cases.how_ended(job, rank)
            followed.setdefault((ranks_phrase(before), words), []).append(rank.rank)
    known = told.union(*followed.values())
    rest = tuple(rank for rank in job.ranks if rank.rank not in known)
    return News(
        diagnose(job.with_ranks(rest)) if any(map(has_failed, rest)) else (),
        tuple(
            f"{ranks_phrase(ranks)} followed {before}: {words}"
            for (before, words), ranks in followed.items()
        ),
    )


def has_failed(rank: RankEvidence) -> bool:
    """Tell whether the rank's program has ended, or is about to, and not well."""
    ended = rank.ended
    return rank.raised is not None or bool(ended is not None and (ended.code or ended.signal))


def cause_first(reports: Iterable[Report]) -> tuple[Report, ...]:
    """Return the reports in the order in which they were made, but last those that know no cause:
    what was seen later may well be theirs.
    """
    return tuple(sorted(reports, key=lambda report: report.code == "cause-unknown"))


def _seen_where_they_wait(job: JobEvidence) -> tuple[str, ...]:
    """Return what keeps ranks that somebody stopped from meeting, when that was seen: nobody would
    wait another half hour for it.
    """
    for node in job.nodes:
        reached = node.reached
        if reached is None or not reachability.explains(reached):
            continue
        for rank in node.ranks:
            if rank.meeting is not None and reachability.waits_at(rank, reached):
                return (reachability.in_short(reached, rank.meeting.line),)
    return ()


def _seen_apart(verdicts: list[Verdict]) -> tuple[str, ...]:
    """Return that all ranks stood in collectives, and not in the same one. A healthy job does, too,
    for a moment: nobody knows for how long.
    """
    names = sorted({name for name, _ in different_collectives(verdicts).values()})
    if not names or any(verdict.rank.ended is not None for verdict in verdicts):
        return ()
    differ = f"{', '.join(names[:-1])} and {names[-1]} do not match"
    return (
        f"{differ}: ranks that stay there wait for each other (possible): rallypoint explain collective-mismatch",
    )


def devices_shared(meetings: Iterable[tuple[int, Meeting]], world_size: int) -> tuple[int, ...]:
    """Return the ranks that join one group of NCCL's with a GPU that another of them has: NCCL
    refuses that at the first collective.
    """
    by_device: dict[str, list[int]] = {}
    for rank, meeting in meetings:
        whole = meeting.world_size in (-1, world_size)
        if meeting.device and whole and classify.is_nccl(meeting.backend):
            by_device.setdefault(meeting.device, []).append(rank)
    return tuple(sorted(rank for ranks in by_device.values() if len(ranks) > 1 for rank in ranks))


# --- causes ----


def _reports(job: JobEvidence, verdicts: list[Verdict], found: list[Verdict]) -> tuple[Report, ...]:
    """Return a report for each cause: ranks that show the same are one."""
    groups: dict[Hashable, list[Verdict]] = {}
    causing = _without_echoes(found) + _ended_before(job, verdicts, found)
    for verdict in sorted(causing, key=place_in_order):
        groups.setdefault(_same(verdict, job), []).append(verdict)
    causes = list(groups.values())
    kind = found[0].kind
    sure: Confidence = "certain"
    alone = kind is Kind.EXITED and len(causes) > 1 and job.on_failure != "continue"
    if alone or kind is Kind.NCCL:
        causes, sure = causes[:1], "likely"
    elif kind is Kind.DOUBTFUL and job.world_size > 1:
        sure = "likely"
    elif kind is Kind.HANDLED:
        sure = "possible"
    told, rest = causes[:MOST_REPORTS], causes[MOST_REPORTS:]
    at_fault = [verdict for group in causes for verdict in group]
    # Ranks that were waited for in vain may be at fault, and ranks with another call or model.
    # Where several ranks left with one exit code, a stopped rank may have been about to leave.
    suspect = any(
        (v.kind is Kind.DOUBTFUL and v.error is not None and v.error.code)
        or any(classify.says(name, v.message) for name in _OF_SEVERAL)
        or (v.error is not None and tracebacks.by_rpc(v.error))
        for v in found
    )
    alike = told[0][0].kind is Kind.EXITED and len(told[0]) > 1
    nameless = job.log is not None and told[0][0].rank.rank < 0  # it may be of any of them
    acquit = not (suspect or alike or nameless or _doubt(job, told[0], verdicts))
    then = then_told(job, verdicts, at_fault, STRONG, acquit=acquit)
    numbers = [v.rank.rank for group in rest for v in group if v.rank.rank >= 0]
    others = ranks_phrase(numbers) if numbers else f"{len(rest)} more"
    more = f"{others} failed in other ways still: see their logs" if rest else ""
    reports = []
    for group in told:
        words = [more if group is told[-1] else "", then if group is told[0] else ""]
        ranks = tuple(v.rank for v in group)
        case = Case(job, ranks, "; ".join(filter(None, words)), sure)
        report = ACCOUNTS[group[0].kind](case, group[0].error)
        doubt = doubt_in_log(group, report) if job.log is not None else _doubt(job, group, verdicts)
        if doubt and sure == "possible":
            report = replace(report, confidence=sure, why=doubt)
        elif doubt and report.confidence == "certain":
            why = (
                report.why if doubt in report.why else "; ".join(filter(None, (report.why, doubt)))
            )
            report = replace(report, confidence="likely", why=why)
        reports.append(report)
    first = reports[0]
    if job.log is not None and len(causes) > 1 and first.confidence == "certain":
        # Each of them happened. Which one brought down the job is told by the order of the lines
        # alone.
        why = first.why or "it stands first in the log"
        reports[0] = replace(first, confidence="likely", why=why)
    return tuple(reports)


_OF_SEVERAL = ("sizes-differ", "calls-differ", "models-differ", "calls-mismatched")
"""Patterns of errors that say that two ranks do not agree: either rank may be at fault."""


def _doubt(job: JobEvidence, group: list[Verdict], verdicts: list[Verdict]) -> str:
    """Return why a cause may be a consequence all the same, "" when nothing speaks for it."""
    first = group[0]
    error = first.error
    if error and first.kind is Kind.RAISED:
        if error.code or first.doubt:
            return first.doubt
        if all(loss_before(v.rank, v.error) for v in group):
            return f"{ranks_phrase(v.rank.rank for v in group)} had lost the connection to a peer before"
        after = [_after_traceback(job, v) for v in group]
        if all(after):
            return f"the traceback stands in the log, and {after[0]}: it may have been handled"
    near, after_it, words = (
        _WEAK,
        SAME_MOMENT,
        "ended by then, too, and which came first is not certain",
    )
    if first.kind in _WEAK:
        near, after_it = [*STRONG], HEARD_LATE
        words = f"failed less than {HEARD_LATE} s later, and may have begun to before"
    since, until = _earliest(job, first), moment(first) + after_it + job.clock_error
    ranks = [v.rank.rank for v in verdicts if v.kind in near and 0 < since <= moment(v) < until]
    return f"{ranks_phrase(ranks)} {words}" if ranks else ""


def _after_traceback(job: JobEvidence, verdict: Verdict) -> str:
    """Return what a rank did after a traceback that the program has printed itself, else "". In a
    rank that is looked into, an exception that leaves the program is seen.
    """
    rank = verdict.rank
    if rank.phase == "started" or rank.raised or rank.error_file or verdict.error in rank.handled:
        return ""
    if tracebacks.went_on(rank.said):
        return "lines follow it"
    passed = (rank.left_when or moment(verdict)) - job.node_of(rank.rank).now + rank.silent
    by = f" by sys.exit at {rank.left_at}" if rank.left_at else ""
    return f"{who(rank)} left{by} {passed:.1f} s later" if rank.silent and passed > LINGERED else ""


def _without_echoes(found: list[Verdict]) -> list[Verdict]:
    """Leave out those that only say that a barrier broke, where one says that its time was over:
    the first whose time is over breaks it for all.
    """
    codes = [verdict.error.code if verdict.error is not None else "" for verdict in found]
    if "barrier-timeout" not in codes:
        return found
    return [v for v, code in zip(found, codes, strict=True) if code != "barrier-broken"]


def _same(verdict: Verdict, job: JobEvidence) -> Hashable:
    """Return what makes two ranks' failures one cause."""
    rank, error, kind, ended = verdict.rank, verdict.error, verdict.kind, verdict.rank.ended
    if job.log is not None and kind is not Kind.RAISED:
        return (kind, bool(rank.killed_by))
    if error is not None and kind is not Kind.EXITED:
        if error.code in classify.SAID_TO_ALL:
            return (kind, error.code, error.message)
        if classify.says("calls-differ", error.message):  # each tells it as it sees it
            return (kind, "calls-differ")
        frame = stacks.own_frame(error.frames)
        place: Hashable = (frame.file, frame.line) if frame else error.message
        worker = classify.loader_killed(error)
        if worker is not None:  # that place says nothing of the worker
            pid, number = worker
            place = (number, number == SIGKILL and _for_memory(job, rank, pid))
        return (kind, error.type, error.code, place)
    if ended is None:
        return (kind, rank.not_executed)
    killed = kind is Kind.KILLED and ended.signal == SIGKILL
    return (kind, ended.signal, ended.code, killed and _for_memory(job, rank, rank.pid))


def _for_memory(job: JobEvidence, rank: RankEvidence, pid: int) -> Hashable:
    """Return the number of the node if its kernel killed that process for memory, else None."""
    node = job.node_of(rank.rank)
    return node.node if resources.for_memory(node.memory, pid) else None


def _handled(case: Case, error: Raised | None) -> Report:
    """Tell of an exception, or of a signal where there is none."""
    if error is not None:
        return exceptions.raised(case, error)
    ended = case.first.ended
    crashed = ended is not None and ended.signal in CRASHES
    return (endings.crashed if crashed else endings.killed)(case)


ACCOUNTS: dict[Kind, Callable[[Case, Raised | None], Report]] = {
    Kind.NOT_RUN: endings.not_run,
    Kind.KILLED: endings.killed,
    Kind.RAISED: exceptions.raised,
    Kind.CRASHED: endings.crashed,
    Kind.SWALLOWED: exceptions.swallowed,
    Kind.LEAVING: exceptions.on_its_way,
    Kind.EXITED: endings.exited,
    Kind.NCCL: exceptions.raised,
    Kind.ABORTED: endings.crashed,
    Kind.HANDLED: _handled,
    Kind.DOUBTFUL: _handled,
}


# --- of a log ---


def _of_log(job: JobEvidence, log: Findings, verdicts: list[Verdict]) -> tuple[Report, ...]:
    """Return the causes that a log tells of: the same rows, with what only logs have between
    them.
    """
    # two launchers of one job show the same report
    own = {s.text: s for s in log.sightings if s.sign is Sign.REPORTED}
    if own:  # what stalled or failed before a stop is the cause
        causes = [s for s in own.values() if not s.text.startswith("stopped[")]
        return tuple(map(stops.reported, (causes or [*own.values()])[:MOST_REPORTS]))
    strong = [verdict for verdict in verdicts if verdict.kind in STRONG]
    reports = _reports(job, verdicts, strong) if strong else ()
    stop = next(iter(_stops(log)), None)
    if not reports:
        weaker = _weaker_in_log(job, log, verdicts)
        return weaker if stop is None else (_of_stop(stop, weaker[0], log),)
    if stop is not None and stop.place.line < min(verdict.rank.order for verdict in strong):
        doubt = "it stands first; what failed after it may be a consequence, or of a later run in the same log"
        stopped = replace(stops.interrupted_in_log(stop), confidence="likely", why=doubt)
        return (stopped, *reports)[:MOST_REPORTS]
    return reports


def _of_stop(stop: Sighting, failure: Report, log: Findings) -> Report:
    """Return what ended a job that was stopped, and shows no strong evidence of a cause: a failure
    before the stop where little stands between, else the stop.
    """
    stopped = stops.interrupted_in_log(stop)
    handled = failure.code in ("cause-unknown", "interrupted") or failure.confidence == "possible"
    # a person may stop a job for any reason, and a preemption has one of its own
    of_slurm = stop.end.by == "TIME LIMIT" or slurm_words.cancelled_for_no_reason(stop.text)
    signs = [s for s in log.sightings if s.sign is not Sign.SPOKEN and not s.went_on]
    before = [s for s in signs if s.stands_before(stop, inf)]
    later = any(s.place.shown == failure.logs[:1] for s in signs if s not in before)
    near = before and not later and before[-1].stands_before(stop)
    if handled or not of_slurm or not near:
        return stopped
    then = "; ".join(filter(None, (failure.then, f"after that, {stopped.headline}")))
    return replace(failure, then=then)


def _weaker_in_log(job: JobEvidence, log: Findings, verdicts: list[Verdict]) -> tuple[Report, ...]:
    """Return the causes that a log tells of in which no process shows strong evidence of one."""

    def of_kind(kind: Kind) -> list[Verdict]:
        return [verdict for verdict in verdicts if verdict.kind is kind]

    for kind in (Kind.EXITED, Kind.NCCL):
        if found := of_kind(kind):
            return _reports(job, verdicts, found)
    scene = scene_of(job, verdicts)
    told = watched_calls(scene) or refused_value(scene, log) or not_reached(scene, log)
    if told is None and {v.rank.rank for v in verdicts} == {*log.ranks}:
        told = mismatch(scene)
    if told is not None:
        return (told,)
    if found := of_kind(Kind.ABORTED):
        return _reports(job, verdicts, found)
    found = of_kind(Kind.HANDLED)
    if not (log.failed or scene.hurt):
        found = [v for v in found if not _was_optional(v, log)]
    found = [v for v in found if v.error is not None] or ([] if scene.hurt else found)
    if found:
        return _reports(job, verdicts, found)
    ended = [s for s in log.sightings if s.sign is Sign.ENDED and s.end.signal == SIGTERM]
    nothing_else = all(verdict.kind is Kind.STOPPED for verdict in verdicts)
    if ended and nothing_else and log.lines - ended[-1].place.line < MOST_AFTER:
        return (stops.ended_by_a_stop(ended[-1]),)
    return (absent_in_log(scene, log),)


def _was_optional(verdict: Verdict, log: Findings) -> bool:
    """Tell whether the process did without a module that it could not import. Where the import
    failed again so long after that, the program was started again.
    """
    place = (verdict.rank.log, verdict.rank.order)
    return any(s.did_without == 1 and (s.place.log, s.place.line) == place for s in log.sightings)


def _stops(log: Findings) -> list[Sighting]:
    """Return where somebody stopped the job and that was no answer to a failure, the first one
    first.
    """
    seen = log.sightings
    stops = [s for s in seen if s.sign is Sign.INTERRUPTED or classify.is_stop(s.error)]
    failures = [
        s
        for s in seen
        if s.sign in (Sign.WATCHDOG, Sign.KILLED_FOR_MEMORY)
        or log.has_failed(s)
        or classify.is_consequence(s.error)
    ]
    # Slurm's signal is no reason, nor is the launcher's word of it
    sent = SIGTERM if any(slurm_words.is_stop(s.text) for s in stops) else inf
    stops = [s for s in stops if s.end.by or s.end.signal != sent] or stops
    stops = [s for s in stops if not answers(s, failures) and not slurm_words.is_by_srun(s.text)]
    # a scheduler may have sent what stands above its own words
    stops.sort(
        key=lambda s: (
            not s.end.by,
            not slurm_words.is_stop(s.text),
            s.place.line,
            s.end == NOT_ENDED,
        )
    )
    failed = [s for s in stops if s.end.by == "NODE FAILURE"]
    # Without `host`, the line is of the step's end and has only the node of its first task.
    return [s for s in failed if s.end.host] or stops if failed[:1] == stops[:1] else stops
