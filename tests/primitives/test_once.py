"""`once` among real clients: one computes, nobody hangs, and everybody learns the same."""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rallypoint
from rallypoint.errors import (
    LimitExceeded,
    OnceFailed,
    SessionLost,
    StoreClosed,
    StoreTimeout,
    UsageError,
    ValueUnsupported,
    WouldDeadlock,
)
from rallypoint.primitives import once as module
from rallypoint.primitives.store import Store
from rallypoint.store.server.server import Server
from rallypoint.testing import ChaosProxy
from rallypoint.wire.messages import INLINE_BYTES, Resolve

from ..store.live import DEADLINE, Thread, running, until
from ..store.processes import ServerProcess
from ..store.situations import Interruption, Storm, alarm, in_child

LARGE = b"x" * 3_000_000
SHORT, LONG = 1.0, 3600.0


@pytest.fixture
def server() -> Iterator[Server]:
    """A small one: it takes values of up to 64 MiB, and no more in all."""
    with rallypoint.serve(max_bytes="64MiB") as made:
        yield made


@pytest.fixture
def store(connect: Callable[[], Store]) -> Store:
    return connect()


@pytest.fixture
def other(connect: Callable[[], Store]) -> Store:
    return connect()


class Work:
    """A function that says when it runs, and returns or raises when it is told to."""

    def __init__(self, does: Callable[[], Any]) -> None:
        self._does = does
        self._go = threading.Event()
        self.began = threading.Event()
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        self.began.set()
        assert self._go.wait(DEADLINE)
        return self._does()

    def end(self) -> None:
        self._go.set()


def raising(error: BaseException) -> Callable[[], Any]:
    def does() -> Any:
        raise error

    return does


def begun(store: Store, does: Callable[[], Any], **named: Any) -> tuple[Work, Thread]:
    """Somebody computes "data"."""
    work = Work(does)
    thread = Thread(lambda: store.once("data", work, **named))
    assert work.began.wait(DEADLINE)
    return work, thread


def waiting(store: Store, count: int = 1, **named: Any) -> list[Thread]:
    """And others wait for it, one after the other; they would compute "another"."""
    threads = []
    for number in range(count):
        threads.append(Thread(lambda: store.once("data", lambda: "another", **named)))
        until(lambda: store.status()["waiting"] == number + 1)  # noqa: B023
    return threads


def never() -> Any:
    pytest.fail("it was computed before")


# --- one value ---


@pytest.mark.parametrize(
    "value",
    [None, False, 0, {"a": (1, [2.5])}, LARGE],
    ids=["None", "False", "0", "nested", "large"],
)
def test_the_first_computes_and_all_get_its_value(store: Store, other: Store, value: Any) -> None:
    work, first = begun(store, lambda: value)
    rest = waiting(other, 3)
    work.end()
    for thread in (first, *rest):
        assert thread.result() == value
    assert work.calls == 1
    assert (store.once("data", never), other.once("data", never)) == (value, value), (
        "whoever comes later"
    )
    assert store.get("data", "no key") == "no key", "names of their own"


@pytest.mark.torch
def test_a_large_tensor(store: Store, other: Store) -> None:
    import torch

    tensor = torch.arange(1_000_000, dtype=torch.float32)
    assert store.once("weights", lambda: tensor) is tensor
    found = other.once("weights", never)
    assert found.dtype == torch.float32
    found += 1
    assert torch.equal(store.once("weights", never), tensor), "a copy of its own"


def test_threads_of_one_process(store: Store) -> None:
    work, first = begun(store, lambda: 7)
    rest = waiting(store, 3)
    work.end()
    assert [thread.result() for thread in (first, *rest)] == [7] * 4
    assert work.calls == 1


PROCESS = """
import os, sys
import rallypoint
store = rallypoint.connect(sys.argv[1], secret=bytes.fromhex(sys.argv[2]))
def compute():
    store.add("computed")
    return os.getpid()
store.add("there")
store.wait("go")
print(store.once("data", compute), flush=True)
"""


