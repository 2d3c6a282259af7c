"""Another program's log to evidence: what the words of torch, gloo, NCCL and Python mean.

Only phrases that were seen are listed (torch 2.7 to 2.13, gloo, NCCL's documented texts). What matches none is the rank's own affair:
an exception that mentions no lost peer is a better candidate for the cause than one that does.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Sequence
from enum import Enum

import msgspec

from rallypoint.diagnosis.evidence import Frame, Raised


class Meaning(Enum):
    """What an exception's text says about the other ranks."""

    OWN = "own"  # says nothing about a peer
    LOST = "lost"  # a connection of torch's to a peer, or to its store, broke
    WAITED = "waited"  # the others, or the store, did not come within the time limit
    MAYBE_LOST = "maybe"  # a bare ConnectionError, BrokenPipeError, EOFError: perhaps a peer, perhaps a database


# Texts that only torch's own transports write. They count wherever they occur.
_LOST = re.compile(
    r"This is typically caused by a remote worker"
    r"|pair\.cc:\d+\].{0,160}(closed|reset|refused|error|Broken pipe)"
    r"|Application timeout caused pair closure|recvValue failed|recvVector failed|sendBytes failed"
    r"|Failed to recv, got 0 bytes|Did the remote server shutdown or crash|server has shut down too early"
    r"|remote process exit|ncclRemoteError|Connection closed by (remote peer|peer \[|localRank)"
    r"|NCCL communicator was aborted|(^|Error: )Socket Timeout",
    re.IGNORECASE,
)
# gloo checks what arrives: "[enforce fail at .../gloo/transport/tcp/pair.cc:456] ... 500 vs 252". That is no lost connection.
_OWN = re.compile(r"enforce fail at|EnforceNotMet")
_WAITED = re.compile(
    r"Timed out waiting \d+ ?ms|Timed out after \d+ seconds waiting for clients|wait timeout after \d+ ?ms"
    r"|The client socket has (timed out|failed to connect)|Watchdog caught collective operation timeout"
    r"|collective operation timeout|failed to pass monitoredBarrier|\.cc:\d+\].{0,160}(timed out connecting|Connect timeout)"
    r"|Timed out initializing process group in store based barrier"
    r"|Timed out in synchronization|connect\(\) timed out\. Original|Timeout waiting for key"
    r"|\b(TCP|File|Hash|Prefix)Store\b.{0,300}timed? ?out",
    re.IGNORECASE,
)
# Texts that others write too: they count when a torch call was left by them, or the type is torch's.
_LOST_IN_TORCH = re.compile(
    r"Connection (reset|refused|closed|aborted)|Broken pipe|EOF|Interrupted system call|Transport endpoint|socketProgress|NET/Socket"
    r"|Software caused connection abort|ncclSystemError",
    re.IGNORECASE,
)
_WAITED_IN_TORCH = re.compile(r"tim(ed|e) ?out", re.IGNORECASE)
_TORCH_TYPES = ("DistNetworkError", "DistStoreError", "DistBackendError", "DistError", "C10dError")
_BARE_TYPES = ("ConnectionError", "ConnectionResetError", "ConnectionAbortedError", "ConnectionRefusedError", "BrokenPipeError", "EOFError")
_BARE = re.compile(
    r"Connection (reset|closed|aborted|refused)|Broken pipe|Socket Timeout|failed to connect to all addresses", re.IGNORECASE
)

# Errors of our own store, by code, that mostly come of what another rank did or did not do, and what a report says of them.
# The store's other codes (a value too large, a wrong secret) are the affair of the rank that shows them.
AFTER_ANOTHER = {
    "wait-timeout": "waited for a key until the timeout",
    "store-timeout": "got no answer from the store",
    "store-closed": "lost the store",
    "store-silent": "got no answer from the store",
    "port-refused": "found no store",
    "once-failed": "got the error of another rank's function from once",
    "barrier-timeout": "waited at a barrier until the timeout",
    "barrier-broken": "waited at a barrier that broke",
}
# Errors of our own store that all who met get at once, in the same words: together they are one cause.
SAID_TO_ALL = frozenset(("average-mismatch", "barrier-broken", "barrier-size"))
_EXPLAIN = re.compile(r"\brallypoint explain ([a-z]+(?:-[a-z]+)+)\s*$")  # the last line that Python shows of an error of ours

