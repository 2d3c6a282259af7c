"""Single lines that tell of a failure: what each says. Only texts that were seen are listed; their sources are in tests/logs."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence

from rallypoint.diagnosis import reading
from rallypoint.diagnosis.evidence import Raised
from rallypoint.diagnosis.logs.sightings import Collective, End, Sighting, Sign
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


# Windows has no signals: a crash leaves an NTSTATUS as exit code, which some show as a negative number.
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


def _exit(status: str) -> End:
    """`-9`, 137 as shells say it, or -1073741819 as Windows does."""
    code = int(status)
    of_windows = code & 0xFFFFFFFF
    if of_windows in _NTSTATUS:
        number, words = _NTSTATUS[of_windows]
        return End(signal=number, status=f"0x{of_windows:X} ({words})")
    if of_windows >> 28 == 0xC:
        return End(code=of_windows, status=f"0x{of_windows:X}")
    if code < 0:
        return End(signal=-code)
    return End(signal=code - 128) if 128 < code <= 128 + 31 else End(code=code)


def _elastic(found: re.Match[str]) -> Told:
    end = _exit(found["status"])
    told = End(end.code, end.signal, local_rank=int(found["local"]), pid=int(found["pid"]), by="torchrun", first=True, status=end.status)
    return Sign.ENDED, told, ()


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
        if end.code == _NTSTATUS_CONTROL_C:
            return Sign.INTERRUPTED, None, ()
        return Sign.ENDED, End(end.code, end.signal, rank=int(group) if group else -1, by=by, first=True, status=end.status), ()

    return told


def _shell(found: re.Match[str]) -> Told:
    return Sign.ENDED, End(signal=_BY_NAME[found["name"]], pid=int(found.groupdict().get("pid") or 0), by="the shell"), ()


def _interrupted(found: re.Match[str]) -> Told:
    number = found.groupdict().get("signal")
    return Sign.INTERRUPTED, End(signal=int(number) if number else 0, by=found.groupdict().get("by") or ""), ()


def _over_time(found: re.Match[str]) -> Told:
    return Sign.INTERRUPTED, End(by="TIME LIMIT"), ()


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
            r"(?:mpirun|mpiexec|prterun)\S{0,100} noticed that process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node (?P<host>\S+) "
            r"exited on signal (?P<signal>\d+)",
            _mpirun_signal,
        ),
        ("return code", r"exits with return code = (?P<code>-?\d+)", _status("DeepSpeed")),
        ("died with", r"died with <Signals\.(?P<name>SIG\w+): \d+>", _named_signal("the launcher")),
        ("exit status", r"CalledProcessError: .{0,4000} returned non-zero exit status (?P<code>-?\d+)", _status("the launcher")),
        ("terminated with", r"process (?P<rank>\d+) terminated with signal (?P<name>SIG\w+)", _named_signal("mp.spawn")),
        ("terminated with", r"process (?P<rank>\d+) terminated with exit code (?P<code>\d+)", _status("mp.spawn")),
        ("exit code", r"Process finished with exit code (?P<code>-?\d+)", _status("PyCharm")),
        ("walltime", r"^=>> PBS: job killed: walltime \d+ exceeded limit", _over_time),
        ("RUNLIMIT", r"^TERM_RUNLIMIT: job killed after reaching LSF run time limit", _over_time),
        ("MPI_Abort(", r"application called MPI_Abort\(\S+, (?P<code>-?\d+)\) - process (?P<rank>\d+)", _status("MPI")),
        ("execvp error", r"execvp error on file (?P<file>.{1,400}) \((?:No such file or directory|Permission denied)\)", _not_started),
        ("received by PID", r"^\*\*\* (?P<name>SIG\w+) .*received by PID (?P<pid>\d+)", _named_signal("the process itself")),
        ("control-C", r"^forrtl: error \(200\): program aborting due to control-C event", _interrupted),
        ("DUE TO", r"CANCELLED AT \S+ DUE TO (?P<by>TIME LIMIT|PREEMPTION|NODE FAILURE|\w[\w ]*?) \*\*\*", _interrupted),
        ("death signal", r"Received (?P<signal>\d+) death signal, shutting down workers", _interrupted),
        ("got signal", r"SignalException: Process \d+ got signal: (?P<signal>\d+)", _interrupted),
        (
            "Watchdog caught",
            # Another process's text may be torn into the words.
            r"\[Rank (?P<rank>\d+)\] Watchdog caught collective operat.{0,200}?timeout: "
            r"WorkNCCL\(SeqNum=(?P<sequence>\d+), OpType=(?P<kind>\w+)"
            r"(?:, NumelIn=(?P<elements>\d+))?[^)]*\)[^)]*\) ran for (?P<ms>\d+) milliseconds",
            _watchdog,
        ),
        ("failed to connect to", r"client socket has failed to connect to (?P<where>\S{1,300}) \(errno: (?P<errno>\d+)", _unreached),
        ("cannot be retrieved", r"network addresses of \((?P<where>\S{1,300}), \d+\) cannot be retrieved \(gai error", _unreached),
        ("Invalid payload size", r"Error processing client message: Invalid payload size\. size: \d+, max: \d+", _too_large),
        ("]: ", r"^(?:error|stopped)\[[a-z]+(?:-[a-z]+)+\]: \S", _reported),
        ("can't open file", r"can't open file '(?P<file>.{1,400})': \[Errno 2\]", _not_started),
        (
            "execve()",
            r"^slurmstepd: error: execve\(\): (?P<file>.+): (?P<why>No such file or directory|Permission denied|Exec format error)$",
            _not_started,
        ),
        # A script's shell names the process; one that a person types in pads the name to 24 columns before the command, or has it alone.
        ("line ", rf"^\S+: line \d+: +(?P<pid>\d+) (?P<name>{_NAMES})(?: \(core dumped\))?(?:  +\S.*)?$", _shell),
        ("", rf"^(?P<name>{_NAMES})(?: \(core dumped\)| *(?<=^.{{24}})\S.*)?$", _shell),
    )
)


def exit_of(code: int) -> End:
    """How a process ended, by the number that its launcher gives."""
    return _exit(str(code))


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
# A line that speaks of a failure plainly, whatever program wrote it. Not every "error": a metric has that name, and a number behind it.
_FAILURE = re.compile(
    r"\b[Ee]rror(?: \(\d+\))?[:!](?! *[-+]?[\d.]+(?:\s|$))|\bERROR\b(?!S?: ?0\b)|\b(?:FATAL|CRITICAL|PANIC)\b"
    r"|\b\w{3,}(?:Error|Exception)(?::|$|\()|\bException\b"
    r"|\b(?:[Ff]atal|[Aa]borting|[Aa]borted|[Cc]rashed|[Ss]talled|unexpectedly|core dumped|BAD TERMINATION|segfault|[Ff]ailed)\b"
    r"|\b(?:FAILED|Evicted)\b|\b(?:Connection (?:refused|reset|closed)|Permission denied|No route to host|No such file or directory)\b"
    r"|\bcommand not found\b|\bMPI_ABORT was invoked\b"
    r"|\b(?:[Jj]ob|[Pp]rocess|[Ww]orkers?|[Aa]ctor|[Nn]ode|[Rr]anks?|[Tt]asks?|[Cc]hild|[Ss]erver|[Ee]ngine|[Ss]tep|[Pp]od)\b.{0,60}"
    r"\b(?:died|dead|killed|terminated|lost|evicted)\b"
    r"|\b(?:[Kk]illed by|[Tt]imed out|[Uu]nable to|got stuck|shut down because|sending signal (?:TERM|KILL)|fallen off the bus|NVRM: Xid)\b"
    r"|\b(?:[Ee]xit(?:ed)?(?: with)?(?: (?:[Ee]xit )?(?:[Cc]ode|[Ss]tatus))|exitcode|EXIT CODE)\b ?[:=]? *-?(?!0\b)\d+"
    r"|\b[Ll]ost (?:communication|connection|contact) (?:with|to)\b|\bwill terminate the job\b"
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
_SHORT = 1500  # characters of a line that may be a message; what is longer is data


def exception(text: str) -> tuple[str, str] | None:
    """Type and message of a line with the form of an exception's last line."""
    found = _EXCEPTION.match(text)
    return (found["type"], found["message"]) if found is not None else None


