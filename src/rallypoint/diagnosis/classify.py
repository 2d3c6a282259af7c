"""What kind of failure something is: an exception by its words and frames, then a rank by all that
it shows. Pure.

Live jobs and logs ask here and nowhere else. The words themselves are in `error_patterns/`, a table
for each origin.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable
from enum import Enum

from rallypoint.diagnosis.error_patterns import failure_words, gloo, launchers, nccl, python, torch
from rallypoint.diagnosis.evidence import Raised
from rallypoint.diagnosis.pattern import Pattern

# --- the cause that an exception names
# -------------------------------------------------------------------------------

_TABLES = (python.CAUSES, torch.CAUSES, nccl.CAUSES, gloo.CAUSES, launchers.CAUSES)
_WORDS = {
    cause: tuple(table[cause] for table in _TABLES if cause in table)
    for table in _TABLES
    for cause in table
}


NCCL_WARNING = "NCCL WARN"
"""The type under which a log's evidence has NCCL's own warnings, which are no exceptions."""


def says(cause: str, text: str) -> re.Match[str] | None:
    """Find the text that only this cause leaves; None where it is not."""
    tried = (pattern.search(text) for pattern in _WORDS.get(cause, ()))
    return next((found for found in tried if found is not None), None)


def words_of(cause: str, error: Raised) -> re.Match[str]:
    """Return the text of this cause in an exception that was recognised by it."""
    found = says(cause, error.message)
    assert found is not None, cause
    return found


def _short(kind: str) -> str:
    return kind.rpartition(".")[2]


_REBUILDING = Pattern(r"/multiprocessing/(reductions|resource_sharer)\.py$")
_STARTING = Pattern(r"/multiprocessing/(popen_\w+|process)\.py$")
_SHARED_FILES = Pattern(r"(^|/)multiprocessing/(synchronize|heap|shared_memory)\.py$")
_LOADER = Pattern(r"(^|/)torch/utils/data/dataloader\.py$")
_WORKERS_LOOP = Pattern(r"(^|/)torch/utils/data/(_utils/worker|dataloader)\.py$")
_UNPICKLERS = Pattern(r"(^|/)(torch/_weights_only_unpickler|pickle)\.py$")
_PIPES = Pattern(r"(^|/)(multiprocessing|asyncio)/")
_OF_VLLM = Pattern(r"(^|/)vllm/")
_STARTING_CUDA = Pattern(r"(^|/)torch/cuda/__init__\.py$")
# the second in what mp.spawn shows of a child, however it was started
_IN_CHILD = Pattern(r"(^|/)(multiprocessing/process|torch/multiprocessing/spawn)\.py$")
_SPAWNED = Pattern(
    r"(^|(?<!torch)/)multiprocessing/(spawn|forkserver|popen_spawn\w*)\.py$|^[A-Za-z]:[/\\]"
)


def _through(error: Raised, files: Pattern) -> bool:
    return any(files.search(frame.file) for frame in error.frames)


_PRODUCERS_ERRORS = (
    "ConnectionRefusedError", "ConnectionResetError", "FileNotFoundError", "EOFError",
    "BrokenPipeError",
)  # fmt: skip


def _producer_gone(error: Raised) -> bool:
    """Tell whether a tensor was to be taken from a process that serves it no longer."""
    taking = _short(error.type) in _PRODUCERS_ERRORS and _through(error, _REBUILDING)
    return taking or bool(torch.PRODUCER_GONE.search(error.message))


def _cuda_forked(error: Raised) -> bool:
    """Tell whether CUDA was used after a fork. Its "initialization error" means that in a worker of
    a DataLoader, which is forked.
    """
    loop = "_worker_loop" in error.message or any(
        frame.function == "_worker_loop" and _WORKERS_LOOP.search(frame.file)
        for frame in error.frames
    )
    return loop and bool(torch.CUDA_NOT_STARTED.search(error.message))


def _cuda_perhaps_forked(error: Raised) -> bool:
    """Tell whether CUDA could not be started in a child of `multiprocessing` that nothing shows to
    have been spawned, or in C++: a forked child that frees a tensor of its parent.
    """
    not_started = torch.CUDA_NOT_STARTED.search(error.message) is not None
    in_child = _through(error, _IN_CHILD) and not _through(error, _SPAWNED)
    return not_started and (in_child or error.type.startswith("c10::"))


def _cuda_unknown_at_start(error: Raised) -> bool:
    """Tell whether CUDA failed with "unknown error" while it was started: any later call may fail
    so, too.
    """
    starting = (
        frame.function != "synchronize"
        for frame in error.frames
        if _STARTING_CUDA.search(frame.file)
    )
    return re.search(torch.CUDA_UNKNOWN, error.message) is not None and any(starting)


def _file_ended(error: Raised) -> bool:
    """Tell whether a file ended that was unpickled, and no pipe to a process. The function that
    called the unpickler tells it: others of `multiprocessing` stand above all that a child does.
    """
    files = [frame.file for frame in error.frames]
    readers = [file for file in files if not _UNPICKLERS.search(file)]
    words = "Ran out of input" if files[-1:] == readers[-1:] else ""
    return bool(readers) and not _PIPES.search(readers[-1]) and error.message == words


def _of_ray(error: Raised) -> bool:
    return error.type.startswith("ray.")


def _refused(error: Raised) -> bool:
    return _short(error.type) == "OutOfMemoryError"


_SAVING = Pattern(r"(^|/)torch/serialization\.py$")


def write_failed(error: Raised) -> bool:
    """Tell whether `torch.save` could not write, in words that do not say why."""
    of_stream = "iostream error" in error.message and _through(error, _SAVING)
    return of_stream or torch.WRITE_FAILED.search(error.message) is not None


_BY_MORE_THAN_WORDS: dict[str, Callable[[Raised], object]] = {
    "producer-gone": _producer_gone,
    "loader-killed": lambda error: loader_killed(error) and not is_out_of_memory(error),
    "pool-broken": lambda error: (
        _short(error.type) in ("BrokenProcessPool", "TerminatedWorkerError")
        or python.POOL_BROKEN.search(error.message)
    ),
    "files-exhausted": lambda error: error.errno in (errno.EMFILE, errno.ENFILE),
    "not-pickled": lambda error: (
        python.NOT_PICKLED.search(error.message) and _through(error, _STARTING)
    ),
    "url-incomplete": lambda error: url_lacks(error),
    "store-waits": lambda error: store_waits(error.message),
    "port-in-use": lambda error: error.errno == errno.EADDRINUSE,
    "gpu-memory": lambda error: _refused(error) and not _of_ray(error),
    "shared-memory": lambda error: semaphores_full(error),
    "host-memory": lambda error: (
        _short(error.type) == "MemoryError" or (_refused(error) and _of_ray(error))
    ),
    "cuda-forked": _cuda_forked,
    "cuda-perhaps-forked": _cuda_perhaps_forked,
    "cuda-init-failed": _cuda_unknown_at_start,
    # init_process_group, or torch's store, says that the host of the meeting point has no address.
    "host-unresolved": lambda error: (
        (error.call or error.message.startswith("host not found"))
        and python.UNRESOLVED.search(error.message)
    ),
    "library-differs": lambda error: symbol_missing(error),
    "disk-full": write_failed,
    "nccl-failed": lambda error: error.type == NCCL_WARNING or nccl_gave_up(error),
    "no-input": lambda error: (
        _short(error.type) == "EOFError" and error.message == "EOF when reading a line"
    ),
}
"""What names a cause beside the words, or instead of them."""

CAUSES = (
    "library-differs", "url-incomplete", "address-cut", "npu-busy", "producer-gone", "loader-killed", "pool-broken",
    "files-exhausted", "main-unguarded", "not-pickled", "variable-missing", "parameter-missing",
    "scheme-unknown", "store-waits", "group-twice", "port-in-use", "host-unresolved",
    "ssh-unresolved", "ssh-failed", "gpu-memory", "shared-memory", "host-memory", "device-shared", "cuda-forked",
    "cuda-perhaps-forked", "device-busy", "device-missing", "cuda-init-failed",
    "gpu-not-built-for", "port-forbidden", "group-missing", "parameters-unused", "models-differ", "kernel-failed", "interface-missing",
    "rank-out-of-range",
    "calls-differ", "calls-mismatched", "nccl-failed", "sizes-differ", "no-input",
    "disk-full",
)  # fmt: skip
"""The causes that an exception can name, the more special ones first."""


def fits(cause: str, error: Raised) -> bool:
    """Tell whether an exception names this cause."""
    by_more = _BY_MORE_THAN_WORDS.get(cause)
    if by_more is not None and by_more(error):
        return True
    return cause not in _NOT_BY_WORDS and says(cause, error.message) is not None


# A text alone is not enough for these: other causes leave it, too.
_NOT_BY_WORDS = ("loader-killed", "nccl-failed")


def cause_of(error: Raised) -> str:
    """Name the cause that an exception tells by itself; "" where its words are the
    program's own.
    """
    return next((cause for cause in CAUSES if fits(cause, error)), "")


_ALONE = (
    "port-in-use", "port-forbidden", "group-twice", "group-missing", "parameters-unused",
    "cuda-forked", "kernel-failed", "device-missing", "device-busy", "device-shared",
    "cuda-init-failed", "gpu-not-built-for", "gpu-memory", "variable-missing", "shared-memory", "host-memory",
    "loader-killed", "sizes-differ", "calls-differ", "models-differ", "calls-mismatched", "main-unguarded",
    "interface-missing", "rank-out-of-range",
)  # fmt: skip


def names_cause(message: str) -> bool:
    """Tell whether a message names a cause, whatever stands around it."""
    return store_waits(message) or any(says(cause, message) for cause in (*_ALONE, "nccl-failed"))


def recognised(line: str) -> bool:
    """Tell whether a line that has not the form of an exception names a cause."""
    if len(line) > failure_words.LONGEST or failure_words.NO_FAILURE.search(line):
        return False
    by_ssh = says("ssh-unresolved", line) or says("ssh-failed", line)
    known = by_ssh or _symbol_in(line) or python.NO_FILES.search(line)
    return names_cause(line) or bool(known)


def says_why(error: Raised) -> bool:
    """Tell whether an exception names a cause or speaks of another rank: what was raised from it
    says less.
    """
    named = names_cause(error.message) or fits("disk-full", error)
    return named or meaning(error) is not Meaning.OWN


DEVICE_CAUSES = ("device-missing", "device-busy", "device-shared", "cuda-init-failed", "gpu-memory")


def about_devices(error: Raised) -> bool:
    """Tell whether a look at this machine's GPUs may explain an error."""
    return any(fits(cause, error) for cause in DEVICE_CAUSES)


