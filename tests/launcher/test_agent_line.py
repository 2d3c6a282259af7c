"""What a rank tells when it begins to wait for others: the exception that the program has in
hand.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from rallypoint.launcher import protocol
from rallypoint.launcher.protocol import Caught, Handles
from rallypoint.launcher.worker.agent_line import CAUGHT_MOST, AgentLine


class Line:
    """The line of a rank, and what has come out of it."""

    def __init__(self) -> None:
        self.agent, self._worker = protocol.pair()
        self.rank = AgentLine(self._worker)

    def came(self) -> list[str]:
        """The messages of what was told since the last call, "" for an end."""
        told: list[str] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                message, _ = protocol.receive(self.agent, flags=socket.MSG_DONTWAIT)
                assert isinstance(message, Caught | Handles)
                told.append(message.raised.message if message.raised is not None else "")
        return told

    def close(self) -> None:
        self.agent.close()
        self._worker.close()


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()


def test_what_is_in_hand_is_told_once_and_so_is_its_end(line: Line) -> None:
    line.rank.waits()
    with contextlib.suppress(ValueError):
        try:
            raise ValueError("bad batch")
        finally:
            line.rank.waits()
            line.rank.waits()
    assert line.came() == ["bad batch"]
    line.rank.waits()
    line.rank.waits()
    assert line.came() == [""]


def test_what_is_in_hand_when_the_group_is_closed_is_told(line: Line) -> None:
    """Closing may take until the others have come, too."""
    with contextlib.suppress(ValueError):
        try:
            raise ValueError("bad batch")
        finally:
            line.rank.clearing_up(whole=True)
    assert line.came() == ["bad batch"]


def test_an_exception_that_is_false_is_told(line: Line) -> None:
    class Problems(Exception):
        def __len__(self) -> int:
            return 0

    with contextlib.suppress(Problems):
        try:
            raise Problems("bad batch")
        finally:
            line.rank.waits()
    assert line.came() == ["bad batch"]


def test_what_is_in_hand_again_is_told_again(line: Line) -> None:
    with contextlib.suppress(ValueError):
        try:
            raise ValueError("bad batch")
        finally:
            line.rank.waits()
            try:
                raise OSError("disk is full") from None
            except OSError:
                line.rank.waits()
            line.rank.waits()
    assert line.came() == ["bad batch", "disk is full", "bad batch"]


def test_another_way_that_was_taken_is_not_told(line: Line) -> None:
    """A program may train in its `except ImportError:`."""
    try:
        raise ModuleNotFoundError("No module named 'flash_attn'")
    except ImportError:
        line.rank.waits()
    assert line.came() == []


def test_a_thread_that_waits_says_nothing_of_the_main_thread(line: Line) -> None:
    def turn() -> None:
        thread = threading.Thread(target=line.rank.waits)
        thread.start()
        thread.join()

    with contextlib.suppress(ValueError):
        try:
            raise ValueError("bad batch")
        finally:
            line.rank.waits()
            turn()
    assert line.came() == ["bad batch"]


def test_a_program_that_tries_again_for_ever_is_told_of_no_longer(line: Line) -> None:
    told: list[str] = []
    for turn in range(CAUGHT_MOST + 3):
        try:
            raise ValueError(f"turn {turn}")
        except ValueError:
            line.rank.waits()
        told += line.came()
    assert told[:2] == ["turn 0", "turn 1"]
    assert told[-4:] == [f"turn {CAUGHT_MOST - 1}", "", "", ""]
