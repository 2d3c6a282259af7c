"""Ranks of all nodes, as their nodes tell of them: does one keep the others waiting for ever, and
where are those that do not come.

Pure. What is found here no node can find alone: a rank that has left while ranks of other nodes
wait for it, and ranks that look for each other at different places.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from rallypoint.diagnosis import rendezvous_mismatch, stacks
from rallypoint.diagnosis.evidence import Ended, RankEvidence
from rallypoint.diagnosis.rendezvous_mismatch import MISFIT_SETTLE, Caller, Misfit
from rallypoint.launcher.nodes.messages import NodeAnswer, RankView, RollCall
from rallypoint.world import World, ranks_phrase

# Seconds after a change in which other nodes may tell of theirs, before all are looked at together.
LOOK_AFTER = 0.05
# Seconds between looks at ranks that do not fit together, perhaps: a look costs some microseconds a
# rank.
LOOK_AGAIN = 0.5
# Seconds for all nodes to say where the ranks are that others wait for: a node gives its ranks 2.
ROLL_CALL_PATIENCE = 2.5
_NODES_MOST = 3  # that a phrase names with their ranks

Kind = tuple[int, tuple[str, str], int, str]
Place = tuple[Kind, int]


class AllRanks:
    """The ranks of one attempt."""

    def __init__(
        self, world: World, hosts: Sequence[str], *, roll_call: float, program: str = ""
    ) -> None:
        self._world, self._hosts, self._program = world, hosts, program
        self._size = world.size
        self._node_of = [node for node in range(world.nodes) for _ in world.ranks(node)]
        self._roll_call = roll_call
        self._number = 0  # of the last roll call
        self.begin()

    def begin(self) -> None:
        """Begin another attempt: nothing that was seen is of its ranks."""
        self._views: dict[int, RankView] = {}
        self._since: dict[int, float] = {}  # when each came to its phase
        self._waiting: set[int] = set()  # in init_process_group
        self._ended: set[int] = set()
        self._left: set[int] = set()  # ended well
        self._debugged: set[int] = set()
        # calls of init_process_group that wait now, by what they ask for, and by the rank that they
        # ask to be
        self._kinds: Counter[Kind] = Counter()
        self._places: Counter[Place] = Counter()
        self._of: dict[int, Place] = {}
        self._twice = 0  # places that two have asked for
        self._look_at = math.inf
        self._suspected: Misfit | None = None
        self._suspected_since = 0.0
        self._settled = False
        self._roll_at = math.inf
        self._roll_after = self._roll_call
        self._answers: dict[int, NodeAnswer] = {}
        self._unanswered: set[int] = set()
        self._answers_until = math.inf

    @property
    def due(self) -> float:
        """When the next look is due."""
        return min(self._look_at, self._roll_at, self._answers_until)

    def have_started(self, node: int) -> bool:
        """Return whether a node has told of a rank of its own."""
        return any(rank in self._views for rank in self._world.ranks(node))

    def named(self, ranks: Iterable[int]) -> str:
        """Return `rank 3 on gpu01`, or `ranks 0-1 on gpu01 and ranks 4-5 on gpu02`."""
        nodes: dict[int, list[int]] = {}
        for rank in ranks:
            nodes.setdefault(self._node_of[rank], []).append(rank)
        if len(nodes) > _NODES_MOST:
            ranks = (rank for together in nodes.values() for rank in together)
            return f"{ranks_phrase(ranks)} on {len(nodes)} nodes"
        parts = [f"{ranks_phrase(nodes[node])} on {self._hosts[node]}" for node in sorted(nodes)]
        *others, last = parts
        return f"{', '.join(others)} and {last}" if others else last

    def changed(self, views: Iterable[RankView], now: float) -> None:
        """Note what a node tells of its ranks."""
        waited = bool(self._waiting)
        for view in views:
            self._change(view, now)
        if self._waiting and (self._left or self._is_suspicious()):
            self._look_at = min(self._look_at, now + LOOK_AFTER)
        if not self._waiting:
            self._roll_at = self._look_at = math.inf
        elif not waited:
            self._roll_after = self._roll_call
            self._roll_at = now + self._roll_after

    def _change(self, view: RankView, now: float) -> None:
        rank = view.rank
        self._views[rank], self._since[rank] = view, now - view.lasted
        waits = view.phase == "joining" and view.ended is None
        for ranks, belongs in (
            (self._waiting, waits),
            (self._ended, view.ended is not None),
            (self._left, view.ended == (0, 0) and not view.failed),
            (self._debugged, view.debugged),
        ):
            (ranks.add if belongs else ranks.discard)(rank)
        if (before := self._of.pop(rank, None)) is not None:
            self._count(before, -1)
        if waits and view.meeting is not None:
            caller = Caller(rank, view.meeting, view.held)
            if caller.place[1]:
                meeting = view.meeting
                kind = meeting.turn, caller.place, meeting.world_size, meeting.backend.lower()
                self._of[rank] = kind, meeting.rank
                self._count(self._of[rank], 1)

    def _count(self, place: Place, change: int) -> None:
        was = self._places[place]
        self._twice += (was + change > 1) - (was > 1)
        self._places[place] += change
        self._kinds[place[0]] += change

    # --- what is certain to keep them apart

    def look(self, now: float) -> str:
        """Return why ranks wait for ever, as far as that is certain; "" when it is not."""
        if now < self._look_at:
            return ""
        self._look_at = math.inf
        return self._absent() or self._misfit(now)

    def _absent(self) -> str:
        """Find ranks that have left with exit code 0 while others wait for them.

        A group of all ranks is certain to need each; a rank that has joined as many of them as one
        that waits was there, and may leave.
        """
        waiting = [
            rank
            for rank in self._waiting
            if (meeting := self._views[rank].meeting) is None
            or rendezvous_mismatch.whole(meeting, self._size)
        ]
        if not waiting or not self._left:
            return ""
        groups = max(self._views[rank].joined for rank in waiting)
        left = [self._views[rank] for rank in self._left]
        gone = [view for view in left if view.erred or view.joined <= groups]
        if not gone:
            return ""
        named = [view.rank for view in gone if view.erred] or [view.rank for view in gone]
        return f"{self.named(named)} left while {self._wait(waiting)}"

    def _wait(self, waiting: Sequence[int]) -> str:
        verb = "waits" if len(waiting) == 1 else "wait"
        return f"{self.named(waiting)} {verb} in init_process_group"

    def _all_there(self) -> bool:
        return len(self._waiting) + len(self._ended) == self._size

    def _is_suspicious(self) -> bool:
        """Return whether calls that wait now may not fit together; it costs no look at each."""
        kinds = [kind for kind, count in self._kinds.items() if count]
        several = len({turn for turn, *_ in kinds}) < len(kinds)
        sizes_differ = any(size != self._size for _, _, size, _ in kinds)
        return several or self._twice > 0 or (sizes_differ and self._all_there())

    def _misfit(self, now: float) -> str:
        before, self._suspected = self._suspected, None
        if not self._is_suspicious():
            return ""
        callers = {
            rank: Caller(rank, view.meeting, view.held)
            for rank, view in self._views.items()
            if view.meeting is not None
        }
        running = [rank for rank in callers if self._views[rank].phase == "running"]
        found = rendezvous_mismatch.misfit(
            [callers[rank] for rank in sorted(self._waiting) if rank in callers],
            self._size,
            through=[callers[rank] for rank in running],
            all_there=self._all_there(),
        )
        self._look_at = now + LOOK_AGAIN
        if found is None:
            return ""
        self._suspected = found
        if before is None or (before.code, before.ranks) != (found.code, found.ranks):
            self._suspected_since = now
        self._settled = now >= self._suspected_since + MISFIT_SETTLE
        return found.because if self._settled else ""

    @property
    def misfit(self) -> Misfit | None:
        """What keeps the ranks apart, once it has lasted."""
        return self._suspected if self._settled else None

    # --- the roll call

    def absent(self, now: float) -> dict[int, tuple[int, ...]]:
        """Return the ranks to be asked where they are, by node, when a roll call is due now."""
        if now < self._roll_at or not self._waiting:
            return {}
        since = min(self._since[rank] for rank in self._waiting)
        if self._debugged:
            self._roll_at = now + self._roll_call
            return {}
        self._roll_at = since + self._roll_after
        if now < self._roll_at:
            return {}
        self._roll_after *= 2
        self._roll_at = since + self._roll_after
        nodes: dict[int, list[int]] = {}
        for rank in rendezvous_mismatch.absent(self._known(), [*self._waiting], self._size):
            if rank not in self._ended:
                nodes.setdefault(self._node_of[rank], []).append(rank)
        self._answers, self._unanswered = {}, set(nodes)
        self._answers_until = now + ROLL_CALL_PATIENCE if nodes else now
        self._number += 1
        return {node: tuple(ranks) for node, ranks in nodes.items()}

    @property
    def number(self) -> int:
        """Number of the last roll call, which its answers carry."""
        return self._number

    def answered(self, answer: NodeAnswer, now: float) -> None:
        """Note a node's answer about its ranks."""
        if answer.number == self._number and answer.node in self._unanswered:
            self._unanswered.discard(answer.node)
            self._answers[answer.node] = answer
            if not self._unanswered:
                self._answers_until = now

    def called(self, now: float) -> RollCall | None:
        """Return the roll call, when its answers are in or their time is over; None when no rank
        waits any more, or a person is at a debugger.
        """
        if now < self._answers_until:
            return None
        self._answers_until = math.inf
        waiting = sorted(self._waiting)
        told = {rank.rank: rank for answer in self._answers.values() for rank in answer.ranks}
        if not waiting or any(stacks.debugged(rank.stack) for rank in told.values()):
            return None
        states: dict[int, str] = {}
        for node in self._unanswered:
            states.update((rank, "its node gives no answer") for rank in self._world.ranks(node))
        for answer in self._answers.values():
            states.update(answer.states)
        frames = [frame for rank in told.values() for frame in rank.stack]
        root = stacks.root_of(self._program, frames)
        lines = rendezvous_mismatch.lines(
            self._known(told), waiting, states, self._size, now, root, named=self.named
        )
        longest = now - min(self._since[rank] for rank in waiting)
        return RollCall(lines, f"{self._wait(waiting)} for {longest:.0f} s") if lines else None

    def _known(self, told: Mapping[int, RankEvidence] | None = None) -> list[RankEvidence]:
        """Return what is known of each rank, in the lead's time. `told`: answers of their nodes."""
        known = []
        for rank in range(self._size):
            view, answer = self._views.get(rank), (told or {}).get(rank)
            if view is None:
                known.append(answer or RankEvidence(rank, -1, 0, "started"))
                continue
            since = self._since[rank]
            ended = view.ended and Ended(view.ended[0], view.ended[1], since)
            if answer is None:
                known.append(RankEvidence(
                    rank, -1, 0, view.phase, since, ended=ended, meeting=view.meeting
                ))  # fmt: skip
                continue
            handled = tuple(
                replace(one, at=one.at + since - answer.phase_at) for one in answer.handled
            )
            known.append(replace(
                answer, phase=view.phase, phase_at=since, ended=ended, meeting=view.meeting,
                handled=handled,
            ))  # fmt: skip
        return known
