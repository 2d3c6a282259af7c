"""Threads of ours: no signal is theirs, and whoever starts one keeps its own."""

from __future__ import annotations

import os
import signal
from types import FrameType

import pytest

from rallypoint.host import threads


def mask() -> set[int]:
    return {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())}


def test_no_signal_is_delivered_to_a_thread_of_ours() -> None:
    seen: list[tuple[set[int], bool]] = []
    before = mask()
    threads.start(lambda: seen.append((mask(), threads.is_ours())), "test").join()
    blockable = {*signal.valid_signals()} - {signal.SIGKILL, signal.SIGSTOP}
    assert [(blockable <= blocked, ours) for blocked, ours in seen] == [(True, True)]
    assert (mask(), threads.is_ours()) == (before, False)


def test_a_handler_that_raises_while_a_thread_starts_leaves_the_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python runs a handler when a call has returned: here the call that blocks all signals, before
    it was known what to put back."""
    before, block = mask(), signal.pthread_sigmask

    def interrupted(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def at_once(how: int, numbers: set[int]) -> object:
        result = block(how, numbers)
        if how == signal.SIG_BLOCK and numbers:
            interrupted(signal.SIGINT, None)
        return result

    monkeypatch.setattr(signal, "pthread_sigmask", at_once)
    with pytest.raises(KeyboardInterrupt):
        threads.start(os.getpid, "test")
    monkeypatch.undo()
    assert mask() == before
