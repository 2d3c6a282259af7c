"""Checks of the machine: versions, processors, memory, limits and the clock.

A check looks, and hands the numbers to a `judge_*` function of the same name, which is pure.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from rallypoint import __version__
from rallypoint.clock import Clock
from rallypoint.diagnosis.doctor.finding import Finding, fault, note, ok, unknown
from rallypoint.host.kernel_files import cgroup_folders, number_in, text_of
from rallypoint.units import size

if TYPE_CHECKING:
    from rallypoint.diagnosis.evidence import MemoryCounters
    from rallypoint.host.devices import Build

PACKAGE_INDEX_CPU = "https://download.pytorch.org/whl/cpu"

LITTLE_MEMORY = 1 << 30
"""Bytes: two ranks that imported torch, made a small model and opened a process group hold as
much."""

FEWEST_FILES, FEW_FILES = 128, 1024
"""Open files of one process. A rank with torch and a process group has up to 60; every loader
worker costs a handful, every tensor that it sends one more until it is freed, every peer of gloo or
NCCL two. 1024 is what Linux gives."""

FEWEST_PROCESSES, FEW_PROCESSES = 32, 512
"""Processes and threads that may still be started. A rank has a thread for each of its processors,
ten of torch, gloo or NCCL, and loader workers with their own threads."""

NO_LIMIT = resource.RLIM_INFINITY

_CLOCK_SLACK = 86400.0
"""Seconds: a file system with a time zone mistake does not make the clock wrong."""


# --- versions
# --------------------------------------------------------------------------------------


class Package(NamedTuple):
    """Library that torch's metadata asks for in one version: `nvidia-nccl-cu12==2.27.3`."""

    name: str
    wanted: str
    installed: str


def versions(oldest_torch: tuple[int, int]) -> list[Finding]:
    """Check Python, torch, CUDA, NCCL and the driver by files and metadata; nothing is imported."""
    import platform

    from rallypoint.host.devices import look, torch_build

    system = f"{os.uname().sysname} {os.uname().release}"
    here = f"rallypoint {__version__}, Python {platform.python_version()}, {system}"
    driver = look().driver
    return [judge_versions(here, sys.executable, torch_build(), _packages(), driver, oldest_torch)]


def _packages() -> list[Package]:
    """List NVIDIA's libraries that the installed torch names with a version, where they are
    installed."""
    from importlib.metadata import PackageNotFoundError, requires, version

    found = []
    with suppress(PackageNotFoundError):
        for requirement in requires("torch") or []:
            if named := re.match(r"(nvidia-[\w-]+)\s*==\s*([\w.]+)", requirement):
                with suppress(PackageNotFoundError):  # for another system, or part of this torch
                    found.append(Package(named[1], named[2], version(named[1])))
    return found


def judge_versions(
    here: str,
    python: str,
    torch: Build | None,
    packages: list[Package],
    driver: str,
    oldest_torch: tuple[int, int],
) -> Finding:
    install = f"{python} -m pip install"
    if torch is None:
        return note(
            "torch-missing",
            f"{here}; torch is not installed in {python}",
            ("install it there", f"{install} torch"),
            (
                "without a GPU the CPU build is smaller",
                f"{install} torch --index-url {PACKAGE_INDEX_CPU}",
            ),
        )
    made_for = f"for {torch.other}" if torch.other else "without CUDA"
    made_for = f"for CUDA {torch.cuda}" if torch.cuda else made_for
    nccl = [f", NCCL {one.installed}" for one in packages if one.name.startswith("nvidia-nccl")]
    by_driver = f", driver {driver}" if driver else ""
    shown = f"{here}, torch {torch.version} ({made_for}){''.join(nccl[:1])}{by_driver}"
    number = re.match(r"(\d+)\.(\d+)", torch.version)
    if number and (int(number[1]), int(number[2])) < oldest_torch:
        oldest = ".".join(map(str, oldest_torch))
        help = ("install a newer torch", f"{install} 'torch>={oldest}'")
        return fault("torch-too-old", f"{shown}; rallypoint needs torch {oldest}", help)
    if wrong := [package for package in packages if package.installed != package.wanted]:
        differ = (f"{one.name} is {one.installed} and torch wants {one.wanted}" for one in wrong)
        wanted = " ".join(f"{one.name}=={one.wanted}" for one in wrong)
        return note(
            "versions-differ",
            f"{shown}; {', '.join(differ)}",
            ("install what this torch was built with", f"{install} {wanted}"),
            why=(
                "another version of a library can crash, or behave otherwise than the one that torch was tested with",
            ),
        )
    return ok(shown)


