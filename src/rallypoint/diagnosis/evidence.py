"""What can be learned about a rank that died or stalled."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterable
from functools import cached_property
from typing import Literal

import msgspec
from msgspec.structs import replace

from rallypoint.diagnosis.log_events import Collective, Findings
from rallypoint.diagnosis.pattern import Pattern
from rallypoint.diagnosis.raised import CUDA_START as CUDA_START
from rallypoint.diagnosis.raised import Frame as Frame
from rallypoint.diagnosis.raised import Raised as Raised
from rallypoint.diagnosis.report import Report
from rallypoint.host.devices import Found
from rallypoint.host.kernel_files import cgroup_folders, number_in, text_of
from rallypoint.host.probe import Reached


class Ended(msgspec.Struct, frozen=True):
    """How a process ended."""

    code: int = 0  # exit code, when signal is 0
    signal: int = 0  # number of the signal that ended it
    at: float = 0.0  # seconds since the job's start
    order: int = 0  # the order in which the kernel reported ends: 0 first
    status: str = ""  # Windows' own word for a crash: "0xC0000005 (access violation)"


class Meeting(msgspec.Struct, frozen=True):
    """What a rank's call of init_process_group found: where it will meet the others."""

    method: str  # "env://", "tcp://host:port", "file:///path", "store"
    address: str = ""  # host:port, or the path
    rank: int = -1
    world_size: int = -1
    backend: str = ""
    line: str = ""  # "train.py:7" that set the address, or made the call
    device: str = ""  # what identifies the GPU that it joins with, "" when the backend needs none
    device_name: str = ""  # as torch calls it in that rank: "cuda:1"
    # "chosen" by the program, "given" by LOCAL_RANK, "used" before, "short": there is none for
    # LOCAL_RANK
    device_how: str = ""
    turn: int = 0  # how often this rank had called init_process_group before
    timeout: float = 0.0  # seconds that the rank gives torch to meet the others; 0: not known
    guarded: bool = False  # the program would catch torch's error, and perhaps try again


class RankEvidence(msgspec.Struct, frozen=True):
    """All that is known of one rank when the report is made."""

    rank: int
    local_rank: int
    pid: int
    # started, preparing, importing, joining (in init_process_group), running, finishing, done
    phase: str
    phase_at: float = 0.0
    ended: Ended | None = None
    raised: Raised | None = None  # left the program uncaught: the first of the __context__ chain
    in_thread: Raised | None = None  # the first that ended one of its threads, not the main one
    # pid, exit code and signal of a process that it had started; it has not noticed the end
    dead_child: tuple[int, int, int] | None = None
    handled: tuple[
        Raised, ...
    ] = ()  # left set_device, init_process_group or a collective, or on its way, oldest first
    # in hand (`finally`, except clause, `with`) when it last began to wait for other ranks
    handles: Raised | None = None
    meeting: Meeting | None = None
    sent: tuple[str, ...] = ()  # signals that this launcher had sent it, by name
    stack: tuple[
        Frame, ...
    ] = ()  # the main thread's, outermost first, when last asked or when it crashed
    stack_text: str = ""  # the whole dump as faulthandler wrote it
    said: tuple[str, ...] = ()  # its last lines on stderr and stdout, oldest first, without prefix
    silent: float = 0.0  # seconds since the last of them; 0: not known
    said_traceback: bool = False  # the raised traceback already stands in `said` / on the terminal
    log: str = ""  # path of its log, "" if none
    log_line: int = 0  # line of the log where its last words start
    resident: int = 0  # bytes at the last look, 0 if unknown
    halted_by: str = ""  # "stopped (SIGSTOP)": why it was sure not to tell where it is
    exit_line: str = ""  # "train.py:10 in main": the sys.exit(0) that ended it
    left_at: str = ""  # "train.py:10 in main": the sys.exit that ended it, when the code is not 0
    left_when: float = 0.0  # when it did; 0: it was not seen to
    left_saying: str = ""  # what it said by that: the text of `sys.exit("...")`, argparse's message
    # when it closed its process group in good order; 0: it has not, or has opened another one since
    closed_at: float = 0.0
    closed_line: str = ""  # "train.py:30" that did
    not_executed: int = 0  # errno of an execve that failed: the program never ran
    unanswered: tuple[str, int] | None = (
        None  # where torch's store has not answered it for as long as it gives torch
    )
    error_file: str = ""  # the message that @record wrote, if any (JSON text)
    # In logs, which know less of a process:
    name: str = ""  # what a report calls it where the log does not tell its rank: "local rank 1"
    order: int = 0  # the line where it shows first what it shows
    told_by: str = ""  # who says how it ended: "torchrun says so on node7, pid 933"
    killed_by: str = ""  # who says that it was killed for memory: "the kernel", "slurmstepd", "Ray"
    uncaught: Raised | None = (
        None  # an exception of C++ that nobody caught, in words that name no cause
    )
    collective: Collective | None = None  # what it was in when NCCL's watchdog gave up
    went_on: bool = False  # the same process went on for long afterwards
    doubt: str = ""  # why what it shows may be no cause all the same
    cuda_forks: tuple[
        tuple[str, str], ...
        # where it forked with CUDA up, and what had used CUDA first: "train.py:30", "train.py:12"
    ] = ()


