"""Single lines that tell of a failure: what each says. Only texts that were seen are listed, with
their sources in tests/logs, and what the makers of a library list themselves.
"""

from __future__ import annotations

import errno
import re
import signal
from typing import NamedTuple

import msgspec

from rallypoint.diagnosis.error_patterns.nccl import REMARKS
from rallypoint.diagnosis.error_patterns.python import SIGNALS
from rallypoint.diagnosis.error_patterns.refused_starts import REFUSALS
from rallypoint.diagnosis.evidence import Raised
from rallypoint.diagnosis.log_events import Collective, End, Sign, Speaker, of_rank

CAUSES = {
    "ssh-unresolved": re.compile(r"^(?:.{0,60}: )?ssh: Could not resolve hostname (?P<host>\S+): "),
    "ssh-failed": re.compile(  # DeepSpeed, ColossalAI
        r"(?:\bhost=|^Error: failed to run torchrun .{1,1000} on )(?P<host>[^\s,]+)"
        r"(?: was not reachable via ssh\b|, is localhost: False, exception: (?!Encountered a bad command))"
    ),
}

LOST = re.compile(
    r"Horovod has been shut ?down|HorovodInternalError|RendezvousClosedError"
    r"|\b(?:ActorDied|RayActor|ActorUnavailable|WorkerCrashed|NodeDied|OwnerDied|ObjectLost|LocalRayletDied)Error\b"
    r"|\bEngineDeadError\b|(?:WorkerProc|Engine core) initialization failed"  # vLLM
    r"|^ray\.tune\.error\.TuneError: |\bFailed to meet rendezvous\b"  # Ray Tune, torch_xla
)
"""Exceptions that Horovod, Ray, vLLM, torch_xla and torchrun's rendezvous raise in those that are
left when another one has gone.
"""

WAITED = re.compile(
    r"connect\(\) timed out|rendezvous.{0,300}timed? ?out|RendezvousTimeout"
    r"|there are other ranks that didn't finish",  # SGLang
    re.IGNORECASE,
)

NO_EXCEPTION = "terminate called without an active exception"
"""Words of C++ about a thread that still ran when its process left."""

REPORTED = r"^(?:error|stopped)\[([a-z]+(?:-[a-z]+)+)\]: (\S.*)$"
"""The headline of a report of rallypoint's own."""

FOLDER = re.compile(
    r"^  logs (?=.*/rank\d+\.log:\d+$|(?!.*:\d+$)) *(/\S.*?)(?:/rank\d+\.log(?::\d+)?)?$"
)
"""The run folder at the end of such a report, or the log of a rank in it. A line of another log is
none: `rallypoint explain` wrote that.
"""

Told = tuple[Sign, End | Collective | None, tuple[int, ...]]
"""The content of a line: its kind, the facts in it, the ranks that it names."""


def ranks_of(listed: str) -> tuple[int, ...]:
    """Read ranks as Slurm writes them: `1-3,7`."""
    found: list[int] = []
    for part in listed.split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            found += range(
                int(low), min(int(high) if high.isdigit() else int(low), int(low) + 100_000) + 1
            )
    return tuple(found)


_NAMES = "Killed|Segmentation fault|Aborted|Bus error|Terminated|Floating point exception|Illegal instruction"


# Windows has no signals: a crash leaves an NTSTATUS as exit code, which some show as a negative
# number.
_NTSTATUS = {
    0xC0000005: (int(signal.SIGSEGV), "access violation"),
    0xC0000006: (int(signal.SIGBUS), "in-page error"),
    0xC000001D: (int(signal.SIGILL), "illegal instruction"),
    0xC0000094: (int(signal.SIGFPE), "division of an integer by zero"),
    0xC00000FD: (int(signal.SIGSEGV), "stack overflow"),
    0xC0000374: (int(signal.SIGABRT), "heap corruption"),
    0xC0000409: (int(signal.SIGABRT), "stack buffer overrun, or an abort"),
}
_NTSTATUS_CONTROL_C = 0xC000013A


def exit_of(code: int) -> End:
    """Read how a process ended from the number that its launcher gives: -9, 137 as shells say it,
    or Windows' -1073741819.
    """
    of_windows = code & 0xFFFFFFFF
    if of_windows in _NTSTATUS:
        number, words = _NTSTATUS[of_windows]
        return End(signal=number, status=f"0x{of_windows:X} ({words})")
    if of_windows >> 28 == 0xC:
        return End(code=of_windows, status=f"0x{of_windows:X}")
    if code < 0:
        return End(signal=-code)
    return End(signal=code - 128) if 128 < code <= 128 + 31 else End(code=code)


