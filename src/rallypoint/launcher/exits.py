"""Meaning of exit statuses, and the status of the launcher."""

from __future__ import annotations

from collections.abc import Sequence
from signal import SIGRTMAX, Signals
from typing import TYPE_CHECKING

from rallypoint.host.signals import name

if TYPE_CHECKING:
    from rallypoint.diagnosis.report import Report

OK = 0
RAISED = 1  # Python's own status for an uncaught exception
USAGE = 2
INTERNAL = 70  # a fault of ours: EX_SOFTWARE of sysexits.h
TRY_AGAIN = 75  # a node was lost, a meeting timed out: EX_TEMPFAIL of sysexits.h
BY_SIGNAL = 128  # plus the signal's number, as shells say it


def describe(code: int, signal: int = 0) -> str:
    """Describe the end of a process: `exit code 3`, or the signal's name `SIGKILL`."""
    return name(signal) if signal else f"exit code {code}"


def meaning(code: int) -> str:
    """Return the meaning of an exit code by the shells' custom; "" for one without."""
    if code == 126:
        return "a shell's word for: found, but could not be executed"
    if code == 127:
        return "a shell's word for: command not found"
    if BY_SIGNAL < code <= BY_SIGNAL + SIGRTMAX:
        return f"a shell's word for: ended by {name(code - BY_SIGNAL)}"
    return ""


def of_rank(code: int, signal: int = 0) -> int:
    """Return the launcher's status when a rank that ended so is the cause: the rank's own, so that
    a script's codes get through.

    A rank that is at fault although it exited with 0 (it swallowed an error) makes 1: a failed job
    never looks well.
    """
    if signal:
        return of_signal(signal)
    return code or RAISED


def of_signal(signal: int) -> int:
    """Return 128 + its number: the status of a process that was ended by it. Ctrl-C: 130."""
    return BY_SIGNAL + signal


def status(*, reports: Sequence[Report] = (), interrupted_by: str = "") -> int:
    """Return the status of the whole run.

    `reports`: the causes found, the first one first; a rank that failed before the interruption
    counts. `interrupted_by`: the name of the signal that the launcher itself got, "" if none.
    Neither: the job went well.
    """
    if reports:
        return reports[0].exit_status
    if interrupted_by:
        return of_signal(Signals[interrupted_by])
    return OK
