"""Exactly once, over real connections that break: nothing lost, nothing doubled, nothing left
behind.

The long form is `bench/store_soak.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import rallypoint
from rallypoint.primitives.store import Store
from rallypoint.store.server.server import Server, serve
from rallypoint.testing import ChaosProxy

from .linearizability import Operation, check
from .live import DEADLINE, Thread, descriptors, output_of, until
from .raw import Raw
from .situations import take

SEED = 20

LARGE = 3_000_000
"""Bytes that lie in memory of their own on the server."""


@pytest.fixture
def server() -> Iterator[Server]:
    with serve(max_bytes="256MiB") as made:
        yield made


@pytest.fixture(params=["tcp", "unix"])
def proxy(server: Server, request: pytest.FixtureRequest) -> Iterator[ChaosProxy]:
    """In front of the server; by Unix sockets large values are shared memory, whose descriptors
    pass.
    """
    with tempfile.TemporaryDirectory() as folder:
        target, listen = server.address, "tcp://127.0.0.1:0"
        if request.param == "unix":
            with Raw(server.address, server.secret) as raw:
                target = f"unix://{raw.welcome.local}"
            listen = f"unix://{folder}/proxy"
        with ChaosProxy(target, seed=SEED, listen=listen) as made:
            yield made


@pytest.fixture
def connect(server: Server, proxy: ChaosProxy) -> Iterator[Callable[[], Store]]:
    """Makes clients that reach the server through the proxy."""
    made: list[Store] = []

    def make() -> Store:
        same_host = proxy.address.startswith("unix:")
        made.append(
            rallypoint.connect(
                proxy.address,
                secret=server.secret,
                timeout=DEADLINE,
                ttl=DEADLINE,
                same_host=same_host,
            )
        )
        return made[-1]

    yield make
    proxy.heal()
    for store in made:
        store.close()


@pytest.fixture
def direct(server: Server) -> Iterator[Store]:
    """A client whose connection holds."""
    with rallypoint.connect(server.address, secret=server.secret) as store:
        yield store


def broken_once(proxy: ChaosProxy, fault: Any, does: Callable[..., Any], *args: Any) -> Any:
    """What a call returns in which this fault, which comes after some bytes, happened."""
    thread = Thread(does, *args)
    proxy.wait_for(lambda _: fault.times >= 1, DEADLINE)
    fault.heal()
    return thread.result()


# --- one request, cut off at every place ---


@pytest.mark.parametrize("to", ["client", "server"])
def test_an_add_whose_connection_breaks_at_any_byte(
    proxy: ChaosProxy, connect: Callable[[], Store], direct: Store, to: Any
) -> None:
    store = connect()
    for number in range(15):
        fault = proxy.after_bytes(number, of=to).reset()
        assert broken_once(proxy, fault, store.add, "n") == number + 1
    assert direct["n"] == 15
    assert store.statistics()["sessions"] == 1
    assert (
        store.statistics()["reconnects"] > 0
    )  # not 15: what strikes a connection that is not in use is no outage


PLACES = [0, 1, 40, 5_000, 70_000, 1_500_000, LARGE]


@pytest.mark.parametrize("to", ["client", "server"])
def test_large_values_across_resets_come_back_whole(
    proxy: ChaosProxy, connect: Callable[[], Store], direct: Store, to: Any
) -> None:
    if proxy.address.startswith("unix:"):
        places = [0, 1, 20]  # the rest goes by shared memory, whose descriptor is cut off
    else:
        places = PLACES
    store = connect()
    first = direct.status()["revision"]
    for count, place in enumerate(places):
        value = os.urandom(1000) * (LARGE // 1000)
        if to == "server":
            fault = proxy.after_bytes(place, of="server").reset()
            revision = broken_once(proxy, fault, store.set, "k", value)
            assert direct.read("k") == (value, revision)
            assert direct.status()["revision"] == first + count + 1
        else:
            direct["k"] = value
            fault = proxy.after_bytes(place, of="client").reset()
            assert broken_once(proxy, fault, store.get, "k") == value
            direct["k"] = value[::-1]  # into memory that nobody reads any more
            assert store["k"] == value[::-1]


@pytest.mark.parametrize("size", [10, 200_000, LARGE], ids=["small", "large", "shared"])
def test_an_item_whose_delivery_breaks_is_delivered_once(
    proxy: ChaosProxy, connect: Callable[[], Store], direct: Store, size: int
) -> None:
    store = connect()
    items = [os.urandom(10) * (size // 10) for _ in range(3)]
    for item in items:
        direct.queue("q").put(item)
    for place, item in zip((0, 1, 9), items, strict=True):
        fault = proxy.after_bytes(place, of="client").reset()
        assert broken_once(proxy, fault, popped, store, 0.0) == item
    assert popped(store, 0.0) is None
    direct["k"] = items[0]
    fault = proxy.after_bytes(3, of="client").reset()
    assert broken_once(proxy, fault, store.pop, "k") == items[0]
    assert store.pop("k", None) is None


def popped(store: Store, timeout: float) -> Any:
    """The next item of queue q, None when none comes."""
    return take(store, "q", timeout)


# --- many at once ---

FAULTS: dict[str, Callable[[ChaosProxy], Any]] = {
    "resets": lambda proxy: (
        proxy.reset_after(2501, of="server"),
        proxy.reset_after(3003, of="client"),
    ),
    "resets at any time": lambda proxy: (
        proxy.reset_every(0.1, jitter=0.09),
        proxy.reset_after(9000, of="both"),
    ),
    "resets that the server is not told of": lambda proxy: proxy.after_bytes(
        2503, of="client"
    ).reset(to="client"),
}
"""By bytes, so that the speed of this machine does not matter. Resets by time come seldom enough for
a client on a busy machine to connect between two of them."""

ADDS = 150

ADD = f"""
import json, sys, threading
import rallypoint
store = rallypoint.connect(sys.argv[1], secret=bytes.fromhex(sys.argv[2]), same_host=sys.argv[1].startswith("unix:"), timeout=60, ttl=60)
sums = [[] for _ in range(4)]
def add(sums):
    for _ in range({ADDS}):
        sums.append(store.add("n"))
