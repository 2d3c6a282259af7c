"""An agent's side of a job on several nodes: it finds the lead, hears from it, and tells it.

Threads do the waiting: one finds the lead and then takes what it sends, one sends. The agent's loop
reads what has come when `fileno` is readable, and never waits for the network.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable

import msgspec

from rallypoint.clock import Clock
from rallypoint.diagnosis.evidence import How
from rallypoint.errors import RallypointError, SessionLost, StoreUnreachable
from rallypoint.host import threads
from rallypoint.host.interfaces import interfaces
from rallypoint.host.ports import HeldPort
from rallypoint.host.probe import Looking
from rallypoint.launcher.job_diagnosis import FailedAttempt
from rallypoint.launcher.nodes import endpoint, messages, refusals
from rallypoint.launcher.nodes.lead_runner import LOOK_TIMEOUT, LeadRunner
from rallypoint.launcher.nodes.messages import (
    Applicant,
    Missing,
    NodeMessage,
    Ping,
    Pong,
    Seated,
    Sentence,
    Try,
)
from rallypoint.launcher.plan import Plan
from rallypoint.primitives.queue import Queue
from rallypoint.store.client.member import Member
from rallypoint.world import Seat

TRY_TIMEOUT = 2.0
"""Seconds of one try to reach the lead. Its name and the node that leads are looked up anew for each."""

BEFORE_NEXT_TRY = 0.2
"""Seconds between tries to reach the lead, and between looks at the folder on a shared disk: nobody
tells of a change there.
"""

FINAL = frozenset(
    (
        "wrong-secret",
        "wrong-job",
        "version-skew",
        "store-relayed",
        "tls-mismatch",
        "tls-intercepted",
    )
)
"""Codes of a refusal by a store of ours: trying again gives the same answer."""

PINGS = 8
"""Round trips by which the clocks are compared: the shortest counts, and one in eight is not
delayed on a busy machine.
"""

CLOCKS_APART = 1.0
"""Seconds between the clocks of two machines of which a person is told."""

BEFORE_NEXT_LOOK = 5.0
"""Seconds between looks for another node 0, which may be started later."""

LEAVE_TIMEOUT = 2.0
"""Seconds that threads get to end; the process goes without them then."""


class LeadLost(msgspec.Struct, frozen=True):
    """End of the conversation with the lead: nothing more comes."""

    because: str
    problem: RallypointError | None = None  # why there never was one


class NotReached(msgspec.Struct, frozen=True):
    """Word that the lead was not reached so far."""

    because: str


Heard = NodeMessage | LeadLost | NotReached | Exception  # of a thread that cannot go on


class Membership:
    """Place of this agent in a job on several nodes. On the node that leads it owns the lead,
    too.
    """

    def __init__(
        self,
        plan: Plan,
        secret: bytes,
        applicant: Applicant,
        judge: Callable[[FailedAttempt], Sentence],
        clock: Clock,
        held: HeldPort | None = None,
    ) -> None:
        """`secret`: of the coordination store. `applicant`: this node, as far as it is known before
        the lead is reached. `judge` is for the lead, when this node is to lead; `held` is where it
        was announced as the lead.
        """
        assert plan.nodes is not None
        self.lead: LeadRunner | None = None  # when this node leads
        # Seconds to add to a time of this agent's clock for the lead's, and how wrong that may be.
        self.offset, self.error = 0.0, 0.0
        # Numeric address and port at which this node reaches the lead, once it has.
        self.lead_address = ("", 0)
        self._plan = plan
        self._nodes = plan.nodes
        self._secret = secret
        self._held = held
        self._applicant = applicant
        self._own_address = ""  # from which this node reaches the lead
        self._judge = judge
        self._clock = clock
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # With the last thread that may write to it: `launch` makes a membership for each call.
        weakref.finalize(self, os.close, self._wake).atexit = False
        self._heard: deque[Heard] = deque()
        self._to_send: queue.SimpleQueue[NodeMessage | None] = queue.SimpleQueue()
        self._member: Member | None = None
        self._leaving = threading.Event()
        self._seated = threading.Event()  # all have come
        self._sending: threading.Thread | None = None
        self._join_until = clock.elapsed() + plan.nodes.join_timeout
        self._pings = 0  # sent, to compare the clocks
        self._thread = threads.start(self._run, "join")

    def __repr__(self) -> str:
        where = self._member.address if self._member is not None else "not joined"
        return f"<Membership {self._applicant.id}: {where}{', leads' if self.lead else ''}>"

    # --- for the agent's loop

    def fileno(self) -> int:
        """Return the descriptor that is readable when something has come."""
        return self._wake

    def read(self) -> list[Heard]:
        """Return what has come since the last call, oldest first. Does not wait."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        return [self._heard.popleft() for _ in range(len(self._heard))]

    def send(self, message: NodeMessage) -> None:
        """Have a message sent to the lead. Does not wait."""
        self._to_send.put(message)

    @property
    def left(self) -> float:
        """Seconds after which the others may take this node for lost; 0 when they may have."""
        return self._member.left if self._member is not None else 0.0

    @property
    def how_lost(self) -> How:
        """How the conversation with the lead ended."""
        return self._member.how_lost if self._member is not None else "connection ended"

    def _interface(self, seat: Seat) -> str:
        """Return the interface by which this node reaches the others; "" when it is not known. The
        lead's is that of the address at which they reach it.
        """
        own = self._own_address if self.lead is None else seat.master_addr
        for one in interfaces():
            if any(address.ip == own for address in one.addresses):
                return one.name
        return ""

    def close(self, timeout: float) -> None:
        """Leave the job, with all that was to be sent. A lead waits up to `timeout` seconds for
        the other nodes to leave.
        """
        self._leaving.set()
        self._to_send.put(None)
        patience = LEAVE_TIMEOUT
        if self._member is not None and self.left <= 0.0:
            patience = 0.0  # nothing reaches the lead any more, and threads may wait in vain
        if self._sending is not None:
            self._sending.join(patience)
        if self._member is not None:
            self._member.close()
        self._thread.join(patience)
        if self.lead is not None:
            self.lead.close(timeout)

    # --- threads

    def _put(self, heard: Heard) -> None:
        self._heard.append(heard)
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            while (member := self._join()) is not None:
                try:
                    self._take_orders(member)
                    return
                except SessionLost as lost:
                    if self._seated.is_set():
                        raise
                    # Nothing has begun: this launcher or the lead's stood still (Ctrl-Z), say.
                    self._put(NotReached(str(lost)))
                    member.close()
        except Exception as error:
            self._end(error)

    def _take_orders(self, member: Member) -> None:
        """Take part in the job, until this agent leaves."""
        orders = Queue(member, messages.to_node(self._applicant.id))
        self._compare_clocks(member, orders.get)
        self._enter(member)
        if self._sending is None:
            self._sending = threads.start(self._send_all, "tell")
        while not self._leaving.is_set():
            self._receive(messages.decode(orders.get()))

    def _end(self, error: Exception) -> None:
        """Tell the agent that a thread cannot go on."""
        if self._leaving.is_set():
            return
        if isinstance(error, RallypointError):
            self._put(LeadLost(str(error), error if self._member is None else None))
        else:
            self._put(error)

    def _join(self) -> Member | None:
        """Find the lead, or become it. None when the agent leaves meanwhile."""
        nodes = self._nodes
        until = self._join_until
        while not self._leaving.is_set():
            places = self._places(until - self._clock.elapsed())
            left = until - self._clock.elapsed()
            if not places:
                self._nobody_yet(left)
                continue
            try:
                member = Member.join(
                    places,
                    self._secret,
                    job=endpoint.job_name(nodes),
                    ttl=nodes.timeout,
                    timeout=max(0.1, min(TRY_TIMEOUT, left)),
                    patience=nodes.timeout,
                    source=nodes.local_addr,
                    tls=nodes.tls,
                )
            except StoreUnreachable as error:
                # Another job may have one of several ports, and the lead come later; and the lead of
                # an earlier call may wait for a node that is slow to leave.
                comes = error.code == "wrong-job" and (len(places) > 1 or nodes.call > 0)
                if error.code in FINAL and not comes:
                    raise endpoint.not_let_in(nodes, error) from None
                if self._clock.elapsed() >= until:
                    # Where nothing listens, a list of the attempts says no more than the error.
                    why = () if error.code == "port-refused" else error.why
                    help = error.help if error.code == "address-unresolved" else ()
                    raise endpoint.lead_not_reached(nodes, str(error), *why, help=help) from None
                self._put(NotReached(str(error)))
                self._leaving.wait(BEFORE_NEXT_TRY)  # a refusal comes at once
                continue
            self._member = member
            if not self._leaving.is_set():
                return member
            member.close()
        return None

    def _nobody_yet(self, left: float) -> None:
        """Wait a little for the lead to write where it is. Raises `join-timeout`."""
        because = f"the folder {self._nodes.folder}, which all nodes must share, does not say yet where it is"
        if left <= 0:
            raise endpoint.lead_not_reached(self._nodes, because)
        self._put(NotReached(because))
        self._leaving.wait(BEFORE_NEXT_TRY)

    def _places(self, left: float) -> list[tuple[str, int]]:
        """Return where the lead may be, at first by a try to lead. `left`: seconds to join."""
        nodes = self._nodes
        if self.lead is None:
            claimed = endpoint.claim(nodes, self._plan.port_range, self._held, left)
            if claimed is not None:
                self.lead = LeadRunner(
                    claimed,
                    self._plan,
                    self._secret,
                    self._applicant,
                    self._judge,
                    self._clock,
                    self._put,
                )
                if nodes.rank == 0 and not (nodes.folder or nodes.lead):
                    threads.start(self._look_for_another, "another")
        return [self.lead.place] if self.lead is not None else endpoint.places(nodes)

    def _look_for_another(self) -> None:
        """Look whether another node leads where this one is to be reached, until all have come:
        both would wait for the others until their time is over.
        """
        nodes, here = self._nodes, self._applicant
        while not (self._seated.is_set() or self._leaving.is_set()):
            try:
                if endpoint.is_elsewhere(nodes):
                    with Member.join(
                        endpoint.places(nodes),
                        self._secret,
                        job=endpoint.job_name(nodes),
                        ttl=nodes.timeout,
                        timeout=TRY_TIMEOUT,
                        tls=nodes.tls,
                    ) as store:
                        found = messages.decode(store.wait(messages.LEADER, TRY_TIMEOUT))
                    if isinstance(found, Applicant) and found.id != here.id:
                        self._put(refusals.two_leads(here.host, found.host, nodes.host))
                        return
            except RallypointError:
                pass  # nobody else leads there, as far as can be seen
            self._leaving.wait(BEFORE_NEXT_LOOK)

    def _compare_clocks(self, member: Member, take: Callable[[], bytes]) -> None:
        """Measure how far the lead's clock is from this agent's (Cristian's algorithm: the answer
        was given in the middle of the shortest round trip, give or take half of it).
        """
        if self.lead is not None:
            return
        asking = Queue(member, messages.TO_LEAD)
        best, apart = None, 0.0
        for number in range(self._pings, PINGS):
            self._pings = number + 1
            sent = self._clock.elapsed()
            asking.put(messages.encode(Ping(self._applicant.id, number)))
            pong = messages.decode(take())
            while not isinstance(pong, Pong) or pong.number != number:  # of a lost session
                pong = messages.decode(take())
            came = self._clock.elapsed()
            if best is None or came - sent < best:
                best = came - sent
                self.offset = pong.now - (sent + came) / 2
                self.error = best / 2
                apart = self._clock.wall() - best / 2 - pong.wall
        if abs(apart) > CLOCKS_APART + self.error:
            which = "ahead of" if apart > 0 else "behind"
            host = self._applicant.host
            told = f"the clock of {host} is {abs(apart):.1f} s {which} that of node 0"
            self._put(Missing((f"{told}: reports have node 0's time, and {host}'s logs its own",)))

    def _enter(self, member: Member) -> None:
        """Apply for a place: the lead watches these keys, which go with their sessions."""
        own = self._own_address = member.local_address
        self.lead_address = member.lead_address
        applicant = msgspec.structs.replace(
            self._applicant, reached=self.lead_address[0], addresses=(own,) if own else ()
        )
        member.set(messages.NODES + applicant.id, messages.encode(applicant), ephemeral=True)

    def _receive(self, message: NodeMessage) -> None:
        match message:
            case Try(addresses):
                port = self.lead_address[1]
                looks = [Looking(one, port, b"", LOOK_TIMEOUT) for one in addresses]
                seen = [(look.address[0], look.wait(2 * LOOK_TIMEOUT)) for look in looks]
                reached = tuple(
                    ip
                    for ip, found in seen
                    if found is not None and found.outcome in ("answered", "silent", "closed")
                )
                self.send(messages.Reachable(self._applicant.id, reached))
            case Seated(seat):
                self._seated.set()
                seat = msgspec.structs.replace(seat, interface=self._interface(seat))
                self._put(msgspec.structs.replace(message, seat=seat))
            case _:
                self._put(message)

    def _send_all(self) -> None:
        try:
            while (message := self._to_send.get()) is not None:
                assert self._member is not None
                try:
                    Queue(self._member, messages.TO_LEAD).put(messages.encode(message))
                except SessionLost:  # before that the other thread joins again
                    if self._seated.is_set():
                        raise
        except Exception as error:
            self._end(error)
