"""The clock that a test moves."""

from __future__ import annotations

import threading

import pytest

from rallypoint.errors import UsageError
from rallypoint.testing import ManualClock


def test_it_stands_still_until_it_is_moved() -> None:
    clock = ManualClock(wall=1000.0)
    assert (clock.monotonic(), clock.elapsed(), clock.wall(), clock.started) == (
        0.0,
        0.0,
        1000.0,
        1000.0,
    )
    clock.advance(2.5)
    clock.advance(0)
    assert (clock.monotonic(), clock.elapsed(), clock.wall(), clock.started) == (
        2.5,
        2.5,
        1002.5,
        1000.0,
    )
    assert clock.date("%S") == "42"


def test_it_is_never_set_back_but_the_wall_clock_may_jump() -> None:
    clock = ManualClock()
    for wrong in (-0.1, float("nan")):
        with pytest.raises(UsageError, match="forward"):
            clock.advance(wrong)
    clock.set_wall(10.0)
    assert (clock.monotonic(), clock.wall()) == (0.0, 10.0)


def test_threads_that_move_it_lose_nothing() -> None:
    clock = ManualClock()

    def move() -> None:
        for _ in range(1000):
            clock.advance(1)

    threads = [threading.Thread(target=move) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.elapsed() == 4000


def test_it_says_what_it_shows() -> None:
    clock = ManualClock()
    clock.advance(1.5)
    assert repr(clock) == f"<ManualClock at 1.5 s, wall {clock.date()}>"
