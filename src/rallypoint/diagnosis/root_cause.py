"""Evidence to causes, with confidence.

Ranked by the kind of evidence, never by the clock alone: a signal that nobody of us sent, and an
exception that mentions no lost peer, are causes; "connection closed by peer", an abort after it,
and whatever this launcher sent are consequences. The clock only orders causes of the same kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable

import msgspec

from rallypoint.diagnosis import classify, confidence, reachability, stacks, tracebacks
from rallypoint.diagnosis.causes import case as cases
from rallypoint.diagnosis.causes import children, endings, exceptions, gpus, resources, stops
from rallypoint.diagnosis.causes.case import Case
from rallypoint.diagnosis.causes.wording import CRASHES
from rallypoint.diagnosis.confidence import answers, doubt_in_log
from rallypoint.diagnosis.consequences import (
    case_of,
    different_collectives,
    of_consequences,
    then_told,
)
from rallypoint.diagnosis.error_patterns import schedulers
from rallypoint.diagnosis.evidence import JobEvidence, Meeting, Raised, RankEvidence
from rallypoint.diagnosis.log_consequences import (
    absent_in_log,
    not_reached,
    refused_value,
    watched_calls,
)
from rallypoint.diagnosis.log_events import NOT_ENDED, Findings, Sighting, Sign
from rallypoint.diagnosis.rank_kinds import (
    CONSEQUENCES,
    HEARD_LATE,
    SIGKILL,
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
# Seconds between an exception and the exit of another rank in which nobody can say which of them
# led to the other: less than a peer needs to notice that a process has gone.
SAME_MOMENT = 0.005


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
    """The causes of a job's failure, the first one first, each with its consequences folded in.
    Never empty; depends on nothing else.
    """
    job, verdicts = look_at(job)
    if job.log is not None:
        reports = (
            confidence.placed(report, job.log) if i == 0 else report
            for i, report in enumerate(_of_log(job, job.log, verdicts))
        )
        return tuple(
            msgspec.structs.replace(report, exit_status=int(report.code == "cause-unknown"))
            for report in reports
        )
    first: tuple[Report, ...] = ()
    rows = ROWS
    if job.helper is not None:
        first, rows = (stops.launcher_died(job, then_told(job, verdicts, [], STRONG)),), ROWS[:1]
    elif job.interrupted_by or job.overdue:
        rows = ROWS[:1]
    shared = devices_shared(
        [(rank.rank, rank.meeting) for rank in job.ranks if rank.meeting], job.world_size
    )
    for row in rows:
        found = [verdict for verdict in verdicts if verdict.kind in row]
        if shared and not first and not _before_sharing(found):
            at_fault = [verdict for verdict in verdicts if verdict.rank.rank in shared]
            return (gpus.device_shared(case_of(job, verdicts, at_fault, "certain"), None),)
        if found:
            return (
                *first,
                *_reports(job, verdicts, [*found, *_exits_before(job, verdicts, found)]),
            )
    if first:
        return first
    if job.overdue:
        return (stops.overdue(job, (*_seen_where_they_wait(job), *_seen_apart(verdicts))),)
    if job.interrupted_by:
        return (stops.interrupted(job, (*_seen_where_they_wait(job), *_seen_apart(verdicts))),)
    return (of_consequences(job, verdicts),)


def _exits_before(job: JobEvidence, verdicts: list[Verdict], found: list[Verdict]) -> list[Verdict]:
    """In a job that goes on when ranks fail: those that had left by an exit code before the first
    of the causes, for no such reason.
    """
    if job.on_failure != "continue" or found[0].kind is Kind.EXITED:
        return []
    first = min(moment(v) - (SAME_MOMENT if v.kind is Kind.RAISED else HEARD_LATE) for v in found)
    return [v for v in verdicts if v.kind is Kind.EXITED and moment(v) < first]


class News(msgspec.Struct, frozen=True):
    """What is to be told of a job that goes on."""

    reports: tuple[Report, ...] = ()
    followed: tuple[str, ...] = ()  # a line each: ranks that lost one of those at fault


# Exceptions that come from outside the program: the same may go well a minute later.
_FROM_OUTSIDE = re.compile(
    r"Connect|Timeout|gaierror|HTTP|URL|SSL|Network|Socket|Broken|Dist|Memory|Interrupt|Blocking|^OSError|^IOError"
)


def same_again(report: Report) -> str:
    """What this report and an equal one have in common: the exception, its words without numbers,
    and its line. "" for a failure that may not come again, or is not an exception of the program's.
    """
    kind, _, words = report.headline.partition(" raised ")[2].partition(":")
    if (
        report.code != "rank-raised"
        or not report.where
        or not kind
        or _FROM_OUTSIDE.search(kind.rpartition(".")[2])
    ):
        return ""
    return f"{kind}:{re.sub('[0-9]+', '0', words)} at {report.where.partition(',')[0]}"


def news(job: JobEvidence, told: Iterable[int], at_fault: Iterable[int]) -> News:
    """What a job that goes on when ranks fail has to tell beyond what was `told`, ranks whose
    failure stands in a report or in a line.

    `at_fault`: of all reports so far. Whoever fails after one of them, and shows nothing but that a
    peer is lost, has followed: no cause of its own is to be looked for, and none to be called
    unknown.
    """
    told, at_fault = set(told), set(at_fault)
    _, verdicts = look_at(job)
    moments = {
        verdict.rank.rank: moment(verdict) for verdict in verdicts if verdict.rank.rank in at_fault
    }
    followed: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for verdict in verdicts:
        before = tuple(
            sorted(rank for rank, at in moments.items() if at <= moment(verdict) + HEARD_LATE)
        )
        if (
            verdict.rank.rank in told
            or not before
            or verdict.kind not in CONSEQUENCES
            or not has_failed(verdict.rank)
        ):
            continue
        words = (
            classify.in_short(verdict.error)
            if verdict.error is not None
            else cases.how_ended(job, verdict.rank)
        )
        followed.setdefault((before, words), []).append(verdict.rank.rank)
    known = told.union(*followed.values())
    rest = tuple(rank for rank in job.ranks if rank.rank not in known)
    lines = tuple(
        f"{ranks_phrase(ranks)} followed {ranks_phrase(before)}: {words}"
        for (before, words), ranks in followed.items()
    )
    return News(
        diagnose(msgspec.structs.replace(job, ranks=rest)) if any(map(has_failed, rest)) else (),
        lines,
    )


def has_failed(rank: RankEvidence) -> bool:
    """Whether its program has ended, or is about to, and not well."""
    return rank.raised is not None or (
        rank.ended is not None and (rank.ended.code, rank.ended.signal) != (0, 0)
    )


def cause_first(reports: Iterable[Report]) -> tuple[Report, ...]:
    """In the order in which they were made, those behind that know no cause: what was seen later
    may well be theirs.
    """
    return tuple(sorted(reports, key=lambda report: report.code == "cause-unknown"))


def _seen_where_they_wait(job: JobEvidence) -> tuple[str, ...]:
    """What keeps ranks that somebody stopped from meeting, when that was seen: nobody would wait
    another half hour for it.
    """
    reached = job.reached
    if reached is None or not reachability.explains(reached):
        return ()
    lines = [
        rank.meeting.line
        for rank in job.ranks
        if rank.meeting is not None and reachability.waits_at(rank, reached)
    ]
    return (reachability.in_short(reached, lines[0]),) if lines else ()


def _seen_apart(verdicts: list[Verdict]) -> tuple[str, ...]:
    """That all ranks stood in collectives, and not in the same one. A healthy job does, too, for a
    moment: nobody knows for how long.
    """
    names = sorted({name for name, _ in different_collectives(verdicts).values()})
    if not names or any(verdict.rank.ended is not None for verdict in verdicts):
        return ()
    differ = f"{', '.join(names[:-1])} and {names[-1]} do not match"
    return (
        f"{differ}: ranks that stay there wait for each other (possible): rallypoint explain collective-mismatch",
    )


def devices_shared(meetings: Iterable[tuple[int, Meeting]], world_size: int) -> tuple[int, ...]:
    """The ranks that join one group of NCCL's with a GPU that another of them has: NCCL refuses
    that at the first collective.
    """
    by_device: dict[str, list[int]] = {}
    for rank, meeting in meetings:
        if (
            meeting.device
            and classify.is_nccl(meeting.backend)
            and meeting.world_size in (-1, world_size)
        ):
            by_device.setdefault(meeting.device, []).append(rank)
    return tuple(sorted(rank for ranks in by_device.values() if len(ranks) > 1 for rank in ranks))


def _before_sharing(found: list[Verdict]) -> bool:
    """Whether there is a cause that has nothing to do with NCCL's refusal of a shared GPU."""
    return any(
        verdict.error is None or not classify.says("device-shared", verdict.error.message)
        for verdict in found
    )