class MemoryEvidence(msgspec.Struct, frozen=True):
    """What the kernel says about memory: the cgroup's counters before and after, its log, and the
    limits of a process."""

    oom_kills: int = 0  # how many more since the attempt's start
    counted: bool = False  # the counter could be read both times; else oom_kills says nothing
    limit: int = 0  # bytes; 0: none, or unknown
    current: int = 0
    killed_pids: tuple[int, ...] = ()  # from the kernel's log, when it may be read
    kernel_log_read: bool = False
    total: int = 0  # bytes of the machine; 0: unknown
    available: int = 0  # of these what could still be had when the report was made
    address_space: int = 0  # bytes that one process may map (ulimit -v); 0: no limit
    processor_time: int = 0  # seconds that one process may use (ulimit -t); 0: no limit


class HelperLost(msgspec.Struct, frozen=True):
    """A process of the launcher's own ended by itself: "template", "guard" or "c10d host"."""

    name: str
    pid: int
    ended: Ended
    words: tuple[str, ...] = ()


class NodeEvidence(msgspec.Struct, frozen=True):
    """All that one node's kernel, and the launcher's agent there, tell of a job. Times are seconds
    since that agent's start.
    """

    ranks: tuple[RankEvidence, ...] = ()
    node: int = 0
    host: str = ""
    memory: MemoryEvidence = MemoryEvidence()
    devices: Found | None = None  # the GPUs, when an error is about them
    holders: tuple[str, ...] = ()  # of the port that a rank could not bind, a line each
    helper: HelperLost | None = None
    reached: Reached | None = (
        None  # what is at the meeting point that ranks could not reach, when somebody looked
    )
    problem: Report | None = None  # why no rank could be started here
    run_dir: str = ""
    now: float = 0.0
    began: float = 0.0  # the agent's start, in seconds since 1970 by its own clock
    offset: float = 0.0  # seconds to add to a time of this node's for the lead's
    error: float = 0.0  # seconds by which that sum may be wrong


How = Literal["goodbye", "connection ended", "lease over"]
Look = Literal["", "refused", "listening", "silent", "dropped", "unreachable"]


class LostNode(msgspec.Struct, frozen=True):
    """A node from which the lead hears nothing any more, and what a look at its host showed."""

    node: int
    host: str
    ranks: tuple[int, ...]
    how: How
    at: float  # seconds since the lead's start when it was taken for lost
    silent: float = 0.0  # seconds since its last sign of life then, or since its connections ended
    looked: Look = ""  # "": nobody looked, or the look has shown nothing yet
    address: str = ""  # that was looked at
    started: bool = True  # its ranks had been started