class _Line(NamedTuple):
    """A line by which a launcher, a scheduler or a shell tells something; its groups have the
    facts.
    """

    # that a line must hold before the pattern is tried: a search for it is fifty times quicker
    word: str
    words: re.Pattern[str]
    sign: Sign = Sign.ENDED
    by: str = ""  # the one that says so
    first: bool = False  # of the process that failed first, as it says
    signal: int = 0  # where no group names it
    code: int = 0  # the same


def _line(
    word: str,
    words: str,
    sign: Sign = Sign.ENDED,
    by: str = "",
    *,
    first: bool = False,
    signal: int = 0,
    code: int = 0,
) -> _Line:
    return _Line(word, re.compile(words), sign, by, first, signal, code)


# What a library starts, and no rank is.
_TOOLS = r"(?:gcc|g\+\+|cc|c\+\+|clang|nvcc|hipcc|ninja|make|cmake|git|ldconfig|nvidia-smi)"
# What a launcher starts. Of any other command (gcc, aws, sh) a library or the program tells.
_STARTED = (
    r"Command '(?:\[')?(?:[^\s']{0,200}[/\\])?(?:numactl', '(?:[^']{0,80}', '){1,8}?(?:[^\s']{0,200}[/\\])?)?"
    r"(?:python[\d.]*|torchrun|accelerate|deepspeed|horovodrun|mpirun|mpiexec|srun|ssh|pdsh)"
    r"(?:\.exe)?(?![\w.-])"
)


# Commands that start a job. When a shell does not find another command, its script goes on.
_LAUNCHER_COMMAND = (
    r"(?:[^\s:']{0,300}/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|horovodrun|mpirun|mpiexec"
    r"|srun|rallypoint)"
)
_SCRIPT = rf"(?:{_LAUNCHER_COMMAND}|[^\s:']{{1,300}}\.(?:sh|bash|py))"
# "bash: ", "job.sh: line 3: ", "sh: 1: "; nothing before a pasted line
_SHELLS = (
    r"^(?:[\w.-]{1,100}: (?=bash: ))?(?:-?(?:\S{0,300}/)?[bdkz]?a?sh: |\S{1,300}: (?=(?:exec: )?(?:line )?\d+: ))?"
    r"(?:exec: )?(?:(?:line )?\d+: )?(?:exec: )?"
)
_WHY = r"(?P<why>[Nn]o such file or directory|[Pp]ermission denied)"
_NOT_RUN = (
    (
        " not found",
        rf"{_SHELLS}(?P<program>{_LAUNCHER_COMMAND}): (?:command )?not found(?:\.\.\.)?$",
    ),
    ("zsh:", rf"^zsh:(?:\d+:)? (?:command not found|{_WHY}): (?P<program>{_SCRIPT})$"),
    ("Permission denied", rf"{_SHELLS}(?P<program>(?!/etc/){_SCRIPT}): {_WHY}$"),
    # other files may be read by the script (`source`), which then goes on
    (" such file", rf"{_SHELLS}(?P<program>{_LAUNCHER_COMMAND}|\./[^\s:']{{1,300}}): {_WHY}$"),
    (" required file", rf"{_SHELLS}(?P<program>[^\s:]{{1,300}}): cannot execute: required file "),
    (
        " bad interpreter",
        rf"{_SHELLS}(?P<program>[^\s:]{{1,300}}): (?:[^:]{{1,300}}: )?bad interpreter: (?:[^:]{{1,300}}: )?{_WHY}",
    ),
    (" binary file", rf"{_SHELLS}(?P<program>{_SCRIPT}): cannot execute binary file(?:: |$)"),
    (
        " shared libraries: ",
        r"^(?:\S{1,300}: )?(?P<program>[^\s:]{1,300}): error while loading shared libraries: ",
    ),
    (
        "': ",
        r"^(?:\S{0,100}/)?(?:env|nohup|timeout|nice|setsid|stdbuf): (?:failed to run command )?"
        rf"'(?P<program>[^\s']{{1,300}})': {_WHY}$",
    ),
)
"""Substring and pattern of each message of a shell, of a tool like `env`, or of the loader, about a
program that did not start.
"""


def _called(command: str) -> _Line:
    """Return the line of Python's exception for a command that failed."""
    return _line(
        "CalledProcessError: ",
        rf"CalledProcessError: (?!Command '(?:\[')?ssh\b){command}.{{0,4000}} "
        r"(?:returned non-zero exit status (?P<code>-?\d+)|died with <Signals\.(?P<name>SIG\w+): \d+>)",
        by="the launcher",
        first=True,
    )


