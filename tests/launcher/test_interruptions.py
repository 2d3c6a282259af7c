"""A signal handler of the program's raises while a hook tells something: the program gets that, and
the agent the message, once.
"""

from __future__ import annotations

import gc
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rallypoint.launcher import exception_capture, interruptions, protocol
from rallypoint.launcher.protocol import AtPhase, Caught, Imported, Packet
from rallypoint.launcher.worker.worker_hooks import Hooks

from ..real.job import run_job

pytestmark = pytest.mark.usefixtures("torch_in_parts")


class WorkerDied(Exception):
    """What the handler raises."""


def _handler(number: int, frame: FrameType | None) -> None:
    raise WorkerDied


@pytest.fixture
def handled() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR2, _handler)
    yield
    signal.signal(signal.SIGUSR2, before)


@pytest.fixture
def line() -> Iterator[tuple[Hooks, socket.socket]]:
    """A worker's hooks, and the agent's end."""
    theirs, ours = protocol.pair()
    ours.setblocking(False)
    hooks = Hooks(theirs, held="", began=0.0, single=False)
    yield hooks, ours
    hooks.forget()
    ours.close()


def _arrived(sock: socket.socket) -> list[Packet | None]:
    found = []
    while True:
        try:
            found.append(protocol.receive(sock)[0])
        except BlockingIOError:
            return found


def _at_each_step(act: Callable[[], Any], first: str) -> Iterator[tuple[int, bool]]:
    """Calls `act` again and again, with the handler called at its first, second, ... step at which
    the interpreter may call one, until there are no more: (step, whether the handler's exception
    came out). Steps are calls and returns below the function `first`."""
    step = 0
    while True:
        step += 1
        passed = 0
        begun = over = False

        def trace(frame: FrameType, event: str, arg: object, step: int = step) -> Any:
            nonlocal passed, begun, over
            if not begun:
                begun = frame.f_code.co_name == first
            if not begun or over:
                return trace
            if event in ("call", "return") and frame.f_code.co_name != first:
                passed += 1
            if passed == step:
                over = True
                _handler(signal.SIGUSR2, frame)
            return trace

        former, came_out = sys.gettrace(), False
        gc.disable()  # a hook of somebody else's, as hypothesis leaves one, is no step of ours
        sys.settrace(trace)
        try:
            act()
        except WorkerDied:
            came_out = True
        finally:
            sys.settrace(former)
            gc.enable()
        if not over:
            return
        yield step, came_out


def test_what_is_told_arrives_once_wherever_a_handler_raises(
    line: tuple[Hooks, socket.socket], handled: None
) -> None:
    hooks, agent = line
    steps = 0
    for step, came_out in _at_each_step(lambda: hooks.tell(AtPhase("joining")), "whole"):
        assert came_out, f"step {step}: the program did not get what its handler raised"
        assert _arrived(agent) == [AtPhase("joining")], f"step {step}"
        steps = step
    assert steps >= 6  # a call and a return each of the lambda, `_post`, `send`, `_send`, ...


def test_a_message_too_large_for_a_packet_arrives_once(
    line: tuple[Hooks, socket.socket], handled: None
) -> None:
    hooks, agent = line
    large = Imported("x" * protocol.PACKET_BYTES, 1.0)
    for step, came_out in _at_each_step(lambda: hooks.tell(large), "whole"):
        assert came_out, step
        assert _arrived(agent) == [large], step


STEP = """
def step(caught, error):
    try:
        caught(error, "all_reduce")
    except ValueError:
        raise
"""


def test_an_exception_is_told_once_wherever_a_handler_raises(
    line: tuple[Hooks, socket.socket], handled: None, tmp_path: Path
) -> None:
    hooks, agent = line
    failed: list[ValueError] = []
    # A clause that catches it is looked for in the source of each caller, until one has it.
    source, program = tmp_path / "train.py", dict[str, Any]()
    source.write_text(STEP)
    exec(compile(STEP, source, "exec"), program)

    def act() -> None:
        hooks._serial = 0  # told again for each step
        failed.append(ValueError("lost"))
        program["step"](hooks.caught, failed[-1])

    steps = 0
    for step, came_out in _at_each_step(act, "whole"):
        steps = step
        assert came_out, step
        (told,) = _arrived(agent)
        assert isinstance(told, Caught), step
        assert (told.serial, told.raised.type, told.raised.message, told.raised.call) == (
            1,
            "ValueError",
            "lost",
            "all_reduce",
        ), step
        assert exception_capture.serials(failed[-1]) == [1], step
    assert steps > 50


def test_a_handler_that_raises_oserror_is_no_lost_agent(line: tuple[Hooks, socket.socket]) -> None:
    hooks, agent = line

    class Interrupting:
        """A socket in whose call the signal arrives."""

        armed = True

        def sendmsg(self, *args: Any) -> int:
            if self.armed:
                self.armed = False
                signal.raise_signal(signal.SIGUSR2)
            assert real is not None
            return real.sendmsg(*args)

    def handler(number: int, frame: FrameType | None) -> None:
        raise BrokenPipeError("the program's own")

    real, before = hooks._control, signal.signal(signal.SIGUSR2, handler)
    assert real is not None
    hooks._control = Interrupting()  # type: ignore[assignment]
    try:
        with pytest.raises(BrokenPipeError, match="the program's own"):
            hooks.tell(AtPhase("running"))
    finally:
        hooks._control = real
        signal.signal(signal.SIGUSR2, before)
    assert _arrived(agent) == [AtPhase("running")]


def test_who_raised_it_is_seen() -> None:
    class Handler:
        def __call__(self, number: int, frame: FrameType | None) -> None:
            raise WorkerDied

        def method(self, number: int, frame: FrameType | None) -> None:
            raise WorkerDied

    for handler in (_handler, Handler(), Handler().method, signal.default_int_handler):
        before = signal.signal(signal.SIGUSR2, handler)
        try:
            with pytest.raises((WorkerDied, KeyboardInterrupt)) as caught:
                signal.raise_signal(signal.SIGUSR2)
            assert interruptions.raised_by_handler(caught.value)
        finally:
            signal.signal(signal.SIGUSR2, before)
    assert not interruptions.raised_by_handler(WorkerDied())


DIES_WHILE_TOLD = """\
import os, signal, sys

died = []

def handler(number, frame):
    died.append(number)
    raise RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed. ")

class BadBatch(Exception):
    def __str__(self):
        if not died:
            os.kill(os.getpid(), signal.SIGCHLD)
        return "batch 7"

signal.signal(signal.SIGCHLD, handler)
raise BadBatch
"""


@pytest.mark.usefixtures("without_torch")
def test_a_handler_that_raises_while_the_end_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DIES_WHILE_TOLD)
    result = run_job(["-n", "2", str(tmp_path / "train.py")], state=tmp_path)
    assert (result.rc, result.codes) == (1, ["rank-raised"]), result.everything
    told = re.match(
        r"error\[rank-raised\]: (?:both ranks|rank (\d)) raised BadBatch: batch 7\n", result.report
    )
    assert told, result.everything
    log = (result.run_dir / f"rank{told[1] or 0}.log").read_text()
    assert "BadBatch: batch 7" in log, log
    assert "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed." in log, log
