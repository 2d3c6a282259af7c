"""How a process ended: by a signal, by an exit code, or before it ran at all."""

from __future__ import annotations

import errno
import os
import re
import signal as signals
from collections.abc import Sequence

import msgspec

from rallypoint.diagnosis import stacks
from rallypoint.diagnosis.causes import resources
from rallypoint.diagnosis.causes.case import Case, located, pids, resident, was, went_home
from rallypoint.diagnosis.causes.report_form import logs, of_end, said, words_before
from rallypoint.diagnosis.causes.wording import (
    EVIDENCE_LINES,
    crash_words,
    first_line,
    has_name,
    named,
    signal_name,
    since,
)
from rallypoint.diagnosis.evidence import Raised, RankEvidence
from rallypoint.diagnosis.report import Help, Report
from rallypoint.world import ranks_phrase

# of the last Python stack, innermost first: the library's call, and how the program came there
CRASH_FRAMES = 4

_DUMP = re.compile(
    r'^(Fatal Python error|Current thread|Thread 0x|  File "|Extension modules:|  <no Python frame>)'
)


_ASK_THE_KERNEL = Help(
    "ask the kernel whether it was for lack of memory, on that machine",
    "sudo dmesg -T | grep -i 'killed process'",
)
_ASK_SLURM = Help("under Slurm, ask it", "sacct -j JOBID --format=JobID,State,ExitCode,MaxRSS")
_BY_THE_KERNEL = "; the kernel, which does so when memory runs out, leaves no word there"


def _not_found(case: Case, number: int) -> Report:
    """The interpreter, mpiexec or Slurm did not find the program, by a log."""
    file, words = case.job.program, "".join(case.first.said)
    reasons = {
        errno.EACCES: "it is not executable",
        errno.ENOEXEC: "it is no program for this machine",
    }
    slurm = "execve()" in words
    by_path = (slurm or "execvp" in words) and "/" not in file
    command = f"dir {file}" if re.match(r"[A-Za-z]:\\", file) else f"ls -l {file}"
    help = Help("start from the folder that holds it, or type its whole path", command)
    if by_path:
        look = "activate the environment that has it before the job, and see whether that node has it, too"
        help = Help(look, f"{'srun' if slurm else 'mpiexec'} which {file}")
    return Report(
        code="start-failed",
        headline=f"{file} cannot be started: {reasons.get(number, 'there is no such file')}",
        why="it was looked for on the PATH of the job" if by_path else "",
        help=(help,),
        logs=logs(case),
    )


def not_run(case: Case, number: int) -> Report:
    """The kernel refused to execute the program. `number`: errno."""
    if case.job.log is not None:
        return _not_found(case, number)
    program = case.job.program
    helps: tuple[Help, ...] = ()
    if number == errno.EACCES:
        helps = (Help("make it executable", f"chmod +x {program}"),)
    elif number == errno.ENOEXEC:
        helps = (Help("say in its first line what runs it", "#!/bin/sh"),)
    elif number == errno.ENOENT:
        helps = (
            Help(
                "see whether it is there, and the interpreter that its first line names",
                f"head -n 1 {program}",
            ),
        )
    return Report(
        code="start-failed",
        headline=f"{program} cannot be executed: {os.strerror(number)}",
        where=f"execve, {pids(case.ranks[:1])}",
        help=helps,
        ranks=case.numbers,
        exit_status=127 if number == errno.ENOENT else 126,
    )


def killed(case: Case, number: int) -> Report:
    """A signal from outside. Memory is looked at by `out_of_memory` first."""
    name = signal_name(number)
    memory = case.job.memory
    evidence = [
        f"{case.subject} ended by {name}; rallypoint had sent {'it' if len(case.ranks) == 1 else 'them'} no signal"
    ]
    helps: tuple[Help, ...] = ()
    sender = f"who sent {name} is not known"
    if case.job.log is not None:
        evidence = told_by(case)
        sender = f"who sent {name} is not in the log"
        if number == signals.SIGKILL:
            sender, helps = sender + _BY_THE_KERNEL, (_ASK_THE_KERNEL, _ASK_SLURM)
    elif number == signals.SIGKILL:
        evidence += [*resources.no_kill_known(memory, pids(case.ranks)), *resident(case.ranks)]
        helps = resources.ask_the_kernel(memory)
    elif number == signals.SIGXCPU:
        helps = (Help("see the limit on processor time", "ulimit -t"),)
    elif number == signals.SIGXFSZ:
        helps = (Help("see the limit on the size of files", "ulimit -f"),)
    who = {
        signals.SIGXCPU: "the limit on processor time was reached",
        signals.SIGXFSZ: "the limit on the size of files was reached",
    }
    report = of_end(
        case,
        "rank-killed",
        f"{case.subject} {was(case.ranks)} killed by {name}",
        why=who.get(signals.Signals(number) if has_name(number) else signals.SIGKILL, sender),
        evidence=tuple(evidence),
        help=helps,
        status=128 + number,
    )
    return msgspec.structs.replace(report, said=words_before(case))


