"""Our c10d store beside torch's own: the same operations on TCPStore, HashStore and ours, with the
same results.

`SAME` is what all three answer alike. `DIFFERENT` is everything we found that they do not, with the
words in which the guide says so.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import rallypoint
from rallypoint.store.server.server import Server

from ..python_path import TORCH_WITHOUT_COMPILER, python_path
from .live import let_servers_be_late
from .processes import add_and_tell

dist: Any = pytest.importorskip("torch.distributed", reason="torch is not installed")

if not dist.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("torch_in_parts")

REPOSITORY = Path(__file__).parents[2]
GUIDE = REPOSITORY / "docs" / "guides" / "from-tcpstore.md"

NOW = 0.2
"""Seconds for what is to time out."""

SOON = 60.0
"""Seconds within which what is to come comes, on a busy machine."""


def seconds(number: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=number)


@pytest.fixture(scope="module")
def server() -> Iterator[rallypoint.Server]:
    with contextlib.ExitStack() as stack:
        server = rallypoint.serve()
        stack.callback(server.stop)
        yield server


@pytest.fixture
def client(server: rallypoint.Server) -> Iterator[rallypoint.Store]:
    with rallypoint.connect(server.address, secret=server.secret) as store:
        yield store
        for key in store:
            store.delete(key)


@pytest.fixture(scope="module")
def tcp_server() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def stores(
    server: rallypoint.Server,
    client: rallypoint.Store,
    tcp_server: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str], Any]:
    """Makes an empty store of the kind asked for, whose timeout is NOW.

    Whose time is up is told so by the server, and a busy machine may be late with that: which error
    follows is what is asked here, and the one for a server that says nothing is asked in
    `test_deadlines.py`.
    """
    let_servers_be_late(monkeypatch)

    def make(kind: str) -> Any:
        if kind == "tcp":
            store = tcp_server.clone()  # a connection of its own: some cases break it
            for key in store.list_keys():
                store.delete_key(key)
        elif kind == "hash":
            store = dist.HashStore()
        elif kind == "ours":
            store = client.c10d()
        else:  # everything goes through C++, whose virtual functions come back to Python
            store = dist.PrefixStore("p", client.c10d())
        store.set_timeout(seconds(NOW))
        return store

    return make


def tried(does: Callable[..., Any], *args: Any) -> Any:
    """What a call returns, or the type of what it raises."""
    try:
        return does(*args)
    except Exception as error:
        return type(error)


# --- the table ---


Call = tuple[Any, ...] | Callable[[Any], Any]
"""A method's name and its arguments, or a function of the store."""


def outcomes(store: Any, *calls: Call) -> list[Any]:
    """What one call after the other returns, or the type of what it raises."""
    return [
        tried(call, store) if callable(call) else tried(getattr(store, call[0]), *call[1:])
        for call in calls
    ]


class Case(NamedTuple):
    name: str
    calls: list[Call]
    gives: list[Any]
    # False: torch's PrefixStore does not do it (queues, list_keys), or with a timeout of its own
    # (barrier)
    prefixed: bool = True


LARGE = b"x" * 100_000
"""Longer than what travels inside a message."""


def the_timeout(store: Any) -> Any:
    return store.timeout


