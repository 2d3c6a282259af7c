"""That the moment for gloo's threads lasts until they have come to rest. What it is good for needs
real groups: tests/real.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
import time
from types import ModuleType

import pytest

from rallypoint.launcher.worker import gloo

PR_SET_NAME = 15


@pytest.fixture(autouse=True)
def _with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", ModuleType("torch.distributed"))


class Named(threading.Thread):
    """A thread that the kernel knows as one of gloo's: it computes without the interpreter's lock,
    then says so, then rests.
    """

    def __init__(self, rounds: int) -> None:
        super().__init__(daemon=True)
        self.begun, self.done, self.end = threading.Event(), threading.Event(), threading.Event()
        self.rounds = rounds

    def run(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"pt_gloo_runloop", 0, 0, 0)
        data = bytes(50_000_000)
        self.begun.set()
        while self.rounds > 0:
            hashlib.sha256(data)
            self.rounds -= 1
        self.done.set()
        self.end.wait()


def test_a_thread_that_runs_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "LONGEST", 60.0)  # a busy machine's four rounds take long
    thread = Named(rounds=4)
    thread.start()
    thread.begun.wait()
    gloo.let_threads_finish()
    assert thread.done.is_set()
    thread.end.set()
    thread.join()


def test_one_that_never_rests_is_waited_for_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gloo, "LONGEST", 0.05)
    thread = Named(rounds=10_000)
    thread.start()
    thread.begun.wait()
    gloo.let_threads_finish()
    assert not thread.done.is_set()
    thread.rounds = 0
    thread.end.set()
    thread.join()


def test_without_such_threads_nobody_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    while gloo._threads():  # the kernel has a thread for a moment longer than `join` waits
        os.sched_yield()

    def slept(seconds: float) -> None:
        raise AssertionError

    monkeypatch.setattr(time, "sleep", slept)
    gloo.let_threads_finish()
