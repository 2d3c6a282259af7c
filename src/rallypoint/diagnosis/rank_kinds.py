"""What kind of evidence each rank shows, first alone and then beside the others. Pure."""

from __future__ import annotations

from enum import Enum

import msgspec

from rallypoint.diagnosis import classify, stacks, tracebacks
from rallypoint.diagnosis.causes.wording import CRASHES, signal_name
from rallypoint.diagnosis.evidence import JobEvidence, Raised, RankEvidence

SIGKILL, SIGABRT = 9, 6
# Seconds after a lost connection in which what its rank raises is taken for a consequence of it,
# when somebody had gone: enough for clearing up, too little for a program that has opened a new
# group without who is missing and works on.
AFTERMATH = 5.0
# Seconds by which the launcher may hear of an end later than the peers do: sockets close before the
# parent is told.
HEARD_LATE = 0.25


class Kind(Enum):
    """What one rank's evidence says, looked at alone."""

    NOT_RUN = "not run"  # the program's file could not be executed
    KILLED = "killed"  # a signal that nobody of us sent
    RAISED = "raised"  # an exception that mentions no lost peer
    CRASHED = "crashed"  # SIGSEGV and its like
    SWALLOWED = "swallowed"  # exit code 0 after an error of its own in a shared call
    LEAVING = "leaving"  # an exception of its own, not yet out of the program that closed its group
    EXITED = "exited"  # an exit code that is not 0, with nothing that explains it
    NCCL = "nccl"  # NCCL gave up, and names no peer: mostly in all ranks at once
    ABORTED = "aborted"  # SIGABRT with nothing that explains it: a lost connection leads to it, too
    HANDLED = "handled"  # of a log: a failure after which the same process went on for long
    DOUBTFUL = "doubtful"  # a bare "Connection reset", or the store's word on another rank
    LOST = "lost"  # says that it lost a peer
    WAITED = "waited"  # says that the others did not come
    STOPPED = "stopped"  # ended by us, or with the launcher
    ALIVE = "alive"
    FINISHED = "finished"  # exit code 0


STRONG = (Kind.NOT_RUN, Kind.KILLED, Kind.RAISED, Kind.CRASHED)
"""Kinds of evidence that are independent of each other; all others may be consequences of them."""

OF_CAUSES = (
    *STRONG, Kind.SWALLOWED, Kind.LEAVING, Kind.EXITED, Kind.NCCL, Kind.ABORTED, Kind.HANDLED, Kind.DOUBTFUL,
)  # fmt: skip
"""Kinds of evidence that may be the cause, in the order of their weight."""

CONSEQUENCES = (Kind.LOST, Kind.WAITED, Kind.DOUBTFUL, Kind.NCCL, Kind.ABORTED)
"""Kinds of evidence that another rank's failure may have brought about."""


class Verdict(msgspec.Struct, frozen=True):
    """A rank, what kind of evidence it shows, and the exception that shows it."""

    rank: RankEvidence
    kind: Kind
    error: Raised | None = None


def look_at(job: JobEvidence) -> tuple[JobEvidence, list[Verdict]]:
    """The job with its ranks in order, and what each of them shows beside the others."""
    if job.log is not None:
        return job, [_verdict_in_log(rank) for rank in job.ranks]
    job = msgspec.structs.replace(job, ranks=_placed(sorted(job.ranks, key=lambda rank: rank.rank)))
    verdicts = [_verdict(rank, job) for rank in job.ranks]
    verdicts = [_stopped_after(verdict, verdicts) for verdict in verdicts]
    verdicts = [_after_a_loss(verdict, verdicts) for verdict in verdicts]
    return job, [_shared(verdict, verdicts) for verdict in verdicts]


def _placed(ranks: list[RankEvidence]) -> tuple[RankEvidence, ...]:
    """A rank has told where it is by its phase, which says "importing" until it joins a group: in a
    job that joins none, it runs.
    """
    if any(rank.meeting is not None or rank.phase in ("joining", "running") for rank in ranks):
        return tuple(ranks)
    return tuple(
        msgspec.structs.replace(rank, phase="running") if rank.phase == "importing" else rank
        for rank in ranks
    )


