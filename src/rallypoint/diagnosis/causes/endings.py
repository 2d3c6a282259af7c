"""How a process ended: by a signal, by an exit code, or before it ran at all."""

from __future__ import annotations

import errno
import os
import re
import shlex
import signal as signals
from collections.abc import Sequence

from rallypoint.diagnosis import stacks
from rallypoint.diagnosis.causes import resources
from rallypoint.diagnosis.causes.case import Case, located, pids, resident, was, went_home
from rallypoint.diagnosis.causes.exception_help import SEE_LIMIT_OF_THREADS, of_no_start
from rallypoint.diagnosis.causes.report_form import account, of_end, said, words_before
from rallypoint.diagnosis.causes.wording import (
    EVIDENCE_LINES,
    crash_words,
    cut,
    first_line,
    has_name,
    listed,
    named,
    signal_name,
    since,
)
from rallypoint.diagnosis.error_patterns import python, read_line, refused_starts
from rallypoint.diagnosis.evidence import Raised, RankEvidence
from rallypoint.diagnosis.pattern import Pattern
from rallypoint.diagnosis.report import Help, Report
from rallypoint.world import ranks_phrase

# of the last Python stack, innermost first: the library's call, and how the program came there
CRASH_FRAMES = 4

DEEP, DIFFERENT = 100, 25
"""Frames that faulthandler shows of a deeper stack, and how many may differ in a recursion that has
no end: one over half a dozen functions, each of which calls at several lines.
"""

_DUMP = Pattern(
    r'^(Fatal Python error|Windows fatal exception|Current thread|Thread 0x|  File "|Extension modules:|  <no Python frame>)'
)


_TIMER = "mostly a timer of the program expired, and nothing handled its signal: signal.alarm, signal.setitimer"
_TIME_IS_UP = Pattern(r"Timeout \(\d+:\d\d:\d\d[.\d]*\)!$")  # faulthandler's words
_KNOWN_REASONS = {
    signals.SIGXCPU: ("the limit on processor time was reached", "ulimit -t"),
    signals.SIGXFSZ: ("the limit on the size of files was reached", "ulimit -f"),
    signals.SIGPIPE: ("it wrote to a pipe or a connection whose other end was closed", ""),
    **dict.fromkeys((signals.SIGALRM, signals.SIGVTALRM, signals.SIGPROF), (_TIMER, "")),
}
"""Why the kernel itself sends a signal, and how to see the limit that it is about."""

_ASK_SLURM = Help("under Slurm, ask it", "sacct -j JOBID --format=JobID,State,ExitCode,MaxRSS")


def _not_found(case: Case) -> Report:
    """Tell that a shell, the interpreter, mpiexec or Slurm did not start the program, by a log."""
    file, words = case.job.program, "".join(case.first.said)
    why, refused = "", refused_starts.read(words)
    if refused is not None:
        headline, helps = refused
    else:
        reason, help = of_no_start(file, words, case.first.not_executed)
        shown = repr(file) if file.endswith(" ") else file
        headline, helps = f"{shown} cannot be started: {reason}", [help]
        if help.command.endswith(f"which {file}"):
            why = "it was looked for on the PATH of the job"
    return account(
        case,
        "start-failed",
        headline,
        why=why,
        then="",
        help=helps,
        ranks=(),
        confidence="certain",
    )


def not_run(case: Case, caught: Raised | None = None) -> Report:
    """Tell that the kernel refused to execute the program."""
    if case.job.log is not None:
        return _not_found(case)
    program, number = case.job.program, case.first.not_executed
    helps = {
        errno.EACCES: Help("make it executable", f"chmod +x {program}"),
        errno.ENOEXEC: Help("say in its first line what runs it", "#!/bin/sh"),
        errno.ENOENT: Help(
            "see whether it is there, and the interpreter that its first line names",
            f"head -n 1 {program}",
        ),
    }
    return account(
        case,
        "start-failed",
        f"{program} cannot be executed: {os.strerror(number)}",
        where=f"execve, {pids(case.ranks[:1])}",
        then="",
        help=[helps[number]] if number in helps else (),
        logs=(),
        exit_status=127 if number == errno.ENOENT else 126,
    )