_PORT_IN_USE = re.compile(r"EADDRINUSE|address already in use|errno: 98\b|\[Errno 98\]|but another process is utilizing it", re.IGNORECASE)
_PORT = re.compile(
    r"\bport[:= ]+`?(\d{1,5})\b"  # torch; accelerate quotes the number
    r"|\('[^']*', (\d{1,5})[,)]"  # socket.create_server, asyncio
    r"|:(\d{2,5})\b(?=[^\d]*(?:EADDRINUSE|address already in use))",  # gRPC, uvicorn and others
    re.IGNORECASE,
)

_GPU_MEMORY = re.compile(
    r"(CUDA|HIP|XPU) out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure (\d+ )?'out of memory'", re.IGNORECASE
)
_HOST_MEMORY = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|Cannot allocate memory|\[Errno 12\]|std::bad_alloc"
    r"|^Unable to allocate [\d.]+ \wi?B for an array|\[WinError 1455\]|The paging file is too small",
    re.IGNORECASE,
)
_WANTED = re.compile(r"you tried to allocate (\d+) bytes|unable to mmap (\d+) bytes")
_WANTED_BY_NUMPY = re.compile(r"^Unable to allocate ([\d.]+) ([KMGTPE])iB for an array")
_SHARED_MEMORY = re.compile(
    r"unable to (allocate|mmap|open|resize) shared memory|insufficient shared memory|killed by signal: Bus error"
    r"|(posix_fallocate failed|failed to extend /dev/shm/).{0,300}No space left on device",  # NCCL
    re.IGNORECASE,
)
_DEVICE_MISSING = re.compile(
    r"invalid device ordinal|No CUDA GPUs are available|Torch not compiled with CUDA enabled|Found no NVIDIA driver"
    r"|no attribute '_cuda_|Distributed package doesn't have NCCL built in|no CUDA-capable device is detected"
    r"|No HIP GPUs are available|ProcessGroupNCCL is only supported with GPUs"
    r"|^Invalid device id$"  # torch.nn.DataParallel
    r"|You requested gpus?: \[[\d, ]*\]\s+But your machine only has: "  # Lightning
    r"|mixed precision requires a (GPU|CUDA)\b|can only be used on CUDA (or \w+ )?devices",  # accelerate, transformers
    re.IGNORECASE,
)
_DEVICE_BUSY = re.compile(r"CUDA-capable device(\(s\) is/are|s are) busy or unavailable", re.IGNORECASE)
_DEVICE_SHARED = re.compile(r"Duplicate GPU detected", re.IGNORECASE)
_CUDA_INIT_FAILED = re.compile(
    r"CUDA unknown error|driver on your system is too old|CUDA driver initialization failed|driver version is insufficient"
    r"|CUDA error: (initialization error|system not yet initialized|system has unsupported display driver|unknown error)"
    r"|cuda runtime error \(3\) ?: initialization error"  # before torch 1.5
    r"|Unexpected error from cudaGetDeviceCount|forward compatibility was attempted on non supported HW"
    r"|libcudart functions unavailable",
    re.IGNORECASE,
)
_GROUP_TWICE = re.compile(r"trying to initialize the default process group twice")
_SIZES_DIFFER = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_NOT_AT_BARRIER = re.compile(r"\[Rank 0\]: Ranks? ([\d, ]+) failed to pass monitoredBarrier")
_CUDA_FORKED = re.compile(r"Cannot re-initialize CUDA in forked subprocess|can't create new processes if CUDA is already initialized")
_CUDA_NOT_STARTED = re.compile(r"(CUDA error|cuda runtime error \(3\)) ?: initialization error", re.IGNORECASE)
_WORKERS_LOOP = re.compile(r"(^|/)torch/utils/data/(_utils/worker|dataloader)\.py$")
_MASTER_ENV = re.compile(r"environment variable (\w+) expected, but not set")
_GROUP_MISSING = re.compile(r"Default process group (has not been|is not) initialized", re.IGNORECASE)
_PARAMETERS_UNUSED = re.compile(r"Expected to have finished reduction in the prior iteration")
_KERNEL_FAILED = re.compile(
    r"device-side assert triggered|an illegal memory access was encountered"
    r"|(CUDA|HIP) error: (misaligned address|unspecified launch failure|uncorrectable ECC error)"
    r"|Memory access fault by GPU node-\d+"  # ROCm
    r"|\.cu:\d+: .{0,300}Assertion `.{0,300}` ?failed|cuda runtime error \((59|77|700|710)\)",
    re.IGNORECASE,
)
_NCCL_FAILED = re.compile(r"NCCL [Ee]rror|\bnccl(SystemError|InternalError|UnhandledCudaError|InvalidUsage|InvalidArgument|RemoteError)\b")
_NCCL_NAMES_PEER = re.compile(
    r"remote process exit|ncclRemoteError|closed by|Connection (refused|reset)|socketProgress|Broken pipe|communicator was aborted"
)
_LOADER_KILLED = re.compile(r"DataLoader worker \(pid\(?s?\)? ?(\d+)\) is killed by signal: ([A-Z][\w/ ]+?)\.?(?:$| \(|\. )", re.MULTILINE)
_LOADER_GONE = re.compile(r"DataLoader worker \(pid\(?s?\)? ?(\d[\d, ]*)\) exited unexpectedly")
# strsignal(3)'s words, in which torch tells how a worker of a DataLoader ended.
_SIGNALS = {
    "Hangup": 1, "Interrupt": 2, "Quit": 3, "Illegal instruction": 4, "Trace/breakpoint trap": 5, "Aborted": 6, "Bus error": 7,
    "Floating point exception": 8, "Killed": 9, "User defined signal 1": 10, "Segmentation fault": 11, "User defined signal 2": 12,
    "Broken pipe": 13, "Alarm clock": 14, "Terminated": 15, "CPU time limit exceeded": 24, "File size limit exceeded": 25,
    "Bad system call": 31,
}  # fmt: skip
_FORBIDDEN_PORT = re.compile(r"(?:bind|listen)\b.{0,160}(?:errno: 13\b|EACCES|Permission denied)", re.IGNORECASE | re.DOTALL)


