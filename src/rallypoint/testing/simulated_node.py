"""One node of a simulated cluster: its agent and its ranks, as the lead hears of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from rallypoint.diagnosis.evidence import Meeting, NodeEvidence
from rallypoint.diagnosis.report import TEMPORARY
from rallypoint.launcher.nodes import joining, messages
from rallypoint.launcher.nodes.messages import Applicant, NodeMessage, RankView
from rallypoint.world import Seat

if TYPE_CHECKING:
    from rallypoint.testing.cluster import SimulatedCluster

SENTENCE_PATIENCE = 3.0
"""Seconds that a node waits for the sentence once it has given its evidence."""

GRACE = 5.0


class SimulatedNode:
    """One node's agent and its ranks, as the lead hears of them."""

    def __init__(self, cluster: SimulatedCluster, applicant: Applicant) -> None:
        self.cluster, self.applicant = cluster, applicant
        self.state = "away"  # absent, joining, running, judging, stopping, over, left
        self.ended = ""  # how it left
        self.status = 0
        self.seat: Seat | None = None
        self.is_connected = True  # its session, as the lead sees it
        self.is_known = False  # to the lead
        self.to_lead: deque[Any] = deque()
        self.from_lead: deque[NodeMessage] = deque()
        self.frozen_until = self.cut_until = 0.0
        self.fails = self.leaves_early = False  # in this attempt
        self._signal = ""
        self._is_sentenced = self._waits = self.to_gather = False

    @property
    def number(self) -> int:
        """Its place in the world; -1 without one."""
        return self.seat.node if self.seat is not None else -1

    @property
    def attempt(self) -> int:
        return self.seat.attempt if self.seat is not None else -1

    def say(self, event: Any) -> None:
        """Send to the lead, in order."""
        self.to_lead.append(event)
        self.cluster.carry(self, self.cluster.hear)

    def later(self, seconds: float, step: Callable[[int], None], *, always: bool = False) -> None:
        """Do a step of this attempt, once this node is not frozen; `always`: of any attempt."""
        attempt = self.attempt

        def run() -> None:
            if self.state == "left" or not (always or self.attempt == attempt):
                return
            if self.frozen_until > self.cluster.now:
                self.cluster.at(self.frozen_until, run)
            else:
                step(attempt)

        self.cluster.at(self.cluster.now + seconds, run)

    def come(self, _: int = 0) -> None:
        if self.state == "away" and self.cluster.lead_is_dead:
            self.leave("alone", TEMPORARY)
        elif self.state == "away":
            self.state = "joining"
            self.say(joining.Came(self.applicant))

    def hear(self, message: NodeMessage) -> None:
        """Take a message from the lead."""
        chance = self.cluster.chance
        match message:
            case messages.Seated(seat):
                self._begin(seat)
            case messages.Refused(status=status):
                self.leave("refused", status)
            case messages.Dismissed(status):
                if self.state != "over":
                    self.cluster.wrong(f"{self} was dismissed while its ranks run")
                self.leave("dismissed", status)
            case messages.Try(addresses):
                some = tuple(one for one in addresses if chance.random() < 0.8)
                self.say(messages.Reachable(self.applicant.id, some))
            case messages.Judge(because, signal):
                self._judge(because, signal)
            case messages.Sentence():
                self._is_sentenced = True
                if self.state == "judging" and not self.to_gather:
                    self._stop()
            case messages.WaitInVain():
                self.later(0.1, self._all_ended)
            case messages.Ask(_, number):
                self.say(messages.NodeAnswer(self.number, number))

    def views(self, phase: str, **known: Any) -> None:
        assert self.seat is not None
        size = self.cluster.world_size
        meets = Meeting("env://", "10.0.0.1:29500", world_size=size, backend="gloo")
        views = (RankView(one, phase, meeting=replace(meets, rank=one), **known) for one in self.seat.ranks)  # fmt: skip
        self.say(messages.Views(self.number, tuple(views)))

    # --- an attempt

    def _begin(self, seat: Seat) -> None:
        if self.state not in ("joining", "over"):
            self.cluster.wrong(f"{self} got a seat while its ranks run")
        self.seat = seat
        self._is_sentenced, self._waits, self.to_gather = False, False, False
        self.cluster.seated(self, seat)
        if self._signal:  # the lead did not know of it yet
            self.say(messages.Over(self.number, well=False))
            return
        self.state = "running"
        self.later(self.cluster.chance.uniform(0.01, 0.5), self._join)

    def _join(self, _: int) -> None:
        if self.state != "running":
            return
        if self.leaves_early:
            self.leaves_early = False
            self.cluster.trouble(self, "its ranks left early")
            self._end_well(joined=0)
            return
        self.views("joining")
        self.cluster.met(self)

    def go_on(self, _: int) -> None:
        """Train: every rank of the job has come."""
        if self.state == "running":
            self.views("running", joined=1)
            chance = self.cluster.chance
            if self.fails:
                self.fails = False
                self.later(chance.uniform(0.0, 2.0), lambda _: self.fail("its rank raised"))
            else:
                self.later(
                    self.cluster.training + chance.uniform(0.0, 0.2), lambda _: self._end_well()
                )

    def _end_well(self, joined: int = 1) -> None:
        if self.state == "running":
            self.views("done", ended=(0, 0), joined=joined)
            self.say(messages.Over(self.number, well=True))
            self.state = "over"

    def fail(self, because: str, *, signal: str = "") -> None:
        """Judge by itself, or take another signal."""
        if self.state == "running":
            self.cluster.trouble(self, because)
            self._gather_soon()
        elif not signal or self.state in ("away", "absent", "joining", "left"):
            return
        self._signal = self._signal or signal
        self.say(messages.Failing(self.number, because, signal))

    def lose_a_peer(self, _: int) -> None:
        self.fail("a peer closed its connection")

    def _judge(self, because: str, signal: str) -> None:
        if not because:
            self.cluster.wrong(f"{self} was told to judge and not why")
        if self.state in ("running", "over"):
            self._gather_soon()
        elif signal and self._signal:
            self.later(0.1, self._all_ended)
        self._signal = self._signal or signal

    def _gather_soon(self) -> None:
        self.state = "judging" if self.state == "running" else self.state
        self.to_gather = True
        slow = self.cluster.chance.random() < 0.03
        self.later(self.cluster.chance.uniform(0.05, 2.5 if slow else 0.45), self._gather)

    def _gather(self, _: int) -> None:
        self.to_gather = False
        evidence = NodeEvidence(node=self.number, host=self.applicant.host)
        self.say(messages.EvidenceOf(self.number, evidence))
        if self.state == "judging":
            if self._is_sentenced:
                self._stop()
            else:
                self.later(SENTENCE_PATIENCE, self._lose_patience)

    def _lose_patience(self, _: int) -> None:
        if self.state == "judging":
            self.cluster.counts["patience"] += 1
            self._stop()

    def _stop(self) -> None:
        chance, self.state = self.cluster.chance, "stopping"
        self._waits = bool(self._signal) and chance.random() < 0.5
        quick = chance.uniform(0.02, 0.5) if chance.random() < 0.8 else chance.uniform(0.5, GRACE)
        self.later(GRACE if self._waits else quick, self._all_ended)
        if self._waits:
            self.later(0.4, self._look)

    def _look(self, _: int) -> None:
        if self.state == "stopping":
            self.say(messages.AllWait(self.number))
            self.later(0.4, self._look)

    def _all_ended(self, _: int) -> None:
        if self.state == "stopping":
            self.say(messages.Over(self.number, well=False))
            self.state = "over"

    # --- its end

    def stay_away(self) -> None:
        """Never come."""
        self.state = "absent"
        self.cluster.busy -= 1

    def die(self) -> None:
        """End without a word."""
        self.state, self.ended = "left", "killed"
        self.cluster.busy -= 1

    def terminate(self, _: int) -> None:
        """Take the signal of a batch system."""
        self.fail("the launcher got SIGTERM", signal="SIGTERM")

    def leave(self, how: str, status: int = 0) -> None:
        """End the agent; its session is closed in good order."""
        if self.state != "left":
            self.state, self.ended, self.status = "left", how, status
            self.cluster.left(self)
            self.say(joining.Went(self.applicant.id))

    def isolate(self, _: int = 0) -> None:
        """Find that the lead is gone: all ranks are killed."""
        self.leave("isolated", TEMPORARY)

    def __repr__(self) -> str:
        return f"<{self.applicant.id} on {self.applicant.host}, node {self.number}: {self.state} {self.ended}>"
