"""Sessions that end, for real: what is told to whom, and what is released when."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import rallypoint
from rallypoint.clock import Clock
from rallypoint.errors import SessionLost, StoreTimeout
from rallypoint.primitives.store import Store
from rallypoint.store.limits import SHORTEST_TTL
from rallypoint.store.server.server import Server, serve
from rallypoint.testing import ChaosProxy

from .live import DEADLINE, Thread, kept_port, output_of, running, until

SHORT = 2.0
"""A ttl that a test can wait for, and three signs of life in which a busy machine manages."""

LONG = 3600.0
"""A ttl that no test waits for: what happens then happens for another reason."""

SERVER = """
import sys, threading, rallypoint
with rallypoint.serve(port=int(sys.argv[1]), secret=sys.argv[2]) as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""

SECRET = "the same in every server"


@pytest.fixture
def server() -> Iterator[Server]:
    with serve() as made:
        yield made


@pytest.fixture
def direct(server: Server) -> Iterator[Store]:
    """A client that nothing happens to."""
    with rallypoint.connect(server.address, secret=server.secret) as store:
        yield store


@pytest.fixture
def proxy(server: Server) -> Iterator[ChaosProxy]:
    with ChaosProxy(server.address) as made:
        yield made


@pytest.fixture
def store(server: Server, proxy: ChaosProxy) -> Iterator[Store]:
    """Through the proxy, with a short lease and patience. It holds the key `mine`."""
    with rallypoint.connect(
        proxy.address, secret=server.secret, same_host=False, ttl=SHORT, timeout=DEADLINE
    ) as store:
        store.set("mine", 1, ephemeral=True)
        yield store
        proxy.heal()


def lost_by(call: Any, *args: Any, **named: Any) -> SessionLost:
    with pytest.raises(SessionLost) as caught:
        call(*args, **named)
    assert caught.value.code == "session-lost"
    assert isinstance(caught.value, ConnectionError)
    return caught.value


def pop(store: Store, seconds: float) -> Any:
    """Wait for an item of a queue: a request that changes something and waits."""
    return store.queue("queue").get(seconds)


# --- another server ---


def test_a_server_that_was_killed_and_started_again_on_its_port() -> None:
    with kept_port() as port, running(SERVER, port, SECRET) as first:
        assert first.stdout is not None
        address = first.stdout.readline().strip()
        with rallypoint.connect(address, secret=SECRET, timeout=DEADLINE, ttl=LONG) as store:
            store["k"] = 1
            reads = Thread(lost_by, store.wait, "none", DEADLINE)
            pops = Thread(lost_by, pop, store, DEADLINE)
            until(lambda: store.status()["waiting"] == 2)
            os.kill(first.pid, signal.SIGKILL)
            first.wait()
            with running(SERVER, port, SECRET) as second:
                assert second.stdout is not None
                assert second.stdout.readline().strip() == address
                read, popped = reads.result(), pops.result()
                assert read.outcome == "did not happen"
                assert popped.outcome == "unknown"
                for error in (read, popped):
                    assert "another server than before" in str(error)
                assert store.add("n") == 1
                assert "k" not in store
                assert store.statistics()["sessions"] == 2


def test_another_server_is_noticed_by_who_asks_next(
    server: Server, proxy: ChaosProxy, store: Store
) -> None:
    with serve(secret=server.secret) as other:
        proxy.retarget(other.address)
        proxy.reset()
        error = lost_by(store.add, "n")
        assert error.outcome in (
            "did not happen",
            "unknown",
        )  # unknown: it was sent before the reset was seen
        assert "another server than before" in str(error)
        assert store.add("n") == 1  # and the next call works
        store.set("new", 1, ephemeral=True)
        with rallypoint.connect(other.address, secret=server.secret) as direct:
            assert direct.keys() == ["n", "new"]
            store.close()
            assert direct.keys() == ["n"]


def test_a_request_on_a_connection_that_was_known_to_be_gone_did_not_happen(
    server: Server, proxy: ChaosProxy, store: Store
) -> None:
    with serve(secret=server.secret) as other:
        proxy.refuse()
        proxy.retarget(other.address)
        proxy.reset()
        until(lambda: "not connected" in repr(store))  # the keeper noticed
        adding = Thread(lost_by, store.add, "n")
        until(lambda: "Add" in store.statistics()["operations"])
        proxy.heal()
        assert adding.result().outcome == "did not happen"
        assert store.add("n") == 1


def test_a_connection_that_a_firewall_has_forgotten_ends_no_call(
    server: Server, proxy: ChaosProxy
) -> None:
    """A call waited on it for all of its time, and raised store-timeout beside a network that
    worked.
    """
    with rallypoint.connect(
        proxy.address, secret=server.secret, same_host=False, ttl=6.0, timeout=6.0
    ) as store:
        store.set("mine", 1, ephemeral=True)
        for connection in proxy.connections:
            connection.black_hole()
        assert store.add("n") == 1
        assert store["mine"] == 1