def test_one_of_eight_processes_computes(server: Server) -> None:
    with rallypoint.connect(server.address, secret=server.secret) as store:
        processes = [running(PROCESS, server.address, server.secret.hex()) for _ in range(8)]
        entered = [process.__enter__() for process in processes]
        try:
            until(lambda: store.get("there") == 8)
            store["go"] = True
            said = {process.communicate(timeout=DEADLINE)[0] for process in entered}
        finally:
            for process in processes:
                process.__exit__(None, None, None)
        assert len(said) == 1
        assert int(said.pop()) in {process.pid for process in entered}
        assert store["computed"] == 1


# --- failures ---


def test_an_exception_reaches_all_who_wait(store: Store, other: Store) -> None:
    error = FileNotFoundError(2, "No such file or directory", "data.zip")
    work, first = begun(store, raising(error))
    rest = waiting(other, 2)
    work.end()
    with pytest.raises(FileNotFoundError) as own:
        first.result()
    assert own.value is error
    for thread in rest:
        with pytest.raises(OnceFailed) as caught:
            thread.result()
        failed = caught.value
        assert (
            str(failed)
            == f"once(\"data\") failed in {store.identity}: FileNotFoundError: [Errno 2] No such file or directory: 'data.zip'"
        )
        assert failed.code == "once-failed"
        assert failed.remote_type == "FileNotFoundError"
        assert failed.remote_traceback.startswith("Traceback (most recent call last):\n")
        assert "in does\n" in failed.remote_traceback
        assert "once.py" not in failed.remote_traceback.split("test_once.py")[0], (
            "it begins with the user's own function"
        )
        assert failed.why == ("a failure is not remembered: whoever asks now tries again",)
        assert f"    | {failed.remote_traceback.splitlines()[-1]}" in "".join(failed.__notes__)
    assert other.once("data", lambda: 7) == 7
    assert store.once("data", never) == 7


def test_with_retry_the_next_one_tries(store: Store, other: Store) -> None:
    """Nobody is told but the one whose function it was."""
    work, first = begun(store, raising(ZeroDivisionError()), retry=True)
    rest = waiting(other, 2)
    work.end()
    with pytest.raises(ZeroDivisionError):
        first.result()
    assert [thread.result() for thread in rest] == ["another"] * 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_one_process_is_no_failure_for_the_others(
    store: Store, other: Store, error: type[BaseException]
) -> None:
    work, first = begun(store, raising(error()))
    rest = waiting(other, 2)
    work.end()
    with pytest.raises(error):
        first.result()
    assert [thread.result() for thread in rest] == ["another"] * 2


def test_a_value_that_cannot_be_stored_is_a_failure(store: Store, other: Store) -> None:
    work, first = begun(store, lambda: {"cfg": [print]})
    [rest] = waiting(other)
    work.end()
    with pytest.raises(ValueUnsupported, match=r'^once\("data"\): value\["cfg"\]\[0\]: '):
        first.result()
    with pytest.raises(
        OnceFailed, match=r'ValueUnsupported: once\("data"\): value\["cfg"\]\[0\]: a builtin'
    ) as caught:
        rest.result()
    assert caught.value.remote_type == "rallypoint.errors.ValueUnsupported"


@pytest.mark.parametrize("size", [60 << 20, 100 << 20], ids=["store-full", "value-too-large"])
def test_a_value_for_which_there_is_no_room_is_a_failure(
    store: Store, other: Store, size: int
) -> None:
    store["full"] = bytes(10 << 20)
    work, first = begun(store, lambda: bytes(size))
    [rest] = waiting(other)
    work.end()
    with pytest.raises(LimitExceeded):
        first.result()
    with pytest.raises(OnceFailed, match="LimitExceeded") as caught:
        rest.result()
    assert caught.value.remote_type == "rallypoint.errors.LimitExceeded"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x" * 10_000_000), ValueError("\N{SNOWMAN}" * 100_000), ValueError("\udcff" * 100_000), Unspeakable(), ValueError(),
        OSError("a\nb"),
    ],
    ids=["long", "wide", "surrogates", "unspeakable", "silent", "lines"],
)  # fmt: skip
def test_any_exception_can_be_passed_on(store: Store, other: Store, error: Exception) -> None:
    work, first = begun(store, raising(error))
    [rest] = waiting(other)
    work.end()
    with pytest.raises(type(error)):
        first.result()
    with pytest.raises(OnceFailed) as caught:
        rest.result()
    assert type(error).__qualname__ in caught.value.remote_type
    assert type(error).__qualname__ in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 3000
    assert len(caught.value.remote_traceback.encode()) < INLINE_BYTES
    assert "Traceback" in caught.value.remote_traceback


