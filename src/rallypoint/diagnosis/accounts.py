"""One function per cause: the ranks at fault and their evidence, told as a Report."""

from __future__ import annotations

import errno
import os
import re
import signal as signals
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from rallypoint.diagnosis import reading, stacks
from rallypoint.diagnosis.evidence import Frame, JobEvidence, Meeting, Raised, RankEvidence
from rallypoint.diagnosis.report import Confidence, Help, Moment, Report, Said
from rallypoint.host import devices
from rallypoint.host.devices import Found
from rallypoint.world import ranks_phrase

SAID_LINES = 10  # of a rank's own words: what fits on a screen together with the rest
TRACEBACK_LINES = 8  # so that the report of one raise stays below 19 lines
LINE_CHARACTERS = 400  # of one quoted line; a rank can print megabytes without a newline
HEADLINE_MESSAGE = 160  # characters of an exception's message in the headline: two lines of a terminal
CRASH_FRAMES = 4  # of the last Python stack, innermost first: the library's call, and how the program came there
TIMELINE = 7  # lines around the cause; the rest is in events.jsonl
TIMELINE_WORDS = 72  # characters of one event, so that a line fits on 92 columns
EVIDENCE_LINES = 7  # of a list with a line for each rank or place

PHASES = {
    "started": "",  # all that is known of a program which is not looked into (--plain, --no-python)
    "preparing": "before the program began",
    "importing": "before init_process_group, in the program",
    "joining": "in init_process_group",
    "running": "while running",
    "finishing": "while the interpreter was closing down",
    "done": "after the program's last line",
}

NOT_KNOWN = "where it was is not known"

_DUMP = re.compile(r'^(Fatal Python error|Current thread|Thread 0x|  File "|Extension modules:|  <no Python frame>)')

_SPAWN = re.compile(r"/torch/multiprocessing/spawn\.py$")


class Case(msgspec.Struct, frozen=True):
    """What every account needs: the job, the ranks at fault (first one first), what the others did, how sure we are."""

    job: JobEvidence
    ranks: tuple[RankEvidence, ...]
    then: str
    confidence: Confidence = "certain"

    @property
    def first(self) -> RankEvidence:
        return self.ranks[0]

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(sorted(rank.rank for rank in self.ranks))

    @property
    def subject(self) -> str:
        return subject(self.numbers, self.job.world_size)

    @property
    def root(self) -> str:
        errors = [error for rank in self.job.ranks for error in (rank.raised, *rank.handled) if error is not None]
        frames = [frame for error in errors for frame in error.frames]
        return self.job.folder or stacks.root_of(self.job.program, [*frames, *(frame for rank in self.job.ranks for frame in rank.stack)])


# --- one per cause ---------------------------------------------------------------------------------------------------


def raised(case: Case, error: Raised) -> Report:
    """An exception left the program: by what it says, one of several codes."""
    if error.code:
        return _known(case, error)
    if (inside := reading.in_process(error)) is not None:
        return _in_process(case, *inside)
    if reading.producer_gone(error):
        return _producer_gone(case, error)
    if reading.files_exhausted(error):
        return files_exhausted(case, error)
    if reading.not_pickled(error):
        return _not_pickled(case, error)
    if reading.variable_missing(error.message):
        return _variable_missing(case, error)
    if reading.group_twice(error.message):
        return _group_twice(case, error)
    if reading.port_in_use(error.message) or error.errno == errno.EADDRINUSE:
        return _port_in_use(case, error)
    if reading.out_of_memory(error.type, error.message):
        return _memory_refused(case, error)
    if reading.device_shared(error.message):
        return device_shared(case, error)
    if reading.cuda_forked(error.message):
        return _cuda_before_fork(case, error)
    if reading.device_busy(error.message):
        return _device_busy(case, error)
    if reading.device_missing(error.message):
        return _device_missing(case, error)
    if reading.cuda_init_failed(error.message):
        return _cuda_init_failed(case, error)
    if reading.port_forbidden(error.message):
        return _port_forbidden(case, error)
    if reading.group_missing(error.message):
        return _group_missing(case, error)
    if reading.parameters_unused(error.message):
        return _parameters_unused(case, error)
    if reading.kernel_failed(error.message):
        return _kernel_failed(case, error)
    if starts_nothing(case.job.program, error):
        return _start_failed(case, error)
    if name := reading.interface_missing(error.message):
        return _interface_missing(case, error, name)
    if (sizes := reading.sizes_differ(error.message)) is not None:
        return _sizes_differ(case, error, *sizes)
    return _told(case, "rank-raised", f"{case.subject} raised {named(error)}", error, help=_help_for(error, case.job))


def not_run(case: Case, number: int) -> Report:
    """The kernel refused to execute the program. `number`: errno."""
    program = case.job.program
    helps: tuple[Help, ...] = ()
    if number == errno.EACCES:
        helps = (Help("make it executable", f"chmod +x {program}"),)
    elif number == errno.ENOEXEC:
        helps = (Help("say in its first line what runs it", "#!/bin/sh"),)
    elif number == errno.ENOENT:
        helps = (Help("see whether it is there, and the interpreter that its first line names", f"head -n 1 {program}"),)
    return Report(
        code="start-failed",
        headline=f"{program} cannot be executed: {os.strerror(number)}",
        where=f"execve, {_pids(case.ranks[:1])}",
        help=helps,
        ranks=case.numbers,
        exit_status=127 if number == errno.ENOENT else 126,
    )


def killed(case: Case, number: int) -> Report:
    """A signal from outside. Memory is looked at by `out_of_memory` first."""
    name = signal_name(number)
    memory = case.job.memory
    evidence = [f"{case.subject} ended by {name}; rallypoint had sent {'it' if len(case.ranks) == 1 else 'them'} no signal"]
    if number == signals.SIGKILL:
        if memory.counted and not memory.oom_kills:
            evidence.append("the kernel killed nothing in this cgroup for lack of memory: its oom_kill count did not change")
        if memory.killed_pids:
            others = ", ".join(str(pid) for pid in memory.killed_pids)
            evidence.append(f"the kernel's log names kills for lack of memory, but of pid {others}")
        elif memory.kernel_log_read:
            evidence.append(f"the kernel's log names no kill of {_pids(case.ranks)}")
        evidence += _resident(case.ranks)
    helps: tuple[Help, ...] = ()
    if number == signals.SIGKILL and not memory.kernel_log_read:
        helps = (Help("ask the kernel whether it was for memory", "sudo dmesg -T | grep -i 'killed process'"),)
    elif number == signals.SIGXCPU:
        helps = (Help("see the limit on processor time", "ulimit -t"),)
    elif number == signals.SIGXFSZ:
        helps = (Help("see the limit on the size of files", "ulimit -f"),)
    who = {signals.SIGXCPU: "the limit on processor time was reached", signals.SIGXFSZ: "the limit on the size of files was reached"}
    return _of_end(
        case,
        "rank-killed",
        f"{case.subject} {_was(case.ranks)} killed by {name}",
        why=who.get(signals.Signals(number) if _is_named(number) else signals.SIGKILL, f"who sent {name} is not known"),
        evidence=tuple(evidence),
        help=helps,
        status=128 + number,
    )


