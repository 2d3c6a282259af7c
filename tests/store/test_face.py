"""What users hold: the dict and the methods, by shared memory and by TCP, over real sockets."""

from __future__ import annotations

import enum
import gc
import logging
import math
import os
import pickle
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import rallypoint
from rallypoint.clock import Clock
from rallypoint.errors import (
    Compacted,
    FenceStale,
    LimitExceeded,
    RallypointError,
    StoreClosed,
    StorePickled,
    StoreTimeout,
    UpdateLost,
    UpdateLostWarning,
    UsageError,
    ValueUnsupported,
    WrongType,
)
from rallypoint.primitives.store import Store
from rallypoint.store.client.client import WATCH_SECONDS, Change, Entry
from rallypoint.store.server.server import Server, serve
from rallypoint.testing import ChaosProxy, Network
from rallypoint.wire.messages import INLINE_BYTES, Append

from .live import DEADLINE, Thread, let_servers_be_late, output_of, until

LARGE = b"large" * 40_000
"""Travels beside its message."""

SHARED = b"shared" * 400_000
"""And lies in memory of its own on the server, which on the same host is shared."""

large_and_shared = pytest.mark.parametrize("large", [LARGE, SHARED], ids=["large", "shared"])

Connect = Callable[..., Store]


@pytest.fixture(autouse=True)
def _server_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    let_servers_be_late(monkeypatch)


@pytest.fixture
def server() -> Iterator[Server]:
    with serve(max_bytes="64MiB") as made:
        yield made


