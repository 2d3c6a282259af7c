"""Evidence to causes, with confidence.

Ranked by the kind of evidence, never by the clock alone: a signal that nobody of us sent, and an exception that mentions no lost peer, are
causes; "connection closed by peer", an abort after it, and whatever this launcher sent are consequences. The clock only orders causes of
the same kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from enum import Enum

import msgspec

from rallypoint.diagnosis import meeting_point, reading, stacks
from rallypoint.diagnosis.accounts import cases, children, collectives, endings, exceptions, gpus, rendezvous, resources, stops, wording
from rallypoint.diagnosis.accounts.cases import Case
from rallypoint.diagnosis.evidence import Frame, JobEvidence, Meeting, Raised, RankEvidence
from rallypoint.diagnosis.reading import Meaning
from rallypoint.diagnosis.report import Confidence, Report
from rallypoint.world import ranks_phrase

MOST_REPORTS = 3  # causes told in full; more than three errors at once are mostly one that nobody has recognised
SIGKILL, SIGABRT = 9, 6
# Seconds after a lost connection in which what its rank raises is taken for a consequence of it, when somebody had gone: enough for
# clearing up, too little for a program that has opened a new group without who is missing and works on.
AFTERMATH = 5.0
# Seconds by which the launcher may hear of an end later than the peers do: sockets close before the parent is told.
HEARD_LATE = 0.25
# Seconds between an exception and the exit of another rank in which nobody can say which of them led to the other: less than a peer
# needs to notice that a process has gone.
SAME_MOMENT = 0.005


class Kind(Enum):
    """What one rank's evidence says, looked at alone."""

    NOT_RUN = "not run"  # the program's file could not be executed
    KILLED = "killed"  # a signal that nobody of us sent
    RAISED = "raised"  # an exception that mentions no lost peer
    CRASHED = "crashed"  # SIGSEGV and its like
    SWALLOWED = "swallowed"  # exit code 0 after an error of its own in a shared call
    LEAVING = "leaving"  # an exception of its own that was on its way when it closed its group, and has not left the program yet
    EXITED = "exited"  # an exit code that is not 0, with nothing that explains it
    NCCL = "nccl"  # NCCL gave up, and names no peer: mostly in all ranks at once, whatever was wrong in one
    ABORTED = "aborted"  # SIGABRT with nothing that explains it: peers do that, too, when they lose a connection
    DOUBTFUL = "doubtful"  # a bare "Connection reset", by a peer or by a database; or our store's word of what another rank did not do
    LOST = "lost"  # says that it lost a peer
    WAITED = "waited"  # says that the others did not come
    STOPPED = "stopped"  # ended by us, or with the launcher
    ALIVE = "alive"
    FINISHED = "finished"  # exit code 0


# Causes in the order of their weight. Within a row they are independent of each other; a lower row is a consequence of a higher one.
STRONG = (Kind.NOT_RUN, Kind.KILLED, Kind.RAISED, Kind.CRASHED)
ROWS: tuple[tuple[Kind, ...], ...] = (
    STRONG,
    (Kind.SWALLOWED,),
    (Kind.LEAVING,),
    (Kind.EXITED,),
    (Kind.NCCL,),
    (Kind.ABORTED,),
    (Kind.DOUBTFUL,),
)


# What a rank shows that another one's failure may have brought about.
CONSEQUENCES = (Kind.LOST, Kind.WAITED, Kind.DOUBTFUL, Kind.NCCL, Kind.ABORTED)


class Verdict(msgspec.Struct, frozen=True):
    """A rank, what kind of evidence it shows, and the exception that shows it."""

    rank: RankEvidence
    kind: Kind
    error: Raised | None = None


def diagnose(job: JobEvidence) -> tuple[Report, ...]:
    """The causes of a job's failure, the first one first, each with its consequences folded in. Never empty; depends on nothing else."""
    job, verdicts = _looked_at(job)
    first: tuple[Report, ...] = ()
    rows = ROWS
    if job.helper is not None:
        first, rows = (stops.launcher_died(job, _then(job, verdicts, [], STRONG)),), ROWS[:1]
    elif job.interrupted_by or job.overdue:
        rows = ROWS[:1]
    shared = devices_shared([(rank.rank, rank.meeting) for rank in job.ranks if rank.meeting], job.world_size)
    for row in rows:
        found = [verdict for verdict in verdicts if verdict.kind in row]
        if shared and not first and not _before_sharing(found):
            at_fault = [verdict for verdict in verdicts if verdict.rank.rank in shared]
            return (gpus.device_shared(_case(job, verdicts, at_fault, "certain"), None),)
        if found:
            return (*first, *_reports(job, verdicts, [*found, *_exits_before(job, verdicts, found)]))
    if first:
        return first
    if job.overdue:
        return (stops.overdue(job, (*_seen_where_they_wait(job), *_seen_apart(verdicts))),)
    if job.interrupted_by:
        return (stops.interrupted(job, (*_seen_where_they_wait(job), *_seen_apart(verdicts))),)
    return (_of_consequences(job, verdicts),)


def _exits_before(job: JobEvidence, verdicts: list[Verdict], found: list[Verdict]) -> list[Verdict]:
    """In a job that goes on when ranks fail: those that had left by an exit code before the first of the causes, for no such reason."""
    if job.on_failure != "continue" or found[0].kind is Kind.EXITED:
        return []
    first = min(_moment(v) - (SAME_MOMENT if v.kind is Kind.RAISED else HEARD_LATE) for v in found)
    return [v for v in verdicts if v.kind is Kind.EXITED and _moment(v) < first]