def _short(kind: str) -> str:
    return kind.rpartition(".")[2]


def meaning(kind: str, message: str, call: str = "") -> Meaning:
    """What an exception of type `kind` with this message says about the other ranks; `call` is the torch call that it left."""
    short = _short(kind)
    if nccl_gave_up(kind, message):
        return Meaning.LOST
    if store_waits(message) is not None:
        return Meaning.OWN
    if _OWN.search(message) or port_in_use(message) or group_twice(message) or about_devices(kind, message):
        return Meaning.OWN
    if _WAITED.search(message):
        return Meaning.LOST if "refused" in message else Meaning.WAITED
    if _LOST.search(message):
        return Meaning.LOST
    if call or short in _TORCH_TYPES:
        if _LOST_IN_TORCH.search(message):
            return Meaning.LOST
        if _WAITED_IN_TORCH.search(message):
            return Meaning.WAITED
    if (short in _BARE_TYPES or _BARE.search(message)) and not no_input(kind, message):
        return Meaning.MAYBE_LOST
    return Meaning.OWN


_LOST_WORDS = re.compile(
    r"Connection (closed|reset|refused|aborted) by (remote )?peer|Connection (refused|reset|closed|aborted)|Broken pipe|Socket Timeout"
    r"|Failed to recv, got 0 bytes|Application timeout caused pair closure|remote process exit\w*|communicator was aborted"
    r"|Timed out waiting \d+ ?ms|Timed out after \d+ seconds waiting for clients|wait timeout after \d+ ?ms|has timed out after \d+ ?ms"
    r"|Connect timeout",
    re.IGNORECASE,
)


def in_short(error: Raised) -> str:
    """A consequence in a few words, "all_reduce: Connection closed by peer"; torch's own texts fill three lines."""
    found = _LOST_WORDS.search(error.message) if meaning(error.type, error.message, error.call) is not Meaning.OWN else None
    words = found.group(0) if found else f"{error.type}: {error.message}".partition("\n")[0]
    if nccl_gave_up(error.type, error.message):
        words = f"NCCL: {nccl_words(error.message)}"
    return f"{error.call}: {words}" if error.call else words


def says_lost(lines: Sequence[str]) -> bool:
    """True when a rank's last words contain a text that only a broken connection of torch's leaves."""
    return any(_LOST.search(line) and not _OWN.search(line) for line in lines)