def out_of_memory(case: Case) -> Report:
    """SIGKILL, and the kernel says that it killed for memory."""
    memory = case.job.memory
    in_log = [rank for rank in case.ranks if rank.pid in memory.killed_pids]
    evidence = []
    if in_log:
        evidence.append(f"the kernel's log says that it killed {_pids(in_log)}")
    if memory.oom_kills:
        evidence.append(f"the cgroup's oom_kill count went up by {memory.oom_kills} since the job's start")
    evidence.append(f"{case.subject} ended by SIGKILL; rallypoint had sent {'it' if len(case.ranks) == 1 else 'them'} no signal")
    evidence += _resident(case.job.ranks)
    limit = f"the cgroup may use {size(memory.limit)}" if memory.limit else "memory ran out on this machine"
    certain = len(in_log) == len(case.ranks)
    if not certain:
        case = msgspec.structs.replace(case, confidence="likely")
    return _of_end(
        case,
        "rank-out-of-memory",
        f"{case.subject} {_was(case.ranks)} killed by the kernel for lack of memory",
        why=limit if certain or not memory.limit else f"{limit}, and the kernel killed in it for lack of memory",
        evidence=tuple(evidence),
        help=_less_memory(case.job),
        status=128 + signals.SIGKILL,
    )


def crashed(case: Case, number: int) -> Report:
    """SIGSEGV, SIGABRT and their like, with the last Python stack."""
    name, rank = signal_name(number), case.first
    stack = last_stack(rank)
    calls = tuple(frame for frame in stack if frame.function not in stacks.WRAPPERS)
    evidence = [
        ("called from " if i else "at ") + stacks.describe(frame, case.root) for i, frame in enumerate(reversed(calls[-CRASH_FRAMES:]))
    ]
    if number == signals.SIGBUS:
        evidence.append("SIGBUS often means that /dev/shm or a mapped file's disk is full; that was not looked at")
    helps = (Help("see whether shared memory is full", "df -h /dev/shm"),) if number == signals.SIGBUS else ()
    main = stacks.main_frames(rank.stack_text)
    if not stack and main:  # faulthandler marks no thread as the current one
        evidence.append(f"it crashed in a thread of native code, while the main thread stood at {stacks.place(main, case.root)}")
    elif not stack:
        evidence.append("the rank left no Python stack")
    words = tuple(line for line in rank.said if not _DUMP.match(line))
    report = _of_end(
        case,
        "rank-crashed",
        f"{case.subject} crashed with {name}" + (f" in {stacks.place(stack, case.root)}" if stack else ""),
        why=_CRASHES.get(number, ""),
        evidence=tuple(evidence),
        help=helps,
        status=128 + number,
    )
    return msgspec.structs.replace(report, said=said(rank, words))


def exited(case: Case, code: int, caught: Raised | None) -> Report:
    """An exit code that is not 0, and no exception that left the program."""
    evidence = []
    if caught is not None:
        evidence.append(f"{caught.call or 'a call'} raised {named(caught)}{_caught_at(caught, case.root)}")
    if code in (2, 70, 75):
        evidence.append(f"{code} is the program's own exit code here, not rallypoint's")
    if code > 128 and _is_named(code - 128):
        evidence.append(f"{code} is how shells say that a program of theirs ended by {signal_name(code - 128)}")
    if code in (126, 127):
        evidence.append(f"{code} is how shells say: {'found, but not executable' if code == 126 else 'command not found'}")
    where = f"{case.first.left_at}, pid {case.first.pid}" if case.first.left_at else ""
    return _of_end(
        case, "rank-exited", f"{case.subject} exited with code {code}", where=where, evidence=tuple(evidence), status=code, quote=True
    )


def left_early(case: Case) -> Report:
    """Exit code 0 while the others went on."""
    waiting = [rank for rank in case.job.ranks if rank.rank not in case.numbers]
    joining = [rank.rank for rank in waiting if rank.phase == "joining"]
    seen = f"{ranks_phrase(joining)} {'wait' if len(joining) > 1 else 'waits'} in init_process_group" if joining else ""
    return _of_end(
        case,
        "rank-left-early",
        f"{case.subject} ended with exit code 0 while others still needed {'it' if len(case.ranks) == 1 else 'them'}",
        why="every rank must make the same collective calls, and stay until the last one",
        evidence=tuple(filter(None, (seen, *_never_joined(case)))),
        help=(Help("let every rank make the same number of steps, and close the group together", "dist.destroy_process_group()"),),
        status=1,
        quote=True,
    )


def swallowed(case: Case, error: Raised) -> Report:
    """An error in a shared call that the program caught before it went home."""
    call = error.call or "a call of torch.distributed"
    clause = error.caught_at
    ended = case.first.ended
    left = f"the rank then ended with exit code {ended.code if ended else 0} while others waited"
    # The traceback of an exception that is still on its way has no frame of the program: it begins at the call.
    raised_at = stacks.place(error.frames, case.root) if any(not stacks.library(frame) for frame in error.frames) else ""
    report = _told(
        case,
        "error-swallowed",
        f"{case.subject} caught an error of {call} and left: {named(error)}",
        error,
        why=f"{stacks.shown(clause.file, case.root)}:{clause.line} caught it; {left}" if clause else f"the program caught it; {left}",
        evidence=tuple(filter(None, (f"{call} was called at {raised_at}" if raised_at else "", _lack_and_facts(case.job.devices)[0]))),
        help=(Help("let the exception leave the program, or end with a code that is not 0", "raise"),),
    )
    if clause is not None:
        report = msgspec.structs.replace(report, where=f"{stacks.describe(clause, case.root)}, pid {case.first.pid}")
    return msgspec.structs.replace(report, timeline=timeline(case))


def address_differs(case: Case, meetings: Sequence[tuple[Meeting, tuple[int, ...]]]) -> Report:
    """Ranks of one group that look for each other at different places."""
    evidence = [f"{ranks_phrase(ranks)}: {at.address}" + (f", from {at.line}" if at.line else "") for at, ranks in meetings]
    return Report(
        code="address-differs",
        headline=f"the ranks were told {len(meetings)} different meeting points: {', '.join(at.address for at, _ in meetings[:3])}",
        where=meetings[0][0].line,
        why="init_process_group brings together only those that come to the same address",
        evidence=_listed(evidence),
        then=case.then,
        help=(Help("give every rank the same address, or leave it out: rallypoint sets MASTER_ADDR and MASTER_PORT"),),
        logs=logs(case),
        ranks=case.numbers,
        confidence=case.confidence,
    )


def stale_file(case: Case, error: Raised, path: str) -> Report:
    """A refused connection behind a file:// rendezvous: the file names processes that are gone."""
    return _told(
        case,
        "store-file-stale",
        f"the rendezvous file {path} sent {case.subject} to processes that are gone",
        error,
        why="gloo was refused at an address that stands in the file: an earlier run left it",
        help=(Help("remove the file before a run, or use a new name for each", f"rm {path}"), Help("or leave init_method out")),
    )


