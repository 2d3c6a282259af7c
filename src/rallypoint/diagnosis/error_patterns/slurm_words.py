"""Words of Slurm about the tasks of a job, and about what it stops."""

from __future__ import annotations

import re
import signal

from rallypoint.diagnosis.error_patterns.known_line import NAMES, line
from rallypoint.diagnosis.log_events import Sign

_OF_STOP = (
    "CANCELLED AT",
    "srun: Job step aborted",
    "srun: Terminating ",
)
"""Words of Slurm about a step or a job that it stops: whoever asked, also for a task that failed."""

_SRUN = r"srun: error: (?P<host>\S+): tasks? (?P<ranks>[\d,\[\]-]+): "

LINES = (
    line("oom", r"Detected \d+ oom[-_]kill event", Sign.KILLED_FOR_MEMORY, "slurmstepd"),
    line(
        "memory limit",
        r"^slurmstepd(?:-\S{1,60})?: error: (?:.{1,60} )?[Ee]xceeded (?:job |step )?memory limit",
        Sign.KILLED_FOR_MEMORY,
        "slurmstepd",
    ),
    line("Out Of Memory", _SRUN + "Out Of Memory", Sign.KILLED_FOR_MEMORY, "srun"),
    line(
        "srun: error",
        _SRUN + rf"(?:Exited with exit code (?P<code>\d+)|(?P<name>{NAMES}))",
        by="srun",
    ),
    line("First task", r"^srun: First task exited \d+s ago", Sign.INTERRUPTED),  # srun --wait
    line(
        "CANCELLED AT",  # with its reason
        r"CANCELLED AT \S+ DUE (?:TO (?!TASK FAILURE)(?P<by>\w[\w ]*?)|to SIGNAL (?P<name>\w+))(?:, SEE [\w ]+)? \*\*\*",
        Sign.INTERRUPTED,
    ),
    line(
        "Node failure",
        r"^(?:srun|salloc): error: Node failure on (?P<host>\S+)",
        Sign.INTERRUPTED,
        "NODE FAILURE",
    ),
    line(
        "Prolog",
        r"^srun: (?:error: )?Prolog(?:Slurmctld)? failed, job killed",
        Sign.INTERRUPTED,
        "PROLOG FAILURE",
    ),
    line(
        "CANCELLED AT",
        r"^(?:slurmstepd(?:-\S{1,60})?: )?error: \*\*\* (?:JOB|STEP) \S+ ON (?P<host>\S+) CANCELLED AT \S+(?: DUE TO TASK FAILURE)? \*\*\*$",
        Sign.INTERRUPTED,
        signal=int(signal.SIGTERM),
    ),
    *(
        line(word, "^" + word, Sign.INTERRUPTED, signal=int(signal.SIGTERM))
        for word in _OF_STOP[1:]
    ),
    line(
        "execve()",
        r"^slurmstepd(?:-\S{1,60})?: error: execve\(\): .+: (?:No such file or directory|Permission denied|Exec format error)$",
        Sign.NOT_STARTED,
    ),
)


def is_stop(text: str) -> bool:
    """Tell whether Slurm says that a step or a job was cancelled, and not why: it does so for
    whoever asked, also for a task that failed.
    """
    return any(words in text for words in _OF_STOP)


def is_for_a_task(text: str) -> bool:
    """Tell whether Slurm says that it ends a step, be it for a task that failed or left."""
    return "DUE TO TASK FAILURE" in text or is_by_srun(text)


def is_by_srun(text: str) -> bool:
    """Tell whether srun says that it ends a step: it does so for any reason, and after tasks that
    ended well, too.
    """
    return text.startswith(_OF_STOP[1:])


def cancelled_for_no_reason(text: str) -> bool:
    """Tell whether Slurm says that it cancelled a job or a step, and not why."""
    return is_stop(text) and not re.search(r"DUE TO (?!TASK)|time limit", text)