def recognised(text: str) -> bool:
    """Whether a line without an exception's form has one of the texts that name a cause by themselves."""
    if len(text) > _SHORT or _NO_FAILURE.search(text):
        return False
    return reading.names_cause(text) or _SSH.search(text) is not None


def speaks_of_failure(text: str) -> bool:
    """Whether a line plainly says that something failed, though nobody here knows what its words mean."""
    if len(text) > _SHORT or _QUIET_LEVELS.search(text) or _NO_FAILURE.search(text) or _REMARKS.search(text):
        return False
    return _FAILURE.search(text) is not None


def restarts(text: str) -> bool:
    """Whether a launcher says that it starts all ranks again."""
    return "estart" in text and _RESTARTS.search(text) is not None


def nccl_warning(text: str) -> str:
    """The words of NCCL's own warning; "" when the line is none."""
    found = _NCCL_WARNING.search(text) if "NCCL WARN" in text else None
    return found["words"] if found is not None else ""


def unreached(text: str) -> tuple[str, int]:
    """Where a connection did not come about, and its errno; 0: the name has no address."""
    found = re.search(r"failed to connect to (?P<where>\S{1,300}) \(errno: (?P<errno>\d+)", text)
    if found is not None:
        return found["where"].replace("[::ffff:", "[").replace("[", "").replace("]", ""), int(found["errno"])
    found = re.search(r"addresses of \((?P<host>[^,]{1,300}), (?P<port>\d+)\)", text)
    return (f"{found['host']}:{found['port']}", 0) if found is not None else ("", -1)


