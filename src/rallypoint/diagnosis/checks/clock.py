"""The clocks: whether they run forward, whether the date can be true, whether somebody keeps it."""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

from rallypoint.clock import Clock
from rallypoint.diagnosis.checks.finding import Finding, fault, ok

READINGS = 2000
"""Readings of the monotonic clock, some 100 ns each: processors whose clocks differ show it in far fewer."""

_SLACK = 86400.0  # seconds: a file system's time zone mistake is no wrong clock
_UNSYNCHRONISED = 0x40  # STA_UNSYNC of timex.h


class Facts(NamedTuple):
    """Seconds since 1970 where not said otherwise."""

    wall: float
    least: float  # when rallypoint's own files were written: it must be later than that
    date: str = ""
    forward: bool = True  # the monotonic clock was never seen to go back
    kept: bool | None = None  # by a time service, as the kernel says; None: it does not say
    error: float = 0.0  # seconds by which it may be wrong, as that service says


def check() -> tuple[Finding, ...]:
    return judge(look())


def look() -> Facts:
    clock = Clock()
    last, forward = clock.monotonic(), True
    for _ in range(READINGS):
        now = clock.monotonic()
        forward, last = forward and now >= last, now
    kept, error = _kept()
    return Facts(clock.wall(), os.stat(__file__).st_mtime, clock.date(), forward, kept, error)


class _Timex(ctypes.Structure):
    """The beginning of struct timex (adjtimex(2)), and room for the rest of it."""

    _fields_ = (
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long), ("status", ctypes.c_int), ("rest", ctypes.c_char * 256),
    )  # fmt: skip


def _kept() -> tuple[bool | None, float]:
    """Ask the kernel; `modes` 0 changes nothing and needs no privilege. A sandbox may refuse all the same."""
    told = _Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(told)) < 0:
        return None, 0.0
    return not told.status & _UNSYNCHRONISED, told.maxerror / 1e6


def judge(facts: Facts) -> tuple[Finding, ...]:
    if not facts.forward:
        return (
            fault(
                "clock-wrong",
                "the monotonic clock was seen to go back",
                ("see which source of time the kernel uses, and what it thinks of it", "sudo dmesg | grep -i -e clocksource -e tsc"),
                why=("every timeout is counted with it",),
            ),
        )
    if facts.wall < facts.least - _SLACK:
        return (
            fault(
                "clock-wrong",
                f"the clock says {facts.date}, which is before rallypoint was installed",
                ("let a time service set it, as root", "timedatectl set-ntp true"),
                why=("certificates seem not to be valid yet, and new files older than old ones",),
            ),
        )
    kept = {
        None: "whether a time service keeps it is not known: the kernel may not be asked here",
        True: f"a time service keeps it within {facts.error:.2g} s",
        False: "no time service keeps it, which matters between machines: --peer measures that",
    }[facts.kept]
    return (ok(f"{facts.date}; {kept}"),)
