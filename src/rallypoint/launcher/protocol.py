"""Messages between agent, template and workers, one packet each.

All of them are `SOCK_SEQPACKET` socket pairs made by the agent: a packet is whole or absent, keeps
its order, and carries descriptors (SCM_RIGHTS). Nothing here leaves the machine or outlives the
job, so there is no version and no proof.
"""

from __future__ import annotations

import array
import errno
import functools
import json
import operator
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, dataclass_transform

import msgspec

from rallypoint.diagnosis.evidence import Meeting, Raised
from rallypoint.diagnosis.report import Report
from rallypoint.host import memory_files
from rallypoint.host.fd_passing import close_fds
from rallypoint.host.unix_sockets import descriptors_in
from rallypoint.launcher.program import Program, Task

# A packet must fit the socket's send buffer (212,992 bytes by default on Linux). The largest is a
# traceback.
PACKET_BYTES = 192 * 1024
DESCRIPTORS = 250  # of one packet; the kernel takes 253 (SCM_MAX_FD)

Phase = Literal["started", "preparing", "importing", "joining", "running", "finishing", "done"]


@dataclass_transform(frozen_default=True)
class Packet(msgspec.Struct, frozen=True, tag=True):
    """A message, which travels with the name of its class."""


class Setup(Packet):
    """agent -> template: what it is there for. The first packet, and the only one of its kind."""

    program: Program
    parts: tuple[
        str, ...
    ]  # of torch, imported before the preload modules; what goes wrong with one is `Ready.unclean`
    preload: tuple[str, ...]
    imports: bool  # False: a starter of fresh interpreters, which imports nothing
    hooks: bool  # look into the workers (not --plain)
    signal_mask: tuple[int, ...]  # the workers'; the template itself takes no signal but SIGKILL
    openblas_threads: str | None  # what the user had set; None: nothing
    paths: tuple[str, ...] | None = (
        # sys.path for the preload modules of a caller of `launch`; None: the program's folder comes
        # first
        None
    )


class StartWorker(Packet):
    """agent -> template: fork a worker. Descriptors: stdin, stdout, stderr, control channel,
    evidence memfd, the store's secret when there is a `store`, the terminal when this rank has it,
    the task's payload."""

    rank: int
    local_rank: int
    environment: dict[str, str]
    ignored: tuple[int, ...]  # signals that were ignored when the job started (nohup)
    takes_traceback: bool  # the agent prints an uncaught exception; the worker need not
    stderr_is_kept: (
        bool  # stderr is a file of the user's (`-r`): it gets the traceback all the same
    )
    debugger: bool  # breakpoint() works in this rank
    held: str  # host:port that the agent holds for init_process_group
    began: float  # wall clock of the attempt's start: a rendezvous file older than this is stale
    single: bool  # the only rank of the job
    store: str = ""  # the address of the job's store, "" when there is none
    no_store: str = ""  # why there is none
    task: Task | None = None


class StartHost(Packet):
    """agent -> template: fork a c10d host. Descriptors: the listening socket, a pipe's end that
    says when it serves.
    """

    host: str
    port: int


class ImportParts(Packet):
    """agent -> template: import these parts of torch too, for those who will be forked later.
    `Ready` is the answer.
    """

    parts: tuple[str, ...]


class Reap(Packet):
    """agent -> template: the group was signalled (or is to be forgotten); the number may be
    freed.
    """

    pid: int


class Finish(Packet):
    """agent -> template: nothing more to start; leave."""


class Ready(Packet):
    """template -> agent: everything is imported. `unclean`: why it must not be forked ("" if it
    may), and after which import.
    """

    seconds: float
    torch: str = ""
    unclean: str = ""
    module: str = ""
    files: tuple[
        tuple[str, int, int], ...
    ] = ()  # what the preload modules were read from: path, time in ns, size


class Importing(Packet):
    """template -> agent: the import of a preload module begins."""

    module: str


class ImportFailed(Packet):
    """template -> agent: torch or a preload module cannot be imported."""

    module: str
    raised: Raised


class Forked(Packet):
    """template -> agent: rank `rank` (-1: the c10d host) is process `pid`."""

    rank: int
    pid: int
    seconds: float  # what the fork took


class NotForked(Packet):
    """template -> agent: it could not be started: an error number, or the template is no longer
    clean.
    """

    rank: int
    errno: int
    unclean: str = ""


class Exited(Packet):
    """template -> agent: a child has ended; it is not reaped yet. In the kernel's order."""

    pid: int
    code: int
    signal: int


class Reaped(Packet):
    """template -> agent: a child is reaped. Times in seconds, memory in bytes."""

    pid: int
    user_time: float
    system_time: float
    resident_max: int


class AtPhase(Packet):
    """worker -> agent: where the program is. `threads`: those for which its end waits."""

    phase: Phase
    threads: tuple[str, ...] = ()


