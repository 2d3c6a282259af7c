"""TCP ports: from which range the kernel gives them out, how many of it are in use, who has the port that everybody takes."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from rallypoint.diagnosis.checks import cgroup
from rallypoint.diagnosis.checks.finding import Finding, note, ok, unknown

USUAL = 29500
"""torchrun's port, and that of most tutorials."""

FEW = 2000
"""Free ports: 64 ranks that each talk with every other one need 4032 at once, one such job and a half less."""


class Facts(NamedTuple):
    """Counts of ports of this network namespace."""

    low: int  # from here to `high` the kernel chooses, both included (ip_local_port_range, ip(7))
    high: int
    reserved: int = 0  # of these, never chosen (ip_local_reserved_ports)
    used: int | None = 0  # of these, by sockets in any state but TIME_WAIT; None: the list of sockets cannot be read
    waiting: int = 0  # sockets in TIME_WAIT
    holders: tuple[str, ...] = ()  # of the usual port, a sentence each


def check() -> tuple[Finding, ...]:
    return judge(look())


def look(root: str = "/") -> Facts:
    from rallypoint.host import ports

    low, high = kernels_range(root)
    reserved = _reserved(cgroup.text(os.path.join(root, "proc/sys/net/ipv4/ip_local_reserved_ports")), low, high)
    used, waiting = _used(root, low, high)
    return Facts(low, high, reserved, used, waiting, tuple(holder.line() for holder in ports.holders(USUAL) if holder.state == "listening"))


def kernels_range(root: str = "/") -> tuple[int, int]:
    """The ports from which the kernel chooses, both ends included; Linux's own range where that cannot be read."""
    words = cgroup.text(os.path.join(root, "proc/sys/net/ipv4/ip_local_port_range")).split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else (32768, 60999)


def _reserved(text: str, low: int, high: int) -> int:
    """How many of a range are in a list such as `8080,9000-9100`."""
    count = 0
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        begin, end = max(int(first), low), min(int(last or first), high)
        count += max(0, end - begin + 1)
    return count


def _used(root: str, low: int, high: int) -> tuple[int | None, int]:
    """Local ports of a range that TCP sockets have, and sockets that are in TIME_WAIT (proc_net_tcp.txt)."""
    used: set[int] = set()
    waiting, read = 0, False
    for name in ("tcp", "tcp6"):
        try:
            with open(os.path.join(root, "proc/self/net", name), encoding="ascii") as file:
                next(file)
                read = True
                for line in file:
                    fields = line.split(None, 4)
                    if fields[3] == "06":
                        waiting += 1
                    elif low <= (port := int(fields[1][-4:], 16)) <= high:
                        used.add(port)
        except (OSError, StopIteration):  # IPv6 switched off; a sandbox without it
            continue
    return (len(used) if read else None), waiting


def judge(facts: Facts) -> tuple[Finding, ...]:
    if facts.used is None:
        return (unknown(f"the kernel gives out {facts.low}-{facts.high}; who has which is not known: /proc/net/tcp cannot be read"),)
    there = facts.high - facts.low + 1 - facts.reserved
    waiting = f"{facts.waiting} connection{'s' * (facts.waiting != 1)} in TIME_WAIT"
    shown = f"the kernel gives out {facts.low}-{facts.high}: {facts.used} in use, {waiting}"
    found = []
    if there - facts.used < FEW:
        found.append(
            note(
                "ports-exhausted",
                f"{max(0, there - facts.used)} ports are free: {shown}",
                ("widen the range, as root", "sysctl -w net.ipv4.ip_local_port_range='15000 60999'"),
                ("or see who has them", "ss -tanp | awk '{print $6}' | sort | uniq -c | sort -rn | head"),
                why=("--port-range is for what rallypoint binds; gloo and NCCL take theirs from the kernel's range",),
            )
        )
    if facts.holders:
        found.append(
            note(
                "port-in-use",
                f"port {USUAL} is taken: {facts.holders[0]}",
                ("leave --master-port out, and a script's own MASTER_PORT: rallypoint holds a free port from the start", ""),
                why=facts.holders[1:],
            )
        )
    if facts.low <= USUAL <= facts.high:
        shown += f"; {USUAL}, torchrun's port, is one of them, so that any connection may have it"
    return tuple(found) or (ok(f"{shown}; nobody listens on {USUAL}"),)