SERVICE = "the service that ran it"
ARGPARSE = "argparse"
# Python up to 3.10 has the name, and later ones the number.
_SIGNAL = r"(?:(?P<signal>\d+)|Signals\.(?P<name>SIG\w+))"
_OF_STOP = (
    "CANCELLED AT",
    "srun: Job step aborted",
    "srun: Terminating ",
)
"""Words of Slurm about a step or a job that it stops: whoever asked, also for a task that failed."""
_SRUN = r"srun: error: (?P<host>\S+): tasks? (?P<ranks>[\d,\[\]-]+): "
_LINES = (
    _line(
        "exitcode",
        r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)",
        by="torchrun",
        first=True,
    ),
    _line("oom", r"Detected \d+ oom[-_]kill event", Sign.KILLED_FOR_MEMORY, "slurmstepd"),
    _line(
        "memory limit",
        r"^slurmstepd: error: (?:.{1,60} )?[Ee]xceeded (?:job |step )?memory limit",
        Sign.KILLED_FOR_MEMORY,
        "slurmstepd",
    ),
    _line(
        "low on resource: memory",
        r"The node was low on resource: memory",
        Sign.KILLED_FOR_MEMORY,
        "the kubelet",
    ),
    _line("TERM_MEMLIMIT", r"^TERM_MEMLIMIT: job killed", Sign.KILLED_FOR_MEMORY, "LSF"),
    *(
        _line(
            word,  # HTCondor, Moab, YARN, Dask
            r"\b(?:[Jj]ob|[Cc]ontainer|[Ww]orker|[Tt]ask|[Pp]od)\b(?: [\w.]+){0,9}? "
            r"(?:over|hold(?: by \w+)? due to|(?<!may have )exceed(?:ed|ing|s))(?: [\w%]+){0,2}? (?:memory|MEM)\b"
            r"(?: \w+){0,2}? (?:limits?|budget|usage)\b",
            Sign.KILLED_FOR_MEMORY,
            SERVICE,
        )
        for word in (" memory ", " MEM ")
    ),
    _line(
        " exceed",
        r"(?:^|[$#] )(?:=>> PBS: job killed: \w*mem \S+ exceed|Job exceeded a memory resource limit)",
        Sign.KILLED_FOR_MEMORY,
        "PBS",
    ),
    _line(
        "ut of memory",
        r"Out of memory: Kill(?:ed)? process (?P<pid>\d+)|Memory cgroup out of memory: Kill(?:ed)? process \d+",
        Sign.KILLED_FOR_MEMORY,
        "the kernel",
    ),
    _line(
        "emory ",
        r"exceeds the memory usage threshold.{0,40} Ray killed this worker"
        r"|Memory on the node \(IP: [^)]{1,120}\) (?:where|was) ",
        Sign.KILLED_FOR_MEMORY,
        "Ray",
    ),
    _line(
        "memory pressure",
        r"(?<!\b0 Workers \(tasks / actors\) )killed due to memory pressure \(OOM\)",
        Sign.KILLED_FOR_MEMORY,
        "Ray",
    ),
    _line(
        "low on memory",
        r"\bWorker exit detail: Task was killed due to the node running low on memory",
        Sign.KILLED_FOR_MEMORY,
        "Ray",
    ),
    _line(
        "Signal: ",
        rf"^(?:\[(?:\S+:)?(?P<pid>\d+)\] )?Signal: (?P<name>{_NAMES}) \(\d+\)$",
        by="Open MPI",
    ),
    _line("Caught signal ", r"\] Caught signal (?P<signal>\d+) \(", by="UCX"),
    _line(
        "out-of-memory",
        r"\bThe replica [\w-]+(?: \d+)? ran out-of-memory and exited",
        Sign.KILLED_FOR_MEMORY,
        "the kernel",
    ),
    _line("OOMKilled", r"\bOOMKilled\b(?!\W{1,3}false)", Sign.KILLED_FOR_MEMORY, "the kernel"),
    _line("Out Of Memory", _SRUN + "Out Of Memory", Sign.KILLED_FOR_MEMORY, "srun"),
    _line(
        "srun: error",
        _SRUN + rf"(?:Exited with exit code (?P<code>\d+)|(?P<name>{_NAMES}))",
        by="srun",
    ),
    _line(
        "exited on signal",
        r"(?:mpirun|mpiexec|prterun)\S{0,100} noticed that process rank (?P<rank>\d+)"
        r" with PID (?P<pid>\d+) on node (?P<host>\S+) exited on signal (?P<signal>\d+)",
        by="mpirun",
        first=True,
    ),
    _line("return code", r"exits with return code = (?P<code>-?\d+)", by="DeepSpeed", first=True),
    _called(_STARTED),
    _line(
        "terminated with",
        r"process (?P<rank>\d+) terminated with (?:signal (?P<name>SIG\w+)|exit code (?P<code>\d+))",
        by="mp.spawn",
        first=True,
    ),
    _line(
        "exit with status",
        r"^Process (?P<rank>\d+) exit with status code (?P<code>-?\d+)\.$",
        by="horovodrun",
        first=True,
    ),
    _line(  # torchrun's table whose lines were joined
        "exitcode",
        r"\brank ?:? ?(?P<rank>\d+) \(local[_ ]rank: ?\d+\) ?exitcode ?: ?(?P<code>-?\d+) \(pid: \d+\)",
        by="torchrun",
        first=True,
    ),
    _line(
        "exit code", r"Process finished with exit code (?P<code>-?\d+)", by="PyCharm", first=True
    ),
    _line(
        "composer.cli.launcher:",
        r"\b[Rr]ank (?P<rank>\d+) (?:\(PID (?P<pid>\d+)\) )?(?:crashed|exited) with (?:exit )?code (?P<code>-?\d+)",
        by="Composer",
        first=True,
    ),
    _line(
        "status failed cmd",
        r"^Container rank (?P<local>\d+) status failed cmd .{1,4000} code (?P<code>-?\d+) log ",
        by="Paddle",
        first=True,
    ),
    _line(  # torch's own tests
        "xi",
        r"\bProcess(?:es|(?= \d+ .{1,40} and exception:)) (?P<ranks>\d+) exited with error code (?P<code>-?\d+)"
        r"|\bExpected zero exit code but got (?P<got>-?\d+)",
        by=SERVICE,
        first=True,
    ),
    _line(
        "ed with ",  # whoever ran it; SkyPilot ends the other nodes with 137
        r"(?:^ERROR: Job \w+ failed with return code list: \[(?:(?:0|137),? )*(?<=[\[ ])"
        # of docker compose's containers another one may be meant
        rf"|^(?!\S{{1,200}} exited with code (?!137$)|.{{0,1000}}(?:(?:'|\b(?:ssh|pip|Command|{_TOOLS})) (?:exited|failed)|\bretried\b))"
        r".{0,1000}? (?:(?:exited|terminated) with (?:an? )?(?:non-zero |error )?(?:exit |return )?(?:code|status)"
        r"|(?:failed|completed)(?: normally)? with (?:an? )?(?:non-zero )?(?:(?:exit|return) (?:code|status)|SystemExit))"
        r"(?: of)?[ :=(]{1,3})(?P<code>-?[1-9]\d*)\b",
        by=SERVICE,
        first=True,
    ),
    _line(
        "ignal",  # PALS, Dask, Celery, GPUStack
        r"(?:\b[Rr]ank (?P<rank>\d+) )?\b(?<!be )(?:died|killed|exited|terminated)(?: \(code: \d+,)?(?: \w+)? '?signal:? ?(?P<signal>\d+)\b",
        by=SERVICE,
        first=True,
    ),
    _line(
        "SIG",  # Airflow, supervisord
        r"(?:\breturn code Negsignal\.|\bsignal_name=\"|\(terminated by )(?P<name>SIG\w+)",
        by=SERVICE,
        first=True,
    ),
    _line(
        "exit signals: ",
        rf"^Application \d+ exit signals: (?P<name>{_NAMES})",
        by="aprun",
        first=True,
    ),
    # Python's number of a signal
    _line("Exit code: -", r"(?:^|\] )Exit code: (?P<code>-[1-9]\d?)$", by="SGLang", first=True),
    _line(
        "xit",  # a field: SageMaker, kubectl, docker inspect, YARN, Grid Engine
        r"(?:AlgorithmError: |^\s{0,40})[\"']?(?:\w{0,40}[Ee]xit ?[Cc]ode|exit_status)[\"']?"
        r"(?: ?[:=] ?| ) *(?P<code>[1-9]\d*),?$",
        by=SERVICE,
        first=True,
    ),
    _line(
        " exceeded ",  # the second and the third by mail
        r"(?:^|[$#] )(?:=>> PBS: job killed: walltime \d+ exceeded limit|Job exceeded its (?:walltime|cpu time) limit\."
        r"|MOAB_INFO: +job exceeded wallclock limit)|^salloc: Job \d+ has exceeded its time limit\b",
        Sign.INTERRUPTED,
        "TIME LIMIT",
    ),
    _line(
        "RUNLIMIT",
        r"^TERM_RUNLIMIT: job killed after reaching LSF run time limit",
        Sign.INTERRUPTED,
        "TIME LIMIT",
    ),
    _line(
        "time limit for job execution",  # mpirun --timeout
        r"^ *The user-provided time limit for job execution has been",
        Sign.INTERRUPTED,
        "TIME LIMIT",
    ),
    _line(
        "MPI_Abort(",
        r"application called MPI_Abort\(\S+, (?P<code>-?\d+)\) - process (?P<rank>\d+)",
        by="MPI",
        first=True,
    ),
    _line("PMI_Abort(", r"^In: PMI_Abort\((?P<code>\d+), ", by="MPI", first=True),
    _line(
        "execvp error",
        r"execvp error on file .{1,400} \((?:No such file or directory|Permission denied)\)",
        Sign.NOT_STARTED,
    ),
    _line(
        "*** SIG",
        r"(?:^|\blogging\.cc:\d+: )\*\*\* (?P<name>SIG\w+) (?:.* )?received (?:by PID (?P<pid>\d+)|at time=)",
        by="the process itself",
        first=True,
    ),
    *(
        _line(
            word,
            r"^\s{0,8}(?:\*\*\* Error in `.{1,200}': )?(?:(?:\w*alloc|malloc_consolidate|free|m\w+_chunk)\(\): "
            r"(?:double free|invalid|corrupted|unaligned|unsorted|mismatching|memory corruption)\b"
            r"|double free or corruption|corrupted (?:size vs|double-linked)|\*\*\* stack smashing)",
            by="the C library",
            first=True,
            signal=int(signal.SIGABRT),
        )
        for word in ("(): ", "corrupt", "stack smashing")
    ),
    _line(
        "-C ",
        r"^forrtl: error \(200\): program aborting due to control-C event"
        # MPICH and Intel MPI, Slurm
        r"|Sending Ctrl-C to processes as requested|^(?:\^C)?srun: sending Ctrl-C to ",
        Sign.INTERRUPTED,
    ),
    _line("First task", r"^srun: First task exited \d+s ago", Sign.INTERRUPTED),  # srun --wait
    _line(
        "CANCELLED AT",  # with its reason
        r"CANCELLED AT \S+ DUE (?:TO (?!TASK FAILURE)(?P<by>\w[\w ]*?)|to SIGNAL (?P<name>\w+))(?:, SEE [\w ]+)? \*\*\*",
        Sign.INTERRUPTED,
    ),
    _line(  # Ray, PBS
        "ode ",
        r"\bbecause its node has died\.|\bThe node with .{1,400} marked dead because the \w+ has missed"
        r"|^job preempted \(node failure\)",
        Sign.INTERRUPTED,
        "A NODE",
    ),
    *(
        _line(
            word,  # SkyPilot; the runners of GitHub
            r"\b[Tt]he (?:job|cluster|instance|node) (?:is|was) preempted\."
            r"|\bThe runner has received a shutdown signal\.",
            Sign.INTERRUPTED,
            SERVICE,
        )
        for word in (" preempted.", "shutdown signal")
    ),
    _line(
        "Node failure",
        r"^srun: error: Node failure on (?P<host>\S+)",
        Sign.INTERRUPTED,
        "NODE FAILURE",
    ),
    _line(
        "Prolog",
        r"^srun: (?:error: )?Prolog(?:Slurmctld)? failed, job killed",
        Sign.INTERRUPTED,
        "PROLOG FAILURE",
    ),
    _line(
        "CANCELLED AT",
        r"^(?:slurmstepd: )?error: \*\*\* (?:JOB|STEP) \S+ ON (?P<host>\S+) CANCELLED AT \S+(?: DUE TO TASK FAILURE)? \*\*\*$",
        Sign.INTERRUPTED,
        signal=int(signal.SIGTERM),
    ),
    *(
        _line(word, "^" + word, Sign.INTERRUPTED, signal=int(signal.SIGTERM))
        for word in _OF_STOP[1:]
    ),
    _line(
        "this job is ",  # submitit
        r"Caught signal (?P<name>SIG\w+) on \S+: this job is (?:preempted|timed-out)",
        Sign.INTERRUPTED,
    ),
    _line(
        ": error: ",
        r"^\S+: error: (?:unrecognized arguments|the following arguments are required|argument \S+):",
        by=ARGPARSE,
        code=2,
    ),
    _line(
        "death signal",
        rf"Received {_SIGNAL} death signal, shutting down workers",
        Sign.INTERRUPTED,
    ),
    _line(
        "got signal",
        rf"SignalException: Process \d+ got signal: {_SIGNAL}",
        Sign.INTERRUPTED,
    ),
    _line(
        "Watchdog caught",
        # Another process's text may be torn into the words.
        r"(?:\[Rank (?P<ranks>\d+)\] )?Watchdog caught collective operat.{0,200}?timeout: "
        r"WorkNCCL\(SeqNum=(?P<sequence>\d+), OpType=(?P<kind>\w+)"
        r"(?:, NumelIn=(?P<elements>\d+))?[^)]*\)[^)]*\) ran for (?P<ms>\d+) milliseconds",
        Sign.WATCHDOG,
    ),
    _line(  # the same, broken before it
        "WorkNCCL(",
        r"^WorkNCCL\(SeqNum=(?P<sequence>\d+), OpType=(?P<kind>\w+)(?:, NumelIn=(?P<elements>\d+))?"
        r"[^)]*\)[^)]*\) ran for (?P<ms>\d+) milliseconds",
        Sign.WATCHDOG,
    ),
    _line(
        "failed to connect to",
        r"client socket has failed to connect to \S{1,300} \(errno: \d+",
        Sign.UNREACHED,
    ),
    _line(
        "cannot be retrieved",
        r"network addresses of \(\S{1,300}, \d+\) cannot be retrieved \(gai error",
        Sign.UNREACHED,
    ),
    _line(
        "Invalid payload size",
        r"Error processing client message: Invalid payload size\. size: \d+, max: \d+",
        Sign.TOO_LARGE,
    ),
    _line("]: ", REPORTED, Sign.REPORTED),
    _line("can't open file", r"can't open file '.{1,400}': \[Errno 2\]", Sign.NOT_STARTED),
    _line("No module", r"^\S*python[\d.]*: No module named \S+$", Sign.NOT_STARTED),
    _line(
        "ing module spec",
        r"^\S*python[\d.]*: Error while finding module specification for '",
        Sign.NOT_STARTED,
    ),
    _line(  # Flux
        "start failed: ",
        r"\bstart failed: .{1,400}: (?:No such file or directory|Permission denied)$",
        Sign.NOT_STARTED,
    ),
    _line(
        "exec: ", r'exec: ".{1,400}": (?:executable file not|stat |permission)', Sign.NOT_STARTED
    ),
    _line(
        "execve()",
        r"^slurmstepd: error: execve\(\): .+: (?:No such file or directory|Permission denied|Exec format error)$",
        Sign.NOT_STARTED,
    ),
    *(_line(word, words, Sign.NOT_STARTED) for word, words in _NOT_RUN),
    *(_line(word, words, Sign.NOT_STARTED) for word, words, *_ in REFUSALS),
    # A script's shell names the process; one that a person types in pads the name to 24 columns
    # before the command, or has it alone.
    _line(
        "line ",
        rf"^\s{{0,8}}\S+: line \d+: +(?P<pid>\d+) (?P<name>{_NAMES})(?: \(core dumped\))?(?: +\S.*)?$",
        by="the shell",
    ),
    _line("", rf"^(?P<name>{_NAMES})(?: \(core dumped\)| *(?<=^.{{24}})\S.*)?$", by="the shell"),
)


