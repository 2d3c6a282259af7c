"""What kind of evidence each rank shows, first alone and then beside the others. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum

import msgspec
from msgspec.structs import replace

from rallypoint.diagnosis import classify, stacks, tracebacks
from rallypoint.diagnosis.causes.wording import CRASHES, signal_name
from rallypoint.diagnosis.evidence import JobEvidence, Raised, RankEvidence
from rallypoint.diagnosis.node_evidence import of_one_clock

SIGKILL, SIGABRT, SIGPIPE, SIGTERM = 9, 6, 13, 15
# Seconds after a lost connection in which what its rank raises is taken for a consequence of it,
# when somebody had gone: enough for clearing up, too little for a program that has opened a new
# group without who is missing and works on.
AFTERMATH = 5.0
# Seconds by which the launcher may hear of an end later than the peers do: sockets close before the
# parent is told.
HEARD_LATE = 0.25
# Seconds between two failures in which nobody can say which of them led to the other: less than a
# peer needs to notice that a process has gone.
SAME_MOMENT = 0.005


class Kind(Enum):
    """What one rank's evidence says, looked at alone."""

    NOT_RUN = "not run"  # the program's file could not be executed
    KILLED = "killed"  # a signal that nobody of us sent
    RAISED = "raised"  # an exception that mentions no lost peer
    CRASHED = "crashed"  # SIGSEGV and its like
    SWALLOWED = "swallowed"  # exit code 0 after an error of its own in a shared call
    LEAVING = "leaving"  # an exception of its own, which has not left the program yet
    EXITED = "exited"  # an exit code that is not 0, with nothing that explains it
    NCCL = "nccl"  # NCCL gave up, and names no peer: mostly in all ranks at once
    ABORTED = "aborted"  # SIGABRT with nothing that explains it: a lost connection leads to it, too
    HANDLED = "handled"  # of a log: a failure after which the same process went on for long
    DOUBTFUL = "doubtful"  # a bare "Connection reset", SIGPIPE, or the store's word on another rank
    LOST = "lost"  # says that it lost a peer
    WAITED = "waited"  # says that the others did not come
    TOLD = "told"  # torch passed on to it what other ranks raised in a checkpoint
    STOPPED = "stopped"  # ended by us, or with the launcher
    ALIVE = "alive"
    FINISHED = "finished"  # exit code 0


STRONG = (Kind.NOT_RUN, Kind.KILLED, Kind.RAISED, Kind.CRASHED)
"""Kinds of evidence that are independent of each other; all others may be consequences of them."""

OF_CAUSES = (
    *STRONG, Kind.SWALLOWED, Kind.LEAVING, Kind.EXITED, Kind.NCCL, Kind.ABORTED, Kind.HANDLED, Kind.DOUBTFUL,
)  # fmt: skip
"""Kinds of evidence that may be the cause, in the order of their weight."""

HURT = (Kind.LOST, Kind.WAITED)
"""Kinds of evidence of a rank that speaks of a peer."""

CONSEQUENCES = (*HURT, Kind.TOLD, Kind.DOUBTFUL, Kind.NCCL, Kind.ABORTED)
"""Kinds of evidence that another rank's failure may have brought about."""


class Verdict(msgspec.Struct, frozen=True):
    """A rank, the kind of evidence it shows, and the exception that shows it."""

    rank: RankEvidence
    kind: Kind
    error: Raised | None = None
    doubt: str = ""  # why it may be another rank

    @property
    def message(self) -> str:
        return self.error.message if self.error is not None else ""


def look_at(job: JobEvidence) -> tuple[JobEvidence, list[Verdict]]:
    """Return the job with its ranks where they were, all times by one clock, and what each of them
    shows beside the others.
    """
    if job.log is not None:
        return job, [_verdict_in_log(rank) for rank in job.ranks]
    job = of_one_clock(job)
    if all(rank.meeting is None and rank.phase not in ("joining", "running") for rank in job.ranks):
        # In a job that joins no group "importing", which a rank says until it joins one, means that
        # the program runs.
        job = job.with_ranks(
            replace(rank, phase="running") if rank.phase == "importing" else rank
            for rank in job.ranks
        )
    verdicts = [_verdict(rank, job) for rank in job.ranks]
    slack = job.clock_error
    return job, _in_checkpoints(_shared(_after_a_loss(_stopped_after(verdicts, slack), slack)))


