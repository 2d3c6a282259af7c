"""Exit statuses of the commands.

The status that a failed rank gives its job is `status_of` in `diagnosis/causes/case.py`.
"""

from __future__ import annotations

from rallypoint.host.signals import name

OK = 0
RAISED = 1  # Python's own status for an uncaught exception
USAGE = 2
INTERNAL = 70  # a fault of ours: EX_SOFTWARE of sysexits.h
BY_SIGNAL = 128  # plus the signal's number, as shells say it


def describe(code: int, signal: int = 0) -> str:
    """Describe the end of a process: `exit code 3`, or the signal's name `SIGKILL`."""
    return name(signal) if signal else f"exit code {code}"


def of_signal(signal: int) -> int:
    """Return 128 + its number: the status of a process that was ended by it. Ctrl-C: 130."""
    return BY_SIGNAL + signal