def missing(case: Case, waiters: Sequence[RankEvidence], error: Raised) -> Report:
    """Some waited until their timeout for `case.ranks`."""
    call = error.call or ("init_process_group" if waiters[0].phase == "joining" else "a collective")
    groups = stacks.group({rank.rank: rank.stack for rank in case.ranks})
    first = next(rank for rank in case.ranks if rank.rank == groups[0].ranks[0])
    lines = []
    for group in groups if len(groups) > 1 else ():
        here = next(rank for rank in case.ranks if rank.rank == group.ranks[0])
        lines.append(f"{ranks_phrase(group.ranks)}: {stacks.place(group.frames, case.root) or _phase(here) or NOT_KNOWN}")
    return Report(
        code="ranks-missing",
        headline=f"{ranks_phrase(rank.rank for rank in waiters)} waited in {call} until the timeout; {case.subject} never came",
        where=_at(stacks.place(groups[0].frames, case.root) or _phase(first), first),
        why=f"{case.subject} {_was(case.ranks)} still elsewhere when the others' time was up",
        evidence=(*_listed(lines), f"rank {waiters[0].rank} raised {named(error)}"),
        then=case.then,
        logs=logs(case),
        ranks=case.numbers,
        confidence=case.confidence,
    )


def collective_mismatch(case: Case, calls: Mapping[int, tuple[str, Frame]]) -> Report:
    """Ranks that waited for each other in different collectives. `calls`: by rank the collective, and the program's line."""
    together: dict[tuple[str, str], list[int]] = {}
    for number, (name, frame) in sorted(calls.items()):
        together.setdefault((name, stacks.describe(frame, case.root)), []).append(number)
    groups = sorted(together.items(), key=lambda item: (len(item[1]), item[1][0]))  # the odd one first
    lines = [f"{ranks_phrase(numbers)}: {name} at {place}" for (name, place), numbers in groups]
    names = list(dict.fromkeys(name for name, _ in together))
    told = f"{', '.join(names[:-1])} and {names[-1]}"
    first = next(rank for rank in case.job.ranks if rank.rank == groups[0][1][0])
    return Report(
        code="collective-mismatch",
        headline=f"the ranks waited for each other in different collectives, {told}, until the timeout",
        where=_at(groups[0][0][1], first),
        why="a collective returns when every rank of the group has called it, in the same order",
        evidence=_listed(lines),
        then="" if len(case.ranks) == len(case.job.ranks) else case.then,
        help=(Help("let every rank make the same calls in the same order, outside of branches that only some take"),),
        logs=logs(case),
        ranks=case.numbers,
        confidence=case.confidence,
    )


def unknown(case: Case, error: Raised | None) -> Report:
    """Nothing but consequences: what was ruled out, and who was the first."""
    job = case.job
    if not case.ranks:
        return Report(
            code="cause-unknown",
            headline="the job was stopped, and no rank shows why",
            why=job.stop_reason or "the cause is not known",
            then=case.then,
            logs=(job.run_dir,) if job.run_dir else (),
        )
    launchers = [rank.rank for rank in job.ranks if _spawns(rank)]
    if error is not None and reading.in_process(error) is not None and len(launchers) > 1:
        return _mixed_up(case, error, launchers)
    ruled_out = ["no rank was ended by a signal from outside, and none raised an error of its own"]
    if job.memory.counted and not job.memory.oom_kills:
        ruled_out.append("the kernel killed nothing in this cgroup for lack of memory")
    what = f"lost another rank ({reading.in_short(error)})" if error else _how_ended(case.first)
    report = _of_end(
        case,
        "cause-unknown",
        f"{case.subject} {what}; the cause is not known",
        where=where(case, case.first, error) if error else "",
        why="every rank that failed says that it lost another one; this one was the first",
        evidence=tuple(ruled_out),
        status=_status(case.first),
        quote=error is None,
    )
    return msgspec.structs.replace(report, said=traceback_said(case.first, error) if error else report.said)


def _mixed_up(case: Case, error: Raised, launchers: Sequence[int]) -> Report:
    """Several ranks are launchers themselves, and what one of them had started lost a peer: the sets met at one port."""
    return _told(
        case,
        "spawn-inside-run",
        f"{case.subject} had started ranks of its own, and one of those lost another",
        error,
        why="a program that calls mp.spawn is its own launcher: sets of ranks that ask for the same port meet ranks of another set",
        evidence=(f"{ranks_phrase(launchers)} called mp.spawn, each for itself",),
        help=(Help("start it once, and let it spawn", f"rallypoint run -n 1 {case.job.program}"),),
    )


def _spawns(rank: RankEvidence) -> bool:
    """Whether a rank stands in `mp.spawn`, or left it with what a process of it raised."""
    frames = (*last_stack(rank), *(rank.raised.frames if rank.raised is not None else ()))
    return any(_SPAWN.search(frame.file) for frame in frames)


def interrupted(job: JobEvidence, then: str) -> Report:
    """Somebody wanted the job to stop: where each rank was."""
    name = job.interrupted_by
    lines = _whereabouts(job.ranks, Case(job, job.ranks, "").root)
    number = getattr(signals, name, signals.SIGTERM) if name.startswith("SIG") else signals.SIGTERM
    by = "Ctrl-C" if name == "SIGINT" else name
    after = f", {job.now:.1f} s after its start" if job.now else ""
    return Report(
        code="interrupted",
        headline=f"the job was stopped by {by}{after}",
        why="where the ranks were:" if lines else "no rank had been started",
        evidence=lines,
        then=then,
        logs=(job.run_dir,) if job.run_dir else (),
        exit_status=128 + int(number),
    )


def overdue(job: JobEvidence) -> Report:
    """The time that the whole job was given is over: where each rank was."""
    lines = _whereabouts(job.ranks, Case(job, job.ranks, "").root)
    returned = sum(rank.ended is not None and rank.ended.code == rank.ended.signal == 0 for rank in job.ranks)
    return Report(
        code="launch-timeout",
        headline=f"{job.program} had returned in {returned} of {job.world_size} ranks when its {job.overdue:g} s were over",
        why="where the ranks were:" if lines else "no rank had been started",
        evidence=lines,
        then="" if not lines else "the others were stopped" if returned else "they were stopped",
        help=(Help("give it more time, or None for as long as it takes", "rallypoint.launch(..., timeout=None)"),),
        logs=(job.run_dir,) if job.run_dir else (),
        exit_status=75,
    )


def launcher_died(job: JobEvidence, then: str) -> Report:
    """The template, the guard or the c10d host ended by itself."""
    lost = job.helper
    assert lost is not None
    ended = lost.ended
    by_signal = ended.signal and ended.signal not in _CRASHES
    how = f"was ended by {signal_name(ended.signal)}" if ended.signal else f"exited with code {ended.code}"
    evidence = [f"it had pid {lost.pid} and ended {ended.at:.2f} s after the job's start"]
    why = "a job cannot go on without it"
    if lost.pid in job.memory.killed_pids:
        why = "the kernel killed it for lack of memory: its log names the pid"
    elif by_signal:
        evidence.append("rallypoint ends it with no signal while a job runs, so the signal came from outside")
    helps = () if by_signal else (Help("if it happens again, report it with this text and the logs"),)
    return Report(
        code="launcher-died",
        headline=f"rallypoint's {lost.name} {how}",
        why=why,
        evidence=tuple(evidence),
        then=then,
        said=(Said(f"the {lost.name}", tuple(cut(line) for line in lost.words[-SAID_LINES:])),) if lost.words else (),
        help=helps,
        logs=(job.run_dir,) if job.run_dir else (),
        exit_status=128 + ended.signal if by_signal else 70,
    )