class News(msgspec.Struct, frozen=True):
    """What is to be told of a job that goes on."""

    reports: tuple[Report, ...] = ()
    followed: tuple[str, ...] = ()  # a line each: ranks that lost one of those at fault


# Exceptions that come from outside the program: the same may go well a minute later.
_FROM_OUTSIDE = re.compile(r"Connect|Timeout|gaierror|HTTP|URL|SSL|Network|Socket|Broken|Dist|Memory|Interrupt|Blocking|^OSError|^IOError")


def same_again(report: Report) -> str:
    """What this report and an equal one have in common: the exception, its words without numbers, and its line. "" for a failure that may
    not come again, or is not an exception of the program's."""
    kind, _, words = report.headline.partition(" raised ")[2].partition(":")
    if report.code != "rank-raised" or not report.where or not kind or _FROM_OUTSIDE.search(kind.rpartition(".")[2]):
        return ""
    return f"{kind}:{re.sub('[0-9]+', '0', words)} at {report.where.partition(',')[0]}"


def news(job: JobEvidence, told: Iterable[int], at_fault: Iterable[int]) -> News:
    """What a job that goes on when ranks fail has to tell beyond what was `told`, ranks whose failure stands in a report or in a line.

    `at_fault`: of all reports so far. Whoever fails after one of them, and shows nothing but that a peer is lost, has followed: no cause
    of its own is to be looked for, and none to be called unknown.
    """
    told, at_fault = set(told), set(at_fault)
    _, verdicts = _looked_at(job)
    moments = {verdict.rank.rank: _moment(verdict) for verdict in verdicts if verdict.rank.rank in at_fault}
    followed: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for verdict in verdicts:
        before = tuple(sorted(rank for rank, at in moments.items() if at <= _moment(verdict) + HEARD_LATE))
        if verdict.rank.rank in told or not before or verdict.kind not in CONSEQUENCES or not has_failed(verdict.rank):
            continue
        words = reading.in_short(verdict.error) if verdict.error is not None else cases.how_ended(job, verdict.rank)
        followed.setdefault((before, words), []).append(verdict.rank.rank)
    known = told.union(*followed.values())
    rest = tuple(rank for rank in job.ranks if rank.rank not in known)
    lines = tuple(f"{ranks_phrase(ranks)} followed {ranks_phrase(before)}: {words}" for (before, words), ranks in followed.items())
    return News(diagnose(msgspec.structs.replace(job, ranks=rest)) if any(map(has_failed, rest)) else (), lines)


def has_failed(rank: RankEvidence) -> bool:
    """Whether its program has ended, or is about to, and not well."""
    return rank.raised is not None or (rank.ended is not None and (rank.ended.code, rank.ended.signal) != (0, 0))


def cause_first(reports: Iterable[Report]) -> tuple[Report, ...]:
    """In the order in which they were made, those behind that know no cause: what was seen later may well be theirs."""
    return tuple(sorted(reports, key=lambda report: report.code == "cause-unknown"))


def _looked_at(job: JobEvidence) -> tuple[JobEvidence, list[Verdict]]:
    """The job with its ranks in order, and what each of them shows beside the others."""
    job = msgspec.structs.replace(job, ranks=_placed(sorted(job.ranks, key=lambda rank: rank.rank)))
    verdicts = [_verdict(rank, job) for rank in job.ranks]
    verdicts = [_stopped_after(verdict, verdicts) for verdict in verdicts]
    verdicts = [_after_a_loss(verdict, verdicts) for verdict in verdicts]
    return job, [_shared(verdict, verdicts) for verdict in verdicts]


def _seen_where_they_wait(job: JobEvidence) -> tuple[str, ...]:
    """What keeps ranks that somebody stopped from meeting, when that was seen: nobody would wait another half hour for it."""
    reached = job.reached
    if reached is None or not meeting_point.explains(reached):
        return ()
    lines = [rank.meeting.line for rank in job.ranks if rank.meeting is not None and meeting_point.waits_at(rank, reached)]
    return (meeting_point.in_short(reached, lines[0]),) if lines else ()


def _seen_apart(verdicts: list[Verdict]) -> tuple[str, ...]:
    """That all ranks stood in collectives, and not in the same one. A healthy job does, too, for a moment: nobody knows for how long."""
    names = sorted({name for name, _ in _different_collectives(verdicts).values()})
    if not names or any(verdict.rank.ended is not None for verdict in verdicts):
        return ()
    differ = f"{', '.join(names[:-1])} and {names[-1]} do not match"
    return (f"{differ}: ranks that stay there wait for each other (possible): rallypoint explain collective-mismatch",)


def _placed(ranks: list[RankEvidence]) -> tuple[RankEvidence, ...]:
    """A rank has told where it is by its phase, which says "importing" until it joins a group: in a job that joins none, it runs."""
    if any(rank.meeting is not None or rank.phase in ("joining", "running") for rank in ranks):
        return tuple(ranks)
    return tuple(msgspec.structs.replace(rank, phase="running") if rank.phase == "importing" else rank for rank in ranks)