class JobEvidence(msgspec.Struct, frozen=True, dict=True):
    """What a diagnosis is made from. Pure data: `root_cause.py` needs nothing else."""

    program: str  # as typed: "train.py"; the name of the function when there is one
    world_size: int
    nodes: tuple[NodeEvidence, ...]  # of which there is evidence: one for a job on one node
    lost: tuple[LostNode, ...] = ()
    unheard: tuple[str, ...] = ()  # hosts of other nodes, which gave no evidence in time
    attempt: int = 0
    max_restarts: int = 0
    held_address: str = ""  # host:port of the socket that the launcher holds for init_process_group
    interrupted_by: str = ""  # the signal that the launcher itself got: "SIGINT", "SIGTERM", ...
    overdue: float = 0.0  # seconds that the whole job was given, when they are over
    stop_reason: str = ""
    on_failure: str = "stop"
    function: bool = False  # the program is a function that `rallypoint.launch` calls in each rank
    behind: str = ""  # options of `rallypoint run` that stand behind the program, which got them
    moved: str = ""  # the command with these before the program
    # that paths are shown relative to, with a "/" at its end; "": the one from which `program` was
    # typed
    folder: str = ""
    python: str = ""  # the interpreter that the ranks run, as a shell takes it; "": not known
    log: Findings | None = None  # of a job that a log tells of: all that was seen in it

    @cached_property
    def ranks(self) -> tuple[RankEvidence, ...]:
        """The evidence of all ranks: by rank, of a log as they stand there."""
        found = tuple(rank for node in self.nodes for rank in node.ranks)
        return found if self.log else tuple(sorted(found, key=lambda rank: rank.rank))

    @property
    def several(self) -> bool:
        """Whether the job has several nodes."""
        return len(self.nodes) + len(self.lost) + len(self.unheard) > 1

    @cached_property
    def _nodes(self) -> dict[int, NodeEvidence]:
        return {rank.rank: node for node in self.nodes for rank in node.ranks}

    def node_of(self, rank: int) -> NodeEvidence:
        """Return the evidence of the node that a rank is on."""
        return self._nodes.get(rank) or next(iter(self.nodes), NodeEvidence())

    @cached_property
    def clock_error(self) -> float:
        """Seconds by which times of two nodes may be wrong beside each other."""
        return sum(sorted(node.error for node in self.nodes)[-2:])

    @property
    def now(self) -> float:
        """When the evidence was gathered, in seconds since the job's start."""
        return max((node.now for node in self.nodes), default=0.0)

    @property
    def helper(self) -> HelperLost | None:
        """The first process of the launcher's own that ended by itself, on any node."""
        lost = [node.helper for node in self.nodes if node.helper is not None]
        return min(lost, key=lambda one: one.ended.at, default=None)

    def with_ranks(self, ranks: Iterable[RankEvidence]) -> JobEvidence:
        """Return the same job with this evidence of its ranks, or of some of them."""
        found: dict[int, list[RankEvidence]] = {}
        for rank in ranks:
            found.setdefault(self.node_of(rank.rank).node, []).append(rank)
        nodes = (replace(node, ranks=tuple(found.get(node.node, ()))) for node in self.nodes)
        return replace(self, nodes=tuple(nodes))


class MemoryCounters(msgspec.Struct, frozen=True):
    """The memory counters of this process's cgroup, and of the machine, at one moment."""

    oom_kills: int = (
        0  # processes of the cgroup that the kernel has killed for memory, since the cgroup exists
    )
    limit: int = (
        0  # bytes; the smallest limit of the cgroup and those above it; 0: none, or unknown
    )
    current: int = 0  # bytes charged to the cgroup that has that limit
    path: str = ""  # the file that oom_kills was read from; "" when there is none
    total: int = 0  # bytes of the machine; 0: unknown
    available: int = 0  # of these what can still be had
    cached: int = 0  # of `current` what the kernel takes back when others need it


