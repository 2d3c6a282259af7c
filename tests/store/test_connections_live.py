"""Connections below the calls: streams in pieces, bytes that nobody said, and memory and
descriptors that run out.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import rallypoint
from rallypoint import Server, Store

from .live import Thread, output_of, until
from .processes import ServerProcess
from .relay import Relay
from .situations import LONG, descriptors, eventually, start

LARGE = os.urandom(1000) * 3000
"""A value in memory of its own on the server, which clients on the same host share."""


@pytest.fixture
def server() -> Iterator[Server]:
    with rallypoint.serve(max_bytes="512MiB") as made:
        yield made


@pytest.fixture
def near(server: Server) -> Iterator[Store]:
    """A client that shares memory with the server."""
    with rallypoint.connect(server.address, secret=server.secret, timeout=LONG, ttl=LONG) as made:
        yield made


@pytest.fixture
def far(server: Server) -> Iterator[Store]:
    """A client by TCP."""
    with rallypoint.connect(
        server.address, secret=server.secret, same_host=False, timeout=LONG, ttl=LONG
    ) as made:
        yield made


# --- streams ---


@pytest.mark.parametrize("piece", [1, 11, 12, 13, 300, 10_000])
def test_answers_are_the_same_however_the_stream_is_cut(
    server: Server, near: Store, piece: int
) -> None:
    with (
        Relay(server.address, piece) as relay,
        rallypoint.connect(
            relay.address, secret=server.secret, same_host=False, timeout=LONG
        ) as store,
    ):
        large = os.urandom(100_000 if piece > 10 else 2_000)
        for round in range(2):
            store.set_many(
                {f"key {number:03}": number for number in range(70)}
                | {"large": large, "text": "t" * 300}
            )
            assert store.keys("key") == [f"key {number:03}" for number in range(70)]
            assert store.get_many(["key 001", "large", "none", "text"]) == [
                1,
                large,
                None,
                "t" * 300,
            ]
            assert store.add("n") == round + 1
            assert store["large"] == large
        waiting = start(lambda: store.wait("late", timeout=LONG))
        eventually(lambda: near.status()["waiting"] == 1)
        near["late"] = large
        waiting()
        assert store.statistics()["reconnects"] == 0


NOISE = {
    "no message": b"\x05" + bytes(11) + b"\xc1" * 5,
    "empty": bytes(12),
    "too long": b"\xff" * 64,
    "text": b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
}


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_what_is_not_of_the_protocol_ends_the_connection_and_loses_nothing(
    server: Server, noise: bytes
) -> None:
    with (
        Relay(server.address) as relay,
        rallypoint.connect(
            relay.address, secret=server.secret, same_host=False, timeout=LONG
        ) as store,
    ):
        assert store.add("n") == 1
        relay.say_to_clients(noise)
        assert store.add("n") == 2
        assert store["n"] == 2
        statistics = store.statistics()
        assert (statistics["sessions"], statistics["reconnects"]) == (1, 1)


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_what_a_server_cannot_read_is_nobodys_request(
    server: Server, near: Store, noise: bytes
) -> None:
    """The server ends the connection. What was asked on it is asked again, once."""
    with (
        Relay(server.address) as relay,
        rallypoint.connect(
            relay.address, secret=server.secret, same_host=False, timeout=LONG
        ) as store,
    ):
        waiting = Thread(store.wait, "late", LONG)
        eventually(lambda: near.status()["waiting"] == 1)
        relay.say_to_server(noise)
        assert store.add("n") == 1
        near["late"] = "came"
        assert waiting.result() == "came"
        assert store.statistics()["sessions"] == 1


# --- shared memory ---


def segments() -> int:
    """How many pieces of shared memory this process has open."""
    return sum("memfd:rallypoint" in what for what in descriptors().values())


def test_shared_memory_leaves_no_descriptor(server: Server) -> None:
    before = descriptors().keys()
    with rallypoint.connect(server.address, secret=server.secret, timeout=LONG) as store:
        own = segments()  # the server is in this process, too
        for number in range(30):
            store["k"] = LARGE[number:]
            assert store["k"] == LARGE[number:]
        del store["k"]
        eventually(
            lambda: segments() <= own + 16, lambda: f"{segments()} segments for one value at a time"
        )
    eventually(lambda: descriptors().keys() == before, lambda: str(descriptors()))


def test_many_values_at_once_cost_few_descriptors(server: Server) -> None:
    """Values that the server still reads wait in memory that is lent to it; there is a most of
    that.
    """
    with rallypoint.connect(server.address, secret=server.secret, timeout=LONG) as store:
        values = {f"{number}": bytes([number % 251]) * 70_000 for number in range(300)}
        most = 0
        done = threading.Event()

        def look() -> None:
            nonlocal most
            while not done.is_set():
                most = max(most, len(descriptors()))

        before = len(descriptors())
        looking = start(look)
        store.set_many(values)
        done.set()
        looking()
        assert store.get_many(values) == list(values.values())
        assert most < before + 600


def test_memory_that_a_value_was_sent_in_is_not_written_before_it_was_read(
    near: Store, far: Store
) -> None:
    """Each value that is read is one that was set, and no mixture of two."""
    ended = threading.Event()

    def write(key: str) -> None:
        for number in range(150):
            near[key] = bytes([number]) * 200_000

    def read() -> None:
        while not ended.is_set():
            for value in far.get_many(["a", "b", "c"]):
                assert value is None or value == value[:1] * 200_000

    reading = start(read)
    start(*(lambda key=key: write(key) for key in "abc"))()
    ended.set()
    reading()


def test_a_process_without_room_for_a_descriptor() -> None:
    """The kernel drops what it cannot install. The caller is told, and the next call works."""
    with (
        ServerProcess() as server,
        rallypoint.connect(server.address, secret=server.secret, timeout=LONG, ttl=LONG) as near,
    ):
        no_room_for_a_descriptor(near)


def no_room_for_a_descriptor(near: Store) -> None:
    near["k"] = LARGE
    assert near["k"] == LARGE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    highest = max(descriptors()) + 1
    try:
        while not taken or taken[-1] < highest:
            taken.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1, hard))
        with pytest.raises(OSError, match="no descriptor left"):
            near.get("k")
        assert near.add("n") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)
    assert near["k"] == LARGE
    assert near.statistics()["sessions"] == 1


# --- memory ---

TIGHT = """
import resource, sys, threading
import rallypoint