def memory_of(error: Raised) -> str:
    """Name the memory that ran out: "GPU", "host", "shared"; "" for any other error."""
    if _refused(error) and _of_ray(error):
        return "host"
    kinds = {"gpu-memory": "GPU", "shared-memory": "shared", "host-memory": "host"}
    return next((kind for cause, kind in kinds.items() if fits(cause, error)), "")


# --- facts in an exception's words
# -----------------------------------------------------------------------------------

PROCESSES_MOST = 65_536
"""Processes that a job may have; a store that waits for more was given a number of bytes, or of
something else.
"""

_ARRIVED = Pattern(r"\barrived \((?P<who>.*?)\)(?:, missing: |, \d+ (?:is|are) missing|$)")
_RANKS = Pattern(r"\branks? (\d+(?:-\d+)?(?:(?:, | and )\d+(?:-\d+)?)*)")


def nccl_gave_up(error: Raised) -> bool:
    """Tell an error of NCCL's without a cause that has a name: mostly all ranks have it, whatever
    was wrong in one.
    """
    if says("nccl-failed", error.message) is None:
        return False
    named = says("device-shared", error.message) or says("kernel-failed", error.message)
    return named is None and not is_out_of_memory(error)


def nccl_names_peer(message: str) -> bool:
    """Tell whether NCCL says that it lost another rank: the cause is there, or between the two."""
    return bool(nccl.NAMES_PEER.search(message))