# --- kinds of exceptions ---------------------------------------------------------------------------------------------


def starts_nothing(program: str, error: Raised) -> bool:
    """True when the exception says that the program itself could not begin: it does not compile, or is not found."""
    short = error.type.rpartition(".")[2]
    typed = program.removeprefix("./")
    if short in ("SyntaxError", "IndentationError", "TabError"):
        return bool(error.filename) and (error.filename == program or error.filename.endswith("/" + typed))
    own = [frame for frame in error.frames if not stacks.hidden(frame)]
    if short in ("ModuleNotFoundError", "ImportError"):
        return not own and program.split(".")[0] in re.split(r"[\s'.]+", error.message)
    return short in ("FileNotFoundError", "PermissionError", "IsADirectoryError") and not own and error.filename.endswith(typed)


def _start_failed(case: Case, error: Raised) -> Report:
    helps: tuple[Help, ...] = ()
    if error.type == "ModuleNotFoundError":
        helps = (Help("start from the folder that holds the package, or install it", "python -m pip install -e ."),)
    report = _told(case, "start-failed", f"{case.job.program} cannot be started: {named(error)}", error, help=helps)
    # That it happened in every rank says nothing: they all began the same file.
    return msgspec.structs.replace(report, then="", where="" if not error.frames and not error.filename else report.where)


def _known(case: Case, error: Raised) -> Report:
    """An exception of ours, raised in the rank, or one that our hook recognised: it brings its own words."""
    if error.code == "group-twice":
        return _group_twice(case, error)
    if error.code == "main-unguarded":
        return _main_unguarded(case, error)
    why, evidence = error.why[:1], error.why[1:]
    if case.confidence != "certain":  # one of the store's that another rank may have caused
        others = [rank for rank in case.job.ranks if rank.rank not in case.numbers]
        why = (_AFTER_ANOTHER.get(error.code, "no rank shows why the store gave no answer"),)
        seen = any(rank.stack or rank.ended or _phase(rank) for rank in others)
        evidence = (*error.why, *(_whereabouts(others, case.root) if seen else ()))
    return Report(
        code=error.code,
        headline=f"{case.subject}: {first_line(error.message)}",
        where=where(case, case.first, error),
        why="".join(why),
        evidence=evidence,
        then=case.then,
        help=tuple(Help(sentence, command) for sentence, command in error.help[:3]),
        logs=logs(case),
        ranks=case.numbers,
        confidence=case.confidence,
    )


_AFTER_ANOTHER = {
    "wait-timeout": "whoever was to do it was elsewhere when the time was up",
    "once-failed": "the function was called in another rank, and failed there",
    "barrier-timeout": "whoever did not come was elsewhere when the time was up",
    "barrier-broken": "somebody else at the barrier gave up or died, and no rank shows why",
}
"""What an error of the store that mostly comes of another rank says of that one; the store's own silence has no rank to blame."""


def _group_twice(case: Case, error: Raised) -> Report:
    first = case.first.meeting.line if case.first.meeting else ""
    why = error.why or ((f"an earlier call is at {first}",) if first else ())
    return _told(
        case,
        "group-twice",
        f"{case.subject} called init_process_group a second time",
        error,
        why=why[0] if why else "",
        evidence=tuple(why[1:]),
        help=tuple(Help(sentence, command) for sentence, command in error.help)
        or (Help("call it once, or close the first group before", "dist.destroy_process_group()"),),
    )


def _port_forbidden(case: Case, error: Raised) -> Report:
    port = reading.port_named(error.message) or next((int(found) for found in re.findall(r"\]:(\d+)", error.message)), 0)
    return _told(
        case,
        "port-forbidden",
        f"{case.subject} may not listen on {f'port {port}' if port else 'an address'}: the kernel keeps it for privileged users",
        error,
        why="ports below 1024 need the right to bind them (CAP_NET_BIND_SERVICE)",
        help=(Help("take a port from 1024 on, or leave it out: rallypoint holds a free one"),),
    )


def _group_missing(case: Case, error: Raised) -> Report:
    call = error.call if error.call not in ("", "get_default_group", "get_group_size") else "a call of torch.distributed"
    return _told(
        case,
        "group-missing",
        f"{case.subject} used torch.distributed before init_process_group, or after destroy_process_group",
        error,
        why=f"{call} needs the default group, and this process has none",
        help=(
            Help("open the group before", 'dist.init_process_group("gloo")'),
            Help("or, for code that also runs without one, ask first", "if dist.is_available() and dist.is_initialized():"),
        ),
    )


def _sizes_differ(case: Case, error: Raised, sent: int, room: int) -> Report:
    """gloo got more than the rank's own call had asked for: at fault is the rank or the peer, and gloo does not say which peer."""
    report = _told(
        case,
        "collective-mismatch",
        f"{case.subject} got {sent} bytes in {error.call or 'a collective'} where its own call had room for {room}",
        error,
        why="the ranks were in different collectives, or in one with tensors of different sizes; gloo does not say which rank sent it",
        help=(
            Help(
                "let torch compare the calls of all ranks before each of them, and say which differs",
                "export TORCH_DISTRIBUTED_DEBUG=DETAIL",
            ),
            Help("let every rank make the same calls in the same order, with tensors of the same shape and dtype"),
        ),
    )
    ended = case.first.ended
    return msgspec.structs.replace(report, exit_status=_status(case.first)) if ended is not None and ended.signal else report


def _parameters_unused(case: Case, error: Raised) -> Report:
    names = re.search(r"Parameters which did not receive grad for rank \d+: *([^\n]+)", error.message)
    numbers = re.search(r"Parameter indices which did not receive grad for rank \d+: *([\d ]+)", error.message)
    which = names.group(1) if names else f"parameters number {', '.join(numbers.group(1).split())}" if numbers else ""
    evidence = (f"without gradient: {cut(which, HEADLINE_MESSAGE)}",) if which else ()
    helps: tuple[Help, ...] = (
        Help("let every parameter take part in the loss, or freeze those that do not, before DDP", "parameter.requires_grad_(False)"),
        Help("or let DDP look for them in every step, which costs a pass over the graph", "DDP(model, find_unused_parameters=True)"),
    )
    if not names:
        helps = (Help("see their names", "export TORCH_DISTRIBUTED_DEBUG=DETAIL"), *helps)
    return _told(
        case,
        "parameters-unused",
        f"DDP in {case.subject} waits for gradients that the last step did not make",
        error,
        why="some parameters of the model took no part in the loss of the step before, and DDP averages all of them",
        evidence=evidence,
        help=helps,
    )


