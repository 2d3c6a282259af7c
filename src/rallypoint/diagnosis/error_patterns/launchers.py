"""Words of torchrun and other launchers of Python about the processes that they started."""

from __future__ import annotations

import re

from rallypoint.diagnosis.error_patterns.known_line import ARGPARSE, KnownLine, line
from rallypoint.diagnosis.evidence import Raised
from rallypoint.diagnosis.log_events import Sign
from rallypoint.diagnosis.pattern import Pattern

CAUSES = {
    "ssh-unresolved": Pattern(r"^(?:.{0,60}: )?ssh: Could not resolve hostname (?P<host>\S+): "),
    "ssh-failed": Pattern(  # DeepSpeed, ColossalAI
        r"(?:\bhost=|^Error: failed to run torchrun .{1,1000} on )(?P<host>[^\s,]+)"
        r"(?: was not reachable via ssh\b|, is localhost: False, exception: (?!Encountered a bad command))"
    ),
}

LOST = Pattern(
    r"Horovod has been shut ?down|HorovodInternalError|RendezvousClosedError"
    r"|\b(?:ActorDied|RayActor|ActorUnavailable|WorkerCrashed|NodeDied|OwnerDied|ObjectLost|LocalRayletDied)Error\b"
    r"|\bEngineDeadError\b|(?:WorkerProc|Engine core) initialization failed"  # vLLM
    r"|^ray\.tune\.error\.TuneError: |\bFailed to meet rendezvous\b"  # Ray Tune, torch_xla
    r"|Detected at least one rank that exhausted inputs"  # torch's Join
)
"""Exceptions that Horovod, Ray, vLLM, torch_xla, Join and torchrun's rendezvous raise in those that
are left when another one has gone.
"""

WAITED = Pattern(
    r"connect\(\) timed out|rendezvous.{0,300}timed? ?out|RendezvousTimeout"
    r"|there are other ranks that didn't finish",  # SGLang
    re.IGNORECASE,
)

ENDS_ITSELF = Pattern(r"Received sigquit from a child proc|\bSIGQUIT received\. signum=")
"""Words of SGLang's server, which kills itself then: a process of its own had failed."""

# What a launcher starts. Of any other command (gcc, aws, sh) a library or the program tells.
_STARTED = (
    r"Command '(?:\[')?(?:[^\s']{0,200}[/\\])?(?:numactl', '(?:[^']{0,80}', '){1,8}?(?:[^\s']{0,200}[/\\])?)?"
    r"(?:python[\d.]*|torchrun|accelerate|deepspeed|horovodrun|mpirun|mpiexec|srun|ssh|pdsh)"
    r"(?:\.exe)?(?![\w.-])"
)


def called(command: str) -> KnownLine:
    """Return the line of Python's exception for a command that failed."""
    return line(
        "CalledProcessError: ",
        rf"CalledProcessError: (?!Command '(?:\[')?ssh\b){command}.{{0,4000}} "
        r"(?:returned non-zero exit status (?P<code>-?\d+)|died with <Signals\.(?P<name>SIG\w+): \d+>)",
        by="the launcher",
        first=True,
    )


# Python up to 3.10 has the name, and later ones the number.
_SIGNAL = r"(?:(?P<signal>\d+)|Signals\.(?P<name>SIG\w+))"