def devices_shared(meetings: Iterable[tuple[int, Meeting]], world_size: int) -> tuple[int, ...]:
    """The ranks that join one group of NCCL's with a GPU that another of them has: NCCL refuses that at the first collective."""
    by_device: dict[str, list[int]] = {}
    for rank, meeting in meetings:
        if meeting.device and reading.is_nccl(meeting.backend) and meeting.world_size in (-1, world_size):
            by_device.setdefault(meeting.device, []).append(rank)
    return tuple(sorted(rank for ranks in by_device.values() if len(ranks) > 1 for rank in ranks))


def _before_sharing(found: list[Verdict]) -> bool:
    """Whether there is a cause that has nothing to do with NCCL's refusal of a shared GPU."""
    return any(verdict.error is None or not reading.device_shared(verdict.error.message) for verdict in found)


def is_consequence(error: Raised) -> bool:
    """True when an exception speaks of a lost or missing peer: the cause is then probably still to come."""
    if error.code:
        return error.code in reading.AFTER_ANOTHER
    return not reading.producer_gone(error) and reading.meaning(error.type, error.message, error.call) is not Meaning.OWN


# --- one rank alone --------------------------------------------------------------------------------------------------


def _verdict(rank: RankEvidence, job: JobEvidence) -> Verdict:
    error, ended = _last_exception(rank, job), rank.ended
    if error is not None and (before := _never_joined(rank, error)) is not None:
        return Verdict(rank, _kind_of(before), before)
    if error is not None:
        inner = reading.wrapped(error) if _kind_of(error) is Kind.RAISED else None
        if inner is not None and _kind_of(inner) in (Kind.LOST, Kind.WAITED):
            return Verdict(rank, _kind_of(inner), inner)
        return Verdict(rank, _kind_of(error), error)
    if rank.not_executed:
        return Verdict(rank, Kind.NOT_RUN)
    if ended is None:
        return _leaving(rank, job) or Verdict(rank, Kind.STOPPED if rank.sent else Kind.ALIVE)
    # Whom we only asked, and who died of SIGKILL all the same, was killed by somebody else: the kernel needs a second for a large process.
    asked = bool(rank.sent) and not (ended.signal == SIGKILL and "SIGKILL" not in rank.sent)
    if asked or _by_launcher(rank, job):
        well = ended.code == 0 and not ended.signal and not rank.sent
        return Verdict(rank, Kind.FINISHED) if well else _leaving(rank, job) or Verdict(rank, Kind.STOPPED)
    peer = next((one for one in reversed(rank.handled) if _kind_of(one) in (Kind.LOST, Kind.WAITED)), None)
    own = next((one for one in rank.handled if _kind_of(one) is Kind.RAISED), None)
    if ended.signal:
        if ended.signal == SIGKILL or (ended.signal not in wording.CRASHES and peer is None):
            return Verdict(rank, Kind.KILLED)
        if peer is not None or reading.says_lost(rank.said):
            return Verdict(rank, _kind_of(peer) if peer else Kind.LOST, peer)
        if (mismatch := _aborted_by_gloo(rank)) is not None:
            return Verdict(rank, Kind.RAISED, mismatch)
        return Verdict(rank, Kind.ABORTED if ended.signal == SIGABRT else Kind.CRASHED)
    if ended.code == 0:
        # What was on its way while it closed the group may have been caught for good reason, and is no cause while others show one.
        return Verdict(rank, Kind.SWALLOWED if own and not own.on_its_way else Kind.FINISHED, own or peer)
    if rank.handled and peer is rank.handled[-1]:
        return Verdict(rank, _kind_of(peer), peer)
    if own is None and reading.says_lost(rank.said):
        return Verdict(rank, Kind.LOST)
    if own is None and reading.says_waited(rank.said):
        return Verdict(rank, Kind.WAITED)
    return Verdict(rank, Kind.EXITED, own)


def _leaving(rank: RankEvidence, job: JobEvidence) -> Verdict | None:
    """Of a rank that has not ended by itself: what was on its way when it closed its group."""
    error = rank.handled[-1] if rank.handled and not job.interrupted_by else None
    if error is None or not error.on_its_way:
        return None
    kind = _kind_of(error)
    return Verdict(rank, Kind.LEAVING if kind is Kind.RAISED else kind, error)


def _last_exception(rank: RankEvidence, job: JobEvidence) -> Raised | None:
    """What left the program: as our hook saw it, as `@record` wrote it, or as the log shows it. Not the KeyboardInterrupt of our SIGINT."""
    error = rank.raised
    if error is None and rank.error_file:
        error = reading.error_file(rank.error_file)
    if error is None and rank.ended is not None and rank.ended.code == 1:
        error = reading.exception_in(rank.said)
    kind = error.type.rpartition(".")[2] if error is not None else ""
    ours = kind == "SystemExit" or (kind == "KeyboardInterrupt" and bool(rank.sent or job.interrupted_by))
    return None if ours else error


def _never_joined(rank: RankEvidence, error: Raised) -> Raised | None:
    """Why a rank has no group when it asks for one: the program went on after init_process_group had failed."""
    if not reading.group_missing(error.message) or rank.phase == "running":
        return None
    return next((one for one in reversed(rank.handled) if one.call == "init_process_group"), None)