def says_waited(lines: Sequence[str]) -> bool:
    """True when a rank's last words say that torch gave up waiting."""
    return any(_WAITED.search(line) for line in lines)


def port_in_use(message: str) -> bool:
    """True for EADDRINUSE in any of torch's and Python's spellings."""
    return bool(_PORT_IN_USE.search(message))


def port_named(message: str) -> int:
    """The port that such a message names; 0 if none."""
    found = _PORT.search(message)
    return int(next(filter(None, found.groups()))) if found else 0


def out_of_memory(kind: str, message: str) -> str:
    """ "GPU", "host" or "shared" when the exception says that this memory ran out; "" otherwise."""
    if kind.startswith("ray.") and _short(kind) == "OutOfMemoryError":
        return "host"
    if _short(kind) == "OutOfMemoryError" or _GPU_MEMORY.search(message):
        return "GPU"
    if _SHARED_MEMORY.search(message):
        return "shared"
    if _short(kind) == "MemoryError" or _HOST_MEMORY.search(message):
        return "host"
    return ""


def memory_wanted(message: str) -> int:
    """The bytes that an allocation of the host's memory was refused; 0 when the message has no number."""
    if (found := _WANTED.search(message)) is not None:
        return int(found[1] or found[2])
    found = _WANTED_BY_NUMPY.search(message)
    return int(float(found[1]) * (1 << 10 * (" KMGTPE".index(found[2])))) if found is not None else 0


def device_missing(message: str) -> bool:
    """True when torch says that an accelerator, or its support for one, is not there."""
    return bool(_DEVICE_MISSING.search(message))


def is_nccl(backend: str) -> bool:
    """Whether NCCL serves CUDA tensors in a group with this backend; "" is torch's default, which has it."""
    asked = backend.lower()
    return not asked or asked == "nccl" or "cuda:nccl" in asked


def device_busy(message: str) -> bool:
    """True when CUDA says that another process has the GPU for itself."""
    return bool(_DEVICE_BUSY.search(message))


def device_shared(message: str) -> bool:
    """True when NCCL says that two of its ranks have the same GPU."""
    return bool(_DEVICE_SHARED.search(message))


def cuda_init_failed(message: str) -> bool:
    """True when there may be a GPU, and CUDA could not be started on it."""
    return bool(_CUDA_INIT_FAILED.search(message))


def about_devices(kind: str, message: str) -> bool:
    """True for every error that a look at this machine's GPUs may explain."""
    asked = (device_missing, device_busy, device_shared, cuda_init_failed)
    return any(one(message) for one in asked) or out_of_memory(kind, message) == "GPU"


def no_input(kind: str, message: str) -> bool:
    """True when `input()` found the end of standard input."""
    return _short(kind) == "EOFError" and message == "EOF when reading a line"


def group_twice(message: str) -> bool:
    """True when init_process_group says that there is a default group already."""
    return bool(_GROUP_TWICE.search(message))


def sizes_differ(message: str) -> tuple[int, int] | None:
    """The bytes that a peer sent in a collective, and the fewer that gloo had room for; None when the message does not say so."""
    found = _SIZES_DIFFER.search(message)
    return (int(found[1]), int(found[2])) if found is not None else None


def not_at_barrier(message: str) -> tuple[int, ...]:
    """The ranks that `monitored_barrier` waited for in vain, by the word of its rank 0."""
    found = _NOT_AT_BARRIER.search(message)
    return tuple(int(number) for number in re.findall(r"\d+", found[1])) if found is not None else ()


_ARRIVED = re.compile(r"\barrived \((?P<who>.*?)\)(?:, missing: |, \d+ (?:is|are) missing|$)")
_RANKS = re.compile(r"\branks? (\d+(?:-\d+)?(?:(?:, | and )\d+(?:-\d+)?)*)")


def came_to_barrier(message: str) -> frozenset[int]:
    """The ranks that an error of our own barrier names as those who came, as far as it names them."""
    found = _ARRIVED.search(message)
    came: set[int] = set()
    for named in _RANKS.findall(found.group("who") if found is not None else ""):
        for part in re.findall(r"\d+(?:-\d+)?", named):
            first, _, last = part.partition("-")
            came.update(range(int(first), int(last or first) + 1))
    return frozenset(came)


