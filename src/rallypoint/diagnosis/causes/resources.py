"""What ran out: memory of every kind, descriptors, room on a disk."""

from __future__ import annotations

from rallypoint.diagnosis import classify
from rallypoint.diagnosis.causes.case import Case, again, likely, pids, resident, was
from rallypoint.diagnosis.causes.gpus import strangers_of
from rallypoint.diagnosis.causes.report_form import account, of_end
from rallypoint.diagnosis.causes.wording import cut, named
from rallypoint.diagnosis.evidence import JobEvidence, MemoryEvidence, Raised
from rallypoint.diagnosis.report import Help, Report
from rallypoint.units import size

BY_THE_KERNEL = "; the kernel, which does so when memory runs out, leaves no word there"
ASK_THAT_KERNEL = Help(
    "ask the kernel whether it was for lack of memory, on that machine",
    "sudo dmesg -T | grep -i 'killed process'",
)


def out_of_memory(case: Case) -> Report:
    """Tell of SIGKILL where the kernel says that it killed for memory."""
    memory = case.node.memory
    in_log = [rank for rank in case.ranks if rank.pid in memory.killed_pids]
    certain = len(in_log) == len(case.ranks)
    return of_end(
        case if certain else likely(case),
        "rank-out-of-memory",
        f"{case.subject} {was(case.ranks)} killed by the kernel for lack of memory",
        why=why_killed(memory, certain=certain),
        evidence=(
            *kills_known(memory, pids(in_log) if in_log else ""),
            f"{case.subject} ended by SIGKILL, which rallypoint had not sent",
            *resident(case.node.ranks),
        ),
        help=less_memory(case.job),
    )


def killed_for_memory(case: Case) -> Report:
    """Tell what the kernel, Slurm or Ray says in a log: that it killed for lack of memory."""
    by = case.first.killed_by
    helps = less_memory(case.job)
    why = "the log has the word of the kernel"
    headline = f"{case.subject} {was(case.ranks)} killed by the kernel for lack of memory"
    if by in ("slurmstepd", "srun"):
        why = "the log has the word of Slurm, which limits the memory of a job"
        look = Help(
            "see how much it had and how much it may have",
            "sacct -j JOBID --format=JobID,ReqMem,MaxRSS,State",
        )
        helps = [look, *helps, Help("or ask Slurm for more", "#SBATCH --mem=128G")]
    elif by == "Ray":
        headline = "Ray killed workers because the memory of their machine was nearly used up"
        why = "Ray does so before the kernel would, at 95 % unless RAY_memory_usage_threshold says otherwise"
        helps.append(Help("or let Ray run fewer of them on one machine", "@ray.remote(num_cpus=4)"))
    elif by and by != "the kernel":
        headline = headline.replace("the kernel", by)
        why = f"the log has the word of {by}"
    evidence = [cut(line, 200) for line in case.first.said[:4]]
    return of_end(case, "rank-out-of-memory", headline, why=why, evidence=evidence, help=helps)


def for_memory(memory: MemoryEvidence, pid: int) -> bool:
    """Tell whether the kernel says, or lets think, that a process which SIGKILL ended was killed
    for memory.
    """
    return pid in memory.killed_pids or (memory.oom_kills > 0 and not memory.killed_pids)


def why_killed(memory: MemoryEvidence, *, certain: bool) -> str:
    """Return what ran out when the kernel killed for memory. `certain`: its log names the victim."""
    if not memory.limit:
        return "memory ran out on this machine"
    limit = f"the cgroup may use {size(memory.limit)}"
    return limit if certain else f"{limit}, and the kernel killed in it for lack of memory"


def kills_known(memory: MemoryEvidence, whom: str) -> list[str]:
    """Return what the kernel tells of its kills for memory. `whom`: the pids of ours that its log
    names, "" if none.
    """
    evidence = [f"the kernel's log says that it killed {whom}"] if whom else []
    if memory.oom_kills:
        evidence.append(
            f"the cgroup's oom_kill count went up by {memory.oom_kills} since the start"
        )
    return evidence


def no_kill_known(memory: MemoryEvidence, whom: str) -> list[str]:
    """Return what speaks against a kill for memory, and for one by a limit. `whom`: the pids that
    were killed.
    """
    evidence = []
    if memory.counted and not memory.oom_kills:
        evidence.append(
            "the kernel killed nothing in this cgroup for lack of memory: its oom_kill count did not change"
        )
    if memory.killed_pids:
        others = ", ".join(map(str, memory.killed_pids))
        evidence.append(f"the kernel's log names kills for lack of memory, but of pid {others}")
    elif memory.kernel_log_read:
        evidence.append(f"the kernel's log names no kill of {whom}")
    if memory.processor_time:
        evidence.append(
            f"ulimit -t lets a process use {memory.processor_time} s of processor time; after that the kernel sends SIGKILL"
        )
    return evidence


def ask_the_kernel(memory: MemoryEvidence) -> list[Help]:
    """Return how to read the kernel's log, when it could not be read."""
    look = Help(
        "ask the kernel whether it was for memory", "sudo dmesg -T | grep -i 'killed process'"
    )
    return [] if memory.kernel_log_read else [look]