SAME = [
    Case(
        "timeout",
        [the_timeout, ("set_timeout", seconds(7.5)), the_timeout],
        [seconds(NOW), None, seconds(7.5)],
    ),
    Case(
        "set_timeout seconds as a float", [("set_timeout", 1.5), the_timeout], [None, seconds(1.5)]
    ),
    Case("set_timeout an int", [("set_timeout", 3), the_timeout], [TypeError, seconds(NOW)]),
    Case(
        "timeout has no setter",
        [lambda store: setattr(store, "timeout", seconds(1))],
        [AttributeError],
    ),
    Case("set str, get bytes", [("set", "a", "é"), ("get", "a")], [None, "é".encode()]),
    Case("set bytes", [("set", "a", b"\xff\0"), ("get", "a")], [None, b"\xff\0"]),
    Case("set empty", [("set", "a", b""), ("get", "a"), ("check", ["a"])], [None, b"", True]),
    Case("set bytearray", [("set", "a", bytearray(b"1")), ("get", "a")], [None, b"1"]),
    Case("set over", [("set", "a", "1"), ("set", "a", "22"), ("get", "a")], [None, None, b"22"]),
    Case("set large", [("set", "a", LARGE), ("get", "a")], [None, LARGE]),
    Case(
        "set a list, an int, None",
        [("set", "a", [1, 2]), ("set", "a", 1), ("set", "a", None)],
        [TypeError] * 3,
    ),
    Case("set a memoryview", [("set", "a", memoryview(b"1"))], [TypeError]),
    Case("key of bytes", [("set", b"a", "1"), ("get", "a"), ("get", b"a")], [None, b"1", b"1"]),
    Case("key empty", [("set", "", "1"), ("get", "")], [None, b"1"]),
    Case(
        "key with a slash, a NUL and é", [("set", "/a//\0é", "1"), ("get", "/a//\0é")], [None, b"1"]
    ),
    Case("key an int, None", [("set", 1, "1"), ("get", None), ("check", [1])], [TypeError] * 3),
    Case("get what is not there", [("get", "x")], [dist.DistStoreError]),
    Case("add", [("add", "n", 3), ("add", "n", -5), ("get", "n")], [3, -2, b"-2"]),
    Case(
        "add to digits that were set",
        [("set", "n", "41"), ("add", "n", 1), ("get", "n")],
        [None, 42, b"42"],
    ),
    Case("add 0 to nothing", [("add", "n", 0), ("get", "n")], [0, b"0"]),
    Case("add True", [("add", "n", True)], [1]),
    Case(
        "add the most and the least",
        [("add", "n", 2**63 - 1), ("add", "m", -(2**63))],
        [2**63 - 1, -(2**63)],
    ),
    Case("add a float, a str", [("add", "n", 1.5), ("add", "n", "1")], [TypeError, TypeError]),
    Case("add more than 64 bits", [("add", "n", 2**63)], [TypeError]),
    Case("check nothing", [("check", [])], [True]),
    Case(
        "check",
        [("check", ["a"]), ("set", "a", "1"), ("check", ["a"]), ("check", ["a", "b"])],
        [False, None, True, False],
    ),
    Case(
        "check twice the same, a tuple",
        [("set", "a", "1"), ("check", ["a", "a"]), ("check", ("a",))],
        [None, True, True],
    ),
    Case("check a str", [("check", "a")], [TypeError]),
    Case("wait for nothing", [("wait", [])], [None]),
    Case("wait for what is there", [("set", "a", ""), ("wait", ["a"])], [None, None]),
    Case(
        "wait for one that is not",
        [("set", "a", ""), ("wait", ["a", "b"])],
        [None, dist.DistStoreError],
    ),
    Case(
        "wait with a timeout",
        [("wait", ["a"], seconds(0.1)), ("wait", ["a"], 0.1)],
        [dist.DistStoreError] * 2,
    ),
    Case("compare_set creates", [("compare_set", "a", "", "n"), ("get", "a")], [b"n", b"n"]),
    Case(
        "compare_set on nothing", [("compare_set", "a", "x", "n"), ("check", ["a"])], [b"x", False]
    ),
    Case(
        "compare_set large on nothing",
        [("compare_set", "a", LARGE, "n"), ("check", ["a"])],
        [LARGE, False],
    ),
    Case(
        "compare_set equal",
        [("set", "a", "x"), ("compare_set", "a", "x", "n"), ("get", "a")],
        [None, b"n", b"n"],
    ),
    Case(
        "compare_set differs",
        [("set", "a", "x"), ("compare_set", "a", "y", "n"), ("get", "a")],
        [None, b"x", b"x"],
    ),
    Case(
        "compare_set '' on something",
        [("set", "a", "x"), ("compare_set", "a", "", "n"), ("get", "a")],
        [None, b"x", b"x"],
    ),
    Case(
        "compare_set '' on an empty value",
        [("set", "a", ""), ("compare_set", "a", "", "n"), ("get", "a")],
        [None, b"n", b"n"],
    ),
    Case(
        "compare_set something on an empty value",
        [("set", "a", ""), ("compare_set", "a", "x", "n")],
        [None, b""],
    ),
    Case(
        "compare_set bytes",
        [("set", "a", b"\xff"), ("compare_set", "a", b"\xff", b"\xfe"), ("get", "a")],
        [None, b"\xfe", b"\xfe"],
    ),
    Case(
        "compare_set large",
        [("set", "a", LARGE), ("compare_set", "a", LARGE, LARGE + b"y"), ("get", "a")],
        [None, *[LARGE + b"y"] * 2],
    ),
    Case(
        "compare_set large that differs",
        [("set", "a", LARGE), ("compare_set", "a", LARGE + b"y", "n")],
        [None, LARGE],
    ),
    Case(
        "compare_set small on large",
        [("set", "a", LARGE), ("compare_set", "a", "x", "n"), ("get", "a")],
        [None, LARGE, LARGE],
    ),
    Case(
        "delete_key",
        [("delete_key", "a"), ("set", "a", "1"), ("delete_key", "a"), ("check", ["a"])],
        [False, None, True, False],
    ),
    Case("num_keys", [("num_keys",), ("set", "a", "1"), ("num_keys",)], [0, None, 1]),
    Case("list_keys", [("set", "a", "1"), ("list_keys",)], [None, ["a"]], prefixed=False),
    Case(
        "append",
        [("append", "a", "x"), ("append", "a", b"\xff"), ("get", "a")],
        [None, None, b"x\xff"],
    ),
    Case(
        "append nothing", [("append", "a", ""), ("check", ["a"]), ("get", "a")], [None, True, b""]
    ),
    Case(
        "append to a number",
        [("add", "a", 4), ("append", "a", "2"), ("get", "a"), ("add", "a", 1)],
        [4, None, b"42", 43],
    ),
    Case(
        "append to what is large",
        [("set", "a", LARGE), ("append", "a", "y"), ("get", "a")],
        [None, None, LARGE + b"y"],
    ),
    Case(
        "append what is large, then what is not",
        [("append", "a", "y"), ("append", "a", LARGE), ("append", "a", "!"), ("get", "a")],
        [None, None, None, b"y" + LARGE + b"!"],
    ),
    Case(
        "append until it is large, then compare_set",
        [*[("append", "a", LARGE[:50_000])] * 2, ("compare_set", "a", LARGE, "n"), ("get", "a")],
        [None, None, b"n", b"n"],
    ),
    Case("has_extended_api", [("has_extended_api",)], [True]),
    Case(
        "multi_set, multi_get",
        [("multi_set", ["a", "b"], ["1", b"\xff"]), ("multi_get", ["b", "a", "a"])],
        [None, [b"\xff", b"1", b"1"]],
    ),
    Case(
        "multi_set, multi_get large",
        [("multi_set", ["a", "b"], [LARGE, "1"]), ("multi_get", ["a", "b"])],
        [None, [LARGE, b"1"]],
    ),
    Case("multi_set, multi_get nothing", [("multi_set", [], []), ("multi_get", [])], [None, []]),
    Case(
        "multi_get of one that is not there",
        [("set", "a", "1"), ("multi_get", ["a", "b"])],
        [None, dist.DistStoreError],
    ),
    Case(
        "a queue",
        [
            ("queue_len", "q"),
            ("queue_push", "q", "1"),
            ("queue_push", "q", b""),
            ("queue_len", "q"),
            ("queue_pop", "q"),
            ("queue_pop", "q"),
        ],
        [0, None, None, 2, b"1", b""],
        prefixed=False,
    ),
    Case(
        "an empty queue",
        [("queue_pop", "q", False), ("queue_pop", "q")],
        [dist.QueueEmptyError, dist.DistStoreError],
        prefixed=False,
    ),
    Case(
        "a queue is no key to list, count or delete",
        [
            ("queue_push", "q", "1"),
            ("list_keys",),
            ("num_keys",),
            ("delete_key", "q"),
            ("queue_len", "q"),
            ("queue_pop", "q", False),
        ],
        [None, [], 0, False, 1, b"1"],
        prefixed=False,
    ),
    Case(
        "a key is no queue",
        [("set", "q", "1"), ("queue_len", "q"), ("queue_pop", "q", False)],
        [None, 0, dist.QueueEmptyError],
        prefixed=False,
    ),
    Case("barrier of one", [("barrier", "b", 1)], [None]),
    Case("barrier with a timeout", [("barrier", "b", 2, seconds(0.1))], [dist.DistStoreError]),
    Case(
        "barrier with the store's timeout",
        [("barrier", "b", 2)],
        [dist.DistStoreError],
        prefixed=False,
    ),
    Case(
        "barrier: whoever gave up has arrived, and a name is used once",
        [("barrier", "b", 2, seconds(0.1))] * 3,
        [dist.DistStoreError, None, None],
    ),
    Case(
        "barrier by keywords",
        [lambda store: store.barrier(key="b", world_size=1, timeout=None)],
        [None],
    ),
    Case(
        "clone",
        [
            lambda store: store.clone().timeout,
            lambda store: store.clone().set("a", "1"),
            ("get", "a"),
        ],
        [seconds(NOW), None, b"1"],
    ),
]


