"""Memory: what is free for ranks here, the limit of a container included, and what the kernel has already killed for."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from rallypoint.diagnosis.checks import cgroup
from rallypoint.diagnosis.checks.finding import Finding, note, ok, size, unknown
from rallypoint.diagnosis.evidence import memory_counters

LITTLE = 1 << 30
"""Bytes: two ranks that have imported torch, made a small model and opened a process group hold about as much."""


class Facts(NamedTuple):
    """Bytes. 0: not known."""

    total: int
    available: int
    limit: int = 0  # of the control group, the smallest on the way up; 0: none
    used: int = 0  # by that group, without what the kernel can drop at once
    oom_kills: int = 0  # processes of the group that the kernel has killed for memory, since the group exists
    kills_from: str = ""  # the file that says so


def check() -> tuple[Finding, ...]:
    return judge(look())


def look(root: str = "/") -> Facts:
    limit = used = 0
    for folder, unified in cgroup.folders("memory", root):
        names = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        bound = cgroup.number(os.path.join(folder, names[0]))
        if bound and (not limit or bound < limit):
            limit = bound
            dropped = re.search(r"^(?:total_)?inactive_file (\d+)", cgroup.text(os.path.join(folder, "memory.stat")), re.MULTILINE)
            used = max(0, cgroup.number(os.path.join(folder, names[1])) - (int(dropped[1]) if dropped else 0))
    counters = memory_counters(root)
    return Facts(
        total=counters.total,
        available=counters.available,
        limit=limit,
        used=used,
        oom_kills=counters.oom_kills,
        kills_from=counters.path,
    )


def judge(facts: Facts) -> tuple[Finding, ...]:
    if not facts.total:
        return (unknown("/proc/meminfo cannot be read"),)
    limited = 0 < facts.limit < facts.total
    free = min(facts.available, max(0, facts.limit - facts.used)) if limited else facts.available
    of = (
        f"of the {size(facts.limit)} that this container may use (the machine has {size(facts.total)})"
        if limited
        else f"of {size(facts.total)}"
    )
    found = []
    if free < LITTLE:
        found.append(
            note(
                "host-memory-low",
                f"{size(free)} of memory is free, {of}",
                ("see who has it", "ps -eo pid,user,rss,args --sort=-rss | head"),
                *([("or give the container more", "docker run --memory=64g")] if limited else []),
                why=("a rank that has imported torch holds a few hundred MiB before it has any data",),
            )
        )
    if facts.oom_kills:
        killed = "a process" if facts.oom_kills == 1 else f"{facts.oom_kills} processes"
        found.append(
            note(
                "rank-out-of-memory",
                f"the kernel has killed {killed} of this control group for lack of memory since it exists",
                ("see which, and when", "sudo dmesg -T | grep -i 'killed process'"),
                why=(f"oom_kill in {facts.kills_from}",),
            )
        )
    return tuple(found) or (ok(f"{size(free)} free {of}"),)