# --- causes ----


def _reports(job: JobEvidence, verdicts: list[Verdict], found: list[Verdict]) -> tuple[Report, ...]:
    """A report for each cause: ranks that show the same are one."""
    groups: dict[Hashable, list[Verdict]] = {}
    for verdict in sorted(_without_echoes(found), key=place_in_order):
        groups.setdefault(_same(verdict, job), []).append(verdict)
    causes = list(groups.values())
    sure: Confidence = "certain"
    if (found[0].kind is Kind.EXITED and len(causes) > 1 and job.on_failure != "continue") or found[
        0
    ].kind is Kind.NCCL:
        causes, sure = causes[:1], "likely"
    elif found[0].kind is Kind.DOUBTFUL and job.world_size > 1:
        sure = "likely"
    elif found[0].kind is Kind.HANDLED:
        sure = "possible"
    told = causes[:MOST_REPORTS]
    at_fault = [verdict for group in causes for verdict in group]
    # Who was waited for in vain may well be at fault.
    in_vain = any(
        verdict.kind is Kind.DOUBTFUL and verdict.error is not None and verdict.error.code
        for verdict in found
    )
    mismatch = any(
        verdict.error is not None and classify.says("sizes-differ", verdict.error.message)
        for verdict in found
    )
    # Where several left with one exit code, those who were stopped may have been about to.
    alike = told[0][0].kind is Kind.EXITED and len(told[0]) > 1
    then = then_told(
        job,
        verdicts,
        at_fault,
        STRONG,
        acquit=not (in_vain or mismatch or alike or _doubt(told[0], verdicts)),
    )
    reports = []
    for i, group in enumerate(told):
        last = i == len(told) - 1
        rest = (
            [v.rank.rank for more in causes[MOST_REPORTS:] for v in more if v.rank.rank >= 0]
            if last
            else []
        )
        more = f"{ranks_phrase(rest)} failed in other ways still: see their logs" if rest else ""
        case = Case(
            job,
            tuple(v.rank for v in group),
            "; ".join(filter(None, (more, then if i == 0 else ""))),
            sure,
        )
        report = ACCOUNTS[group[0].kind](case, group[0].error)
        doubt = doubt_in_log(group, report) if job.log is not None else _doubt(group, verdicts)
        if doubt and sure == "possible":
            report = msgspec.structs.replace(report, confidence=sure, why=doubt)
        elif doubt and report.confidence == "certain":
            report = msgspec.structs.replace(
                report, confidence="likely", why=_also(report.why, doubt)
            )
        reports.append(report)
    if job.log is not None and len(causes) > 1 and reports[0].confidence == "certain":
        # Each of them happened. Which one brought down the job is told by the order of the lines
        # alone.
        why = reports[0].why or "it stands first in the log"
        reports[0] = msgspec.structs.replace(reports[0], confidence="likely", why=why)
    return tuple(reports)