_CAME_SHORT = re.compile(
    r"store based barrier on rank.{0,300}\(world_size=(?P<all>\d+), worker_count=(?P<came>\d+),"
    r"|waiting for (?:clients|workers)\. (?P<clients>\d+)/(?P<of>\d+) (?:clients|workers) joined"
)


def came_short(message: str) -> tuple[int, int] | None:
    """How many ranks torch's store had heard of at the timeout, and how many it waited for; None when no fewer came, or it is not said."""
    found = _CAME_SHORT.search(message)
    if found is None:
        return None
    came, every = int(found["came"] or found["clients"]), int(found["all"] or found["of"])
    return (came, every) if came < every else None


PROCESSES_MOST = 65_536
"""Processes that a job may have. A store that waits for more was given a number of bytes, or of something else."""


def store_waits(message: str) -> tuple[int, int] | None:
    """How many processes came to a TCPStore, and how many it waits for, where no job has so many; None for other messages."""
    counted = came_short(message)
    return counted if counted is not None and counted[1] >= PROCESSES_MOST else None


_PARAMETER_MISSING = re.compile(r"(?:using (?P<scheme>\w+):// rendezvous: )?\b(?P<name>rank|world[ _]size) parameter missing")


def parameter_missing(message: str) -> tuple[str, str]:
    """What init_process_group lacks beside its init_method ("rank" or "world_size"), and the scheme; ("", "") for other messages."""
    found = _PARAMETER_MISSING.search(message)
    return (found["name"].replace(" ", "_"), found["scheme"] or "tcp") if found is not None else ("", "")


_CALLS_DIFFER = re.compile(
    r"Detected mismatch between collectives on ranks\. Rank (\d+) is running collective: .*?OpType=(\w+).*?"
    r"\bRank (\d+) is running collective: .*?OpType=(\w+)",
    re.DOTALL,
)


def calls_differ(message: str) -> tuple[tuple[int, str], tuple[int, str]] | None:
    """Two ranks and the collectives that they were in, by the word of TORCH_DISTRIBUTED_DEBUG=DETAIL; None for any other message."""
    found = _CALLS_DIFFER.search(message)
    return ((int(found[1]), found[2]), (int(found[3]), found[4])) if found is not None else None


_UNGUARDED = re.compile(
    r"An attempt has been made to start a new process before the\s+current process has finished its bootstrapping phase"
)


def main_unguarded(message: str) -> bool:
    """True when multiprocessing refuses to start a process while the main module is imported in one."""
    return bool(_UNGUARDED.search(message))


_KEYS = re.compile(r"wait timeout after \d+ ?ms, keys: (?P<keys>[^\n]+)")
_ADDRESS_KEY = re.compile(r"/default_pg/\d+//\w+//\d+/(\d+)")
_KEY_OF_TORCH = re.compile(r"//\w+//|barrier_key|^/?(default_pg/)?[\d/]*$|worker_count|^init/|ncclUniqueId")


def not_met(message: str) -> int:
    """The rank whose address gloo waited for in vain: each rank leaves its own under its number; -1 when the message does not say so."""
    found = _ADDRESS_KEY.fullmatch(keys_waited_for(message))
    return int(found[1]) if found is not None else -1


def keys_waited_for(message: str) -> str:
    """The keys of torch's store that were waited for in vain, in torch's own words; "" when the message does not say so."""
    found = _KEYS.search(message)
    return found["keys"].strip() if found is not None else ""


def keys_of_program(message: str) -> tuple[str, ...]:
    """The same as the program called them; () for torch's keys, or none. Of several, one at least was not set."""
    waited_for = keys_waited_for(message)
    if not waited_for or _KEY_OF_TORCH.search(waited_for):
        return ()
    return tuple(re.sub(r"^/(default_pg/\d+//)?", "", key) for key in waited_for.split(", "))  # "/" stands before all of torch's store


def cuda_forked(message: str) -> bool:
    """True when CUDA was up in the process that forked this one."""
    return bool(_CUDA_FORKED.search(message))


def cuda_after_fork(error: Raised) -> bool:
    """True when torch says the same, or CUDA: "initialization error" is its word for it in a worker of a DataLoader, which is forked."""
    if cuda_forked(error.message):
        return True
    worker = any(_WORKERS_LOOP.search(frame.file) and frame.function == "_worker_loop" for frame in error.frames)
    return bool(_CUDA_NOT_STARTED.search(error.message)) and (worker or "_worker_loop" in error.message)


