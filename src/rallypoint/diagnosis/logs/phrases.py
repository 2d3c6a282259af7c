"""Single lines that tell of a failure: what each says. Only texts that were seen are listed; their sources are in tests/logs."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

from rallypoint.diagnosis import reading
from rallypoint.diagnosis.evidence import Raised
from rallypoint.diagnosis.logs.sightings import Collective, End, Sign
from rallypoint.diagnosis.logs.speakers import Speaker

Told = tuple[Sign, End | Collective | None, tuple[int, ...]]
"""What a line says: its kind, the facts in it, the ranks that it names."""


def ranks_of(listed: str) -> tuple[int, ...]:
    """`1-3,7` as Slurm writes ranks."""
    found: list[int] = []
    for part in listed.split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            found += range(int(low), min(int(high) if high.isdigit() else int(low), int(low) + 100_000) + 1)
    return tuple(found)


_BY_NAME = {
    "Killed": int(signal.SIGKILL),
    "Segmentation fault": int(signal.SIGSEGV),
    "Aborted": int(signal.SIGABRT),
    "Bus error": int(signal.SIGBUS),
    "Terminated": int(signal.SIGTERM),
    "Floating point exception": int(signal.SIGFPE),
    "Illegal instruction": int(signal.SIGILL),
}
_NAMES = "|".join(_BY_NAME)


def _exit(status: str) -> End:
    """`-9`, or 137 as shells say it."""
    code = int(status)
    if code < 0:
        return End(signal=-code)
    return End(signal=code - 128) if 128 < code <= 128 + 31 else End(code=code)


def _elastic(found: re.Match[str]) -> Told:
    end = _exit(found["status"])
    return Sign.ENDED, End(end.code, end.signal, local_rank=int(found["local"]), pid=int(found["pid"]), by="torchrun", first=True), ()


def _slurm_task(found: re.Match[str]) -> Told:
    ranks, how = ranks_of(found["ranks"]), found["how"]
    rank = ranks[0] if len(ranks) == 1 else -1
    if how == "Out Of Memory":
        return Sign.KILLED_FOR_MEMORY, End(signal=int(signal.SIGKILL), rank=rank, host=found["host"], by="srun"), ranks
    if found["code"]:
        end = _exit(found["code"])
        return Sign.ENDED, End(end.code, end.signal, rank, host=found["host"], by="srun"), ranks
    return Sign.ENDED, End(signal=_BY_NAME[found["signal"]], rank=rank, host=found["host"], by="srun"), ranks


def _of_memory(found: re.Match[str]) -> Told:
    return Sign.KILLED_FOR_MEMORY, End(signal=int(signal.SIGKILL), pid=int(found.groupdict().get("pid") or 0), by="the kernel"), ()


def _slurm_memory(found: re.Match[str]) -> Told:
    return Sign.KILLED_FOR_MEMORY, End(signal=int(signal.SIGKILL), by="slurmstepd"), ()


def _mpirun_signal(found: re.Match[str]) -> Told:
    rank = int(found["rank"])
    return Sign.ENDED, End(signal=int(found["signal"]), rank=rank, pid=int(found["pid"]), host=found["host"], by="mpirun", first=True), ()


def _mpirun_code(found: re.Match[str]) -> Told:
    return Sign.ENDED, End(code=int(found["code"]), rank=int(found["rank"]), by="mpirun", first=True), ()


def _killed_by_ray(found: re.Match[str]) -> Told:
    return Sign.KILLED_FOR_MEMORY, End(signal=int(signal.SIGKILL), by="Ray"), ()


def _mpi_handler(found: re.Match[str]) -> Told:
    return Sign.ENDED, End(signal=_BY_NAME[found["name"]], pid=int(found["pid"] or 0), by="Open MPI"), ()


def _named_signal(by: str) -> Callable[[re.Match[str]], Told]:
    def told(found: re.Match[str]) -> Told:
        number = int(getattr(signal, found["name"], signal.SIGKILL))
        group = found.groupdict().get("rank")
        return Sign.ENDED, End(signal=number, rank=int(group) if group else -1, by=by, first=True), ()

    return told


def _status(by: str) -> Callable[[re.Match[str]], Told]:
    def told(found: re.Match[str]) -> Told:
        end, group = _exit(found["code"]), found.groupdict().get("rank")
        return Sign.ENDED, End(end.code, end.signal, rank=int(group) if group else -1, by=by, first=True), ()

    return told


def _shell(found: re.Match[str]) -> Told:
    return Sign.ENDED, End(signal=_BY_NAME[found["name"]], pid=int(found.groupdict().get("pid") or 0), by="the shell"), ()


def _interrupted(found: re.Match[str]) -> Told:
    number = found.groupdict().get("signal")
    return Sign.INTERRUPTED, End(signal=int(number) if number else 0, by=found.groupdict().get("by") or ""), ()


def _watchdog(found: re.Match[str]) -> Told:
    elements = int(found["elements"]) if found["elements"] else -1
    return Sign.WATCHDOG, Collective(int(found["sequence"]), found["kind"], elements, milliseconds=int(found["ms"])), (int(found["rank"]),)


def _unreached(found: re.Match[str]) -> Told:
    return Sign.UNREACHED, None, ()


def _too_large(found: re.Match[str]) -> Told:
    return Sign.TOO_LARGE, None, ()


def _reported(found: re.Match[str]) -> Told:
    return Sign.REPORTED, None, ()


def _not_started(found: re.Match[str]) -> Told:
    return Sign.NOT_STARTED, None, ()


# The word that a line must hold before its pattern is tried: a search for a word is fifty times quicker than a pattern that fails.
_PATTERNS: tuple[tuple[str, re.Pattern[str], Callable[[re.Match[str]], Told]], ...] = tuple(
    (word, re.compile(pattern), told)
    for word, pattern, told in (
        ("exitcode", r"failed \(exitcode: (?P<status>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)", _elastic),
        ("oom", r"Detected \d+ oom[-_]kill event", _slurm_memory),
        (
            "ut of memory",
            r"Out of memory: Kill(?:ed)? process (?P<pid>\d+)|Memory cgroup out of memory: Kill(?:ed)? process \d+",
            _of_memory,
        ),
        ("memory pressure", r"\b[1-9]\d* Workers \(tasks / actors\) killed due to memory pressure \(OOM\)", _killed_by_ray),
        ("Signal: ", rf"^(?:\[(?:\S+:)?(?P<pid>\d+)\] )?Signal: (?P<name>{_NAMES}) \(\d+\)$", _mpi_handler),
        ("OOMKilled", r"\bOOMKilled\b", _of_memory),
        (
            "srun: error",
            r"srun: error: (?P<host>\S+): tasks? (?P<ranks>[\d,\[\]-]+): "
            rf"(?P<how>Out Of Memory|Exited with exit code (?P<code>\d+)|(?P<signal>{_NAMES}))",
            _slurm_task,
        ),
        (
            "exited on signal",
            r"(?:mpirun|mpiexec|prterun)\S* noticed that process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node (?P<host>\S+) "
            r"exited on signal (?P<signal>\d+)",
            _mpirun_signal,
        ),
        ("return code", r"exits with return code = (?P<code>-?\d+)", _status("DeepSpeed")),
        ("died with", r"died with <Signals\.(?P<name>SIG\w+): \d+>", _named_signal("the launcher")),
        ("exit status", r"CalledProcessError: .* returned non-zero exit status (?P<code>-?\d+)", _status("the launcher")),
        ("terminated with", r"process (?P<rank>\d+) terminated with signal (?P<name>SIG\w+)", _named_signal("mp.spawn")),
        ("terminated with", r"process (?P<rank>\d+) terminated with exit code (?P<code>\d+)", _status("mp.spawn")),
        ("exit code", r"Process finished with exit code (?P<code>\d+)", _status("PyCharm")),
        ("DUE TO", r"CANCELLED AT \S+ DUE TO (?P<by>TIME LIMIT|PREEMPTION|NODE FAILURE|\w[\w ]*?) \*\*\*", _interrupted),
        ("death signal", r"Received (?P<signal>\d+) death signal, shutting down workers", _interrupted),
        ("got signal", r"SignalException: Process \d+ got signal: (?P<signal>\d+)", _interrupted),
        (
            "Watchdog caught",
            r"\[Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<sequence>\d+), OpType=(?P<kind>\w+)"
            r"(?:, NumelIn=(?P<elements>\d+))?[^)]*\)[^)]*\) ran for (?P<ms>\d+) milliseconds",
            _watchdog,
        ),
        ("failed to connect to", r"client socket has failed to connect to \[?(?P<where>\S+?)\]?:?\d* \(errno: (?P<errno>\d+)", _unreached),
        ("cannot be retrieved", r"network addresses of \((?P<where>\S+), \d+\) cannot be retrieved \(gai error", _unreached),
        ("Invalid payload size", r"Error processing client message: Invalid payload size\. size: \d+, max: \d+", _too_large),
        ("]: ", r"^(?:error|stopped)\[[a-z]+(?:-[a-z]+)+\]: \S", _reported),
        ("can't open file", r"can't open file '(?P<file>.+)': \[Errno 2\]", _not_started),
        # A script's shell names the process; one that a person types in pads the name to 24 columns before the command, or has it alone.
        ("line ", rf"^\S+: line \d+: +(?P<pid>\d+) (?P<name>{_NAMES})(?: \(core dumped\))?(?:  +\S.*)?$", _shell),
        ("", rf"^(?P<name>{_NAMES})(?: \(core dumped\)| *(?<=^.{{24}})\S.*)?$", _shell),
    )
)


def told_by(text: str) -> Told | None:
    """What a line says, when it is one of those that are known; None otherwise."""
    for word, pattern, told in _PATTERNS:
        if word in text and (found := pattern.search(text)) is not None:
            return told(found)
    return None


_EXCEPTION = re.compile(r"^`?(?P<type>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Timeout)): ?(?P<message>.+)$")
_RESTARTS = re.compile(r"will restart worker group|^rallypoint: restarting (all \d+ ranks|the rank)")
_NCCL_WARNING = re.compile(r"NCCL WARN (?P<words>.+)$")
# A line that itself says that it is no failure, or that quotes: help texts, configuration, the source line in a traceback.
_NO_FAILURE = re.compile(
    r"\b(raise|except|assert|warnings?\.warn|print|logger?\.\w+)\b ?[\w.(]*\(|\bIf you\b|--help|retry(ing)?\b|\bskip(ped|ping)?\b"
)
_SHORT = 1500  # characters of a line that may be a message; what is longer is data


def exception(text: str) -> tuple[str, str] | None:
    """Type and message of a line with the form of an exception's last line."""
    found = _EXCEPTION.match(text)
    return (found["type"], found["message"]) if found is not None else None