def _also(why: str, doubt: str) -> str:
    return why if doubt in why else "; ".join(filter(None, (why, doubt)))


def _doubt(group: list[Verdict], verdicts: list[Verdict]) -> str:
    """Why an exception of a rank's own may be a consequence all the same, "" when nothing speaks
    for it.
    """
    raised = [
        verdict
        for verdict in group
        if verdict.kind is Kind.RAISED and verdict.error is not None and not verdict.error.code
    ]
    if not raised or len(raised) < len(group):
        return ""
    first = raised[0]
    if all(loss_before(one.rank, one.error) for one in raised):
        return f"{ranks_phrase(one.rank.rank for one in raised)} had lost the connection to a peer before"
    # In a rank that is looked into, an exception that leaves the program is seen: this one the
    # program has printed itself.
    printed = [
        one
        for one in raised
        if one.rank.raised is None and not one.rank.error_file and one.rank.phase != "started"
    ]
    if len(printed) == len(raised) and all(
        one.error not in one.rank.handled and tracebacks.went_on(one.rank.said) for one in raised
    ):
        return "the traceback stands in the log, and lines follow it: it may have been handled"
    weak = [
        one
        for one in verdicts
        if one.kind in (Kind.EXITED, Kind.ABORTED) and moment(one) < moment(first) + SAME_MOMENT
    ]
    if weak and first.error is not None and first.error.at and first.rank.raised is not None:
        return f"{ranks_phrase(one.rank.rank for one in weak)} ended by then, too, and nothing shows which came first"
    return ""