def nccl_words(message: str) -> str:
    """Return NCCL's own last words in a message of torch's, or the message's first line."""
    _, told, after = message.partition("Last error:\n")
    lines = (after if told else message).splitlines()
    return next(filter(None, map(str.strip, lines)), "")


def is_nccl(backend: str) -> bool:
    """Tell whether NCCL serves CUDA tensors in a group with this backend; "" is torch's default,
    which has it.
    """
    asked = backend.lower()
    return not asked or asked == "nccl" or "cuda:nccl" in asked


def loader_killed(error: Raised) -> tuple[int, int] | None:
    """Return the pid of a DataLoader's worker and the signal that ended it; None when the error
    does not say so.

    The rank is told by a signal of its own. When it was waiting for that worker torch says less,
    and the rest stands in what that was raised from.
    """
    found = says_loader_killed(error.message.splitlines())
    if found is None and torch.LOADER_GONE.search(error.message):
        return says_loader_killed(error.traceback.splitlines())
    return found


def says_loader_killed(lines: Iterable[str]) -> tuple[int, int] | None:
    """Return the same from a rank's last words: torch may say it a moment after a batch failed."""
    found = next((match for line in lines if (match := says("loader-killed", line))), None)
    if found is None or found[2] not in python.SIGNALS:
        return None
    return int(found[1]), python.SIGNALS[found[2]]