def killed(case: Case, caught: Raised | None = None) -> Report:
    """Tell of a signal from outside, or of the kernel, which sends one when memory runs out."""
    rank, memory = case.first, case.node.memory
    number = rank.ended.signal if rank.ended is not None else signals.SIGKILL
    if rank.killed_by:
        return resources.killed_for_memory(case)
    if number == signals.SIGKILL and resources.for_memory(memory, rank.pid):
        return resources.out_of_memory(case)
    name = signal_name(number)
    evidence = [f"{case.subject} ended by {name}, which rallypoint had not sent"]
    why, helps = f"who sent {name} is not known", list[Help]()
    if case.job.log is not None:
        evidence, why = told_by(case), f"who sent {name} is not in the log"
        if number == signals.SIGKILL:
            why += resources.BY_THE_KERNEL
            helps = [resources.ASK_THAT_KERNEL, _ASK_SLURM]
    elif number == signals.SIGKILL:
        evidence += [*resources.no_kill_known(memory, pids(case.ranks)), *resident(case.ranks)]
        helps = resources.ask_the_kernel(memory)
    if number in _KNOWN_REASONS:
        why, command = _KNOWN_REASONS[signals.Signals(number)]
        helps = [Help("see the limit", command)] if command else []
    return of_end(
        case,
        "rank-killed",
        f"{case.subject} {was(case.ranks)} killed by {name}",
        why=why,
        evidence=evidence,
        help=helps,
        said=words_before(case),
    )


def told_by(case: Case) -> list[str]:
    """Return who says in a log how the first of these ranks ended."""
    return [case.first.told_by] if case.first.told_by else []


_SHOW_STACKS = Help(
    "let Python print its stacks when it crashes again", "export PYTHONFAULTHANDLER=1"
)


def crashed(case: Case, caught: Raised | None = None) -> Report:
    """Tell of SIGSEGV, SIGABRT and their like, with the last Python stack."""
    rank, in_log = case.first, case.job.log is not None
    ends = [(bool(one.stack_text), one.ended) for one in case.ranks if one.ended is not None]
    # Of several the one that left no stack: the launcher's word is all that is known of it.
    number = min(ends, key=lambda end: end[0])[1].signal if ends else signals.SIGABRT
    stack = stacks.last_stack(rank)
    calls = [frame for frame in stack if frame.function not in stacks.WRAPPERS]
    evidence = [
        ("called from " if i else "at ") + stacks.describe(frame, case.root)
        for i, frame in enumerate(reversed(calls[-CRASH_FRAMES:]))
    ]
    helps = []
    if rank.uncaught is not None:
        what = "an exception of C++ that nobody caught" if rank.uncaught.type else "it printed"
        evidence.append(f"{what}: {named(rank.uncaught)}")
    if number == signals.SIGBUS:
        helps.append(Help("see whether shared memory is full", "df -h /dev/shm"))
        if not in_log:
            evidence.append(
                "SIGBUS often means that /dev/shm or a mapped file's disk is full; that was not looked at"
            )
    main = stacks.main_frames(rank.stack_text)
    if stack:
        at = f" in {stacks.place(stack, case.root)}"
    else:
        at = ""
        if main:  # faulthandler marks no thread as the current one
            evidence.append(
                f"it crashed in a thread of native code, while the main thread stood at {stacks.place(main, case.root)}"
            )
        elif in_log:
            evidence.append("the log has no Python stack of it")
            helps.append(_SHOW_STACKS)
        else:
            evidence.append("the rank left no Python stack")
    if not rank.stack_text:
        evidence += told_by(case)
    status = next((end.status for _, end in ends), "")
    left = "without an active exception" in rank.stack_text  # the log's doubt says it all
    why, confidence = "" if left else crash_words(number), case.confidence
    if python.NO_EXCEPTION in rank.stack_text:
        why = ""
    if number == signals.SIGSEGV and len(stack) >= DEEP and len(set(stack)) <= DIFFERENT:
        why, confidence = "a recursion without an end filled its stack", "likely"
        keep = "keep Python's limit, which ends a recursion by a RecursionError"
        helps.append(Help(keep, "sys.setrecursionlimit(1000)"))
    if unstarted := next(filter(_NO_THREAD.search, rank.said), ""):
        evidence.append(f"it had said: {cut(unstarted.strip())}")
        helps.append(SEE_LIMIT_OF_THREADS)
    if any(frame.function == "_ddp_init_helper" for frame in stack):
        helps.append(_LESS_DETAIL)
    return of_end(
        case,
        "rank-crashed",
        f"{case.subject} crashed with {status or signal_name(number)}{at}",
        why=why,
        confidence=confidence,
        evidence=evidence,
        help=helps,
        said=(
            *said(rank, [line for line in rank.said if not _DUMP.match(line)]),
            *(words_before(case, first=True) if left and in_log else ()),
        ),
    )


