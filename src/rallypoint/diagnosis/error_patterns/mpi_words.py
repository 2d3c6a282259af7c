"""Words of MPI, its launchers and Horovod about the processes of a job."""

from __future__ import annotations

from rallypoint.diagnosis.error_patterns.known_line import NAMES, line
from rallypoint.diagnosis.log_events import Sign
from rallypoint.diagnosis.pattern import Pattern

LINES = (
    line(
        "Signal: ",
        rf"^(?:\[(?:\S+:)?(?P<pid>\d+)\] )?Signal: (?P<name>{NAMES}) \(\d+\)$",
        by="Open MPI",
    ),
    line("Caught signal ", r"\] Caught signal (?P<signal>\d+) \(", by="UCX"),
    line(
        "exited on signal",
        r"(?:mpirun|mpiexec|prterun)\S{0,100} noticed that process rank (?P<rank>\d+)"
        r" with PID (?:(?P<pid>\d+)|\S+) on node (?P<host>\S+) exited on signal (?P<signal>\d+)",
        by="mpirun",
        first=True,
    ),
    line(
        "exit with status",
        r"^Process (?P<rank>\d+) exit with status code (?P<code>-?\d+)\.$",
        by="horovodrun",
        first=True,
    ),
    line(
        "exit signals: ",
        rf"^Application \d+ exit signals: (?P<name>{NAMES})",
        by="aprun",
        first=True,
    ),
    line(
        "time limit for job execution",  # mpirun --timeout
        r"^ *The user-provided time limit for job execution has been",
        Sign.INTERRUPTED,
        "TIME LIMIT",
    ),
    line(
        "MPI_Abort(",
        r"application called MPI_Abort\(\S+, (?P<code>-?\d+)\) - process (?P<rank>\d+)",
        by="MPI",
        first=True,
    ),
    line("PMI_Abort(", r"^In: PMI_Abort\((?P<code>\d+), ", by="MPI", first=True),
    line(
        "execvp error",
        r"execvp error on file .{1,400} \((?:No such file or directory|Permission denied)\)",
        Sign.NOT_STARTED,
    ),
    line(
        "-C ",
        r"^forrtl: error \(200\): program aborting due to control-C event"
        # MPICH and Intel MPI, Slurm
        r"|Sending Ctrl-C to processes as requested|^(?:\^C)?srun: sending Ctrl-C to ",
        Sign.INTERRUPTED,
    ),
    line(  # a terminal's echo, and what Python or a launcher wrote then
        "^C",
        r"^(?:\^C)+(?:Exception ignored |Process \S+:$|(?:\[\d{4}-.{1,80}\] )?Killing subprocess )",
        Sign.INTERRUPTED,
    ),
)


def stalls(text: str) -> bool:
    """Tell whether Horovod begins to tell what stalls."""
    return (
        "tensors were submitted to be reduced, gathered or broadcasted by subset of ranks" in text
        or "Stalled ops:" in text
    )


EXIT = Pattern(
    r"detected that one or more processes exited with non-zero"
    r"|(?P<mpich>BAD TERMINATION OF ONE OF YOUR)|MPI_ABORT was invoked on rank (?P<rank>\d+)"
)
"""First words of the paragraph on the first process that ended badly."""
