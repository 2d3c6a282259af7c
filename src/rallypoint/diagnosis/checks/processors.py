"""How many processors this process may really use: those of the machine, those it is bound to, and the share of a container."""

from __future__ import annotations

import os
from typing import NamedTuple

from rallypoint.diagnosis.checks import cgroup
from rallypoint.diagnosis.checks.finding import Finding, note, ok


class Facts(NamedTuple):
    """Counts of processors."""

    there: int  # the machine's
    bound: int  # that this process may run on: what nproc says
    quota: float = 0.0  # whose time the control group may use, 0.0: no limit
    load: float = 0.0  # processes that want to run, the last minute's mean


def check() -> tuple[Finding, ...]:
    return judge(look())


def look(root: str = "/") -> Facts:
    load = cgroup.text(os.path.join(root, "proc/loadavg")).split()
    return Facts(
        there=os.cpu_count() or 1,
        bound=len(os.sched_getaffinity(0)),
        quota=min((limit for limit in _quotas(root) if limit), default=0.0),
        load=float(load[0]) if load else 0.0,
    )


def _quotas(root: str) -> list[float]:
    found = []
    for folder, unified in cgroup.folders("cpu", root):
        if unified:
            words = cgroup.text(os.path.join(folder, "cpu.max")).split()
            quota, period = (words[0], words[1]) if len(words) == 2 else ("", "")
        else:
            quota = cgroup.text(os.path.join(folder, "cpu.cfs_quota_us")).strip()  # -1: none
            period = cgroup.text(os.path.join(folder, "cpu.cfs_period_us")).strip()
        if quota.isdigit() and period.isdigit() and int(period):
            found.append(int(quota) / int(period))
    return found


def judge(facts: Facts) -> tuple[Finding, ...]:
    shown = _count(facts.there) + (f", bound to {facts.bound} of them" if facts.bound < facts.there else "")
    if facts.quota and facts.quota < facts.bound:
        threads = max(1, int(facts.quota))
        return (
            note(
                "container-limit",
                f"the container may use the time of {facts.quota:.3g} processors, and nproc says {facts.bound}",
                ("let each of N ranks have its share of threads, for one rank", f"export OMP_NUM_THREADS={threads}"),
                ("or give the container more", "docker run --cpus=N"),
                why=("whoever counts processors starts too many threads, and all of them are stopped for the rest of each period",),
            ),
        )
    if facts.load > 2 * facts.bound:
        shown += f", for which {facts.load:.0f} processes wait (the last minute's mean): timings will be poor"
    elif facts.load:
        shown += f", load {facts.load:.1f}"
    return (ok(shown),)


def _count(number: int) -> str:
    return f"{number} processor{'s' * (number != 1)}"