threads = [threading.Thread(target=add, args=(each,)) for each in sums]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert store.statistics()["sessions"] == 1
print(json.dumps(sums))
"""


@pytest.mark.parametrize("kind", FAULTS)
def test_adds_of_processes_and_threads_are_exact(
    server: Server, proxy: ChaosProxy, direct: Store, kind: str
) -> None:
    FAULTS[kind](proxy)
    with ThreadPoolExecutor() as pool:
        outputs = list(
            pool.map(lambda _: output_of(ADD, proxy.address, server.secret.hex()), range(2))
        )
    sums: list[list[int]] = [each for output in outputs for each in json.loads(output[0])]
    assert all(each == sorted(each) for each in sums)
    assert sorted(number for each in sums for number in each) == list(range(1, 8 * ADDS + 1))
    assert direct["n"] == 8 * ADDS
    seen = proxy.statistics()
    assert seen.connections >= 10, seen


def test_queues_lose_nothing_and_double_nothing(
    proxy: ChaosProxy, connect: Callable[[], Store]
) -> None:
    count = 60
    sizes = random.Random(SEED)
    items = [
        [(producer, number, bytes(sizes.choice([0, 100, 80_000]))) for number in range(count)]
        for producer in range(2)
    ]

    def produce(store: Store, items: list[Any]) -> None:
        for item in items:
            store.queue("q").put(item)

    def consume(store: Store) -> list[Any]:
        got: list[Any] = []
        while (item := popped(store, DEADLINE)) is not None and item != "end":
            got.append(item)
        assert item == "end"
        return got

    proxy.reset_after(200_003, of="both")
    consumers = [Thread(consume, connect()) for _ in range(2)]
    producers = [Thread(produce, connect(), each) for each in items]
    for thread in producers:
        thread.result()
    produce(connect(), ["end", "end"])
    got = [consumer.result() for consumer in consumers]
    assert Counter((producer, number) for each in got for producer, number, _ in each) == Counter(
        (producer, number) for producer in range(2) for number in range(count)
    )
    assert sorted(item for each in got for item in each) == sorted(
        item for each in items for item in each
    )
    for each in got:
        for producer in range(2):
            numbers = [number for who, number, _ in each if who == producer]
            assert numbers == sorted(numbers)
    assert proxy.statistics().resets >= 10


HISTORY = """
import json, random, sys, threading, warnings
import rallypoint
warnings.simplefilter("ignore", rallypoint.UpdateLostWarning)  # an error of this, with PYTHONWARNINGS=error, would end a client early
from rallypoint.clock import Clock
from rallypoint import ABSENT
address, secret, number = sys.argv[1:]
now = Clock().monotonic
done = []
def work(client):
    random_ = random.Random(client)
    store = rallypoint.connect(address, secret=bytes.fromhex(secret), same_host=address.startswith("unix:"), timeout=60, ttl=60)
    last = {}
    for count in range(40):
        kind = random_.choice(["get", "set", "delete", "add", "cas"])
        key = "n" if kind == "add" else random_.choice(["a", "b", "n"] if kind in ("get", "delete") else ["a", "b"])
        value = f"{client}/{count}"
        start = now()
        if kind == "get":
            arguments, result = (), store.get(key)
            last[key] = result
        elif kind == "set":
            arguments, result = (value,), None
            store[key] = value
        elif kind == "delete":
            arguments, result = (), store.delete(key)
        elif kind == "add":
            arguments, result = (count + 1,), store.add(key, count + 1)
        else:
            expected = last.get(key)
            arguments = (expected, value)
            result, last[key] = store.compare_and_set(key, ABSENT if expected is None else expected, value)
            if last[key] is ABSENT:
                last[key] = None
        done.append((client, kind, key, arguments, result, start, now()))
    store.close()
