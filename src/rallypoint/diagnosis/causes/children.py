"""Processes that the program starts itself: mp.spawn, multiprocessing, DataLoader workers."""

from __future__ import annotations

import ast
import re
import signal as signals
from collections.abc import Sequence

import msgspec

from rallypoint.diagnosis import classify, stacks
from rallypoint.diagnosis.causes import resources
from rallypoint.diagnosis.causes.case import Case, again, process_ids, resident, was
from rallypoint.diagnosis.causes.report_form import told
from rallypoint.diagnosis.causes.wording import CRASHES, crash_words, first_line, named, signal_name
from rallypoint.diagnosis.evidence import Raised, RankEvidence
from rallypoint.diagnosis.report import Help, Report
from rallypoint.world import ranks_phrase

_SPAWN = re.compile(r"/torch/multiprocessing/spawn\.py$")
_LOADER = re.compile(r"/torch/utils/data/dataloader\.py$")


def mixed_up(case: Case, error: Raised, launchers: Sequence[int]) -> Report:
    """Several ranks are launchers themselves, and what one of them had started lost a peer: the
    sets met at one port.
    """
    return told(
        case,
        "spawn-inside-run",
        f"{case.subject} had started ranks of its own, and one of those lost another",
        error,
        why="a program that calls mp.spawn is its own launcher: sets of ranks that ask for the same port meet ranks of another set",
        evidence=(f"{ranks_phrase(launchers)} called mp.spawn, each for itself",),
        help=(Help("start it once, and let it spawn", again(case.job, 1)),),
    )


def spawns(rank: RankEvidence) -> bool:
    """Whether a rank stands in `mp.spawn`, or left it with what a process of it raised."""
    frames = (*stacks.last_stack(rank), *(rank.raised.frames if rank.raised is not None else ()))
    return any(_SPAWN.search(frame.file) for frame in frames)


def producer_gone(case: Case, error: Raised) -> Report:
    """`multiprocessing` sends a tensor as the address of a process that has its memory; that
    process must live until it was fetched.
    """
    sure = (
        error.type.rpartition(".")[2] in ("ConnectionRefusedError", "FileNotFoundError")
        or not error.frames
    )
    if any(_LOADER.search(frame.file) for frame in error.frames):
        return _loader_broke_off(
            case if sure else msgspec.structs.replace(case, confidence="likely"), error
        )
    what = "whose producer is gone" if sure else "that its producer did not hand over"
    why = "a tensor goes through a queue as a note where its memory is, and the process that sent it must live until it was taken"
    return told(
        case if sure else msgspec.structs.replace(case, confidence="likely"),
        "producer-gone",
        f"{case.subject} took a tensor {what}: {named(error)}",
        error,
        why=why,
        evidence=()
        if sure
        else (
            "the producer is gone, or its thread that serves tensors is (out of descriptors: ulimit -n)",
        ),
        help=(
            Help(
                "let the producer end only when everything was taken",
                "done.wait()  # a multiprocessing.Event that the consumer sets",
            ),
            Help(
                "or send the numbers instead of the memory, which needs nobody afterwards",
                "queue.put(tensor.numpy())",
            ),
            Help(
                "or take a queue of the job's store, which holds the values itself",
                'queue = rallypoint.connect().queue("batches")',
            ),
        ),
    )


def _loader_broke_off(case: Case, error: Raised) -> Report:
    """The producer is a worker of a DataLoader. torch looks whether it lives, and it may take a
    moment longer to die than its socket.
    """
    memory = case.job.memory
    evidence = resources.kills_known(memory, "") or resources.no_kill_known(memory, "a process")
    if memory.killed_pids:
        evidence = [
            f"the kernel's log says that it killed {process_ids(memory.killed_pids)} for lack of memory"
        ]
    return told(
        case,
        "producer-gone",
        f"{_workers(case)} did not hand over {'its batch' if len(case.ranks) == 1 else 'their batches'}: {named(error)}",
        error,
        why="it was killed, crashed, exited, or had no descriptor left (ulimit -n); torch had not heard of it yet",
        evidence=tuple(evidence),
        help=(
            *resources.ask_the_kernel(memory),
            Help(
                "load in the rank itself: then what goes wrong is the rank's own, with its line",
                "DataLoader(..., num_workers=0)",
            ),
        ),
    )


def _workers(case: Case) -> str:
    """One of each rank at fault."""
    return (
        f"a DataLoader worker of {case.subject}"
        if len(case.ranks) == 1
        else f"DataLoader workers of {case.subject}"
    )