def recognised(text: str) -> bool:
    """Whether a line without an exception's form has one of the texts that name a cause by themselves."""
    if len(text) > _SHORT or _NO_FAILURE.search(text):
        return False
    return reading.names_cause(text)


def restarts(text: str) -> bool:
    """Whether a launcher says that it starts all ranks again."""
    return "estart" in text and _RESTARTS.search(text) is not None


def nccl_warning(text: str) -> str:
    """The words of NCCL's own warning; "" when the line is none."""
    found = _NCCL_WARNING.search(text) if "NCCL WARN" in text else None
    return found["words"] if found is not None else ""


def unreached(text: str) -> tuple[str, int]:
    """Where a connection did not come about, and its errno; 0: the name has no address."""
    found = re.search(r"failed to connect to (?P<where>\S+) \(errno: (?P<errno>\d+)", text)
    if found is not None:
        return found["where"].replace("[::ffff:", "[").replace("[", "").replace("]", ""), int(found["errno"])
    found = re.search(r"addresses of \((?P<host>[^,]+), (?P<port>\d+)\)", text)
    return (f"{found['host']}:{found['port']}", 0) if found is not None else ("", -1)


def too_large(text: str) -> tuple[int, int]:
    """The bytes of a value that torch's store refused, and the most that it takes."""
    found = re.search(r"size: (\d+), max: (\d+)", text)
    return (int(found[1]), int(found[2])) if found is not None else (0, 0)


