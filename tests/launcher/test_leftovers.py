"""What a successful rank left running: when it is named, who is signalled, and what cuts the grace
short.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rallypoint.host import processes, system_calls
from rallypoint.launcher.agent.leftovers import LEFTOVER_PATIENCE, Leftovers

from .part_of_agent import Scene


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene(2)
    for handle in scene.ranks:
        handle.pid = 4000 + handle.rank
    yield scene
    scene.close()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """The members of each group, by its leader; and under 0, whom SIGTERM was sent to."""
    members: dict[int, list[int]] = {0: []}
    monkeypatch.setattr(
        processes,
        "group_members",
        lambda leader: [SimpleNamespace(pid=pid) for pid in members.get(leader, [])],
    )

    def send_group(leader: int, number: int) -> bool:
        assert number in (signal.SIGTERM, signal.SIGCONT)
        members[0] += [leader] * (number == signal.SIGTERM)
        return True

    monkeypatch.setattr(processes, "send_group", send_group)
    monkeypatch.setattr(system_calls, "pidfd_open", lambda pid: os.pipe()[0])
    return members


def parts(scene: Scene) -> tuple[Leftovers, list[Any]]:
    reaped: list[Any] = []

    def reap(handle: Any) -> None:
        handle.reaped = True
        reaped.append(handle.rank)

    scene.job.endings = cast(Any, SimpleNamespace(reap=reap))
    return Leftovers(scene.job), reaped


def test_what_stays_is_named_once_and_what_goes_by_itself_never(
    scene: Scene, groups: dict[int, list[int]]
) -> None:
    part, reaped = parts(scene)
    groups.update({4000: [5000], 4001: [5001]})
    for handle in scene.ranks:
        part.found(handle)
    scene.pass_by(LEFTOVER_PATIENCE / 2)
    assert scene.words.said == []
    groups[4001] = []  # multiprocessing's own helpers see the rank's end
    scene.pass_by(LEFTOVER_PATIENCE)
    assert [rank for rank, _ in scene.words.of("say_leftovers")] == [0]
    assert reaped == [1]
    scene.pass_by(10 * LEFTOVER_PATIENCE)
    assert len(scene.words.of("say_leftovers")) == 1


def test_a_group_whose_number_was_given_back_is_not_signalled(
    scene: Scene, groups: dict[int, list[int]]
) -> None:
    """Its helpers had gone, it was reaped on the way: from then on the number may be a
    stranger's.
    """
    part, reaped = parts(scene)
    groups[4000] = [5000]
    scene.ranks[1].left_at_exit = 0.0
    scene.clock.advance(LEFTOVER_PATIENCE)
    readable, writer = os.pipe()
    os.write(writer, b"x")
    part.end(scene.ranks, {readable: lambda: True})
    assert reaped == [1]
    assert groups[0] == [4000]
    os.close(readable)
    os.close(writer)