def _kernel_failed(case: Case, error: Raised) -> Report:
    asserted = re.search(r"(\w+\.cu:\d+): .*?Assertion `(.*?)` ?failed", error.message + "\n" + error.traceback)
    words = first_line(error.message)
    if asserted:
        what = f"the assertion {asserted.group(2)} failed at {asserted.group(1)}"
    else:
        found = re.search(r"device-side assert triggered|illegal memory access|misaligned address|unspecified launch failure", words)
        what = found.group(0) if found else words
    index = bool(asserted and re.search(r"[Ii]ndex|t >= 0|cur_target", asserted.group(2)))
    return _told(
        case,
        "cuda-kernel-failed",
        f"a CUDA kernel failed in {case.subject}: {what}",
        error,
        why="an index lies outside of what it points into: a label, a token or an embedding's row that is not there"
        if index
        else "kernels run behind the program: the line in the traceback is where it was noticed, mostly not where it was caused",
        help=(
            Help("run once more with each kernel waited for: then the traceback has the line", "export CUDA_LAUNCH_BLOCKING=1"),
            Help("or run the same step on the CPU, which checks what it is given", 'model.to("cpu")'),
        ),
    )


def _producer_gone(case: Case, error: Raised) -> Report:
    """`multiprocessing` sends a tensor as the address of a process that has its memory; that process must live until it was fetched."""
    sure = error.type.rpartition(".")[2] in ("ConnectionRefusedError", "FileNotFoundError") or not error.frames
    what = "whose producer is gone" if sure else "that its producer did not hand over"
    why = "a tensor goes through a queue as a note where its memory is, and the process that sent it must live until it was taken"
    return _told(
        case if sure else msgspec.structs.replace(case, confidence="likely"),
        "producer-gone",
        f"{case.subject} took a tensor {what}: {named(error)}",
        error,
        why=why,
        evidence=() if sure else ("the producer is gone, or its thread that serves tensors is (out of descriptors: ulimit -n)",),
        help=(
            Help("let the producer end only when everything was taken", "done.wait()  # a multiprocessing.Event that the consumer sets"),
            Help("or send the numbers instead of the memory, which needs nobody afterwards", "queue.put(tensor.numpy())"),
            Help("or take a queue of the job's store, which holds the values itself", 'queue = rallypoint.connect().queue("batches")'),
        ),
    )


def files_exhausted(case: Case, error: Raised) -> Report:
    """No descriptor left in the rank, or in a process of its own from which it wanted one."""
    why = "each tensor that came from another process keeps a descriptor, as each file, socket and pipe does"
    return _told(
        case,
        "files-exhausted",
        f"{case.subject} has as many files open as it may have: {named(error)}",
        error,
        why=why,
        help=(
            Help("raise the limit in the shell that starts the job", "ulimit -n 65536"),
            Help("or share tensors by name instead of by descriptor", 'torch.multiprocessing.set_sharing_strategy("file_system")'),
            Help("or keep copies of what came from loaders and queues, not the tensors themselves", "kept.append(batch.clone())"),
        ),
    )


def _not_pickled(case: Case, error: Raised) -> Report:
    return _told(
        case,
        "launch-argument",
        f"{case.subject} gave a new process something that cannot be pickled: {first_line(error.message)}",
        error,
        why="a process that is spawned imports the program anew, and gets its function and arguments as a pickle: functions by their name",
        help=(
            Help("define the function at the top level of a module, with def", "def work(rank, *args):"),
            Help("or start it with what takes lambdas and local functions, too", "rallypoint.launch(work, nproc=2)"),
        ),
    )


def _main_unguarded(case: Case, error: Raised) -> Report:
    return _told(
        case,
        "main-unguarded",
        f"the program starts processes whenever it is imported, so those that {case.subject} spawned ended at once",
        error,
        why="".join(error.why[:1]),
        evidence=("Python refuses to start processes while the program is being imported, and the new process ends with exit code 1",),
        help=(
            Help("put what starts them below a line that is false in an import", 'if __name__ == "__main__":'),
            Help("or let rallypoint start them, which needs no such line", "rallypoint.launch(work, nproc=2)"),
        ),
    )