def _aborted_by_gloo(rank: RankEvidence) -> Raised | None:
    """What gloo found wrong in a thread of its own, where nobody catches it."""
    words = next((line for line in rank.said if reading.sizes_differ(line) is not None), None)
    if words is None or rank.ended is None:
        return None
    frames = cases.last_stack(rank) or stacks.main_frames(rank.stack_text)
    call = stacks.collective(frames)
    return Raised("gloo::EnforceNotMet", words.strip().removeprefix("what():").strip(), frames, "", rank.ended.at, call[0] if call else "")


def _kind_of(error: Raised) -> Kind:
    if (inside := reading.in_process(error)) is not None:
        error = inside[1]
    if reading.producer_gone(error):
        return Kind.RAISED
    if error.code:
        return Kind.DOUBTFUL if error.code in reading.AFTER_ANOTHER else Kind.RAISED
    if reading.nccl_gave_up(error.type, error.message):
        return Kind.LOST if reading.nccl_names_peer(error.message) else Kind.NCCL
    kinds = {Meaning.OWN: Kind.RAISED, Meaning.LOST: Kind.LOST, Meaning.WAITED: Kind.WAITED, Meaning.MAYBE_LOST: Kind.DOUBTFUL}
    return kinds[reading.meaning(error.type, error.message, error.call)]


def _by_launcher(rank: RankEvidence, job: JobEvidence) -> bool:
    """Ended with the launcher: by the signal that it got, too (batch systems signal every process), or by the death of its parent."""
    ended = rank.ended
    if ended is None:
        return False
    if job.interrupted_by:
        return not ended.signal or wording.signal_name(ended.signal) == job.interrupted_by
    return job.helper is not None and ended.signal == SIGKILL


# --- one rank beside the others --------------------------------------------------------------------------------------


def _stopped_after(verdict: Verdict, verdicts: list[Verdict]) -> Verdict:
    """What a rank raised after we had told it to stop is no cause of its own, unless it came before every other one."""
    if verdict.kind not in (Kind.RAISED, Kind.LEAVING) or not verdict.rank.sent:
        return verdict
    others = [_moment(one) for one in verdicts if any(one.kind in row for row in ROWS) and not one.rank.sent]
    if others and (not verdict.error or not verdict.error.at or verdict.error.at >= min(others)):
        return Verdict(verdict.rank, Kind.STOPPED)
    return verdict


def _after_a_loss(verdict: Verdict, verdicts: list[Verdict]) -> Verdict:
    """What a rank raised just after it had caught the loss of a peer is no cause, when another had failed or left by then without one."""
    raised = verdict.error
    if verdict.kind not in (Kind.RAISED, Kind.LEAVING) or raised is None or not raised.at:
        return verdict
    peer = _loss_before(verdict.rank, raised)
    if peer is None:
        return verdict
    gone = (*(kind for row in ROWS for kind in row), Kind.FINISHED)
    for one in verdicts:
        had_gone = one.kind in gone and one.rank is not verdict.rank and _moment(one) <= raised.at + HEARD_LATE
        if had_gone and _loss_before(one.rank, one.error) is None:
            return Verdict(verdict.rank, _kind_of(peer), peer)
    return verdict


def _loss_before(rank: RankEvidence, error: Raised | None) -> Raised | None:
    """The loss of a peer that a rank had caught shortly before an error, or before its end."""
    at = error.at if error is not None else rank.ended.at if rank.ended is not None else 0.0
    losses = [one for one in rank.handled if one is not error and _kind_of(one) in (Kind.LOST, Kind.WAITED)]
    return next((one for one in reversed(losses) if one.at <= at <= one.at + AFTERMATH), None)


def _shared(verdict: Verdict, verdicts: list[Verdict]) -> Verdict:
    """An error that a rank swallowed is no cause when another rank swallowed the same and went on, or when nobody was left behind."""
    if verdict.kind is not Kind.SWALLOWED or verdict.error is None:
        return verdict
    same = (verdict.error.type, verdict.error.call)
    for one in verdicts:
        if one.rank.ended is None and any((error.type, error.call) == same for error in one.rank.handled):
            return Verdict(verdict.rank, Kind.FINISHED)
    left = any(one.kind not in (Kind.FINISHED, Kind.SWALLOWED) for one in verdicts)
    return verdict if left or all(one.kind is Kind.SWALLOWED for one in verdicts) else Verdict(verdict.rank, Kind.FINISHED)


def _moment(verdict: Verdict) -> float:
    if verdict.error is not None and verdict.error.at:
        return verdict.error.at
    if verdict.kind is Kind.EXITED and verdict.rank.left_when:  # torch's interpreter takes a quarter of a second to close down
        return verdict.rank.left_when
    return verdict.rank.ended.at if verdict.rank.ended is not None else 0.0


def _place_in_order(verdict: Verdict) -> tuple[float, int, int]:
    ended = verdict.rank.ended
    return (_moment(verdict), ended.order if ended is not None else 1 << 30, verdict.rank.rank)


# --- causes ----------------------------------------------------------------------------------------------------------


