"""Start of the ranks: the attempt's meeting point and store, and the orders that have the template
fork each process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from rallypoint.errors import EnvironmentProblem
from rallypoint.host import processes
from rallypoint.launcher.agent import supervisor
from rallypoint.launcher.agent.attempt import Attempt, Order, exhausted
from rallypoint.launcher.agent.job import Job
from rallypoint.launcher.agent.job_store import JobStore
from rallypoint.launcher.agent.rank_streams import RankStreams
from rallypoint.launcher.agent.supervisor import StartRanks
from rallypoint.launcher.protocol import Forked, NotForked, Restarted
from rallypoint.world import Seat

if TYPE_CHECKING:
    from rallypoint.host.ports import HeldPort
    from rallypoint.launcher.rendezvous_file import RendezvousFile

# Orders that the template may have waiting: enough to keep it busy, few enough that descriptors in
# flight stay far below limits.
ORDERS_AHEAD = 4


class RankStarter:
    """Starter of one attempt at a time."""

    def __init__(
        self,
        job: Job,
        streams: RankStreams,
        ignored: tuple[int, ...],
        *,
        held: HeldPort | None,
        place: RendezvousFile | None,
    ) -> None:
        """`ignored`: signals that were ignored when the job started. `held`: the first attempt's
        meeting point, if it was bound before. `place`: on a shared file system, where the job says
        where its ranks meet."""
        self._job = job
        self._streams = streams
        self._ignored = ignored
        self._held = held
        self._place = place
        self._seat: Seat | None = job.seat  # for the next attempt; None: the same again
        # wall clock before which no rank of the next attempt was started on any node: another one's
        # template may be ready long before this one's
        self.began = job.loop.clock.started
        self.noticed = False  # a notice came (`--notice-signal`)
        self.ahead = 0  # orders that the template has not answered
        self._orders: Iterator[Order] = iter(())

    # --- an attempt

    def take_seat(self, seat: Seat, held: HeldPort | None = None) -> None:
        """Take this node's seat for the next attempt. `held`: where the ranks will meet, when this
        is node 0."""
        self._seat, self._held = seat, held

    def start(self, action: StartRanks) -> None:
        """Begin an attempt: bind its meeting point, make its store, order its processes."""
        job, number = self._job, action.attempt
        self.close_store("the job was started again, with a new store")
        self.close_attempt()
        payload = job.request.payload if job.request is not None else ()
        same = msgspec.structs.replace(job.seat, attempt=number, master_port=0)
        seat, self._seat = self._seat or same, None
        job.attempt = Attempt(
            job.plan, seat, began=self.began, ignored=self._ignored, payload=payload
        )
        if job.request is not None and number:
            job.request.tell(Restarted(number))
        job.rendezvous.begin()
        job.evidence.begin()
        job.reporter.begin_attempt(number, action.because)
        job.console.begin_attempt(seat)
        try:
            self._streams.begin_attempt(number)
            job.attempt.begin(self._held)
            self._held = None
            if self._place is not None:
                self._place.publish(number, job.attempt.held)
            self._open_store()
        except EnvironmentProblem as problem:
            self._cannot_start(problem)
            return
        except OSError as error:
            self._exhausted(error)
            return
        if job.attempt.host is not None:
            job.reporter.event("port-held", host=job.seat.master_addr, port=job.seat.master_port)
        job.hang_monitor.begin()
        self._orders = job.attempt.orders(self._streams)
        self.ahead = 0
        self._send_orders()

    def stop(self) -> None:
        """Start nothing more."""
        self._orders = iter(())

    def close_attempt(self) -> None:
        """Close what the attempt holds. Its processes have ended."""
        job = self._job
        job.spawn_monitor.close()
        # A function that returns at once is done before the host serves.
        job.loop.unwatch(job.attempt.host_ready)
        for handle in job.ranks:  # one that would not die
            job.loop.unwatch(handle.pidfd)
        job.attempt.close()

    def _cannot_start(self, problem: EnvironmentProblem) -> None:
        self.stop()
        self._job.impossible(problem)

    def _exhausted(self, error: OSError) -> None:
        for handle in self._job.ranks:
            # It never will be started; cleaning up takes descriptors, too.
            if not handle.ordered and not handle.pid:
                handle.close()
        self._cannot_start(exhausted(error, self._job.plan.slots))

    # --- the store

    def _open_store(self) -> None:
        job = self._job
        job.attempt.open_store(job.others)
        if job.attempt.store is not None:
            if job.attempt.store.path:
                job.helpers.guard.inherit(job.attempt.store.path)
            for fd in job.attempt.store.filenos():
                job.loop.watch(fd, self._on_store_client)

    def _on_store_client(self) -> None:
        """Start the store's thread for its first client. A job whose ranks never ask for the store
        has none.
        """
        job, store = self._job, self._job.attempt.store
        if not isinstance(store, JobStore):
            return
        for fd in store.filenos():
            job.loop.unwatch(fd)
        try:
            store.serve(job.ranks, job.loop.clock.elapsed)
        except (OSError, RuntimeError) as error:
            # no descriptor, no memory, no thread: the clients read that nobody answers
            job.console.say(f"rallypoint: the job's store cannot be served: {error}")
            self.close_store("it could not be started")
            return
        job.reporter.event("store-serves", address=store.address)

    def close_store(self, reason: str) -> None:
        """End the store, if there is one; its clients are told the reason."""
        store, self._job.attempt.store = self._job.attempt.store, None
        if store is not None:
            for fd in store.filenos():
                self._job.loop.unwatch(fd)
            store.stop(reason)

    # --- orders, and the template's answers

    def _send_orders(self) -> None:
        job = self._job
        while self.ahead < ORDERS_AHEAD:
            try:
                order = next(self._orders, None)
            except OSError as error:
                self._exhausted(error)
                return
            if order is None:
                return
            self.ahead += 1
            if order.handle is not None:
                order.handle.ordered = True
            else:
                job.loop.watch(job.attempt.host_ready, self._on_host_ready)
            job.template.order(order.message, order.fds)
            for fd in order.ours:
                os.close(fd)

    def _on_host_ready(self) -> None:
        job = self._job
        job.loop.unwatch(job.attempt.host_ready)
        if job.attempt.has_host_answered():
            job.reporter.event("c10d-ready", address=job.attempt.held)

    def on_forked(self, message: Forked) -> None:
        """Handle a process that the template has forked."""
        self.ahead -= 1
        self._send_orders()
        try:
            self._take_in(message)
        except OSError as error:  # no descriptor is left for it, and nothing runs unwatched
            # its own number still: the template reaps it only when it is told to
            os.kill(message.pid, signal.SIGKILL)
            if self._job.problem is None:
                self._exhausted(error)
            self._not_started(message.rank)

    def _take_in(self, message: Forked) -> None:
        """Register a process with the guard and let its program start. Raises OSError when no
        descriptor is left for it.
        """
        job, guard = self._job, self._job.helpers.guard
        handle = job.rank(message.rank)
        if handle is None:
            if job.attempt.host is not None:
                job.attempt.host_started(message.pid)
                guard.register(message.pid, job.attempt.host.pidfd)
            return
        handle.forked(message.pid)
        guard.register(message.pid, handle.pidfd)  # before the program can start anything
        if handle.sent:  # the job was stopped while it was being forked
            processes.send(handle.pidfd, signal.SIGKILL)
        else:
            handle.go(noticed=self.noticed)
        if not job.plan.hooks:
            handle.phase = "started"  # it will tell nothing more
        job.reporter.event(
            "worker-started", rank=message.rank, pid=message.pid, fork=round(message.seconds, 4)
        )
        job.loop.watch(handle.control.fileno(), partial(job.messages.receive, handle))
        job.loop.watch(handle.pidfd, partial(job.endings.on_untold_end, handle))

    def on_not_forked(self, message: NotForked) -> None:
        """Handle a process that the template could not fork."""
        job = self._job
        self.ahead -= 1
        if message.unclean:
            job.console.say_unclean("", message.unclean)
        job.problem = job.reporter.not_forked(message)
        if not self._not_started(message.rank):
            job.feed(supervisor.Impossible("a process could not be started"))

    def _not_started(self, rank: int) -> bool:
        """Note that a rank never will be; return whether the job is being stopped, and the
        supervisor waits for the rank's end.
        """
        handle = self._job.rank(rank)
        if handle is None:
            return False
        handle.ordered = False
        if handle.sent:
            self._job.endings.never_started(rank)
        return bool(handle.sent)

    def give_up_orders(self) -> None:
        """Handle the template's end: what it had not forked by now, it never will."""
        for handle in self._job.ranks:
            handle.ordered = False

    def abandon(self) -> None:
        """Start nothing more, and have ranks that are forked from now on killed."""
        self.stop()
        for handle in self._job.ranks:
            handle.sent.append("SIGKILL")
