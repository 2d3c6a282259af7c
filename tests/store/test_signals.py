"""Signal handlers run at once in every blocking call; they may raise, and they may use the
store.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

import rallypoint
from rallypoint import Server, Store, StoreTimeout
from rallypoint.clock import Clock
from rallypoint.testing import ChaosProxy

from .processes import ServerProcess
from .situations import (
    DEADLINE,
    LONG,
    Interruption,
    Storm,
    alarm,
    eventually,
    in_child,
    interrupted_at,
    our_threads,
    put,
    start,
    take,
)

# A handler that raises between the making of a socket and the name for it: Python closes it then.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

LARGE = b"x" * (32 << 20)
"""More than the buffers of any socket."""

TTL = 6 * LONG
"""Seconds of leases: what depends on a sign of life, or on their end, is too late."""


@pytest.fixture(autouse=True)
def _garbage_of_this_test() -> Iterator[None]:
    """Collect it here: in a test of another file the same warning would be an error."""
    yield
    gc.collect()


@pytest.fixture
def server() -> Iterator[Server]:
    with rallypoint.serve(max_bytes="256MiB") as made:
        yield made


@pytest.fixture
def process() -> Iterator[ServerProcess]:
    with ServerProcess() as made:
        yield made


@pytest.fixture(params=[True, False], ids=["shared-memory", "tcp"])
def store(server: Server, request: pytest.FixtureRequest) -> Iterator[Store]:
    with rallypoint.connect(
        server.address, secret=server.secret, same_host=request.param, timeout=LONG, ttl=TTL
    ) as made:
        yield made


CALLS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("k"),
    "add": lambda store: store.add("n"),
    "wait": lambda store: store.wait("never", timeout=LONG),
    "wait for ever": lambda store: store.wait("never"),
    "pop": lambda store: take(store, "empty", LONG),
    "get many": lambda store: store.get_many([f"k{i}" for i in range(100)]),
    "set large": lambda store: store.set("large", LARGE),
    "watch": lambda store: next(store.watch("w/")),
}


@pytest.mark.parametrize("same_host", [True, False], ids=["shared-memory", "tcp"])
@pytest.mark.parametrize("call", CALLS)
def test_ctrl_c_in_a_call_to_a_frozen_server(
    process: ServerProcess, same_host: bool, call: str
) -> None:
    """As with KeyboardInterrupt; and then the same store goes on."""
    with rallypoint.connect(
        process.address, secret=process.secret, same_host=same_host, timeout=LONG
    ) as store:
        store["k"] = 1
        process.stop()
        clock = Clock()
        with (
            alarm(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)),
            pytest.raises(KeyboardInterrupt),
        ):
            CALLS[call](store)
        assert clock.elapsed() < LONG / 5
        process.go_on()
        before = store.get("n", 0)
        assert store.add("n") == before + 1
        assert store.statistics()["sessions"] == 1


@pytest.mark.parametrize("error", [TimeoutError, ConnectionResetError, OSError])
def test_an_oserror_of_a_handler_is_never_taken_for_the_sockets(
    store: Store, error: type[OSError]
) -> None:
    """The usual way to give a call a time of one's own is a handler of SIGALRM that raises
    TimeoutError.
    """
    chance = random.Random(7)
    for _ in range(150):
        fired: list[OSError] = []

        def handler(number: int, frame: object, fired: list[OSError] = fired) -> None:
            fired.append(error("the handler's"))
            raise fired[0]

        def add(fired: list[OSError] = fired) -> None:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 2e-3))
            while not fired:
                store.add("n")

        store.add("n")  # connected again
        former = signal.signal(signal.SIGALRM, handler)
        # a callback of the collector may be Python code (hypothesis has one): what is raised in it
        # is lost
        gc.disable()
        try:
            with pytest.raises(error, match="the handler's") as raised:
                add()
            assert raised.value is fired[0]
        finally:
            gc.enable()
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former)
    assert store.statistics()["sessions"] == 1


def test_an_oserror_of_a_handler_ends_connecting(process: ServerProcess) -> None:
    process.stop()
    clock = Clock()

    def handler() -> None:
        raise TimeoutError("the handler's")

    with alarm(0.1, handler), pytest.raises(TimeoutError, match="the handler's"):
        rallypoint.connect(process.address, secret=process.secret, timeout=LONG)
    assert clock.elapsed() < LONG / 5


def test_ctrl_c_while_connecting(process: ServerProcess) -> None:
    process.stop()
    clock = Clock()
    with alarm(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        rallypoint.connect(process.address, secret=process.secret, timeout=LONG)
    assert clock.elapsed() < LONG / 5


def test_ctrl_c_while_trying_again() -> None:
    clock = Clock()
    with alarm(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        rallypoint.connect("tcp://127.0.0.1:1", secret=b"x" * 16, timeout=LONG)
    assert clock.elapsed() < LONG / 5


def test_ctrl_c_while_another_thread_waits(store: Store) -> None:
    join = start(lambda: store.wait("a", timeout=LONG))
    eventually(lambda: store.status()["waiting"] == 1)
    clock = Clock()
    with alarm(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        store.wait("never", timeout=LONG)
    assert clock.elapsed() < LONG / 5
    store["a"] = 1
    join()


def test_ctrl_c_while_a_large_value_arrives(server: Server) -> None:
    with (
        ChaosProxy(server.address) as proxy,
        rallypoint.connect(
            proxy.address, secret=server.secret, same_host=False, timeout=LONG
        ) as store,
    ):
        store["large"] = LARGE
        with proxy.after_bytes(300_000, of="client").freeze():
            clock = Clock()
            with (
                alarm(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)),
                pytest.raises(KeyboardInterrupt),
            ):
                store.get("large")
            assert clock.elapsed() < LONG / 5
        assert store["large"] == LARGE


@pytest.mark.parametrize("call", ["wait", "pop", "watch"])
def test_a_handler_that_returns_leaves_the_call_waiting(
    store: Store, server: Server, call: str
) -> None:
    """SIGTERM that only writes something down."""
    seen = []
    answered = threading.Event()

    def handler() -> None:
        seen.append(1)
        answered.set()

    def answer() -> None:
        assert answered.wait(DEADLINE)
        with rallypoint.connect(server.address, secret=server.secret) as other:
            other["never"] = 7
            other["w/x"] = 7
            put(other, "empty", 7)

    join = start(answer)
    with alarm(0.1, handler):
        returned = CALLS[call](store)
    join()
    assert seen == [1]
    assert returned in (7, ("w/x", 7, returned[2] if isinstance(returned, tuple) else 0))
    assert store.statistics()["reconnects"] == 0


# --- handlers that use the store


def test_a_handler_uses_the_store_in_the_middle_of_a_wait(store: Store) -> None:
    """And brings what is waited for: the call below ends at once, on the same connection."""
    clock = Clock()
    with alarm(0.1, lambda: store.set("k", store.add("n"))):
        assert store.wait("k", timeout=LONG) == 1
    assert clock.elapsed() < LONG / 5
    assert store.statistics()["reconnects"] == 0


def test_a_handler_reads_the_answer_of_the_call_below_it(store: Store, server: Server) -> None:
    """It waits itself, and meanwhile the other answer comes: it must not be lost, nor noticed only
    when something else arrives.
    """

    def handler() -> None:
        with rallypoint.connect(server.address, secret=server.secret) as other:
            other["below"] = 1
            join = start(lambda: other.set("above", 2))
            assert store.wait("above", timeout=LONG) == 2
            join()

    clock = Clock()
    with alarm(0.1, handler):
        assert store.wait("below", timeout=LONG) == 1
    assert clock.elapsed() < LONG / 5
    assert store.statistics()["reconnects"] == 0


def test_a_handler_ends_the_wait_of_another_thread_and_then_the_call_below_it(store: Store) -> None:
    first = start(lambda: store.wait("first", timeout=LONG))
    eventually(lambda: store.status()["waiting"] == 1)

    def handler() -> None:
        store["first"] = 1
        first()
        assert store.add("n") == 1
        store["below"] = 2

    clock = Clock()
    with alarm(0.1, handler):
        assert store.wait("below", timeout=LONG) == 2
    assert clock.elapsed() < LONG / 5


def test_a_handler_uses_the_store_while_a_large_value_is_sent(server: Server) -> None:
    """The link has half a frame on it, so that the handler takes another one; both are carried out,
    once.
    """
    with (
        ChaosProxy(server.address) as proxy,
        rallypoint.connect(
            proxy.address, secret=server.secret, same_host=False, timeout=LONG
        ) as store,
    ):
        seen = []

        def handler() -> None:
            proxy.heal()
            seen.append(store.add("n"))

        proxy.after_bytes(300_000, of="server").freeze()
        with alarm(0.3, handler):
            store["large"] = LARGE
        assert seen == [1]
        assert store["large"] == LARGE
        assert store["n"] == 1


def test_a_handler_uses_the_store_while_it_connects_again(server: Server) -> None:
    with (
        ChaosProxy(server.address) as proxy,
        rallypoint.connect(
            proxy.address, secret=server.secret, same_host=False, timeout=LONG
        ) as store,
    ):
        seen = []

        def handler() -> None:
            proxy.heal()
            seen.append(store.add("n"))

        proxy.refuse()
        proxy.reset()
        with alarm(0.2, handler):
            store.add("m")
        assert (seen, store["n"], store["m"]) == ([1], 1, 1)


def test_a_handler_closes_the_store(store: Store) -> None:
    clock = Clock()
    with alarm(0.1, store.close), pytest.raises(rallypoint.StoreClosed):
        store.wait("never", timeout=LONG)
    assert clock.elapsed() < LONG / 5


# --- what an interrupted call leaves


@pytest.mark.parametrize("resets", [False, True], ids=["", "and-resets"])
@pytest.mark.parametrize("threads", [0, 3])
def test_interrupted_at_random(server: Server, threads: int, resets: bool) -> None:
    """Handlers that use the store and raise, in the main thread; other threads beside it;
    connections that are cut: nothing is lost, doubled or stuck."""

    def run(address: str) -> dict[str, int]:
        with rallypoint.connect(address, secret=server.secret, timeout=LONG) as store:
            return storm_of_calls(store, threads)

    with ChaosProxy(server.address, seed=threads) as proxy:
        address = server.address
        if resets:
            proxy.reset_every(0.05, jitter=0.04)
            address = proxy.address
        print(in_child(lambda: run(address)))


def storm_of_calls(store: Store, threads: int) -> dict[str, int]:
    nested = 0

    def handle(chance: random.Random) -> None:
        nonlocal nested
        if chance.random() < 0.3:
            store.add("nested")
            nested += 1

    stop = threading.Event()
    others = [0] * threads

    def work(index: int) -> None:
        while not stop.is_set():
            store.add("others")
            others[index] += 1

    join = start(*(functools.partial(work, index) for index in range(threads)))
    done = interrupted = 0
    longest = 0.0
    value = b"v" * 200_000
    clock = Clock()
    with Storm(threads, handle) as storm:
        while clock.elapsed() < 0.8 or storm.raised <= 40:
            kind, call = storm.chance.random(), Clock()
            if kind < 0.6:
                if storm.strike(lambda: store.add("n")):
                    done += 1
                else:
                    interrupted += 1
            elif kind < 0.8:
                storm.strike(lambda: store.set("large", value))
            else:
                storm.strike(lambda: store.get_many(["large", "n", "nothing"] * 5))
            longest = max(longest, call.elapsed())
    stop.set()
    join()
    assert done <= store["n"] <= done + interrupted
    assert store.get("nested", 0) >= nested
    assert store.get("others", 0) == sum(others)
    assert store["large"] == value
    assert longest < LONG / 5, "a call was stuck"
    eventually(lambda: store.status()["waiting"] == 0)
    return {
        "done": done,
        "raised": storm.raised,
        "others": sum(others),
        "longest": int(longest * 1000),
    }


def _lock_and_unlock(store: Store) -> None:
    with store.lock("lock", timeout=LONG):
        pass


AT_EACH_PLACE: dict[str, Callable[[Store], object]] = {
    "add": lambda store: store.add("n"),
    "get large": lambda store: store.get("large"),
    "set large": lambda store: store.set("large", b"v" * 200_000),
    "lock": _lock_and_unlock,
    "queue": lambda store: store.queue("items").get(LONG),
}


@pytest.mark.parametrize("call", AT_EACH_PLACE)
def test_interrupted_at_every_fifth_place(server: Server, call: str) -> None:
    """One place after the other, instead of at random: after each the same store answers, and
    nothing is lost, doubled or held."""

    def run() -> None:
        with (
            rallypoint.connect(server.address, secret=server.secret, timeout=LONG) as other,
            rallypoint.connect(server.address, secret=server.secret, timeout=LONG) as store,
        ):
            store.set("large", b"v" * 200_000)
            before, items = 0, other.queue("items")
            for place in range(1, 1000, 5):
                items.put(place)
                where, ended = interrupted_at(place, lambda: AT_EACH_PLACE[call](store))
                if not where:
                    break
                assert store.get("large") == b"v" * 200_000, where
                count = store.add("n") - 1
                assert count - before in (0, 1), where
                before = count + 1
                _lock_and_unlock(other)
                if ended or call != "queue":
                    assert items.get(LONG) == place, where
                eventually(lambda: other.status()["waiting"] == 0)
            assert place > 50

    in_child(run)


def test_interrupted_while_it_connects(server: Server) -> None:
    """The thread that keeps a session alive stayed for ever, and the session with it, when a
    handler raised between the connection and the end of `connect`."""

    def run() -> None:
        for place in range(1, 1000):
            where, _ = interrupted_at(
                place,
                lambda: rallypoint.connect(server.address, secret=server.secret).close(),
                "client.py",
            )
            eventually(lambda: not our_threads(), lambda: where)  # noqa: B023
            if not where:
                break
        assert place > 10

    in_child(run)


def test_interrupted_while_it_begins_another_session() -> None:
    """A session had a connection and no thread that keeps it alive, when a handler raised between
    the two."""

    def run() -> None:
        server = rallypoint.serve()
        port = server.address.rpartition(":")[2]
        with rallypoint.connect(server.address, secret=server.secret, timeout=LONG) as store:
            for place in range(1, 1000):
                server.stop()
                server = rallypoint.serve(port=port, secret=server.secret)
                with pytest.raises(ConnectionError):  # of the last session
                    store.add("n")
                where, _ = interrupted_at(place, lambda: store.add("n"), "session.py")
                assert store.add("n") in (1, 2), where
                assert "rallypoint: keep-alive" in our_threads(), where
                if not where:
                    break
            assert place > 20
        server.stop()

    in_child(run)


def test_interrupted_while_a_store_is_closed(server: Server) -> None:
    """Threads that waited were not woken, for ever, when a handler raised before that."""

    def run() -> None:
        for place in range(1, 1000):
            store = rallypoint.connect(server.address, secret=server.secret, timeout=LONG)
            join = start(functools.partial(_wait_until_closed, store))
            eventually(lambda: store.status()["waiting"] == 1)  # noqa: B023
            where, _ = interrupted_at(place, store.close, "session.py")
            store.close()
            join()
            if not where:
                break
        assert place > 20

    in_child(run)


def _wait_until_closed(store: Store) -> None:
    with pytest.raises(rallypoint.StoreClosed):
        store.wait("never")


def test_a_call_that_is_interrupted_leaves_nothing_waiting_on_the_server(store: Store) -> None:
    for _ in range(5):
        with alarm(0.02, _interrupt), pytest.raises(Interruption):
            store.wait("never")
    eventually(lambda: store.status()["waiting"] == 0)


def _interrupt() -> None:
    raise Interruption


def test_a_wait_that_timed_out_leaves_nothing_waiting_on_the_server(store: Store) -> None:
    with pytest.raises(StoreTimeout):
        store.wait("never", timeout=0.05)
    assert store.status()["waiting"] == 0


def test_a_program_that_dies_of_sigpipe_does_not_die_of_us(process: ServerProcess) -> None:
    """`signal(SIGPIPE, SIG_DFL)` is what command line tools do; a server that goes must not end
    them.
    """
    program = f"""
import signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
import rallypoint
def connect(same_host):
    return rallypoint.connect({process.address!r}, secret={process.secret!r}, same_host=same_host, timeout=0.5, ttl=60.0)
stores = [connect(True), connect(False)]
print("connected", flush=True)
sys.stdin.readline()
for store in stores:
    for _ in range(3):
        try:
            store.add("n")
        except rallypoint.StoreTimeout as error:
            print(error.code, flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == "connected\n"
        process.kill()
        said, _ = child.communicate("go on\n", timeout=DEADLINE)
    assert said == "store-timeout\n" * 6
    assert child.returncode == 0