def loader_gone(message: str) -> tuple[int, ...]:
    """Return the pids of DataLoader workers of which torch says only that they have ended."""
    found = torch.LOADER_GONE.search(message)
    return tuple(int(pid) for pid in found[1].split(",") if pid.strip()) if found else ()


def is_of_worker(error: Raised) -> bool:
    """Tell whether torch's handler of SIGCHLD raised it, in whatever code ran as a DataLoader's
    worker ended. While the loader is shut down, that is no news.
    """
    of_shutdown = any(frame.function == "__del__" for frame in error.frames)
    return bool(loader_killed(error) or loader_gone(error.message)) and not of_shutdown


def lost_a_child(error: Raised) -> bool:
    """Tell whether an exception says that a child process has ended, and not why."""
    gone = loader_gone(error.message) and loader_killed(error) is None
    return bool(gone) or fits("pool-broken", error)


def port_named(message: str) -> int:
    """Return the port that an error about one names; 0 if none."""
    found = python.PORT.search(message)
    return int(next(filter(None, found.groups()))) if found else 0


def is_out_of_memory(error: Raised) -> bool:
    """Tell whether an allocation was refused, of whatever memory."""
    return bool(memory_of(error))


def memory_wanted(message: str) -> int:
    """Return the bytes of the host's memory that an allocation was refused; 0 when the message has
    no number.
    """
    if (found := python.MEMORY_WANTED.search(message)) is not None:
        return int(found[1] or found[2])
    found = python.MEMORY_WANTED_BY_NUMPY.search(message)
    if found is None:
        return 0
    return int(float(found[1]) * (1 << 10 * (" KMGTPE".index(found[2]))))


def semaphores_full(error: Raised) -> bool:
    """Tell whether `multiprocessing` found no room for a semaphore or a block of memory: both are
    files in /dev/shm.
    """
    full = error.errno == errno.ENOSPC or "[Errno 28]" in error.message
    return full and any(_SHARED_FILES.search(frame.file) for frame in error.frames[-1:])


def not_at_barrier(message: str) -> tuple[int, ...]:
    """Return the ranks that `monitored_barrier` waited for in vain, by the word of its rank 0."""
    found = torch.NOT_AT_BARRIER.search(message)
    return tuple(int(number) for number in re.findall(r"\d+", found[1])) if found else ()


def came_to_barrier(message: str) -> frozenset[int]:
    """Return the ranks that an error of rallypoint's own barrier names as those that came."""
    found = _ARRIVED.search(message)
    came: set[int] = set()
    for named in _RANKS.findall(found["who"] if found is not None else ""):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", named):
            came.update(range(int(first), int(last or first) + 1))
    return frozenset(came)