threads = [threading.Thread(target=work, args=(f"{number}.{thread}",)) for thread in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps(done))
"""


def test_a_history_of_several_processes_has_one_order(server: Server, proxy: ChaosProxy) -> None:
    proxy.reset_after(999, of="both")
    with ThreadPoolExecutor() as pool:
        outputs = list(
            pool.map(
                lambda number: output_of(HISTORY, proxy.address, server.secret.hex(), str(number)),
                range(3),
            )
        )
    history = [
        Operation(client, kind, key, tuple(arguments), result, start, end)
        for output in outputs
        for client, kind, key, arguments, result, start, end in json.loads(output[-1])
    ]
    assert len(history) == 3 * 2 * 40
    verdict = check(history)
    assert verdict.outcome == "linearizable", verdict
    assert proxy.statistics().resets >= 10


# --- what is left ---


def left() -> tuple[Counter[str], int]:
    """What this process, with client, server and proxy in it, has open; and how many pieces of
    memory for large values apart from that, of which both sides keep some for the next one."""
    files = Counter(descriptors())
    return files, files.pop("/memfd", 0)


def test_reconnects_leave_no_thread_and_no_descriptor(
    proxy: ChaosProxy, connect: Callable[[], Store]
) -> None:
    store = connect()
    numbers = iter(range(1, 1000))

    def break_it(times: int) -> None:
        for number in itertools.islice(numbers, times):
            proxy.reset()
            assert store.add("n") == number
            if number % 5 == 0:
                store["k"] = bytes(LARGE)
                assert len(store["k"]) == LARGE

    break_it(10)
    threads, (files, _) = threading.active_count(), left()
    break_it(50)
    assert store.statistics()["reconnects"] > 25  # what strikes no connection is no outage
    until(lambda: proxy.statistics().open <= 4)
    until(lambda: threading.active_count() <= threads + 4)
    until(lambda: left()[0].total() <= files.total() + 16 and left()[1] <= 16)


def test_closed_stores_leave_no_thread_and_no_descriptor(server: Server, direct: Store) -> None:
    direct["k"] = bytes(LARGE)
    threads, (files, _) = threading.active_count(), left()
    for _ in range(40):
        with rallypoint.connect(server.address, secret=server.secret) as store:
            store["k"] = bytes(LARGE)
            assert len(store["k"]) == LARGE
    until(lambda: threading.active_count() <= threads)
    until(lambda: left()[0] <= files and left()[1] <= 8)