LINES = (
    line(
        "exitcode",
        r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)",
        by="torchrun",
        first=True,
    ),
    line("return code", r"exits with return code = (?P<code>-?\d+)", by="DeepSpeed", first=True),
    called(_STARTED),
    line(
        "terminated with",
        r"process (?P<rank>\d+) terminated with (?:signal (?P<name>SIG\w+)|exit code (?P<code>\d+))",
        by="mp.spawn",
        first=True,
    ),
    line(  # torchrun's table whose lines were joined
        "exitcode",
        r"\brank ?:? ?(?P<rank>\d+) \(local[_ ]rank: ?\d+\) ?exitcode ?: ?(?P<code>-?\d+) \(pid: \d+\)",
        by="torchrun",
        first=True,
    ),
    line("exit code", r"Process finished with exit code (?P<code>-?\d+)", by="PyCharm", first=True),
    line(
        "composer.cli.launcher:",
        r"\b[Rr]ank (?P<rank>\d+) (?:\(PID (?P<pid>\d+)\) )?(?:crashed|exited) with (?:exit )?code (?P<code>-?\d+)",
        by="Composer",
        first=True,
    ),
    line(
        "status failed cmd",
        r"^Container rank (?P<local>\d+) status failed cmd .{1,4000} code (?P<code>-?\d+) log ",
        by="Paddle",
        first=True,
    ),
    # Python's number of a signal
    line("Exit code: -", r"(?:^|\] )Exit code: (?P<code>-[1-9]\d?)$", by="SGLang", first=True),
    line(
        "this job is ",  # submitit
        r"Caught signal (?P<name>SIG\w+) on \S+: this job is (?:preempted|timed-out)",
        Sign.INTERRUPTED,
    ),
    line(
        ": error: ",
        r"^\S+: error: (?:unrecognized arguments|the following arguments are required|argument \S+):",
        by=ARGPARSE,
        code=2,
    ),
    line(
        "death signal",
        rf"Received {_SIGNAL} death signal, shutting down workers",
        Sign.INTERRUPTED,
    ),
    line(
        "got signal",
        rf"SignalException: Process \d+ got signal: {_SIGNAL}",
        Sign.INTERRUPTED,
    ),
    line(  # vLLM; DeepSpeed and torch before 1.9, which say another thing where a rank failed
        "received ",
        r"(?:\[shutdown\] .{1,60} received signal=|\bMain process received )(?P<name>SIG\w+)",
        Sign.INTERRUPTED,
    ),
    line("can't open file", r"can't open file '.{1,400}': \[Errno 2\]", Sign.NOT_STARTED),
    line("No module", r"^\S*python[\d.]*: No module named \S+$", Sign.NOT_STARTED),
    line(
        "ing module spec",
        r"^\S*python[\d.]*: Error while finding module specification for '",
        Sign.NOT_STARTED,
    ),
    line(  # Flux
        "start failed: ",
        r"\bstart failed: .{1,400}: (?:No such file or directory|Permission denied)$",
        Sign.NOT_STARTED,
    ),
    line("exec: ", r'exec: ".{1,400}": (?:executable file not|stat |permission)', Sign.NOT_STARTED),
)

OF_RANKS = frozenset(("torchrun", "DeepSpeed", "mp.spawn", "Composer", "Paddle"))
"""Those that tell of ends, and have started the ranks themselves."""

_RESTARTS = Pattern(r"will restart worker group|^rallypoint: restarting (all \d+ ranks|the rank)")


def restarts(text: str) -> bool:
    """Tell whether a launcher says that it starts all ranks again."""
    return "estart" in text and _RESTARTS.search(text) is not None


_MEMBER = Pattern(
    r"[Ii]nitializing (?:ddp|distributed): GLOBAL_RANK: (?P<rank>\d+), MEMBER: \d+/(?P<all>\d+)"
)


def member(text: str) -> tuple[int, int] | None:
    """Read the rank and the size of the group that a process of Lightning's says it has, before
    they meet; None for other lines.
    """
    found = _MEMBER.search(text) if "GLOBAL_RANK" in text else None
    return (int(found["rank"]), int(found["all"])) if found is not None else None


_WRAPPERS = Pattern(
    r"(?:ChildFailedError|ProcessRaisedException|ProcessExitedException|RendezvousConnectionError|SignalException"
    r"|UnexpectedStatusException|ExecuteUserScriptError)$"  # SageMaker
)

# Where launchers raise CalledProcessError for what they started, a script or a tool around Python.
_RAISING = Pattern(
    r"(^|/)(?:accelerate/commands/\w+|deepspeed/launcher/\w+|torch/distributed/launch)\.py$"
)


def of_launcher(error: Raised, rank: int = -1) -> bool:
    """Tell whether an exception only hands on that a process failed, or that the launcher was
    stopped. What a rank calls by `subprocess` itself is its own.
    """
    if not error.type.endswith("CalledProcessError"):
        # torchrun waits at its end for the other nodes, whatever its ranks came to
        at_exit = any(frame.function == "_exit_barrier" for frame in error.frames)
        of_sagemaker = error.type == "AlgorithmError" and not error.frames
        return at_exit or of_sagemaker or bool(_WRAPPERS.search(error.type))
    by = error.frames[-1].file if error.frames else ""
    if _RAISING.search(by):
        return True
    called = rank >= 0 and by.endswith("/subprocess.py")
    return not called and re.match(_STARTED, error.message) is not None