def told_by(case: Case) -> list[str]:
    """Who says in a log how the first of these ranks ended."""
    return [case.first.told_by] if case.first.told_by else []


_SHOW_STACKS = Help(
    "let Python print its stacks when it crashes again", "export PYTHONFAULTHANDLER=1"
)


def crashed(case: Case, number: int) -> Report:
    """SIGSEGV, SIGABRT and their like, with the last Python stack."""
    rank, in_log = case.first, case.job.log is not None
    status = next((one.ended.status for one in case.ranks if one.ended is not None), "")
    name = status or signal_name(number)
    stack = stacks.last_stack(rank)
    calls = tuple(frame for frame in stack if frame.function not in stacks.WRAPPERS)
    evidence = [
        ("called from " if i else "at ") + stacks.describe(frame, case.root)
        for i, frame in enumerate(reversed(calls[-CRASH_FRAMES:]))
    ]
    if rank.uncaught is not None:
        evidence.append(f"an exception of C++ that nobody caught: {named(rank.uncaught)}")
    if number == signals.SIGBUS and not in_log:
        evidence.append(
            "SIGBUS often means that /dev/shm or a mapped file's disk is full; that was not looked at"
        )
    helps: tuple[Help, ...] = ()
    if number == signals.SIGBUS:
        helps = (Help("see whether shared memory is full", "df -h /dev/shm"),)
    main = stacks.main_frames(rank.stack_text)
    if not stack and main:  # faulthandler marks no thread as the current one
        evidence.append(
            f"it crashed in a thread of native code, while the main thread stood at {stacks.place(main, case.root)}"
        )
    elif not stack:
        evidence.append(
            "the log has no Python stack of it" if in_log else "the rank left no Python stack"
        )
        if in_log:
            helps += (_SHOW_STACKS,)
    if not rank.stack_text:
        evidence += told_by(case)
    words = tuple(line for line in rank.said if not _DUMP.match(line))
    report = of_end(
        case,
        "rank-crashed",
        f"{case.subject} crashed with {name}"
        + (f" in {stacks.place(stack, case.root)}" if stack else ""),
        why=crash_words(number),
        evidence=tuple(evidence),
        help=helps,
        status=128 + number,
    )
    return msgspec.structs.replace(report, said=said(rank, words))


def exited(case: Case, code: int, caught: Raised | None) -> Report:
    """An exit code that is not 0, and no exception that left the program."""
    evidence = []
    if caught is not None:
        at = stacks.place(caught.frames, case.root)
        what = caught.call or (f"the program, at {at}," if at else "a call")
        evidence.append(f"{what} had raised {named(caught)}{_caught_at(caught, case.root)}")
    elif not case.first.left_at and case.first.phase in (
        "importing",
        "joining",
        "running",
    ):  # it is looked into
        evidence.append(
            "no exception and no sys.exit was seen in it: os._exit, exec or native code ended it"
        )
    said_by = {first_line(rank.left_saying): rank for rank in reversed(case.ranks)}
    words = next(iter(said_by)) if len(said_by) == 1 else ""
    if not words:
        evidence += [
            f"rank {rank.rank} left by: {line}" for line, rank in reversed(said_by.items()) if line
        ][:EVIDENCE_LINES]
    if case.job.log is not None:
        return _exited_by_a_log(case, code)
    if code in (2, 70, 75) and not words:
        evidence.append(f"{code} is the program's own exit code here, not rallypoint's")
    if code > 128 and has_name(code - 128):
        evidence.append(
            f"{code} is how shells say that a program of theirs ended by {signal_name(code - 128)}"
        )
    if code in (126, 127):
        evidence.append(
            f"{code} is how shells say: {'found, but not executable' if code == 126 else 'command not found'}"
        )
    where = f"{case.first.left_at}, pid {case.first.pid}" if case.first.left_at else ""
    headline = ": ".join(filter(None, (f"{case.subject} exited with code {code}", words)))
    helps: tuple[Help, ...] = ()
    behind = case.job.behind
    unseen = code == 2 and not words and not case.first.said  # a lone rank has the terminal itself
    if behind and (
        unseen
        or any(
            _REFUSED.search(line) and behind.split()[0] in line
            for line in (words, *case.first.said)
        )
    ):
        helps = (
            Help(
                f"{behind} stands behind the program, which got it; options of rallypoint run stand before the program",
                case.job.moved,
            ),
        )
    return of_end(
        case,
        "rank-exited",
        headline,
        where=where,
        evidence=tuple(evidence),
        help=helps,
        status=code,
        quote=True,
    )


