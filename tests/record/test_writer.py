"""A disk that does not answer: who waits for it, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rallypoint.record.writer import Writer

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
    writer, done = Writer(), list[int]()
    for i in range(100):
        writer.submit(lambda i=i: done.append(i))  # type: ignore[misc]
    assert writer.finish(DEADLINE)
    assert done == list(range(100))
    assert writer.ask(lambda: len(done), DEADLINE) == 100
    assert writer.error is None


def test_nobody_waits_longer_than_it_says(disk: Disk) -> None:
    writer, done = Writer(), list[str]()
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
    writer = Writer()
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
    writer = Writer()
    assert writer.ask(lambda: "done", 0.0) == "done"
    assert writer.finish(0.0)