def test_a_shortened_text_says_so() -> None:
    assert module._shortened("abc", 4) == "abc"
    assert (
        module._shortened("a" * 100 + "b" * 100, 8) == "aa\n... 192 characters left out ...\nbbbbbb"
    )


# --- waiting ---


def test_a_timeout_names_who_computes(store: Store, other: Store) -> None:
    work, first = begun(store, lambda: 7)
    with pytest.raises(StoreTimeout) as caught:
        other.once("data", never, timeout=0.1)
    assert str(caught.value).startswith(
        f'once("data") has no value yet after 0.1 s: {store.identity} computes it, since '
    )
    assert caught.value.code == "wait-timeout"
    with pytest.raises(TimeoutError):
        other.once("data", never, timeout=0)
    assert store.status()["waiting"] == 0
    work.end()
    assert first.result() == 7
    assert other.once("data", never, timeout=0) == 7


def test_who_computes_has_no_timeout(store: Store) -> None:
    work, first = begun(store, lambda: 7, timeout=0)
    work.end()
    assert first.result() == 7


def test_called_by_its_own_function(store: Store, other: Store) -> None:
    def inner() -> Any:
        with pytest.raises(WouldDeadlock) as caught:
            store.once("data", never)
        assert isinstance(caught.value, UsageError)
        assert str(caught.value).startswith(
            'once("data") was called by the function that computes "data"'
        )
        with pytest.raises(WouldDeadlock):
            other.once("data", never)  # by another client of the same store
        return store.once("other data", lambda: 6) + 1

    assert store.once("data", inner) == 7
    assert store.once("data", never) == 7
    assert module._computing == set()


def test_wrong_calls(store: Store) -> None:
    with pytest.raises(TypeError, match="a key is a str"):
        store.once(7, never)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="takes a function that is called without arguments, not an int"
    ):
        store.once("data", 7)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="timeout=-1"):
        store.once("data", never, timeout=-1)
    assert store.once("data", lambda: 7, timeout=0) == 7, "nothing was claimed"


# --- deaths ---

COMPUTING = """
import sys
import rallypoint
store = rallypoint.connect(sys.argv[1], secret=bytes.fromhex(sys.argv[2]), ttl=float(sys.argv[3]))
def compute():
    print("computing", flush=True)
    sys.stdin.readline()
    return "of the dead"
store.once("data", compute)
"""


