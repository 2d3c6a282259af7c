"""The limits of this process, and so of its ranks: open files, processes, locked memory, address space (getrlimit(2))."""

from __future__ import annotations

import os
import resource
from typing import NamedTuple

from rallypoint.diagnosis.checks import cgroup
from rallypoint.diagnosis.checks.finding import Finding, fault, note, ok, size

FEWEST_FILES, FEW_FILES = 128, 1024
"""Open files of one process. A rank with torch and a process group has up to 60; every loader worker costs a handful, every tensor that it
sends one more until it is freed, every peer of gloo's or NCCL's two. 1024 is what Linux gives."""

FEWEST_PROCESSES, FEW_PROCESSES = 32, 512
"""Processes and threads that may still be started. A rank has a thread for each of its processors, some ten of torch's, gloo's or NCCL's
own, and loader workers with threads of theirs."""

NONE = resource.RLIM_INFINITY


class Facts(NamedTuple):
    """Soft and hard limits; `NONE` stands for none."""

    files: tuple[int, int]
    processes: int = NONE  # soft: how many of this user's processes and threads there may be
    processes_used: int = 0
    group_processes: int = 0  # of the control group, 0: no limit
    group_used: int = 0
    locked: int = NONE  # bytes
    address_space: int = NONE  # bytes
    infiniband: bool = False
    root: bool = False


def check() -> tuple[Finding, ...]:
    return judge(look())


def look(root: str = "/") -> Facts:
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    group, group_used = _group(root)
    return Facts(
        files=resource.getrlimit(resource.RLIMIT_NOFILE),
        processes=processes,
        processes_used=_threads_of(os.getuid()) if processes != NONE and os.geteuid() != 0 else 0,
        group_processes=group,
        group_used=group_used,
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        address_space=resource.getrlimit(resource.RLIMIT_AS)[0],
        infiniband=os.path.isdir(os.path.join(root, "sys/class/infiniband"))
        and bool(os.listdir(os.path.join(root, "sys/class/infiniband"))),
        root=os.geteuid() == 0,
    )


def _group(root: str) -> tuple[int, int]:
    """The control group's limit on processes with the least room left, and how many there are."""
    found = [
        (limit, cgroup.number(os.path.join(folder, "pids.current")))
        for folder, _ in cgroup.folders("pids", root)
        if (limit := cgroup.number(os.path.join(folder, "pids.max")))
    ]
    return min(found, key=lambda one: one[0] - one[1], default=(0, 0))


def _threads_of(uid: int) -> int:
    """How many threads a user's processes have, as far as they are seen."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:  # it has ended
                continue
    return count


def judge(facts: Facts) -> tuple[Finding, ...]:
    found = [*_files(facts), *_processes(facts), *_locked(facts), *_address_space(facts)]
    if found:
        return tuple(found)
    files = "no limit on open files" if facts.files[0] == NONE else f"{facts.files[0]} open files"
    processes = "no limit on processes" if facts.processes == NONE or facts.root else f"{facts.processes} processes"
    locked = "" if facts.locked == NONE else f", {size(facts.locked)} of locked memory"
    return (ok(f"{files}, {processes}{locked}"),)


def _files(facts: Facts) -> list[Finding]:
    soft, hard = facts.files
    if soft == NONE or soft >= FEW_FILES:
        return []
    raised = min(65536, hard) if hard != NONE else 65536
    help = []
    if raised > soft:
        help.append(("raise it for this shell, and what is started from it", f"ulimit -n {raised}"))
    if raised < FEW_FILES:
        help.append((f"a hard limit of {hard} is raised by root, for a container where it is started", "docker run --ulimit nofile=65536"))
        help.append(("or for a user, from the next login on, in /etc/security/limits.conf", "* hard nofile 65536"))
    why = ("loader workers hand tensors over as open files; too few end as 'received 0 items of ancdata' or 'Too many open files'",)
    make = fault if soft < FEWEST_FILES else note
    return [make("limit-low", f"a process may have {soft} files open", *help, why=why)]


def _processes(facts: Facts) -> list[Finding]:
    left, shown, help = NONE, "", ("raise it for this shell", "ulimit -u unlimited")
    if facts.processes != NONE and not facts.root:
        left = max(0, facts.processes - facts.processes_used)
        shown = f"this user may have {facts.processes} processes and threads, and has {facts.processes_used}"
    if facts.group_processes and (left == NONE or facts.group_processes - facts.group_used < left):
        left = max(0, facts.group_processes - facts.group_used)
        shown = f"this control group may have {facts.group_processes} processes and threads, and has {facts.group_used}"
        help = ("give the container more", "docker run --pids-limit=-1")
    if left == NONE or left >= FEW_PROCESSES:
        return []
    make = fault if left < FEWEST_PROCESSES else note
    return [
        make(
            "limit-low", shown, help, why=("what needs one more fails with 'Resource temporarily unavailable' or 'can't start new thread'",)
        )
    ]


def _locked(facts: Facts) -> list[Finding]:
    """Only InfiniBand registers memory with the card, which must be locked for that."""
    if not facts.infiniband or facts.locked == NONE or facts.root:
        return []
    return [
        note(
            "limit-low",
            f"a process may lock {size(facts.locked)} of memory, and there is InfiniBand here",
            ("lift it where the job is started; for a container", "docker run --ulimit memlock=-1"),
            ("or for a user, in /etc/security/limits.conf", "* - memlock unlimited"),
            why=("NCCL registers its buffers with the card, and fails with 'ibv_reg_mr: Cannot allocate memory'",),
        )
    ]


def _address_space(facts: Facts) -> list[Finding]:
    if facts.address_space == NONE:
        return []
    return [
        note(
            "limit-low",
            f"a process may have {size(facts.address_space)} of address space",
            ("lift it for this shell", "ulimit -v unlimited"),
            why=("CUDA reserves more address space than the machine has memory, and libraries and threads' stacks count, too",),
        )
    ]
