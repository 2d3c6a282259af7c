"""Where the ranks of all nodes stand: histories of what nodes say, and what they are sent."""

from __future__ import annotations

import math

from msgspec.structs import replace

from rallypoint.diagnosis.rank_snapshot import RankStanding
from rallypoint.launcher.nodes.all_standings import NODES_ANSWER_WITHIN
from rallypoint.launcher.nodes.decisions import TellNodes
from rallypoint.launcher.nodes.joining import Tick
from rallypoint.launcher.nodes.lead import Lead, Lost
from rallypoint.launcher.nodes.messages import (
    Ask,
    AskAll,
    Failing,
    GoesOn,
    NodeMessage,
    Over,
    StallOver,
    Standings,
    StandingsOf,
    StandsStill,
    decode,
    encode,
)
from rallypoint.launcher.restarts import Restarts
from rallypoint.world import World

HOSTS = ("gpu01", "gpu02", "gpu02")
ALL = (0, 1, 2)


class Play:
    """Three nodes of two ranks; keeps what is sent."""

    def __init__(self) -> None:
        self.lead = Lead(World.of([2, 2, 2]), HOSTS, now=0.0, restarts=Restarts(0))
        self.sent: list[tuple[tuple[int, ...], NodeMessage]] = []

    def at(self, now: float, event: NodeMessage | Tick | Lost) -> None:
        if isinstance(event, NodeMessage):
            event = decode(encode(event))
        self.sent += [
            (one.nodes, one.message)
            for one in self.lead.handle(event, now)
            if isinstance(one, TellNodes)
        ]

    def answers(self, now: float, *nodes: int, number: int = 1) -> None:
        for node in nodes:
            self.at(now, StandingsOf(node, number, of(node)))

    def took(self) -> list[tuple[tuple[int, ...], NodeMessage]]:
        taken, self.sent = self.sent, []
        return taken


def of(node: int, *, named: bool = False) -> tuple[RankStanding, ...]:
    """What a node answers; named by the lead."""
    found = tuple(RankStanding(2 * node + one, 100 + one, "running") for one in range(2))
    return tuple(replace(one, node=node, host=HOSTS[node]) for one in found) if named else found


def of_all(*nodes: int) -> tuple[RankStanding, ...]:
    """What is told when these nodes have answered."""
    return tuple(
        one if node in nodes else RankStanding(
            one.rank, 0, "", missing="unheard", node=node, host=HOSTS[node]
        )
        for node in ALL
        for one in of(node, named=True)
    )  # fmt: skip


def test_who_asks_is_told_of_all_nodes_as_soon_as_all_have_answered() -> None:
    play = Play()
    play.at(1.0, AskAll(1))
    assert play.took() == [(ALL, Ask("stacks", 1))]
    play.answers(1.3, 2, 0)
    play.at(1.4, AskAll(2))  # while a round is on: it is for both
    play.answers(1.4, 0, 0)
    assert play.took() == []
    assert play.lead.due == 1.0 + NODES_ANSWER_WITHIN
    play.answers(1.5, 1)
    assert play.took() == [((1, 2), Standings(of_all(0, 1, 2)))]
    assert play.lead.due == math.inf
    play.at(9.0, AskAll(1))
    assert play.took() == [(ALL, Ask("stacks", 2))]


def test_a_node_that_gives_no_answer_in_time_is_named() -> None:
    play = Play()
    play.at(1.0, AskAll(0))
    play.answers(1.3, 0, 2)
    play.at(1.0 + NODES_ANSWER_WITHIN, Tick())
    assert play.took()[1:] == [((0,), Standings(of_all(0, 2)))]
    play.answers(5.0, 1)  # too late
    assert play.took() == []


def test_a_node_that_is_lost_meanwhile_is_not_waited_for() -> None:
    play = Play()
    play.at(1.0, AskAll(0))
    play.answers(1.3, 0, 2)
    play.at(1.4, Lost(1, "gone"))
    assert play.took()[1:] == [((0,), Standings(of_all(0, 2)))]


def test_a_job_that_is_being_stopped_is_told_of_too() -> None:
    play = Play()
    play.at(1.0, Failing(1, "rank 2 exited with code 1"))
    play.at(1.1, AskAll(0))
    play.answers(1.3, *ALL)
    assert play.took() == [(ALL, Ask("stacks", 1)), ((0,), Standings(of_all(*ALL)))]


def test_a_stall_is_told_once_when_every_node_stands_still() -> None:
    play = Play()
    play.at(70.0, StandsStill(0, 60.0, 3))
    play.at(80.0, StandsStill(2, 60.0, 0))
    assert play.took() == []  # ranks 2 and 3 are at work: the others wait for them
    play.at(90.0, StandsStill(1, 65.0, 2))
    assert play.took() == [(ALL, Ask("stacks", 1))]
    play.answers(90.5, *ALL)
    assert play.took() == [(ALL, Standings(of_all(*ALL), stall=65.5, looks=0))]
    play.at(200.0, Tick())
    assert play.took() == []


def test_a_stall_that_was_told_is_over_when_one_node_goes_on_and_may_be_told_again() -> None:
    play = Play()
    for node in ALL:
        play.at(70.0, StandsStill(node, 60.0, 1))
    play.answers(70.5, *ALL)
    play.took()
    play.at(80.0, GoesOn(1, (3,)))
    assert play.took() == [(ALL, StallOver((3,)))]
    play.at(80.1, GoesOn(0, (0, 1)))  # because rank 3 did
    assert play.took() == []
    play.at(190.0, StandsStill(0, 60.0, 1))
    assert play.took() == []
    play.at(191.0, StandsStill(1, 60.0, 1))
    play.answers(191.5, *ALL, number=2)
    assert play.took() == [
        (ALL, Ask("stacks", 2)),
        (ALL, Standings(of_all(*ALL), stall=60.5, looks=1)),
    ]


def test_no_stall_is_told_when_a_rank_moves_while_the_nodes_are_asked() -> None:
    play = Play()
    for node in ALL:
        play.at(70.0, StandsStill(node, 60.0, 1))
    play.at(70.1, AskAll(0))
    play.answers(70.2, 0, 2)
    play.at(70.3, GoesOn(1, (2,)))
    play.answers(70.3, 1)
    assert play.took()[1:] == [((0,), Standings(of_all(*ALL)))]


def test_a_node_with_no_living_rank_is_not_waited_for() -> None:
    play = Play()
    play.at(60.0, Over(1, well=True))
    play.at(70.0, StandsStill(0, 60.0))
    play.at(70.0, StandsStill(2, 60.0))
    assert play.took() == [(ALL, Ask("stacks", 1))]


def test_a_job_that_is_being_stopped_is_no_stall() -> None:
    play = Play()
    play.at(69.0, Failing(0, "a launcher got SIGINT", signal="SIGINT"))
    for node in ALL:
        play.at(70.0, StandsStill(node, 60.0))
    assert play.took() == []