def loader_killed(case: Case, error: Raised, pid: int, number: int) -> Report:
    """A signal ended a worker of a DataLoader; its rank, which lives, raises in whatever line it
    had come to.
    """
    if case.job.log is not None:
        return _loader_killed_in_log(case, error, pid, number)
    memory, name, rank = case.job.memory, signal_name(number), case.first
    worker, was_killed = _workers(case), was(case.ranks)
    # What was caught in torch's loader, and raised again in other words, has no line of the
    # program's.
    noticed = (
        stacks.place(error.frames, case.root)
        if any(not stacks.library(frame) for frame in error.frames)
        else ""
    )
    evidence = [
        f"rank {rank.rank} itself was not killed"
        + (f", and noticed at {noticed}" if noticed else "")
    ]
    found = [classify.loader_killed(each.raised) for each in case.ranks if each.raised is not None]
    workers = {pid, *(each[0] for each in found if each is not None)}
    if number in CRASHES:
        code, headline, why = "rank-crashed", f"{worker} crashed with {name}", crash_words(number)
        helps: tuple[Help, ...] = (
            Help(
                "load in the rank itself: then the report of the crash has its line",
                "DataLoader(..., num_workers=0)",
            ),
        )
    elif number == signals.SIGKILL and resources.for_memory(memory, pid):
        certain = workers <= {*memory.killed_pids}
        code, headline = (
            "rank-out-of-memory",
            f"{worker} {was_killed} killed by the kernel for lack of memory",
        )
        why = resources.why_killed(memory, certain=certain)
        evidence += [
            *resources.kills_known(memory, process_ids(sorted(workers)) if certain else ""),
            *resident(case.job.ranks),
        ]
        helps = resources.less_memory(case.job)
        case = case if certain else msgspec.structs.replace(case, confidence="likely")
    else:
        code, headline, why = (
            "rank-killed",
            f"{worker} {was_killed} killed by {name}",
            f"who sent {name} is not known",
        )
        helps = ()
        if number == signals.SIGKILL:
            evidence += [
                *resources.no_kill_known(memory, process_ids(sorted(workers))),
                *resident(case.job.ranks),
            ]
            helps = resources.ask_the_kernel(memory)
    report = told(case, code, headline, error, why=why, evidence=tuple(evidence), help=helps)
    # torch's handler of SIGCHLD raises wherever the rank is: that line, and the traceback to it,
    # say nothing of the worker.
    return msgspec.structs.replace(report, where=f"pid {pid}, a worker of pid {rank.pid}", said=())


def _loader_killed_in_log(case: Case, error: Raised, pid: int, number: int) -> Report:
    name, crashed = signal_name(number), number in CRASHES
    why = crash_words(number) if crashed else f"who sent {name} is not in the log"
    if number == signals.SIGKILL:
        why += "; the kernel, which does so when memory runs out, leaves no word there"
    report = told(
        case,
        "rank-crashed" if crashed else "rank-killed",
        f"{_workers(case)} {'crashed with' if crashed else f'{was(case.ranks)} killed by'} {name}",
        error,
        why=why,
        evidence=(f"it had pid {pid}",),
        help=(
            Help(
                "ask the kernel whether it was for lack of memory, on that machine",
                "sudo dmesg -T | grep -i 'killed process'",
            ),
            Help(
                "load in the process itself: then its own traceback has the line",
                "DataLoader(..., num_workers=0)",
            ),
        ),
    )
    # Mostly the error is that of torch's signal handler, in torch.
    own = any(not stacks.library(frame) for frame in error.frames)
    return msgspec.structs.replace(report, where=report.where if own else "")


def loader_was_killed(case: Case, error: Raised) -> Report:
    """The same where the exception itself names the worker and the signal."""
    worker = classify.loader_killed(error)
    assert worker is not None
    return loader_killed(case, error, *worker)


def not_pickled(case: Case, error: Raised) -> Report:
    """A process that is spawned gets its function and arguments as a pickle, and these cannot be
    one.
    """
    return told(
        case,
        "launch-argument",
        f"{case.subject} gave a new process something that cannot be pickled: {first_line(error.message)}",
        error,
        why="a process that is spawned imports the program anew, and gets its function and arguments as a pickle: functions by their name",
        help=(
            Help(
                "define the function at the top level of a module, with def",
                "def work(rank, *args):",
            ),
            Help(
                "or start it with what takes lambdas and local functions, too",
                "rallypoint.launch(work, nproc=2)",
            ),
        ),
    )


def main_unguarded(case: Case, error: Raised) -> Report:
    """The program starts processes in its main module, without asking whether it is the
    main one.
    """
    return told(
        case,
        "main-unguarded",
        f"the program starts processes whenever it is imported, so those that {case.subject} spawned ended at once",
        error,
        why="".join(error.why[:1]),
        evidence=(
            "Python refuses to start processes while the program is being imported, and the new process ends with exit code 1",
        ),
        help=(
            Help(
                "put what starts them below a line that is false in an import",
                'if __name__ == "__main__":',
            ),
            Help("or let rallypoint start them, which needs no such line", _as_launch(error)),
        ),
    )


def _as_launch(error: Raised) -> str:
    """The program's own `mp.spawn(run, args=(2,), nprocs=2)` as a call of `launch`; an example
    where its line is not known.
    """
    for frame in error.frames:
        try:
            calls = [
                node for node in ast.walk(ast.parse(frame.source)) if isinstance(node, ast.Call)
            ]
        except (SyntaxError, ValueError, RecursionError):  # a part of a longer call
            continue
        for call in calls:
            given = dict(zip(("fn", "args", "nprocs"), call.args, strict=False))
            given.update((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg)
            if (
                ast.unparse(call.func).rpartition(".")[2] in ("spawn", "start_processes")
                and {"fn", "nprocs"} <= given.keys()
            ):
                positional = [ast.unparse(given[name]) for name in ("fn", "args") if name in given]
                return f"rallypoint.launch({', '.join(positional)}, nproc={ast.unparse(given['nprocs'])}, pass_rank=True)"
    return "rallypoint.launch(work, nproc=2)"
