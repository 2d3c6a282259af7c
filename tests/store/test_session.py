"""One store object in several threads: each call ends by itself, and one thread's trouble is not
the others'.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rallypoint
from rallypoint import ABSENT, Server, SessionLost, Store, StoreTimeout, UsageError
from rallypoint.clock import Clock
from rallypoint.testing import ChaosProxy, Network

from .live import Thread, output_of
from .processes import ServerProcess
from .situations import LONG, Interruption, alarm, eventually, our_threads, start

LARGE = b"L" * 3_000_000


@pytest.fixture
def server() -> Iterator[Server]:
    with rallypoint.serve(max_bytes="256MiB") as made:
        yield made


@pytest.fixture(params=[True, False], ids=["shared-memory", "tcp"])
def store(server: Server, request: pytest.FixtureRequest) -> Iterator[Store]:
    with rallypoint.connect(
        server.address, secret=server.secret, same_host=request.param, timeout=LONG, ttl=LONG
    ) as made:
        yield made


@pytest.fixture
def other(server: Server) -> Iterator[Store]:
    with rallypoint.connect(server.address, secret=server.secret, timeout=LONG) as made:
        yield made


# --- threads ---


def test_a_wait_goes_on_when_one_of_another_thread_is_over(store: Store, other: Store) -> None:
    """It does not depend on a sign of life: the lease is long."""

    def short() -> None:
        with pytest.raises(StoreTimeout):
            store.wait("never", timeout=0.3)
        other["long"] = 1

    first = start(short)
    eventually(lambda: other.status()["waiting"] == 1 or "long" in other)  # or it is over already
    clock = Clock()
    second = Thread(store.wait, "long", LONG)
    first()
    assert second.result() == 1
    assert clock.elapsed() < LONG / 5


def test_a_wait_goes_on_when_a_handler_ends_another_one(store: Store, other: Store) -> None:
    def interrupt() -> None:
        raise Interruption

    waiting = Thread(store.wait, "b", LONG)
    eventually(lambda: other.status()["waiting"] == 1)
    clock = Clock()
    with alarm(0.1, interrupt), pytest.raises(Interruption):
        store.wait("a", timeout=LONG)
    other["b"] = 2
    assert waiting.result() == 2
    assert clock.elapsed() < LONG / 5
    eventually(lambda: other.status()["waiting"] == 0)


def test_a_hundred_waiters_and_one_that_works(store: Store, other: Store) -> None:
    waiters = [Thread(store.wait, f"k{index}", LONG) for index in range(100)]
    eventually(lambda: other.status()["waiting"] == 100)
    for count in range(200):
        assert store.add("n") == count + 1
    other.set_many({f"k{index}": index for index in range(100)})
    assert [waiter.result() for waiter in waiters] == list(range(100))
    assert other.status()["waiting"] == 0


def test_a_barrier_of_one_thread_and_large_values_of_others(server: Server, other: Store) -> None:
    with rallypoint.connect(server.address, secret=server.secret, timeout=LONG) as store:
        large = b"L" * 100_000
        for _ in range(15):
            waiting = start(lambda: store.barrier("b", 2, LONG))
            reading = [Thread(store.wait, f"w{index}", LONG) for index in range(3)]
            for index in range(3):
                other[f"w{index}"] = large
            assert [thread.result() for thread in reading] == [large] * 3
            other.barrier("b", 2, LONG)
            waiting()
            for index in range(3):
                del other[f"w{index}"]
        assert store.statistics()["reconnects"] == 0


TRACED = """
import random, sys, threading, time
import rallypoint
from rallypoint.store.client import client, connection, keepalive, lease, session

files = {module.__file__ for module in (client, connection, keepalive, lease, session)}
chance = random.Random(int(sys.argv[1]))

def line(frame, event, argument):
    if event == "line":
        time.sleep(0.0003 if chance.random() < 0.03 else 0)  # another thread's turn
    return line

def count(store, answers):
    for _ in range(100):
        answers.append(store.add("n", 1))

with rallypoint.serve() as server, rallypoint.connect(server.address, secret=server.secret, timeout=60) as store:
    answers = []
    threads = [threading.Thread(target=count, args=(store, answers)) for _ in range(4)]
    trace = lambda frame, event, argument: line if frame.f_code.co_filename in files else None
    threading.settrace(trace)
    for thread in threads:
        thread.start()
    sys.settrace(trace)
    count(store, answers)
    sys.settrace(None)
    for thread in threads:
        thread.join()
    threading.settrace(None)
    print(store["n"], sorted(answers) == list(range(1, 501)))
"""


def test_a_trace_function_in_which_threads_change_loses_nothing() -> None:
    """A debugger's trace function, or coverage's, is a call between any two lines. Two threads once
    took the same number, and the second one got the first one's answer: an `add` was lost without
    an error."""
    assert output_of(TRACED, "1") == ["500 True"]


SWITCHED = """
import sys, threading
import rallypoint

