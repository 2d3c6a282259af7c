"""A server that is frozen, cut off, killed or stopped: every call ends, in time, and says what is
known about its request.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

import rallypoint
from rallypoint.clock import Clock
from rallypoint.errors import SessionLost, StoreClosed, StoreTimeout, StoreUnreachable
from rallypoint.store.server.server import Server
from rallypoint.testing import ChaosProxy

from .live import Thread, transport, until
from .processes import SECRET, ServerProcess
from .relay import Relay

SHORT = 1.0
"""Seconds, of a call that is to use them all up."""

LATE = 5.0
"""Seconds that such a call may end later than it should, on a busy machine."""

PLENTY = 60.0
"""Seconds, of a call that is to end long before."""

SOON = 20.0
"""What it may take then."""

BIG = bytes(50_000_000)

MORE = BIG[:16_000_000]
"""More than the buffers of two sockets take, and what a busy machine moves within such a call."""

TRANSPORTS = ("tcp", "unix")


@pytest.fixture(scope="module")
def process() -> Iterator[ServerProcess]:
    """One for all tests that leave it as it was."""
    with ServerProcess() as made:
        yield made


@pytest.fixture(autouse=True)
def _thawed(process: ServerProcess) -> Iterator[None]:
    yield
    process.go_on()


def connect(server: ServerProcess, by: str, **options: Any) -> rallypoint.Store:
    options = {"timeout": SHORT, "same_host": by == "unix", **options}
    store = rallypoint.connect(server.address, secret=SECRET, **options)
    assert transport(store) == by
    return store


class Call(NamedTuple):
    does: Callable[[rallypoint.Store], object]
    outcome: str | dict[str, str] = "did not happen"


CALLS = {
    "get": Call(lambda store: store["big"]),
    "get of 50 MB": Call(lambda store: store.get("big")),
    "get_many": Call(lambda store: store.get_many(["n"] * 200)),
    "keys": Call(lambda store: store.keys()),
    "wait": Call(lambda store: store.wait("nobody sets this", SHORT)),
    "set": Call(lambda store: store.set("k", 1), "unknown"),
    "add": Call(lambda store: store.add("n"), "unknown"),
    "pop": Call(lambda store: store.queue("queue").get(SHORT), "unknown"),
    "lock": Call(lambda store: store.lock("lock").acquire(timeout=SHORT), "unknown"),
    "set_many": Call(lambda store: store.set_many({f"many/{n}": n for n in range(200)}), "unknown"),
    # What was not sent to its end does nothing; shared memory was handed over before the server
    # looked.
    "set of 16 MB": Call(
        lambda store: store.set("new", MORE), {"tcp": "did not happen", "unix": "unknown"}
    ),
}


def timed_out(does: Callable[[], object], seconds: float = SHORT) -> StoreTimeout:
    clock = Clock()
    with pytest.raises(StoreTimeout) as caught:
        does()
    took = clock.elapsed()
    assert seconds <= took < seconds + LATE
    assert isinstance(caught.value, TimeoutError)
    return caught.value


def ended(call: Thread) -> BaseException:
    """The exception of a call in another thread."""
    with pytest.raises(rallypoint.RallypointError) as caught:
        call.result()
    return caught.value


# --- frozen ---


@pytest.mark.parametrize("by", TRANSPORTS)
@pytest.mark.parametrize("name", CALLS)
def test_a_frozen_server(process: ServerProcess, name: str, by: str) -> None:
    does, outcome = CALLS[name]
    with connect(process, by, ttl=30.0) as store, connect(process, "unix", timeout=PLENTY) as other:
        if name in ("get", "get of 50 MB"):
            other["big"] = BIG
        before = other.add("n", 0)
        process.stop()
        error = timed_out(lambda: does(store))
        process.go_on()
        assert error.code == "store-timeout"
        assert error.outcome == (outcome if isinstance(outcome, str) else outcome[by])
        asked = {
            "get": 'reading "big"',
            "wait": 'waiting for "nobody sets this"',
            "set_many": 'writing "many/',
            "lock": 'acquiring the lock "lock"',
        }
        assert str(error).startswith(asked.get(name, ""))
        assert f" got no answer from the store at {process.address} within " in str(error)
        # What came too late is not taken for the answer to something else, and what nobody got was
        # taken back.
        assert [help for _, help in error.help] == (
            [f"kill -CONT {process.pid}"] if by == "unix" else []
        ), "TCP has no pid"
        assert (f"the server (pid {process.pid}) is stopped (state T)" in error.why) == (
            by == "unix"
        )
        sessions = store.statistics()["sessions"]
        assert store.wait("n", PLENTY) in ((before, before + 1) if name == "add" else (before,))
        assert sessions == 1
        if name == "pop":
            other.queue("queue").put("x")
            assert other.queue("queue").get(PLENTY) == "x"
        if name == "lock":
            with other.lock("lock", timeout=PLENTY):
                pass
        if name == "set of 16 MB" and by == "tcp":
            assert "new" not in other
        other.delete("new")


@pytest.mark.parametrize("by", TRANSPORTS)
def test_connecting_to_a_frozen_server(process: ServerProcess, by: str) -> None:
    process.stop()
    clock = Clock()
    with pytest.raises(StoreUnreachable) as caught:
        rallypoint.connect(
            process.address if by == "tcp" else process.local, secret=SECRET, timeout=SHORT
        )
    assert SHORT <= clock.elapsed() < SHORT + LATE
    assert caught.value.code == "store-silent"
    assert caught.value.why[0] == f"the server (pid {process.pid}) is stopped (state T)"
    assert caught.value.help == (("let it go on", f"kill -CONT {process.pid}"),)
    process.go_on()
    with connect(process, by, timeout=PLENTY) as store:
        store["k"] = 1


def test_a_frozen_server_is_named_also_when_its_connection_was_given_up(
    process: ServerProcess,
) -> None:
    with connect(process, "unix", ttl=1.0, timeout=1.5) as store:
        process.stop()
        for call in (
            lambda: store.wait("nobody sets this", 1.5),
            lambda: store.add("n"),
            lambda: store.add("n"),
        ):
            with pytest.raises((StoreTimeout, SessionLost)) as caught:
                call()
            assert f"the server (pid {process.pid}) is stopped (state T)" in caught.value.why
            assert caught.value.help == (("let it go on", f"kill -CONT {process.pid}"),)
        process.go_on()


@pytest.mark.parametrize("by", TRANSPORTS)
def test_a_server_that_is_frozen_for_less_than_the_lease(process: ServerProcess, by: str) -> None:
    with (
        connect(process, by, timeout=PLENTY, ttl=30.0) as store,
        connect(process, by) as impatient,
    ):
        for key in ("sum", "big", "late"):
            store.delete(key)
        held = store.lock("held")
        assert held.acquire_nowait()
        waiting = Thread(store.wait, "late", PLENTY)
        adding = [Thread(lambda: [store.add("sum") for _ in range(300)]) for _ in range(4)]
        until(lambda: store.add("sum", 0) > 50)
        process.stop()
        sending = Thread(store.set, "big", BIG)
        timed_out(lambda: impatient.get("sum"))
        assert sending.is_alive()
        process.go_on()
        sums = [number for each in adding for number in each.result()]
        assert sorted(sums) == list(range(1, 1201))
        sending.result()
        assert store["big"] == BIG
        assert waiting.is_alive()
        impatient.wait("big", PLENTY)  # it is connected, too
        impatient["late"] = "came"
        assert waiting.result() == "came"
        held.release()  # the session went on, too
        assert (store.statistics()["sessions"], store.statistics()["reconnects"]) == (1, 0)


_KEEPS_A_KEY = """
import sys, rallypoint
store = rallypoint.connect(sys.argv[1], secret=sys.argv[2], ttl=1.0)
store.set("paused", 1, ephemeral=True)
print("ready", flush=True)
sys.stdin.readline()
print(store.get("paused"))
"""


def test_a_pause_of_the_server_and_its_clients_is_nobodys_silence(process: ServerProcess) -> None:
    """A container that was paused for longer than the ttl had its job end: session-lost."""
    command = [sys.executable, "-c", _KEEPS_A_KEY, process.local, SECRET.decode()]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "ready\n"
        client.send_signal(signal.SIGSTOP)
        process.stop()
        time.sleep(3.0)
        process.go_on()
        client.send_signal(signal.SIGCONT)
        assert client.communicate("go on\n", PLENTY)[0] == "1\n"


def test_other_threads_of_a_frozen_server_have_deadlines_of_their_own(
    process: ServerProcess,
) -> None:
    with connect(process, "tcp", ttl=30.0) as store:
        process.stop()
        clock = Clock()

        def waits(seconds: float) -> tuple[str, float]:
            with pytest.raises(StoreTimeout) as caught:
                store.wait("nobody sets this", seconds)
            return caught.value.code, clock.elapsed() - seconds

        threads = [Thread(waits, seconds) for seconds in (0.2, 1.2, 0.4, 1.0, 0.6, 0.8)]
        found = [thread.result() for thread in threads]
    assert {code for code, _ in found} == {"store-timeout"}
    assert all(0.0 <= late < LATE for _, late in found), found


# --- cut off ---


@pytest.mark.parametrize(
    "name", ["get", "get_many", "wait", "set", "add", "pop", "set_many", "set of 16 MB"]
)
def test_a_black_hole(process: ServerProcess, name: str) -> None:
    does, _ = CALLS[name]
    with ChaosProxy(process.address) as proxy, connect(process, "unix", timeout=PLENTY) as other:
        with rallypoint.connect(
            proxy.address, secret=SECRET, timeout=SHORT, ttl=30.0, same_host=False
        ) as store:
            other.delete("n")
            with proxy.black_hole():
                error = timed_out(lambda: does(store))
                assert error.code == "store-timeout"
                # The proxy took all of it, so that this side cannot know.
                assert error.outcome == (
                    "did not happen" if name in ("get", "get_many", "wait") else "unknown"
                )
            other["over"] = True
            assert store.wait("over", PLENTY)
            assert store.add("n") == 1
            # The call gave up its own connection at its deadline: no connection was lost.
            assert store.statistics()["sessions"] == 1
        assert "new" not in other


def test_a_black_hole_while_a_large_value_comes(process: ServerProcess) -> None:
    with ChaosProxy(process.address) as proxy, connect(process, "unix", timeout=PLENTY) as other:
        other["big"] = BIG
        with rallypoint.connect(
            proxy.address, secret=SECRET, timeout=SHORT, ttl=30.0, same_host=False
        ) as store:
            hole = proxy.after_bytes(20_000_000, of="client").black_hole()
            clock = Clock()
            with pytest.raises(StoreTimeout) as caught:
                store.get("big")
            assert hole.times == 1
            assert (caught.value.code, caught.value.outcome) == ("store-timeout", "did not happen")
            assert (
                SHORT <= clock.elapsed() < SHORT + LATE + SOON
            )  # what came before the hole took its time
            hole.heal()
            assert store.wait("big", PLENTY) == BIG


def test_a_large_value_that_comes_slowly_may_take_longer_than_the_timeout(
    process: ServerProcess,
) -> None:
    value = bytes(3_000_000)
    with (
        Relay(process.address, 50_000, 0.05) as relay,
        connect(process, "unix", timeout=PLENTY) as other,
    ):
        other["slow"] = value
        with rallypoint.connect(
            relay.address, secret=SECRET, timeout=SHORT, ttl=30.0, same_host=False
        ) as store:
            clock = Clock()
            assert store["slow"] == value
            assert clock.elapsed() > 2 * SHORT
        del other["slow"]


def test_a_large_value_may_have_years(process: ServerProcess) -> None:
    """`poll` refused them where the value did not fit into the socket at once."""
    with connect(process, "tcp", timeout=1e9) as store:
        store["patient"] = MORE
        assert store.pop("patient") == MORE


# --- killed ---


@pytest.mark.parametrize("by", TRANSPORTS)
def test_a_killed_server(by: str) -> None:
    with ServerProcess() as server:
        store, forever, idle = (connect(server, by, ttl=ttl) for ttl in (30.0, 1.5, 30.0))
        monitor = connect(server, by, timeout=PLENTY)
        patient = connect(
            server, by, ttl=30.0, timeout=4 * SHORT
        )  # several attempts: a busy kernel may be late to refuse one
        waiting = Thread(forever.wait, "nobody sets this", None)
        popping = Thread(lambda: forever.queue("queue").get())
        until(lambda: monitor.status()["waiting"] == 2)
        clock = Clock()
        server.kill()
        error = timed_out(lambda: patient.add("n"), 4 * SHORT)
        assert (error.code, error.outcome) == (
            "store-timeout",
            "unknown" if "was sent" in error.why[0] else "did not happen",
        )
        assert any("nothing listens there" in line for line in error.why), error.why
        error = timed_out(lambda: store.get("n"))
        assert (error.code, error.outcome) == ("store-timeout", "did not happen")
        error = timed_out(lambda: idle.wait("k", SHORT))
        assert (error.code, error.outcome) == ("store-timeout", "did not happen")
        # Nobody can come back to a session whose lease is over.
        for call, outcome in ((waiting, "did not happen"), (popping, "unknown")):
            lost = ended(call)
            assert isinstance(lost, SessionLost), lost
            assert lost.outcome == outcome
        assert 1.5 <= clock.elapsed() < 1.5 + SOON
        for each in (store, forever, idle, monitor, patient):
            each.close()
        with pytest.raises(StoreClosed):
            store.get("n")


# --- stopped in the orderly way ---


def addressed(server: Server, by: str, **options: Any) -> rallypoint.Store:
    store = rallypoint.connect(
        server.address, secret=server.secret, timeout=PLENTY, same_host=by == "unix", **options
    )
    assert transport(store) == by
    return store


@pytest.mark.parametrize("by", TRANSPORTS)
def test_an_orderly_stop_ends_all_that_wait(by: str) -> None:
    with Server() as server:
        store, monitor = addressed(server, by), addressed(server, by)
        calls = [
            Thread(store.wait, "nobody sets this", None),
            Thread(store.wait, "nor this", PLENTY),
            Thread(lambda: store.queue("queue").get()),
            Thread(lambda: next(store.watch(timeout=PLENTY))),
        ]
        until(lambda: monitor.status()["waiting"] == 4)
        server.stop("it is evening")
        for call in calls:
            closed = ended(call)
            assert isinstance(closed, StoreClosed), closed
            assert isinstance(closed, ConnectionError)
            assert (closed.code, closed.outcome) == ("store-closed", "did not happen")
            assert str(closed).endswith("was closed: it is evening")
        store.close()
        monitor.close()


IDLE = {
    "get": lambda store: store.get("k"),
    "add": lambda store: store.add("k"),
    "set": lambda store: store.set("k", 1),
    "set of 5 MB": lambda store: store.set("k", BIG[:5_000_000]),
    "set_many": lambda store: store.set_many({"a": 1, "b": 2}),
    "wait": lambda store: store.wait("k", PLENTY),
}


@pytest.mark.parametrize("by", TRANSPORTS)
@pytest.mark.parametrize("name", IDLE)
def test_an_orderly_stop_is_what_an_idle_client_hears_with_its_next_call(
    name: str, by: str
) -> None:
    """The server's last words wait unread; over a Unix socket sending fails at once."""
    with Server() as server:
        store = addressed(server, by)
        server.stop("it is evening")
        for _ in range(2):
            clock = Clock()
            with pytest.raises(StoreClosed, match="was closed: it is evening") as caught:
                IDLE[name](store)
            assert (caught.value.code, caught.value.outcome) == ("store-closed", "did not happen")
            assert clock.elapsed() < SOON
        store.close()