def _verdict(rank: RankEvidence, job: JobEvidence) -> Verdict:
    """Return what a live job's rank shows, looked at alone."""
    error, ended = _last_exception(rank, job), rank.ended
    if error is not None:
        # Batch systems signal every process of a job.
        worker = classify.loader_killed(error) if job.interrupted_by else None
        if worker is not None and signal_name(worker[1]) == job.interrupted_by:
            return Verdict(rank, Kind.STOPPED)
        kind, inner = kind_of(error), _never_joined(rank, error)
        if inner is not None:
            return Verdict(rank, kind_of(inner), inner)
        inner = tracebacks.wrapped(error) if kind is Kind.RAISED else None
        if inner is not None and (hurt := kind_of(inner)) in HURT:
            return Verdict(rank, hurt, inner)
        return Verdict(rank, kind, error)
    if rank.not_executed:
        return Verdict(rank, Kind.NOT_RUN)
    if ended is None:
        return _leaving(rank, job) or Verdict(rank, Kind.STOPPED if rank.sent else Kind.ALIVE)
    # A rank that was only asked to end, and died of SIGKILL, was killed by somebody else: the
    # kernel needs a second for a large process.
    asked = bool(rank.sent) and not (ended.signal == SIGKILL and "SIGKILL" not in rank.sent)
    if asked or _by_launcher(rank, job):
        if ended.code == 0 and not ended.signal and not rank.sent:
            return Verdict(rank, Kind.FINISHED)
        return _leaving(rank, job) or Verdict(rank, Kind.STOPPED)
    peer = next((one for one in reversed(rank.handled) if kind_of(one) in HURT), None)
    own = next((one for one in rank.handled if kind_of(one) is Kind.RAISED), None)
    if ended.signal == SIGPIPE:
        return Verdict(rank, Kind.DOUBTFUL)
    if ended.signal:
        if ended.signal == SIGKILL or (ended.signal not in CRASHES and peer is None):
            return Verdict(rank, Kind.KILLED)
        if peer is not None or classify.says_lost(rank.said):
            return Verdict(rank, kind_of(peer) if peer else Kind.LOST, peer)
        if (mismatch := _aborted_by_gloo(rank)) is not None:
            return Verdict(rank, Kind.RAISED, mismatch)
        return Verdict(rank, Kind.ABORTED if ended.signal == SIGABRT else Kind.CRASHED)
    if ended.code == 0:
        # What was on its way while it closed the group may have been caught for good reason, and is
        # no cause while others show one.
        kind = Kind.SWALLOWED if own and not own.on_its_way else Kind.FINISHED
        return Verdict(rank, kind, own or peer)
    if rank.handled and peer is rank.handled[-1]:
        return Verdict(rank, kind_of(peer), peer)
    if own is None and classify.says_lost(rank.said):
        return Verdict(rank, Kind.LOST)
    if own is None and classify.says_waited(rank.said):
        return Verdict(rank, Kind.WAITED)
    return Verdict(rank, Kind.EXITED, own)


def _verdict_in_log(rank: RankEvidence) -> Verdict:
    """Return what a process shows of which a log tells: nobody sees there what it caught, and how
    far it was.
    """
    error, ended = rank.raised, rank.ended
    if error is not None:
        kind = _kind_in_log(error)
        return Verdict(rank, Kind.HANDLED if kind is Kind.RAISED and rank.went_on else kind, error)
    if rank.went_on:
        kind = Kind.HANDLED
    elif rank.not_executed:
        kind = Kind.NOT_RUN
    elif rank.sent:
        kind = Kind.STOPPED
    elif ended is None:
        kind = Kind.WAITED if rank.collective is not None else Kind.LOST
    elif not ended.signal:
        kind = Kind.EXITED
    elif ended.signal not in CRASHES:
        kind = Kind.DOUBTFUL if ended.signal == SIGPIPE else Kind.KILLED
    else:
        kind = Kind.ABORTED if only_aborted(rank) else Kind.CRASHED
    return Verdict(rank, kind)


def only_aborted(rank: RankEvidence) -> bool:
    """Tell whether a process ended by SIGABRT, and neither a dump nor an exception of C++ says for
    what.
    """
    if rank.ended is None or rank.ended.signal != SIGABRT or rank.uncaught is not None:
        return False
    dump = rank.stack_text.partition("\n")[0]
    return not dump or "Aborted" in dump or dump.startswith("terminate called")


def _kind_in_log(error: Raised) -> Kind:
    if error.type == classify.NCCL_WARNING:
        return Kind.RAISED if classify.fits("calls-mismatched", error) else Kind.NCCL
    if classify.nccl_gave_up(error):
        return Kind.NCCL
    kind = kind_of(error)
    return Kind.LOST if kind is Kind.DOUBTFUL or classify.loader_broke_off(error) else kind