class Uncaught(Packet):
    """worker -> agent: an exception leaves the program."""

    raised: Raised
    printed: bool  # the worker prints its traceback itself
    keyboard: bool = False  # KeyboardInterrupt
    failed_child: tuple[int, int, int] | None = None  # `process_status.failed_child` of the rank


class Leaving(Packet):
    """worker -> agent: sys.exit; `line` is the place, "train.py:10 in main", `words` what it said
    when the code is not 0.
    """

    code: int
    line: str
    words: str = ""


class Caught(Packet):
    """worker -> agent: an exception left a torch.distributed call, or is on its way while the
    program closes its group; whether the program catches it is seen later.

    `serial` counts per worker; an `Uncaught` whose `serials` name it takes it back."""

    serial: int
    raised: Raised


class Handles(Packet):
    """worker -> agent: the program waits for other ranks, and has this exception in hand: a
    `finally`, an except clause or a `with` does; or (None) it has none any more.
    """

    raised: Raised | None


class Uncatch(Packet):
    """worker -> agent: the exception of `Caught(serial)` was not handled after all: it leaves the
    program.
    """

    serial: int


class ThreadEnded(Packet):
    """worker -> agent: an exception ends a thread; the program goes on without it."""

    raised: Raised


class ClosesGroup(Packet):
    """worker -> agent: the program closes the process group, with no exception on its way; `line`:
    where, "" if not known.
    """

    line: str


class Meets(Packet):
    """worker -> agent: init_process_group was called, and `AtPhase("joining")` follows. `differs`:
    it is not where the agent holds a socket."""

    meeting: Meeting
    differs: bool


class Debugging(Packet):
    """worker -> agent: the debugger of `breakpoint()` waits for a person's line, or (`waits` False)
    the program goes on. The agent answers `waits` True with `TerminalLeft`.
    """

    waits: bool


class Spawns(Packet):
    """worker -> agent: the program starts ranks of its own (mp.spawn). The agent answers `Released`
    when it is the only rank.
    """

    line: str


class OfSpawned(Packet):
    """process that the only rank has spawned -> agent, by the rank's line: process `index` of
    `size` says this. With the first come its pidfd and the memfd of its stacks."""

    index: int
    size: int
    pid: int
    told: AtPhase | Meets


class ForksCuda(Packet):
    """worker -> agent: the program forks at `line` with CUDA up, which `first` had used first (""
    if not known). Once for each line.
    """

    line: str
    first: str


class Child(msgspec.Struct, frozen=True):
    """A process that the program had started with multiprocessing. `line`: where; `unguarded`: an
    import of the program does it again.
    """

    name: str
    pid: int
    code: int = 0
    signal: int = 0
    line: str = ""
    unguarded: bool = False


class ChildrenFailed(Packet):
    """worker -> agent: children that failed and were never asked for their exit code by the
    program. Sent when the program has ended, or when a Pool has lost a worker. `more`: how many
    were not kept.
    """

    children: tuple[Child, ...]
    more: int


class Imported(Packet):
    """worker -> agent: a package took long to import."""

    name: str
    seconds: float


class ImportedPart(Packet):
    """worker -> agent: a part of torch was imported, took long, and could have been imported before
    the fork.
    """

    name: str


class SetLate(Packet):
    """worker -> agent: the program set a variable that libraries in the template had read before.
    `line`: where, "" if not known.
    """

    name: str
    line: str


class NotExecuted(Packet):
    """worker -> agent: execve failed; the process leaves with 126 or 127."""

    errno: int


class Outcome(Packet):
    """worker -> agent -> caller: the function of `launch` has returned, or raised, in this rank;
    the payload's descriptors come along.
    """

    rank: int
    kind: Literal["value", "error"]
    problem: str = ""  # why it did not come from the rank's node, and no descriptor comes along


class Call(Packet):
    """caller -> standby: launch this. Descriptors: a pipe for stdout, one for stderr, the task's
    payload.
    """

    task: Task
    preload: tuple[str, ...]  # what the template imports; the same in every call
    nproc: int
    environment: dict[str, str]  # what differs from the template's
    max_restarts: int
    on_failure: Literal["stop", "continue"]
    asked: float  # when `launch` was called, on the monotonic clock of this machine
    timeout: float | None  # since then
    grace: (
        float | None
    )  # between SIGTERM and SIGKILL; None: 30 s, and next to nothing after `timeout`
    run_dir: str  # "": a folder that is removed again when all goes well
    port_range: tuple[int, int] | None
    # Of a call on several nodes: `plan.SettledNodes` in msgpack; b"": one node. The last descriptor
    # may be the listener of the lead.
    nodes: bytes


class Interrupt(Packet):
    """caller -> standby: it got this signal (Ctrl-C); a second one is for those who cannot wait."""

    signal: str


class Finished(Packet):
    """standby -> caller: the call is over; a `Verdict` is in the memfd that comes along."""


class Restarted(Packet):
    """standby -> caller: all ranks start again; what came from the earlier attempt is void."""

    attempt: int


