"""Lead of a job on several nodes: it serves the coordination store, and carries out what `joining`
and `lead` decide.

It runs in threads of the agent of node 0: the store's own, two that wait for what the nodes send,
and one that decides. That node's agent is a member like all others.
"""

from __future__ import annotations

import contextlib
import functools
import math
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from rallypoint.clock import Clock
from rallypoint.diagnosis.evidence import How, Look, LostNode
from rallypoint.errors import RallypointError
from rallypoint.host import ports, threads
from rallypoint.host.ports import HeldPort
from rallypoint.host.probe import Looking, set_for_signs_of_life
from rallypoint.host.socket_addresses import is_own, numeric
from rallypoint.launcher.job_diagnosis import FailedAttempt
from rallypoint.launcher.nodes import endpoint, joining, lead, messages
from rallypoint.launcher.nodes.decisions import Decision, Tell, TellAll, TellNodes
from rallypoint.launcher.nodes.endpoint import Claim
from rallypoint.launcher.nodes.joining import Joining, NodeEvent
from rallypoint.launcher.nodes.lead import Lead
from rallypoint.launcher.nodes.messages import (
    Applicant,
    NodeMessage,
    Offers,
    Ping,
    Pong,
    Reachable,
    ResultOf,
    Sentence,
)
from rallypoint.launcher.plan import Plan
from rallypoint.launcher.restarts import Restarts
from rallypoint.primitives.queue import Queue
from rallypoint.store.client.client import ABSENT
from rallypoint.store.client.member import Member
from rallypoint.store.server.server import Server
from rallypoint.wire.messages import Identity
from rallypoint.world import Seat

if TYPE_CHECKING:
    from rallypoint.store.certificate import TlsIdentity

NAP = 0.2
"""Seconds after which the lead looks at the clock, whatever comes: it may have stood still."""

OWN_TTL = 3600.0
"""Seconds of the lead's own session, which ends with its process: it may stand still meanwhile."""

LOOK_TIMEOUT = 1.0
"""Seconds of a look at the host of a node that is lost: a host that is up refuses in milliseconds."""

LOOK_PATIENCE = 0.5
"""Seconds that a report waits for such a look. Evidence of the other nodes comes meanwhile."""