_IN_CHILD = re.compile(r"(^|/)multiprocessing/process\.py$")
_SPAWNED = re.compile(r"(^|/)multiprocessing/(spawn|forkserver|popen_spawn\w*)\.py$|^[A-Za-z]:[/\\]")


def cuda_perhaps_after_fork(error: Raised) -> bool:
    """True when CUDA says "initialization error" in a process of `multiprocessing` that nothing shows to have been started anew."""
    child = any(_IN_CHILD.search(frame.file) for frame in error.frames)
    anew = any(_SPAWNED.search(frame.file) for frame in error.frames)
    return bool(_CUDA_NOT_STARTED.search(error.message)) and child and not anew


_SHARED_FILES = re.compile(r"(^|/)multiprocessing/(synchronize|heap|shared_memory)\.py$")


def shared_memory_full(error: Raised) -> bool:
    """True when `multiprocessing` found no room for a semaphore or a block of memory: both are files in /dev/shm."""
    full = error.errno == errno.ENOSPC or "[Errno 28]" in error.message
    return full and bool(error.frames) and bool(_SHARED_FILES.search(error.frames[-1].file))


def group_missing(message: str) -> bool:
    """True when a call of torch.distributed found no default group in its process."""
    return bool(_GROUP_MISSING.search(message))


def parameters_unused(message: str) -> bool:
    """True when DDP says that parameters of the model took no part in the last loss."""
    return bool(_PARAMETERS_UNUSED.search(message))


def kernel_failed(message: str) -> bool:
    """True when a CUDA kernel failed by what it was given: an assertion in it, or an address that is not its."""
    return bool(_KERNEL_FAILED.search(message))


def nccl_failed(message: str) -> bool:
    """True for an error that NCCL itself returned; a timeout that torch's watchdog noticed is none."""
    return bool(_NCCL_FAILED.search(message))


def port_forbidden(message: str) -> bool:
    """True when the kernel refused a port to an unprivileged user."""
    return bool(_FORBIDDEN_PORT.search(message))


def nccl_gave_up(kind: str, message: str) -> bool:
    """True for an error of NCCL's that carries no cause with a name of its own: mostly all ranks have it, whatever was wrong in one."""
    return nccl_failed(message) and not (device_shared(message) or out_of_memory(kind, message) or kernel_failed(message))


def nccl_names_peer(message: str) -> bool:
    """True when NCCL says that it lost another rank: the cause is there, or between the two."""
    return bool(_NCCL_NAMES_PEER.search(message))


def nccl_words(message: str) -> str:
    """NCCL's own last words in a message of torch's, or its first line."""
    _, told, after = message.partition("Last error:\n")
    return next((line.strip() for line in (after if told else message).splitlines() if line.strip()), "")


def loader_killed(error: Raised) -> tuple[int, int] | None:
    """The pid of a worker of a DataLoader and the signal that ended it; None when the error does not say so. The rank is told by a
    signal of its own; when it was waiting for that worker torch says less, and the rest stands in what that was raised from."""
    found = _LOADER_KILLED.search(error.message)
    if found is None and _LOADER_GONE.search(error.message):
        found = _LOADER_KILLED.search(error.traceback)
    return (int(found[1]), _SIGNALS[found[2]]) if found is not None and found[2] in _SIGNALS else None


def says_loader_killed(lines: Sequence[str]) -> tuple[int, int] | None:
    """The same from a rank's last words: a batch that was being taken fails first, in whatever way, and torch says why a moment later."""
    found = next((found for line in lines if (found := _LOADER_KILLED.search(line)) is not None), None)
    return (int(found[1]), _SIGNALS[found[2]]) if found is not None and found[2] in _SIGNALS else None


def loader_gone(message: str) -> tuple[int, ...]:
    """The pids of workers of a DataLoader of which torch says no more than that they have ended; none when it does not speak of any."""
    found = _LOADER_GONE.search(message)
    return tuple(int(pid) for pid in found[1].split(",") if pid.strip()) if found is not None else ()