def told_by(text: str, *, of_launcher: bool = False) -> Told | None:
    """Read a line that is known; None for others. `of_launcher`: a launcher raised it, whose
    command may be any.
    """
    for line in (_called(""), *_LINES) if of_launcher else _LINES:
        if line.word in text and (found := line.words.search(text)) is not None:
            return _told(line, found.groupdict())
    return None


OF_RANKS = frozenset(("torchrun", "DeepSpeed", "mp.spawn", "Composer", "Paddle"))
"""Those that tell of ends, and have started the ranks themselves."""
_ENDS_BY_LAUNCHER = ("torchrun", "srun", "mpirun", "DeepSpeed", "horovodrun", "Composer", "Paddle")


def by_launcher(text: str) -> bool:
    """Tell whether a launcher says in this line how a process that it had started ended."""
    told = told_by(text)
    return told is not None and getattr(told[1], "by", "") in _ENDS_BY_LAUNCHER


def _told(line: _Line, facts: dict[str, str | None]) -> Told:
    ranks = ranks_of(facts.get("ranks") or "")
    if line.sign is Sign.WATCHDOG:
        elements = int(facts["elements"] or -1)
        sequence, milliseconds = int(facts["sequence"] or 0), int(facts["ms"] or 0)
        call = Collective(sequence, facts["kind"] or "", elements, milliseconds=milliseconds)
        return line.sign, call, ranks
    if line.sign not in (Sign.ENDED, Sign.KILLED_FOR_MEMORY, Sign.INTERRUPTED):
        return line.sign, None, ()
    of_memory = line.sign is Sign.KILLED_FOR_MEMORY
    end = End(signal=int(signal.SIGKILL) if of_memory else line.signal, code=line.code)
    if code := facts.get("code") or facts.get("got"):
        end = exit_of(int(code))
        if end.code == _NTSTATUS_CONTROL_C:
            return Sign.INTERRUPTED, None, ()
    elif number := facts.get("signal"):
        end = End(signal=int(number))
    elif name := facts.get("name"):
        end = End(signal=SIGNALS.get(name) or int(getattr(signal, name, signal.SIGKILL)))
    rank = int(facts.get("rank") or (ranks[0] if len(ranks) == 1 else -1))
    end = msgspec.structs.replace(
        end,
        rank=rank,
        local_rank=int(facts.get("local") or -1),
        pid=int(facts.get("pid") or 0),
        host=facts.get("host") or "",
        by=facts.get("by") or line.by,
        first=line.first,
    )
    return line.sign, end, ranks


