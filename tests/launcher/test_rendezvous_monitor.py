"""Whether ranks can meet: when a misfit counts, and when the launcher looks at a meeting point
itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rallypoint.diagnosis.evidence import Ended, Meeting, Raised
from rallypoint.diagnosis.rendezvous_mismatch import MISFIT_SETTLE
from rallypoint.host.probe import Reached, Tried
from rallypoint.launcher.agent import rendezvous_monitor, supervisor
from rallypoint.launcher.agent.rendezvous_monitor import (
    LOOK_PATIENCE,
    TORCH_OVERRUN,
    RendezvousMonitor,
)
from rallypoint.launcher.agent.supervisor import AskEvidence
from rallypoint.launcher.protocol import Meets

from .part_of_agent import Scene


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene(2)
    yield scene
    scene.close()


class Sight:
    """A look whose thread the test holds."""

    all: list[Sight]

    def __init__(self, host: str, port: int, *rest: object) -> None:
        self.address = (host, port)
        self.result: Reached | None = None
        Sight.all.append(self)

    def sees(self, outcome: Any) -> None:
        host, port = self.address
        if outcome == "unresolved":
            self.result = Reached(host, port, unresolved="Name or service not known")
        else:
            self.result = Reached(host, port, (Tried(f"{host}:{port}", outcome),))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Sight]:
    Sight.all = []
    monkeypatch.setattr(rendezvous_monitor, "Looking", Sight)
    return Sight.all


def join(
    scene: Scene,
    parts: RendezvousMonitor,
    rank: int,
    port: int,
    *,
    differs: bool = False,
    **more: Any,
) -> None:
    """A rank calls init_process_group."""
    handle = scene.ranks[rank]
    handle.pid = 4000 + rank
    meeting = Meeting("env://", f"127.0.0.1:{port}", rank, 2, "gloo", "train.py:7", **more)
    parts.meets(handle, Meets(meeting, differs))
    handle.phase = "joining"
    parts.joining()


def raised(kind: str, message: str) -> Raised:
    return Raised(kind, message, (), "", call="init_process_group")


def because(scene: Scene) -> list[str]:
    return [action.because for action in scene.of(AskEvidence)]


def test_ranks_that_meet_at_one_place_are_left_alone(scene: Scene) -> None:
    parts = RendezvousMonitor(scene.job)
    join(scene, parts, 0, 29500)
    join(scene, parts, 1, 29500)
    scene.pass_by(3 * MISFIT_SETTLE)
    assert (because(scene), parts.cause_of_all()) == ([], None)


def test_a_misfit_counts_when_it_has_lasted(scene: Scene) -> None:
    parts = RendezvousMonitor(scene.job)
    join(scene, parts, 0, 29500)
    join(scene, parts, 1, 29501, differs=True)
    scene.pass_by(MISFIT_SETTLE / 2)
    assert because(scene) == []
    assert parts.cause_of_all() is None  # nobody has failed of it yet
    scene.pass_by(MISFIT_SETTLE)
    assert because(scene) == ["the ranks would meet at different addresses"]
    found = parts.cause_of_all()
    assert found is not None
    assert (found.code, found.ranks) == ("address-differs", (0, 1))


def test_who_tries_another_place_in_time_is_not_accused(scene: Scene) -> None:
    parts = RendezvousMonitor(scene.job)
    join(scene, parts, 0, 29500)
    join(scene, parts, 1, 29501, differs=True)
    scene.pass_by(MISFIT_SETTLE / 2)
    join(scene, parts, 1, 29500)
    scene.pass_by(MISFIT_SETTLE)
    assert because(scene) == []


def test_a_misfit_that_did_not_last_is_the_cause_of_those_who_gave_up(scene: Scene) -> None:
    """torch's own timeout overtook the launcher's patience: the ranks raised that nobody came, and
    that was all the report said.
    """
    parts = RendezvousMonitor(scene.job)
    join(scene, parts, 0, 29500)
    join(scene, parts, 1, 29501, differs=True)
    for handle in scene.ranks:
        handle.raised = raised(
            "torch.distributed.DistStoreError", "Timed out after 1 seconds waiting for clients."
        )
        handle.ended = Ended(code=1)
    scene.pass_by(MISFIT_SETTLE)
    assert because(scene) == []
    found = parts.cause_of_all()
    assert found is not None
    assert found.code == "address-differs"
    scene.ranks[1].raised = raised("ValueError", "something else")
    assert parts.cause_of_all() is None


def test_nothing_of_an_attempt_is_told_of_the_next(scene: Scene) -> None:
    parts = RendezvousMonitor(scene.job)
    join(scene, parts, 0, 29500)
    join(scene, parts, 1, 29501, differs=True)
    scene.pass_by(2 * MISFIT_SETTLE)
    assert parts.cause_of_all() is not None
    parts.begin()
    assert (parts.cause_of_all(), parts.reached, parts.has_looked) == (None, None, False)


def test_a_meeting_point_of_the_programs_own_is_said_once(scene: Scene) -> None:
    parts = RendezvousMonitor(scene.job)
    for rank in range(2):
        join(scene, parts, rank, 29999, differs=True)
    [(meeting, held)] = scene.words.of("say_differs")
    assert (meeting.address, held) == ("127.0.0.1:29999", "127.0.0.1:29500")
    assert not scene.ranks[0].at_held


@pytest.mark.parametrize(
    ("outcome", "guarded", "ends"),
    [
        ("refused", False, True),
        ("refused", True, False),
        ("silent", False, True),
        ("silent", True, True),
    ],
)
def test_a_rank_that_waits_beyond_its_own_time(
    scene: Scene, looks: list[Sight], outcome: str, guarded: bool, ends: bool
) -> None:
    """A program that would catch torch's error hears of a refusal, and may try another place; from
    a silent one it hears nothing, ever.
    """
    parts = RendezvousMonitor(scene.job)
    for rank in range(2):
        join(scene, parts, rank, 29999, timeout=5.0, guarded=guarded)
    scene.pass_by(5.0)
    assert looks == []  # torch, when it keeps its time, is heard first
    scene.pass_by(2 * TORCH_OVERRUN)
    assert [look.address for look in looks] == [("127.0.0.1", 29999)]
    assert (parts.has_looked, parts.is_looking(scene.loop.now), because(scene)) == (True, True, [])
    looks[0].sees(outcome)
    scene.pass_by(LOOK_PATIENCE / 2)
    assert because(scene) == (["ranks cannot meet at 127.0.0.1:29999"] if ends else [])
    assert len(looks) == 1


def test_who_has_joined_or_failed_by_then_is_not_looked_for(
    scene: Scene, looks: list[Sight]
) -> None:
    parts = RendezvousMonitor(scene.job)
    join(scene, parts, 0, 29500, timeout=5.0)
    scene.ranks[0].phase = "running"
    scene.pass_by(6.0)
    join(scene, parts, 1, 29500, timeout=5.0)
    scene.job.feed(supervisor.Signalled("SIGINT"))
    scene.pass_by(6.0)
    assert looks == []


def test_a_look_that_never_comes_back_holds_nobody_up(scene: Scene, looks: list[Sight]) -> None:
    parts = RendezvousMonitor(scene.job)
    parts.look_for_lost()
    assert not parts.has_looked  # no error speaks of a place
    scene.words.lost = ("node07", 29500)
    parts.look_for_lost()
    parts.look_for_lost()
    assert [look.address for look in looks] == [("node07", 29500)]
    assert parts.is_looking(scene.loop.now)
    scene.pass_by(LOOK_PATIENCE)
    assert not parts.is_looking(scene.loop.now)
    assert parts.reached is None


def test_what_keeps_all_from_meeting_is_looked_at_when_a_person_stops_them(
    scene: Scene, looks: list[Sight]
) -> None:
    parts = RendezvousMonitor(scene.job)
    for rank in range(2):
        join(scene, parts, rank, 29999, differs=True)
    parts.look_for_lost()
    assert [look.address for look in looks] == [("127.0.0.1", 29999)]
    parts.begin()
    scene.ranks[0].raised = raised("ValueError", "its own affair")
    parts.look_for_lost()
    assert len(looks) == 1


def test_who_gives_up_while_the_store_is_looked_at_leaves_that_look_the_last_word(
    scene: Scene, looks: list[Sight]
) -> None:
    parts = RendezvousMonitor(scene.job)
    place = ("127.0.0.1", 29500)
    scene.ranks[0].unanswered = place
    parts._on_unanswered(place)
    scene.job.feed(
        supervisor.RankRaised(1, True, "rank 1 waited until the timeout")
    )  # for rank 0, in a collective
    parts.look_for_lost()
    (look,) = looks
    look.sees("silent")
    scene.pass_by(LOOK_PATIENCE)
    assert parts.reached is look.result
    assert scene.ranks[0].unanswered == place