# --- processors
# ------------------------------------------------------------------------------------


def processors() -> list[Finding]:
    """Check how many processors this process may really use."""
    there, bound = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    return [judge_processors(there, bound, processor_quota(), os.getloadavg()[0])]


def processor_quota(root: str = "/") -> float:
    """Return the number of processors whose time the control group may use; 0.0 for no limit."""
    found = []
    for folder, unified in cgroup_folders("cpu", root):
        # quota -1 or max: none
        names = ("cpu.max",) if unified else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(text_of(folder, name) for name in names).split()
        if len(words) == 2 and all(word.isdigit() and int(word) for word in words):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=0.0)


def judge_processors(there: int, bound: int, quota: float = 0.0, load: float = 0.0) -> Finding:
    """`load`: processes that want to run, the mean of the last minute."""
    if 0 < quota < bound:
        return note(
            "container-limit",
            f"the container may use the time of {quota:.3g} processors, and nproc says {bound}",
            (
                "let each of N ranks have its share of threads, for one rank",
                f"export OMP_NUM_THREADS={max(1, int(quota))}",
            ),
            ("or give the container more", "docker run --cpus=N"),
            why=(
                "whoever counts processors starts too many threads, and all of them are stopped for the rest of each period",
            ),
        )
    part = f", bound to {bound} of them" if bound < there else ""
    shown = f"{there} processor{'s' * (there != 1)}{part}"
    if load > 2 * bound:
        shown += (
            f", for which {load:.0f} processes wait (the last minute's mean): timings will be poor"
        )
    elif load:
        shown += f", load {load:.1f}"
    return ok(shown)


# --- memory
# ----------------------------------------------------------------------------------------


def memory(root: str = "/") -> list[Finding]:
    """Check what is free for ranks, the limit of a container included, and whether the kernel has
    killed for memory."""
    from rallypoint.diagnosis.evidence import memory_counters

    return judge_memory(memory_counters(root))


def judge_memory(counters: MemoryCounters) -> list[Finding]:
    if not counters.total:
        return [unknown("/proc/meminfo cannot be read")]
    free, of = counters.available, f"of {size(counters.total)}"
    help = [("see who has it", "ps -eo pid,user,rss,args --sort=-rss | head")]
    limit = counters.limit
    if 0 < limit < counters.total:
        free = min(free, max(0, limit - max(0, counters.current - counters.cached)))
        of = f"of the {size(limit)} that this container may use (the machine has {size(counters.total)})"
        help.append(("or give the container more", "docker run --memory=64g"))
    found = []
    if free < LITTLE_MEMORY:
        why = ("a rank that has imported torch holds a few hundred MiB before it has any data",)
        fact = f"{size(free)} of memory is free, {of}"
        found.append(note("host-memory-low", fact, *help, why=why))
    if counters.oom_kills:
        killed = "a process" if counters.oom_kills == 1 else f"{counters.oom_kills} processes"
        found.append(
            note(
                "rank-out-of-memory",
                f"the kernel has killed {killed} of this control group for lack of memory since it exists",
                ("see which, and when", "sudo dmesg -T | grep -i 'killed process'"),
                why=(f"oom_kill in {counters.path}",),
            )
        )
    return found or [ok(f"{size(free)} free {of}")]


# --- limits
# ----------------------------------------------------------------------------------------


class ProcessLimits(NamedTuple):
    """Limits of this process, and so of its ranks (getrlimit(2)); `NO_LIMIT` stands for none."""

    files: tuple[int, int]  # soft, hard
    processes: int = NO_LIMIT  # and threads that this user may have; root has no limit
    processes_used: int = 0
    group_processes: int = 0  # of the control group with the least room left, 0: no limit
    group_used: int = 0
    locked: int = NO_LIMIT  # bytes
    address_space: int = NO_LIMIT  # bytes
    infiniband: bool = False  # there is a card, and this user is not root: root may lock any memory


def limits() -> list[Finding]:
    """Check open files, processes, locked memory and address space."""
    return judge_limits(look_at_limits())


def look_at_limits(root: str = "/") -> ProcessLimits:
    soft = {
        name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
        for name in ("NPROC", "MEMLOCK", "AS")
    }
    is_root = os.geteuid() == 0
    processes = NO_LIMIT if is_root else soft["NPROC"]
    groups = [
        (number_in(folder, "pids.max"), number_in(folder, "pids.current"))
        for folder, _ in cgroup_folders("pids", root)
    ]
    group = min((one for one in groups if one[0]), key=lambda one: one[0] - one[1], default=(0, 0))
    infiniband = os.path.join(root, "sys/class/infiniband")
    return ProcessLimits(
        resource.getrlimit(resource.RLIMIT_NOFILE),
        processes,
        0 if processes == NO_LIMIT else _threads_of(os.getuid()),
        *group,
        soft["MEMLOCK"],
        soft["AS"],
        not is_root and os.path.isdir(infiniband) and bool(os.listdir(infiniband)),
    )


