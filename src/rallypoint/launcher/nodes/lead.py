"""One attempt after the other over all nodes: what failed, what is judged, what comes next (a
table).

Pure: no socket, clock, thread or process. The lead's thread feeds `handle` with the messages of the
nodes and with what happened, and does what comes back.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rallypoint.diagnosis.evidence import NodeEvidence
from rallypoint.diagnosis.report import TEMPORARY
from rallypoint.launcher.job_diagnosis import FailedAttempt
from rallypoint.launcher.nodes.all_ranks import AllRanks
from rallypoint.launcher.nodes.all_standings import AllStandings
from rallypoint.launcher.nodes.decisions import Decision, Decisions, TellAll, TellNodes
from rallypoint.launcher.nodes.joining import NodeEvent, Tick
from rallypoint.launcher.nodes.messages import (
    AllWait,
    Ask,
    Dismissed,
    EvidenceOf,
    Failing,
    Judge,
    NodeAnswer,
    NodeMessage,
    Over,
    Sentence,
    Views,
    WaitInVain,
)
from rallypoint.launcher.plan import ROLL_CALL
from rallypoint.launcher.restarts import Restarts
from rallypoint.world import World

EVIDENCE_PATIENCE = 1.0
"""Seconds after `JudgeAll` in which nodes give their evidence: a node asks its own ranks for 0.2 s,
and lets a failure settle for 0.25 s."""

CAUSE_PATIENCE = 2.0
"""The same for a node on which something has failed: without its evidence there is no cause."""

OVER_PATIENCE = 15.0
"""Seconds beyond the grace in which a node ends its ranks; its supervisor gives up after 5."""


class Phase(enum.Enum):
    """States of an attempt."""

    RUNNING = "running"
    JUDGING = "judging"  # something failed: the nodes' evidence is being gathered, and diagnosed
    STOPPING = "stopping"
    OVER = "over"


class Lost(NodeEvent):
    """A node's session is over, or nothing is heard of it. `how`: in the words of a report."""

    node: int
    how: str


class Diagnose(Decision):
    """Make the reports about this attempt; a `Sentence` is the answer."""

    failed: FailedAttempt
    lost: dict[int, str]  # nodes, and how each was lost


class NextAttempt(Decision):
    """Give all nodes their seats of another attempt."""

    attempt: int
    because: str


