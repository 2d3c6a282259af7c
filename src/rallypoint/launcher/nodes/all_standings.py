"""Places of the ranks of all nodes: gathered when somebody asks, and when no node's ranks move.

Pure: the lead feeds `handle` with what the nodes say, and sends what comes back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence, Set

from msgspec.structs import replace

from rallypoint.diagnosis.rank_snapshot import RankStanding
from rallypoint.launcher.nodes.decisions import Decisions, TellNodes
from rallypoint.launcher.nodes.joining import NodeEvent
from rallypoint.launcher.nodes.messages import (
    Ask,
    AskAll,
    GoesOn,
    NodeMessage,
    StallOver,
    Standings,
    StandingsOf,
    StandsStill,
)
from rallypoint.world import World

NODES_ANSWER_WITHIN = 2.5
"""Seconds for the nodes to answer: each gives its ranks 1.5 s, and a person waits 5 s."""


class AllStandings:
    """The one round of questions to all nodes that is on, and the watch over nodes that stand
    still.
    """

    def __init__(self, world: World, hosts: Sequence[str]) -> None:
        """`hosts`: by node."""
        self._world = world
        self._hosts = hosts
        self._number = 0
        self._awaited: set[int] = set()  # nodes that are to answer
        self._found: dict[int, tuple[RankStanding, ...]] = {}
        self._askers: set[int] = set()
        self.due = math.inf
        """Time by the clock of `handle` when the round is over at the latest."""
        self.begin()

    def begin(self) -> None:
        """Begin another attempt: no node stands still yet."""
        self._since: dict[int, float] = {}  # nodes that stand still, since when
        self._looks: dict[int, int] = {}
        self._is_told = False  # a stall that is not over
        self._tells = False  # the round that is on is for the report of a stall

    def handle(
        self,
        event: NodeEvent | NodeMessage,
        now: float,
        living: Collection[int],
        at_work: Set[int],
    ) -> Decisions:
        """Return what to send. `living`: nodes that are not lost. `at_work`: those of them that
        have ranks which live; none when something has failed in this attempt.
        """
        made: Decisions = []
        match event:
            case AskAll(node):
                self._askers.add(node)
                made = self._ask(living, now)
            case StandingsOf(node, number, ranks) if number == self._number:
                if node in self._awaited:
                    self._found[node] = tuple(
                        replace(one, node=node, host=self._hosts[node]) for one in ranks
                    )
            case StandsStill(node, seconds, looks):
                self._since[node], self._looks[node] = now - seconds, looks
            case GoesOn(node, ranks):
                self._since.pop(node, None)
                self._tells = False
                if self._is_told:
                    self._is_told = False
                    made = [TellNodes(tuple(living), StallOver(ranks))]
        if not (self._is_told or self._tells) and self._stands(at_work):
            self._tells = True
            made += self._ask(living, now)
        return made + self._perhaps_tell(living, at_work, now)

    def _stands(self, at_work: Set[int]) -> bool:
        return bool(at_work) and self._since.keys() >= at_work

    def _ask(self, living: Collection[int], now: float) -> Decisions:
        """Begin a round, if none is on."""
        if self.due < math.inf:
            return []
        self._number += 1
        self._found = {}
        self._awaited = {*living}
        self.due = now + NODES_ANSWER_WITHIN
        return [TellNodes(tuple(living), Ask("stacks", self._number))]

    def _perhaps_tell(self, living: Collection[int], at_work: Set[int], now: float) -> Decisions:
        """Once all nodes have answered, or had their time: tell it to those that asked, or all."""
        if self.due == math.inf:
            return []
        self._awaited &= {*living}
        if now < self.due and not self._awaited <= self._found.keys():
            return []
        self.due = math.inf
        told = Standings(self._ranks())
        nodes: Iterable[int] = self._askers
        if self._tells and self._stands(at_work):
            self._is_told = True
            stall = now - max(self._since[node] for node in at_work)
            looks = min(self._looks[node] for node in at_work)
            told, nodes = replace(told, stall=stall, looks=looks), living
        self._tells, self._askers = False, set()
        return [TellNodes(tuple(nodes), told)] if nodes else []

    def _ranks(self) -> tuple[RankStanding, ...]:
        return tuple(
            one
            for node in range(self._world.nodes)
            for one in self._found.get(node) or unheard(self._world, node, self._hosts[node])
        )


def unheard(world: World, node: int, host: str = "") -> tuple[RankStanding, ...]:
    """Return what stands for the ranks of a node that gave no answer."""
    return tuple(
        RankStanding(rank, 0, "", missing="unheard", node=node, host=host)
        for rank in world.ranks(node)
    )