def _threads_of(uid: int) -> int:
    """Count the threads of a user's processes, as far as they are visible."""
    count = 0
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has ended
            continue
    return count


def judge_limits(limits: ProcessLimits) -> list[Finding]:
    found = [*_files(*limits.files), *_processes(limits)]
    if limits.infiniband and limits.locked != NO_LIMIT:
        found.append(
            note(
                "limit-low",
                f"a process may lock {size(limits.locked)} of memory, and there is InfiniBand here",
                (
                    "lift it where the job is started; for a container",
                    "docker run --ulimit memlock=-1",
                ),
                ("or for a user, in /etc/security/limits.conf", "* - memlock unlimited"),
                why=(
                    "NCCL registers its buffers with the card, and fails with 'ibv_reg_mr: Cannot allocate memory'",
                ),
            )
        )
    if limits.address_space != NO_LIMIT:
        found.append(
            note(
                "limit-low",
                f"a process may have {size(limits.address_space)} of address space",
                ("lift it for this shell", "ulimit -v unlimited"),
                why=(
                    "CUDA reserves more address space than the machine has memory, and libraries and threads' stacks count, too",
                ),
            )
        )
    told = [
        f"no limit on {what}" if number == NO_LIMIT else f"{number} {what}"
        for what, number in (("open files", limits.files[0]), ("processes", limits.processes))
    ]
    told += [] if limits.locked == NO_LIMIT else [f"{size(limits.locked)} of locked memory"]
    return found or [ok(", ".join(told))]


def _files(soft: int, hard: int) -> list[Finding]:
    if soft == NO_LIMIT or soft >= FEW_FILES:
        return []
    raised = 65536 if hard == NO_LIMIT else min(65536, hard)
    help = []
    if raised > soft:
        help.append(("raise it for this shell, and what is started from it", f"ulimit -n {raised}"))
    if raised < FEW_FILES:
        sentence = f"a hard limit of {hard} is raised by root, for a container where it is started"
        help.append((sentence, "docker run --ulimit nofile=65536"))
        sentence = "or for a user, from the next login on, in /etc/security/limits.conf"
        help.append((sentence, "* hard nofile 65536"))
    why = (
        "loader workers hand tensors over as open files; too few end as 'received 0 items of ancdata' or 'Too many open files'",
    )
    make = fault if soft < FEWEST_FILES else note
    return [make("limit-low", f"a process may have {soft} files open", *help, why=why)]


def _processes(limits: ProcessLimits) -> list[Finding]:
    """Judge the user's limit or the control group's, whichever leaves less room."""
    most, used, owner, help = min(
        (
            limits.processes if limits.processes != NO_LIMIT else sys.maxsize,
            limits.processes_used,
            "this user",
            ("raise it for this shell", "ulimit -u unlimited"),
        ),
        (
            limits.group_processes or sys.maxsize,
            limits.group_used,
            "this control group",
            ("give the container more", "docker run --pids-limit=-1"),
        ),
        key=lambda bound: bound[0] - bound[1],
    )
    left = max(0, most - used)
    if left >= FEW_PROCESSES:
        return []
    make = fault if left < FEWEST_PROCESSES else note
    why = (
        "what needs one more fails with 'Resource temporarily unavailable' or 'can't start new thread'",
    )
    fact = f"{owner} may have {most} processes and threads, and has {used}"
    return [make("limit-low", fact, help, why=why)]


# --- clocks
# ----------------------------------------------------------------------------------------


def clocks() -> list[Finding]:
    """Check that the date can be true."""
    clock = Clock()
    return [judge_clocks(clock.wall() - os.stat(__file__).st_mtime, clock.date())]


def judge_clocks(since_install: float, date: str) -> Finding:
    """`since_install`: seconds."""
    if since_install < -_CLOCK_SLACK:
        return fault(
            "clock-wrong",
            f"the clock says {date}, which is before rallypoint was installed",
            ("let a time service set it, as root", "timedatectl set-ntp true"),
            why=("certificates seem not to be valid yet, and new files older than old ones",),
        )
    return ok(f"{date}; how far it is from another machine's: --peer measures that")
