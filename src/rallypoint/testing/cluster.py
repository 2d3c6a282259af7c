"""Up to thousands of nodes in one process: the pure cores of a job on several nodes, under one clock
that a seed moves.

The lead's `Joining` and `Lead` are the real ones, and every message is encoded and decoded. Nodes
are played: each says what an agent says when its ranks meet, end, fail or are stopped. The seed
decides when nodes come, how long a message takes, and which faults happen.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from rallypoint.clock import Clock
from rallypoint.diagnosis.report import TEMPORARY
from rallypoint.launcher.nodes import joining, lead, messages
from rallypoint.launcher.nodes.decisions import Tell, TellAll, TellNodes
from rallypoint.launcher.nodes.joining import Joining, Tick
from rallypoint.launcher.nodes.lead import Lead
from rallypoint.launcher.nodes.messages import (
    Applicant,
    NodeMessage,
    Offers,
    Sentence,
    Versions,
)
from rallypoint.launcher.restarts import Restarts
from rallypoint.testing import node_faults
from rallypoint.testing.clock import ManualClock
from rallypoint.testing.simulated_node import GRACE, SimulatedNode
from rallypoint.world import Seat

JOIN_TIMEOUT = 30.0

LONGEST = 1_000.0
"""Seconds after which a job is said not to end."""

_VERSIONS = Versions("0.1.0", "2.13.0", "3.11.7")


class SimulatedCluster:
    """A job on several nodes, from the first that comes to the last that leaves."""

    def __init__(
        self,
        seed: int,
        *,
        nodes: int = 0,
        ranks: int = 2,
        faults: int | None = None,
        timer: Callable[[], float] = Clock.monotonic,
        joining: type[Joining] = Joining,
        lead: type[Lead] = Lead,
    ) -> None:
        """Prepare a job. `nodes`, `faults` (things that go wrong): the seed decides, unless they
        are given. `timer` measures decisions. `joining`, `lead`: other classes than the real ones,
        so that the play itself can be tested.
        """
        self.chance = chance = random.Random(f"{seed} cluster")
        self.size = nodes or chance.choice((2, 2, 3, 4, 4, 6, 9))
        self.clock = ManualClock()
        self.violations: list[str] = []
        self.messages = 0
        self.counts: Counter[str] = Counter()
        self.slowest = self.deciding = 0.0  # real seconds of one decision, and of all
        self.training = chance.uniform(0.5, 8.0)
        self.max_restarts = chance.choice((0, 0, 1, 3))
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()
        self._loss = chance.choice((0.0, 0.0, 0.02, 0.2))
        self._ranks = ranks
        self.lead_is_dead = False
        self._tick_at = float("inf")
        self._seats: dict[int, dict[int, Seat]] = {}  # by attempt and node
        self._met: Counter[int] = Counter()
        self._sentences: Counter[int] = Counter()
        self._judged_at = 0.0
        self.busy = self.size  # nodes that come, or have not left
        self.held_up = 0.0  # seconds that faults may hold everything up
        self.nodes = [self._node(number) for number in range(self.size)]
        self._timer = timer
        self._lead_class = lead
        self._joining = joining(self.nodes[0].applicant, timeout=JOIN_TIMEOUT)
        self._lead: Lead | None = None
        self._by_id = {node.applicant.id: node for node in self.nodes}
        for node in self.nodes:
            self.at(chance.uniform(0.0, 3.0), node.come)
        count = chance.choice((0, 1, 1, 2, 2, 3, 4)) if faults is None else faults
        for _ in range(count):
            self.at(chance.uniform(0.0, 4.0 + self.training), self._go_wrong)

    @property
    def now(self) -> float:
        """Seconds since the play began."""
        return self.clock.monotonic()

    @property
    def world_size(self) -> int:
        """Number of ranks in the whole job."""
        return self.size * self._ranks

    def wrong(self, what: str) -> None:
        """Note something that must not be."""
        self.violations.append(f"{self.now:.3f} s: {what}")

    def at(self, when: float, step: Callable[[], object]) -> None:
        """Do something at a time."""
        heapq.heappush(self._events, (when, next(self._order), step))

    def run(self) -> list[str]:
        """Play the job to its end; return what was wrong."""
        while self._events and self.busy:
            when, _, step = heapq.heappop(self._events)
            if when > LONGEST:
                break
            self.clock.advance(max(0.0, when - self.now))
            step()
        for node in self.present():
            if node.state not in ("left", "absent"):
                self.wrong(f"{node} waits for ever")
        ends = {node.status for node in self.nodes if node.ended == "dismissed"}
        if len(ends) > 1:
            self.wrong(f"nodes were dismissed with different statuses: {ends}")
        return self.violations

    def _node(self, number: int) -> SimulatedNode:
        chance, is_lead = self.chance, number == 0
        applicant = Applicant(
            f"{number:05}", f"gpu{number:05}", 100 + number, self._ranks, self.size, _VERSIONS, "digest",
            node_rank=number if number and chance.random() < 0.3 else None,
            reached="127.0.0.1" if is_lead else "10.0.0.1",
            addresses=("10.0.0.1", "192.168.0.1") if is_lead else (f"10.1.{number >> 8}.{number & 255}",),
            offers=Offers(29500, 29501) if is_lead else None,
        )  # fmt: skip
        return SimulatedNode(self, applicant)

    def present(self) -> list[SimulatedNode]:
        """Return the nodes that have come, also those that have left."""
        return [node for node in self._by_id.values() if node.state not in ("away", "absent")]

    # --- messages on their way

    def carry(self, node: SimulatedNode, arrive: Callable[[SimulatedNode], None]) -> None:
        """Have the next message of a node, or to it, arrive after a while: in order, and late where
        packets are lost.
        """
        self.messages += 1
        late = 0.0
        while self.chance.random() < self._loss and late < 1.0:
            late = 2 * late or 0.2
        self.at(self.now + self.chance.uniform(0.0002, 0.004) + late, lambda: arrive(node))

    def hear(self, node: SimulatedNode) -> None:
        """Let the lead take the next message of a node."""
        free_at = max(node.cut_until, self.nodes[0].frozen_until)
        if free_at > self.now:
            self.at(free_at, lambda: self.hear(node))
            return
        event = node.to_lead.popleft()
        if isinstance(event, joining.Went):
            self._session_ends(node)
        elif isinstance(event, joining.Came):
            if node.is_connected:
                node.is_known = True
                self._decide(event)
        elif node.is_connected or self.chance.random() < 0.3:  # it was in the queue already
            self._decide(messages.decode(messages.encode(event)))

    def _arrive(self, node: SimulatedNode) -> None:
        """Let a node take the lead's next message."""
        free_at = max(node.cut_until, node.frozen_until)
        if free_at > self.now:
            self.at(free_at, lambda: self._arrive(node))
            return
        message = node.from_lead.popleft()
        if node.state != "left":
            node.hear(messages.decode(messages.encode(message)))

    def _send(self, node: SimulatedNode, message: NodeMessage) -> None:
        if node.is_connected:
            node.from_lead.append(message)
            self.carry(node, self._arrive)

    def _session_ends(self, node: SimulatedNode) -> None:
        """Let the lead see that a node's session is over."""
        if node.is_connected:
            node.is_connected = False
            self._decide(joining.Went(node.applicant.id))
            number = self._joining.nodes.get(node.applicant.id)
            if self._lead is not None and number is not None:
                self._decide(lead.Lost(number, "nothing was heard of its launcher"))

    # --- the lead

    def _decide(self, event: Any) -> None:
        if self.lead_is_dead:
            return
        began = self._timer()
        decisions: list[Any] = [*self._joining.handle(event, self.now)]
        if self._lead is not None:
            decisions += self._lead.handle(event, self.now)
        took = self._timer() - began
        self.deciding += took
        self.slowest = max(self.slowest, took)
        for decision in decisions:
            self._do(decision)
        due = min(core.due for core in (self._joining, self._lead) if core is not None)
        if due <= self.now and isinstance(event, Tick) and not decisions:
            self.wrong("a decision is due, and none is made")  # its lead would never rest
        elif due < self._tick_at:
            self._tick_at = due
            self.at(due, self._tick)

    def _tick(self) -> None:
        frozen_until = self.nodes[0].frozen_until
        if frozen_until > self.now:
            self.at(frozen_until, self._tick)
            return
        self._tick_at = float("inf")
        self._decide(Tick())

    def _all(self, message: NodeMessage, but: int = -1) -> None:
        for node in self._by_id.values():
            if node.is_known and (but < 0 or node.number != but):
                self._send(node, message)

    def _do(self, decision: Any) -> None:
        match decision:
            case Tell(id, message):
                self._note(message)
                self._send(self._by_id[id], message)
            case TellAll(message, but):
                self._note(message)
                self._all(message, but)
            case TellNodes(nodes, message):
                ids = {number: id for id, number in self._joining.nodes.items()}
                for node in nodes:
                    self._send(self._by_id[ids[node]], message)
            case joining.Form(seats, world):
                self.counts["Form"] += 1
                self._lead = self._lead_class(
                    world, self._joining.hosts, now=self.now, restarts=Restarts(self.max_restarts), grace=GRACE
                )  # fmt: skip
                self._seat(seats)
            case lead.Diagnose(failed, lost):
                late = self.now - self._judged_at
                if late > lead.CAUSE_PATIENCE + self.held_up + 0.1:
                    self.wrong(f"evidence was awaited for {late:.1f} s")
                sentence = Sentence((), 130 if failed.signal else TEMPORARY if lost else 1)
                self.at(self.now + self.chance.uniform(0.005, 0.3), lambda: self._decide(sentence))
            case lead.NextAttempt(attempt, because):
                self.counts["NextAttempt"] += 1
                self._explained(because)
                for one in self.nodes:
                    if one.is_connected and one.state in ("running", "judging", "stopping"):
                        self.wrong(f"attempt {attempt} begins while {one}")
                self._seat(self._joining.seats(attempt, Offers(29500 + attempt)))

    def _note(self, message: NodeMessage) -> None:
        """Note what nodes are told: its reason, and its number in an attempt."""
        self.counts[type(message).__name__] += 1
        match message:
            case messages.Refused(code, headline):
                self.counts[f"refused {code}"] += 1
                self._explained(headline)
            case messages.Judge(because):
                self._explained(because)
                self._judged_at = self.now
            case Sentence():
                assert self._lead is not None
                self._sentences[self._lead.attempt] += 1
                if self._sentences[self._lead.attempt] > 1:
                    self.wrong(f"a second sentence in attempt {self._lead.attempt}")
            case messages.Dismissed(status, because):
                self._explained(because)
                self.counts[f"status {status}"] += 1

    def _explained(self, because: str) -> None:
        if not because:
            self.wrong("a decision has no reason")

    def _seat(self, seats: dict[str, Seat]) -> None:
        for id, seat in seats.items():
            self._send(self._by_id[id], messages.Seated(seat, "job", self._joining.hosts[0]))

    # --- what faults do

    def _go_wrong(self) -> None:
        fault = self.chance.choice(node_faults.FAULTS)
        self.counts[f"fault {fault.__name__}"] += 1
        fault(self, self.chance.choice(self.nodes))

    def lose(self, node: SimulatedNode, when: float) -> None:
        """Have a node's session end at a time, or when the lead is not frozen any more."""

        def end() -> None:
            frozen_until = self.nodes[0].frozen_until
            if frozen_until > self.now:
                self.at(frozen_until, end)
            else:
                self._session_ends(node)

        self.at(when, end)

    def add(self, applicant: Applicant) -> SimulatedNode:
        """Return another node of the cluster."""
        node = self._by_id[applicant.id] = SimulatedNode(self, applicant)
        self.busy += 1
        return node

    def intrude(self, applicant: Applicant) -> None:
        """Have a node come that there is no place for."""
        number = len(self._by_id)
        changed = {"id": f"{number:05}x", "host": f"other{number}", "reached": "10.0.0.1"}
        self.add(replace(applicant, offers=None, **changed)).come()

    # --- what nodes tell the play

    def seated(self, node: SimulatedNode, seat: Seat) -> None:
        """Note a seat that was taken: one world in each attempt, and no place twice."""
        taken = self._seats.setdefault(seat.attempt, {})
        if seat.node in taken:
            self.wrong(f"two have the place of node {seat.node} in attempt {seat.attempt}")
        first = next(iter(taken.values()), seat)
        same = (first.world, first.master_addr, first.master_port)
        if same != (seat.world, seat.master_addr, seat.master_port):
            self.wrong(f"two worlds in attempt {seat.attempt}: {first} and {seat}")
        if seat.world.size != self.world_size or seat.ranks != seat.world.ranks(seat.node):
            self.wrong(f"{seat} has other ranks than it must have")
        taken[seat.node] = seat

    def met(self, node: SimulatedNode) -> None:
        """Let the ranks train once those of all nodes are there."""
        self._met[node.attempt] += 1
        if self._met[node.attempt] == self.size:
            for one in self._by_id.values():
                if one.attempt == node.attempt:
                    one.later(self.chance.uniform(0.0, 0.01), one.go_on)

    def trouble(self, node: SimulatedNode, what: str) -> None:
        """See that every node knows within seconds that an attempt has failed, and is free once
        the longest grace is over.
        """
        attempt, since = node.attempt, self.now
        peers = [one for one in self._by_id.values() if one.attempt == attempt and one is not node]
        for one in peers if len(peers) < 20 else ():
            if self.chance.random() < 0.5:
                one.later(self.chance.uniform(0.0, 0.3), one.lose_a_peer)

        def check(seconds: float, states: tuple[str, ...]) -> None:
            until = since + seconds + self.held_up
            if until > self.now:
                self.at(until, lambda: check(seconds, states))
                return
            for one in self._by_id.values():
                if one.attempt == attempt and one.state in states:
                    self.wrong(f"{one} though {node.applicant.host} is in trouble: {what}")

        known = node_faults.TTL + 4.0
        check(known, ("running",))
        check(known + GRACE + 2.0, ("running", "judging", "stopping", "over"))

    def left(self, node: SimulatedNode) -> None:
        """Note a node that has left by itself."""
        self.busy -= 1
        if node.ended == "isolated" and node.attempt >= 0:
            self.trouble(node, "it is cut off")
