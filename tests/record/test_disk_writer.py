"""A disk that does not answer: who waits for it, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rallypoint.clock import Clock
from rallypoint.record.disk_writer import Backlog, DiskWriter
from rallypoint.testing.clock import ManualClock

DEADLINE = 30.0  # seconds for a thread to run on a machine that is busy with other tests


class Disk:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.reached = threading.Event()

    def write(self) -> None:
        self.reached.set()
        assert self.answers.wait(DEADLINE)


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.answers.set()


def test_all_is_done_in_order() -> None:
    writer, done = DiskWriter(), list[int]()
    for i in range(100):
        writer.submit(lambda i=i: done.append(i))  # type: ignore[misc]
    assert writer.finish(DEADLINE)
    assert done == list(range(100))
    assert writer.ask(lambda: len(done), DEADLINE) == 100
    assert writer.error is None


def test_nobody_waits_longer_than_it_says(disk: Disk) -> None:
    writer, done = DiskWriter(), list[str]()
    writer.submit(disk.write)
    assert disk.reached.wait(DEADLINE)
    writer.submit(lambda: done.append("later"))
    assert not writer.finish(0.01)
    with pytest.raises(TimeoutError, match=r"no answer within 0\.01 s"):
        writer.ask(lambda: done.append("asked"), 0.01)
    assert done == []
    disk.answers.set()
    assert writer.finish(DEADLINE)
    assert done == ["later", "asked"]


def test_an_error_goes_to_who_waits_and_ends_nothing() -> None:
    writer = DiskWriter()
    with pytest.raises(ZeroDivisionError):
        writer.ask(lambda: 1 // 0, DEADLINE)
    assert writer.error is None
    writer.submit(lambda: 1 // 0)
    assert writer.ask(lambda: "goes on", DEADLINE) == "goes on"
    assert isinstance(writer.error, ZeroDivisionError)


def test_where_no_thread_can_be_started_the_caller_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    writer = DiskWriter()
    assert writer.ask(lambda: "done", 0.0) == "done"
    assert writer.finish(0.0)


def test_a_disk_that_is_given_up_holds_nobody_up_again(disk: Disk) -> None:
    given_up: list[str] = []
    backlog = Backlog(
        Clock(), most=10, patience=0.3, linger=0.0, give_up=lambda: given_up.append("once")
    )
    backlog.submit(disk.write, 5)
    assert disk.reached.wait(DEADLINE)
    backlog.make_room()  # there is some
    assert not backlog.settle(0.01)
    assert not backlog.settle(DEADLINE), (
        "who has waited in vain does not wait again before it moves"
    )
    backlog.submit(lambda: given_up.append("never"), 6)
    backlog.make_room()
    assert (given_up, backlog.given_up, backlog.finish(DEADLINE)) == (["once"], True, True)
    backlog.submit(lambda: given_up.append("never"))
    backlog.close()
    disk.answers.set()
    assert DiskWriter.finish(backlog, DEADLINE)
    assert given_up == ["once"]


def test_time_in_which_this_process_was_stopped_is_not_the_disks(disk: Disk) -> None:
    """After a minute of Ctrl-Z the first look found no answer for a minute, though the thread that
    writes had been stopped, too.
    """
    clock = ManualClock()
    backlog = Backlog(clock, most=10, patience=5.0, linger=0.0, give_up=lambda: None)
    backlog.submit(disk.write)
    assert disk.reached.wait(DEADLINE)
    clock.advance(60.0)

    def go_on() -> None:
        clock.advance(60.0)
        disk.answers.set()

    later = threading.Timer(0.05, go_on)
    later.start()
    assert backlog.finish(1000.0)
    assert not backlog.given_up
    later.join()


def test_a_slow_disk_that_moves_is_not_given_up() -> None:
    clock, done = ManualClock(), list[int]()
    backlog = Backlog(clock, most=0, patience=5.0, linger=0.0, give_up=lambda: done.append(-1))

    def write(i: int) -> None:
        clock.advance(4.0)
        done.append(i)

    for i in range(10):
        backlog.submit(lambda i=i: write(i), 1)  # type: ignore[misc]
    backlog.make_room()
    assert backlog.finish(DEADLINE)
    assert done == list(range(10))