# torch's PrefixStore does not hand everything on to a store written in Python.
KINDS = [
    (case, kind)
    for case in SAME
    for kind in ("tcp", "hash", "ours", "prefix")
    if case.prefixed or kind != "prefix"
]


@pytest.mark.parametrize(
    ("case", "kind"), KINDS, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_all_stores_answer_alike(case: Case, kind: str, stores: Callable[[str], Any]) -> None:
    assert outcomes(stores(kind), *case.calls) == case.gives


class Difference(NamedTuple):
    name: str
    calls: list[Call]
    tcp: list[Any]
    hash: list[Any]
    ours: list[Any]
    guide: str  # what the guide says about it


DIFFERENT = [
    Difference(
        "add to text",
        [("set", "n", "abc"), ("add", "n", 1), ("get", "n")],
        [None, dist.DistNetworkError, dist.DistNetworkError],
        [None, ValueError, b"abc"],
        [None, dist.DistStoreError, b"abc"],
        "TCPStore drops the connection",
    ),
    Difference(
        "add to an empty value",
        [("set", "n", ""), ("add", "n", 1), ("get", "n")],
        [None, dist.DistNetworkError, dist.DistNetworkError],
        [None, 1, b"1"],
        [None, dist.DistStoreError, b""],
        "TCPStore drops the connection",
    ),
    Difference(
        "add to what only begins with digits",
        [("set", "n", " 41x"), ("add", "n", 1)],
        [None, 42],
        [None, 42],
        [None, dist.DistStoreError],
        'TCPStore reads `" 41x"` as 41',
    ),
    Difference(
        "add past 64 bits",
        [("add", "n", 2**63 - 1), ("add", "n", 1), ("get", "n")],
        [2**63 - 1, -(2**63), b"-9223372036854775808"],
        [2**63 - 1, -(2**63), b"-9223372036854775808"],
        [2**63 - 1, dist.DistStoreError, b"9223372036854775807"],
        "goes on at the other end of 64 bits",
    ),
    Difference(
        "a queue as a key",
        [("queue_push", "q", "1"), ("check", ["q"]), ("wait", ["q"]), ("queue_pop", "q")],
        [None, True, None, b"1"],
        [None, True, None, b"1"],
        [None, False, dist.DistStoreError, b"1"],
        "`check` and `wait` do not see queues",
    ),
    Difference(
        "get of a queue",
        [("queue_push", "q", "1"), ("get", "q"), ("queue_pop", "q")],
        [None, b"", b"1"],
        [None, dist.DistStoreError, b"1"],
        [None, dist.DistStoreError, b"1"],
        "`check` and `wait` do not see queues",
    ),
    Difference(
        "blocking queue_pop beside a key of that name",
        [("set", "q", "1"), ("queue_pop", "q")],
        [None, dist.QueueEmptyError],
        [None, dist.QueueEmptyError],
        [None, dist.DistStoreError],
        "beside a key of that name does not wait",
    ),
    Difference(
        "multi_set of more values than keys",
        [("multi_set", ["a"], ["1", "2"])],
        [dist.DistStoreError],
        [None],
        [dist.DistStoreError],
        "",  # as TCPStore
    ),
    Difference(
        "barrier of nobody",
        [("barrier", "b", 0)],
        [None],
        [dist.DistStoreError],
        [dist.DistStoreError],
        "a barrier of 0",
    ),
    Difference(
        "key of bytes that are no text",
        [("set", b"\xff", "1"), ("delete_key", b"\xff")],
        [None, True],
        [None, True],
        [UnicodeDecodeError, UnicodeDecodeError],
        "a key that is no UTF-8 text",
    ),
    Difference(
        "a key longer than 4 KiB",
        [("set", "k" * 5000, "1"), ("get", "k" * 5000)],
        [None, b"1"],
        [None, b"1"],
        [dist.DistStoreError, dist.DistStoreError],
        "a key over 4 KiB",
    ),
    Difference(
        "a value over 8 MiB",
        [
            lambda store: tried(store.set, "a", bytes(9 << 20)) and None,
            lambda store: len(store.get("a")),
        ],  # its set may notice, too
        [None, dist.DistNetworkError],
        [None, 9 << 20],
        [None, 9 << 20],
        "a value over 8 MiB",
    ),
]


@pytest.mark.parametrize("kind", ["tcp", "hash", "ours"])
@pytest.mark.parametrize("case", DIFFERENT, ids=lambda case: case.name)
def test_what_differs_is_known(case: Difference, kind: str, stores: Callable[[str], Any]) -> None:
    assert outcomes(stores(kind), *case.calls) == getattr(case, kind)


@pytest.mark.parametrize("case", DIFFERENT, ids=lambda case: case.name)
def test_the_guide_says_what_differs(case: Difference) -> None:
    assert case.guide in GUIDE.read_text("utf-8")


def test_a_timeout_of_zero_does_not_wait(stores: Callable[[str], Any]) -> None:
    # HashStore waits for ever then, and TCPStore does with a negative one: neither can be shown
    # here.
    for kind in ("tcp", "ours"):
        with pytest.raises(dist.DistStoreError, match="wait timeout after 0ms"):
            stores(kind).wait(["a"], seconds(0))
    with pytest.raises(dist.DistStoreError, match="wait timeout after 0ms"):
        stores("ours").wait(["a"], seconds(-1))


def test_the_timeout_is_torchs_own_until_it_is_set(client: rallypoint.Store) -> None:
    store = client.c10d()
    assert store.timeout == dist.HashStore().timeout == seconds(300)
    clone = store.clone()
    clone.set_timeout(seconds(5))
    dist.PrefixStore("p", store).set_timeout(seconds(9))  # by C++
    assert (store.timeout, clone.timeout) == (seconds(9), seconds(5))


def test_a_timeout_says_how_long_and_for_what(stores: Callable[[str], Any]) -> None:
    store = stores("ours")
    store.set("there", "")
    with pytest.raises(dist.DistStoreError) as caught:
        store.wait(["there", "a", "b"], seconds(0.05))
    assert str(caught.value) == "wait timeout after 50ms, keys: a, b"
    with pytest.raises(dist.DistStoreError, match=r"^wait timeout after 200ms, keys: a$"):
        store.multi_get(["there", "a"])
    with pytest.raises(
        dist.DistStoreError, match=r"^wait timeout after 200ms, keys: b/last_member$"
    ):
        store.barrier("b", 2)


def test_torchs_own_test_of_python_stores(client: rallypoint.Store) -> None:
    from torch._C._distributed_c10d import _test_python_store

    _test_python_store(client.c10d())
    _test_python_store(dist.PrefixStore("p", client.c10d()))


# --- waiting ---


class Waiting:
    """A call in a thread of its own."""

    def __init__(self, does: Callable[..., Any], *args: Any) -> None:
        self._result: Any = None
        self._thread = threading.Thread(
            target=lambda: setattr(self, "_result", tried(does, *args)), daemon=True
        )
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(SOON)
        assert not self._thread.is_alive(), "it still waits"
        return self._result


@pytest.mark.parametrize("kind", ["tcp", "hash", "ours", "prefix"])
def test_what_waits_goes_on_when_the_key_comes(kind: str, stores: Callable[[str], Any]) -> None:
    store = stores(kind)

    def other() -> Any:
        clone = store.clone()
        clone.set_timeout(seconds(SOON))
        return clone

    calls: list[tuple[Callable[[Any], Any], Any]] = [
        (lambda s: s.get("a"), b"1"),
        (lambda s: s.wait(["a", "b"]), None),
        (lambda s: s.multi_get(["b", "a"]), [b"2", b"1"]),
        (lambda s: s.barrier("both", 2), None),
    ]
    waiting = [Waiting(call, other()) for call, _ in calls]
    store.set("a", "1")
    store.set("b", "2")
    store.barrier("both", 2, seconds(SOON))
    assert [each.result() for each in waiting] == [result for _, result in calls]


# Without "tcp": a client of torch's TCPStore was once not woken within 60 s.
@pytest.mark.parametrize("kind", ["hash", "ours"])
def test_a_value_of_a_queue_goes_to_one_that_waits(kind: str, stores: Callable[[str], Any]) -> None:
    store = stores(kind)

    def taker() -> Any:
        clone = store.clone()
        clone.set_timeout(seconds(SOON))
        return clone

    waiting = [Waiting(taker().queue_pop, "q") for _ in range(2)]
    store.queue_push("q", "1")
    store.queue_push("q", "2")
    assert sorted(each.result() for each in waiting) == [b"1", b"2"]
    assert store.queue_len("q") == 0


def test_a_thread_that_waits_does_not_hold_up_another(stores: Callable[[str], Any]) -> None:
    def attempt(store: Any) -> Any:
        store.set_timeout(seconds(NOW))
        store.delete_key("a")
        waiting = Waiting(store.get, "a")
        store.add(
            "other", 1
        )  # in TCPStore this returns when the other thread has given up, if that came first
        store.set("a", "1")
        return waiting.result()

    tcp = stores("tcp")
    assert any(
        attempt(tcp) is dist.DistStoreError for _ in range(300)
    )  # who comes first is chance, and on a busy machine mostly the set
    ours = stores("ours")
    ours.set_timeout(seconds(SOON))
    waiting = Waiting(ours.get, "a")
    began = time.monotonic()
    ours.set("a", "1")
    assert waiting.result() == b"1"
    assert time.monotonic() - began < SOON / 2


@pytest.mark.parametrize("through", ["ours", "prefix"])
def test_a_signal_handler_runs_while_it_waits(through: str, stores: Callable[[str], Any]) -> None:
    class Rang(Exception):
        pass

    def ring(number: int, frame: object) -> None:
        raise Rang

    store = stores(through)
    store.set_timeout(seconds(SOON))
    before = signal.signal(signal.SIGALRM, ring)
    began = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Rang):
            store.get("a")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < SOON / 2
    store.set("a", "1")
    assert store.get("a") == b"1"