# --- the lease is over, and the server knows what happened ---


def silence(proxy: ChaosProxy, direct: Store) -> None:
    """Until the session has ended."""
    proxy.refuse()
    proxy.reset()
    until(lambda: "mine" not in direct)
    proxy.heal()


def test_what_was_carried_out_happened(proxy: ChaosProxy, direct: Store, store: Store) -> None:
    proxy.black_hole(to="client")
    adding = Thread(lost_by, store.add, "n")
    assert direct.wait("n", DEADLINE) == 1
    silence(proxy, direct)
    error = adding.result()
    assert error.outcome == "happened"
    assert 'adding to "n" was carried out; its answer is lost' in error.why
    assert direct["n"] == 1
    assert store.add("n") == 2


def test_what_never_arrived_did_not_happen(proxy: ChaosProxy, direct: Store, store: Store) -> None:
    proxy.black_hole(to="server")
    swallowed = proxy.statistics().to_server.swallowed
    adding = Thread(lost_by, store.add, "n")
    proxy.wait_for(lambda seen: seen.to_server.swallowed > swallowed)
    silence(proxy, direct)
    error = adding.result()
    assert error.outcome == "did not happen"
    assert 'adding to "n" was not carried out' in error.why
    assert "n" not in direct
    assert store.add("n") == 1


def test_what_was_waiting_did_not_happen(proxy: ChaosProxy, direct: Store, store: Store) -> None:
    popping, reading = Thread(lost_by, pop, store, LONG), Thread(lost_by, store.wait, "none")
    until(lambda: direct.status()["waiting"] == 2)
    silence(proxy, direct)
    assert (popping.result().outcome, reading.result().outcome) == (
        "did not happen",
        "did not happen",
    )
    assert direct.status()["waiting"] == 0


def test_what_failed_did_not_happen(proxy: ChaosProxy, direct: Store, store: Store) -> None:
    direct["n"] = "text"
    proxy.black_hole(to="client")
    adding = Thread(lost_by, store.add, "n")
    proxy.wait_for(
        lambda seen: (
            seen.to_client.swallowed
            > len("'n' does not hold an integer: nothing can be added to it")
        )
    )
    silence(proxy, direct)
    assert adding.result().outcome == "did not happen"
    assert direct["n"] == "text"


def test_the_next_one_is_told_when_nobody_waited(
    proxy: ChaosProxy, direct: Store, store: Store
) -> None:
    silence(proxy, direct)
    error = lost_by(store.add, "n")
    assert error.outcome == "did not happen"
    assert f"(ttl {SHORT:g} s)" in str(error)
    assert "what the session held is released" in "".join(error.why)
    assert "n" not in direct
    assert store.add("n") == 1  # told once
    store.set("mine", 2, ephemeral=True)
    assert direct["mine"] == 2
    assert store.statistics()["sessions"] == 2


# --- the interpreter lock ---

HOG = """
import ctypes, sys
import rallypoint
store = rallypoint.connect(sys.argv[1], secret=bytes.fromhex(sys.argv[2]), ttl=1.0, same_host=sys.argv[3] == "near")
store.set("mine", 1, ephemeral=True)
ctypes.PyDLL(None).usleep(2_500_000)  # PyDLL: the lock is held meanwhile, and the keeper's thread stands still
try:
    store.add("n")
except rallypoint.SessionLost as error:
    print(error.outcome)
    print(error)
    print(*error.__notes__)
print(store.add("n"))
"""


@pytest.mark.parametrize("where", ["near", "far"])
def test_who_holds_the_interpreter_lock_for_too_long_is_told_why(
    server: Server, direct: Store, where: str
) -> None:
    outcome, headline, *notes, added = output_of(HOG, server.address, server.secret.hex(), where)
    assert (outcome, added) == ("did not happen", "1")
    assert "no sign of life from this client for" in headline
    assert "(ttl 1 s)" in headline
    assert any("holds the GIL" in line for line in notes)
    assert any("rallypoint.connect(..., ttl=60)" in line for line in notes)


# --- what it held ---

HOLDER = """
import os, sys
import rallypoint
store = rallypoint.connect(sys.argv[1], secret=bytes.fromhex(sys.argv[2]), ttl=float(sys.argv[3]), same_host="tcp" not in sys.argv)
store.set("mine", 1, ephemeral=True)
store["plain"] = 1
print("there", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize(
    "end",
    [
        "store.close()\nsys.stdin.read()",
        "pass",
        "sys.exit(3)",
        "raise SystemExit",
        "import gc\ndel store\ngc.collect()\nsys.stdin.read()",
        "store = None\nsys.stdin.read()",
        "import signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit())\nos.kill(os.getpid(), signal.SIGTERM)",
    ],
    ids=[
        "close",
        "end of the program",
        "sys.exit",
        "SystemExit",
        "garbage",
        "last reference",
        "SIGTERM with a handler",
    ],
)
def test_what_a_session_held_is_released_at_once(server: Server, direct: Store, end: str) -> None:
    with running(HOLDER + end, server.address, server.secret.hex(), str(LONG)) as process:
        assert process.stdin is not None
        assert direct.wait("mine", DEADLINE) == 1
        changes = direct.watch("mine", timeout=DEADLINE)
        process.stdin.write("\n")
        process.stdin.flush()
        assert next(changes).value is rallypoint.ABSENT
        assert direct["plain"] == 1
        until(lambda: direct.status()["sessions"] == 1)


CHILD = """
import multiprocessing, sys
import rallypoint
def work(address, secret):
    store = rallypoint.connect(address, secret=secret, ttl=3600)
    store.set("mine", 1, ephemeral=True)
    store["there"] = 1
    store.wait("go")