_EXCEPTION = re.compile(  # pytest puts an E before it
    r"^(?:E {3,12})?(?P<type>(?:[A-Za-z_]\w*\.)*_?(?:[A-Z]\w*(?:Error|Exception|Interrupt|Timeout)|Exception)): ?(?P<message>.+)$"
)
_OF_CONDA = re.compile(r"CondaError: Run 'conda |CommandNotFoundError: Your shell ")
"""What conda says in a script before the job, and the script goes on."""
_RESTARTS = re.compile(
    r"will restart worker group|^rallypoint: restarting (all \d+ ranks|the rank)"
)
_NCCL_WARNING = re.compile(r"NCCL WARN (?P<words>.+)$")
# A line that itself says that it is no failure, or that quotes: help texts, configuration, the
# source line in a traceback, a warning of Python's that is not of CUDA.
NO_FAILURE = re.compile(
    r"\b(raise|except|assert|warnings?\.warn|print|logger?\.\w+)\b ?[\w.(]*\(|\bIf you\b|--help"
    r"|:\d+: \w{0,40}Warning: (?!CUDA|Can't)|retry(ing)?\b|\bskip(ped|ping)?\b"
)
# A line that speaks of a failure plainly, whatever program wrote it. Not every "error": a metric
# has that name, and a number behind it.
_FAILURE = re.compile(
    r"\[error\]|\bmay be stuck\b|\b[Ee]rror(?: \(\d+\))?[:!](?! *[-+]?[\d.]+(?:\s|$))|\bERROR\b(?!S?: ?0\b)|\b(?:FATAL|CRITICAL|PANIC)\b"
    r"|\b\w{3,}(?:Error|Exception)(?::|$|\()|\bException\b"
    r"|\b(?:[Ff]atal|[Aa]borting|[Aa]borted|[Cc]rashed|[Ss]talled|unexpectedly|core dumped|BAD TERMINATION|segfault|[Ff]ailed)\b"
    r"|\b(?:FAILED|Evicted)\b|\b(?:Connection (?:refused|reset|closed)|Permission denied|No route to host|No such file or directory)\b"
    r"|\bcommand not found\b|\bMPI_ABORT was invoked\b|\b[Aa]n error occurred\b|\b[Uu]nhandled exception\b|\b[Ff]ailure: (?!0\b)|^Error executing job"
    r"|\b(?:[Jj]ob|[Pp]rocess|[Ww]orkers?|[Aa]ctor|[Nn]ode|[Rr]anks?|[Tt]asks?|[Cc]hild|[Ss]erver|[Ee]ngine|[Ss]tep|[Pp]od)\b.{0,60}"
    r"\b(?:died|dead|killed|terminated|lost|evicted)\b"
    r"|\b(?:[Kk]illed by|[Tt]imed out|[Uu]nable to|got stuck|shut down because|sending signal (?:TERM|KILL)|fallen off the bus|NVRM: Xid)\b"
    r"|\b(?:[Ee]xit(?:ed)?(?: with)?(?: (?:[Ee]xit )?(?:[Cc]ode|[Ss]tatus))|exitcode|EXIT CODE)\b ?[:=]? *-?(?!0\b)\d+"
    r"|\b[Ll]ost (?:communication|connection|contact) (?:with|to)\b|\bwill terminate the job\b"
    r"|\bThere are not enough slots\b"
    r"|non-zero (?:exit|status)|\bSIG(?:SEGV|ABRT|BUS|ILL|FPE|KILL)\b|\b(?:Reason|Status|reason|status): +(?:Error|Failed|OOMKilled)\b"
    r"|退出代码 ?-?[1-9]"
)
_QUIET_LEVELS = re.compile(
    r"^(?:\S{1,40} ){0,3}\[?(?:DEBUG|INFO|TRACE)\b|NCCL INFO|\[I\d* |^I\d{4} |(?<![\d.])0 (?:errors|failed|failures)\b"
    r"|[Nn]o (?:errors?|failures?)\b"
)
# What launchers say beside the facts: of the failure that they tell in another line.
_REMARKS = re.compile(
    r"^Primary job +terminated|^a non-zero exit code\. Per user|^mpirun detected|^Please (?:see|check|look)|CLEANING UP REMAINING"
    # What many programs say on their way that go well: TensorFlow beside torch, pip.
    r"|Unable to register cu\w+ (?:factory|plugin)|Could not load dynamic library|NUMA node read from SysFS|pip's dependency resolver"
)
LONGEST = 1500  # characters of a line that may be a message; what is longer is data