def test_many_threads_count_exactly(stores: Callable[[str], Any]) -> None:
    store = stores("ours")
    waiting = [Waiting(lambda: [store.add("n", 1) for _ in range(100)]) for _ in range(8)]
    assert sorted(number for each in waiting for number in each.result()) == list(range(1, 801))


def test_compare_set_lets_one_of_many_win(stores: Callable[[str], Any]) -> None:
    store = stores("ours")
    for expected in ("", "large", "x" * 100_000):
        if expected:
            store.set("a", expected)
        waiting = [
            Waiting(store.compare_set, "a", expected, f"winner {index}") for index in range(8)
        ]
        assert {each.result() for each in waiting} == {store.get("a")}


def test_append_loses_nothing_among_threads_also_when_it_becomes_large(
    stores: Callable[[str], Any],
) -> None:
    store = stores("ours")
    store.set("a", b"." * 70_000)
    waiting = [
        Waiting(lambda letter=letter: [store.append("a", letter) for _ in range(20)])
        for letter in "abcd"
    ]
    for each_of in waiting:
        assert each_of.result() == [None] * 20
    value = store.get("a")
    assert len(value) == 70_080
    assert all(value.count(letter) == 20 for letter in (b"a", b"b", b"c", b"d"))


# --- whose keys, and how long ---


