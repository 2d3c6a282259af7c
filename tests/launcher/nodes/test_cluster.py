"""Jobs on simulated nodes with faults, and the play that judges them: it must see what is wrong."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeGuard

import pytest
from msgspec.structs import replace

from rallypoint.launcher.nodes.decisions import TellAll
from rallypoint.launcher.nodes.joining import Form, Joining
from rallypoint.launcher.nodes.lead import Diagnose, Lead, Lost
from rallypoint.launcher.nodes.messages import Dismissed, Judge, Sentence
from rallypoint.testing.cluster import SimulatedCluster

SEEDS = 300


def test_every_job_ends_for_every_node_whatever_happens() -> None:
    # A node that never comes, and a signal that crosses the next attempt, were played wrongly.
    seeds = (*range(SEEDS), 191759913177, 593652371104)
    wrong = {seed: found for seed in seeds if (found := SimulatedCluster(seed).run())}
    assert wrong == {}


def test_the_seeds_hold_what_they_are_to_show() -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        cluster = SimulatedCluster(seed)
        cluster.run()
        counts += cluster.counts
    seen = {
        "Form", "Judge", "NextAttempt", "WaitInVain", "Try", "Missing",
        "status 0", "status 1", "status 75", "status 130", "refused job-complete",
        "refused node-skew", "refused join-timeout",
    }  # fmt: skip
    assert seen - {*counts} == set()


def test_a_job_without_faults_ends_well_on_all_nodes() -> None:
    cluster = SimulatedCluster(1, nodes=50, faults=0)
    assert cluster.run() == []
    assert {(node.ended, node.status) for node in cluster.nodes} == {("dismissed", 0)}


def test_messages_grow_with_the_nodes_and_no_faster() -> None:
    cluster = SimulatedCluster(2, nodes=200, faults=0)
    cluster.max_restarts = 0
    cluster.nodes[7].fails = True
    assert cluster.run() == []
    assert {node.status for node in cluster.nodes} == {1}
    assert cluster.messages <= 12 * 200


def _tells(decision: Any, kind: type[Any]) -> TypeGuard[TellAll]:
    return isinstance(decision, TellAll) and isinstance(decision.message, kind)


class GivesAPlaceTwice(Joining):
    def handle(self, event: Any, now: float) -> list[Any]:
        decisions = super().handle(event, now)
        for decision in decisions:
            if isinstance(decision, Form):
                last = [*decision.seats][-1]
                decision.seats[last] = replace(decision.seats[last], node=0)
        return decisions


class FormsTwoWorlds(Joining):
    def handle(self, event: Any, now: float) -> list[Any]:
        decisions = super().handle(event, now)
        for decision in decisions:
            if isinstance(decision, Form):
                last = [*decision.seats][-1]
                decision.seats[last] = replace(decision.seats[last], master_port=1)
        return decisions


class SeesNoLoss(Lead):
    def handle(self, event: Any, now: float) -> list[Any]:
        return [] if isinstance(event, Lost) else super().handle(event, now)


class SentencesTwice(Lead):
    def handle(self, event: Any, now: float) -> list[Any]:
        decisions = super().handle(event, now)
        return decisions + [one for one in decisions if _tells(one, Sentence)]


class SaysNotWhy(Lead):
    def handle(self, event: Any, now: float) -> list[Any]:
        decisions = super().handle(event, now)
        return [TellAll(Judge(""), one.but) if _tells(one, Judge) else one for one in decisions]


class LetsGoTooEarly(Lead):
    def handle(self, event: Any, now: float) -> list[Any]:
        decisions = super().handle(event, now)
        early = any(isinstance(one, Diagnose) for one in decisions)
        return decisions + [TellAll(Dismissed(1, "too early"))] * early


class NeverDiagnoses(Lead):
    def handle(self, event: Any, now: float) -> list[Any]:
        return [one for one in super().handle(event, now) if not isinstance(one, Diagnose)]


@pytest.mark.parametrize(
    ("cores", "said"),
    [
        ({"joining": GivesAPlaceTwice}, "two have the place"),
        ({"joining": FormsTwoWorlds}, "two worlds"),
        ({"lead": SeesNoLoss}, "is in trouble"),
        ({"lead": SentencesTwice}, "a second sentence"),
        ({"lead": SaysNotWhy}, "not why"),
        ({"lead": LetsGoTooEarly}, "while its ranks run"),
        ({"lead": NeverDiagnoses}, "waits for ever"),
    ],
)
def test_a_core_that_is_wrong_is_found(cores: dict[str, Any], said: str) -> None:
    found = [one for seed in range(100) for one in SimulatedCluster(seed, **cores).run()]
    assert any(said in one for one in found)