def _reports(job: JobEvidence, verdicts: list[Verdict], found: list[Verdict]) -> tuple[Report, ...]:
    """A report for each cause: ranks that show the same are one."""
    groups: dict[Hashable, list[Verdict]] = {}
    for verdict in sorted(_without_echoes(found), key=_place_in_order):
        groups.setdefault(_same(verdict, job), []).append(verdict)
    causes = list(groups.values())
    confidence: Confidence = "certain"
    if (found[0].kind is Kind.EXITED and len(causes) > 1 and job.on_failure != "continue") or found[0].kind is Kind.NCCL:
        causes, confidence = causes[:1], "likely"
    elif found[0].kind is Kind.DOUBTFUL and job.world_size > 1:
        confidence = "likely"
    told = causes[:MOST_REPORTS]
    at_fault = [verdict for group in causes for verdict in group]
    # Who was waited for in vain may well be at fault.
    in_vain = any(verdict.kind is Kind.DOUBTFUL and verdict.error is not None and verdict.error.code for verdict in found)
    mismatch = any(verdict.error is not None and reading.sizes_differ(verdict.error.message) for verdict in found)
    # Where several left with one exit code, those who were stopped may have been about to.
    alike = told[0][0].kind is Kind.EXITED and len(told[0]) > 1
    then = _then(job, verdicts, at_fault, STRONG, acquit=not (in_vain or mismatch or alike or _doubt(told[0], verdicts)))
    reports = []
    for i, group in enumerate(told):
        last = i == len(told) - 1
        rest = [verdict.rank.rank for more in causes[MOST_REPORTS:] for verdict in more] if last else []
        more = f"{ranks_phrase(rest)} failed in other ways still: see their logs" if rest else ""
        case = Case(job, tuple(v.rank for v in group), "; ".join(filter(None, (more, then if i == 0 else ""))), confidence)
        report = ACCOUNTS[group[0].kind](case, group[0])
        if confidence == "certain" and (doubt := _doubt(group, verdicts)):
            report = msgspec.structs.replace(report, confidence="likely", why="; ".join(filter(None, (report.why, doubt))))
        reports.append(report)
    return tuple(reports)


def _doubt(group: list[Verdict], verdicts: list[Verdict]) -> str:
    """Why an exception of a rank's own may be a consequence all the same, "" when nothing speaks for it."""
    raised = [verdict for verdict in group if verdict.kind is Kind.RAISED and verdict.error is not None and not verdict.error.code]
    if not raised or len(raised) < len(group):
        return ""
    first = raised[0]
    if all(_loss_before(one.rank, one.error) for one in raised):
        return f"{ranks_phrase(one.rank.rank for one in raised)} had lost the connection to a peer before"
    # In a rank that is looked into, an exception that leaves the program is seen: this one the program has printed itself.
    printed = [one for one in raised if one.rank.raised is None and not one.rank.error_file and one.rank.phase != "started"]
    if len(printed) == len(raised) and all(one.error not in one.rank.handled and reading.went_on(one.rank.said) for one in raised):
        return "the traceback stands in the log, and lines follow it: it may have been handled"
    weak = [one for one in verdicts if one.kind in (Kind.EXITED, Kind.ABORTED) and _moment(one) < _moment(first) + SAME_MOMENT]
    if weak and first.error is not None and first.error.at and first.rank.raised is not None:
        return f"{ranks_phrase(one.rank.rank for one in weak)} ended by then, too, and nothing shows which came first"
    return ""


def _without_echoes(found: list[Verdict]) -> list[Verdict]:
    """Of those who waited at one barrier the first whose time is over breaks it for all: what the others say is the same once more."""
    codes = {verdict.error.code for verdict in found if verdict.error is not None}
    if "barrier-timeout" not in codes:
        return found
    return [verdict for verdict in found if verdict.error is None or verdict.error.code != "barrier-broken"]


def _same(verdict: Verdict, job: JobEvidence) -> Hashable:
    """What makes two ranks' failures one cause."""
    rank, error = verdict.rank, verdict.error
    if error is not None and verdict.kind is not Kind.EXITED:
        if error.code in reading.SAID_TO_ALL:
            return (verdict.kind, error.code, error.message)
        frame = stacks.own_frame(error.frames)
        place: Hashable = (frame.file, frame.line) if frame else error.message
        if (worker := reading.loader_killed(error)) is not None:  # that place says nothing of the worker
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


def _not_run(case: Case, verdict: Verdict) -> Report:
    return endings.not_run(case, verdict.rank.not_executed)


def _killed(case: Case, verdict: Verdict) -> Report:
    if _for_memory(verdict.rank, case.job):
        return resources.out_of_memory(case)
    return endings.killed(case, verdict.rank.ended.signal if verdict.rank.ended else SIGKILL)


def _crashed(case: Case, verdict: Verdict) -> Report:
    return endings.crashed(case, verdict.rank.ended.signal if verdict.rank.ended else SIGABRT)


def _exited(case: Case, verdict: Verdict) -> Report:
    return endings.exited(case, verdict.rank.ended.code if verdict.rank.ended else 1, verdict.error)


def _raised(case: Case, verdict: Verdict) -> Report:
    error, meeting = verdict.error, verdict.rank.meeting
    assert error is not None
    if (foreign := meeting_point.of_words(error, meeting)) is not None:
        reached = case.job.reached
        return meeting_point.report(case, reached if reached is not None and reached.outcome == "answered" else foreign, error)
    # torch says it a moment later: in the rank's last words, or in what its signal handler raised over the exception that began the chain.
    # Or a moment before: what the handler raises in the middle of a library is sometimes caught there, and only logged.
    worker = reading.says_loader_killed((*verdict.rank.said, *error.traceback.splitlines()))
    if worker is not None and (reading.producer_gone(error) or worker[0] in reading.loader_gone(error.message)):
        return children.loader_killed(case, error, *worker)
    if reading.producer_gone(error) and any(reading.says_files_exhausted(line) for line in verdict.rank.said):
        return resources.files_exhausted(case, error)
    return exceptions.raised(case, error)