def names_cause(message: str) -> bool:
    """True when a message has, whatever stands around it, a text that only one cause leaves."""
    asked = (port_in_use, port_forbidden, group_twice, group_missing, parameters_unused, cuda_forked, kernel_failed, nccl_failed)
    found = any(one(message) for one in asked) or about_devices("", message)
    return found or bool(
        variable_missing(message)
        or out_of_memory("", message)
        or _LOADER_KILLED.search(message)
        or sizes_differ(message)
        or calls_differ(message)
        or store_waits(message)
    )


_PRODUCER_GONE = re.compile(r"[Uu]nable to open shared memory object </torch_\S{1,300}>.{0,300}No such file or directory")
_REBUILDING = re.compile(r"/multiprocessing/(reductions|resource_sharer)\.py$")
_FILES_EXHAUSTED = re.compile(r"Too many open files|\[Errno 2[34]\]|received 0 items of ancdata")
_NOT_PICKLED = re.compile(r"[Cc]an't pickle|[Cc]annot pickle|Can't get local object|not picklable")
_STARTING = re.compile(r"/multiprocessing/(popen_\w+|process)\.py$")
_IN_PROCESS = re.compile(r"^-- Process (\d+) terminated with the following error:$", re.MULTILINE)


def producer_gone(error: Raised) -> bool:
    """True when a tensor was to be taken from a process that serves it no longer: `multiprocessing` asks the one that sent it."""
    kinds = ("ConnectionRefusedError", "ConnectionResetError", "FileNotFoundError", "EOFError", "BrokenPipeError")
    if _PRODUCER_GONE.search(error.message):
        return True
    return _short(error.type) in kinds and any(_REBUILDING.search(frame.file) for frame in error.frames)


def files_exhausted(error: Raised) -> bool:
    """True when a process had no descriptor left. The kernel drops those that come in a message then: "0 items of ancdata"."""
    return bool(_FILES_EXHAUSTED.search(error.message)) or error.errno in (errno.EMFILE, errno.ENFILE)


def says_files_exhausted(line: str) -> bool:
    """True for a line of a log that says the same, perhaps of another process of the rank's."""
    return bool(_FILES_EXHAUSTED.search(line))


def not_pickled(error: Raised) -> bool:
    """True when what a new process of `multiprocessing` was to get cannot be pickled."""
    return bool(_NOT_PICKLED.search(error.message)) and any(_STARTING.search(frame.file) for frame in error.frames)


def in_process(error: Raised) -> tuple[str, Raised] | None:
    """The number of a process that `mp.spawn` had started, and what it raised there; None for any other error."""
    found = _IN_PROCESS.search(error.message)
    inner = exception_in(error.message[found.end() :].rstrip().splitlines()) if found is not None else None
    return (found[1], msgspec.structs.replace(inner, at=error.at, call=error.call)) if found is not None and inner is not None else None


_INTERFACE_MISSING = re.compile(r"Unable to find address for: (\S+)")


def interface_missing(message: str) -> str:
    """The network interface that gloo was told to use and that is not there, or has no address; "" if none."""
    found = _INTERFACE_MISSING.search(message)
    return found.group(1) if found else ""


_DIRECTLY = "\nThe above exception was the direct cause of the following exception:\n"


def wrapped(error: Raised) -> Raised | None:
    """Of an exception that was raised `from` another the first of those, as the traceback shows it; None for any other."""
    before, joint, _ = error.traceback.partition(_DIRECTLY)
    inner = exception_in(before.rstrip().splitlines()) if joint else None
    return msgspec.structs.replace(inner, at=error.at) if inner is not None else None


_IN_LOADER = re.compile(r"^Caught \w+ in DataLoader worker process (\d+)\.\s*Original Traceback", re.MULTILINE)


def in_loader(message: str) -> tuple[str, str]:
    """The number of a DataLoader's worker and the line that names what it raised, "ValueError: bad image"; ("", "") for another message."""
    found = _IN_LOADER.search(message)
    lines = [line for line in message[found.end() :].splitlines() if _EXCEPTION.match(line)] if found is not None else []
    return (found[1], lines[-1]) if found is not None and lines else ("", "")


def from_loader(error: Raised) -> Raised | None:
    """What a DataLoader's worker raised, with its frames: torch puts the worker's traceback into the message. None for any other error."""
    found = _IN_LOADER.search(error.message)
    if found is None:
        return None
    return exception_in([_TRACEBACK, *error.message[found.end() :].partition("\n")[2].rstrip().splitlines()])