class Verdict(msgspec.Struct, frozen=True):
    """How a call ended."""

    status: int
    overdue: bool
    reports: tuple[Report, ...]
    text: str  # the reports, rendered
    # Exit code and signal of each rank of this node; None: it never started.
    ends: tuple[tuple[int, int] | None, ...]
    run_dir: str
    usable: bool = True  # False: the standby ends, and takes no other call
    first: int = 0  # number of the first rank of this node
    size: int = 0  # number of results that the caller returns, of ranks from `first` on


class Go(Packet):
    """agent -> worker: you are registered with the guard; start the program."""


class Released(Packet):
    """agent -> worker: the held port is free again."""


class TerminalLeft(Packet):
    """agent -> worker: nothing of the launcher's is drawn on the terminal any more."""


class Noticed(Packet):
    """agent -> worker: a notice came (a signal of `--notice-signal`), which `preempted` tells."""


class Register(Packet):
    """agent -> guard: look after this process (its pidfd comes along); it leads a session of its
    own.
    """

    pid: int
    is_template: bool = False  # all that descends from it is the job's


class Inherit(Packet):
    """agent -> guard: a socket of the agent's, to be removed with its folder when the agent is
    killed. It replaces the last of its name.
    """

    path: str


class Forget(Packet):
    """agent -> guard: this process is about to be reaped; its number is nobody's any more."""

    pid: int


class Farewell(Packet):
    """agent -> guard: the job is over and clean; leave."""


class Aside(Packet):
    """A message that fits no packet (a long command line, a path that is not UTF-8): it is in the
    memfd that comes first.
    """


_Struct = TypeVar("_Struct", bound=msgspec.Struct)
_ANCILLARY_BYTES = socket.CMSG_SPACE(4 * DESCRIPTORS)
_encoder = msgspec.msgpack.Encoder()
# Any, since no type checker follows a union that is made at run time.
_ANY_MESSAGE: Any = functools.reduce(operator.or_, Packet.__subclasses__())
_decoder = msgspec.msgpack.Decoder(_ANY_MESSAGE)


def exact(value: msgspec.Struct) -> bytes:
    """Encode a struct with texts that a packet refuses: arguments and paths that are not UTF-8
    (surrogates in Python).
    """
    return json.dumps(msgspec.to_builtins(value)).encode()


def from_exact(data: bytes, kind: type[_Struct]) -> _Struct:
    """Decode what `exact` has encoded."""
    return msgspec.convert(json.loads(data), kind)


def read_struct(fd: int, kind: type[_Struct]) -> _Struct:
    """Read a struct from a memfd, and close it."""
    return from_exact(memory_files.taken(fd), kind)


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a channel, both close-on-exec and blocking."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(
    sock: socket.socket,
    message: Packet,
    fds: Sequence[int] = (),
    *,
    flags: int = 0,
    sent: list[int] | None = None,
) -> None:
    """Send one packet. OSError (EPIPE, ECONNRESET) when the other side is gone, EAGAIN with
    MSG_DONTWAIT when it does not read.

    `sent`: filled in the moment that the packet is sent, for a caller whose signal handlers may
    raise before this returns."""
    sent = [] if sent is None else sent
    try:
        packet = _encoder.encode(message)
    except UnicodeEncodeError:  # surrogates: text that is not UTF-8
        packet = b""
    aside = -1
    try:
        if not packet or len(packet) > PACKET_BYTES:
            aside = memory_files.create("rallypoint-message", exact(message))
            packet, fds = _encoder.encode(Aside()), (aside, *fds)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
        # In one step of the interpreter, between sending and remembering which no handler can run.
        sent.extend(
            map(
                sock.sendmsg,
                ([packet],),
                ([rights] if fds else [],),
                (flags | socket.MSG_NOSIGNAL,),
            )
        )
    finally:
        close_fds(aside)


def limit_sends(sock: socket.socket, seconds: float) -> None:
    """Let `send` raise BlockingIOError when the other side has not read for so long that the socket
    is full: it was stopped, mostly.
    """
    sock.setsockopt(
        socket.SOL_SOCKET,
        socket.SO_SNDTIMEO,
        struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6)),
    )


def receive(sock: socket.socket, *, flags: int = 0) -> tuple[Packet | None, list[int]]:
    """Receive one packet and its descriptors (close-on-exec); (None, []) when the other side has
    gone. BlockingIOError as recv; OSError (EMFILE) when this process has no room for the descriptors,
    which are lost with the packet."""
    try:
        data, ancillary, told, _ = sock.recvmsg(
            PACKET_BYTES, _ANCILLARY_BYTES, flags | socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionResetError:  # the peer died with unread packets
        return None, []
    fds = descriptors_in(ancillary)
    if told & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if not data:
        return None, fds
    message: Packet = _decoder.decode(data)
    if isinstance(message, Aside):
        message = read_struct(fds.pop(0), _ANY_MESSAGE)
    return message, fds