def _swallowed(case: Case, verdict: Verdict) -> Report:
    assert verdict.error is not None
    return exceptions.swallowed(case, verdict.error)


def _on_its_way(case: Case, verdict: Verdict) -> Report:
    assert verdict.error is not None
    return exceptions.on_its_way(case, verdict.error)


ACCOUNTS: dict[Kind, Callable[[Case, Verdict], Report]] = {
    Kind.NOT_RUN: _not_run,
    Kind.KILLED: _killed,
    Kind.RAISED: _raised,
    Kind.CRASHED: _crashed,
    Kind.SWALLOWED: _swallowed,
    Kind.LEAVING: _on_its_way,
    Kind.EXITED: _exited,
    Kind.NCCL: _raised,
    Kind.ABORTED: _crashed,
    Kind.DOUBTFUL: _raised,
}


# --- only consequences -----------------------------------------------------------------------------------------------


def _of_consequences(job: JobEvidence, verdicts: list[Verdict]) -> Report:
    """No rank shows a cause of its own: what the ranks show together, or that the cause is not known."""
    hurt = sorted((v for v in verdicts if v.kind in (Kind.LOST, Kind.WAITED)), key=_place_in_order)
    meetings = _meetings(job)
    if meetings:
        ranks = {rank for _, numbers in meetings for rank in numbers}
        return rendezvous.address_differs(_case(job, verdicts, [v for v in verdicts if v.rank.rank in ranks], "certain"), meetings)
    stale = [v for v in hurt if v.error is not None and _by_stale_file(v)]
    if stale:
        meeting, error = stale[0].rank.meeting, stale[0].error
        assert meeting is not None
        assert error is not None
        return rendezvous.stale_file(_case(job, verdicts, stale, "likely"), error, meeting.address)
    if (unmet := _unmet(job, verdicts) or _store_lost(job, verdicts, hurt)) is not None:
        return unmet
    beyond = [(v, counted) for v in hurt if (counted := _waits_for_more(v, job)) is not None]
    if beyond and beyond[0][0].error is not None:
        verdict, counted = beyond[0]
        return rendezvous.store_waits(_case(job, verdicts, [verdict], "likely"), beyond[0][0].error, *counted)
    left = _left_before(verdicts, hurt)
    if left:
        hid = [v for v in left if v.error is not None]
        error = hid[0].error if hid else None
        if error is not None and len(hid) == len(left):
            return exceptions.swallowed(_case(job, verdicts, hid, "likely"), error)
        return endings.left_early(_case(job, verdicts, [v for v in left if v.error is None], "likely"))
    if (calls := _different_collectives(verdicts)) and any(v.kind is Kind.WAITED for v in hurt):
        return collectives.collective_mismatch(_case(job, verdicts, verdicts, "likely"), calls)
    waited = [v for v in hurt if v.kind is Kind.WAITED and v.error is not None]
    if (named := _named_as_missing(job, verdicts, waited)) is not None:
        return named
    absent = [v for v in verdicts if v.kind in (Kind.ALIVE, Kind.STOPPED) and v.rank.phase != "joining"]
    if waited and waited[0].error is not None and len(waited) == len(hurt) == len(verdicts) and all(_waits_for_own_key(v) for v in waited):
        return _never_set(_case(job, verdicts, waited, "likely"), waited[0].error)
    if waited and waited[0].error is not None and _waits_alone(waited, absent):
        case = Case(job, tuple(v.rank for v in waited), _then(job, verdicts, waited, (), acquit=False), "likely")
        return _never_set(case, waited[0].error)
    if waited and waited[0].error is not None and absent and len(waited) == len(hurt):
        case = Case(job, tuple(v.rank for v in absent), _then(job, verdicts, [*absent, *waited], ()), "likely")
        return collectives.missing(case, [v.rank for v in waited], waited[0].error)
    first = hurt[:1] or [v for v in verdicts if v.kind is Kind.STOPPED and v.rank.ended is not None and not v.rank.sent][:1]
    # Who is alive may be at fault: an exception that is still on its way through a `finally` has not been seen.
    case = Case(job, tuple(v.rank for v in first), _then(job, verdicts, first, (), acquit=False), "possible" if first else "certain")
    error = first[0].error if first else None
    if error is not None and reading.nccl_gave_up(error.type, error.message):
        return exceptions.raised(msgspec.structs.replace(case, confidence="likely"), error)
    return stops.unknown(case, error)


def _waits_for_more(verdict: Verdict, job: JobEvidence) -> tuple[int, int] | None:
    """How many processes came to a TCPStore, and how many it waited for, of one that waited for more than the job has."""
    counted = reading.came_short(verdict.error.message) if verdict.error is not None else None
    own = verdict.error is not None and not verdict.error.call
    return counted if counted is not None and own and counted[1] > job.world_size else None