def test_its_keys_are_under_its_prefix_and_nothing_else_is(client: rallypoint.Store) -> None:
    mine, other = client.c10d(), client.c10d(prefix="other/")
    client["c"] = 1
    mine.set("a", "1")
    other.set("a", "2")
    assert client.keys() == ["c", "c10d/a", "other/a"]
    assert (client["c10d/a"], mine.get("a"), other.get("a")) == (b"1", b"1", b"2")
    assert (mine.num_keys(), mine.list_keys(), other.list_keys()) == (1, ["a"], ["a"])


def test_a_value_that_no_c10d_store_wrote_is_named(client: rallypoint.Store) -> None:
    client["c10d/a"] = {"b": 1}
    store = client.c10d()
    calls: list[Callable[[], Any]] = [
        lambda: store.get("a"),
        lambda: store.compare_set("a", "", "x"),
        lambda: store.multi_get(["a"]),
    ]
    for call in calls:
        with pytest.raises(dist.DistStoreError, match="a dict"):
            call()
    with pytest.raises(dist.DistStoreError, match="wrong-type"):
        store.append("a", "1")
    assert client["c10d/a"] == {"b": 1}


def test_torch_is_not_imported_before_it_is_asked_for() -> None:
    program = "import sys, rallypoint.store.c10d; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_it_introduces_itself(client: rallypoint.Store) -> None:
    assert re.fullmatch(
        r"<C10dStore 'c10d/' of <Store tcp://.*>, timeout 300 s>", repr(client.c10d())
    )
    assert isinstance(client.c10d(), dist.Store)
    assert type(client.c10d()) is type(client.c10d())