def came_short(message: str) -> tuple[int, int] | None:
    """Return how many ranks torch's store had heard of at the timeout, and how many it waited for;
    None where that is not said.
    """
    found = torch.CAME_SHORT.search(message)
    if found is None:
        return None
    came, every = int(found["came"] or found["clients"]), int(found["all"] or found["of"])
    return (came, every) if came < every else None


def store_waits(message: str) -> bool:
    """Tell whether a TCPStore waits for more processes than any job has."""
    counted = came_short(message)
    return counted is not None and counted[1] >= PROCESSES_MOST


def keys_waited_for(message: str) -> str:
    """Return the keys of torch's store that were waited for in vain, in torch's own words; "" where
    it does not say.
    """
    found = torch.KEYS.search(message)
    return found["keys"].strip() if found is not None else ""


def keys_of_program(message: str) -> tuple[str, ...]:
    """Return the same keys as the program called them; () for torch's own keys, or none. Of
    several, one at least was not set.
    """
    waited_for = keys_waited_for(message)
    if not waited_for or torch.OWN_KEY.search(waited_for):
        return ()
    return tuple(re.sub(r"^/(default_pg/\d+//)?", "", key) for key in waited_for.split(", "))


def not_met(message: str) -> int:
    """Return the rank whose address gloo waited for in vain; -1 when the message does not say so."""
    found = gloo.ADDRESS_KEY.fullmatch(keys_waited_for(message))
    return int(found[1]) if found is not None else -1


def symbol_missing(error: Raised) -> tuple[str, str, bool] | None:
    """Return a library, the symbol that it misses, and whether the library is torch's own, so that
    another version is found.

    In an extension for torch the symbol is torch's. None where neither is: who differs from whom is
    open.
    """
    return _symbol_in(error.message)


def _symbol_in(message: str) -> tuple[str, str, bool] | None:
    found = python.SYMBOL.search(message)
    if found is None:
        return None
    library, symbol = found["library"], found["symbol"]
    if torch.LIBRARY.search(library):
        return library, symbol, True
    return (library, symbol, False) if torch.SYMBOL.search(symbol) else None


def url_lacks(error: Raised) -> str:
    """Return what the URL that was given to init_process_group lacks: "host", "port", "path"; ""
    for any other error.
    """
    found = torch.URL_LACKS.search(error.message)
    if found is not None:
        return found[1]
    inner = error.frames[-1] if error.frames else None
    if inner is None or inner.function != "_tcp_rendezvous_handler":
        return ""
    asserted = inner.source == "assert result.hostname is not None"
    in_torch = inner.file.endswith("torch/distributed/rendezvous.py")
    return "host" if asserted and in_torch else ""


# --- what an exception says about the other ranks
# --------------------------------------------------------------------


class Meaning(Enum):
    """What an exception's text says about the other ranks."""

    OWN = "own"  # nothing about a peer
    LOST = "lost"  # a connection of torch's to a peer, or to its store, broke
    WAITED = "waited"  # the others, or the store, did not come within the time limit
    MAYBE_LOST = "maybe"  # a bare ConnectionError: perhaps a peer, perhaps a database


AFTER_ANOTHER = {
    "wait-timeout": "waited for a key until the timeout",
    "store-timeout": "got no answer from the store",
    "store-closed": "lost the store",
    "store-silent": "got no answer from the store",
    "port-refused": "found no store",
    "lock-timeout": "waited for a lock until the timeout",
    "once-failed": "got the error of another rank's function from once",
    "barrier-timeout": "waited at a barrier until the timeout",
    "barrier-broken": "waited at a barrier that broke",
}
"""Errors of rallypoint's store that mostly come of another rank, and what a report says of them."""

SAID_TO_ALL = frozenset(("average-mismatch", "barrier-broken", "barrier-size"))
"""Errors of rallypoint's store that all who met get at once, in the same words: together they are
one cause.
"""