@pytest.mark.parametrize("by", TRANSPORTS)
def test_sigterm_is_an_orderly_stop(by: str) -> None:
    with ServerProcess() as server:
        store, idle = connect(server, by, timeout=PLENTY), connect(server, by, timeout=PLENTY)
        waiting = Thread(store.wait, "nobody sets this", None)
        until(lambda: idle.status()["waiting"] == 1)
        assert server.end() == 0
        assert isinstance(ended(waiting), StoreClosed)
        with pytest.raises(StoreClosed, match="somebody asked for it"):
            idle.add("n")
        store.close()
        idle.close()


@pytest.mark.parametrize("by", TRANSPORTS)
def test_a_store_that_is_closed_while_other_threads_use_it(by: str) -> None:
    with Server() as server:
        monitor = addressed(server, by)
        for _ in range(40):
            store = addressed(server, by, ttl=600.0)
            calls = [Thread(store.wait, key, None) for key in ("a", "b")]
            calls.append(Thread(lambda store: [store.add("n") for _ in range(1_000_000)], store))
            until(lambda: monitor.status()["waiting"] == 2)
            store.close()
            for call in calls:
                closed = ended(call)
                assert isinstance(closed, StoreClosed), closed
                assert str(closed) == "this store object was closed"
            until(
                lambda: monitor.status()["sessions"] == 1
            )  # said, and not only found out after the ttl
        monitor.close()