def variable_missing(message: str) -> str:
    """The environment variable that init_process_group missed; "" if none."""
    found = _MASTER_ENV.search(message)
    return found.group(1) if found else ""


AFTER_END = 12  # lines that may follow the last traceback: what threads and atexit still say, and the notes of an error of ours

_TRACEBACK = "Traceback (most recent call last):"
_RANK = re.compile(r"^\[rank\d+\]: ?")  # torch's own excepthook puts it before each line once there is a group
_DURING = "During handling of the above exception, another exception occurred:"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+)(?:, in (?P<function>.*))?$')
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")


def exception_in(lines: Sequence[str]) -> Raised | None:
    """The exception that a Python traceback at the end of a log tells of; None when the log does not end in one.

    Of exceptions raised while another was handled it is the first one, as for `RankEvidence.raised`.
    """
    lines = [_RANK.sub("", line) for line in lines]
    starts = [i for i, line in enumerate(lines) if line == _TRACEBACK]
    found: Raised | None = None
    last = len(lines)
    for start in reversed(starts):
        block = _block(lines, start)
        if block is None:
            break
        raised, end = block
        after = lines[end:last]
        if found is None and any(line.strip() for line in after[AFTER_END:]):
            return None  # it went on for long after that traceback: the traceback is not its end
        found, last = _with_code(raised, after), start
        if not any(line == _DURING for line in lines[max(start - 2, 0) : start]):
            break
    return found


def went_on(lines: Sequence[str]) -> bool:
    """Whether something was written after the last traceback: then it may have been shown of an error that was handled."""
    lines = [_RANK.sub("", line) for line in lines]
    start = max((i for i, line in enumerate(lines) if line == _TRACEBACK), default=-1)
    block = _block(lines, start) if start >= 0 else None
    return block is not None and any(line.strip() for line in lines[block[1] :])


def _with_code(error: Raised, after: Sequence[str]) -> Raised:
    """An error of ours with the code that stands in its notes, which Python prints below it."""
    if not error.type.startswith("rallypoint.errors."):
        return error
    code = next((found.group(1) for line in after if (found := _EXPLAIN.search(line))), "")
    return msgspec.structs.replace(error, code=code)


def _block(lines: Sequence[str], start: int) -> tuple[Raised, int] | None:
    frames: list[Frame] = []
    for at in range(start + 1, len(lines)):
        line = lines[at]
        if (frame := _FRAME.match(line)) is not None:
            source = lines[at + 1].strip() if at + 1 < len(lines) and lines[at + 1].startswith("    ") else ""
            frames.append(Frame(frame.group("file"), int(frame.group("line")), frame.group("function") or "", source))
        elif line and not line.startswith(" "):
            told = _EXCEPTION.match(line)
            if told is None:
                return None
            shown = "\n".join(lines[start : at + 1])
            return Raised(told.group("type"), told.group("message") or "", tuple(frames), shown), at + 1
    return None


ERROR_FILE_MOST = 32_000
"""Characters of one text in an error file that are read, as many as a rank's own words have: an assertion may show a whole list."""


def _cut(text: str) -> str:
    if len(text) <= ERROR_FILE_MOST:
        return text
    half = ERROR_FILE_MOST // 2
    return f"{text[:half]}\n[... {len(text) - ERROR_FILE_MOST} characters left out ...]\n{text[-half:]}"


def error_file(text: str) -> Raised | None:
    """The exception in the file that `torch.distributed.elastic`'s `@record` writes; None when it is not such a file.

    `{"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "..."}}}`, or `message` a string.
    """
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: thousands of brackets
        return None
    message = told.get("message") if isinstance(told, dict) else None
    extra: object = None
    if isinstance(message, dict):
        extra, message = message.get("extraInfo"), message.get("message")
    if not isinstance(message, str) or not message:
        return None
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    message, traceback = _cut(message), _cut(stack.rstrip("\n") if isinstance(stack, str) else message)
    from_stack = exception_in(traceback.splitlines())
    kind, colon, rest = message.partition(": ")
    if colon and re.fullmatch(r"[A-Za-z_][\w.]*", kind):
        return Raised(kind, rest, from_stack.frames if from_stack else (), traceback)
    return from_stack or Raised("Exception", message, (), traceback)