def test_it_lives_as_long_as_torch_may_ask_it(client: rallypoint.Store) -> None:
    # torch's C++ keeps half of it: with nobody else to refer to the other half, a store that is not
    # ours fails here.
    class Plain(dist.Store):  # type: ignore[misc]
        def set(self, key: str, value: bytes) -> None: ...

    orphan = dist.PrefixStore("p", Plain())
    store = dist.PrefixStore("p", client.c10d())
    clone = store.clone()
    gc.collect()
    with pytest.raises(RuntimeError, match="Not implemented"):
        orphan.set("a", "1")
    clone.set("a", "1")
    assert store.get("a") == b"1"


def test_a_forked_child_goes_on_with_a_session_of_its_own(client: rallypoint.Store) -> None:
    store = client.c10d()
    assert store.add("n", 1) == 1
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if [store.add("n", 1) for _ in range(50)] and store.get("n") else 3)
        except BaseException:
            os._exit(4)
    for _ in range(50):
        store.add("n", 1)
    assert os.waitpid(child, 0)[1] == 0
    assert store.get("n") == b"101"


@pytest.mark.torch
def test_it_is_an_argument_of_a_process(client: rallypoint.Store) -> None:
    store = client.c10d("mine/")
    store.set_timeout(seconds(12))
    process = multiprocessing.get_context("spawn").Process(target=add_and_tell, args=(store,))
    process.start()
    process.join(SOON)
    assert process.exitcode == 0
    assert (store.get("n"), store.get("timeout")) == (b"1", b"12.0")


# --- when nobody answers ---


def test_a_set_that_returned_has_happened() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    theirs = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    theirs.set("a", "1")
    del server
    gc.collect()
    assert tried(theirs.set, "a", "2") is None  # it says nothing, and the value is lost
    assert tried(theirs.get, "a") is dist.DistNetworkError

    started = rallypoint.serve()
    with rallypoint.connect(started.address, secret=started.secret, timeout=2.0, ttl=2.0) as client:
        ours = client.c10d()
        ours.set("a", "1")
        started.stop()
        calls: list[Callable[[], Any]] = [
            lambda: ours.set("a", "2"),
            lambda: ours.get("a"),
            lambda: dist.PrefixStore("p", ours).add("n", 1),
        ]
        for call in calls:
            with pytest.raises(dist.DistNetworkError) as caught:
                call()
            assert isinstance(caught.value.__cause__, rallypoint.RallypointError)
            assert caught.value.__cause__.code in str(caught.value)


def test_who_waits_is_told_when_the_server_closes() -> None:
    started = rallypoint.serve()
    with (
        rallypoint.connect(started.address, secret=started.secret) as client,
        rallypoint.connect(started.address, secret=started.secret) as watcher,
    ):
        ours = client.c10d()
        waiting = Waiting(ours.get, "a")
        deadline = time.monotonic() + SOON
        while not watcher.status()["waiting"]:
            assert time.monotonic() < deadline
        started.stop()
        assert waiting.result() is dist.DistNetworkError


