"""Lines and deadlines: order, removal from anywhere, and what ten thousand of them cost."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.store.state import waiters as w
from rallypoint.store.state.waiters import NEVER, Deadlines, Lines, Waiter, Waiting


class Thing:
    def __init__(self, name: str = "") -> None:
        self.name = name
        self.deadline = NEVER


def waiter(lines: Lines, *names: str, into: Waiting, until: float = NEVER) -> Waiter:
    nobody: Any = None
    one = Waiter(nobody, None, lines, 0.0)
    into.add(one, names, until)
    return one


def lines() -> Lines:
    nobody: Any = None
    return Lines(nobody)


def test_a_line_is_first_come_first_served_and_may_be_left_from_anywhere() -> None:
    all_, key = Waiting(), lines()
    first, second, third = (waiter(key, "a", into=all_) for _ in range(3))
    assert key.all("a") == [first, second, third]
    all_.remove(second)
    assert key.all("a") == [first, third]
    all_.remove(first)
    assert key.first("a") is third
    all_.remove(third)
    assert key.first("a") is None
    assert not key  # a line that nobody stands in is not there
    assert len(all_) == 0


def test_who_waits_for_several_things_stands_in_several_lines() -> None:
    all_, key = Waiting(), lines()
    both = waiter(key, "a", "b", into=all_)
    alone = waiter(key, "b", into=all_)
    assert len(all_) == 2
    key.leave(both, "a")
    assert both.names == {"b"}
    assert key.all("b") == [both, alone]
    all_.remove(both)
    assert key.all("b") == [alone]


def test_a_waiter_is_taken_when_its_time_has_come_and_not_before() -> None:
    all_, key = Waiting(), lines()
    late, early, never = (
        waiter(key, "a", into=all_, until=9.0),
        waiter(key, "a", into=all_, until=3.0),
        waiter(key, "a", into=all_),
    )
    assert all_.deadlines.next == 3.0
    assert all_.deadlines.take(2.9) is None
    assert all_.deadlines.take(3.0) is early
    all_.remove(early)
    assert all_.deadlines.take(3.0) is None
    all_.remove(late)
    assert all_.deadlines.take(10.0) is None
    assert all_.deadlines.next == NEVER
    assert key.all("a") == [never]


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.one_of(st.just(NEVER), st.integers(0, 50).map(float))),
        max_size=200,
    ),
    st.integers(0, 60),
)
def test_deadlines_are_what_was_set_last(changes: list[tuple[int, float]], now: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(w, "SWEEP", 1)
        _set_and_take(changes, float(now))


def _set_and_take(changes: list[tuple[int, float]], now: float) -> None:
    things = [Thing(str(number)) for number in range(10)]
    deadlines: Deadlines[Thing] = Deadlines()
    model: dict[str, float] = {}
    for number, deadline in changes:
        deadlines.set(things[number], deadline)
        model[str(number)] = deadline
        assert deadlines.next <= min(model.values())
    taken = []
    while (thing := deadlines.take(now)) is not None:
        taken.append(thing.name)
    assert sorted(taken) == sorted(name for name, deadline in model.items() if deadline <= now)
    assert [model[name] for name in taken] == sorted(model[name] for name in taken)


def test_what_is_answered_long_before_its_time_is_not_remembered_until_then() -> None:
    all_, key = Waiting(), lines()
    staying = waiter(key, "b", into=all_, until=3600.0)
    for _ in range(10_000):
        all_.remove(waiter(key, "a", into=all_, until=3600.0))
    assert len(all_.deadlines) <= 2 * w.SWEEP + 2
    assert all_.deadlines.take(3600.0) is staying


def test_a_long_line_is_served_one_after_another_without_looking_at_all_of_it() -> None:
    """Four times as many cost some four times as much; with a plain dict in the place of the
    ordered one it is sixteen times.
    """

    def serve(count: int) -> float:
        all_, key = Waiting(), lines()
        order = [waiter(key, "a", into=all_) for _ in range(count)]
        began = time.process_time()
        for expected in order:
            first = key.first("a")
            assert first is expected
            all_.remove(first)
        assert not key
        return time.process_time() - began

    assert min(serve(80_000) for _ in range(3)) < 9 * min(serve(20_000) for _ in range(3))


def test_leaving_a_long_line_in_any_order_costs_the_same() -> None:
    all_, key = Waiting(), lines()
    everybody = [waiter(key, "a", into=all_, until=float(n)) for n in range(50_000)]
    random.Random(1).shuffle(everybody)
    for one in everybody:
        all_.remove(one)
    assert not key
    assert all_.deadlines.take(1e9) is None


def test_the_order_outlives_the_sweeping_of_dead_entries() -> None:
    rng = random.Random(1)
    for _ in range(20):
        things = [Thing() for _ in range(300)]
        deadlines: Deadlines[Thing] = Deadlines()
        for thing in things:
            deadlines.set(thing, rng.random())
        for thing in rng.sample(things, 250):
            deadlines.set(thing, NEVER)
        left = sorted(thing.deadline for thing in things if thing.deadline != NEVER)
        assert deadlines.next <= left[0]
        for moment in left:
            assert deadlines.take(moment - 1e-9) is None
            assert deadlines.take(moment) is not None
        assert deadlines.next == NEVER or deadlines.take(2.0) is None
