"""Visitors of a running job, in the agent's own loop: who is answered, when, and who is
sent away.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from rallypoint.diagnosis.evidence import Ended, Meeting
from rallypoint.diagnosis.rank_snapshot import RankStanding, Standing
from rallypoint.host.process_status import Activity
from rallypoint.launcher.agent import hang_monitor as inquiry_module
from rallypoint.launcher.agent import query_socket
from rallypoint.launcher.agent.guard import Guard
from rallypoint.launcher.agent.hang_monitor import (
    LEAD_ANSWERS_WITHIN,
    LEFT_BEHIND,
    MEASURED,
    HangMonitor,
)
from rallypoint.launcher.agent.rendezvous_monitor import RendezvousMonitor
from rallypoint.launcher.agent.supervisor import EvidenceIn, Signalled
from rallypoint.launcher.protocol import Meets
from rallypoint.world import World

from .part_of_agent import Scene

DEADLINE = 30.0  # seconds for a thread to run on a machine that is busy with other tests


class Visitor(threading.Thread):
    """Asks as `rallypoint stacks` does."""

    def __init__(self, path: str) -> None:
        super().__init__(daemon=True)
        self.path = path
        self.answer: Standing | Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = query_socket.ask(self.path, DEADLINE)
        except query_socket.DoorClosed as closed:
            self.answer = closed


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(2, run_dir=str(tmp_path))
    yield scene
    scene.close()


@pytest.fixture
def inquiry(scene: Scene) -> Iterator[tuple[HangMonitor, str]]:
    inherited: list[str] = []
    part = HangMonitor(scene.job, stop=lambda: None)
    part.open_door(cast(Guard, SimpleNamespace(inherit=inherited.append)))
    [path] = inherited  # should we be killed, the guard removes it
    assert scene.words.of("announce") == [(path,)]
    yield part, path
    part.close()
    part.close()


def until_asked(scene: Scene, times: int = 1) -> None:
    """Wait for the visitors, each of whom comes in a thread."""
    while len([said for said in scene.words.of("event") if said[0] == "evidence-asked"]) < times:
        assert select.select([scene.loop], [], [], DEADLINE)[0], "nobody came"
        scene.loop.turn()


def test_a_visitor_is_answered_when_the_round_is_over(
    scene: Scene, inquiry: tuple[HangMonitor, str]
) -> None:
    visitors = [Visitor(inquiry[1]) for _ in range(2)]
    until_asked(scene, 2)
    scene.turn()
    assert [visitor.answer for visitor in visitors] == [None, None]
    scene.pass_by(MEASURED)
    for visitor in visitors:
        visitor.join(DEADLINE)
        answer: Any = visitor.answer
        assert (answer.world_size, answer.age, [rank.missing for rank in answer.ranks]) == (
            2,
            MEASURED,
            ["not started"] * 2,
        )


def test_while_a_failure_is_judged_a_visitor_waits(
    scene: Scene, inquiry: tuple[HangMonitor, str]
) -> None:
    """Another question now could cost the report its answers."""
    scene.job.feed(Signalled("SIGINT"))
    visitor = Visitor(inquiry[1])
    until_asked(scene)
    for _ in range(4):
        scene.pass_by(MEASURED)
    assert visitor.answer is None
    scene.job.feed(EvidenceIn())
    for _ in range(4):
        scene.pass_by(MEASURED)
    visitor.join(DEADLINE)
    assert isinstance(visitor.answer, Standing)


def test_who_waits_when_the_job_ends_reads_that_nobody_answers(
    scene: Scene, inquiry: tuple[HangMonitor, str]
) -> None:
    visitor = Visitor(inquiry[1])
    until_asked(scene)
    inquiry[0].close()
    visitor.join(DEADLINE)
    assert isinstance(visitor.answer, query_socket.SentAway)


def test_a_visitor_who_waits_is_answered_about_the_next_attempt(
    scene: Scene, inquiry: tuple[HangMonitor, str]
) -> None:
    visitor = Visitor(inquiry[1])
    until_asked(scene)
    cast(Any, scene.job.attempt).number = 1
    inquiry[0].begin()
    scene.pass_by(MEASURED)
    visitor.join(DEADLINE)
    assert isinstance(visitor.answer, Standing)
    assert visitor.answer.attempt == 1


def test_a_rank_that_meets_the_others_meanwhile_costs_a_visitor_nothing(
    scene: Scene, inquiry: tuple[HangMonitor, str]
) -> None:
    """Two parts had a time of the same name in the loop: the later one was kept, and the visitor
    never answered.
    """
    parts = RendezvousMonitor(scene.job)
    visitor = Visitor(inquiry[1])
    until_asked(scene)
    for handle in scene.ranks:
        parts.meets(
            handle,
            Meets(
                Meeting(
                    "env://", "127.0.0.1:29500", handle.rank, 2, "gloo", "train.py:7", timeout=5.0
                ),
                differs=False,
            ),
        )
    scene.pass_by(MEASURED)
    visitor.join(DEADLINE)
    assert isinstance(visitor.answer, Standing)


def _of_a_job_that_some_have_left(
    monkeypatch: pytest.MonkeyPatch, moves: bool = False, code: int = 0, debugs: bool = False
) -> Scene:
    """Rank 0 has ended, rank 1 stands in a call; two minutes pass."""
    scene = Scene(2)
    scene.ranks[0].ended = Ended(code=code, at=1.0)
    scene.ranks[1].pid = 4711
    scene.ranks[1].debugging = debugs
    monkeypatch.setattr(
        inquiry_module,
        "activities",
        lambda ranks: {1: Activity("S", 100 + moves * int(scene.clock.elapsed()), 7, 7)},
    )
    part = HangMonitor(scene.job, stop=lambda: None)
    part.begin()
    for _ in range(24):
        scene.pass_by(5.0)
    part.close()
    scene.ranks[1].pid = 0  # nobody's
    return scene


def test_ranks_that_stand_still_when_the_others_have_ended_well_are_named_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = _of_a_job_that_some_have_left(monkeypatch)
    [(ended, left, seconds)] = scene.words.of("say_left_behind")
    assert (ended, left) == ([0], [1])
    assert LEFT_BEHIND <= seconds <= LEFT_BEHIND + 10.0
    scene.close()


@pytest.mark.parametrize(
    "other",
    [{"moves": True}, {"code": 1}, {"debugs": True}],
    ids=["it works", "a failure", "a debugger"],
)
def test_who_works_on_alone_is_left_in_peace(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    scene = _of_a_job_that_some_have_left(monkeypatch, **other)
    assert scene.words.of("say_left_behind") == []
    scene.close()


# --- several nodes


class Others:
    """Stands for the link to the lead; keeps what it is told."""

    def __init__(self, scene: Scene) -> None:
        self.told: list[tuple[Any, ...]] = []
        scene.job.others = cast(Any, self)
        attempt = cast(Any, scene.job.attempt)
        attempt.seat = msgspec.structs.replace(attempt.seat, world=World.of([2, 1]))

    def note(self, event: object) -> None:
        """Hear of what the supervisor does."""

    def __getattr__(self, name: str) -> Any:
        return lambda *said: self.told.append((name, *said))


def _of(rank: int) -> RankStanding:
    return RankStanding(rank, 4000 + rank, "running", host="gpu01")


def test_of_several_nodes_a_visitor_gets_the_leads_answer(
    scene: Scene, inquiry: tuple[HangMonitor, str]
) -> None:
    others = Others(scene)
    visitor = Visitor(inquiry[1])
    until_asked(scene)
    inquiry[0].answer_lead(7)
    scene.pass_by(MEASURED)
    assert visitor.answer is None
    asked, (name, number, ranks) = others.told
    assert (asked, name, number) == (("ask_where_all_stand",), "stand_there", 7)
    assert [one.missing for one in ranks] == ["not started"] * 2
    inquiry[0].answer_of_all(tuple(map(_of, range(3))))
    visitor.join(DEADLINE)
    assert isinstance(visitor.answer, Standing)
    assert (visitor.answer.world_size, visitor.answer.ranks) == (3, tuple(map(_of, range(3))))
    scene.pass_by(LEAD_ANSWERS_WITHIN)
    assert len(others.told) == 2


def test_when_the_lead_is_silent_a_visitor_reads_of_this_node_and_that_no_other_was_heard(
    scene: Scene, inquiry: tuple[HangMonitor, str]
) -> None:
    Others(scene)
    visitor = Visitor(inquiry[1])
    until_asked(scene)
    scene.pass_by(MEASURED)
    assert visitor.answer is None
    scene.pass_by(LEAD_ANSWERS_WITHIN)
    visitor.join(DEADLINE)
    assert isinstance(visitor.answer, Standing)
    seen = [(one.rank, one.node, one.missing) for one in visitor.answer.ranks]
    assert seen == [(0, 0, "not started"), (1, 0, "not started"), (2, 1, "unheard")]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_job_that_is_being_stopped_does_not_stall(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stopped: bool
) -> None:
    """Its ranks stand still within the grace, and somebody asks where."""
    scene = Scene(2, stall=60.0, run_dir=str(tmp_path))
    still = {rank: Activity("S", 100, 7, 7) for rank in range(2)}
    monkeypatch.setattr(inquiry_module, "activities", lambda ranks: still)
    inherited: list[str] = []
    part = HangMonitor(scene.job, stop=lambda: None)
    part.open_door(cast(Guard, SimpleNamespace(inherit=inherited.append)))
    part.begin()
    for _ in range(10):
        scene.pass_by(5.0)
    if stopped:
        scene.job.feed(Signalled("SIGINT"))
        scene.job.feed(EvidenceIn())
    scene.pass_by(30.0)
    visitor = Visitor(inherited[0])
    until_asked(scene)
    for _ in range(2):
        scene.pass_by(MEASURED)
    visitor.join(DEADLINE)
    assert isinstance(visitor.answer, Standing)
    assert scene.job.is_running is not stopped
    assert len(scene.words.of("report_stall")) == (not stopped)
    part.close()
    scene.close()


def test_of_several_nodes_a_stall_of_this_one_is_told_to_the_lead_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its ranks may wait for those of another node, which work."""
    scene = Scene(2, stall=60.0)
    others, used = Others(scene), 0
    monkeypatch.setattr(
        inquiry_module,
        "activities",
        lambda ranks: {rank: Activity("S", 100 + used, 7, 7 + used) for rank in range(2)},
    )
    part = HangMonitor(scene.job, stop=lambda: None)
    part.begin()
    for _ in range(20):
        scene.pass_by(5.0)
    [(name, stall)] = others.told
    assert (name, stall.looks) == ("stand_still", 0)
    assert 60.0 <= stall.seconds < 75.0
    used = 50
    for _ in range(2):
        scene.pass_by(5.0)
    assert others.told[1:] == [("go_on", (0, 1))]
    assert scene.words.of("report_stall") == scene.words.of("report_moved") == []
    part.close()
    scene.close()