FROZEN = """
import signal, sys, rallypoint
server = rallypoint.serve()
print(server.address, server.secret.hex(), flush=True)
sys.stdin.read()
"""


def test_a_frozen_server_costs_no_more_than_the_timeout() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", FROZEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            address, secret = process.stdout.readline().split()
            with rallypoint.connect(address, secret=bytes.fromhex(secret), timeout=2.0) as client:
                store = client.c10d()
                store.set("a", "1")
                store.set_timeout(seconds(2))
                process.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED)
                calls: list[Callable[[], Any]] = [
                    lambda: store.get("b"),
                    lambda: store.add("n", 1),
                    lambda: store.set("a", "2"),
                ]
                for call in calls:
                    began = time.monotonic()
                    with pytest.raises(dist.DistNetworkError, match="store-timeout"):
                        call()
                    assert (
                        1.9 < time.monotonic() - began < 20
                    )  # 2.2 s on a machine that is not busy
                process.send_signal(signal.SIGCONT)
                assert store.get("a") in (b"1", b"2")
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("operation", "given", "result"),
    [("get", "a", b"1"), ("append", "l", None), ("multi_get", ["a", "a"], [b"1", b"1"])],
)
def test_a_process_that_stood_still_goes_on(
    server: rallypoint.Server, client: rallypoint.Store, operation: str, given: Any, result: Any
) -> None:
    client.c10d().set("a", "1")
    before = client.status()["sessions"]
    child = os.fork()
    if child == 0:
        try:
            store = rallypoint.connect(server.address, secret=server.secret, ttl=1.0).c10d()
            store.get("a")
            os.kill(os.getpid(), signal.SIGSTOP)
            more = ("x",) if operation == "append" else ()
            told = [tried(getattr(store, operation), given, *more) for _ in range(2)]
            os._exit(0 if told == [result] * 2 else 3)
        except BaseException:
            os._exit(4)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    deadline = time.monotonic() + SOON
    while client.status()["sessions"] > before:
        assert time.monotonic() < deadline, "its session has not ended"
    os.kill(child, signal.SIGCONT)
    assert os.waitpid(child, 0)[1] == 0
    assert "| a process stood still" in GUIDE.read_text("utf-8")


# --- process groups ---

PROGRAM = '''
"""argv: for each job what to do, how many ranks, and its store's address and secret. Imports torch once and forks the ranks."""
import gc, os, sys, traceback
from datetime import timedelta
import torch, torch.distributed as dist
import rallypoint

torch.set_num_threads(1)
if "groups_and_ddp" in sys.argv:
    import torch._dynamo  # DistributedDataParallel does: once, and not in each rank


def connect(rank):
    return rallypoint.connect(address, secret=secret)


def begin(rank, store, **options):
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, **options)
    gc.collect()


def groups_and_ddp(rank):
    groups(rank, ddp)


def groups(rank, train=lambda rank: None):
    store = connect(rank)
    begin(rank, store.c10d())
    tensor = torch.full((1000,), float(rank + 1))
    dist.all_reduce(tensor)
    assert tensor.eq(size * (size + 1) / 2).all()
    groups = [dist.new_group(list(range(start, start + 2))) for start in range(0, size, 2)]
    mine = torch.tensor([rank])
    dist.all_reduce(mine, group=groups[rank // 2])
    assert mine.item() == 4 * (rank // 2) + 1
    things = [{"from": 0}] if rank == 0 else [None]
    dist.broadcast_object_list(things)
    assert things == [{"from": 0}]
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    train(rank)
    dist.destroy_process_group()

    begin(rank, store.c10d(prefix="second/"))
    dist.barrier()
    dist.destroy_process_group()
    begin(rank, dist.PrefixStore("third", store.c10d()), timeout=timedelta(seconds=60))
    dist.all_reduce(mine)
    if rank == 0:
        assert {key.partition("/")[0] for key in store.keys()} == {"c10d", "second"}, store.keys()
    dist.barrier()
    dist.destroy_process_group()


def ddp(rank):
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    weights = [torch.empty(2, 4) for _ in range(size)]
    dist.all_gather(weights, model.module.weight.detach())
    assert all(torch.equal(weights[0], other) for other in weights)


def absent_at_monitored_barrier(rank):
    begin(rank, connect(rank).c10d())
    if rank == 1:
        connect(rank).wait("told", timeout=60)  # alive, and not at the barrier
        return
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=1))
    except RuntimeError as error:
        assert "Rank 1 failed to pass monitoredBarrier" in str(error), error
    else:
        raise AssertionError("it passed")
    finally:
        connect(rank)["told"] = True


def absent_at_start(rank):
    if rank == 1:
        return
    try:
        begin(rank, connect(rank).c10d(), timeout=timedelta(seconds=1))
    except dist.DistStoreError as error:
        assert str(error) == "wait timeout after 1000ms, keys: 0//cpu//0/1", error  # its end is who is missing
    else:
        raise AssertionError("it began")


def nccl(rank):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=connect(rank).c10d(), rank=rank, world_size=size, device_id=torch.device("cuda", rank))
    tensor = torch.ones(1000, device="cuda")
    dist.all_reduce(tensor)
    assert tensor.eq(size).all()
    group = dist.new_group(list(range(size)))
    dist.all_reduce(tensor, group=group)
    dist.barrier()
    dist.destroy_process_group()


gc.freeze()  # the ranks' rounds of the collector need not look at torch
failed = {}
for what, size, address, secret in zip(*(sys.argv[first::4] for first in range(1, 5))):
    size, secret, children = int(size), bytes.fromhex(secret), []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                globals()[what](rank)
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if statuses != [0] * size:
        failed[what] = statuses
sys.exit(f"exit statuses of the ranks: {failed}" if failed else 0)
'''


