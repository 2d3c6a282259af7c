"""What the tests of the client share: calls that are interrupted, children that report, descriptors
and threads that are counted.
"""

from __future__ import annotations

import contextlib
import dis
import faulthandler
import functools
import gc
import json
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from queue import Empty
from types import CodeType, FrameType
from typing import Any

import rallypoint
from rallypoint import Store
from rallypoint.clock import Clock

DEADLINE = 60.0
"""Seconds within which what has to happen happens, on a busy machine: never used up by a test that
passes.
"""

LONG = 50.0
"""Seconds, the timeout of calls that are to end long before."""


class Interruption(Exception):
    """What a signal handler raises here; like KeyboardInterrupt, but nothing else does."""


def eventually(
    condition: Callable[[], object], what: Callable[[], str] = lambda: "it did not come true"
) -> None:
    """Return when it has come true; look again and again until then."""
    clock, pause = Clock(), threading.Event()
    while not condition():
        assert clock.elapsed() < DEADLINE / 3, what()
        pause.wait(0.005)


@contextlib.contextmanager
def alarm(seconds: float, handler: Callable[[], object]) -> Iterator[None]:
    """Call the handler once, in the main thread, `seconds` from now."""

    def handle(number: int, frame: FrameType | None) -> None:
        handler()

    former = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)


class Storm:
    """Signals at random moments of a call: the first within `soon` seconds, then every 2 ms. The
    handler calls `handle` with the random numbers, and raises Interruption with the probability
    `raising`.

    To be used in a child: a handler's exception that strikes in a finalizer is printed by Python,
    and pytest minds.
    """

    def __init__(
        self,
        seed: int,
        handle: Callable[[random.Random], object] = lambda chance: None,
        *,
        raising: float = 0.5,
        soon: float = 0.003,
    ) -> None:
        self.chance = random.Random(seed)
        self._soon = soon
        self.on = False
        self.raised = 0
        self._handle = handle
        self._raising = raising

    def _handler(self, number: int, frame: FrameType | None) -> None:
        if self.on:
            self._handle(self.chance)
            if self.on and self.chance.random() < self._raising:
                self.raised += 1
                raise Interruption

    def strike(self, call: Callable[[], object]) -> bool:
        """Call this while signals come; whether it ended by itself."""
        try:
            self.on = True
            signal.setitimer(signal.ITIMER_REAL, 0.00001 + self.chance.random() * self._soon, 0.002)
            call()
            self.on = False
        except Interruption:
            self.on = False
            return False
        finally:
            self.on = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        return True

    def __enter__(self) -> Storm:
        self._former = signal.signal(signal.SIGALRM, self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        self.on = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, self._former)


SOURCE = os.path.dirname(rallypoint.__file__)


@functools.cache
def _handlers_run_at(code: CodeType) -> frozenset[int]:
    """The offsets at which the interpreter runs signal handlers: behind a call, at the begin of a
    function, where a loop goes round."""
    found, before = set(), ""
    for instruction in dis.get_instructions(code):
        if before.startswith(("CALL", "RESUME")) or instruction.opname.startswith("JUMP_BACKWARD"):
            found.add(instruction.offset)
        before = instruction.opname
    return frozenset(found)


def interrupted_at(place: int, call: Callable[[], object], within: str = "") -> tuple[str, bool]:
    """Call this, and raise Interruption where a signal handler could raise it for the `place`-th
    time (from 1 on) in our own code, that of files whose path ends with `within`; return where
    that was, "" when the call has not so many places, and whether the call ended by it: Python
    drops what is raised in a destructor.

    Another part of the program opens files at this moment, which get the numbers of descriptors
    that were just closed: nobody may close them a second time.
    """
    seen, where, ended = 0, "", False
    strangers: list[int] = []
    device = os.stat(os.devnull).st_rdev

    def enter(frame: FrameType, event: str, _: object) -> Any:
        name = frame.f_code.co_filename
        if name.startswith(SOURCE) and name.endswith(within):
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return step
        return None

    def step(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen, where
        if event == "opcode" and not where and frame.f_lasti in _handlers_run_at(frame.f_code):
            seen += 1
            if seen == place:
                where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                strangers.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(4))
                raise Interruption
        return step

    former = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    except Interruption:
        ended = True
    finally:
        sys.settrace(former)
    gc.collect()
    for fd in strangers:
        assert os.fstat(fd).st_rdev == device, where
        os.close(fd)
    return where, ended


def in_child(run: Callable[[], Any]) -> Any:
    """Fork, run it there, and return what it returned; the child's traceback is the failure."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        sys.unraisablehook = lambda unraisable: None
        gc.freeze()  # else gc.collect() writes to all pages of the tests' process, with the GIL
        try:
            watch = threading.Timer(DEADLINE + 10.0, _give_up)
            watch.daemon = True
            watch.start()
            try:
                said = {"returned": run()}
                status = 0
            except BaseException:
                said = {"raised": traceback.format_exc()}
            os.write(writing, json.dumps(said).encode())
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = json.loads(pipe.read() or '{"raised": "it said nothing"}')
    os.waitpid(pid, 0)
    assert "raised" not in said, said["raised"]
    return said["returned"]


def _give_up() -> None:
    faulthandler.dump_traceback()
    os._exit(1)


def descriptors() -> dict[int, str]:
    """The open descriptors of this process, and what they are."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one with which they are listed
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def of_process(pid: int, kind: str) -> list[str]:
    """The open descriptors of another process that are of a kind: "socket:", "/memfd:"."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith(kind):
                found.append(target)
    return found


def our_threads() -> list[str]:
    """Return the names of the threads of this process's clients; a server here has its own."""
    return sorted(
        thread.name
        for thread in threading.enumerate()
        if thread.name in ("rallypoint: keep-alive", "rallypoint: log")
    )


def start(*runs: Callable[[], object]) -> Callable[[], None]:
    """Run each in a thread; call what is returned to wait for them. What one raises is
    raised then.
    """
    raised: list[BaseException] = []

    def keep(run: Callable[[], object]) -> None:
        try:
            run()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=keep, args=(run,), daemon=True) for run in runs]
    for thread in threads:
        thread.start()

    def join() -> None:
        for thread in threads:
            thread.join(DEADLINE)
            assert not thread.is_alive(), "a thread hangs"
        if raised:
            raise raised[0]

    return join


def put(store: Store, queue: str, value: object) -> None:
    """Put a value into a queue."""
    store.queue(queue).put(value)


def take(store: Store, queue: str, timeout: float | None = None) -> Any:
    """Take the first value of a queue; None if there is none in time."""
    try:
        return store.queue(queue).get(timeout)
    except Empty:
        return None