# libgomp, OpenBLAS, and Python itself
_NO_THREAD = Pattern(r"Thread creation failed|pthread_create failed|can't start new thread")

_LESS_DETAIL = Help(
    "if TORCH_DISTRIBUTED_DEBUG is DETAIL, use INFO: under DETAIL the constructor of DDP crashes (torch 2.13 with gloo)",
    "export TORCH_DISTRIBUTED_DEBUG=INFO",
)


def exited(case: Case, caught: Raised | None) -> Report:
    """Tell of an exit code that is not 0, and no exception that left the program."""
    rank = case.first
    code = rank.ended.code if rank.ended is not None else 1
    if case.job.log is not None:
        return _exited_by_a_log(case, code)
    evidence = []
    if caught is not None:
        at = stacks.place(caught.frames, case.root)
        what = caught.call or (f"the program, at {at}," if at else "a call")
        clause = caught.caught_at
        by = f", caught at {stacks.describe(clause, case.root)}" if clause else ""
        evidence.append(f"{what} had raised {named(caught)}{by}")
    elif any(map(_TIME_IS_UP.match, rank.said)):
        evidence.append("faulthandler.dump_traceback_later(exit=True) ended it: its time was up")
    elif not rank.left_at and rank.phase in ("importing", "joining", "running"):
        # The rank is looked into.
        evidence.append(
            "no exception and no sys.exit was seen: likely os._exit, exec or native code"
        )
    said_by = {first_line(one.left_saying): one.rank for one in reversed(case.ranks)}
    words = next(iter(said_by)) if len(said_by) == 1 else ""
    if not words:
        lines = [f"rank {who} left by: {line}" for line, who in said_by.items() if line]
        evidence += reversed(lines[-EVIDENCE_LINES:])
        if code in (2, 70, 75):
            evidence.append(f"{code} is the program's own exit code here, not rallypoint's")
    if code > 128 and has_name(code - 128):
        evidence.append(
            f"{code} is how shells say that a program of theirs ended by {signal_name(code - 128)}"
        )
    if code in _OF_SHELLS:
        evidence.append(f"{code} is how shells say: {_OF_SHELLS[code]}")
    helps, behind = [], case.job.behind
    unseen = code == 2 and not words and not rank.said  # a lone rank has the terminal itself
    refused = any(
        _REFUSED.search(line) and behind.split()[0] in line
        for line in (words, *rank.said)
        if behind
    )
    if behind and (unseen or refused):
        sentence = f"{behind} stands behind the program, which got it; options of rallypoint run stand before the program"
        helps = [Help(sentence, case.job.moved)]
    if rank.log and any(map(read_line.by_launcher, rank.said)):
        sentence = "it ran another launcher, and its log has the output of that: diagnose this log"
        helps.append(Help(sentence, f"rallypoint explain {shlex.quote(rank.log)}"))
    return of_end(
        case,
        "rank-exited",
        ": ".join(filter(None, (f"{case.subject} exited with code {code}", words))),
        where=f"{rank.left_at}, pid {rank.pid}" if rank.left_at else "",
        evidence=evidence,
        help=helps,
        said=said(case.first, case.first.said),
    )


_OF_SHELLS = {126: "found, but not executable", 127: "command not found"}


def _exited_by_a_log(case: Case, code: int) -> Report:
    look = Help(
        "see what it said: the log has none of its words on that",
        "torchrun --redirects 3 --log-dir logs ...",
    )
    words = words_before(case)
    said_by = first_line(case.first.left_saying)
    return of_end(
        case,
        "rank-exited",
        ": ".join(filter(None, (f"{case.subject} exited with code {code}", said_by))),
        why=case.first.doubt
        or ("" if said_by else "no traceback or error of it stands in the log"),
        evidence=told_by(case),
        help=() if words or said_by else [look],
        said=words,
    )


