"""The form of a report: of an exception or of an end, with its timeline, its quotations and its
logs.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rallypoint.diagnosis import classify, stacks, tracebacks
from rallypoint.diagnosis.causes.case import Case, how_ended, where, whereabout, who
from rallypoint.diagnosis.causes.short_traceback import abridged
from rallypoint.diagnosis.causes.wording import cut, signal_name
from rallypoint.diagnosis.error_patterns import schedulers
from rallypoint.diagnosis.evidence import Raised, RankEvidence
from rallypoint.diagnosis.report import Help, Moment, Report, Said

SAID_LINES = 10  # of a rank's own words: what fits on a screen together with the rest
TRACEBACK_LINES_ALONE = 40  # when no log has the rest of it: a full disk, or no run folder
# so that the report of one raise stays below 25 lines; less beside a help, which takes its room
TRACEBACK_LINES = 12
TRACEBACK_LINES_LEAST = 8  # beside any help: two frames of a chain of two exceptions
TIMELINE = 7  # lines around the cause; the rest is in events.jsonl
TIMELINE_WORDS = 72  # characters of one event, so that a line fits on 92 columns


def account(
    case: Case,
    code: str,
    headline: str,
    *,
    where: str = "",
    why: str = "",
    evidence: tuple[str, ...] = (),
    said: tuple[Said, ...] = (),
    help: tuple[Help, ...] = (),
) -> Report:
    """A report about a case: its ranks, their logs, and what became of the others."""
    return Report(
        code=code,
        headline=headline,
        where=where,
        why=why,
        evidence=evidence,
        then=case.then,
        said=said,
        help=help,
        logs=logs(case),
        ranks=case.numbers,
        confidence=case.confidence,
    )


def told(
    case: Case,
    code: str,
    headline: str,
    error: Raised,
    *,
    why: str = "",
    evidence: tuple[str, ...] = (),
    help: tuple[Help, ...] = (),
) -> Report:
    """A report about an exception."""
    room = TRACEBACK_LINES - sum(1 + len(one.command.splitlines()) for one in help)
    quoted = traceback_said(case.first, error, max(room, TRACEBACK_LINES_LEAST))
    if not quoted and error.frames:
        source = stacks.own_frame(error.frames)
        if source is not None and source.source and not evidence and not why:
            why = f"the line there: {cut(source.source)}" if case.confidence == "certain" else ""
    if (
        error.caught_at is None
        and case.first.ended is not None
        and case.first.ended.signal
        and not case.first.sent
    ):
        evidence += (f"its process then ended by {signal_name(case.first.ended.signal)}",)
    return account(
        case,
        code,
        headline,
        where=where(case, case.first, error),
        why=why
        or (
            ""
            if case.confidence == "certain"
            else "its words may speak of another rank, or of something else that broke"
        ),
        evidence=evidence,
        said=quoted,
        help=help,
    )


def of_end(
    case: Case,
    code: str,
    headline: str,
    *,
    where: str = "",
    why: str = "",
    evidence: tuple[str, ...] = (),
    help: tuple[Help, ...] = (),
    status: int,
    quote: bool = False,
) -> Report:
    """A report about how a process ended."""
    rank = case.first
    if not where:
        where = whereabout(case, rank)
    if case.confidence != "certain" and not why:
        why = "other ranks ended too, and nothing shows that they ended for another reason"
    words = said(rank, rank.said) if quote else ()
    report = account(
        case, code, headline, where=where, why=why, evidence=evidence, said=words, help=help
    )
    return msgspec.structs.replace(report, timeline=timeline(case), exit_status=status)


def said(rank: RankEvidence, lines: Sequence[str]) -> tuple[Said, ...]:
    """The rank's last words."""
    words = [cut(line) for line in lines if line.strip()]
    return (Said(who(rank), tuple(words[-SAID_LINES:])),) if words else ()


def traceback_said(
    rank: RankEvidence, error: Raised, room: int = TRACEBACK_LINES_LEAST
) -> tuple[Said, ...]:
    """The traceback, of a long one `room` lines; () when the terminal has it already. Of one
    process that another tells of, as a DataLoader and mp.spawn do, its own: the other's ends in the
    library that passed it on."""
    if rank.said_traceback or not error.traceback:
        return ()
    spawned = tracebacks.in_process(error)
    error = tracebacks.from_loader(error) or (spawned[1] if spawned is not None else error)
    lines = error.traceback.rstrip("\n").splitlines()
    if error.caught_at is not None and all(stacks.library(frame) for frame in error.frames):
        lines = lines[
            _ends_at(lines, error) :
        ]  # caught near the call: what is above is the library's
    if error.code:
        lines = lines[
            : _ends_at(lines, error) + 1
        ]  # what follows are its notes, of which the report is made
    most = room if rank.log else TRACEBACK_LINES_ALONE
    if len(lines) > most:
        lines = [line for line in lines if line.strip(" ~^") or not line.strip()]
    file = (
        f" in {rank.log.rpartition('/')[2]}:{rank.log_line}" if rank.log and rank.log_line else ""
    )
    lines = abridged(lines, error.type, most, file)
    return (Said(who(rank), tuple(cut(line) for line in lines)),)


def words_before(case: Case) -> tuple[Said, ...]:
    """What stands in a log before a launcher's word of the end, whoever said it."""
    words = case.job.log.last_words if case.job.log is not None else ()
    lines = tuple(cut(line, 200) for line in words if schedulers.told_by(line) is None)
    return (Said("the log, before that,", lines),) if lines else ()


def _ends_at(lines: Sequence[str], error: Raised) -> int:
    """The index of the line that names the exception: the first such, since what follows was raised
    while it was handled.
    """
    return next((i for i, line in enumerate(lines) if line.startswith(error.type)), len(lines) - 1)


def timeline(case: Case) -> tuple[Moment, ...]:
    """What happened around the cause, as far as the evidence has times; () when there is no more
    than the end itself.
    """
    at_fault = set(case.numbers)
    moments: list[Moment] = []
    for rank in case.job.ranks:
        who = f"rank {rank.rank}"
        error = rank.raised or (rank.handled[-1] if rank.handled else None)
        if error is not None and error.at:
            moments.append(Moment(error.at, who, cut(classify.in_short(error), TIMELINE_WORDS)))
        follows = (
            rank.raised is not None and rank.ended is not None and rank.ended.code == 1
        )  # the end that every exception has
        if (
            rank.ended is not None
            and rank.ended.at
            and not follows
            and (rank.rank in at_fault or not rank.sent)
        ):
            well = rank.ended.code == rank.ended.signal == 0
            # Its sockets were closed while the interpreter closed down: peers that noticed did so
            # after it had left its program.
            at = (
                rank.phase_at
                if well and rank.phase == "finishing" and rank.phase_at
                else rank.ended.at
            )
            moments.append(Moment(at, who, how_ended(case.job, rank)))
    moments.sort(
        key=lambda moment: (
            moment.at,
            moment.who not in {f"rank {number}" for number in at_fault},
            moment.who,
        )
    )
    own = [i for i, moment in enumerate(moments) if moment.who == f"rank {case.first.rank}"]
    start = max(own[-1] - 2, 0) if own else len(moments)
    around = moments[start : start + TIMELINE]
    return tuple(around) if len(around) > 1 else ()


def logs(case: Case) -> tuple[str, ...]:
    """The log of the first rank at fault, at the line of its last words."""
    rank = case.first if case.ranks else None
    if rank is None or not rank.log:
        return (case.job.run_dir,) if case.job.run_dir else ()
    return (f"{rank.log}:{rank.log_line}" if rank.log_line else rank.log,)
