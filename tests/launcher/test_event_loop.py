"""The agent's loop: what is called, when, and what is not called any more."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from rallypoint.launcher.agent.event_loop import Loop
from rallypoint.testing.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def loop(clock: ManualClock) -> Iterator[Loop]:
    loop = Loop(clock)
    yield loop
    loop.close()


def test_what_is_due_is_called_once_with_the_time(loop: Loop, clock: ManualClock) -> None:
    called: list[tuple[str, float]] = []
    loop.at("late", 3.0, lambda now: called.append(("late", now)))
    loop.at("soon", 1.0, lambda now: called.append(("soon", now)))
    clock.advance(1.5)
    loop.turn()
    assert called == [("soon", 1.5)]
    assert (loop.due("soon"), loop.due("late")) == (None, 3.0)
    clock.advance(5.0)
    loop.turn()
    assert called == [("soon", 1.5), ("late", 6.5)]


def test_what_is_due_in_years_keeps_nothing_waiting(loop: Loop) -> None:
    """epoll refuses more than 24 days."""
    called: list[str] = []
    reader, writer = os.pipe()
    loop.watch(reader, lambda: called.append(os.read(reader, 1).decode()))
    loop.at("overdue", 1e12, lambda now: called.append("overdue"))
    os.write(writer, b"x")
    loop.turn()
    assert called == ["x"]
    os.close(reader)
    os.close(writer)


def test_what_was_opened_first_is_called_first(loop: Loop) -> None:
    """A batch system signals every process of a job. The launcher had its own signal as well, and
    read it when it had reported that the ranks were killed by it.
    """
    called: list[str] = []
    pipes = sorted(os.pipe() for _ in range(2))

    def watch(reader: int) -> None:
        loop.watch(reader, lambda: called.append(os.read(reader, 99).decode()))

    for reader, writer in reversed(pipes):
        watch(reader)
        os.write(writer, b"signal" if (reader, writer) == pipes[0] else b"end of a rank")
    loop.turn()
    assert called == ["signal", "end of a rank"]
    for reader, writer in pipes:
        os.close(reader)
        os.close(writer)


def test_a_later_call_replaces_and_by_keeps_what_is_earlier(loop: Loop) -> None:
    loop.at("one", 1.0, lambda now: None)
    loop.at("one", 2.0, lambda now: None)
    assert loop.due("one") == 2.0
    loop.by("one", 3.0, lambda now: None)
    assert loop.due("one") == 2.0
    loop.by("one", 1.5, lambda now: None)
    assert loop.due("one") == 1.5
    loop.cancel("one")
    loop.cancel("one")
    assert loop.due("one") is None


def test_who_is_forgotten_or_put_off_in_the_same_turn_is_not_called(
    loop: Loop, clock: ManualClock
) -> None:
    called: list[str] = []

    def first(now: float) -> None:
        called.append("first")
        loop.forget_all_but("kept", "put off")
        loop.at("put off", now + 1.0, lambda now: called.append("put off"))

    loop.at("first", 0.0, first)
    for name in ("forgotten", "kept", "put off"):
        loop.at(name, 0.0, lambda now, name=name: called.append(name))  # type: ignore[misc]
    loop.turn()
    assert called == ["first", "kept"]
    clock.advance(1.0)
    loop.turn()
    assert called == ["first", "kept", "put off"]


def test_a_descriptor_that_an_earlier_one_closed_is_not_read(loop: Loop) -> None:
    """Its number may belong to somebody else by then, and reading would wait."""
    pipes = [os.pipe() for _ in range(2)]
    read: list[int] = []

    def act(fd: int, other: int) -> None:
        read.append(fd)
        loop.unwatch(fd)
        loop.unwatch(other)
        loop.unwatch(other)

    for (reader, writer), (other, _) in zip(pipes, reversed(pipes), strict=True):
        os.write(writer, b"x")
        loop.watch(reader, lambda reader=reader, other=other: act(reader, other))  # type: ignore[misc]
    loop.at("never blocks", 0.0, lambda now: None)
    loop.turn()
    assert len(read) == 1
    for pair in pipes:
        for fd in pair:
            os.close(fd)
