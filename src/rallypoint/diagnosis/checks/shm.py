"""/dev/shm: DataLoader workers pass batches through it, and NCCL what it says between GPUs of one machine."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from rallypoint.diagnosis.checks.finding import Finding, fault, note, ok, size

PLACE = "/dev/shm"

SMALL = 1 << 30
"""Bytes: eight loader workers that each have two batches of 64 MiB under way. Containers have 64 MiB unless told otherwise."""

TOO_LITTLE = 32 << 20
"""Bytes: with less not even NCCL's own segments for two GPUs, or one batch of images, fit."""


class Facts(NamedTuple):
    """What there is at /dev/shm. Bytes."""

    problem: str = ""  # why it cannot be used, in the system's words; "" when it can
    total: int = 0
    free: int = 0
    left: int = 0  # files of torch's whose process is gone
    left_bytes: int = 0


def check() -> tuple[Finding, ...]:
    return judge(look())


def look(place: str = PLACE) -> Facts:
    try:
        found = os.statvfs(place)
        # Not the mode: a read-only mount, and a user who is not its owner, must be told as well.
        os.close(os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        return Facts(problem=os.strerror(error.errno or 0))
    left, left_bytes = _left(place)
    return Facts("", found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, left, left_bytes)


def _left(place: str) -> tuple[int, int]:
    """Segments of torch's named after a process that is not there: `torch_<pid>_<random>`."""
    count = number = 0
    with os.scandir(place) as entries:
        for entry in entries:
            named = re.fullmatch(r"torch_(\d+)_.+", entry.name)
            if named and not os.path.exists(f"/proc/{named[1]}"):
                try:
                    number += entry.stat(follow_symlinks=False).st_blocks * 512
                except OSError:  # gone meanwhile
                    continue
                count += 1
    return count, number


def judge(facts: Facts) -> tuple[Finding, ...]:
    if facts.problem:
        return (
            fault(
                "shm-small",
                f"{PLACE} cannot be used: {facts.problem}",
                ("mount it", f"sudo mount -t tmpfs -o size=8g,mode=1777 tmpfs {PLACE}"),
                ("in a container, give it one", "docker run --shm-size=8g"),
            ),
        )
    shown = f"{PLACE} has {size(facts.total)}, {size(facts.free)} of it free"
    why: tuple[str, ...] = ()
    help = [("give the container more", "docker run --shm-size=8g"), ("or, as root", f"mount -o remount,size=8g {PLACE}")]
    if facts.left_bytes:
        why = (f"{facts.left} segments of torch's, {size(facts.left_bytes)}, are named after processes that are not here",)
        help.insert(0, ("look at what processes that are gone have left, and remove it", f"ls -l {PLACE}/torch_*"))
    if facts.free < TOO_LITTLE:
        return (fault("shm-small", shown, *help, why=why),)
    if facts.free < SMALL:
        return (
            note(
                "shm-small", shown, *help, why=(*why, "DataLoader workers die of SIGBUS, or raise No space left on device, when it is full")
            ),
        )
    return (ok(shown),)