store = rallypoint.connect(sys.argv[1], secret=bytes.fromhex(sys.argv[2]), same_host=sys.argv[3] == "near", timeout=50.0)
waits = threading.Thread(target=lambda: print(store.wait("driver", timeout=50.0), flush=True))
waits.start()
while store.status()["waiting"] < 1:
    pass
with open("/proc/self/status") as status:
    [kib] = [int(line.split()[1]) for line in status if line.startswith("VmSize")]
resource.setrlimit(resource.RLIMIT_AS, (kib * 1024 + 30_000_000, resource.RLIM_INFINITY))
for call in (lambda: store.get("large"), lambda: store.queue("q").get_nowait()):
    try:
        call()
    except MemoryError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(len(store["large"]), len(store.queue("q").get(50.0)))
store["driver"] = "woken"
waits.join()
print(store.statistics()["sessions"])
"""


@pytest.mark.parametrize("where", ["near", "far"])
def test_a_value_for_which_there_is_no_memory_is_the_trouble_of_who_asked(
    server: Server, near: Store, where: str
) -> None:
    """Not of a thread that waits on the same store. The item stays in its queue."""
    near["large"] = bytes(60_000_000)
    near.queue("q").put(bytes(50_000_000))
    lines = output_of(TIGHT, server.address, server.secret.hex(), where)
    assert lines[0].startswith("there is no memory here for a value of 600000")
    assert lines[1].startswith("there is no memory here for a value of 500000")
    assert lines[2:] == ["60000000 50000000", "woken", "1"]
    until(lambda: near.status()["waiting"] == 0)


def test_what_was_read_is_not_kept_by_the_server(server: Server, near: Store, far: Store) -> None:
    """Memory lent to a reader comes back when it was read, also where another thread of it
    waits.
    """
    waiting: Any = start(lambda: near.wait("late", timeout=LONG))
    eventually(lambda: far.status()["waiting"] == 1)
    empty = segments()
    for _ in range(30):
        far["k"] = LARGE
        assert near["k"] == LARGE
        near.queue("q").put(LARGE)
        assert near.queue("q").get(LONG) == LARGE
    del far["k"]
    eventually(
        lambda: segments() <= empty + 16,
        lambda: f"{segments()} segments, of which {empty} were there before",
    )
    far["late"] = 1
    waiting()