def files_exhausted(case: Case, error: Raised) -> Report:
    """Tell of a rank, or a process of its own, that has no descriptor left."""
    has, it = ("has", "it") if len(case.ranks) == 1 else ("have", "they")
    return account(
        case,
        "files-exhausted",
        f"{case.subject} {has} as many files open as {it} may have: {named(error)}",
        error,
        why="each tensor that came from another process keeps a descriptor, as each file, socket and pipe does",
        help=(
            Help("raise the limit in the shell that starts the job", "ulimit -n 65536"),
            Help(
                "or share tensors by name instead of by descriptor",
                'torch.multiprocessing.set_sharing_strategy("file_system")',
            ),
            Help(
                "or keep copies of what came from loaders and queues, not the tensors themselves",
                "kept.append(batch.clone())",
            ),
        ),
    )


def disk_full(case: Case, error: Raised) -> Report:
    """Tell of a write for which there was no room, or that failed in `torch.save`."""
    why = (
        "no space was left for the file that it wrote: a file system is full, or a quota is used up"
    )
    if classify.write_failed(error):
        case = likely(case)
        why = "writing a file failed, mostly because a file system is full or a quota is used up"
    return account(
        case,
        "rank-raised",
        f"{case.subject} raised {named(error)}",
        error,
        why=why,
        help=(
            Help("see which file system is full", "df -h"),
            Help("see whether the inodes or your quota are used up", "df -i; quota -s"),
        ),
    )


_WHAT = {"GPU": "GPU memory", "host": "memory", "shared": "shared memory (/dev/shm)"}


def memory_refused(case: Case, error: Raised) -> Report:
    """Tell of an allocation that was refused: of the GPU's memory, the host's, or /dev/shm's."""
    kind, why = classify.memory_of(error), ""
    helps = less_memory(case.job)
    if kind == "host" and (wanted := classify.memory_wanted(error.message)):
        return _refused_at_once(case, error, wanted)
    if kind == "GPU":
        helps = [
            Help(
                "lower the batch size, or what the model keeps for the backward pass",
                "torch.utils.checkpoint.checkpoint(...)",
            )
        ]
        if "reserved" in error.message and "unallocated" in error.message:
            setting = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            helps.append(
                Help("or let the allocator grow its blocks, against fragmentation", setting)
            )
    elif kind == "shared":
        helps = [
            Help("see how large shared memory is", "df -h /dev/shm"),
            Help("give the container more of it", "docker run --shm-size=8g ..."),
        ]
        if classify.semaphores_full(error):
            why = "semaphores and shared blocks of multiprocessing are files there"
        else:
            helps.append(Help("or start fewer loader processes", "DataLoader(..., num_workers=0)"))
    return account(
        case,
        "rank-out-of-memory",
        f"{case.subject} ran out of {_WHAT[kind]}: {named(error)}",
        error,
        why=why,
        evidence=strangers_of(case) if kind == "GPU" else (),
        help=helps,
    )


LOCK_MORE = (
    Help("see the limit where the ranks are started, and raise it to unlimited there", "ulimit -l"),
    Help("for a container", "docker run --ulimit memlock=-1 ..."),
    Help(
        "for ranks that a systemd service starts, such as slurmd, set in its unit",
        "LimitMEMLOCK=infinity",
    ),
)
MAP_MORE = Help("let processes map more, in the shell that starts the job", "ulimit -v unlimited")


def may_map(memory: MemoryEvidence) -> str:
    """Return what the limit on the address space of a process says."""
    return f"ulimit -v lets a process map {size(memory.address_space)} in all"


def _refused_at_once(case: Case, error: Raised, wanted: int) -> Report:
    """Tell of one allocation that was too large for what there was: more than the whole machine
    has, or more than was left of it.
    """
    memory = case.node.memory
    limited = 0 < memory.limit < memory.total
    most = memory.limit if limited else memory.total
    helps = less_memory(case.job)
    why = ""
    if memory.address_space and wanted < (most or wanted + 1):
        why = may_map(memory)
        helps.insert(0, MAP_MORE)
    elif limited:
        why = f"the cgroup may use {size(memory.limit)}, and uses {size(memory.current)} now"
    elif memory.total:
        why = f"this machine has {size(memory.total)}, of which {size(memory.available)} can be had now"
    if 0 < most < wanted:
        look = "print the sizes in that line: together they need more memory than there is"
        helps = [Help(look, "breakpoint()")]
    headline = f"{case.subject} asked for {size(wanted)} of memory at once, and did not get it"
    return account(case, "rank-out-of-memory", headline, error, why=why, help=helps)


def less_memory(job: JobEvidence) -> list[Help]:
    """Return how to get by with less."""
    helps = [
        Help(
            "lower what each rank keeps in memory: batches, caches, loader processes",
            "DataLoader(..., num_workers=1)",
        )
    ]
    most = max((len(node.ranks) for node in job.nodes), default=0)
    if job.several and most > 1:
        helps.append(Help("or start fewer ranks on each node", again(job, most // 2)))
    elif job.world_size > 1 and not job.several:
        helps.append(Help("or start fewer ranks", again(job, job.world_size // 2)))
    return helps