def _verdict(rank: RankEvidence, job: JobEvidence) -> Verdict:
    error, ended = _last_exception(rank, job), rank.ended
    if error is not None and (before := _never_joined(rank, error)) is not None:
        return Verdict(rank, kind_of(before), before)
    if error is not None:
        inner = tracebacks.wrapped(error) if kind_of(error) is Kind.RAISED else None
        if inner is not None and kind_of(inner) in (Kind.LOST, Kind.WAITED):
            return Verdict(rank, kind_of(inner), inner)
        return Verdict(rank, kind_of(error), error)
    if rank.not_executed:
        return Verdict(rank, Kind.NOT_RUN)
    if ended is None:
        return _leaving(rank, job) or Verdict(rank, Kind.STOPPED if rank.sent else Kind.ALIVE)
    # Whom we only asked, and who died of SIGKILL all the same, was killed by somebody else: the
    # kernel needs a second for a large process.
    asked = bool(rank.sent) and not (ended.signal == SIGKILL and "SIGKILL" not in rank.sent)
    if asked or _by_launcher(rank, job):
        well = ended.code == 0 and not ended.signal and not rank.sent
        return (
            Verdict(rank, Kind.FINISHED)
            if well
            else _leaving(rank, job) or Verdict(rank, Kind.STOPPED)
        )
    peer = next(
        (one for one in reversed(rank.handled) if kind_of(one) in (Kind.LOST, Kind.WAITED)), None
    )
    own = next((one for one in rank.handled if kind_of(one) is Kind.RAISED), None)
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
        return Verdict(
            rank, Kind.SWALLOWED if own and not own.on_its_way else Kind.FINISHED, own or peer
        )
    if rank.handled and peer is rank.handled[-1]:
        return Verdict(rank, kind_of(peer), peer)
    if own is None and classify.says_lost(rank.said):
        return Verdict(rank, Kind.LOST)
    if own is None and classify.says_waited(rank.said):
        return Verdict(rank, Kind.WAITED)
    return Verdict(rank, Kind.EXITED, own)


def _verdict_in_log(rank: RankEvidence) -> Verdict:
    """What a process shows of which a log tells. Nobody sees there what it caught, and how far it
    was.
    """
    error, ended = rank.raised, rank.ended
    if rank.went_on and error is None:
        return Verdict(rank, Kind.HANDLED)
    if error is not None:
        kind = _kind_in_log(error)
        return Verdict(rank, Kind.HANDLED if kind is Kind.RAISED and rank.went_on else kind, error)
    if rank.not_executed:
        return Verdict(rank, Kind.NOT_RUN)
    if rank.sent:
        return Verdict(rank, Kind.STOPPED)
    if ended is None:
        return Verdict(rank, Kind.WAITED if rank.collective is not None else Kind.LOST)
    if not ended.signal:
        return Verdict(rank, Kind.EXITED)
    if ended.signal not in CRASHES:
        return Verdict(rank, Kind.KILLED)
    return Verdict(rank, Kind.ABORTED if only_aborted(rank) else Kind.CRASHED)


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
    if classify.loader_broke_off(error):
        return Kind.LOST
    kind = kind_of(error)
    return Kind.LOST if kind is Kind.DOUBTFUL else kind


def _leaving(rank: RankEvidence, job: JobEvidence) -> Verdict | None:
    """Of a rank that has not ended by itself: what was on its way when it closed its group."""
    error = rank.handled[-1] if rank.handled and not job.interrupted_by else None
    if error is None or not error.on_its_way:
        return None
    kind = kind_of(error)
    return Verdict(rank, Kind.LEAVING if kind is Kind.RAISED else kind, error)


def _last_exception(rank: RankEvidence, job: JobEvidence) -> Raised | None:
    """What left the program: as our hook saw it, as `@record` wrote it, or as the log shows it. Not
    the KeyboardInterrupt of our SIGINT.
    """
    error = rank.raised
    if error is None and rank.error_file:
        error = tracebacks.error_file(rank.error_file)
    if error is None and rank.ended is not None and rank.ended.code == 1:
        error = tracebacks.exception_in(rank.said)
    kind = error.type.rpartition(".")[2] if error is not None else ""
    ours = kind == "SystemExit" or (
        kind == "KeyboardInterrupt" and bool(rank.sent or job.interrupted_by)
    )
    return None if ours else error


def _never_joined(rank: RankEvidence, error: Raised) -> Raised | None:
    """Why a rank has no group when it asks for one: the program went on after init_process_group
    had failed.
    """
    if classify.says("group-missing", error.message) is None or rank.phase == "running":
        return None
    return next((one for one in reversed(rank.handled) if one.call == "init_process_group"), None)


def _aborted_by_gloo(rank: RankEvidence) -> Raised | None:
    """What gloo found wrong in a thread of its own, where nobody catches it."""
    words = next(
        (line for line in rank.said if classify.says("sizes-differ", line) is not None), None
    )
    if words is None or rank.ended is None:
        return None
    frames = stacks.last_stack(rank) or stacks.main_frames(rank.stack_text)
    call = stacks.collective(frames)
    return Raised(
        "gloo::EnforceNotMet",
        words.strip().removeprefix("what():").strip(),
        frames,
        "",
        rank.ended.at,
        call[0] if call else "",
    )