class StoodStill(ConnectionError):
    """This launcher stood still, for as long as the other nodes wait for the lead, or longer."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"this launcher stood still for {seconds:.1f} s")
        self.seconds = seconds


class LeadRunner:
    """The lead's threads. Made when this node is to lead."""

    def __init__(
        self,
        claim: Claim,
        plan: Plan,
        secret: bytes,
        applicant: Applicant,
        judge: Callable[[FailedAttempt], Sentence],
        clock: Clock,
        failed: Callable[[Exception], None],
    ) -> None:
        """Take the lead. `secret`: of the coordination store. `applicant`: this node's own. `judge` is
        called by the lead's thread. `clock`: of this agent, to which the times of all nodes are
        shifted. `failed` is called by a thread that cannot go on."""
        self._claim = claim
        assert plan.nodes is not None
        self._plan, self._nodes = plan, (nodes := plan.nodes)
        self._judge = judge
        self._clock = clock
        self._failed = failed
        self._wildcard = claim.held.host
        own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._wildcard, self._wildcard)
        self.place = (own, claim.held.port)  # by which this machine reaches it
        self._held: dict[int, tuple[HeldPort, HeldPort]] = {}
        self._holding = threading.Lock()
        self._id = applicant.id
        self.identity: TlsIdentity | None = None  # of the stores of the attempts, too
        self._lead: Lead | None = None
        self._applicants: dict[str, Applicant] = {}
        # Lost nodes, and looks at their hosts. There is no attempt after a loss.
        self._losses: dict[int, tuple[LostNode, Looking | None]] = {}
        # By host and pid: how sessions without a goodbye ended, and since when nothing was heard.
        self._ended: dict[tuple[str, int], tuple[How, float]] = {}
        self._inbox: queue.SimpleQueue[NodeEvent | NodeMessage | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        with contextlib.ExitStack() as undo:
            undo.callback(self._release)
            if nodes.tls:
                from rallypoint.store.certificate import new_identity  # here: OpenSSL loads slowly

                self.identity = new_identity()
            self._joining = Joining(
                msgspec.structs.replace(applicant, offers=self._hold(0)),
                timeout=nodes.join_timeout,
                now=self._clock.monotonic(),
                listens_on=self._wildcard,
                leads_since=endpoint.why_it_leads(nodes, applicant.host),
            )
            listener = socket.socket(fileno=claim.held.detach())
            set_for_signs_of_life(listener)
            self._server = Server(
                listeners=[listener],
                secret=secret,
                job=endpoint.job_name(nodes),
                local=False,
                identity=self.identity,
                on_end=self._session_ended,
                on_stranger=self._stranger_came,
            )
            undo.callback(self._server.stop, "the lead could not be started")
            self._server.start()
            self._store = Member.join(
                [self.place],
                secret,
                job=endpoint.job_name(nodes),
                ttl=OWN_TTL,
                timeout=nodes.timeout,
                tls=nodes.tls,
            )
            undo.callback(self._store.close)
            undo.callback(self._closing.set)
            self._store.set(messages.LEADER, messages.encode(applicant))
            for name, target in (("hear", self._hear), ("watch", self._watch)):
                threads.start(functools.partial(self._carry_out, target), name)
            self._thread = threads.start(functools.partial(self._carry_out, self._run), "lead")
            undo.pop_all()

    # --- for the agent of this node

    def take(self, attempt: int) -> tuple[HeldPort | None, HeldPort | None]:
        """Return the listeners of an attempt, which become the caller's: where its ranks meet, and
        of its store. None: they could not be bound.
        """
        with self._holding:
            return self._held.pop(attempt, (None, None))

    def close(self, timeout: float) -> None:
        """End the coordination: at once, or when all others have left a job that is over, at most
        `timeout` seconds from now.
        """
        self._inbox.put(None)
        self._thread.join(timeout)
        self._closing.set()
        self._server.stop("the job is over" if self._is_over() else "node 0 has left the job")
        self._store.close()
        self._release()

    def _release(self) -> None:
        with self._holding:
            for pair in self._held.values():
                for held in pair:
                    held.release()
            self._held.clear()
        self._claim.release()

    def _hold(self, attempt: int) -> Offers:
        """Bind what the attempt needs on this node, before any node is told of it."""
        plan = self._plan
        meeting = ports.hold_port(plan.master_port, self._wildcard, plan.port_range)
        try:
            store = ports.hold_port(0, self._wildcard, plan.port_range)
        except BaseException:
            meeting.release()
            raise
        with self._holding:
            self._held[attempt] = (meeting, store)
        return Offers(meeting.port, store.port, self._nodes.tls)

    def _hold_again(self, attempt: int) -> Offers:
        """Do the same for another attempt. Where it cannot be, this node's agent tries it, and
        reports why not.
        """
        try:
            return self._hold(attempt)
        except (RallypointError, OSError):
            return Offers(self._plan.master_port, 0)

    # --- threads that wait

    def _carry_out(self, target: Callable[[], None]) -> None:
        """Run one of the threads: without it the job would stand still."""
        try:
            target()
        except Exception as error:
            if not self._closing.is_set():
                self._failed(error)

    def _hear(self) -> None:
        """Take what the nodes send, until the server stops."""
        orders = Queue(self._store, messages.TO_LEAD)
        while True:
            message = messages.decode(orders.get())
            if isinstance(message, Ping):  # at once: it measures
                self._send(
                    message.id, Pong(message.number, self._clock.elapsed(), self._clock.wall())
                )
            else:
                self._inbox.put(message)

    def _watch(self) -> None:
        """Take which nodes come and go, until the server stops."""
        changes = self._store.watch(messages.NODES)
        for key, value in self._store.items(messages.NODES):
            self._changed(key, value)
        for change in changes:
            self._changed(change.key, change.value)

    def _changed(self, key: str, value: object) -> None:
        if value is ABSENT:
            self._inbox.put(joining.Went(key.removeprefix(messages.NODES)))
        elif isinstance(value, bytes):
            applicant = messages.decode(value)
            assert isinstance(applicant, Applicant)
            self._inbox.put(joining.Came(applicant))

    def _session_ended(self, who: Identity, silent: bool, seconds: float) -> None:
        """Note how a node was lost, before its key goes. Called by the store's thread."""
        self._ended[who.host, who.pid] = (
            "lease over" if silent else "connection ended",
            self._clock.elapsed() - seconds,
        )

    def _stranger_came(self, address: str, because: str) -> None:
        """Have those that wait told of one that was not let in. Called by the store's thread."""
        if self._lead is None:
            self._inbox.put(joining.Rejected(address, because))

    # --- the thread that decides

    def _run(self) -> None:
        is_leaving = False  # this node's agent
        self._looked = self._clock.monotonic()
        while not (is_leaving and self._is_done()):
            due = min(self._joining.due, self._lead.due if self._lead is not None else math.inf)
            wait = max(0.0, min(NAP, due - self._clock.monotonic()))
            try:
                event = self._inbox.get(timeout=wait)
            except queue.Empty:
                event = joining.Tick()
            before, self._looked = self._looked, self._clock.monotonic()
            if self._looked - before > self._nodes.timeout and self._is_running():
                # Their ends, which it sees now, are because of it.
                self._failed(StoodStill(self._looked - before))
                return
            if event is None:
                is_leaving = True
            else:
                self._handle(event)

    def _is_over(self) -> bool:
        return self._lead is not None and self._lead.state is lead.Phase.OVER

    def _is_running(self) -> bool:
        return self._lead is not None and not self._is_over()

    def _is_done(self) -> bool:
        """Return whether the lead waits for nothing when its own agent leaves: a node that was
        dismissed or refused is about to leave, and others are not told any more.
        """
        has_ended = self._is_over() or self._joining.state is joining.Stage.CLOSED
        return not has_ended or not self._applicants.keys() - {self._id}

    def _handle(self, event: NodeEvent | NodeMessage) -> None:
        if isinstance(event, joining.Came):
            self._applicants[event.applicant.id] = event.applicant
        elif isinstance(event, joining.Went):
            self._went(event.id)
        elif isinstance(event, ResultOf):
            self._send(self._id, event)
            return
        elif isinstance(event, messages.Notice):
            self._send_all(event, but=event.node)
        now = self._clock.monotonic()
        if self._lead is not None:
            for decision in self._lead.handle(event, now):
                self._do(decision)
        if isinstance(event, NodeEvent | Reachable):
            for refusal in self._joining.handle(event, now):
                self._do(refusal)

    def _went(self, id: str) -> None:
        """Note that a node has left, or is lost: it is the same to whoever waits for it."""
        gone, node = self._applicants.pop(id, None), self._joining.nodes.get(id)
        if gone is None or node is None:
            return
        at = self._clock.elapsed()
        how, since = self._ended.get((gone.host, gone.pid), ("goodbye", at))
        address = gone.addresses[0] if gone.addresses and self._is_running() else ""
        loss = LostNode(
            node,
            gone.host,
            tuple(self._joining.world.ranks(node)),
            how,
            at,
            at - since,
            address=address,
        )
        # on this machine the lead itself listens there
        port = 0 if is_own(numeric(address, 0)) else self.place[1]
        self._losses[node] = loss, Looking(address, port, b"", LOOK_TIMEOUT) if address else None
        self._inbox.put(lead.Lost(node, "no sign of life came from its launcher"))

    def _do(self, decision: Decision | NodeMessage) -> None:
        plan = self._plan
        match decision:
            case Tell(id, message):
                self._send(id, message)
            case TellNodes(nodes, message):
                for id, node in self._joining.nodes.items():
                    if node in nodes:
                        self._send(id, message)
            case TellAll(message, but):
                self._send_all(message, but)
            case joining.Form(seats, world):
                self._lead = Lead(
                    world,
                    self._joining.hosts,
                    now=self._clock.monotonic(),
                    restarts=Restarts(plan.max_restarts),
                    grace=plan.grace,
                    roll_call=plan.roll_call,
                    program=plan.program.target,
                )
                self._seat(seats)
            case lead.NextAttempt(attempt):
                self._seat(self._joining.seats(attempt, self._hold_again(attempt)))
            case lead.Diagnose():
                self._inbox.put(self._diagnosed(decision))
                self._looked = self._clock.monotonic()  # a thousand ranks take a second or two

    def _seat(self, seats: Mapping[str, Seat]) -> None:
        for id, seat in seats.items():
            self._held_address = f"{seat.master_addr}:{seat.master_port}"
            seated = messages.Seated(
                seat, self._plan.job, self._joining.hosts[0], self._plan.max_restarts
            )
            self._send(id, seated)

    def _diagnosed(self, decision: lead.Diagnose) -> Sentence:
        """Judge, with what was seen of the hosts of lost nodes by now."""
        until = self._clock.monotonic() + LOOK_PATIENCE
        lost = tuple(self._lost(node, until) for node in decision.lost)
        return self._judge(decision.failed._replace(lost=lost, held_address=self._held_address))

    def _lost(self, node: int, until: float) -> LostNode:
        assert self._lead is not None
        loss, look = self._losses[node]
        left = max(0.0, until - self._clock.monotonic())
        return msgspec.structs.replace(
            loss,
            looked=looked(look, left) if look is not None else "",
            started=self._lead.ranks.have_started(node),
        )

    # --- sending

    def _send_all(self, message: NodeMessage, but: int = -1) -> None:
        nodes = self._joining.nodes
        data = messages.encode(message)
        for id in [*self._applicants]:
            if but < 0 or nodes.get(id) != but:
                Queue(self._store, messages.to_node(id)).put(data)

    def _send(self, id: str, message: NodeMessage) -> None:
        Queue(self._store, messages.to_node(id)).put(messages.encode(message))


def looked(look: Looking, timeout: float) -> Look:
    """Return what a look at another node's host has shown within so many seconds."""
    seen = look.wait(timeout)
    match seen.outcome if seen is not None else "":
        case "answered" | "closed":
            return "listening"
        case "refused" | "silent" | "unreachable" as outcome:
            return outcome
    return "dropped"