class Ranks(NamedTuple):
    """What ranks do over the store of a server."""

    what: str
    size: int
    server: Server | rallypoint.Server

    def words(self) -> list[str]:
        return [self.what, str(self.size), self.server.address, self.server.secret.hex()]


def run_ranks(*jobs: Ranks) -> None:
    whole = os.environ.get("RALLYPOINT_WHOLE_TORCH")
    environment = {
        **os.environ,
        "PYTHONPATH": python_path() if whole else python_path(TORCH_WITHOUT_COMPILER),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RES_OPTIONS": "timeout:1 attempts:1",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *(word for job in jobs for word in job.words())],
        env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.torch
@pytest.mark.gpu
def test_process_groups_of_nccl() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        pytest.skip("this torch has no CUDA or no NCCL")
    server = rallypoint.serve()
    try:
        run_ranks(Ranks("nccl", torch.cuda.device_count(), server))
    finally:
        server.stop()


def _listening() -> set[str]:
    """Sockets of this process that listen for TCP, by inode."""
    mine = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            mine.add(os.readlink(f"/proc/self/fd/{number}"))
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        if os.path.exists(table):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    found.add(f"socket:[{fields[9]}]")
    return mine & found


def _local_server(folder: Path) -> Server:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path = str(folder / "s")
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(64)
    server = Server(listeners=[listener])
    server.start()
    assert server.address == f"unix://{path}"
    return server


ABSENT = ("absent_at_monitored_barrier", "absent_at_start")


@pytest.mark.torch
def test_process_groups() -> None:
    """One of them opens over a Unix socket, with no port of ours."""
    with contextlib.ExitStack() as stack:
        jobs = []
        # the groups are of two
        for what, size in {"groups_and_ddp": 4, **dict.fromkeys(ABSENT, 2)}.items():
            server = rallypoint.serve()
            stack.callback(server.stop)
            jobs.append(Ranks(what, size, server))
        before = _listening()
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))  # of a short name
        local = _local_server(Path(folder))
        stack.callback(local.stop)
        run_ranks(Ranks("groups", 2, local), *jobs)
        assert _listening() == before


# --- the guide ---


class Row(NamedTuple):
    old: str
    new: str


def rows() -> list[Row]:
    """The guide's table of operations: the rows whose first two cells are nothing but code."""
    found = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", GUIDE.read_text("utf-8"), re.MULTILINE)
    return [Row(*codes) for codes in found]


def test_the_guide_has_every_operation_of_tcpstore() -> None:
    text = " ".join(row.old for row in rows())
    missing = [
        name
        for name in dir(dist.TCPStore)
        if not name.startswith("_") and not re.search(rf"\b{name}\b", text)
    ]
    assert not missing


def test_every_line_of_the_guide_runs() -> None:
    names: dict[str, Any] = {
        "timedelta": datetime.timedelta,
        "rallypoint": rallypoint,
        "TCPStore": dist.TCPStore,
        "dist": dist,
    }
    old, new = dict(names), dict(names)
    try:
        for row in rows():
            exec(row.old.replace("29500", "0"), old)  # 29500 may be another's
            exec(row.new, new)
        assert len(rows()) >= 20
    finally:
        new["store"].close()
        new["other"].close()
        new["server"].stop()


def _blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)


@pytest.mark.torch
def test_the_programs_of_the_guide_run(tmp_path: Path) -> None:
    blocks = _blocks()
    assert blocks
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    for block in blocks:
        (tmp_path / "script.py").write_text(block)
        command = [
            sys.executable,
            "-m",
            "rallypoint",
            "run",
            "-n",
            "2",
            "--run-dir",
            str(tmp_path / "run"),
            "script.py",
        ]
        done = subprocess.run(
            command,
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"