# argparse, click and optparse, absl
_REFUSED = Pattern(
    r"unrecognized arguments|no such option|unknown (?:command line )?(?:flag|option)",
    re.IGNORECASE,
)


def left_early(case: Case) -> Report:
    """Tell of exit code 0, or of a closed group, while the others went on."""
    job, first, one = case.job, case.first, len(case.ranks) == 1
    at_fault = set(case.numbers)
    waiting = [rank for rank in job.ranks if rank.rank not in at_fault]
    joining = [rank.rank for rank in waiting if rank.phase == "joining" and rank.raised is None]
    over = all(rank.ended is not None and not rank.sent for rank in case.ranks)
    at_its_end = first.phase == "finishing" or (job.function and first.phase == "done")
    closed = not over and not at_its_end and bool(first.closed_at)
    went = f"came to the end of {job.program}"
    if first.exit_line:
        went = f"left {job.program} by sys.exit"
    went = went_home(job, first) if over else went
    where = (first.exit_line or f"at the end of {job.program}") if at_its_end else ""
    if closed:
        went, where = f"closed {'its' if one else 'their'} process group", first.closed_line
    absent = _never_joined(case)
    if absent:
        step = (
            "let every rank open the group before any of them may leave",
            'dist.init_process_group("gloo")',
        )
    elif closed and any(rank.raised is not None and rank.phase == "joining" for rank in waiting):
        step = (
            "the group is open in one rank before it is in all: let them meet once before any closes it",
            "dist.barrier()",
        )
    elif job.function:
        step = (
            "let every rank make the same number of steps, and none return before the last one",
            "dist.barrier()",
        )
    else:
        step = (
            "let every rank make the same number of steps, and close the group together",
            "dist.destroy_process_group()",
        )
    wait = "wait" if len(joining) > 1 else "waits"
    seen = f"{ranks_phrase(joining)} {wait} in init_process_group" if joining else ""
    errors = {one.rank: one.raised.frames for one in waiting if one.raised is not None}
    places = [(one.ranks, stacks.place(one.frames, case.root)) for one in stacks.group(errors)]
    needed = listed(
        [f"{ranks_phrase(ranks)} needed it at {place}" for ranks, place in places if place]
    )
    return of_end(
        case,
        "rank-left-early",
        f"{case.subject} {went} while others still needed {'it' if closed or one else 'them'}",
        where=located(where, first) if where else "",
        why="every rank must make the same collective calls, and stay until the last one",
        evidence=filter(None, (_when(case, waiting), seen, absent, *needed)),
        help=[Help(*step)],
        exit_status=1,
        said=said(case.first, case.first.said),
    )


def _when(case: Case, waiting: Sequence[RankEvidence]) -> str:
    """Return who left when, and who noticed it when, where no timeline shows it: of ranks that had
    not ended by themselves.
    """
    left = [
        (rank.closed_at or rank.phase_at, rank.rank)
        for rank in case.ranks
        if rank.ended is None or rank.sent
    ]
    lost = [
        (error.at, rank.rank)
        for rank in waiting
        for error in (rank.raised, *rank.handled)
        if error is not None and error.at
    ]
    # Heard late: it would read the wrong way round.
    if not left or not lost or min(left) > min(lost):
        return ""
    did = f"{ranks_phrase(number for _, number in left)} {'closed the group' if case.first.closed_at else 'came to the end'}"
    (gone, _), (noticed, number) = min(left), min(lost)
    return f"{did} at {since(gone)}, rank {number} noticed at {since(noticed)}"


def _never_joined(case: Case) -> str:
    """Name the ranks that never joined, where others were seen to join: without our wrap of
    init_process_group nobody is.
    """
    absent = [rank.rank for rank in case.ranks if rank.meeting is None]
    seen = any(rank.meeting is not None for rank in case.job.ranks)
    return f"{ranks_phrase(absent)} never called init_process_group" if absent and seen else ""