def exception(text: str) -> tuple[str, str] | None:
    """Part a line with the form of an exception's last into type and message."""
    if not _OF_CONDA.match(text) and (found := _EXCEPTION.match(text)) is not None:
        return found["type"], found["message"]
    at = text.find("Error(s) in loading state_dict for ")  # a logger had it in its own form
    return ("RuntimeError", text[at:]) if at >= 0 else None


def speaks_of_failure(text: str) -> bool:
    """Tell whether a line plainly says that something failed, though its words are not known here."""
    if (
        len(text) > LONGEST
        or _QUIET_LEVELS.search(text)
        or NO_FAILURE.search(text)
        or _REMARKS.search(text)
    ):
        return False
    return _FAILURE.search(text) is not None


def restarts(text: str) -> bool:
    """Tell whether a launcher says that it starts all ranks again."""
    return "estart" in text and _RESTARTS.search(text) is not None


def nccl_warning(text: str) -> str:
    """Read NCCL's own warning; "" when the line is none, or only a remark."""
    found = _NCCL_WARNING.search(text) if "NCCL WARN" in text else None
    remark = found is None or REMARKS.search(found["words"])
    return found["words"] if found is not None and not remark else ""


_MISSING = re.compile(
    r"can't open file '(?P<python>.{1,400})': (?P<errno>\[Errno 2\])"
    r"|python[\d.]*: (?:No module named |Error while finding module specification for ')(?P<module>[^\s']+)|exec: \"(?P<container>.{1,400}?)\": "
    r"|execvp error on file (?P<mpi>.{1,400}) \((?P<why>No such file or directory|Permission denied)\)"
    r"|(?:execve\(\)|start failed): (?P<slurm>.{1,400}): (?P<reason>No such file or directory|Permission denied"
    r"|Exec format error)"
)