def _without_echoes(found: list[Verdict]) -> list[Verdict]:
    """Of those who waited at one barrier the first whose time is over breaks it for all: what the
    others say is the same once more.
    """
    codes = {verdict.error.code for verdict in found if verdict.error is not None}
    if "barrier-timeout" not in codes:
        return found
    return [
        verdict
        for verdict in found
        if verdict.error is None or verdict.error.code != "barrier-broken"
    ]


def _same(verdict: Verdict, job: JobEvidence) -> Hashable:
    """What makes two ranks' failures one cause."""
    rank, error = verdict.rank, verdict.error
    if job.log is not None and verdict.kind is not Kind.RAISED:
        return (verdict.kind, bool(rank.killed_by))
    if error is not None and verdict.kind is not Kind.EXITED:
        if error.code in classify.SAID_TO_ALL:
            return (verdict.kind, error.code, error.message)
        frame = stacks.own_frame(error.frames)
        place: Hashable = (frame.file, frame.line) if frame else error.message
        if (
            worker := classify.loader_killed(error)
        ) is not None:  # that place says nothing of the worker
            pid, number = worker
            place = (number, number == SIGKILL and resources.for_memory(job.memory, pid))
        return (verdict.kind, error.type, error.code, place)
    if verdict.kind is Kind.NOT_RUN:
        return (Kind.NOT_RUN, rank.not_executed)
    ended = rank.ended
    assert ended is not None
    if verdict.kind is Kind.KILLED:
        return (Kind.KILLED, ended.signal, _for_memory(rank, job))
    return (verdict.kind, ended.signal, ended.code)


def _for_memory(rank: RankEvidence, job: JobEvidence) -> bool:
    if rank.ended is None or rank.ended.signal != SIGKILL:
        return False
    return resources.for_memory(job.memory, rank.pid)


def _raised(case: Case, error: Raised | None) -> Report:
    """Tell of an exception that left the program."""
    assert error is not None
    rank = case.first
    if (foreign := reachability.of_words(error, rank.meeting)) is not None:
        reached = case.job.reached
        if reached is None or reached.outcome != "answered":
            reached = foreign
        return reachability.report(case, reached, error)
    # torch says it a moment later: in the rank's last words, or in what its signal handler raised
    # over the exception that began the chain. Or a moment before: what the handler raises in the
    # middle of a library is sometimes caught there, and only logged.
    gone = classify.fits("producer-gone", error)
    worker = classify.says_loader_killed((*rank.said, *error.traceback.splitlines()))
    if worker is not None and (gone or worker[0] in classify.loader_gone(error.message)):
        return children.loader_killed(case, error, *worker)
    if gone and any(classify.says("files-exhausted", line) for line in rank.said):
        return resources.files_exhausted(case, error)
    return exceptions.raised(case, error)