class Lead:
    """The one decision maker about the attempts of a job on several nodes. `handle` returns what to
    do now.
    """

    def __init__(
        self,
        world: World,
        hosts: Sequence[str],
        *,
        now: float,
        restarts: Restarts,
        grace: float = 30.0,
        roll_call: float = ROLL_CALL,
        program: str = "",
    ) -> None:
        """`hosts`: by node. The first attempt begins at `now`."""
        self.ranks = AllRanks(world, hosts, roll_call=roll_call, program=program)
        self._standings = AllStandings(world, hosts)
        self._hosts = hosts
        self._count, self._size = world.nodes, world.size
        self._restarts = restarts
        self._grace = grace
        self._lost: dict[int, str] = {}
        self._living = {*range(world.nodes)}
        self._begin(now)

    def _begin(self, now: float) -> None:
        self.state = Phase.RUNNING
        self._began = now
        self._open = {*range(self._count)}  # nodes that have not said that the attempt is over
        self._evidence: dict[int, NodeEvidence] = {}
        self._awaited: set[int] = set()  # nodes that may still send evidence
        self._failing: set[int] = set()  # nodes on which something has failed
        self._signalled: set[int] = set()  # nodes that were stopped from outside
        self._vain: set[int] = set()  # nodes on which no rank goes on
        self._because = self._signal = ""
        self._judged_at = 0.0
        self._deadline = math.inf
        self._diagnosing = False
        self._status = 0

    def __repr__(self) -> str:
        return (
            f"<Lead {self.state.value}, attempt {self.attempt}, "
            f"{len(self._open)} of {self._count} nodes at work>"
        )

    def handle(self, event: NodeEvent | NodeMessage, now: float) -> Decisions:
        """Return what to do about `event` at `now` (seconds, any origin, never going back)."""
        if getattr(event, "node", None) in self._lost:
            return []
        row = self._TABLE[self.state].get(type(event))
        decided = [*row(self, event, now)] if row else []
        at_work = self._open if self.state is Phase.RUNNING else set()
        return decided + self._standings.handle(event, now, self._living, at_work)

    @property
    def attempt(self) -> int:
        """Number of the attempt."""
        return self._restarts.made

    @property
    def due(self) -> float:
        """When the next `Tick` must come at the latest; infinity when there is nothing to wait
        for.
        """
        due = self.ranks.due if self.state is Phase.RUNNING else self._deadline
        return min(due, self._standings.due)

    def _named(self, node: int) -> str:
        return f"node {node} ({self._hosts[node]})"

    # --- running

    def _views(self, event: Views, now: float) -> Decisions:
        self.ranks.changed(event.ranks, now)
        return []

    def _answer(self, event: NodeAnswer, now: float) -> Decisions:
        self.ranks.answered(event, now)
        return self._call_roll(now)

    def _tick_while_running(self, event: Tick, now: float) -> Decisions:
        because = self.ranks.look(now)
        if because:
            return self._judge(because, now)
        asked, number = self.ranks.absent(now), self.ranks.number
        questions = [
            TellNodes((node,), Ask("roll-call", number, ranks)) for node, ranks in asked.items()
        ]
        return [*questions, *self._call_roll(now)]

    def _call_roll(self, now: float) -> Decisions:
        roll = self.ranks.called(now)
        return [TellAll(roll)] if roll is not None else []

    def _failed(self, event: Failing, now: float) -> Decisions:
        self._failing.add(event.node)
        if event.signal:
            self._signalled.add(event.node)
        return self._judge(event.because, now, but=event.node, signal=event.signal)

    def _lost_while_running(self, event: Lost, now: float) -> Decisions:
        """Judge. The ranks of a node that is done had all ended well: its loss hurts no rank."""
        self._lose(event.node, event.how)
        if event.node not in self._open:
            return []
        self._open.discard(event.node)
        return self._judge(f"{self._named(event.node)} was lost: {event.how}", now)

    def _lose(self, node: int, how: str) -> None:
        self._lost[node] = how
        self._living.discard(node)

    def _over_while_running(self, event: Over, now: float) -> Decisions:
        self._open.discard(event.node)
        if not event.well:
            self._failing.add(event.node)
            return self._judge(f"{self._named(event.node)} has ended its ranks", now, event.node)
        return [] if self._open else self._dismiss(0, "every rank has ended")

    # --- judging

    def _judge(self, because: str, now: float, but: int = -1, signal: str = "") -> Decisions:
        """Gather the evidence of all nodes, before anything is stopped."""
        self.state, self._because, self._signal = Phase.JUDGING, because, signal
        self._judged_at, self._deadline = now, now + EVIDENCE_PATIENCE
        self._awaited = {*self._living}
        return [TellAll(Judge(because, signal), but), *self._perhaps_diagnose(now)]

    def _another_failed(self, event: Failing, now: float) -> Decisions:
        self._failing.add(event.node)
        return self._signalled_again(event) if event.signal else []

    def _signalled_again(self, event: Failing) -> Decisions:
        """Tell all of a signal that is a new wish: the first one, or the second to one node. One
        that a batch system sends to every node is one wish.
        """
        is_new = not self._signal or event.node in self._signalled
        self._signalled.add(event.node)
        if not is_new:
            return []
        self._signal, self._because = event.signal, event.because
        return [TellAll(Judge(event.because, event.signal), event.node)]

    def _another_lost(self, event: Lost, now: float) -> Decisions:
        self._lose(event.node, event.how)
        self._open.discard(event.node)
        self._awaited.discard(event.node)
        self._vain.clear()
        is_judged = self.state is Phase.STOPPING
        return self._perhaps_conclude(now) if is_judged else self._perhaps_diagnose(now)

    def _over_while_judging(self, event: Over, now: float) -> Decisions:
        """Await the evidence of a node that ended well just now: it was not asked before."""
        self._open.discard(event.node)
        if not event.well:
            self._awaited.discard(event.node)
        return self._perhaps_diagnose(now)

    def _evidence_of(self, event: EvidenceOf, now: float) -> Decisions:
        self._evidence[event.node] = event.evidence
        self._awaited.discard(event.node)
        return self._perhaps_diagnose(now)

    def _perhaps_diagnose(self, now: float) -> Decisions:
        if self._diagnosing or (self._awaited and now < self._deadline):
            return []
        late = self._judged_at + CAUSE_PATIENCE
        if self._awaited & self._failing and now < late:
            self._deadline = late
            return []
        self._diagnosing, self._deadline = True, math.inf
        failed = FailedAttempt(
            dict(self._evidence),
            unheard=tuple(self._hosts[node] for node in sorted(self._awaited)),
            misfit=self.ranks.misfit,
            because=self._because,
            signal=self._signal,
            world_size=self._size,
            attempt=self.attempt,
        )
        return [Diagnose(failed, dict(self._lost))]

    def _tick_while_judging(self, event: Tick, now: float) -> Decisions:
        return self._perhaps_diagnose(now)

    def _diagnosed(self, event: Sentence, now: float) -> Decisions:
        if not self._diagnosing:
            return []
        self.state, self._status = Phase.STOPPING, event.status
        self._deadline = now + self._grace + OVER_PATIENCE
        self._restarts.failed(event.same, now - self._began)
        if any(node.helper or node.problem for node in self._evidence.values()):
            self._restarts.most = self._restarts.made  # that node can start no rank
        return [TellAll(event), *self._perhaps_conclude(now)]

    # --- stopping

    def _views_while_stopping(self, event: Views, now: float) -> Decisions:
        """Begin anew to count the nodes that wait: where a rank has ended, others may go on."""
        if any(view.ended is not None for view in event.ranks):
            self._vain.clear()
        return []

    def _all_wait(self, event: AllWait, now: float) -> Decisions:
        if not event.waits or not self._signal:
            self._vain.discard(event.node)
            return []
        self._vain.add(event.node)
        if not self._open <= self._vain:
            return []
        self._vain.clear()
        return [TellAll(WaitInVain())]

    def _over(self, event: Over, now: float) -> Decisions:
        self._open.discard(event.node)
        self._vain.clear()
        return self._perhaps_conclude(now)

    def _tick_while_stopping(self, event: Tick, now: float) -> Decisions:
        if now < self._deadline:
            return []
        patience = self._grace + OVER_PATIENCE
        for node in self._open:
            self._lose(node, f"has not ended its ranks in {patience:.0f} s")
        self._open.clear()
        return self._perhaps_conclude(now)

    def _perhaps_conclude(self, now: float) -> Decisions:
        """Once the attempt is over on all nodes: begin another one, or end the job."""
        if self._open:
            return []
        restarts, because = self._restarts, self._because
        if self._signal or not restarts.is_left:
            return self._dismiss(self._status, because)
        if self._lost:
            node, how = next(iter(self._lost.items()))
            return self._dismiss(TEMPORARY, f"{self._named(node)} was lost: {how}")
        if restarts.is_hopeless:
            return self._dismiss(self._status, because, restarts.times)
        restarts.made += 1
        self._begin(now)
        self.ranks.begin()
        self._standings.begin()
        return [NextAttempt(self.attempt, because)]

    def _dismiss(self, status: int, because: str, times: int = 0) -> Decisions:
        self.state, self._deadline = Phase.OVER, math.inf
        return [TellAll(Dismissed(status, because, times))]

    _TABLE: ClassVar[
        dict[Phase, dict[type[Any], Callable[[Lead, Any, float], Sequence[Decision]]]]
    ] = {
        Phase.RUNNING: {
            Views: _views,
            NodeAnswer: _answer,
            Failing: _failed,
            Lost: _lost_while_running,
            Over: _over_while_running,
            Tick: _tick_while_running,
        },
        Phase.JUDGING: {
            Failing: _another_failed,
            EvidenceOf: _evidence_of,
            Lost: _another_lost,
            Over: _over_while_judging,
            Sentence: _diagnosed,
            Tick: _tick_while_judging,
        },
        Phase.STOPPING: {
            Views: _views_while_stopping,
            Failing: _another_failed,
            AllWait: _all_wait,
            Lost: _another_lost,
            Over: _over,
            Tick: _tick_while_stopping,
        },
        Phase.OVER: {},
    }
    """The whole state machine: what an event does in each state. An event without a row does nothing."""