if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=work, args=(sys.argv[1], bytes.fromhex(sys.argv[2])))
    process.start()
    process.join()
    sys.stdin.read()
"""


def test_the_end_of_a_multiprocessing_child_is_one(server: Server, direct: Store) -> None:
    with running(CHILD, server.address, server.secret.hex()):
        direct.wait("there", DEADLINE)
        changes = direct.watch("mine", timeout=DEADLINE)
        direct["go"] = 1
        assert next(changes).value is rallypoint.ABSENT


@pytest.mark.parametrize(("ttl", "way"), [(SHORT, "tcp"), (LONG, "a Unix socket")])
def test_what_a_killed_process_held_is_released(
    server: Server, direct: Store, ttl: float, way: str
) -> None:
    """After its ttl; on a Unix socket, whose other end the kernel names, as soon as the process is
    gone.
    """
    with running(HOLDER, server.address, server.secret.hex(), str(ttl), way) as process:
        assert direct.wait("mine", DEADLINE) == 1
        changes = direct.watch("mine", timeout=DEADLINE)
        process.kill()
        process.wait()
        assert next(changes).value is rallypoint.ABSENT


def test_a_killed_process_keeps_its_session_until_then(server: Server, direct: Store) -> None:
    """Its connection is gone at once; it could have been the network's fault."""
    with running(HOLDER, server.address, server.secret.hex(), str(LONG), "tcp") as process:
        assert direct.wait("mine", DEADLINE) == 1
        until(lambda: repr(server).endswith("2 clients>"))
        process.kill()
        process.wait()
        until(lambda: repr(server).endswith("1 clients>"))
        assert "mine" in direct
        assert direct.status()["sessions"] == 2


# --- kept alive ---


def test_sessions_that_idle_or_wait_are_kept_for_several_ttl(
    server: Server, direct: Store, store: Store
) -> None:
    with rallypoint.connect(server.address, secret=server.secret, ttl=SHORT) as waiter:
        waiter.set("mine too", 1, ephemeral=True)
        waiting = Thread(waiter.wait, "k", DEADLINE)
        with pytest.raises(StoreTimeout, match='nothing that begins with "mine" changed'):
            next(direct.watch("mine", timeout=3 * SHORT))
        assert direct.keys() == ["mine", "mine too"]
        direct["k"] = 1
        assert waiting.result() == 1
        assert (store.statistics()["sessions"], waiter.statistics()["sessions"]) == (1, 1)


def test_an_idle_session_whose_connection_broke_connects_by_itself(
    proxy: ChaosProxy, direct: Store, store: Store
) -> None:
    for _ in range(3):
        before = store.statistics()["reconnects"]
        proxy.reset()
        until(lambda: store.statistics()["reconnects"] > before)  # noqa: B023
    with pytest.raises(StoreTimeout):
        next(direct.watch("mine", timeout=2 * SHORT))
    assert store.add("n") == 1
    assert store.statistics()["sessions"] == 1


def test_a_session_that_is_busy_with_large_values_is_kept(direct: Store, store: Store) -> None:
    value = bytes(20_000_000)
    changes = direct.watch("mine", timeout=0)
    clock = Clock()
    while clock.elapsed() < 2 * SHORT:
        store["k"] = value
        assert len(store["k"]) == len(value)
    with pytest.raises(StoreTimeout):
        next(changes)
    assert store.statistics()["sessions"] == 1


@pytest.mark.parametrize("ttl", [1e-9, 1e9])
def test_a_ttl_that_is_too_short_or_too_long_is_the_shortest_or_longest(
    server: Server, direct: Store, ttl: float
) -> None:
    """The client gives its signs of life as often as the server wants them. On a busy machine it may
    miss the 50 ms, so one of several sessions has to live for three times as long."""
    for _ in range(20):
        with rallypoint.connect(server.address, secret=server.secret, ttl=ttl) as store:
            store.set("mine", 1, ephemeral=True)
            try:
                next(direct.watch("mine", timeout=3 * SHORTEST_TTL))
            except StoreTimeout:
                assert store.statistics()["sessions"] == 1
                return
    raise AssertionError("all sessions were lost")
