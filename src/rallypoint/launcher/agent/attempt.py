"""One attempt: where its ranks meet, and the orders that start them. A restart makes a new one;
nothing is carried over.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rallypoint.errors import EnvironmentProblem
from rallypoint.host import ports
from rallypoint.launcher.agent.job_store import JobStore
from rallypoint.launcher.agent.process_handles import HostHandle, RankHandle
from rallypoint.launcher.agent.rank_streams import RankStreams
from rallypoint.launcher.plan import STDERR, Plan
from rallypoint.launcher.protocol import StartHost, StartWorker


class Order(NamedTuple):
    """What the template is to fork. The descriptors travel with it and are closed here afterwards
    (`done`).
    """

    handle: RankHandle | None  # None: the c10d host
    message: StartHost | StartWorker
    fds: list[int]
    ours: list[int]  # of those, what is ours no longer once it is sent


class Attempt:
    """The socket that is held, the c10d host that serves it, the store, the ranks. Empty (none of
    them) before the first.
    """

    def __init__(
        self,
        plan: Plan,
        number: int,
        *,
        began: float,
        ignored: tuple[int, ...],
        hooks: bool,
        started: bool = True,
        parcel: Sequence[int] = (),
    ) -> None:
        self.number = number
        self.host: HostHandle | None = None
        self.host_ready = -1  # a pipe's end that becomes readable when the host serves
        self.ranks: list[RankHandle] = []
        self.spawned: list[
            RankHandle
        ] = []  # what the only rank has started by torch.multiprocessing.spawn, by index
        self.spawned_size = 0  # how many it starts
        try:
            for seat in plan.world.seats() if started else ():
                self.ranks.append(RankHandle(seat.rank, seat.local_rank))
        except (
            OSError
        ):  # what there is of them would stay open, and cleaning up takes descriptors, too
            for handle in self.ranks:
                handle.close()
            raise
        self.store: JobStore | None = None
        self._no_store = ""  # why there is none
        self._plan = plan
        self._began = began  # wall clock: a rendezvous file older than this is stale
        self._ignored = ignored
        self._hooks = hooks
        self._listener = -1
        self._parcel = parcel  # of `plan.task`; the caller's

    @property
    def held(self) -> str:
        """host:port of the meeting point, "" when there is none (any more)."""
        return self.host.address if self.host else ""

    def hold(self, held: ports.HeldPort | None = None) -> int:
        """Bind the meeting point, before any rank starts, unless it is `held` already; the port.
        Raises as `hold_port`.

        Where nobody here could serve it (no torch), it is given back: the program's rank 0 hosts
        it, as under torchrun's static rendezvous.
        """
        if held is None:
            held = ports.hold_port(
                self._plan.master_port, self._plan.master_addr, self._plan.port_range
            )
        self.host = HostHandle(f"{self._plan.master_addr}:{held.port}")
        if self._plan.torch:
            self._listener = held.detach()
        else:
            held.release()
        return self.host.port

    def open_store(self) -> None:
        """Make the job's store, before any rank starts. Where there can be none the job does
        without: most never ask for it.

        A program that rallypoint executes without looking into it gets no secret, and so has no
        store.
        """
        if self._plan.start == "exec":
            return
        try:
            self.store = JobStore(self._plan.job)
        except EnvironmentProblem as problem:
            self._no_store = "; ".join((problem.headline, *problem.why))

    def orders(self, streams: RankStreams) -> Iterator[Order]:
        """The host first, then the ranks. Each one's descriptors are made when it is asked for: few
        are open at a time.
        """
        if self._listener >= 0:
            self.host_ready, theirs = os.pipe2(os.O_CLOEXEC)
            listener, self._listener = self._listener, -1
            port = self.host.port if self.host else 0
            yield Order(
                None,
                StartHost(self._plan.master_addr, port),
                [listener, theirs],
                [listener, theirs],
            )
        for handle in self.ranks:
            yield self._worker(handle, streams)

    def _worker(self, handle: RankHandle, streams: RankStreams) -> Order:
        plan = self._plan
        handle.error_file = streams.error_file(self.number, handle)
        standard, terminal = streams.open(self.number, handle)
        kept = plan.logs.redirects[handle.local_rank] & STDERR != 0
        message = StartWorker(
            rank=handle.rank,
            local_rank=handle.local_rank,
            environment=self._environment(handle, streams.columns()),
            ignored=self._ignored,
            takes_traceback=plan.world.size > 1 or kept,
            stderr_is_kept=kept,
            debugger=handle.rank == plan.debug_rank,
            held=self.held if plan.torch else "",
            began=self._began,
            single=self._is_single(),
            store=self.store.address if self.store else "",
            no_store=self._no_store,
            task=plan.task,
        )
        secret = [self.store.secret] if self.store else []
        terminals = [terminal] if terminal >= 0 else []
        fds = [
            *standard,
            handle.their_control.fileno(),
            handle.evidence,
            *secret,
            *terminals,
            *self._parcel,
        ]
        return Order(handle, message, fds, standard)

    def _environment(self, handle: RankHandle, columns: int) -> dict[str, str]:
        plan = self._plan
        host, _, port = self.held.rpartition(":")
        environment = {
            **(
                plan.environment if plan.task else {}
            ),  # the template has it otherwise, which serves one job only
            **plan.rank_environment[handle.local_rank],
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": str(self.number),
        }
        if self.store is not None:
            environment["RALLYPOINT_STORE"] = self.store.address
        if handle.error_file:
            environment["TORCHELASTIC_ERROR_FILE"] = handle.error_file
        if (
            not plan.torch or self._is_single()
            # see torch_hooks.py: a program that spawns its own ranks must find torch's plain
            # meaning
        ):
            environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        if columns and "COLUMNS" not in os.environ:
            environment["COLUMNS"] = str(columns)
        return environment

    def _is_single(self) -> bool:
        return self._plan.world.size == 1 and self._hooks

    def release(self) -> None:
        """Give the meeting point back: end its host, wherever it is by now."""
        if self._listener >= 0:
            os.close(self._listener)
            self._listener = -1
        if self.host is not None:
            self.host.end()

    def hear_host(self) -> bool:
        """`host_ready` is readable: whether the host serves, or has ended without. Closes
        the pipe.
        """
        ready, self.host_ready = self.host_ready, -1
        try:
            return bool(os.read(ready, 1))
        finally:
            os.close(ready)

    def close_store(self, reason: str) -> None:
        """End the store: whoever still asks for something is told the reason. Nothing when there is
        none (any more).
        """
        if self.store is not None:
            self.store.stop(reason)
            self.store = None

    def close(self) -> None:
        """Give every descriptor back. The processes have ended, and the store was closed."""
        self.release()
        if self.host_ready >= 0:
            os.close(self.host_ready)
            self.host_ready = -1
        for handle in self.ranks:
            handle.close()


def exhausted(error: OSError, ranks: int) -> EnvironmentProblem:
    """The operating system refuses what starting ranks needs: descriptors, mostly."""
    if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS):
        largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        is_size = error.errno == errno.EFBIG
        return EnvironmentProblem(
            "start-failed",
            f"{ranks} ranks cannot be started: {os.strerror(error.errno or 0)}",
            why=(f"a file may have at most {largest} bytes (ulimit -f), files in memory included",)
            if is_size
            else (),
            help=(("raise the limit in the shell that starts the job", "ulimit -f unlimited"),)
            if is_size
            else (),
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return EnvironmentProblem(
        "start-failed",
        f"{ranks} ranks cannot be started: {os.strerror(error.errno or 0)}",
        why=(
            f"the launcher keeps about six descriptors for each rank; its limit is {soft} (hard limit {hard})",
        ),
        help=(("raise the limit in the shell that starts the job", "ulimit -n 4096"),),
    )