def test_the_next_computes_when_the_first_is_killed(server: Server, other: Store) -> None:
    with running(COMPUTING, server.address, server.secret.hex(), str(SHORT)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "computing\n"
        rest = waiting(other, 2)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert [thread.result() for thread in rest] == ["another"] * 2


def test_who_was_taken_for_dead_gets_the_value_of_the_other(server: Server, other: Store) -> None:
    """Both have computed, and there is one value."""
    with (
        ChaosProxy(server.address) as proxy,
        rallypoint.connect(
            proxy.address, secret=server.secret, same_host=False, ttl=SHORT, timeout=DEADLINE
        ) as store,
    ):
        work, first = begun(store, lambda: "late")
        [rest] = waiting(other)
        proxy.refuse()
        proxy.reset()
        assert rest.result() == "another"
        proxy.heal()
        work.end()
        assert first.result() == "another"
        assert work.calls == 1


def test_who_was_taken_for_dead_gives_its_value_when_nobody_else_has(
    server: Server, other: Store
) -> None:
    with (
        ChaosProxy(server.address) as proxy,
        rallypoint.connect(
            proxy.address, secret=server.secret, same_host=False, ttl=SHORT, timeout=DEADLINE
        ) as store,
    ):
        store.set("mine", 1, ephemeral=True)
        work, first = begun(store, lambda: "late")
        proxy.refuse()
        proxy.reset()
        until(lambda: "mine" not in other)
        proxy.heal()
        work.end()
        assert first.result() == "late"
        assert work.calls == 1
        assert other.once("data", never) == "late"


def test_a_lost_session_of_the_function_itself_is_its_failure(server: Server, other: Store) -> None:
    """It used the store; that it was told of the loss does not hide that it failed."""
    error = SessionLost("session-lost", "of another store")
    work, first = begun(other, raising(error))
    [rest] = waiting(other)
    work.end()
    with pytest.raises(SessionLost, match="of another store"):
        first.result()
    with pytest.raises(OnceFailed, match="SessionLost: of another store"):
        rest.result()


def test_the_server_goes(connect: Callable[[], Store], server: Server) -> None:
    store, other = connect(), connect()
    work, first = begun(store, lambda: 7)
    [rest] = waiting(other)
    server.stop()
    with pytest.raises(StoreClosed):
        rest.result()
    work.end()
    with pytest.raises(StoreClosed):
        first.result()


def test_a_frozen_server_lets_the_next_compute_when_it_goes_on() -> None:
    with (
        ServerProcess() as process,
        rallypoint.connect(process.address, secret=process.secret, timeout=2.0, ttl=LONG) as store,
        rallypoint.connect(process.address, secret=process.secret, timeout=DEADLINE) as other,
    ):

        def compute() -> int:
            process.stop()
            return 7

        with pytest.raises(StoreTimeout):
            store.once("data", compute)
        process.go_on()
        assert other.once("data", lambda: 8, timeout=DEADLINE) in (7, 8)


# --- signals ---


def test_ctrl_c_while_it_waits(store: Store, other: Store) -> None:
    work, first = begun(store, lambda: 7)
    with alarm(0.1, _interrupt), pytest.raises(Interruption):
        other.once("data", never)
    until(lambda: store.status()["waiting"] == 0)
    work.end()
    assert first.result() == 7


def _interrupt() -> None:
    raise Interruption


ENOUGH = 300
"""Interruptions: some hit every line of a call."""


@pytest.mark.parametrize("retry", [False, True])
@pytest.mark.parametrize("same_host", [True, False], ids=["near", "far"])
def test_interrupted_anywhere_nobody_is_stuck(
    server: Server, same_host: bool, retry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signal handlers that raise at random moments: whoever asks next computes, or gets the value.
    (What is to be given back, and a second signal kept from being told, the server learns with the
    next sign of life: these come every third of a `ttl`.)"""
    monkeypatch.setattr(logging.getLogger("rallypoint"), "disabled", True)  # see test_queue.py

    def run() -> int:
        with rallypoint.connect(
            server.address, secret=server.secret, same_host=same_host, timeout=DEADLINE, ttl=3.0
        ) as store:
            return storm_of_calls(store)

    def storm_of_calls(store: Store) -> int:
        name = 0
        computed: dict[int, int] = {}
        with Storm(3, raising=0.8, soon=0.0003) as storm:
            while storm.raised < ENOUGH:

                def compute(name: int = name) -> int:
                    computed[name] = name
                    return name

                call = functools.partial(
                    store.once, str(name), compute, timeout=DEADLINE, retry=retry
                )
                storm.strike(call)
                try:
                    assert call() == name
                except OnceFailed:  # the first one had begun to tell, and a thread has told it now
                    assert not retry
                    assert call() == name
                assert computed[name] == name
                name += 1
        assert module._computing == set()
        return storm.raised

    assert in_child(run) >= ENOUGH


def test_a_handler_that_strikes_while_it_is_given_up(
    store: Store, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread sees to it, and to telling what was to be told."""
    real = store.ask
    struck: list[object] = []

    def ask(kind: Any, *fields: Any, **named: Any) -> Any:
        if kind is Resolve and not struck:
            struck.append(fields)
            raise Interruption
        return real(kind, *fields, **named)

    monkeypatch.setattr(store, "ask", ask)
    work, first = begun(store, raising(ZeroDivisionError("by 0")))
    [rest] = waiting(other)
    work.end()
    with pytest.raises(Interruption):
        first.result()
    with pytest.raises(OnceFailed, match="ZeroDivisionError: by 0"):
        rest.result()