def by_shell(text: str) -> bool:
    """Tell whether a shell, or a tool that runs another, says that a program did not start."""
    return any(word in text and re.search(words, text) for word, words in _NOT_RUN)


def starts_ranks(text: str) -> bool:
    """Tell whether the program that a shell does not find is one that starts ranks, or Python."""
    return re.fullmatch(_LAUNCHER_COMMAND, not_started(text)[0]) is not None


def not_started(text: str) -> tuple[str, int]:
    """Read the program that could not be started, and the errno."""
    found = next((one for _, words in _NOT_RUN if (one := re.search(words, text))), None)
    if found is not None:
        why = found.groupdict().get("why") or ""
        if "shared libraries" in text:
            return found["program"], errno.ELIBACC
        if "binary file" in text:
            return found["program"], errno.ENOEXEC
        return found["program"], errno.EACCES if "ermission" in why else errno.ENOENT
    found = _MISSING.search(text)
    if found is None:
        return "the program", errno.ENOENT
    why = found["why"] or found["reason"]
    number = {"Permission denied": errno.EACCES, "Exec format error": errno.ENOEXEC}
    program = next(filter(None, found.group("python", "module", "container", "mpi", "slurm")))
    return program, number.get(why, errno.ENOENT)


_MEMBER = re.compile(
    r"[Ii]nitializing (?:ddp|distributed): GLOBAL_RANK: (?P<rank>\d+), MEMBER: \d+/(?P<all>\d+)"
)


