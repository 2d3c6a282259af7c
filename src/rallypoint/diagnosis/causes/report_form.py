"""The form of a report: of an exception or of an end, with its timeline, its quotations and its
logs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict, Unpack

from msgspec.structs import replace

from rallypoint.diagnosis import classify, stacks, tracebacks
from rallypoint.diagnosis.causes.case import (
    Case,
    how_ended,
    likely,
    status_of,
    where,
    whereabout,
    who,
)
from rallypoint.diagnosis.causes.short_traceback import abridged
from rallypoint.diagnosis.causes.wording import cut, named, signal_name
from rallypoint.diagnosis.error_patterns import read_line
from rallypoint.diagnosis.evidence import Raised, RankEvidence
from rallypoint.diagnosis.report import Confidence, Help, Moment, Report, Said

SAID_LINES = 10  # of a rank's own words: what fits on a screen together with the rest
TRACEBACK_LINES_ALONE = 40  # when no log has the rest of it: a full disk, or no run folder
# so that the report of one raise stays below 25 lines; less beside a help, which takes its room
TRACEBACK_LINES = 12
TRACEBACK_LINES_LEAST = 8  # beside any help: two frames of a chain of two exceptions
MOST_FOLDERS = 4  # of nodes, where no rank is at fault
TIMELINE = 7  # lines around the cause; the rest is in events.jsonl
TIMELINE_WORDS = 72  # characters of one event, so that a line fits on 92 columns


class Fields(TypedDict, total=False):
    """Fields of a report that a cause may give instead of those that follow from its case."""

    where: str
    why: str
    evidence: Iterable[str]
    then: str
    help: Iterable[Help]
    timeline: tuple[Moment, ...]
    said: tuple[Said, ...]
    logs: tuple[str, ...]
    ranks: tuple[int, ...]
    confidence: Confidence
    exit_status: int


def account(
    case: Case, code: str, headline: str, error: Raised | None = None, **fields: Unpack[Fields]
) -> Report:
    """Make a report about a case: its ranks, their logs, and what became of the others. `error`:
    the exception that it is about, which is quoted.
    """
    evidence, help = tuple(fields.pop("evidence", ())), tuple(fields.pop("help", ()))
    if case.ranks and ("said" not in fields or code == "cause-unknown"):
        rank, main = case.first, error or case.first.raised
        own = main.traceback if main is not None else ""
        lost = rank.in_thread
        if lost is not None and main is not None:  # raised again there, or later than there
            again = lost.type == main.type and main.message.startswith(lost.message)
            lost = None if again or 0 < main.at < lost.at else lost
        if lost is not None:
            at = stacks.place(lost.frames, case.root)
            thread = (
                f"a thread of {who(rank)} had died of {named(lost)}{f', at {at}' if at else ''}"
            )
            if code == "rank-raised" and not fields.get("why"):
                case, fields["why"] = likely(case), f"{thread}: it may have led to this"
            else:
                evidence = (thread, *evidence)
        elif case.job.log is None and (line := tracebacks.other_traceback(rank.said, own)):
            told = f"the log of {who(rank)} has another traceback, which may tell more: {cut(line)}"
            evidence = (told, *evidence)
        if lost is None and rank.dead_child is not None:
            evidence = (_unnoticed(case, *rank.dead_child), *evidence)
    if error is not None:
        rank, why = case.first, fields.get("why", "")
        if error.is_open:
            later = "the last exception came while it was handled, and may be the cause"
            case, why = likely(case), why or later
        room = TRACEBACK_LINES - sum(1 + len(one.command.splitlines()) for one in help)
        quoted = traceback_said(rank, error, max(room, TRACEBACK_LINES_LEAST))
        if not why and case.confidence != "certain":
            why = "its words may speak of another rank, or of something else that broke"
        elif not (why or quoted or evidence):
            source = stacks.own_frame(error.frames)
            if source is not None and source.source:
                why = f"the line there: {cut(source.source)}"
        ended = rank.ended
        if error.caught_at is None and ended is not None and ended.signal and not rank.sent:
            evidence += (f"its process then ended by {signal_name(ended.signal)}",)
        fields = {"said": quoted, "where": where(case, rank, error), **fields, "why": why}
    report = Report(
        code,
        headline,
        confidence=case.confidence,
        evidence=evidence,
        then=case.then,
        help=help,
        logs=logs(case),
        ranks=case.numbers,
    )
    return replace(report, **fields)


def _unnoticed(case: Case, pid: int, status: int, number: int) -> str:
    """Say how a child of the first rank ended, and that the rank has not noticed it, or that its
    Pool does not repeat the task.
    """
    rank = case.first
    how = f"was killed by {signal_name(number)}" if number else f"exited with code {status}"
    how += " for lack of memory" if pid in case.node.memory.killed_pids else ""
    left = f"{who(rank)} has not noticed it"
    if stacks.waits_in_pool(rank.stack):
        left = "its Pool starts another process, but does not repeat the task: the call may never return"
    return f"process {pid}, which {who(rank)} had started, {how}; {left}"


def of_end(case: Case, code: str, headline: str, **fields: Unpack[Fields]) -> Report:
    """Make a report about how a process ended."""
    rank = case.first
    known: Fields = {"timeline": timeline(case), "exit_status": status_of(rank), **fields}
    if case.confidence != "certain" and not known.get("why"):
        known["why"] = "other ranks ended too, and nothing shows that they ended for another reason"
    report = account(case, code, headline, **known)
    return report if report.where else replace(report, where=whereabout(case, rank))


def said(rank: RankEvidence, lines: Sequence[str]) -> tuple[Said, ...]:
    """Return the rank's last words among these lines."""
    words = [cut(line) for line in lines if line.strip()]
    return (Said(who(rank), tuple(words[-SAID_LINES:])),) if words else ()