def _exited_by_a_log(case: Case, code: int) -> Report:
    assert case.job.log is not None
    look = Help(
        "see what it said: the log has none of its words on that",
        "torchrun --redirects 3 --log-dir logs ...",
    )
    report = of_end(
        case,
        "rank-exited",
        f"{case.subject} exited with code {code}",
        why=case.first.doubt or "no traceback or error of it stands in the log",
        evidence=tuple(told_by(case)),
        help=() if case.job.log.last_words else (look,),
        status=code,
    )
    return msgspec.structs.replace(report, said=words_before(case))


# argparse, click and optparse, absl
_REFUSED = re.compile(
    r"unrecognized arguments|no such option|unknown (?:command line )?(?:flag|option)",
    re.IGNORECASE,
)


def left_early(case: Case) -> Report:
    """Exit code 0 while the others went on."""
    waiting = [rank for rank in case.job.ranks if rank.rank not in case.numbers]
    joining = [rank.rank for rank in waiting if rank.phase == "joining" and rank.raised is None]
    at_its_end = case.first.phase == "finishing" or (
        case.job.function and case.first.phase == "done"
    )
    over = all(rank.ended is not None and not rank.sent for rank in case.ranks)
    closed = not over and not at_its_end and bool(case.first.closed_at)
    went = went_home(case.job) if over else f"came to the end of {case.job.program}"
    if closed:
        went = f"closed {'its' if len(case.ranks) == 1 else 'their'} process group"
    where = (
        case.first.closed_line
        if closed
        else f"at the end of {case.job.program}"
        if at_its_end
        else ""
    )
    absent = _never_joined(case)
    step = (
        "let every rank make the same number of steps, and close the group together",
        "dist.destroy_process_group()",
    )
    if case.job.function:
        step = (
            "let every rank make the same number of steps, and none return before the last one",
            "dist.barrier()",
        )
    if closed and any(rank.raised is not None and rank.phase == "joining" for rank in waiting):
        step = (
            "the group is open in one rank before it is in all: let them meet once before any closes it",
            "dist.barrier()",
        )
    if absent:
        step = (
            "let every rank open the group before any of them may leave",
            'dist.init_process_group("gloo")',
        )
    seen = (
        f"{ranks_phrase(joining)} {'wait' if len(joining) > 1 else 'waits'} in init_process_group"
        if joining
        else ""
    )
    return of_end(
        case,
        "rank-left-early",
        f"{case.subject} {went} while others still needed {'it' if closed or len(case.ranks) == 1 else 'them'}",
        where=located(where, case.first) if where else "",
        why="every rank must make the same collective calls, and stay until the last one",
        evidence=tuple(filter(None, (_when(case, waiting), seen, *absent))),
        help=(Help(*step),),
        status=1,
        quote=True,
    )


def _when(case: Case, waiting: Sequence[RankEvidence]) -> str:
    """Who left when, and who noticed it when, where no timeline shows it: of ranks that had not
    ended by themselves.
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
    if (
        not left or not lost or min(left) > min(lost)
    ):  # heard late: it would read the wrong way round
        return ""
    did = f"{ranks_phrase(number for _, number in left)} {'closed the group' if case.first.closed_at else 'came to the end'}"
    (gone, _), (noticed, number) = min(left), min(lost)
    return f"{did} at {since(gone)}, rank {number} noticed at {since(noticed)}"


def _caught_at(error: Raised, root: str) -> str:
    return f", caught at {stacks.describe(error.caught_at, root)}" if error.caught_at else ""


def _never_joined(case: Case) -> tuple[str, ...]:
    """Only where others were seen to join: without our wrap of init_process_group nobody is."""
    absent = [rank.rank for rank in case.ranks if rank.meeting is None]
    seen = any(rank.meeting is not None for rank in case.job.ranks)
    return (f"{ranks_phrase(absent)} never called init_process_group",) if absent and seen else ()