def member(text: str) -> tuple[int, int] | None:
    """Read the rank and the size of the group that a process of Lightning's says it has, before
    they meet; None for other lines.
    """
    found = _MEMBER.search(text) if "GLOBAL_RANK" in text else None
    return (int(found["rank"]), int(found["all"])) if found is not None else None


def of_slurms_stop(text: str) -> bool:
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
    return of_slurms_stop(text) and not re.search(r"DUE TO (?!TASK)|time limit", text)


def stalls(text: str) -> bool:
    """Tell whether Horovod begins to tell what stalls."""
    return (
        "tensors were submitted to be reduced, gathered or broadcasted by subset of ranks" in text
        or "Stalled ops:" in text
    )


def group_of(text: str) -> str:
    """Name the process group that NCCL's watchdog tells after a timeout: "0"; "" when it names
    none.
    """
    found = re.search(r"\[PG (?:ID )?(?P<id>\d+)(?: PG GUID (?P<guid>\w+))?", text)
    return (found["guid"] or found["id"]) if found is not None else ""


def speaking(text: str, speaker: Speaker) -> Speaker:
    """Name the rank that speaks, by its prefix or by what torch writes into the line; `speaker` if
    neither tells.
    """
    found = re.search(r"\[(?:PG [^\]]*?)?Rank (\d+)\]", text)
    return of_rank(int(found[1])) if found is not None and speaker.rank < 0 else speaker


_WRAPPERS = re.compile(
    r"(?:ChildFailedError|ProcessRaisedException|ProcessExitedException|RendezvousConnectionError|SignalException"
    r"|UnexpectedStatusException|ExecuteUserScriptError)$"  # SageMaker
)
# Where launchers raise CalledProcessError for what they started, a script or a tool around Python.
_RAISING = re.compile(
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