_KILLED = Pattern(r"Kill(?:ed)? process (\d+)")
# The kernel stamps its log with a clock that may run a little behind CLOCK_MONOTONIC.
_LOG_SLACK = 1.0
# One read gives one record, and the kernel's ring holds some ten thousand: a bound for a kernel
# that writes faster than we read.
_LOG_RECORDS = 200_000
_LOG_RECORD_BYTES = 8192


def memory_counters(root: str = "/") -> MemoryCounters:
    """Return what the kernel counts for this process's cgroup now, version 2 or 1, and for the
    machine; zeros where it tells nothing.

    In a container the path of /proc/self/cgroup may lie outside what is mounted; then the nearest
    folder above it counts. `root` is for tests.
    """
    told = dict(re.findall(r"^(\w+):\s+(\d+) kB", text_of(root, "proc/meminfo"), re.MULTILINE))
    total, available = (int(told.get(name, 0)) * 1024 for name in ("MemTotal", "MemAvailable"))
    kills, path, limit, current, cached = 0, "", 0, 0, 0
    for folder, unified in cgroup_folders("memory", root):
        events, limit_name, current_name = _V2 if unified else _V1
        counted = re.search(r"^oom_kill (\d+)", text_of(folder, events), re.MULTILINE)
        if counted and not path:
            kills, path = int(counted[1]), os.path.join(folder, events)
        bound = number_in(folder, limit_name)
        if bound and (not limit or bound < limit):
            limit, current = bound, number_in(folder, current_name)
            found = _CACHED.search(text_of(folder, "memory.stat"))
            cached = int(found[1]) if found else 0
    return MemoryCounters(kills, limit, current, path, total, available, cached)


_V1 = ("memory.oom_control", "memory.limit_in_bytes", "memory.usage_in_bytes")
_V2 = ("memory.events", "memory.max", "memory.current")
"""Files of a control group, by its version: events, limit, use."""
_CACHED = Pattern(r"^(?:total_)?inactive_file (\d+)", re.MULTILINE)


def difference(
    before: MemoryCounters,
    after: MemoryCounters,
    killed_pids: tuple[int, ...] = (),
    kernel_log_read: bool = False,
) -> MemoryEvidence:
    """Return what two looks at the counters, one at the kernel's log, and our own limits, which the
    ranks have inherited, say together.
    """
    counted = bool(after.path) and after.path == before.path
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    _, longest = resource.getrlimit(resource.RLIMIT_CPU)  # at the first of the two SIGXCPU is sent
    return MemoryEvidence(
        max(after.oom_kills - before.oom_kills, 0) if counted else 0,
        counted,
        after.limit,
        after.current,
        killed_pids,
        kernel_log_read,
        after.total,
        after.available,
        address_space=0 if most == resource.RLIM_INFINITY else most,
        processor_time=0 if longest == resource.RLIM_INFINITY else longest,
    )


def kernel_oom_kills(since: float, path: str = "/dev/kmsg") -> tuple[tuple[int, ...], bool]:
    """Return the pids that the kernel's log says were killed for memory, and whether the log could
    be read.

    `since` is CLOCK_MONOTONIC in seconds. Never waits. The pids are those of the machine: inside a
    container with pids of its own they match no rank (such a container can rarely read the log at
    all).
    """
    records: list[bytes] = []
    whole = True
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return (), False
    with open(log, "rb", buffering=0) as file:
        for _ in range(_LOG_RECORDS):
            try:
                record = file.read(_LOG_RECORD_BYTES)
            except BrokenPipeError:
                continue  # it was overwritten while we read; the next is the oldest that is left
            except OSError:
                whole = False
                break
            if not record:  # at the end, where a device would wait
                break
            # A device gives one record for one read; a plain file, as in tests, gives many lines.
            records += record.splitlines()
    pids: dict[int, None] = {}
    for record in records:
        head, _, message = record.decode(errors="replace").partition(";")
        stamp = [*head.split(","), "", "", ""][2]
        if stamp.isdigit() and int(stamp) / 1e6 >= since - _LOG_SLACK:
            pids.update((int(pid), None) for pid in _KILLED.findall(message))
    return tuple(pids), whole
