"""When a job is started again."""

from __future__ import annotations

import pytest

from rallypoint.launcher.restarts import ENOUGH_TIMES, SOON_AFTER_START, Restarts


def test_so_many_restarts_are_made_and_no_more() -> None:
    restarts = Restarts(2)
    assert restarts.is_left
    restarts.made = 2
    assert not restarts.is_left


@pytest.mark.parametrize(
    ("same", "age", "hopeless"),
    [
        ("rank-raised train.py:3", 1.0, True),
        ("rank-raised train.py:3", SOON_AFTER_START + 1, False),
        ("", 1.0, False),
    ],
)
def test_the_same_failure_soon_after_each_start_is_hopeless(
    same: str, age: float, hopeless: bool
) -> None:
    restarts = Restarts(10)
    for _ in range(ENOUGH_TIMES - 1):
        restarts.failed(same, age)
        assert not restarts.is_hopeless
    restarts.failed(same, age)
    assert restarts.is_hopeless is hopeless


def test_another_failure_begins_the_count_anew() -> None:
    restarts = Restarts(10)
    for same in ("one", "one", "other", "one"):
        restarts.failed(same, 1.0)
    assert restarts.times == 1