def _handled(case: Case, error: Raised | None) -> Report:
    """Tell of a failure after which the same process went on, by a log."""
    if error is not None:
        return exceptions.raised(case, error)
    ended = case.first.ended
    crashed = ended is not None and ended.signal in CRASHES
    return (endings.crashed if crashed else endings.killed)(case)


ACCOUNTS: dict[Kind, Callable[[Case, Raised | None], Report]] = {
    Kind.NOT_RUN: endings.not_run,
    Kind.KILLED: endings.killed,
    Kind.RAISED: _raised,
    Kind.CRASHED: endings.crashed,
    Kind.SWALLOWED: exceptions.swallowed,
    Kind.LEAVING: exceptions.on_its_way,
    Kind.EXITED: endings.exited,
    Kind.NCCL: _raised,
    Kind.ABORTED: endings.crashed,
    Kind.HANDLED: _handled,
    Kind.DOUBTFUL: _raised,
}


# --- of a log ---


def _of_log(job: JobEvidence, log: Findings, verdicts: list[Verdict]) -> tuple[Report, ...]:
    """The causes that a log tells of: the same rows, with what only logs have between them."""
    own = [s for s in log.sightings if s.sign is Sign.REPORTED]
    if own:
        return tuple(map(stops.reported, own[:MOST_REPORTS]))
    strong = [verdict for verdict in verdicts if verdict.kind in STRONG]
    reports = _reports(job, verdicts, strong) if strong else ()
    halts = _stops(log)
    if halts and not reports:
        return (stops.interrupted_in_log(halts[0]),)
    if halts and halts[0].place.line < min(verdict.rank.order for verdict in strong):
        doubt = "it stands first; what failed after it may be a consequence, or of a later run in the same log"
        stopped = stops.interrupted_in_log(halts[0])
        stopped = msgspec.structs.replace(stopped, confidence="likely", why=doubt)
        return (stopped, *reports)[:MOST_REPORTS]
    if reports:
        return reports
    lost = any(verdict.kind in (Kind.LOST, Kind.WAITED) for verdict in verdicts)
    for kind in (Kind.EXITED, Kind.NCCL):
        if found := [verdict for verdict in verdicts if verdict.kind is kind]:
            return _reports(job, verdicts, found)
    told = (
        watched_calls(job, verdicts)
        or refused_value(job, log, verdicts)
        or not_reached(job, log, verdicts)
    )
    if told is not None:
        return (told,)
    for kind in (Kind.ABORTED, Kind.HANDLED):
        found = [
            v
            for v in verdicts
            if v.kind is kind and not (lost and v.kind is Kind.HANDLED and v.error is None)
        ]
        found = [v for v in found if v.error is not None] or found
        if found:
            return _reports(job, verdicts, found)
    return (absent_in_log(job, log, verdicts, lost=lost),)


def _stops(log: Findings) -> list[Sighting]:
    """Where somebody stopped the job and that was no answer to a failure, the first one first."""
    stops = [s for s in log.sightings if s.sign is Sign.INTERRUPTED or classify.is_stop(s.error)]
    failures = [s for s in log.sightings if log.has_failed(s.end)]
    failures += [
        s for s in log.sightings if s.sign is Sign.WATCHDOG or classify.is_consequence(s.error)
    ]
    stops = [s for s in stops if not schedulers.cancelled_for_no_reason(s.text)] or stops
    stops = [s for s in stops if not answers(s, failures)]
    return sorted(stops, key=lambda stop: (stop.place.line, stop.end == NOT_ENDED))