def _leaving(rank: RankEvidence, job: JobEvidence) -> Verdict | None:
    """Return what was on its way when a rank that has not ended by itself closed its group."""
    error = rank.handled[-1] if rank.handled and not job.interrupted_by else None
    if error is None or not error.on_its_way:
        return None
    kind = kind_of(error)
    return Verdict(rank, Kind.LEAVING if kind is Kind.RAISED else kind, error)


def _last_exception(rank: RankEvidence, job: JobEvidence) -> Raised | None:
    """Return what left the program: as our hook saw it, as `@record` wrote it, or as the log shows
    it. The KeyboardInterrupt of our own SIGINT is left out.
    """
    error = rank.raised
    if error is None and rank.error_file:
        error = tracebacks.error_file(rank.error_file)
    by_itself = rank.ended is not None and rank.ended.code == 1 and not rank.left_saying
    if error is None and by_itself:
        error = tracebacks.exception_in(rank.said)
    kind = error.type.rpartition(".")[2] if error is not None else ""
    stopped = kind == "KeyboardInterrupt" and bool(rank.sent or job.interrupted_by)
    return None if kind == "SystemExit" or stopped else error


def _never_joined(rank: RankEvidence, error: Raised) -> Raised | None:
    """Return why a rank has no group when it asks for one: the program went on after
    init_process_group had failed.
    """
    if rank.phase == "running" or classify.says("group-missing", error.message) is None:
        return None
    return next((one for one in reversed(rank.handled) if one.call == "init_process_group"), None)


def _aborted_by_gloo(rank: RankEvidence) -> Raised | None:
    """Return what gloo found wrong in a thread of its own, where nobody catches it."""
    words = next((line for line in rank.said if classify.says("sizes-differ", line)), None)
    if words is None or rank.ended is None:
        return None
    frames = stacks.last_stack(rank) or stacks.main_frames(rank.stack_text)
    call, _ = stacks.collective(frames) or ("", 0)
    message = words.strip().removeprefix("what():").strip()
    return Raised("gloo::EnforceNotMet", message, frames, "", rank.ended.at, call)


_KINDS = {
    classify.Meaning.OWN: Kind.RAISED,
    classify.Meaning.LOST: Kind.LOST,
    classify.Meaning.WAITED: Kind.WAITED,
    classify.Meaning.MAYBE_LOST: Kind.DOUBTFUL,
}


def kind_of(error: Raised) -> Kind:
    """Return the kind of evidence that an exception is; of another process, the inner one."""
    if (inside := tracebacks.in_process(error)) is not None:
        error = inside[1]
    if error.code:
        return Kind.DOUBTFUL if error.code in classify.AFTER_ANOTHER else Kind.RAISED
    if classify.fits("producer-gone", error):
        return Kind.RAISED
    if classify.nccl_gave_up(error) and not classify.nccl_names_peer(error.message):
        return Kind.NCCL
    return _KINDS[classify.meaning(error)]


def _by_launcher(rank: RankEvidence, job: JobEvidence) -> bool:
    """Tell whether a rank ended with the launcher: by the signal that the launcher got, too (batch
    systems signal every process), or by the death of its parent.
    """
    if rank.ended is None:
        return False
    number = rank.ended.signal
    if job.interrupted_by:
        return not number or signal_name(number) == job.interrupted_by
    return job.node_of(rank.rank).helper is not None and number == SIGKILL


# --- one rank beside the others
# --------------------------------------------------------------------------------------


# Each step below looks once at all ranks for what it compares with: a job may have thousands.
# `slack`: seconds by which times of two nodes may be wrong beside each other.


def _stopped_after(verdicts: list[Verdict], slack: float) -> list[Verdict]:
    """Acquit ranks of what they raised after the launcher had told them to stop, unless it came
    before every other cause.
    """
    others = [moment(one) for one in verdicts if one.kind in OF_CAUSES and not one.rank.sent]
    first = min(others, default=None)

    def stopped(one: Verdict) -> bool:
        raised = one.kind in (Kind.RAISED, Kind.LEAVING) and bool(one.rank.sent)
        at = one.error.at if one.error is not None else 0.0
        return raised and first is not None and (not at or at >= first - slack)

    return [Verdict(one.rank, Kind.STOPPED) if stopped(one) else one for one in verdicts]