def kind_of(error: Raised) -> Kind:
    if (inside := tracebacks.in_process(error)) is not None:
        error = inside[1]
    if classify.fits("producer-gone", error):
        return Kind.RAISED
    if error.code:
        return Kind.DOUBTFUL if error.code in classify.AFTER_ANOTHER else Kind.RAISED
    if classify.nccl_gave_up(error):
        return Kind.LOST if classify.nccl_names_peer(error.message) else Kind.NCCL
    kinds = {
        classify.Meaning.OWN: Kind.RAISED,
        classify.Meaning.LOST: Kind.LOST,
        classify.Meaning.WAITED: Kind.WAITED,
        classify.Meaning.MAYBE_LOST: Kind.DOUBTFUL,
    }
    return kinds[classify.meaning(error)]


def _by_launcher(rank: RankEvidence, job: JobEvidence) -> bool:
    """Ended with the launcher: by the signal that it got, too (batch systems signal every process),
    or by the death of its parent.
    """
    ended = rank.ended
    if ended is None:
        return False
    if job.interrupted_by:
        return not ended.signal or signal_name(ended.signal) == job.interrupted_by
    return job.helper is not None and ended.signal == SIGKILL


# --- one rank beside the others
# --------------------------------------------------------------------------------------


def _stopped_after(verdict: Verdict, verdicts: list[Verdict]) -> Verdict:
    """What a rank raised after we had told it to stop is no cause of its own, unless it came before
    every other one.
    """
    if verdict.kind not in (Kind.RAISED, Kind.LEAVING) or not verdict.rank.sent:
        return verdict
    others = [moment(one) for one in verdicts if one.kind in OF_CAUSES and not one.rank.sent]
    if others and (not verdict.error or not verdict.error.at or verdict.error.at >= min(others)):
        return Verdict(verdict.rank, Kind.STOPPED)
    return verdict


def _after_a_loss(verdict: Verdict, verdicts: list[Verdict]) -> Verdict:
    """What a rank raised just after it had caught the loss of a peer is no cause, when another had
    failed or left by then without one.
    """
    raised = verdict.error
    if verdict.kind not in (Kind.RAISED, Kind.LEAVING) or raised is None or not raised.at:
        return verdict
    peer = loss_before(verdict.rank, raised)
    if peer is None:
        return verdict
    gone = (*OF_CAUSES, Kind.FINISHED)
    for one in verdicts:
        had_gone = (
            one.kind in gone
            and one.rank is not verdict.rank
            and moment(one) <= raised.at + HEARD_LATE
        )
        if had_gone and loss_before(one.rank, one.error) is None:
            return Verdict(verdict.rank, kind_of(peer), peer)
    return verdict


def loss_before(rank: RankEvidence, error: Raised | None) -> Raised | None:
    """The loss of a peer that a rank had caught shortly before an error, or before its end."""
    at = error.at if error is not None else rank.ended.at if rank.ended is not None else 0.0
    losses = [
        one for one in rank.handled if one is not error and kind_of(one) in (Kind.LOST, Kind.WAITED)
    ]
    return next((one for one in reversed(losses) if one.at <= at <= one.at + AFTERMATH), None)


def _shared(verdict: Verdict, verdicts: list[Verdict]) -> Verdict:
    """An error that a rank swallowed is no cause when another rank swallowed the same and went on,
    or when nobody was left behind.
    """
    if verdict.kind is not Kind.SWALLOWED or verdict.error is None:
        return verdict
    same = (verdict.error.type, verdict.error.call)
    for one in verdicts:
        if one.rank.ended is None and any(
            (error.type, error.call) == same for error in one.rank.handled
        ):
            return Verdict(verdict.rank, Kind.FINISHED)
    left = any(one.kind not in (Kind.FINISHED, Kind.SWALLOWED) for one in verdicts)
    return (
        verdict
        if left or all(one.kind is Kind.SWALLOWED for one in verdicts)
        else Verdict(verdict.rank, Kind.FINISHED)
    )


def moment(verdict: Verdict) -> float:
    if verdict.error is not None and verdict.error.at:
        return verdict.error.at
    if (
        verdict.kind is Kind.EXITED and verdict.rank.left_when
    ):  # torch's interpreter takes a quarter of a second to close down
        return verdict.rank.left_when
    return verdict.rank.ended.at if verdict.rank.ended is not None else 0.0


def place_in_order(verdict: Verdict) -> tuple[float, int, int, int]:
    """The key by which verdicts are sorted: time, a log's line, the order of ends, the rank."""
    rank, ended = verdict.rank, verdict.rank.ended
    if rank.order:
        return (0.0, rank.order, 0, 0)
    return (moment(verdict), rank.order, ended.order if ended is not None else 1 << 30, rank.rank)