def traceback_said(
    rank: RankEvidence, error: Raised, room: int = TRACEBACK_LINES_LEAST
) -> tuple[Said, ...]:
    """Return the traceback, of a long one `room` lines; () when the terminal has it already. Where
    a DataLoader, mp.spawn or Ray tells of another process, that one's: the outer traceback ends in
    the library that passed it on."""
    if rank.said_traceback or not error.traceback:
        return ()
    spawned = tracebacks.in_process(error)
    error = tracebacks.from_loader(error) or (spawned[1] if spawned is not None else error)
    lines = error.traceback.rstrip("\n").splitlines()
    # The first line that names the exception: what follows was raised while it was handled.
    end = next((i for i, line in enumerate(lines) if line.startswith(error.type)), len(lines) - 1)
    if error.code:
        lines = lines[: end + 1]  # what follows are its notes, of which the report is made
    if error.caught_at is not None and all(stacks.library(frame) for frame in error.frames):
        lines = lines[end:]  # caught near the call: what is above is the library's
    most = room if rank.log else TRACEBACK_LINES_ALONE
    if len(lines) > most:
        lines = [line for line in lines if line.strip(" ~^") or not line.strip()]
    known = rank.log and rank.log_line
    file = f" in {rank.log.rpartition('/')[2]}:{rank.log_line}" if known else ""
    lines = abridged(lines, error.type, most, file)
    return (Said(who(rank), tuple(cut(line) for line in lines)),)


def words_before(case: Case, *, first: bool = False) -> tuple[Said, ...]:
    """Return a log's lines before a launcher's line about the end. `first`: instead, the lines
    without a process name before the first failure, such as the words of `sys.exit("words")`.
    """
    log = case.job.log
    words = () if log is None else log.before if first else log.last_words
    lines = tuple(cut(line, 200) for line in words if not read_line.by_launcher(line))
    return (Said("the log, before that,", lines),) if lines else ()


def timeline(case: Case) -> tuple[Moment, ...]:
    """Return what happened around the cause, as far as the evidence has times; () when there is no
    more than the end itself.
    """
    at_fault = set(case.numbers)
    found: list[tuple[float, bool, str, str]] = []
    for rank in case.job.ranks:
        name, ended = f"rank {rank.rank}", rank.ended
        other = rank.rank not in at_fault
        error = rank.raised or (rank.handled[-1] if rank.handled else None)
        if error is not None and error.at:
            words = cut(classify.in_short(error), TIMELINE_WORDS)
            found.append((error.at, other, name, words))
        if ended is None or not ended.at or (rank.raised is not None and ended.code == 1):
            continue  # exit code 1 is the end that every exception has
        if not (other and rank.sent):
            well = ended.code == ended.signal == 0
            # Its sockets were closed while the interpreter closed down: peers that noticed did so
            # after it had left its program, or after `launch` had closed its group.
            by_launch = 0.0 if rank.closed_line else rank.closed_at
            over = rank.phase in ("finishing", "done")
            left = well and over and (by_launch or rank.phase_at)
            found.append((left or ended.at, other, name, how_ended(case.job, rank)))
    found.sort(key=lambda one: one[:3])
    own = [i for i, one in enumerate(found) if one[2] == f"rank {case.first.rank}"]
    start = max(own[-1] - 2, 0) if own else len(found)
    around = [Moment(at, name, what) for at, _, name, what in found[start : start + TIMELINE]]
    return tuple(around) if len(around) > 1 else ()


def logs(case: Case) -> tuple[str, ...]:
    """Return the log of the first rank at fault, at the line of its last words."""
    several, node = case.job.several, case.node
    if case.ranks and case.first.log:
        rank = case.first
        log = f"{rank.log}:{rank.log_line}" if rank.log_line else rank.log
        return (f"{node.host}:{log}" if several else log,)
    if case.ranks or not several:
        return (f"{node.host}:{node.run_dir}" if several else node.run_dir,) if node.run_dir else ()
    folders = [f"{node.host}:{node.run_dir}" for node in case.job.nodes if node.run_dir]
    more = len(folders) - MOST_FOLDERS
    rest = (f"and {more} more nodes",) if more > 1 else ()
    return (*(folders[:MOST_FOLDERS] if rest else folders), *rest)
