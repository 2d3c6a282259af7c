"""Whether torch's store answers in the middle of a run: what counts as no answer, and when the
launcher looks, says so, and gives up.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from rallypoint.diagnosis.evidence import Meeting
from rallypoint.host import process_status, socket_diag
from rallypoint.launcher.agent.tcpstore_monitor import (
    LOOK_EVERY,
    SAY_AFTER,
    STOOD_STILL,
    TcpStoreMonitor,
    UnreadBytes,
)

from .part_of_agent import Scene

HOST, STRANGER = 4711, "10.0.0.5:29500"


def test_what_lies_there_counts_from_its_first_sight() -> None:
    seen = UnreadBytes()
    assert seen.see(1.0, {7: 20}) == {7: 1.0}
    assert seen.see(1.5, {7: 20, 8: 5}) == {7: 1.0, 8: 1.5}
    assert seen.see(2.0, {7: 60, 8: 5}) == {7: 1.0, 8: 1.5}, (
        "more requests on top of one without an answer"
    )


def test_what_was_taken_is_no_standstill() -> None:
    seen = UnreadBytes()
    seen.see(1.0, {7: 20})
    assert seen.see(1.5, {}) == {}
    assert seen.see(2.0, {7: 20}) == {7: 2.0}
    assert seen.see(2.5, {7: 10}) == {7: 2.5}


def test_while_we_stood_still_ourselves_nobody_was_kept_waiting() -> None:
    seen = UnreadBytes()
    seen.see(1.0, {7: 20})
    assert seen.see(2.0 + STOOD_STILL, {7: 20}) == {7: 2.0 + STOOD_STILL}


class Kernel:
    """What the kernel would tell: which processes are stopped, and what lies in the sockets of
    which.
    """

    def __init__(self) -> None:
        self.stopped: set[int] = set()
        self.lying: dict[int, int] = {}  # by the socket's inode: a rank's is its pid, times ten
        self.asked = 0

    def unanswered(self, port: int) -> dict[int, int]:
        self.asked += 1
        return dict(self.lying)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr(process_status, "is_stopped", lambda pid: pid in found.stopped)
    monkeypatch.setattr(process_status, "sockets", lambda pid: {10 * pid})
    monkeypatch.setattr(socket_diag, "unanswered", found.unanswered)
    return found


class Watched:
    """Two ranks that have met, and the places that were found without an answer."""

    def __init__(self, scene: Scene, *, held: bool, timeout: float = 5.0) -> None:
        self.scene = scene
        self.overdue: list[tuple[str, int]] = []
        scene.job.attempt.host = SimpleNamespace(pid=HOST)  # type: ignore[assignment]
        self.answers = TcpStoreMonitor(scene.job, self.overdue.append)
        for handle in scene.ranks:
            handle.pid, handle.at_held = 4000 + handle.rank, held
            address = "127.0.0.1:29500" if held else STRANGER
            handle.meeting = Meeting(
                "tcp://",
                address,
                handle.rank + (not held),
                3,
                "gloo",
                "train.py:7",
                timeout=timeout,
            )
            self.answers.meets(handle)

    def pass_by(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.05)):
            self.scene.pass_by(0.05)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene(2)
    yield scene
    scene.close()


def test_a_store_that_runs_is_left_alone_and_nothing_is_read(scene: Scene, kernel: Kernel) -> None:
    watched = Watched(scene, held=True)
    kernel.lying = {40000: 20}
    watched.pass_by(20)
    assert (watched.overdue, kernel.asked, scene.words.of("say")) == ([], 0, [])


def test_a_stopped_store_that_nobody_asks_harms_nobody(scene: Scene, kernel: Kernel) -> None:
    watched = Watched(scene, held=True)
    kernel.stopped = {HOST}
    watched.pass_by(20)
    assert (watched.overdue, scene.words.of("say")) == ([], [])


def test_a_request_to_a_stopped_store_is_said_and_overdue_in_time(
    scene: Scene, kernel: Kernel
) -> None:
    watched = Watched(scene, held=True, timeout=5.0)
    kernel.stopped, kernel.lying = {HOST}, {40010: 20}
    watched.pass_by(SAY_AFTER + 3 * LOOK_EVERY)
    ((line,),) = scene.words.of("say")
    assert line == (
        "rallypoint: torch's store at 127.0.0.1:29500 does not answer rank 1: "
        "its process (pid 4711) is stopped; kill -CONT 4711 lets it go on"
    )
    watched.pass_by(4.5 - SAY_AFTER - 3 * LOOK_EVERY)
    assert watched.overdue == []
    watched.pass_by(0.5)
    assert watched.overdue == [("127.0.0.1", 29500)]
    assert [handle.unanswered for handle in scene.ranks] == [None, ("127.0.0.1", 29500)]


def test_one_that_goes_on_again_is_forgiven(scene: Scene, kernel: Kernel) -> None:
    watched = Watched(scene, held=True)
    kernel.stopped, kernel.lying = {HOST}, {40000: 20}
    watched.pass_by(4)
    kernel.stopped = set()
    watched.pass_by(1)
    kernel.stopped = {HOST}
    watched.pass_by(4)
    assert watched.overdue == []


def test_packets_to_another_machine_that_nobody_acknowledges(scene: Scene, kernel: Kernel) -> None:
    watched = Watched(scene, held=False, timeout=5.0)
    kernel.lying = {40000: 20, 99999: 7}  # and a stranger's connection to the same port
    watched.pass_by(10)
    assert watched.overdue[0] == ("10.0.0.5", 29500)
    assert [handle.unanswered for handle in scene.ranks] == [("10.0.0.5", 29500), None]


def test_a_new_attempt_starts_afresh(scene: Scene, kernel: Kernel) -> None:
    watched = Watched(scene, held=True)
    kernel.stopped, kernel.lying = {HOST}, {40000: 20}
    watched.pass_by(4)
    watched.answers.begin()
    watched.pass_by(20)
    assert watched.overdue == []


def test_who_else_fails_meanwhile_finds_the_stopped_store(scene: Scene, kernel: Kernel) -> None:
    watched = Watched(scene, held=True, timeout=600.0)
    kernel.stopped, kernel.lying = {HOST}, {40000: 20}
    watched.pass_by(SAY_AFTER / 2)
    assert watched.answers.kept_waiting() is None, "a store may be stopped for a moment"
    watched.pass_by(SAY_AFTER)
    assert watched.answers.kept_waiting() == ("127.0.0.1", 29500)
    assert scene.ranks[0].unanswered == ("127.0.0.1", 29500)


def test_a_store_that_was_stopped_and_goes_on_explains_nothing(
    scene: Scene, kernel: Kernel
) -> None:
    watched = Watched(scene, held=True, timeout=600.0)
    kernel.stopped, kernel.lying = {HOST}, {40000: 20}
    watched.pass_by(2 * SAY_AFTER)
    kernel.stopped = set()
    watched.pass_by(SAY_AFTER)
    assert watched.answers.kept_waiting() is None