_LOST_WORDS = Pattern(
    r"Connection (closed|reset|refused|aborted) by (remote )?peer|Connection (refused|reset|closed|aborted)|Broken pipe|Socket Timeout"
    r"|Failed to recv, got 0 bytes|Application timeout caused pair closure|remote process exit\w*|communicator was aborted"
    r"|Timed out waiting \d+ ?ms|Timed out after \d+ seconds waiting for clients|wait timeout after \d+ ?ms|has timed out after \d+ ?ms"
    r"|Connect timeout|not received the Notify record from remote rank:? ?\[\w+\]|Remote Rank did not send the data in time",
    re.IGNORECASE,
)


def says_lost(lines: Iterable[str]) -> bool:
    """Tell whether lines hold a text that only a broken connection of torch's, gloo's or NCCL's
    leaves.
    """
    origins = (torch.LOST, gloo.LOST, nccl.LOST)
    return any(
        any(lost.search(line) for lost in origins) and not gloo.CHECKED.search(line)
        for line in lines
    )


def says_waited(lines: Iterable[str]) -> bool:
    """Tell whether lines say that torch or gloo gave up waiting."""
    origins = (torch.WAITED, gloo.WAITED, nccl.WAITED)
    return any(waited.search(line) for line in lines for waited in origins)


def meaning(error: Raised) -> Meaning:
    """Return what an exception says about the other ranks."""
    message = error.message
    if nccl_gave_up(error):
        return Meaning.LOST
    own = store_waits(message) or gloo.CHECKED.search(message) or says("port-in-use", message)
    if own or says("group-twice", message) or about_devices(error):
        return Meaning.OWN
    waited = says_waited((message,))
    if waited and "refused" not in message:
        return Meaning.WAITED
    if waited or says_lost((message,)):
        return Meaning.LOST
    # What a call says of its own arguments may name them: timeout=30 is no timedelta.
    of_call = error.call and _short(error.type) not in ("TypeError", "ValueError")
    if of_call or _short(error.type) in torch.TYPES:
        if torch.LOST_IN_A_CALL.search(message):
            return Meaning.LOST
        if torch.WAITED_IN_A_CALL.search(message):
            return Meaning.WAITED
    bare = _short(error.type) in python.BARE_TYPES or python.BARE.search(message)
    if (
        bare
        and not python.OF_WEB.search(message)
        and not fits("no-input", error)
        and not _file_ended(error)
    ):
        return Meaning.MAYBE_LOST
    words = f"{error.type}: {message}"
    if launchers.WAITED.search(words):
        return Meaning.WAITED
    # vLLM's engine, when one of its workers has ended
    cancelled = words == "RuntimeError: cancelled" and _through(error, _OF_VLLM)
    return Meaning.LOST if cancelled or launchers.LOST.search(words) else Meaning.OWN


def in_short(error: Raised) -> str:
    """Return a consequence in a few words, "all_reduce: Connection closed by peer"; torch's own
    texts fill three lines.
    """
    consequence = meaning(error) is not Meaning.OWN
    found = _LOST_WORDS.search(error.message) if consequence else None
    words = found.group(0) if found else f"{error.type}: {error.message}".partition("\n")[0]
    if nccl_gave_up(error):
        words = f"NCCL: {nccl_words(error.message)}"
    words = torch.LOGGED.sub("", words)
    return f"{error.call}: {words}" if error.call else words


def is_consequence(error: Raised) -> bool:
    """Tell whether an exception speaks of a lost or missing peer: the cause is then probably still
    to come.
    """
    if error.code:
        return error.code in AFTER_ANOTHER
    return not fits("producer-gone", error) and meaning(error) is not Meaning.OWN


def is_stop(error: Raised) -> bool:
    """Tell whether an exception is Ctrl-C's."""
    return error.type.endswith("KeyboardInterrupt")


def loader_broke_off(error: Raised) -> bool:
    """Tell whether a DataLoader's worker broke off, which is another matter than a producer:
    something ended it.
    """
    return fits("producer-gone", error) and _through(error, _LOADER)
