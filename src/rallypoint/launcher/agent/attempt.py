"""Attempts: where the ranks meet, and the orders that start them. A restart makes a new one; nothing
is carried over.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from rallypoint.errors import EnvironmentProblem
from rallypoint.host import ports
from rallypoint.host.fd_passing import close_fds
from rallypoint.launcher.agent.helper_handles import HostHandle
from rallypoint.launcher.agent.job_store import JobStore, StoreElsewhere
from rallypoint.launcher.agent.process_handles import RankHandle
from rallypoint.launcher.agent.rank_streams import RankStreams
from rallypoint.launcher.plan import STDERR, Plan, variables_of
from rallypoint.launcher.protocol import StartHost, StartWorker
from rallypoint.world import Seat

if TYPE_CHECKING:
    from rallypoint.launcher.agent.other_nodes import OtherNodes


class Order(NamedTuple):
    """A process that the template is to fork. The descriptors travel with it, and `ours` are closed
    here afterwards.
    """

    handle: RankHandle | None  # None: the c10d host
    message: StartHost | StartWorker
    fds: list[int]
    ours: list[int]  # of those, the ones that are of no use here once they are sent


class Attempt:
    """Everything that is known only per attempt: the node's seat, the socket that is held, the c10d
    host that serves it, the store, the ranks. It begins with the seat alone.
    """

    def __init__(
        self,
        plan: Plan,
        seat: Seat,
        *,
        began: float,
        ignored: tuple[int, ...],
        payload: Sequence[int] = (),
    ) -> None:
        """`began`: wall clock; a rendezvous file older than this is stale. `ignored`: signals that
        were ignored when the job started. `payload`: descriptors of `plan.task`, the caller's."""
        self.seat = seat
        self.host: HostHandle | None = None
        self.host_ready = -1  # a pipe's end that becomes readable when the host serves
        self.ranks: list[RankHandle] = []
        # processes that the only rank has started by torch.multiprocessing.spawn, by index
        self.spawned: list[RankHandle] = []
        self.spawned_size = 0  # how many it starts
        self.store: JobStore | StoreElsewhere | None = None
        self._no_store = ""  # why there is none
        self._plan = plan
        self._began = began
        self._ignored = ignored
        self._payload = payload
        self._listener = -1
        self._is_single = seat.world.size == 1 and plan.hooks

    @property
    def number(self) -> int:
        """Number of the attempt."""
        return self.seat.attempt

    @property
    def held(self) -> str:
        """host:port of the meeting point, "" when there is none yet."""
        return f"{self.seat.master_addr}:{self.seat.master_port}" if self.seat.master_port else ""

    def begin(self, held: ports.HeldPort | None = None) -> None:
        """Make the ranks' handles, and bind the meeting point on node 0 unless it is `held`
        already. Raises as `hold_port`, and OSError when descriptors run out.

        Where nobody here could serve it (no torch), it is given back: the program's rank 0 hosts
        it, as under torchrun's static rendezvous.
        """
        plan = self._plan
        for local_rank, rank in enumerate(self.seat.ranks):
            self.ranks.append(RankHandle(rank, local_rank))
        if self.seat.node != 0:
            return
        if held is None:
            held = ports.hold_port(plan.master_port, self.seat.master_addr, plan.port_range)
        self.seat = msgspec.structs.replace(self.seat, master_port=held.port)
        self.host = HostHandle(self.held)
        if plan.torch:
            self._listener = held.detach()
        else:
            held.release()

    def open_store(self, others: OtherNodes | None) -> None:
        """Make the job's store, before any rank starts; one for all nodes, if there are `others`.
        Where there can be none the job does without: most never ask for it.

        A program that rallypoint executes without looking into it gets no secret, and so has no
        store.
        """
        if self._plan.start == "exec":
            return
        try:
            job = self._plan.job
            self.store = JobStore(job) if others is None else others.open_store(job, self.seat)
        except EnvironmentProblem as problem:
            self._no_store = "; ".join((problem.headline, *problem.why))

    def orders(self, streams: RankStreams) -> Iterator[Order]:
        """Yield the host first, then the ranks. Each one's descriptors are made when it is asked
        for: few are open at a time.
        """
        if self._listener >= 0 and self.host is not None:
            self.host_ready, theirs = os.pipe2(os.O_CLOEXEC)
            message = StartHost(self.seat.master_addr, self.host.port)
            yield Order(None, message, [self._listener, theirs], [theirs])
        for handle in self.ranks:
            yield self._order(handle, streams)

    def _order(self, handle: RankHandle, streams: RankStreams) -> Order:
        plan = self._plan
        handle.error_file = streams.error_file(self.number, handle)
        standard, terminal = streams.open(self.seat, handle)
        kept = plan.logs.redirects[handle.local_rank] & STDERR != 0
        message = StartWorker(
            rank=handle.rank,
            local_rank=plan.local_ranks[handle.local_rank],
            environment=self._environment(handle, streams.columns(self.seat)),
            ignored=self._ignored,
            takes_traceback=self.seat.world.size > 1 or kept,
            stderr_is_kept=kept,
            debugger=handle.rank == plan.debug_rank,
            held=self.held if plan.torch else "",
            began=self._began,
            single=self._is_single,
            store=self.store.address if self.store else "",
            no_store=self._no_store,
            task=plan.task,
        )
        fds = [
            *standard,
            handle.their_control.fileno(),
            handle.evidence,
            *([self.store.secret] if self.store else []),
            *([terminal] if terminal >= 0 else []),
            *self._payload,
        ]
        return Order(handle, message, fds, standard)

    def _environment(self, handle: RankHandle, columns: int) -> dict[str, str]:
        plan = self._plan
        environment = variables_of(plan, self.seat, handle.local_rank)
        if self.store is not None:
            environment["RALLYPOINT_STORE"] = self.store.address
        if handle.error_file:
            environment["TORCHELASTIC_ERROR_FILE"] = handle.error_file
        if self.seat.interface:
            # Else gloo and tensorpipe bind what the host's own name resolves to: 127.0.1.1, mostly.
            for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
                if name not in os.environ:
                    environment[name] = self.seat.interface
        if columns and "COLUMNS" not in os.environ:
            environment["COLUMNS"] = str(columns)
        return environment

    def host_started(self, pid: int) -> None:
        """Note the host's process, which has the listening socket now. Until then the agent keeps
        it: of a socket that only lies in a message to the template nobody can tell whose it is.
        """
        if self.host is not None:
            self.host.started(pid)
            self._let_go()

    def _let_go(self) -> None:
        listener, self._listener = self._listener, -1
        close_fds(listener)

    def release(self) -> None:
        """Give the meeting point back: end its host, wherever it is by now."""
        self._let_go()
        if self.host is not None:
            self.host.end()

    def has_host_answered(self) -> bool:
        """Return whether the host serves, or has ended without, once `host_ready` is readable.
        Closes that pipe.
        """
        ready, self.host_ready = self.host_ready, -1
        try:
            served = bool(os.read(ready, 1))
        finally:
            os.close(ready)
        if self.host is not None:
            self.host.served = served
        return served

    def close(self) -> None:
        """Give every descriptor back. The processes have ended, and the store was closed."""
        self.release()
        ready, self.host_ready = self.host_ready, -1
        close_fds(ready)
        for handle in self.ranks:
            handle.close()


def exhausted(error: OSError, ranks: int) -> EnvironmentProblem:
    """Return the problem that the operating system refuses what starting ranks needs: descriptors,
    mostly.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = error.errno in (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS)
    limit = f"the launcher keeps about six descriptors for each rank; its limit is {soft} (hard limit {hard})"
    return EnvironmentProblem(
        "start-failed",
        f"{ranks} ranks cannot be started: {os.strerror(error.errno or 0)}",
        why=(limit,) if few else (),
        help=(("raise the limit in the shell that starts the job", "ulimit -n 4096"),)
        if few
        else (("look at the limits of the shell that starts the job", "ulimit -a"),),
    )