def _after_a_loss(verdicts: list[Verdict], slack: float) -> list[Verdict]:
    """Acquit ranks of what they raised just after they had caught the loss of a peer, when another
    rank had failed or left by then without such a loss.
    """
    losses = [loss_before(one.rank, one.error) for one in verdicts]
    gone = [
        moment(one)
        for one, loss in zip(verdicts, losses, strict=True)
        if loss is None and one.kind in (*OF_CAUSES, Kind.FINISHED)
    ]
    first = min(gone, default=None)

    def judged(one: Verdict, loss: Raised | None) -> Verdict:
        raised = one.kind in (Kind.RAISED, Kind.LEAVING) and one.error is not None and one.error.at
        if not raised or loss is None or first is None or first > raised + HEARD_LATE + slack:
            return one
        return Verdict(one.rank, kind_of(loss), loss)

    return list(map(judged, verdicts, losses))


def loss_before(rank: RankEvidence, error: Raised | None) -> Raised | None:
    """Return the loss of a peer that a rank had caught shortly before an error, or before its
    end.
    """
    at = error.at if error is not None else rank.ended.at if rank.ended is not None else 0.0
    for one in reversed(rank.handled):
        if one is not error and one.at <= at <= one.at + AFTERMATH and kind_of(one) in HURT:
            return one
    return None


def _shared(verdicts: list[Verdict]) -> list[Verdict]:
    """Acquit ranks of an error that they swallowed when another rank swallowed the same and went
    on, or when nobody was left behind.
    """
    kinds = {one.kind for one in verdicts}
    if Kind.SWALLOWED not in kinds:
        return verdicts
    alone = not kinds - {Kind.FINISHED, Kind.SWALLOWED} and Kind.FINISHED in kinds
    common = {
        (error.type, error.call)
        for one in verdicts
        if one.rank.ended is None
        for error in one.rank.handled
    }
    return [
        Verdict(one.rank, Kind.FINISHED)
        if one.kind is Kind.SWALLOWED
        and one.error is not None
        and (alone or (one.error.type, one.error.call) in common)
        else one
        for one in verdicts
    ]


_NOT_SEEN = "torch names it by its number in a group; the rank itself has not raised this yet"


def _in_checkpoints(verdicts: list[Verdict]) -> list[Verdict]:
    """Give each rank that torch names in a CheckpointException its own exception, and mark other
    ranks as `TOLD`: torch raises one text about all failures in every rank of the group.
    """
    judged = {one.rank.rank: one for one in verdicts}
    groups: dict[Hashable, list[tuple[int, Verdict, dict[int, Raised]]]] = {}
    for one in verdicts:
        if one.error is not None and one.error.member >= 0 and one.kind in OF_CAUSES:
            found = tracebacks.in_checkpoint(one.error)
            words = tuple((number, error.message) for number, error in found.items())
            groups.setdefault(words, []).append((one.error.member, one, found))
    groups.pop((), None)
    for group in groups.values():
        failures = group[0][2]
        late = failures.keys() - {member for member, _, _ in group}
        # In a group of some ranks, a number does not tell which rank has not raised it yet.
        known = late <= judged.keys() and all(member == one.rank.rank for member, one, _ in group)
        for member, one, found in group:
            if member in found:
                kind = kind_of(found[member])
                kind = one.kind if kind is Kind.RAISED else kind
                judged[one.rank.rank] = replace(one, kind=kind, error=found[member])
            elif known or not late:
                judged[one.rank.rank] = replace(one, kind=Kind.TOLD)
        for number in late if known else ():
            if judged[number].kind not in STRONG:
                rank, error = judged[number].rank, replace(failures[number], traceback="")
                judged[number] = Verdict(rank, kind_of(error), error, _NOT_SEEN)
    return list(judged.values())


def moment(verdict: Verdict) -> float:
    """Return when the rank failed or ended, in seconds since the job's start."""
    if verdict.error is not None and verdict.error.at and verdict.kind is not Kind.EXITED:
        return verdict.error.at
    # torch's interpreter takes a quarter of a second to close down
    if verdict.kind is Kind.EXITED and verdict.rank.left_when:
        return verdict.rank.left_when
    return verdict.rank.ended.at if verdict.rank.ended is not None else 0.0


def place_in_order(verdict: Verdict) -> tuple[float, int, int]:
    """Return the key by which verdicts are sorted: a log's line, or time, order of ends, rank."""
    rank, ended = verdict.rank, verdict.rank.ended
    if rank.order:
        return (0.0, rank.order, 0)
    return (moment(verdict), ended.order if ended is not None else 1 << 30, rank.rank)