def _named_as_missing(job: JobEvidence, verdicts: list[Verdict], waited: list[Verdict]) -> Report | None:
    """Those whom `monitored_barrier` names: its rank 0 asks each of the others, and what those say in turn is that rank 0 has gone."""
    for one in waited:
        numbers = reading.not_at_barrier(one.error.message) if one.error is not None else ()
        missing = [v for v in verdicts if v.rank.rank in numbers and v.kind in (Kind.ALIVE, Kind.STOPPED)]
        if one.error is not None and missing and job.world_size == len(verdicts):
            others = [v for v in verdicts if v.kind in (Kind.WAITED, Kind.LOST)]
            case = Case(job, tuple(v.rank for v in missing), _then(job, verdicts, [*missing, *others], ()), "likely")
            return collectives.missing(case, [v.rank for v in others], one.error)
    return None


def _waits_alone(waited: list[Verdict], absent: list[Verdict]) -> bool:
    """Whether these waited for a key of the store, while all the others stand in a collective and wait for them."""
    own = all(v.error is not None and not v.error.call and "keys:" in v.error.message for v in waited)
    return own and bool(absent) and all(stacks.collective(v.rank.stack) is not None for v in absent)


def _never_set(case: Case, error: Raised) -> Report:
    """A wait for a key of torch's store, while nobody shows that it was to set that key."""
    report, keys = exceptions.raised(case, error), reading.keys_of_program(error.message)
    if not keys:
        return report
    named = ", ".join(f'"{key}"' for key in keys)
    what = f"nobody set {named}" if len(keys) == 1 else f"{named} were not all set"
    return msgspec.structs.replace(report, why=f"{what} in time, and no rank shows who was to")


def _waits_for_own_key(verdict: Verdict) -> bool:
    """Whether it waited for a key that no call of torch's waits for."""
    error = verdict.error
    return error is not None and not error.call and bool(reading.keys_of_program(error.message))


def _different_collectives(verdicts: list[Verdict]) -> dict[int, tuple[str, Frame]]:
    """By rank the collective that it stood in or that its error left, and the program's line; {} when any was elsewhere, or all in one.

    The error's own name for the call is not enough: of `all_gather_object` torch names the `all_gather` inside.
    """
    found: dict[int, tuple[str, Frame]] = {}
    for verdict in verdicts:
        frames = verdict.error.frames if verdict.error is not None else verdict.rank.stack if verdict.rank.ended is None else ()
        call, own = stacks.collective(frames), stacks.own_frame(frames)
        if call is None or own is None or stacks.library(own):
            return {}
        found[verdict.rank.rank] = call[0], own
    return found if len({name for name, _ in found.values()}) > 1 else {}


def _case(job: JobEvidence, verdicts: list[Verdict], at_fault: list[Verdict], confidence: Confidence) -> Case:
    return Case(job, tuple(v.rank for v in at_fault), _then(job, verdicts, at_fault, ()), confidence)


def _meetings(job: JobEvidence) -> list[tuple[Meeting, tuple[int, ...]]]:
    """The different places at which ranks of the whole job's group look for each other. Only calls of one turn are to meet: a rank that
    has gone on to its next group looks elsewhere for good reason."""
    found: dict[int, dict[str, tuple[Meeting, list[int]]]] = {}
    for rank in job.ranks:
        meeting = rank.meeting
        if meeting is None or not meeting.address or meeting.method == "store" or meeting.world_size not in (-1, job.world_size):
            continue
        place = re.sub(r"^(localhost|127\.0\.0\.1|\[?::1\]?):", "loopback:", meeting.address)
        found.setdefault(meeting.turn, {}).setdefault(place, (meeting, []))[1].append(rank.rank)
    differing = next((places for _, places in sorted(found.items()) if len(places) > 1), {})
    return [(meeting, tuple(ranks)) for meeting, ranks in differing.values()]


def _unmet(job: JobEvidence, verdicts: list[Verdict]) -> Report | None:
    """Ranks that could not reach their meeting point, and what was seen there. Not while rank 0, who should listen there, is elsewhere."""
    reached = job.reached
    if reached is None or not meeting_point.explains(reached):
        return None
    said = [v for v in verdicts if v.error is not None and meeting_point.where(v.error, v.rank.meeting) == (reached.host, reached.port)]
    silent = [v for v in verdicts if v not in said and meeting_point.waits_at(v.rank, reached)]
    late = [v for v in verdicts if v.kind in (Kind.ALIVE, Kind.STOPPED) and v.rank.rank == 0 and v.rank.meeting is None]
    met = any(rank.meeting is not None for rank in job.ranks)  # else they are not looked into, and nobody knows who has come
    if not (said or silent) or (late and met and reached.outcome == "refused"):
        return None
    at_fault = sorted(said, key=_place_in_order) + silent
    return meeting_point.report(_case(job, verdicts, at_fault, "certain"), reached, said[0].error if said else None)


def _store_lost(job: JobEvidence, verdicts: list[Verdict], hurt: list[Verdict]) -> Report | None:
    """Ranks whose connection to a store of torch's broke, and what was seen where it was."""
    reached = job.reached
    if reached is None:
        return None
    at = (reached.host, reached.port)
    broken = [v for v in hurt if v.error is not None and meeting_point.store_of(v.error, v.rank.said) == at]
    error = broken[0].error if broken else None
    return meeting_point.store_lost(_case(job, verdicts, broken, "certain"), reached, error) if error is not None else None


def _by_stale_file(verdict: Verdict) -> bool:
    meeting, error = verdict.rank.meeting, verdict.error
    if meeting is None or error is None or not meeting.method.startswith("file:"):
        return False
    return error.call in ("", "init_process_group") and "connectFullMesh" in error.message and "refused" in error.message


