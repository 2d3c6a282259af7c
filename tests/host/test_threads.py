"""Threads of ours: no signal is theirs, and whoever starts one keeps its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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


SLOW_TO_BEGIN = """
import atexit, threading, time
atexit.register(lambda: print("before the end", started.ident is not None))  # registered first: runs last
from rallypoint.host import threads
start = threading._start_new_thread
coming = threading.Event()

def slow(function, arguments):
    coming.set()
    time.sleep(0.3)  # a machine that is busy
    return start(function, arguments)

def start_slowly():
    threading._start_new_thread = slow
    started.start()

started = threads.OwnThread(lambda: None, "second")
threads.start(start_slowly, "first")
coming.wait()
"""

STARTED_AT_THE_END = """
import atexit, sys, threading
wanted, answered = threading.Event(), threading.Event()
atexit.register(lambda: (wanted.set(), answered.wait(float(sys.argv[1]))))  # registered first: runs last
from rallypoint.host import threads

def start():
    wanted.wait()
    try:
        threads.start(lambda: None, "second")
    except RuntimeError as error:
        print(error)
    answered.set()

if "theirs" in sys.argv:
    threading.Thread(target=start, daemon=True).start()
else:
    threads.start(start, "first")
"""


def output_of(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_a_thread_that_another_one_starts_has_begun_when_the_interpreter_ends() -> None:
    assert output_of(SLOW_TO_BEGIN) == "before the end True\n"


def test_no_thread_is_started_by_another_one_while_the_interpreter_ends() -> None:
    assert output_of(STARTED_AT_THE_END, "60") == "the interpreter ends\n"


def test_a_daemon_thread_of_the_program_stays_at_the_end_and_says_nothing() -> None:
    """Its traceback, written while the interpreter closed stderr, ended the process by SIGABRT."""
    assert (
        output_of(STARTED_AT_THE_END.replace("except RuntimeError", "except ()"), "0.3", "theirs")
        == ""
    )
