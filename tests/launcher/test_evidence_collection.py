"""Who is asked where it is, and how long that is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rallypoint.diagnosis.evidence import Meeting
from rallypoint.launcher.agent import evidence_collection
from rallypoint.launcher.agent.evidence_collection import (
    ANSWER_LOOK,
    EVIDENCE_DEADLINE,
    ROLL_CALL_DEADLINE,
    call_roll,
    collect_evidence,
    look_for_stuck,
)
from rallypoint.launcher.agent.rendezvous_monitor import RendezvousMonitor
from rallypoint.launcher.agent.supervisor import (
    SETTLE_APART,
    VAIN_LOOKS,
    AskEvidence,
    EvidenceIn,
    Judged,
    MakeReport,
    RankRaised,
    SignalGroup,
    Signalled,
    Timer,
)

from .part_of_agent import Rank, Scene
from .test_rendezvous_monitor import Sight, looks

__all__ = ["looks"]  # the fixture


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setattr(evidence_collection, "Looking", Sight)
    scene = Scene(3, [Rank(rank) for rank in range(3)])
    yield scene
    scene.close()


def fail(scene: Scene, *, consequence: bool = False) -> None:
    scene.job.rendezvous = RendezvousMonitor(scene.job)
    scene.job.feed(RankRaised(0, consequence, "rank 0 raised ValueError"))
    collect_evidence(scene.job, scene.of(AskEvidence)[0].because)


def is_in(scene: Scene) -> bool:
    """Whether the supervisor has heard that the evidence is in."""
    return scene.supervisor._evidence_in


def test_the_report_waits_for_all_answers_and_no_longer(scene: Scene) -> None:
    scene.ranks[1].answers = False
    scene.ranks[2].alive = False
    fail(scene)
    assert [rank.asked for rank in scene.ranks] == [True, True, False]
    assert scene.words.of("event") == [("evidence-asked", "rank 0 raised ValueError", [0, 1])]
    scene.turn()
    assert not is_in(scene)
    scene.ranks[1].answers = True
    scene.pass_by(ANSWER_LOOK)
    assert is_in(scene)


def test_a_rank_that_never_answers_is_not_waited_for(scene: Scene) -> None:
    scene.ranks[1].answers = False
    fail(scene)
    scene.pass_by(EVIDENCE_DEADLINE * 0.9)
    assert not is_in(scene)
    scene.pass_by(EVIDENCE_DEADLINE * 0.2)
    assert is_in(scene)
    scene.pass_by(SETTLE_APART)
    scene.job.feed(Timer("settle"))
    assert len(scene.of(MakeReport)) == 1


def test_the_report_waits_for_a_look_at_what_an_error_speaks_of(
    scene: Scene, looks: list[Sight]
) -> None:
    fail(scene, consequence=True)
    scene.words.lost = ("node07", 29500)  # torch's log is read after the question
    scene.turn()
    assert len(looks) == 1
    assert not is_in(scene)
    looks[0].sees("refused")
    scene.pass_by(ANSWER_LOOK)
    assert is_in(scene)


def call(scene: Scene) -> None:
    scene.job.rendezvous = RendezvousMonitor(scene.job)
    call_roll(scene.job, "rank 0 waits in init_process_group for 30 s")


def said(scene: Scene) -> list[tuple[list[int], Any]]:
    return [
        ([rank.rank for rank in asked], seen)
        for (asked, seen), _ in scene.words.of("report_roll_call")
    ]


def test_only_who_is_missing_is_asked_at_the_roll_call(scene: Scene) -> None:
    """Nor who was stopped, or is before a person: that is seen from here, and it could not
    answer.
    """
    scene.ranks[0].waiting = True
    scene.ranks[2].stopped = True
    scene.ranks[1].answers = False
    scene.words.missing = (1, 2)
    call(scene)
    assert [rank.asked for rank in scene.ranks] == [False, True, False]
    scene.turn()
    assert said(scene) == []
    scene.pass_by(ROLL_CALL_DEADLINE)
    assert said(scene) == [([1], None)]


def test_a_roll_call_that_a_failure_overtakes_is_not_said(scene: Scene) -> None:
    scene.words.missing = (1,)
    scene.ranks[1].answers = False
    call(scene)
    scene.job.feed(Signalled("SIGINT"))
    scene.pass_by(2 * ROLL_CALL_DEADLINE)
    assert said(scene) == []


@pytest.mark.parametrize(
    ("address", "looked"), [("10.0.0.9:29999", [("10.0.0.9", 29999)]), ("127.0.0.1:29500", [])]
)
def test_where_all_wait_the_meeting_point_is_looked_at(
    scene: Scene, looks: list[Sight], address: str, looked: list[tuple[str, int]]
) -> None:  # fmt: skip
    """Not the one that we hold: there is a store."""
    for rank in scene.ranks:
        rank.waiting, rank.meeting = True, Meeting("env://", address)
    call(scene)
    assert [look.address for look in looks] == looked
    scene.turn()
    if looks:
        assert said(scene) == []
        looks[0].sees("dropped")
        scene.pass_by(ANSWER_LOOK)
    assert [seen is not None for _, seen in said(scene)] == [bool(looked)]


# --- those who do not end


def failed(scene: Scene) -> None:
    """A rank has failed, the others were asked to end, and it is time to look."""
    scene.job.feed(RankRaised(2, False, "rank 2 raised ValueError"))
    scene.job.feed(EvidenceIn())
    scene.pass_by(SETTLE_APART)
    scene.job.feed(Timer("settle"))
    scene.job.feed(Judged(1))
    scene.actions.clear()


def test_who_cannot_hear_a_signal_is_sent_a_stronger_one_and_who_runs_its_handler_is_not(
    scene: Scene,
) -> None:
    handling, waiting, running = scene.ranks
    handling.sleeps = waiting.sleeps = waiting.deaf = running.deaf = True
    handling.answers = False
    failed(scene)
    look_for_stuck(scene.job, (0, 1, 2), together=False)
    assert [rank.asked for rank in scene.ranks] == [True, True, False], "one that runs will hear it"
    scene.turn()
    assert scene.actions == [], "an answer is missing"
    scene.pass_by(EVIDENCE_DEADLINE)
    assert [(action.rank, action.signal) for action in scene.of(SignalGroup)] == [(1, "SIGKILL")]


def test_a_rank_that_leaves_by_itself_and_was_not_signalled_is_not_asked(scene: Scene) -> None:
    scene.ranks[2].sleeps, scene.ranks[2].sent = True, []
    failed(scene)
    look_for_stuck(scene.job, (0, 1, 2), together=False)
    assert not any(rank.asked for rank in scene.ranks)


def test_nobody_is_asked_where_it_waits_while_one_goes_on_for_whom_it_may_wait(
    scene: Scene,
) -> None:
    for rank in scene.ranks[:2]:
        rank.sleeps = rank.deaf = True
    scene.job.feed(Signalled("SIGINT"))
    scene.job.feed(EvidenceIn())
    scene.job.feed(Judged(130))
    scene.actions.clear()
    for _ in range(5):
        look_for_stuck(scene.job, (0, 1, 2), together=True)
        scene.turn()
    assert not any(rank.asked for rank in scene.ranks)
    assert scene.of(SignalGroup) == []
    scene.ranks[2].sleeps = scene.ranks[2].deaf = True
    for _ in range(VAIN_LOOKS):
        look_for_stuck(scene.job, (0, 1, 2), together=True)
        scene.turn()
    assert {(action.rank, action.signal) for action in scene.of(SignalGroup)} == {
        (rank, "SIGTERM") for rank in range(3)
    }