@pytest.fixture(params=[True, False], ids=["shared-memory", "tcp"])
def connect(server: Server, request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes clients of the server."""
    made: list[Store] = []

    def make(**options: Any) -> Store:
        made.append(
            rallypoint.connect(
                server.address, secret=server.secret, same_host=request.param, **options
            )
        )
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(connect: Connect) -> Store:
    return connect()


@pytest.fixture
def other(connect: Connect) -> Store:
    return connect()


# --- as a dict ---


def test_a_dict(store: Store, other: Store) -> None:
    assert "a" not in store
    assert len(store) == 0
    assert bool(store) is True
    with pytest.raises(KeyError, match=r"^'a'$"):
        store["a"]
    with pytest.raises(KeyError, match=r"^'a'$"):
        del store["a"]
    store["b"] = [1, (2, "ä")]
    store["a"] = None
    assert other["b"] == [1, (2, "ä")]
    assert other["a"] is None
    assert "a" in other
    assert 3 not in other
    assert len(other) == 2
    assert list(other) == ["a", "b"]
    assert list(other.items()) == [("a", None), ("b", [1, (2, "ä")])]
    assert list(other.values()) == [None, [1, (2, "ä")]]
    del other["a"]
    assert list(store) == ["b"]


def test_keys_items_and_values_of_a_prefix(store: Store) -> None:
    store.set_many({f"x/{number:03}": number for number in range(150)} | {"y": -1, "x": -2})
    assert store.keys("x/") == [f"x/{number:03}" for number in range(150)]
    assert list(store.items("x/")) == [(f"x/{number:03}", number) for number in range(150)]
    assert list(store.values("x/1")) == list(range(100, 150))
    assert store.keys("z") == []
    assert len(store) == 152


def test_items_leave_out_what_was_removed_meanwhile(store: Store, other: Store) -> None:
    store.set_many({f"{number:03}": number for number in range(100)})
    items = store.items()
    assert next(items) == ("000", 0)
    assert other.delete("099")
    assert [key for key, _ in items] == [f"{number:03}" for number in range(1, 99)]


def test_pop(store: Store, other: Store) -> None:
    store["a"] = 1
    assert other.pop("a") == 1
    assert other.pop("a", None) is None
    assert other.pop("a", 7) == 7
    with pytest.raises(KeyError, match=r"^'a'$"):
        store.pop("a")
    with pytest.raises(TypeError, match="at most one default"):
        store.pop("a", 1, 2)
    for large in (LARGE, SHARED):
        store["large"] = large
        assert other.pop("large") == large
    assert len(store) == 0


def test_a_key_is_popped_by_one(connect: Connect) -> None:
    stores = [connect() for _ in range(4)]
    stores[0].set_many({str(number): number for number in range(50)})
    threads = [
        Thread(lambda store: [store.pop(str(number), None) for number in range(50)], store)
        for store in stores
    ]
    got = [value for thread in threads for value in thread.result() if value is not None]
    assert sorted(got) == list(range(50))


def test_delete_says_whether_there_was_one(store: Store) -> None:
    store["a"] = 1
    assert store.delete("a") is True
    assert store.delete("a") is False


@pytest.mark.parametrize(
    "call", ["__getitem__", "get", "read", "wait", "delete", "pop", "add", "keys", "watch"]
)
def test_a_key_is_text(store: Store, call: str) -> None:
    with pytest.raises(TypeError, match="a key is a str, not int"):
        getattr(store, call)(1)


def test_a_key_of_a_subclass_of_str(store: Store) -> None:
    class Name(str, enum.Enum):  # noqa: UP042
        A = "a"

    store[Name.A] = 1
    assert Name.A in store
    assert (
        store.get_many([Name.A])
        == [store[Name.A]]
        == [store.get(Name.A)]
        == [store.wait(Name.A, 0)]
        == [1]
    )
    store.set_many({Name.A: 2})
    assert store.add(Name.A) == 3
    assert store.compare_and_set(Name.A, 3, 4) == (True, 4)
    assert store.update(Name.A, lambda value: value + 1) == 5
    assert store.keys(Name.A) == ["a"]
    changes = store.watch(Name.A, timeout=DEADLINE)
    assert store.delete(Name.A)
    assert next(changes).key == "a"
    store["a"] = 6
    assert store.pop(Name.A) == 6


def test_set_many_and_get_many(store: Store, other: Store) -> None:
    values: dict[str, Any] = {f"k{number}": number for number in range(300)} | {
        "large": LARGE,
        "shared": SHARED,
        "last": "x",
    }
    store.set_many(values)
    assert other.get_many(values) == list(values.values())
    assert other.get_many(["k1", "none", "large"], default="?") == [1, "?", LARGE]
    assert other.get_many([]) == []
    store.set_many({})


def test_get_never_waits(store: Store) -> None:
    assert store.get("a") is None
    assert store.get("a", 3) == 3
    assert store.read("a") == Entry(rallypoint.ABSENT, 0)
    revision = store.set("a", 4)
    assert store.get("a", 3) == 4
    assert store.read("a") == Entry(4, revision)
    assert store.set("a", 4) == revision + 1
    assert repr(rallypoint.ABSENT) == "ABSENT"


# --- values ---


SIZES = [
    0,
    1,
    1000,
    INLINE_BYTES - 10,
    INLINE_BYTES - 1,
    INLINE_BYTES,
    INLINE_BYTES + 1,
    INLINE_BYTES + 10,
    1_000_000,
    9_000_001,
]


def test_values_of_all_sizes(store: Store, other: Store) -> None:
    for size in SIZES:
        value = os.urandom(1000) * (size // 1000) + os.urandom(size % 1000)
        store["k"] = value
        assert other["k"] == value, size
    assert other.status()["keys"] == 1


def test_what_is_read_is_a_copy(store: Store, other: Store) -> None:
    numpy = pytest.importorskip("numpy")
    for size in (10, 1_000_000):
        written = numpy.zeros(size)
        store["k"] = {"x": written}
        written[:] = 1
        first, second = store["k"]["x"], other["k"]["x"]
        assert not first.any()
        first[:] = 2
        assert not second.any()
        assert not store["k"]["x"].any()


def test_what_is_read_outlives_store_and_key(connect: Connect) -> None:
    numpy = pytest.importorskip("numpy")
    store = connect()
    store["k"] = numpy.arange(1_000_000)
    read = store["k"]
    store["k"] = numpy.zeros(1_000_000)  # into the same memory, if that were thought to be free
    store["k"] = numpy.zeros(1_000_000)
    store.close()
    assert (read == numpy.arange(1_000_000)).all()


@pytest.mark.torch
def test_tensors_of_every_dtype(store: Store, other: Store) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    dtypes = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    dtypes = {dtype for dtype in dtypes if not str(dtype).startswith(("torch.q", "torch.quint"))}
    assert len(dtypes) >= 20
    for count in (6, 120_000):
        tensors = {}
        for dtype in dtypes:
            raw = torch.arange(count * dtype.itemsize, dtype=torch.int64).to(torch.uint8) % (
                2 if dtype is torch.bool else 251
            )
            tensors[str(dtype)] = raw.view(dtype).view(2, -1)
        if count == 6:
            store["t"] = tensors
            back = other["t"]
        else:
            store.set_many(tensors)
            back = dict(zip(tensors, other.get_many(tensors), strict=True))
        for name, tensor in tensors.items():
            assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(back[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.torch
def test_device(store: Store) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    store["t"] = {"w": torch.ones(3), "n": 1}
    for read in (
        store.get("t", device="meta"),
        store.read("t", device="meta").value,
        store.wait("t", 1, device="meta"),
        store.get_many(["t"], device="meta")[0],
    ):
        assert (read["w"].device.type, read["w"].shape, read["n"]) == ("meta", (3,), 1)
    assert store["t"]["w"].device.type == "cpu"


def test_values_that_are_none_are_not_sent(store: Store) -> None:
    before = store.statistics()["operations"]
    with pytest.raises(
        ValueUnsupported, match=r'^store\["k"\]\["f"\]: a function cannot be stored\n'
    ) as caught:
        store["k"] = {"f": lambda: 1}
    assert caught.value.code == "value-unsupported"
    for call in (
        lambda: store.set_many({"a": 1, "b": object()}),
        lambda: store.compare_and_set("b", 1, object()),
        lambda: store.compare_and_set("b", object(), 1),
    ):
        with pytest.raises(
            ValueUnsupported, match=r'^store\["b"\]: an object cannot be stored\n'
        ) as caught:
            call()
        assert caught.value.__suppress_context__  # one traceback
    with pytest.raises(
        ValueUnsupported,
        match=r'^store\["b"\]: ABSENT stands for "no such key" and cannot be stored\n',
    ):
        store["b"] = rallypoint.ABSENT
    assert store.statistics()["operations"] == before
    assert len(store) == 0


def test_allow_pickle_is_asked_of_both(connect: Connect) -> None:
    careful, trusting = connect(), connect(allow_pickle=True)
    trusting["k"] = Entry(1, 2)
    assert trusting["k"] == Entry(1, 2)
    with pytest.raises(ValueUnsupported, match="this client does not unpickle"):
        careful["k"]
    careful["k"] = 1
    assert trusting["k"] == 1


# --- numbers ---


def test_add(store: Store, other: Store) -> None:
    assert store.add("n") == 1
    assert other.add("n", 41) == 42
    assert store.add("n", -43) == -1
    assert store["n"] == -1
    store["n"] = 5
    assert store.add("n", 0) == 5


def test_add_counts_in_64_bits(store: Store) -> None:
    assert store.add("n", 2**63 - 1) == 2**63 - 1
    with pytest.raises(WrongType, match="would be 9223372036854775808") as caught:
        store.add("n")
    assert caught.value.code == "integer-overflow"
    assert store["n"] == 2**63 - 1
    assert store.add("m", -(2**63)) == -(2**63)
    with pytest.raises(WrongType):
        store.add("m", -1)
    for amount in (2**63, -(2**63) - 1):
        with pytest.raises(OverflowError, match="64 bits"):
            store.add("n", amount)
    for wrong in (1.0, True, "1"):
        with pytest.raises(
            TypeError, match=r"add\(\) takes an int, not a .*: give it as int\(x\)$"
        ):
            store.add("n", wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", ["1", 1.0, True, None, 2**64, b"1", [1], LARGE], ids=lambda value: type(value).__name__
)
def test_add_to_what_is_no_integer(store: Store, value: Any) -> None:
    store["k"] = value
    with pytest.raises(WrongType, match="does not hold an integer") as caught:
        store.add("k")
    assert caught.value.code == "wrong-type"
    assert isinstance(caught.value, TypeError)
    assert store["k"] == value


def test_adds_of_threads_and_clients_are_exact(connect: Connect) -> None:
    stores = [connect(), connect()]
    threads = [
        Thread(lambda store: [store.add("n") for _ in range(100)], stores[index % 2])
        for index in range(6)
    ]
    sums = [number for thread in threads for number in thread.result()]
    assert sorted(sums) == list(range(1, 601))


# --- compare and set, update ---


def test_compare_and_set_by_value(store: Store, other: Store) -> None:
    assert store.compare_and_set("k", rallypoint.ABSENT, 1) == (True, 1)
    assert other.compare_and_set("k", rallypoint.ABSENT, 2) == (False, 1)
    assert other.compare_and_set("k", 1.0, 2) == (False, 1)
    assert other.compare_and_set("k", True, 2) == (False, 1)
    assert other.compare_and_set("k", 1, {"a": [1]}) == (True, {"a": [1]})
    assert store.compare_and_set("k", {"a": [1]}, None) == (True, None)
    assert store.compare_and_set("k", None, 3) == (True, 3)
    assert store.compare_and_set("none", 3, 4) == (False, rallypoint.ABSENT)
    assert "none" not in store


def test_compare_and_set_by_revision(store: Store, other: Store) -> None:
    revision = store.set("k", "x")
    other["another"] = 1
    assert store.compare_and_set("k", "not looked at", "y", revision=revision) == (True, "y")
    assert store.compare_and_set("k", "y", "z", revision=revision) == (False, "y")
    assert store.compare_and_set("k", "y", "z", revision=0) == (False, "y")
    assert store.compare_and_set("new", "y", "z", revision=0) == (True, "z")
    assert store.compare_and_set("none", "y", "z", revision=store.read("new").revision) == (
        False,
        rallypoint.ABSENT,
    )


@large_and_shared
def test_compare_and_set_of_large_values(store: Store, other: Store, large: bytes) -> None:
    store["k"] = large
    assert other.compare_and_set("k", large[:-1] + b"?", 1) == (False, large)
    assert other.compare_and_set("k", "small", 1) == (False, large)
    assert other.compare_and_set("k", rallypoint.ABSENT, 1) == (False, large)
    assert other.compare_and_set("none", large, 1) == (False, rallypoint.ABSENT)
    assert other.compare_and_set("k", large, large * 2) == (True, large * 2)
    assert store["k"] == large * 2
    assert store.compare_and_set("k", large * 2, 1) == (True, 1)
    assert store.compare_and_set("k", large, 2) == (False, 1)
    assert other["k"] == 1


def test_compare_and_set_with_what_was_appended_to(store: Store) -> None:
    """Bytes that the server put together are in its own memory, however many: not beside the
    message.
    """
    for letter in b"abcd":
        store.ask(Append, "k", bytes([letter]) * 50_000)
    whole = b"".join(bytes([letter]) * 50_000 for letter in b"abcd")
    assert store["k"] == whole
    assert store.compare_and_set("k", whole[:-1], 1) == (False, whole)
    assert store.compare_and_set("k", whole, 1) == (True, 1)


@large_and_shared
def test_large_values_compared_while_others_change_them(connect: Connect, large: bytes) -> None:
    stores = [connect() for _ in range(3)]
    stores[0]["k"] = [0, large]

    def count(store: Store) -> int:
        done = 0
        while done < 8:
            number, rest = store["k"]
            done += store.compare_and_set("k", [number, rest], [number + 1, rest])[0]
        return done

    threads = [Thread(count, store) for store in stores]
    assert sum(thread.result() for thread in threads) == 24
    assert stores[0]["k"] == [24, large]


def test_update(store: Store) -> None:
    assert store.update("k", lambda value: (value, 1)) == (None, 1)
    assert store.update("k", lambda value: [value]) == [(None, 1)]
    assert store["k"] == [(None, 1)]
    assert store.update("n", lambda value: value + 1, default=0) == 1
    with pytest.raises(ZeroDivisionError):
        store.update("n", lambda value: value // 0)
    assert store["n"] == 1


def test_update_among_others(connect: Connect) -> None:
    stores = [connect(), connect()]

    def more(value: list[int], index: int) -> list[int]:
        return [*value, index]

    def run(index: int) -> None:
        for _ in range(25):
            stores[index % 2].update("k", lambda value: more(value, index), default=[])

    threads = [Thread(run, index) for index in range(4)]
    for thread in threads:
        thread.result()
    assert sorted(stores[0]["k"]) == sorted([0, 1, 2, 3] * 25)


def test_an_update_begun_when_there_was_no_key(store: Store, other: Store) -> None:
    def first(value: int) -> int:
        if value == 0:
            other["k"] = 10  # quicker
        return value + 1

    assert store.update("k", first, default=0) == 11


# --- times ---


def test_ttl(store: Store, other: Store) -> None:
    clock = Clock()
    store.set("k", 1, ttl=1.5)
    changes = other.watch("k", since=store.read("k").revision, timeout=DEADLINE)
    assert "k" in other
    change = next(changes)
    assert (change.key, change.value) == ("k", rallypoint.ABSENT)
    assert clock.elapsed() >= 1.5
    assert "k" not in store


def test_add_keeps_the_ttl_and_set_takes_it_away(store: Store) -> None:
    store.set("set", 1, ttl=1.5)
    store.set_many({"add": 1, "many": 1}, ttl=1.5)
    store["set"] = 2
    store.add("add")
    until(lambda: store.keys() == ["set"])
    assert store["set"] == 2


@pytest.mark.parametrize("ttl", [0, -1, math.inf, math.nan])
def test_a_ttl_is_above_zero(store: Store, ttl: float) -> None:
    with pytest.raises(UsageError, match="ttl="):
        store.set("k", 1, ttl=ttl)
    assert "k" not in store


def test_ephemeral(connect: Connect) -> None:
    store, other = connect(), connect()
    store.set("a", 1, ephemeral=True)
    store.set("b", 1, ephemeral=True)
    store["b"] = 2  # no longer
    store.set("c", LARGE, ephemeral=True)
    assert other.keys() == ["a", "b", "c"]
    store.close()
    assert other.keys() == ["b"]


def test_wait(store: Store, other: Store) -> None:
    for value in (7, None, LARGE, SHARED):
        thread = Thread(lambda: store.wait("k"))
        until(lambda: other.status()["waiting"] == 1)
        other["k"] = value
        assert thread.result() == value
        assert store.wait("k", 0) == value
        del other["k"]
    assert other.status()["waiting"] == 0


def test_a_wait_that_is_too_long(store: Store, other: Store) -> None:
    for timeout in (0, 0.1):
        clock = Clock()
        with pytest.raises(
            StoreTimeout, match=f'nobody set "k" in the store at .* within {timeout:g} s'
        ) as caught:
            store.wait("k", timeout)
        assert (caught.value.code, caught.value.outcome) == ("wait-timeout", "did not happen")
        assert clock.elapsed() >= timeout
    assert other.status()["waiting"] == 0
    for wrong in (-1, math.nan):
        with pytest.raises(UsageError):
            store.wait("k", wrong)
    other["k"] = 1
    assert store.wait("k", 0.1) == 1


def test_what_is_removed_at_once_was_seen_by_who_waits(store: Store, other: Store) -> None:
    thread = Thread(lambda: store.wait("k", DEADLINE))
    until(lambda: other.status()["waiting"] == 1)
    other["k"] = 1
    del other["k"]
    assert thread.result() == 1


# --- watch ---


def test_watch_gives_all_changes_in_order(store: Store, other: Store) -> None:
    store["x/old"] = 0
    changes = other.watch("x/", timeout=DEADLINE)
    one = store.set("x/a", 1)
    store["y"] = 1
    two = store.set("x/b", {"k": [1]})
    store.delete("x/a")
    assert store.add("x/n", 5) == 5
    assert next(changes) == Change("x/a", 1, one)
    assert next(changes) == Change("x/b", {"k": [1]}, two)
    assert next(changes) == Change("x/a", rallypoint.ABSENT, two + 1)
    assert next(changes) == Change("x/n", 5, two + 2)
    thread = Thread(lambda: next(changes))
    until(lambda: store.status()["waiting"] == 1)
    store["x/late"] = None
    assert thread.result() == Change("x/late", None, two + 3)


def test_watch_misses_nothing_while_others_write(connect: Connect) -> None:
    watcher, writers = connect(), [connect(), connect()]
    changes = watcher.watch("n/", timeout=DEADLINE)

    def write(store: Store, key: str) -> list[int]:
        return [store.set(key, number) for number in range(300)]

    threads = [Thread(write, store, f"n/{index}") for index, store in enumerate(writers)]
    seen = [next(changes) for _ in range(600)]
    revisions = {
        revision: f"n/{index}"
        for index, thread in enumerate(threads)
        for revision in thread.result()
    }
    assert [change.revision for change in seen] == sorted(revisions)
    assert all(change.key == revisions[change.revision] for change in seen)
    for index in range(2):
        assert [change.value for change in seen if change.key == f"n/{index}"] == list(range(300))


def test_watch_from_the_beginning(store: Store) -> None:
    store["a"] = 1
    del store["a"]
    store["b"] = 2
    changes = store.watch(since=0, timeout=DEADLINE)
    assert [
        (change.key, change.value) for change in (next(changes), next(changes), next(changes))
    ] == [
        ("a", 1),
        ("a", rallypoint.ABSENT),
        ("b", 2),
    ]


@large_and_shared
def test_watch_reads_a_large_value_when_it_is_its_turn(
    store: Store, other: Store, large: bytes
) -> None:
    changes = store.watch("k", timeout=DEADLINE)
    revision = other.set("k", large)
    assert next(changes) == Change("k", large, revision)
    other["k"] = large
    other["k"] = large * 2
    other["k2"] = large
    del other["k2"]
    assert next(changes) == Change("k", large * 2, revision + 1)  # the newest
    assert next(changes) == Change("k", large * 2, revision + 2)
    assert next(changes) == Change("k2", rallypoint.ABSENT, revision + 3)
    assert next(changes) == Change("k2", rallypoint.ABSENT, revision + 4)


def test_watch_can_be_asked_again_after_its_timeout(store: Store, other: Store) -> None:
    changes = store.watch("k", timeout=0.5)
    other["another"] = 1
    for _ in range(2):
        with pytest.raises(
            StoreTimeout, match=r'nothing that begins with "k" changed within 0\.5 s'
        ) as caught:
            next(changes)
        assert caught.value.code == "wait-timeout"
    other["k"] = 1
    other["k"] = 2
    assert [next(changes).value, next(changes).value] == [1, 2]
    with pytest.raises(StoreTimeout):
        next(changes)


def test_watch_from_what_is_no_longer_known(store: Store) -> None:
    first = store.set("k", 0)
    store.set_many({f"x{number % 1000}": number for number in range(1000)})
    for _ in range(400):
        store["big"] = b"x" * 60_000  # 24 MB of changes, of which 16 are remembered
    changes = store.watch("k", since=first, timeout=DEADLINE)
    with pytest.raises(Compacted) as caught:
        next(changes)
    assert caught.value.code == "compacted"
    again = store.watch("k", timeout=DEADLINE)
    store["k"] = 1
    assert next(again).value == 1


def test_watch_goes_on_asking(monkeypatch: pytest.MonkeyPatch, store: Store, other: Store) -> None:
    assert WATCH_SECONDS > 1
    monkeypatch.setattr("rallypoint.store.client.client.WATCH_SECONDS", 0.05)
    changes = store.watch("k")
    thread = Thread(lambda: next(changes))
    until(lambda: store.statistics()["operations"]["Watch"] >= 4)
    other["k"] = 1
    assert thread.result().value == 1


# --- limits ---


def test_a_value_that_is_larger_than_the_store(store: Store, other: Store) -> None:
    store["k"] = 1
    before = store.statistics()
    with pytest.raises(
        LimitExceeded,
        match=r"^store\[\"k\"\]: a value of 70000005 bytes is more than .* the limit is 67108864 bytes",
    ) as caught:
        store["k"] = bytes(70_000_000)
    assert caught.value.code == "value-too-large"
    assert isinstance(caught.value, MemoryError)
    assert "serve(max_bytes=" in "".join(caught.value.__notes__)
    after = store.statistics()
    assert after["bytes_sent"] == before["bytes_sent"]  # refused here
    assert (store["k"], other["k"], after["reconnects"]) == (1, 1, 0)


def test_a_store_that_is_full(store: Store, other: Store) -> None:
    store["a"] = bytes(40_000_000)
    with pytest.raises(LimitExceeded) as caught:
        other["b"] = bytes(40_000_000)
    assert caught.value.code == "store-full"
    assert str(caught.value).startswith('store["b"]: ')
    assert "67108864" in str(caught.value)
    assert other["a"] == bytes(40_000_000)
    assert "b" not in other
    other["c"] = bytes(1_000_000)
    del store["a"]
    other["b"] = bytes(40_000_000)
    assert store["b"] == bytes(40_000_000)
    assert [each.statistics()["reconnects"] for each in (store, other)] == [0, 0]


@pytest.mark.parametrize(
    "size", [60_000, 900_000, 30_000_000], ids=["in the message", "behind it", "in shared memory"]
)
def test_what_there_is_no_room_for_is_named(store: Store, size: int) -> None:
    store["a"] = bytes(40_000_000)
    for piece in (2_000_000, 30_000):
        with pytest.raises(LimitExceeded):
            store.set_many(
                {f"{piece}/{index}": bytes(piece) for index in range(50_000_000 // piece)}
            )
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: store.set("w", bytes(size)), 'store["w"]: '),
        (lambda: store.set_many({"w": bytes(size)}), 'store["w"]: '),
        (lambda: store.compare_and_set("w", rallypoint.ABSENT, bytes(size)), 'store["w"]: '),
        (lambda: store.queue("q").put(bytes(size)), 'the queue "q": '),
    ]
    if size < INLINE_BYTES:
        calls.append((lambda: store.ask(Append, "w", bytes(size)), 'store["w"]: '))
    for call, named in calls:
        with pytest.raises(LimitExceeded) as caught:
            call()
        assert caught.value.code == "store-full"
        assert str(caught.value).startswith(named)
    assert store.statistics()["reconnects"] == 0


def test_what_is_too_large_is_named_before_it_is_sent(store: Store) -> None:
    for call, named in (
        (lambda: store.set("w", bytes(70_000_000)), 'store["w"]: '),
        (lambda: store.queue("q").put(bytes(70_000_000)), 'the queue "q": '),
        (lambda: store.once("data", lambda: bytes(70_000_000)), 'once("data"): '),
    ):
        with pytest.raises(LimitExceeded) as caught:
            call()
        assert caught.value.code == "value-too-large"
        assert str(caught.value).startswith(named)


def test_a_store_that_is_full_in_the_middle_of_set_many(store: Store) -> None:
    values = {"a": 1, "b": bytes(40_000_000), "c": bytes(40_000_001), "d": 2}
    with pytest.raises(LimitExceeded) as caught:
        store.set_many(values)
    assert caught.value.code == "store-full"
    assert str(caught.value).startswith('store["c"]: ')
    assert store.get_many(["a", "b", "d"]) == [1, bytes(40_000_000), 2]  # those behind it, too
    assert "c" not in store
    assert store.statistics()["reconnects"] == 0


def test_a_key_that_is_too_long(store: Store) -> None:
    store["k" * 4096] = 1
    with pytest.raises(LimitExceeded) as caught:
        store["k" * 4097] = 1
    assert caught.value.code == "key-too-long"
    with pytest.raises(LimitExceeded):
        store.add("ä" * 2049)
    assert store["k" * 4096] == 1
    assert store.statistics()["reconnects"] == 0


def test_a_fence_that_is_no_lock_s_token(store: Store) -> None:
    store["k"] = 1
    with pytest.raises(FenceStale):
        store.set("k", 2, fence=1)
    with pytest.raises(FenceStale):
        store.delete("k", fence=1)
    assert store["k"] == 1


@pytest.mark.torch
def test_a_tensor_that_only_looks_large_is_weighed_before_it_is_copied(store: Store) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(
        LimitExceeded,
        match=r'^store\["w"\]: a value of at least \d+ bytes .* the limit is 67108864 bytes',
    ) as caught:
        store["w"] = torch.zeros(1).expand(1 << 50)
    assert caught.value.code == "value-too-large"
    assert "w" not in store


# --- what people bring along ---


@pytest.mark.parametrize("wrong", ["10", [1], True, b"1"])
def test_seconds_are_numbers(server: Server, store: Store, wrong: Any) -> None:
    calls: list[tuple[str, Callable[[], object]]] = [
        ("timeout", lambda: store.wait("k", wrong)),
        ("timeout", lambda: store.watch(timeout=wrong)),
        (
            "timeout",
            lambda: rallypoint.connect(server.address, secret=server.secret, timeout=wrong),
        ),
        ("ttl", lambda: rallypoint.connect(server.address, secret=server.secret, ttl=wrong)),
        ("ttl", lambda: store.set("k", 1, ttl=wrong)),
        ("ttl", lambda: store.set_many({"k": 1}, ttl=wrong)),
    ]
    for name, call in calls:
        with pytest.raises(
            TypeError, match=rf"^{name}=.*: seconds are a number or a timedelta, not "
        ):
            call()
    assert "k" not in store


def test_connecting_has_an_end(server: Server) -> None:
    with pytest.raises(
        TypeError, match=r"^timeout=None: seconds are a number or a timedelta, not None$"
    ):
        rallypoint.connect(server.address, secret=server.secret, timeout=None)  # type: ignore[arg-type]


def test_a_timedelta_is_a_time(connect: Connect) -> None:
    store = connect(timeout=timedelta(seconds=7.5), ttl=timedelta(minutes=1))
    assert store.timeout == 7.5
    store.set("k", 1, ttl=timedelta(milliseconds=1))
    store.set_many({"j": 1}, ttl=timedelta(milliseconds=1))
    until(lambda: len(store) == 0)
    with pytest.raises(StoreTimeout, match=r"within 0\.5 s"):
        store.wait("k", timedelta(seconds=0.5))
    with pytest.raises(StoreTimeout, match=r"within 0\.5 s"):
        next(store.watch(timeout=timedelta(seconds=0.5)))


def test_what_is_taken_for_an_address(server: Server) -> None:
    with pytest.raises(
        TypeError, match=r"^an address is a str, not a Server: give server\.address$"
    ):
        rallypoint.connect(server, secret=server.secret)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"give unix:///run/x\.sock$"):
        rallypoint.connect(Path("/run/x.sock"), secret=server.secret)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not an int"):
        rallypoint.connect(29500, secret=server.secret)  # type: ignore[arg-type]


def test_an_address_with_a_slash_behind_it(server: Server) -> None:
    with rallypoint.connect(f" {server.address}/ ", secret=server.secret) as store:
        assert store.address == server.address


def test_a_path_that_is_no_socket_is_told_at_once(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path, what in {tmp_path: "folder", file: "file"}.items():
        with pytest.raises(UsageError, match=f"{path} is a {what}, not a Unix socket") as caught:
            rallypoint.connect(f"unix://{path}", secret=server.secret, timeout=10 * DEADLINE)
        assert caught.value.code == "address-malformed"


@pytest.mark.parametrize("secret", [b"x" * 32, None], ids=["wrong", "unreadable"])
def test_a_connection_that_fails_is_one_error(server: Server, secret: bytes | None) -> None:
    with pytest.raises(RallypointError) as caught:
        rallypoint.connect(
            server.address, secret=secret, secret_file=None if secret else "/no/such/file"
        )
    assert caught.value.code == ("wrong-secret" if secret else "secret-unreadable")
    printed = "".join(traceback.format_exception(caught.value))
    assert printed.count("Traceback") == 1


def test_get_many_takes_no_str(store: Store) -> None:
    store.set_many({"a": 1, "b": 2})
    with pytest.raises(TypeError, match=r"get_many\(\) takes several keys, not a str"):
        store.get_many("ab")


def test_set_many_takes_no_pairs(store: Store) -> None:
    with pytest.raises(
        TypeError, match=r"set_many\(\) takes a dict, not a list: make it one with dict\(\.\.\.\)"
    ):
        store.set_many([("a", 1)])  # type: ignore[arg-type]


def test_a_key_that_is_no_text(store: Store) -> None:
    key = "n\udcff"
    for call in (
        lambda: store.get(key),
        lambda: store.set(key, 1),
        lambda: store.set_many({"a": 1, key: 1}),
        lambda: store.get_many(["a", key]),
        lambda: store.keys(key),
        lambda: store.add(key),
    ):
        with pytest.raises(
            UsageError, match=r"the key 'n\\udcff' is no text: character 1 is a lone surrogate"
        ):
            call()
    assert len(store) == 0
    store["n\u00e4"] = 1
    assert store.keys() == ["n\u00e4"]


def test_add_says_how_to_give_numbers_of_others(store: Store) -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(
        TypeError, match=r"^add\(\) takes an int, not a numpy\.int64: give it as x\.item\(\)$"
    ):
        store.add("n", numpy.int64(1))
    assert "n" not in store


def test_a_store_without_an_answer_says_what_was_asked() -> None:
    with Network() as network:
        store = network.connect(timeout=0.5)
        network.refuse()
        network.cut()
        calls: list[tuple[Callable[[], object], str]] = [
            (lambda: store["cfg"], 'reading "cfg"'),
            (lambda: store.add("n"), 'adding to "n"'),
            (lambda: store.keys("x/"), 'listing the keys that begin with "x/"'),
        ]
        for call, asked in calls:
            with pytest.raises(StoreTimeout) as caught:
                call()
            assert str(caught.value).startswith(
                f"{asked} got no answer from the store at {store.address} within 0."
            )
            assert str(caught.value.__notes__).count(asked) == 1


def test_pickling_says_how_a_pool_gets_it(store: Store) -> None:
    with pytest.raises(StorePickled) as caught:
        pickle.dumps(store)
    assert "initializer=begin, initargs=(store,)" in "".join(caught.value.__notes__)


# --- lost updates ---


def test_a_lost_update_is_told_once_for_each_key(store: Store, other: Store) -> None:
    told = []
    for key in ("a", "a", "b"):
        read = store.get(key, 0)
        other.add(key)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            store[key] = read + 1
        told.append([(each.category, each.filename, str(each.message)) for each in caught])
    who = f"pid {os.getpid()} on {os.uname().nodename}"
    text = f"was changed by {who} between this read and write; use add() or update()"
    assert told == [
        [(UpdateLostWarning, __file__, f"update-lost: 'a' {text}")],
        [],
        [(UpdateLostWarning, __file__, f"update-lost: 'b' {text}")],
    ]
    assert (store.statistics()["lost_updates"], other.statistics()["lost_updates"]) == (3, 0)
    assert store["a"] == 2
    other["b"] = 5
    assert store["b"] == 5
    other["b"] = 6
    store.set("b", 1)  # told already
    assert store.statistics()["lost_updates"] == 4


def test_in_place_addition_of_two(store: Store, other: Store) -> None:
    store["n"] = 0
    first, second = store["n"], other["n"]
    store["n"] = first + 1
    with pytest.warns(UpdateLostWarning, match="'n' was changed"):
        other["n"] = second + 1
    assert store["n"] == 1


def test_what_is_no_lost_update(connect: Connect) -> None:
    store, other = connect(strict=True), connect()
    store["k"] = 1  # never read
    other["k"] = 2
    store["k"] = 3
    store["k"] += 1  # nobody came between
    store["k"] += 1
    store.get("k")
    other["j"] = 1  # another key
    store["k"] = 4
    store.get("k")
    other["k"] = 5
    assert store.delete("k")
    store["k"] = 6  # in the place of nothing
    store.get("k")
    store.add("k")  # its own
    store["k"] = 7
    store.get("k")
    other["k"] = 8
    store.update("k", lambda value: value + 1)
    store["k"] = 10
    assert store.statistics()["lost_updates"] == 0


def test_with_strict_a_lost_update_is_an_error_each_time(connect: Connect) -> None:
    store, other = connect(strict=True), connect()
    for number in range(2):
        store.get("k")
        other["k"] = 10
        with pytest.raises(UpdateLost, match="'k' was changed by pid") as caught:
            store["k"] = number
        assert caught.value.code == "update-lost"
        assert other["k"] == number  # it has happened
    store["k"] = 3
    assert store.statistics()["lost_updates"] == 2


# --- about ---


def test_status(store: Store, other: Store) -> None:
    empty = store.status()
    first = empty["revision"]
    assert empty == {
        "revision": first, "keys": 0, "used_bytes": 0, "sessions": 2, "waiting": 0,
        "max_bytes": 64 * 1024 * 1024, "max_value_bytes": 64 * 1024 * 1024, "max_keys": 1_000_000,
    }  # fmt: skip
    store["k"] = LARGE
    thread = Thread(lambda: other.wait("j", DEADLINE))
    until(lambda: store.status()["waiting"] == 1)
    full = store.status()
    assert (full["revision"], full["keys"], full["sessions"]) == (first + 1, 1, 2)
    assert len(LARGE) < full["used_bytes"] < len(LARGE) + 2000
    store["j"] = 1
    assert thread.result() == 1
    del store["k"], store["j"]
    assert store.status() == empty | {"revision": first + 4}


def test_statistics(store: Store) -> None:
    fresh = store.statistics()
    assert fresh["operations"] == {}
    store["a"] = 1
    store.set_many({"b": 2, "c": bytes(20_000)})
    store.get_many(["a", "b", "c"])
    assert "d" not in store
    seen = store.statistics()
    assert seen["operations"] == {"Exists": 1, "Get": 3, "Set": 3}
    assert 20_000 < seen["bytes_sent"] - fresh["bytes_sent"] < 21_000
    assert 20_000 < seen["bytes_received"] - fresh["bytes_received"] < 21_000
    assert (seen["reconnects"], seen["sessions"], seen["lost_updates"]) == (0, 1, 0)


def test_shared_memory_is_no_traffic(server: Server) -> None:
    sent = {}
    for same_host in (True, False):
        with rallypoint.connect(server.address, secret=server.secret, same_host=same_host) as store:
            before = store.statistics()
            store["k"] = SHARED
            assert store["k"] == SHARED
            after = store.statistics()
            sent[same_host] = [
                after[name] - before[name] for name in ("bytes_sent", "bytes_received")
            ]
    assert all(count < 1000 for count in sent[True])
    assert all(count > len(SHARED) for count in sent[False])


def test_repr_and_identity(server: Server) -> None:
    who = f"pid {os.getpid()} on {os.uname().nodename}"
    store = rallypoint.connect(server.address, secret=server.secret, timeout=7.5)
    far = rallypoint.connect(server.address, secret=server.secret, same_host=False)
    assert (
        repr(store) == f"<Store {server.address}: connected by a Unix socket, shared memory, {who}>"
    )
    assert repr(far) == f"<Store {server.address}: connected by TCP, {who}>"
    assert (store.address, store.timeout, str(store.identity)) == (server.address, 7.5, who)
    far.close()
    assert repr(far) == f"<Store {server.address}: closed, {who}>"
    store.close()
    assert server.secret.hex() not in repr(store)


def test_repr_without_a_connection() -> None:
    with Network() as network:
        store = network.connect(rank=3, timeout=0.5)
        network.refuse()
        network.cut()
        with pytest.raises(StoreTimeout):
            store.add("n")
        assert re.search(r": not connected, rank 3 \(pid \d+ on .*\)>$", repr(store))


def test_a_context_manager_closes(server: Server, store: Store) -> None:
    with rallypoint.connect(server.address, secret=server.secret) as mine:
        mine.set("k", 1, ephemeral=True)
        assert store["k"] == 1
    assert "k" not in store
    assert store.status()["sessions"] == 1
    for _ in range(2):
        with pytest.raises(StoreClosed, match="this store object was closed") as caught:
            mine["k"]
        assert (caught.value.code, caught.value.outcome) == ("store-closed", "did not happen")
        mine.close()


def test_a_store_that_is_forgotten_closes_itself(server: Server, store: Store) -> None:
    mine = rallypoint.connect(server.address, secret=server.secret, ttl=3600)
    mine.set("k", 1, ephemeral=True)
    assert "k" in store
    del mine
    gc.collect()
    until(lambda: "k" not in store)
    assert store.status()["sessions"] == 1


# --- the log ---

QUARREL = """
import rallypoint, sys
from rallypoint.testing import Network
with Network() as network:
    store = network.connect(ttl=3600)  # no keep-alive meets the cut
    store["n"] = 1
    network.cut()
    assert store.add("n") == 2
    assert store.statistics()["reconnects"] == 1
"""


def test_a_program_without_logging_is_told_nothing() -> None:
    assert output_of(QUARREL) == []


def test_rallypoint_log_prints_reconnects() -> None:
    lost, again = output_of(QUARREL, RALLYPOINT_LOG="debug")
    assert re.fullmatch(
        r"rallypoint: WARNING: lost the connection to the store at tcp://192\.0\.2\.1:1: .+", lost
    )
    assert re.fullmatch(
        r"rallypoint: WARNING: connected to the store at tcp://192\.0\.2\.1:1 again, by .+", again
    )


def test_a_program_with_logging_gets_its_lines() -> None:
    lost, again = output_of(
        "import logging; logging.basicConfig(format='%(name)s %(levelname)s %(message)s')" + QUARREL
    )
    assert lost.startswith("rallypoint WARNING lost the connection")
    assert again.startswith("rallypoint WARNING connected to the store")


def test_a_log_that_is_the_store_itself(server: Server) -> None:
    """A handler may use the store whose connection was lost."""
    with ChaosProxy(server.address) as proxy:
        mine = rallypoint.connect(proxy.address, secret=server.secret, same_host=False)

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                mine.add("lines")

        log, handler = logging.getLogger("rallypoint"), Handler()
        log.addHandler(handler)
        try:
            for number in range(1, 6):
                proxy.reset()
                assert mine.add("n") == number
            # Two lines for each. The handler's connection may be a new one, on which the next call
            # goes: nobody has noticed the loss of the other one then.
            until(lambda: mine.get("lines", 0) == 2 * mine.statistics()["reconnects"])
            assert 1 <= mine.statistics()["reconnects"] <= 5
        finally:
            log.removeHandler(handler)
            mine.close()


def test_pythons_own_errors_name_the_class_that_users_know(store: Store) -> None:
    with pytest.raises(
        TypeError, match=r"^Store\.update\(\) missing 1 required positional argument: 'fn'"
    ):
        store.update("k")  # type: ignore[call-arg]
