"""Processes that the program starts itself: mp.spawn, multiprocessing, DataLoader workers."""

from __future__ import annotations

import signal as signals

from rallypoint.diagnosis import classify, stacks
from rallypoint.diagnosis.causes import resources
from rallypoint.diagnosis.causes.case import Case, likely, process_ids, resident, was, where
from rallypoint.diagnosis.causes.report_form import account
from rallypoint.diagnosis.causes.wording import CRASHES, crash_words, first_line, named, signal_name
from rallypoint.diagnosis.evidence import Raised
from rallypoint.diagnosis.pattern import Pattern
from rallypoint.diagnosis.report import Help, Report

_LOADER = Pattern(r"/torch/utils/data/dataloader\.py$")
_LEFT = Pattern(r"DataLoader worker \(pid \d+\) exited unexpectedly with exit code \d+")


def producer_gone(case: Case, error: Raised) -> Report:
    """Tell of a tensor whose producer is gone: `multiprocessing` sends the address of the process
    that has its memory, and that process must live until it was fetched.
    """
    kinds = ("ConnectionRefusedError", "FileNotFoundError")
    sure = error.type.rpartition(".")[2] in kinds or not error.frames
    case = case if sure else likely(case)
    if any(_LOADER.search(frame.file) for frame in error.frames):
        headline = f"{_workers(case)} did not hand over {'its batch' if len(case.ranks) == 1 else 'their batches'}: {named(error)}"
        # Raised over it, by torch's handler of SIGCHLD: that memory ran out is another story.
        if said := _LEFT.search(error.traceback):
            why = f"then torch said: {said[0]}"
            return account(case, "producer-gone", headline, error, why=why, help=(LOAD_IN_RANK,))
        memory = case.node.memory
        killed = process_ids(memory.killed_pids) if memory.killed_pids else ""
        return account(
            case,
            "producer-gone",
            headline,
            error,
            why="it was killed, crashed, exited, or had no descriptor left (ulimit -n); torch had not heard of it yet",
            evidence=resources.kills_known(memory, killed)
            or resources.no_kill_known(memory, "a process"),
            help=(*resources.ask_the_kernel(memory), LOAD_IN_RANK),
        )
    what = "whose producer is gone" if sure else "that its producer did not hand over"
    doubt = (
        "the producer is gone, or its thread that serves tensors is (out of descriptors: ulimit -n)"
    )
    return account(
        case,
        "producer-gone",
        f"{case.subject} took a tensor {what}: {named(error)}",
        error,
        why="a tensor goes through a queue as a note where its memory is, and the process that sent it must live until it was taken",
        evidence=() if sure else [doubt],
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


LOAD_IN_RANK = Help(
    "load in the rank itself: then what goes wrong is the rank's own, with its line",
    "DataLoader(..., num_workers=0)",
)


def _workers(case: Case) -> str:
    """Name one worker of each rank at fault."""
    one = len(case.ranks) == 1
    return f"{'a DataLoader worker' if one else 'DataLoader workers'} of {case.subject}"


def loader_killed(case: Case, error: Raised, pid: int, number: int) -> Report:
    """Tell that a signal ended a worker of a DataLoader; its rank, which lives, raises in whatever
    line it had come to.
    """
    memory, name, rank, in_log = case.node.memory, signal_name(number), case.first, case.job.log
    # What was caught in torch's loader, and raised again in other words, has no line of the
    # program's; torch's handler of SIGCHLD raises wherever the rank is.
    own = any(not stacks.library(frame) for frame in error.frames)
    noticed = f", and noticed at {stacks.place(error.frames, case.root)}" if own else ""
    evidence = [f"rank {rank.rank} itself was not killed{noticed}"]
    if in_log is not None:
        evidence = [f"it had pid {pid}"]
    found = [classify.loader_killed(each.raised) for each in case.ranks if each.raised is not None]
    workers = {pid, *(each[0] for each in found if each is not None)}
    code, did = "rank-killed", f"{was(case.ranks)} killed by {name}"
    why = f"who sent {name} is not {'known' if in_log is None else 'in the log'}"
    helps: list[Help] = []
    if number in CRASHES:
        code, did, why = "rank-crashed", f"crashed with {name}", crash_words(number)
        helps = [LOAD_IN_RANK]
    elif number == signals.SIGKILL and resources.for_memory(memory, pid):
        certain = workers <= {*memory.killed_pids}
        code, did = (
            "rank-out-of-memory",
            f"{was(case.ranks)} killed by the kernel for lack of memory",
        )
        why = "the log has the word of the kernel"
        if in_log is None:
            why = resources.why_killed(memory, certain=certain)
        evidence += resources.kills_known(memory, process_ids(sorted(workers)) if certain else "")
        evidence += resident(case.node.ranks)
        helps = resources.less_memory(case.job)
        case = case if certain else likely(case)
    elif number == signals.SIGKILL and in_log is not None:
        why += resources.BY_THE_KERNEL
        helps = [resources.ASK_THAT_KERNEL, LOAD_IN_RANK]
    elif number == signals.SIGKILL:
        evidence += resources.no_kill_known(memory, process_ids(sorted(workers)))
        evidence += resident(case.node.ranks)
        helps = resources.ask_the_kernel(memory)
    headline = f"{_workers(case)} {did}"
    if in_log is not None:
        at = where(case, rank, error) if own else ""
        return account(
            case, code, headline, error, why=why, evidence=evidence, help=helps, where=at
        )
    at = f"pid {pid}, a worker of pid {rank.pid}"
    return account(
        case, code, headline, error, why=why, evidence=evidence, help=helps, where=at, said=()
    )


def loader_was_killed(case: Case, error: Raised) -> Report:
    """Tell the same where the exception itself names the worker and the signal."""
    worker = classify.loader_killed(error)
    assert worker is not None
    return loader_killed(case, error, *worker)


def pool_broken(case: Case, error: Raised) -> Report:
    """Tell of a worker process of `concurrent.futures` or of joblib that ended without a result."""
    memory = case.node.memory
    killed = process_ids(memory.killed_pids) if memory.killed_pids else ""
    kills = resources.kills_known(memory, killed)
    how = "it ended without a result"
    why = "it was killed, crashed or exited by os._exit, or the pool's initializer raised"
    if memory.oom_kills:  # of this job: the kernel's log is of the whole machine
        how = "the kernel killed a process for lack of memory"
        why = "the kernel killed it while the pool was running"
    return account(
        likely(case),
        "rank-out-of-memory" if memory.oom_kills else "rank-raised",
        f"{case.subject} lost a worker process of a pool: {how}",
        error,
        why=why,
        evidence=kills or resources.no_kill_known(memory, "a process"),
        help=resources.less_memory(case.job)
        if memory.oom_kills
        else resources.ask_the_kernel(memory),
    )


def not_pickled(case: Case, error: Raised) -> Report:
    """Tell that the function or the arguments of a process that is spawned cannot be a pickle."""
    work = "def work(rank, *args):"
    other = Help(
        "or start it with what takes lambdas and local functions, too",
        "rallypoint.launch(work, nproc=2)",
    )
    if any("/torch/utils/data/" in frame.file for frame in error.frames):
        work = "def collate(batch):"
        other = Help("or let the loader fork", 'DataLoader(..., multiprocessing_context="fork")')
    return account(
        case,
        "launch-argument",
        f"{case.subject} gave a new process something that cannot be pickled: {first_line(error.message)}",
        error,
        why="a process that is spawned imports the program anew, and gets its function and arguments as a pickle: functions by their name",
        help=(Help("define the function at the top level of a module, with def", work), other),
    )


def main_unguarded(case: Case, error: Raised) -> Report:
    """Tell that the program starts processes in its main module, without asking whether it is the
    main one.
    """
    # mp.spawn gives the function its rank, and multiprocessing.Process does not.
    spawned = any("spawn(" in frame.source for frame in error.frames)
    launch = f"rallypoint.launch(work, nproc=2{', pass_rank=True' if spawned else ''})"
    return account(
        case,
        "main-unguarded",
        f"the program starts processes whenever it is imported, so those that {case.subject} spawned ended at once",
        error,
        why="".join(error.why[:1]),
        evidence=[
            "Python refuses to start processes while the program is being imported, and the new process ends with exit code 1"
        ],
        help=(
            Help(
                "put what starts them below a line that is false in an import",
                'if __name__ == "__main__":',
            ),
            Help("or let rallypoint start them, which needs no such line", launch),
        ),
    )