def _left_before(verdicts: list[Verdict], hurt: list[Verdict]) -> list[Verdict]:
    """Ranks that had done with the others before the first of those that were hurt lost them: ended well, come to their end (torch takes
    a quarter of a second to close down), or with their group closed. All that ended well when the others are still there."""
    finished = [v for v in verdicts if v.kind is Kind.FINISHED]
    if len(finished) == len(verdicts):
        return []
    ends = [v.rank.ended.order for v in hurt if v.rank.ended is not None]
    ended = [v for v in finished if not ends or (v.rank.ended is not None and v.rank.ended.order < min(ends))]
    if not hurt:
        return ended
    first = min(hurt, key=_place_in_order)
    # Who had closed its own group was not hurt by those who closed theirs. Nor was who waits to join one: it may be another. But who has
    # the others' addresses, and loses them, joins the same: a group is open in one rank a moment before it is in all.
    in_it = not 0 < first.rank.closed_at <= _moment(first) and (first.rank.phase != "joining" or first.kind is Kind.LOST)
    done = {v.rank.rank: _had_done(v, closing=in_it) for v in verdicts}
    before = [v for v in verdicts if v in ended or 0 < done[v.rank.rank] <= _moment(first)]
    return before or [v for v in verdicts if 0 < done[v.rank.rank] <= _moment(first) + HEARD_LATE]


def _had_done(verdict: Verdict, *, closing: bool) -> float:
    """When a rank that shows no error came to its end, or (`closing`) closed its group; 0 when neither is known."""
    rank = verdict.rank
    if verdict.kind not in (Kind.ALIVE, Kind.STOPPED, Kind.FINISHED) or verdict.error is not None or rank.handled or rank.left_at:
        return 0.0
    if closing and rank.closed_at:
        return rank.closed_at
    return rank.phase_at if rank.phase in ("finishing", "done") else 0.0


# --- consequences ----------------------------------------------------------------------------------------------------


def _then(job: JobEvidence, verdicts: list[Verdict], at_fault: list[Verdict], certain: Iterable[Kind], *, acquit: bool = True) -> str:
    """What became of the ranks that are not at fault, in a sentence. `acquit`: and that they are not."""
    blamed = {verdict.rank.rank for verdict in at_fault}
    kinds: dict[Kind, list[int]] = {}
    of_store: dict[str, list[int]] = {}
    for verdict in verdicts:
        if verdict.rank.rank in blamed or (not at_fault and verdict.kind in certain):
            continue
        if verdict.kind is Kind.DOUBTFUL and verdict.error is not None and verdict.error.code:
            of_store.setdefault(reading.AFTER_ANOTHER[verdict.error.code], []).append(verdict.rank.rank)
        else:
            kinds.setdefault(verdict.kind, []).append(verdict.rank.rank)
    lost, waited = _ranks(kinds, Kind.LOST, Kind.DOUBTFUL), _ranks(kinds, Kind.WAITED)
    stopped, alive = _ranks(kinds, Kind.STOPPED), _ranks(kinds, Kind.ALIVE)
    going_on = alive if job.on_failure == "continue" else []
    # The sys.exit of these was seen, too, at the same line; what exit code it would have given is not known.
    lines = {verdict.rank.left_at for verdict in at_fault} - {""}
    exiting = sorted({v.rank.rank for v in verdicts if v.rank.left_at in lines} & {*stopped, *alive} - {*going_on})
    stopped = sorted({*stopped, *alive} - {*going_on, *exiting})
    innocent = [
        f"{ranks_phrase(lost)} lost the connection to a peer" if lost else "",
        f"{ranks_phrase(waited)} waited for a peer until the timeout" if waited else "",
        *(f"{ranks_phrase(ranks)} {words}" for words, ranks in of_store.items()),
        f"{ranks_phrase(stopped)} {'was' if len(stopped) == 1 else 'were'} stopped" if stopped else "",
    ]
    told = len(lost) + len(waited) + len(stopped) + sum(map(len, of_store.values()))
    blameless = "" if not told or not acquit else "it is not at fault" if told == 1 else "they are not at fault"
    others = [f"{ranks_phrase(going_on)} {'goes' if len(going_on) == 1 else 'go'} on"] if going_on else []
    if exiting:
        others.append(f"{ranks_phrase(exiting)} {'was' if len(exiting) == 1 else 'were'} leaving by the same sys.exit, and stopped")
    for kind, words in (
        (Kind.EXITED, "exited with a code that is not 0"),
        (Kind.NCCL, "had an error of NCCL's"),
        (Kind.ABORTED, "aborted"),
    ):
        if kinds.get(kind):
            others.append(f"{ranks_phrase(kinds[kind])} {words}, likely for that reason")
    if kinds.get(Kind.FINISHED):
        others.append(f"{ranks_phrase(kinds[Kind.FINISHED])} {cases.went_home(job)}")
    if kinds.get(Kind.SWALLOWED):
        others.append(f"{ranks_phrase(kinds[Kind.SWALLOWED])} caught an error and {cases.went_home(job)}")
    return "; ".join(filter(None, (*innocent, blameless, *others)))


def _ranks(kinds: dict[Kind, list[int]], *wanted: Kind) -> list[int]:
    return sorted(rank for kind in wanted for rank in kinds.get(kind, ()))