def not_started(text: str) -> tuple[str, str]:
    """The program that could not be started, and why; whoever tells it."""
    found = re.search(r"can't open file '(.{1,400})': \[Errno 2\]", text)
    if found is not None:
        return found[1], "there is no such file"
    found = re.search(r"execvp error on file (.{1,400}) \((No such file or directory|Permission denied)\)", text) or re.search(
        r"execve\(\): (.{1,400}): (No such file or directory|Permission denied|Exec format error)", text
    )
    reasons = {"Permission denied": "it is not executable", "Exec format error": "it is no program for this machine"}
    return (found[1], reasons.get(found[2], "there is no such file")) if found is not None else ("the program", "there is no such file")


_UNRESOLVED = re.compile(
    r"\bhost not found: |Name or service not known|Temporary failure in name resolution|nodename nor servname|getaddrinfo failed"
)
_NO_HOST = re.compile(r"\bhost(?:name)? ['\"]?(?P<host>[\w-]+(?:\.[\w-]+)+)['\"]?[: ]")


def unresolved(error: Raised) -> bool:
    """Whether init_process_group, or torch's store, says that the host of the meeting point has no address."""
    return bool(_UNRESOLVED.search(error.message)) and (error.call != "" or error.message.startswith("host not found"))


_MEMBER = re.compile(r"[Ii]nitializing (?:ddp|distributed): GLOBAL_RANK: (?P<rank>\d+), MEMBER: \d+/(?P<all>\d+)")


def member(text: str) -> tuple[int, int] | None:
    """The rank and the size of the group that a process of Lightning's says it has, before they meet; None for other lines."""
    found = _MEMBER.search(text) if "GLOBAL_RANK" in text else None
    return (int(found["rank"]), int(found["all"])) if found is not None else None


_SSH = re.compile(r"^(?:.{0,60}: )?ssh: Could not resolve hostname (?P<host>\S+): ")


def ssh_host(text: str) -> str:
    """The host that ssh found no address for; "" for other lines."""
    found = _SSH.search(text)
    return found["host"] if found is not None else ""