def count(index):
    for _ in range(100):
        with store.lock("l") if index < 2 else nothing:
            answers.append(store.add("n", 1))
        store[f"k{index}"] = store.get(f"k{index}", 0) + 1

class Nothing:
    def __enter__(self): pass
    def __exit__(self, *_): pass

nothing = Nothing()
sys.setswitchinterval(1e-6)
with rallypoint.serve() as server, rallypoint.connect(server.address, secret=server.secret, timeout=60) as store:
    answers = []
    threads = [threading.Thread(target=count, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(store["n"], sorted(answers) == list(range(1, 1601)), {store[f"k{index}"] for index in range(16)})
    asked = store.statistics()["operations"]
    print(asked["Add"], asked["Lock"], asked["Set"])
"""


def test_sixteen_threads_that_change_all_the_time_lose_nothing() -> None:
    assert output_of(SWITCHED) == ["1600 True {100}", "1600 200 1600"]


COMING_AND_GOING = """
import sys, threading
import rallypoint
from rallypoint.testing import Network

begun = threading.Barrier(3)

def others():
    begun.wait()
    while True:
        network.connect().close()

network = Network().__enter__()
kept = [network.connect() for _ in range(20)]
sys.setswitchinterval(1e-6)
for _ in range(2):
    threading.Thread(target=others, daemon=True).start()
begun.wait()
"""


def test_stores_may_come_and_go_while_the_process_ends() -> None:
    """It closes those that are open, while daemon threads go on until then."""
    for _ in range(2):
        assert output_of(COMING_AND_GOING) == []


# --- sessions ---


def test_each_thread_is_told_that_the_session_was_lost_and_goes_on_in_the_next(
    server: Server,
) -> None:
    with contextlib.ExitStack() as stack:
        second = stack.enter_context(rallypoint.serve(max_bytes="16MiB", secret=server.secret))
        proxy = stack.enter_context(ChaosProxy(server.address))
        store = stack.enter_context(
            rallypoint.connect(proxy.address, secret=server.secret, same_host=False, timeout=LONG)
        )
        store["k"] = 1

        def wait() -> SessionLost:
            with pytest.raises(SessionLost) as caught:
                store.wait("never", timeout=LONG)
            assert store.add("n") > 0  # told once
            return caught.value

        waiting = [Thread(wait) for _ in range(8)]
        eventually(lambda: store.status()["waiting"] == 8)
        proxy.retarget(second.address)
        proxy.reset()
        assert {thread.result().outcome for thread in waiting} == {"did not happen"}
        assert store["n"] == 8
        assert store.statistics()["sessions"] == 2


def test_a_lease_is_kept_while_a_handler_stands_in_the_middle_of_sending(server: Server) -> None:
    """Half a value is on its way, and the thread that sends it does something else for longer than
    the lease.
    """
    with (
        ChaosProxy(server.address) as proxy,
        rallypoint.connect(
            proxy.address, secret=server.secret, same_host=False, ttl=2.0, timeout=LONG
        ) as store,
        rallypoint.connect(server.address, secret=server.secret) as other,
    ):
        store.set("mine", 1, ephemeral=True)
        [connection] = proxy.connections

        def handler() -> None:
            connection_is_frozen.heal()
            threading.Event().wait(3.5)
            assert other["mine"] == 1

        connection_is_frozen = connection.freeze(to="server")
        with alarm(0.2, handler):
            store["large"] = LARGE * 10
        assert store["large"] == LARGE * 10
        assert other["mine"] == 1
        assert store.statistics()["sessions"] == 1


def test_a_server_that_was_frozen_reads_before_it_ends_sessions() -> None:
    """The signs of life have come meanwhile, and wait to be read."""
    with (
        ServerProcess() as process,
        rallypoint.connect(process.local, secret=process.secret, ttl=2.0, timeout=LONG) as store,
        rallypoint.connect(process.local, secret=process.secret, ttl=LONG, timeout=LONG) as other,
    ):
        store.set("mine", 1, ephemeral=True)
        for _ in range(2):
            process.stop()
            threading.Event().wait(2.6)  # longer than the lease
            process.go_on()
            assert other["mine"] == 1
            assert store["mine"] == 1
        assert store.statistics()["sessions"] == 1


def test_where_no_thread_could_be_had_the_next_store_tries_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    eventually(lambda: not our_threads())  # of the tests before
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no)
        with pytest.raises(RuntimeError, match="new thread"):
            rallypoint.connect(server.address, secret=server.secret)
    with rallypoint.connect(server.address, secret=server.secret):
        assert our_threads()


def test_the_threads_of_a_store_end_with_it(server: Server) -> None:
    with (
        rallypoint.connect(server.address, secret=server.secret),
        rallypoint.connect(server.address, secret=server.secret),
    ):
        assert our_threads()
    eventually(lambda: not our_threads())


def test_a_log_that_stands_still_holds_up_neither_signs_of_life_nor_a_connection() -> None:
    """A signal handler's exception in the middle of Python's logging leaves its locks to the thread
    in which that was.
    """
    with Network() as network:
        store = network.connect(ttl=1.5, timeout=LONG)
        logging._lock.acquire()  # type: ignore[attr-defined]
        try:
            network.cut()
            eventually(
                lambda: store.statistics()["reconnects"] == 1
            )  # by a thread of ours, which has something for the log
            threading.Event().wait(3.0)
            assert store.add("n") == 1
            assert store.statistics()["sessions"] == 1
        finally:
            logging._lock.release()  # type: ignore[attr-defined]


# --- watching ---


def test_a_watch_that_is_interrupted_while_it_reads_a_large_value(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The changes of one answer are given one by one, each exactly once."""
    changes = store.watch("w/", timeout=LONG)
    store["w/a"] = 1
    store["w/b"] = LARGE
    store["w/c"] = 3
    del store["w/a"]
    real = store.read
    fails = [True, True]

    def read(key: str, **named: Any) -> Any:
        if fails:
            fails.pop()
            raise Interruption
        return real(key, **named)

    monkeypatch.setattr(store, "read", read)
    seen: list[tuple[str, Any]] = []
    while len(seen) < 4:
        try:
            change = next(changes)
        except Interruption:
            continue
        seen.append((change.key, change.value))
    assert seen == [("w/a", 1), ("w/b", LARGE), ("w/c", 3), ("w/a", ABSENT)]
    assert not fails


# --- what is not sent ---


def test_a_request_that_cannot_be_written_down_leaves_nothing(store: Store, other: Store) -> None:
    before = store.statistics()["bytes_sent"]
    for wrong in ("\ud800", 5):
        with pytest.raises((TypeError, ValueError)):
            store.get(wrong)  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        store.add("n", 1 << 63)
    assert store.statistics()["bytes_sent"] == before
    assert store.add("n") == 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda store: store.set("k", 1, fence="x"),
            "fence='x': the token of a lock is an int, not a str",
        ),
        (lambda store: store.set("k", 1, fence=True), "the token of a lock is an int, not a bool"),
        (
            lambda store: store.set("k", 1, ephemeral=1),
            "ephemeral=1: whether the key goes with this session is True or False, not an int",
        ),
        (
            lambda store: store.delete("k", fence=1.5),
            "fence=1.5: the token of a lock is an int, not a float",
        ),
        (
            lambda store: store.update("k", str, fence=b""),
            "the token of a lock is an int, not a bytes",
        ),
        (
            lambda store: store.compare_and_set("k", 1, 2, revision="1"),
            "revision='1': a revision of this store is an int, not a str",
        ),
        (
            lambda store: next(store.watch("", since="1")),
            "since='1': a revision of this store is an int, not a str",
        ),
    ],
)
def test_what_is_no_number_is_not_sent(
    store: Store, call: Callable[[Store], object], said: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        call(store)
    assert store.statistics()["reconnects"] == 0
    assert list(store) == []


def test_a_grant_given_as_a_fence(store: Store) -> None:
    with store.lock("l") as grant:
        with pytest.raises(TypeError, match=r"fence=grant\.token"):
            store.set("k", 1, fence=grant)  # type: ignore[arg-type]
        store.set("k", 1, fence=grant.token)
    with pytest.raises(UsageError, match="fence=-1 is not the token of a lock"):
        store.set("k", 1, fence=-1)


# --- connections


def test_who_waits_for_long_says_by_itself_that_it_lives(server: Server) -> None:
    with rallypoint.connect(server.address, secret=server.secret, ttl=1.0, timeout=LONG) as store:
        with pytest.raises(StoreTimeout):
            store.wait("never", timeout=3.0)
        assert store.statistics()["sessions"] == 1
        assert store.statistics()["reconnects"] == 0


def test_connections_that_nobody_uses_are_few(server: Server) -> None:
    """A burst of threads opens as many; one that works alone afterwards needs them no more."""
    with rallypoint.connect(server.address, secret=server.secret, ttl=1.5, timeout=LONG) as store:
        join = start(
            *(lambda index=index: store.wait(f"k{index}", timeout=LONG) for index in range(20))
        )
        eventually(lambda: store.status()["waiting"] == 20)
        store.set_many({f"k{index}": 1 for index in range(20)})
        join()
        loop = server._loop
        assert loop is not None
        eventually(lambda: sum(map(len, loop._by_session.values())) <= 2)
        assert store.add("n") == 1