def group_of(text: str) -> str:
    """The process group that NCCL's watchdog names after a timeout: "0"; "" when it names none."""
    found = re.search(r"\[PG (?:ID )?(?P<id>\d+)(?: PG GUID (?P<guid>\w+))?", text)
    return (found["guid"] or found["id"]) if found is not None else ""


def spoken_rank(text: str, speaker: Speaker) -> int:
    """The rank that speaks, by its prefix or by what torch writes into the line; -1 if neither tells."""
    if speaker.rank >= 0:
        return speaker.rank
    found = re.search(r"\[(?:PG [^\]]*?)?Rank (\d+)\]", text)
    return int(found.group(1)) if found is not None else -1


_WRAPPERS = re.compile(
    r"(?:ChildFailedError|CalledProcessError|ProcessRaisedException|ProcessExitedException|RendezvousConnectionError|SignalException)$"
)


def of_launcher(kind: str) -> bool:
    """Whether an exception only hands on that a process failed, or that the launcher was stopped."""
    return bool(_WRAPPERS.search(kind))


def says_why(error: Raised) -> bool:
    """Whether an exception has a text that names a cause, or tells of another rank: then what was raised from it says less."""
    return reading.names_cause(error.message) or reading.meaning(error.type, error.message, error.call) is not reading.Meaning.OWN