_SYMBOL = re.compile(r"(?P<library>(?<![^\s:])[^\s:]{0,400}\.so[.\d]{0,40}): undefined symbol: (?P<symbol>\w+)")
_TORCHS_LIBRARY = re.compile(r"/torch/lib/|/nvidia/\w+/lib/|(^|/)lib(torch|c10)\w*\.so|/torch/_C\.")
_TORCHS_SYMBOL = re.compile(r"^_Z\w*?(2at\d|3c10|5torch)|^THP|^aoti_torch")


def symbol_missing(error: Raised) -> tuple[str, str, bool] | None:
    """A library, the symbol that it misses, and whether the library is torch's own: then what it was built with is another version.
    In an extension for torch, it is torch itself. None where neither is torch's, for who then differs from whom is open."""
    found = _SYMBOL.search(error.message)
    if found is None:
        return None
    library, symbol = found["library"], found["symbol"]
    if _TORCHS_LIBRARY.search(library):
        return library, symbol, True
    return (library, symbol, False) if _TORCHS_SYMBOL.search(symbol) else None


def url_lacks(error: Raised) -> str:
    """What the URL that was given to init_process_group lacks: "host", "port", "path"; "" for any other error."""
    found = re.search(r"^Error initializing torch\.distributed using (?:tcp|file):// rendezvous: (port|path)\b", error.message)
    if found is not None:
        return found[1]
    inner = error.frames[-1] if error.frames else None
    asserted = inner is not None and inner.file.endswith("torch/distributed/rendezvous.py") and inner.function == "_tcp_rendezvous_handler"
    return "host" if asserted and inner is not None and inner.source == "assert result.hostname is not None" else ""


def address_cut(message: str) -> tuple[int, int] | None:
    """The bytes of one of gloo's addresses, and those of the piece that it was handed for one; None for other messages."""
    found = re.search(r"gloo/transport/tcp/address\.cc:\d+\] sizeof\(impl_\) == bytes\.size\(\)\. (\d+) vs (\d+)", message)
    return (int(found[1]), int(found[2])) if found is not None else None


def npu_busy(message: str) -> bool:
    """Whether Ascend's driver says that an earlier job may still have the device."""
    return (
        re.search(r"EJ0001: .*Failed to initialize the HCCP process\. Reason: Maybe the last training process is running", message)
        is not None
    )


def host_of(errors: Sequence[Sighting]) -> str:
    """The host that could not be resolved, as `host:port`, when a message names it; "" when none does, as in torch 1.x."""
    found = next((found for s in errors if s.error is not None and (found := _NO_HOST.search(s.error.message))), None)
    return found["host"] if found is not None else ""


_MODELS_DIFFER = re.compile(
    r"DDP expects same model across all ranks, but Rank (\d+) has (\d+) params, while rank (\d+) has inconsistent (\d+) params"
)


def models_differ(message: str) -> tuple[int, int, int, int] | None:
    """Two ranks and how many parameters each has, by the word of DDP: rank, number, the other rank, its number."""
    found = _MODELS_DIFFER.search(message)
    return (int(found[1]), int(found[2]), int(found[3]), int(found[4])) if found is not None else None


def mismatched(words: str) -> tuple[int, ...] | None:
    """The ranks that NCCL names where it sees collectives that do not match; () when it names none, None for other words of its."""
    if "NET/IB" in words and "collective mismatch error" in words:
        return ()
    if "Mismatched collective detected" not in words:
        return None
    found = re.search(r"at and around rank (\d+)", words)
    return (int(found[1]),) if found is not None else ()


def scheme_unknown(message: str) -> str:
    """The scheme of a URL given to init_process_group for which torch has no code; "" for other messages."""
    found = re.search(r"No rendezvous handler for (\w+)://", message)
    return found[1] if found is not None else ""


def of_slurms_stop(text: str) -> bool:
    """Whether Slurm says that a step or a job was cancelled, and not why: it does so for whoever asked, also for a task that failed."""
    return "CANCELLED AT" in text or "Job step aborted" in text


def stalls(text: str) -> bool:
    """Whether Horovod begins to tell what stalls."""
    return "tensors were submitted to be reduced, gathered or broadcasted by subset of ranks" in text or "Stalled ops:" in text


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