def _variable_missing(case: Case, error: Raised) -> Report:
    variable = reading.variable_missing(error.message)
    line = case.first.meeting.line if case.first.meeting is not None else ""
    ours = bool(case.job.held_address)  # rallypoint set them all
    return _told(
        case,
        "env-missing",
        f"{variable} is not set in {case.subject}, and init_process_group reads it",
        error,
        why=f"rallypoint had set {variable} when the rank started: the program, or a module of it, has removed it"
        if ours
        else "nothing that started this process had set it",
        evidence=(f"init_process_group was called at {line}",) if line and not ours else (),
        help=(
            Help(f"leave {variable} in the environment")
            if ours
            else Help("start the program with a launcher, which sets it", f"rallypoint run -n 2 {case.job.program}"),
            Help("see who removes it", f"grep -rn 'environ' --include='*.py' . | grep -e {variable} -e clear -e pop")
            if ours
            else Help("or set it, with the others that init_process_group reads: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ),
    )


def _interface_missing(case: Case, error: Raised, name: str) -> Report:
    return _told(
        case,
        "interface-missing",
        f"gloo in {case.subject} was to use the network interface {name}, which has no address here",
        error,
        why="GLOO_SOCKET_IFNAME, or the program, names the interfaces by which the ranks reach each other",
        help=(
            Help("on one node no interface has to be named", "unset GLOO_SOCKET_IFNAME"),
            Help("or see which there are, and take one of them", "ip -brief address"),
        ),
    )


def _in_process(case: Case, number: str, error: Raised) -> Report:
    """What a process of `mp.spawn` raised: torch wraps its traceback into the message of another exception."""
    report = raised(case, error)
    inside = f"it was process {number} of those that mp.spawn had started in {case.subject}"
    helps = report.help
    if report.code == "port-in-use" and case.job.world_size > 1:
        again = Help(
            "start the program once, and let it spawn: of several, all ask for that port", f"rallypoint run -n 1 {case.job.program}"
        )
        helps = (again,)
    return msgspec.structs.replace(report, evidence=(inside, *report.evidence), help=helps)


def _port_in_use(case: Case, error: Raised) -> Report:
    port, job = reading.port_named(error.message), case.job
    which = f"port {port}" if port else "an address"
    own = [rank for rank in job.ranks if any(re.search(rf"\bpid {rank.pid}\b", holder) for holder in job.holders)]
    evidence = tuple(job.holders[1:])
    if own:
        why = f"rank {own[0].rank} of this job has it: {job.holders[0]}"
        helps: tuple[Help, ...] = (Help("bind it in one rank only, or give each rank its own", 'if os.environ["RANK"] == "0":'),)
    else:
        why = job.holders[0] if job.holders else "who holds it could not be seen"
        nobody = not any("(pid " in holder or " of user " in holder for holder in job.holders)
        if error.type.endswith("DistNetworkError") and job.holders and nobody:
            why, evidence = "whoever listened there has gone since", job.holders  # torch's sockets may be bound beside TIME_WAIT
        chosen = case.first.meeting is not None and error.call == "init_process_group"
        line = f" ({case.first.meeting.line})" if chosen and case.first.meeting and case.first.meeting.line else ""
        advice = f"leave the port out of the program{line}: rallypoint holds a free one for init_process_group"
        helps = (Help(advice) if chosen else Help("bind port 0, and ask the socket which number it got", "sock.getsockname()[1]"),)
        if not job.holders and port:
            helps += (Help("or see who holds it, as root", f"ss -ltnp 'sport = :{port}'"),)
    return _told(
        case, "port-in-use", f"{case.subject} could not listen on {which}: it is in use", error, why=why, evidence=evidence, help=helps
    )


def _memory_refused(case: Case, error: Raised) -> Report:
    kind = reading.out_of_memory(error.type, error.message)
    helps: tuple[Help, ...] = _less_memory(case.job)
    if kind == "GPU":
        helps = (Help("lower the batch size, or what the model keeps for the backward pass", "torch.utils.checkpoint.checkpoint(...)"),)
        if "reserved" in error.message and "unallocated" in error.message:
            setting = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            helps += (Help("or let the allocator grow its blocks, against fragmentation", setting),)
    elif kind == "shared":
        helps = (
            Help("see how large shared memory is", "df -h /dev/shm"),
            Help("give the container more of it", "docker run --shm-size=8g ..."),
            Help("or start fewer loader processes", "DataLoader(..., num_workers=0)"),
        )
    what = {"GPU": "GPU memory", "host": "memory", "shared": "shared memory (/dev/shm)"}[kind]
    return _told(
        case,
        "rank-out-of-memory",
        f"{case.subject} ran out of {what}: {named(error)}",
        error,
        evidence=_strangers(case) if kind == "GPU" else (),
        help=helps,
    )


def _device_missing(case: Case, error: Raised) -> Report:
    found, program = case.job.devices, case.job.program
    why, facts = _lack_and_facts(found)
    helps: list[Help] = []
    if found is not None and found.visible.stopped:
        helps.append(Help("list GPUs that there are, or let the job see all of them", "unset CUDA_VISIBLE_DEVICES"))
    if "NCCL" in error.message:
        helps.append(Help("use the backend that needs no GPU", 'dist.init_process_group("gloo")'))
    elif "without CUDA" in why or "no attribute '_cuda_" in error.message or "not compiled" in error.message:
        helps.append(Help("run on the CPU", 'device = torch.device("cuda" if torch.cuda.is_available() else "cpu")'))
    elif "invalid device ordinal" in error.message:
        number = len(found.visible) if found is not None and not why else 0
        helps.append(Help("start one rank for each GPU", f"rallypoint run -n {number or 'gpu'} {program}"))
        helps.append(Help("or use the rank's own number", 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'))
        why = why or (
            f"a program here sees {devices.count(number)}, and numbers {'them ' if number > 1 else 'it '}from 0" if number else ""
        )
    if found is not None and found.look.devices and devices.missing(found) and not found.visible.stopped:
        helps.append(Help("or install the torch that fits these GPUs and their driver", "https://pytorch.org/get-started/locally/"))
    if not helps:
        helps.append(Help("see what torch finds", "python -c 'import torch; print(torch.version.cuda, torch.cuda.device_count())'"))
    headline = f"{case.subject} asked for a device that is not there: {named(error)}"
    return _told(case, "device-missing", headline, error, why=why, evidence=facts, help=tuple(helps[:3]))


def _cuda_init_failed(case: Case, error: Raised) -> Report:
    found = case.job.devices
    why, facts = _lack_and_facts(found)
    why = why or (found.look.problem if found is not None else "")
    helps: tuple[Help, ...] = ()
    if "too old" in error.message or "insufficient" in error.message or "knows CUDA up to" in why:
        helps = (
            Help(
                "install a torch that was built for what this driver knows, or a newer driver", "https://pytorch.org/get-started/locally/"
            ),
        )
    elif "not yet initialized" in error.message:
        helps = (Help("start the service that connects the GPUs of this machine", "sudo systemctl start nvidia-fabricmanager"),)
    elif found is not None and "mismatch" in found.look.problem:
        helps = (Help("the driver was updated while the old one is loaded: load the new one", "sudo reboot"),)
    helps = helps or (
        Help("see whether the driver answers at all", "nvidia-smi"),
        Help("and whether the device files are there, nvidia-uvm among them", "ls /dev/nvidia*"),
    )
    headline = f"CUDA could not be started in {case.subject}: {named(error)}"
    return _told(case, "cuda-init-failed", headline, error, why=why, evidence=(*facts, *_strangers(case)), help=helps)


def _device_busy(case: Case, error: Raised) -> Report:
    strangers = _strangers(case)
    why = "the GPU was set to serve one process at a time, and another one has it" if not strangers else strangers[0]
    return _told(
        case,
        "device-busy",
        f"{case.subject} did not get its GPU: {named(error)}",
        error,
        why=why,
        evidence=(*strangers[1:], *_lack_and_facts(case.job.devices)[1]),
        help=(
            Help("see who uses the GPUs, and in which mode they are", "nvidia-smi --query-gpu=index,compute_mode,memory.used --format=csv"),
            Help("or take others, by index or UUID", "CUDA_VISIBLE_DEVICES=1,3 rallypoint run -n gpu " + case.job.program),
        ),
    )


_HOW = {
    "chosen": ", which the program chose",
    "given": ", which is LOCAL_RANK's",
    "used": ", because the program had put something on it before it joined",
    "short": ", because there is none for its LOCAL_RANK",
}
"""How a rank came to its GPU, after its name (`launcher/cuda.py`)."""


def device_shared(case: Case, error: Raised | None) -> Report:
    """Ranks of one group of NCCL's have the same GPU. `error`: NCCL's own refusal, when it came to that."""
    job, found = case.job, case.job.devices
    by_device: dict[str, list[RankEvidence]] = {}
    for rank in job.ranks:
        if rank.meeting is not None and rank.meeting.device:
            by_device.setdefault(rank.meeting.device, []).append(rank)
    groups = {device: ranks for device, ranks in by_device.items() if len(ranks) > 1}
    ways: dict[tuple[str, str, str], list[int]] = {}
    for device, ranks in groups.items():
        for rank in ranks:
            if rank.meeting is not None:
                ways.setdefault((rank.meeting.device_name, device, rank.meeting.device_how), []).append(rank.rank)
    evidence = [f"{ranks_phrase(numbers)}: {name} ({device}){_HOW.get(how, '')}" for (name, device, how), numbers in ways.items()]
    number = len(found.visible) if found is not None else 0
    helps: tuple[Help, ...] = ()
    if number and number < job.world_size:
        helps = (Help("start one rank for each GPU", f"rallypoint run -n {number} {job.program}"),)
    else:
        helps = (Help("give each rank its own GPU, before the first use of CUDA", 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'),)
    helps += (Help("or, for ranks that share one, take the backend that allows it", 'dist.init_process_group("gloo")'),)
    at_fault = tuple(rank for ranks in groups.values() for rank in ranks)
    who = subject(sorted(rank.rank for rank in at_fault), job.world_size) if at_fault else case.subject
    meeting = (at_fault or case.ranks)[0].meeting
    why = "NCCL refuses two ranks of one group on the same GPU, at their first collective"
    facts = (*_listed(evidence), *(found.facts() if found is not None else ()))
    headline = f"{who} joined a group of NCCL's with the same GPU"
    if error is not None:
        return _told(case, "device-shared", headline, error, why=why, evidence=facts, help=helps)
    return Report(
        code="device-shared",
        headline=headline,
        where=meeting.line if meeting is not None else "",
        why=why,
        evidence=facts,
        then=case.then,
        help=helps,
        logs=logs(case),
        ranks=case.numbers,
        confidence=case.confidence,
    )


def _cuda_before_fork(case: Case, error: Raised) -> Report:
    """torch refuses CUDA in a process that was forked with CUDA up; a loader's worker hands that to the rank."""
    forks = [fork for rank in case.ranks for fork in rank.cuda_forks]
    told = re.search(r"this process was forked at (\S+?)(?:, after (\S+) had used CUDA|,|$)", error.message + error.traceback, re.MULTILINE)
    line, first = (told[1], told[2] or "") if told else forks[-1] if forks else ("", "")
    why = f"the process was forked at {line}" if line else "the process was forked"
    why += f", after {first} had used CUDA" if first else ", after CUDA had been used"
    loader = "DataLoader" in error.message + error.traceback
    helps = (
        (
            Help(
                "let the loader's workers hand over CPU tensors, and move them in the loop", "batch = batch.to(device, non_blocking=True)"
            ),
            Help("or give it workers that start anew", 'DataLoader(..., multiprocessing_context="spawn")'),
        )
        if loader
        else (
            Help("start processes that use CUDA with spawn", 'torch.multiprocessing.get_context("spawn").Process(...)'),
            Help("or fork before CUDA is used for the first time"),
        )
    )
    return _told(
        case, "cuda-before-fork", f"{case.subject} used CUDA in a process that was forked after CUDA was up", error, why=why, help=helps
    )


def _lack_and_facts(found: Found | None) -> tuple[str, tuple[str, ...]]:
    """What speaks against using CUDA here, and what was found; nothing when nobody looked."""
    if found is None:
        return "", ()
    lack = devices.missing(found)
    return lack, tuple(fact for fact in found.facts() if fact != lack)


def _strangers(case: Case) -> tuple[str, ...]:
    if case.job.devices is None:
        return ()
    return _listed(case.job.devices.strangers(rank.pid for rank in case.job.ranks))


_SCHEDULERS = {
    "SLURM_PROCID": "RANK",
    "SLURM_LOCALID": "LOCAL_RANK",
    "SLURM_NTASKS": "WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK": "RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK": "LOCAL_RANK",
    "OMPI_COMM_WORLD_SIZE": "WORLD_SIZE",
    "PMI_RANK": "RANK",
    "PMI_SIZE": "WORLD_SIZE",
}


def _help_for(error: Raised, job: JobEvidence) -> tuple[Help, ...]:
    """What to do, for the few exceptions where that is known."""
    short = error.type.rpartition(".")[2]
    if short == "ModuleNotFoundError" and (found := re.search(r"No module named '([\w.]+)'", error.message)):
        name = found.group(1).partition(".")[0]
        return (
            Help("see which Python the ranks run, and whether it has the module", f"python -c 'import sys, {name}; print(sys.executable)'"),
            Help("install it there (the package may have another name)", f"python -m pip install {name}"),
        )
    if short == "KeyError" and (ours := _SCHEDULERS.get(error.message.strip("'\""))):
        return (Help("this is another launcher's variable; read the one that rallypoint and torchrun set", f'os.environ["{ours}"]'),)
    return ()


# --- parts of a report -----------------------------------------------------------------------------------------------


def _told(
    case: Case, code: str, headline: str, error: Raised, *, why: str = "", evidence: tuple[str, ...] = (), help: tuple[Help, ...] = ()
) -> Report:
    """A report about an exception."""
    quoted = traceback_said(case.first, error)
    if not quoted and error.frames:
        source = stacks.own_frame(error.frames)
        if source is not None and source.source and not evidence and not why:
            why = f"the line there: {cut(source.source)}" if case.confidence == "certain" else ""
    if error.caught_at is None and case.first.ended is not None and case.first.ended.signal and not case.first.sent:
        evidence += (f"its process then ended by {signal_name(case.first.ended.signal)}",)
    return Report(
        code=code,
        headline=headline,
        where=where(case, case.first, error),
        why=why or ("" if case.confidence == "certain" else "its words may speak of another rank, or of something else that broke"),
        evidence=evidence,
        then=case.then,
        said=quoted,
        help=help,
        logs=logs(case),
        ranks=case.numbers,
        confidence=case.confidence,
    )


def _of_end(
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
    return Report(
        code=code,
        headline=headline,
        where=where,
        why=why,
        evidence=evidence,
        then=case.then,
        timeline=timeline(case),
        said=said(rank, rank.said) if quote else (),
        help=help,
        logs=logs(case),
        ranks=case.numbers,
        confidence=case.confidence,
        exit_status=status,
    )


def subject(ranks: Sequence[int], world_size: int) -> str:
    """`rank 2`, `ranks 0-1 and 3`, `all 4 ranks`."""
    if len(ranks) == world_size > 1:
        return "both ranks" if world_size == 2 else f"all {world_size} ranks"
    return ranks_phrase(ranks)


def named(error: Raised) -> str:
    """`ValueError: the message's first line`; of what a DataLoader's worker raised, that."""
    worker, inner = reading.in_loader(error.message)
    if inner:
        return f"{first_line(inner)} (in DataLoader worker process {worker})"
    line = first_line(error.message)
    return ": ".join(filter(None, (error.type, line)))


def where(case: Case, rank: RankEvidence, error: Raised) -> str:
    """The program's innermost line, and the process; of what a DataLoader's worker raised, the line there."""
    inner = reading.from_loader(error)
    if inner is not None and not all(stacks.library(frame) for frame in inner.frames):
        return f"{stacks.place(inner.frames, case.root)}, in a DataLoader worker of pid {rank.pid}"
    place = stacks.place(error.frames, case.root or stacks.root_of(case.job.program, error.frames))
    if not place and error.filename:
        line = re.search(r", line (\d+)\)$", error.message)  # SyntaxError's own words for the place
        place = error.filename + (f":{line.group(1)}" if line else "")
    return _at(place or _phase(rank), rank)


def whereabout(case: Case, rank: RankEvidence) -> str:
    """Where a rank stands, or stood at its end, and the process."""
    return _at(stacks.place(last_stack(rank), case.root) or _phase(rank), rank)


def last_stack(rank: RankEvidence) -> tuple[Frame, ...]:
    """The frames where the rank stood, or crashed; outermost first."""
    return rank.stack or stacks.current_frames(rank.stack_text) or stacks.current_frames("\n".join(rank.said))


def said(rank: RankEvidence, lines: Sequence[str]) -> tuple[Said, ...]:
    """The rank's last words."""
    words = [cut(line) for line in lines if line.strip()]
    return (Said(f"rank {rank.rank}", tuple(words[-SAID_LINES:])),) if words else ()


def traceback_said(rank: RankEvidence, error: Raised) -> tuple[Said, ...]:
    """The traceback, its middle left out when it is long; () when the terminal has it already. Of one process that another tells of, as a
    DataLoader and mp.spawn do, its own: the other's ends in the library that passed it on."""
    if rank.said_traceback or not error.traceback:
        return ()
    spawned = reading.in_process(error)
    error = reading.from_loader(error) or (spawned[1] if spawned is not None else error)
    lines = error.traceback.rstrip("\n").splitlines()
    if error.caught_at is not None and all(stacks.library(frame) for frame in error.frames):
        lines = lines[_ends_at(lines, error) :]  # caught near the call: what is above is the library's
    if len(lines) > TRACEBACK_LINES:
        lines = [line for line in lines if line.strip(" ~^") or not line.strip()]
    if len(lines) > TRACEBACK_LINES:
        end = _ends_at(lines, error)
        head = 3 if end > 5 else 1  # "Traceback ...", and the outermost frame with its source line
        tail = lines[max(head, end - (TRACEBACK_LINES - head - 2)) : end + 1]
        left_out = len(lines) - head - len(tail)
        file = f" in {rank.log.rpartition('/')[2]}:{rank.log_line}" if rank.log and rank.log_line else ""
        lines = [*lines[:head], f"... {left_out} more lines{file}", *tail]
    return (Said(f"rank {rank.rank}", tuple(cut(line) for line in lines)),)


def _ends_at(lines: Sequence[str], error: Raised) -> int:
    """The index of the line that names the exception: the first such, since what follows was raised while it was handled."""
    return next((i for i, line in enumerate(lines) if line.startswith(error.type)), len(lines) - 1)


def timeline(case: Case) -> tuple[Moment, ...]:
    """What happened around the cause, as far as the evidence has times; () when there is no more than the end itself."""
    at_fault = set(case.numbers)
    moments: list[Moment] = []
    for rank in case.job.ranks:
        who = f"rank {rank.rank}"
        error = rank.raised or (rank.handled[-1] if rank.handled else None)
        if error is not None and error.at:
            moments.append(Moment(error.at, who, cut(reading.in_short(error), TIMELINE_WORDS)))
        follows = rank.raised is not None and rank.ended is not None and rank.ended.code == 1  # the end that every exception has
        if rank.ended is not None and rank.ended.at and not follows and (rank.rank in at_fault or not rank.sent):
            moments.append(Moment(rank.ended.at, who, _how_ended(rank)))
    moments.sort(key=lambda moment: (moment.at, moment.who not in {f"rank {number}" for number in at_fault}, moment.who))
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


def signal_name(number: int) -> str:
    """`SIGKILL`; `SIGRTMIN+5`, `signal 77` for those without a name."""
    if signals.SIGRTMIN < number < signals.SIGRTMAX:
        return f"SIGRTMIN+{number - signals.SIGRTMIN}"
    return signals.Signals(number).name if _is_named(number) else f"signal {number}"


def size(count: int) -> str:
    """Bytes for people: `18.9 GiB`."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


def since(at: float) -> str:
    """A moment of the job: `+0.31 s`."""
    return f"+{at:.2f} s"


def cut(line: str, most: int = LINE_CHARACTERS) -> str:
    """A line, shortened with a note when it is far too long."""
    return line if len(line) <= most else f"{line[:most]} ... ({len(line) - most} more characters)"


_CRASHES: dict[int, str] = {
    signals.SIGSEGV: "native code touched memory that it does not have",
    signals.SIGABRT: "native code gave up (abort): an assertion, or a C++ exception that nobody caught",
    signals.SIGBUS: "native code touched mapped memory that has nothing behind it",
    signals.SIGFPE: "native code divided by zero, or the like",
    signals.SIGILL: "native code has an instruction that this processor does not know",
    signals.SIGSYS: "a system call was made that is forbidden here (seccomp)",
    signals.SIGTRAP: "native code stopped at a breakpoint or an assertion",
}
CRASHES = frozenset(_CRASHES)


def crash_words(number: int) -> str:
    """What a signal that native code ends by says of it; "" for another signal."""
    return _CRASHES.get(number, "")


def _at(place: str, rank: RankEvidence) -> str:
    return f"{place}, pid {rank.pid}" if place else f"pid {rank.pid}"


def _whereabouts(ranks: Sequence[RankEvidence], root: str) -> tuple[str, ...]:
    """A line for each place at which ranks stand, or for what is known instead: "ranks 1-2  train.py:6 in build"."""
    placed = {rank.rank: rank.stack for rank in ranks if rank.stack}
    lines = [(ranks_phrase(group.ranks), stacks.place(group.frames, root)) for group in stacks.group(placed)]
    elsewhere: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.rank not in placed:
            ended = rank.ended is not None and not rank.sent
            elsewhere.setdefault(_how_ended(rank) if ended else _phase(rank) or NOT_KNOWN, []).append(rank.rank)
    lines += [(ranks_phrase(numbers), at) for at, numbers in elsewhere.items()]
    wide = max((len(who) for who, _ in lines), default=0)
    return _listed([f"{who.ljust(wide)}  {at}" for who, at in lines])


def _phase(rank: RankEvidence) -> str:
    entered = f" since {since(rank.phase_at)}" if rank.phase_at and rank.phase in ("joining", "running", "importing") else ""
    return PHASES.get(rank.phase, rank.phase) + entered


def _is_named(number: int) -> bool:
    return number in {int(known) for known in signals.Signals}


def first_line(message: str) -> str:
    """The first line of a message that has words, cut to fit a headline."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return line if len(line) <= HEADLINE_MESSAGE else line[: HEADLINE_MESSAGE - 4] + " ..."


def _caught_at(error: Raised, root: str) -> str:
    return f", caught at {stacks.describe(error.caught_at, root)}" if error.caught_at else ""


def _was(ranks: Sequence[RankEvidence]) -> str:
    return "was" if len(ranks) == 1 else "were"


def _pids(ranks: Iterable[RankEvidence]) -> str:
    numbers = [str(rank.pid) for rank in ranks]
    return f"pid {numbers[0]}" if len(numbers) == 1 else f"pids {', '.join(numbers)}"


def _resident(ranks: Iterable[RankEvidence]) -> list[str]:
    held = [f"rank {rank.rank} {size(rank.resident)}" for rank in ranks if rank.resident]
    return [f"resident at the last look: {', '.join(held[:8])}{', ...' if len(held) > 8 else ''}"] if held else []


def _less_memory(job: JobEvidence) -> tuple[Help, ...]:
    helps = [Help("lower what each rank keeps in memory: batches, caches, loader processes", "DataLoader(..., num_workers=1)")]
    if job.world_size > 1:
        helps.append(Help("or start fewer ranks", f"rallypoint run -n {job.world_size // 2} {job.program}"))
    return tuple(helps)


def _listed(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(lines) if len(lines) <= EVIDENCE_LINES else (*lines[: EVIDENCE_LINES - 1], f"and {len(lines) - EVIDENCE_LINES + 1} more")


def _never_joined(case: Case) -> tuple[str, ...]:
    """Only where others were seen to join: without our wrap of init_process_group nobody is."""
    absent = [rank.rank for rank in case.ranks if rank.meeting is None]
    seen = any(rank.meeting is not None for rank in case.job.ranks)
    return (f"{ranks_phrase(absent)} never called init_process_group",) if absent and seen else ()


def _how_ended(rank: RankEvidence) -> str:
    if rank.ended is None:
        return "has not ended"
    return f"died: {signal_name(rank.ended.signal)}" if rank.ended.signal else f"exited with code {rank.ended.code}"


def _status(rank: RankEvidence) -> int:
    if rank.ended is None:
        return 1
    return 128 + rank.ended.signal if rank.ended.signal else rank.ended.code or 1
