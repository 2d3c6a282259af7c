"""How threads share one session: who drives, who is woken, what is acknowledged, and what one thread's trouble is to the others."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

import pytest

import rallypoint
from rallypoint.clock import Clock
from rallypoint.errors import SessionLost, StoreTimeout, UsageError
from rallypoint.primitives.store import Store
from rallypoint.store import client as clients
from rallypoint.store import link as links
from rallypoint.store import session as sessions
from rallypoint.store.client import ABSENT
from rallypoint.store.dues import Dues
from rallypoint.store.link import Link
from rallypoint.store.pending import Pending, asked_of
from rallypoint.store.server import Server
from rallypoint.store.session import Session
from rallypoint.testing import ChaosProxy, Network
from rallypoint.wire import values
from rallypoint.wire.frames import header
from rallypoint.wire.messages import TAGS, Add, Get, Length, Refusal, encode

from .live import output_of
from .processes import ServerProcess
from .situations import LONG, Interruption, eventually, our_threads, put, start, take

LARGE = b"L" * 3_000_000


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(max_bytes="256MiB") as made:
        yield made


@pytest.fixture(params=[True, False], ids=["shared-memory", "tcp"])
def store(server: Server, request: pytest.FixtureRequest) -> Iterator[Store]:
    with rallypoint.connect(server.address, secret=server.secret, same_host=request.param, timeout=LONG, ttl=LONG) as made:
        yield made


@pytest.fixture
def other(server: Server) -> Iterator[Store]:
    with rallypoint.connect(server.address, secret=server.secret, timeout=LONG) as made:
        yield made


# --- driving


def test_who_drives_hands_over_when_its_time_is_up(store: Store, other: Store) -> None:
    """The thread that polls leaves; one that slept drives on. No keeper comes by in time: the lease is long."""
    got: list[Any] = []
    begun = threading.Event()

    def short() -> None:
        begun.set()
        with pytest.raises(StoreTimeout):
            store.wait("never", timeout=0.3)
        other["long"] = 1

    first = start(short)
    assert begun.wait(LONG)
    eventually(lambda: store._session._driver != 0)
    clock = Clock()
    second = start(lambda: got.append(store.wait("long", timeout=LONG)))
    first()
    second()
    assert got == [1]
    assert clock.elapsed() < LONG / 5


def test_who_drives_hands_over_when_a_handler_ends_it(store: Store, other: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the exception strikes right after the wait."""
    real = Link.exchange
    struck = threading.Event()

    def strike(link: Link, *given: Any) -> Any:
        reply = real(link, *given)
        if threading.current_thread().name == "the one" and not struck.is_set():
            struck.set()
            raise Interruption
        return reply

    monkeypatch.setattr(Link, "exchange", strike)

    def drive() -> None:
        threading.current_thread().name = "the one"
        with pytest.raises(Interruption):
            store.wait("a", timeout=LONG)

    first = start(drive)
    eventually(lambda: other.status()["waiting"] == 1)  # it has sent: a second one could be in its way, and then it does not wait there
    got: list[Any] = []
    second = start(lambda: got.append(store.wait("b", timeout=LONG)))
    eventually(lambda: store._session._waiting)
    other["a"] = 1
    first()
    other["b"] = 2
    second()
    assert got == [2]
    assert store["a"] == 1


def test_a_hundred_waiters_and_one_that_works(store: Store, other: Store) -> None:
    got: list[Any] = []
    join = start(*(lambda index=index: got.append(store.wait(f"k{index}", timeout=LONG)) for index in range(100)))
    eventually(lambda: store.status()["waiting"] == 100)
    for count in range(200):
        assert store.add("n") == count + 1
    other.set_many({f"k{index}": index for index in range(100)})
    join()
    assert sorted(got) == list(range(100))
    assert not store._session._waiting
    assert not store._session._pending


# --- what the server may forget


def kept_by(server: Server, store: Store) -> int:
    """How many answers the server keeps for this client."""
    state = server._loop._state  # type: ignore[union-attr]
    return len(state._sessions[store._session.id].replies)


def lent_by(server: Server, store: Store) -> int:
    """How many segments the server believes that this client reads."""
    loop = server._loop
    assert loop is not None
    peer = loop._by_session[loop._state._sessions[store._session.id]]
    return len(peer.lent or ())


def test_the_server_may_forget_answers_although_one_thread_waits(server: Server, store: Store) -> None:
    join = start(lambda: store.wait("k", timeout=LONG))
    eventually(lambda: store.status()["waiting"] == 1)
    for _ in range(5 * sessions.AHEAD):
        store.add("n")
    assert kept_by(server, store) <= sessions.AHEAD + 2
    store["k"] = 1
    join()
    store.get("k")
    store.get("k")
    assert kept_by(server, store) == 0


def test_memory_that_was_read_is_given_back_at_once(server: Server, store: Store, other: Store) -> None:
    """Also for what is taken from a queue, and for an answer that nobody looks at any more."""
    store["k"] = LARGE

    for _ in range(5):
        assert store.get("k") == LARGE
        put(store, "q", LARGE)
        assert take(store, "q") == LARGE
    eventually(lambda: lent_by(server, store) == 0)


# --- one thread's trouble


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set there is no memory for large values."""
    tight = threading.Event()
    real = values.alloc

    def alloc(size: int) -> memoryview:
        if tight.is_set():
            raise MemoryError
        return real(size)

    monkeypatch.setattr(links, "alloc", alloc)
    return tight


def test_a_value_for_which_there_is_no_memory(server: Server, store: Store, no_room: threading.Event) -> None:
    """Who asked for it is told, and nobody else: not the thread that happens to drive."""
    store["k"] = LARGE
    drives = start(lambda: store.wait("driver", timeout=LONG))
    eventually(lambda: store._session._driver != 0)
    no_room.set()
    with pytest.raises(MemoryError, match="there is no memory here for a value of 30"):
        store.get("k")
    no_room.clear()
    assert store["k"] == LARGE
    eventually(lambda: lent_by(server, store) == 0)
    store["driver"] = 1
    drives()
    assert store.statistics()["reconnects"] == 0


def test_an_item_for_which_there_is_no_memory_stays_in_the_queue(store: Store, other: Store, no_room: threading.Event) -> None:
    put(store, "q", LARGE)
    no_room.set()
    with pytest.raises(MemoryError):
        take(store, "q")
    no_room.clear()
    eventually(lambda: other.ask(Length, "q")[0].number == 1)  # type: ignore[union-attr]
    assert take(store, "q") == LARGE


def test_a_request_that_cannot_be_written_down_leaves_nothing(store: Store) -> None:
    for wrong in ("\ud800", 5):
        with pytest.raises((TypeError, ValueError)):
            store.get(wrong)  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        store.add("n", 1 << 63)
    assert not store._session._pending
    assert store.add("n") == 1


def test_numbers_go_on_after_a_session_was_lost(server: Server) -> None:
    """Threads may still hold requests of the lost one; in the new one they must not be taken for others."""
    with contextlib.ExitStack() as stack:
        second = stack.enter_context(Server(max_bytes="16MiB", secret=server.secret))
        proxy = stack.enter_context(ChaosProxy(server.address))
        store = stack.enter_context(rallypoint.connect(proxy.address, secret=server.secret, same_host=False, timeout=LONG))
        store["k"] = 1
        before = store._session._seq
        lost: list[SessionLost] = []

        def wait() -> None:
            try:
                store.wait("never", timeout=LONG)
            except SessionLost as error:
                lost.append(error)
                assert store.add("n") > 0  # told once

        join = start(*[wait] * 8)
        eventually(lambda: store.status()["waiting"] == 8)
        proxy.retarget(second.address)
        proxy.reset()
        join()
        assert len(lost) == 8
        assert {error.outcome for error in lost} == {"did not happen"}
        assert store["n"] == 8
        assert store._session._seq > before + 8
        assert store.statistics()["sessions"] == 2


# --- the lease


def test_a_lease_is_kept_while_a_handler_stands_in_the_middle_of_sending(server: Server) -> None:
    """Nobody can send on that link, perhaps for minutes; the keeper then makes another one."""
    with rallypoint.connect(server.address, secret=server.secret, ttl=2.0, timeout=LONG) as store:
        link = store._session._link
        assert link is not None
        link.writer = -12345  # a thread that does not come back
        eventually(lambda: store._session._link not in (None, link))
        assert store.add("n") == 1
        seen = store.statistics()
        assert (seen["sessions"], seen["reconnects"]) == (1, 1)
        link.writer = 0  # it comes back after all
        link.dispose()


def test_signs_of_life_go_on_when_one_had_no_answer(server: Server) -> None:
    """Whatever becomes of a single one, the next is due."""
    with rallypoint.connect(server.address, secret=server.secret, ttl=2.0, timeout=LONG) as store:
        store._session._dues._pings.append(0.0)  # one that was never sent: an exception struck
        clock = Clock()
        while clock.elapsed() < 5.0:
            with pytest.raises(StoreTimeout):
                store.wait("never", timeout=0.5)
        assert store.statistics()["sessions"] == 1


def test_where_no_thread_could_be_had_the_next_session_tries_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(run: Callable[[], object], name: str) -> None:
        raise RuntimeError("can't start new thread")

    eventually(lambda: not our_threads())  # of the tests before
    with monkeypatch.context() as patch:
        patch.setattr("rallypoint.store.background.start", no)
        with pytest.raises(RuntimeError, match="new thread"):
            rallypoint.connect(server.address, secret=server.secret)
    with rallypoint.connect(server.address, secret=server.secret):
        assert our_threads() == ["rallypoint: keeper"]


def test_a_log_that_stands_still_holds_up_neither_signs_of_life_nor_a_connection() -> None:
    """A signal handler's exception in the middle of Python's logging leaves its locks to the thread in which that was."""
    with Network() as network:
        store = network.connect(ttl=2.0, timeout=LONG)
        logging._lock.acquire()  # type: ignore[attr-defined]
        try:
            network.cut()
            eventually(lambda: store.statistics()["reconnects"] == 1)  # by a thread of ours, which has something for the log
            store._session.news.add("error", "by this thread, which can write it")
            store._session.news.tell()
            threading.Event().wait(5.0)
            assert store.add("n") == 1
            assert store.statistics()["sessions"] == 1
        finally:
            logging._lock.release()  # type: ignore[attr-defined]
        eventually(lambda: not store._session.news.told_apart)


def test_the_keeper_ends_with_the_last_store(server: Server) -> None:
    with rallypoint.connect(server.address, secret=server.secret), rallypoint.connect(server.address, secret=server.secret):
        assert our_threads() == ["rallypoint: keeper"]
    eventually(lambda: not our_threads())


# --- watching


def test_a_watch_that_is_interrupted_while_it_reads_a_large_value(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
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


# --- what others do meanwhile


def test_what_failed_before_it_was_sent_is_not_sent(server: Server, store: Store, other: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is lost, and another thread has connected anew, while a signal handler holds this thread up before it sends."""
    session = store._session
    exchange, post_many = Link.exchange, Session._post_many

    def lose() -> None:
        assert session._link is not None
        session._broken(session._link, "cut")
        session._session_lost(Refusal("session-lost", "", known=False))
        session._connect(session._now() + 10.0)

    def held_up(link: Link, *args: Any) -> Any:
        monkeypatch.setattr(Link, "exchange", exchange)
        lose()
        return exchange(link, *args)

    def held_up_with_many(session: Session, *args: Any) -> Any:
        monkeypatch.setattr(Session, "_post_many", post_many)
        lose()
        return post_many(session, *args)

    monkeypatch.setattr(Link, "exchange", held_up)
    with pytest.raises(SessionLost):
        store.add("n", 1)
    monkeypatch.setattr(Session, "_post_many", held_up_with_many)
    with pytest.raises(SessionLost):
        store.ask_many([(Add, ("n", 1))])
    assert "n" not in other
    assert not session._pending
    assert store.add("n", 1) == 1


def test_a_notice_to_another_thread_is_nobodys_answer(server: Server, store: Store) -> None:
    """Somebody's request cannot be understood: the server says so and ends the conversation. All others' are asked again."""
    session = store._session
    waiting = start(lambda: store.wait("late", LONG))
    eventually(lambda: store.status()["waiting"] == 1)
    assert session._link is not None
    nonsense = encode((TAGS[Add], 0, 0, "n", "x"))
    session._link.sock.send(header(len(nonsense)) + nonsense)
    assert store.add("n", 1) == 1
    store.set("late", 1)
    waiting()
    assert session.reconnects == 1
    assert not session._pending


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda store: store.set("k", 1, fence="x"), "fence='x': the token of a lock is an int, not a str"),
        (lambda store: store.set("k", 1, fence=True), "the token of a lock is an int, not a bool"),
        (lambda store: store.set("k", 1, ephemeral=1), "ephemeral=1: whether the key goes with this session is True or False, not an int"),
        (lambda store: store.delete("k", fence=1.5), "fence=1.5: the token of a lock is an int, not a float"),
        (lambda store: store.update("k", str, fence=b""), "the token of a lock is an int, not a bytes"),
        (lambda store: store.compare_and_set("k", 1, 2, revision="1"), "revision='1': a revision of this store is an int, not a str"),
        (lambda store: next(store.watch("", since="1")), "since='1': a revision of this store is an int, not a str"),
    ],
)
def test_what_is_no_number_is_not_sent(store: Store, call: Callable[[Store], object], said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        call(store)
    assert store._session.reconnects == 0
    assert list(store) == []


def test_a_grant_given_as_a_fence(store: Store) -> None:
    with store.lock("l") as grant:
        with pytest.raises(TypeError, match=r"fence=grant\.token"):
            store.set("k", 1, fence=grant)  # type: ignore[arg-type]
        store.set("k", 1, fence=grant.token)
    with pytest.raises(UsageError, match="fence=-1 is not the token of a lock"):
        store.set("k", 1, fence=-1)


def test_what_cannot_be_understood_is_named_all_the_same() -> None:
    """In the error that tells of it."""
    pending = Pending(0.0, 0.0, True, 1, Get, encode((TAGS[Get], 1, 0, "k", "soon")))
    assert asked_of(pending) == 'waiting for "k"'


def test_a_barrier_of_one_thread_and_large_values_of_others(server: Server, other: Store) -> None:
    """Who waits reads the others' replies, with their shared memory; without others it need not expect any."""
    with rallypoint.connect(server.address, secret=server.secret, timeout=LONG) as store:
        session, large = store._session, b"L" * 100_000
        assert session.local
        found: list[Any] = []
        reads = [lambda name=f"w{n}": found.append(store.wait(name, LONG)) for n in range(3)]
        for _ in range(30):
            found.clear()
            waiting = start(lambda: store.barrier("b", 2, LONG))
            reading = start(*reads)
            for n in range(3):
                other.set(f"w{n}", large)
            reading()
            assert found == [large] * 3
            other.barrier("b", 2, LONG)
            waiting()
            for n in range(3):
                del other[f"w{n}"]
            store.barrier("alone", 1)
            assert session._link is not None
            assert not session._link.lends
        assert session.reconnects == 0


def test_the_number_of_a_request_that_was_not_asked_yet_is_free(server: Server, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread takes the number while a request is made, and then the session is lost: the other one's is not given up."""
    session = store._session
    theirs: list[Pending] = []

    def encoded(message: Any) -> bytes:
        now, seq = session._now(), session._seq + 1
        link = session._link
        assert link is not None
        one = Pending(now, now + LONG, True, seq, Add, encode((TAGS[Add], seq, seq - 1, "n", 1)), None, 0)
        session._pending[seq] = one
        session._seq = seq
        theirs.append(one)
        session._lost, session._refusing = SessionLost("session-lost", "lost", outcome="did not happen"), True
        return encode(message)

    monkeypatch.setattr(sessions, "encode", encoded)
    with pytest.raises(SessionLost):
        store.add("n", 1)
    with pytest.raises(SessionLost):
        store.ask_many([(Add, ("n", 1))])
    monkeypatch.undo()
    assert list(session._pending.values()) == theirs
    for one in theirs:
        session._await(one, get_ident())
        assert one.reply is not None
        del session._pending[one.seq]
    assert store.add("n", 1) == 3


def test_a_sign_of_life_that_does_not_go_because_the_link_changes() -> None:
    """It is counted for no other link: a Cancel would count as said before it was."""

    class Changing:
        number = 1

        def try_post(self, message: bytes, me: int) -> bool:
            dues.begin()
            dues._pings.append(7.0)
            return False

    dues = Dues({}, lambda: 0, lambda: 5.0)
    link: Any = Changing()
    assert not dues.pay(link, 1, ping=True)
    assert list(dues._pings) == [7.0]


def test_stores_may_come_and_go_while_all_are_gone_through(store: Store) -> None:
    """As at the end of a process whose threads go on until then."""
    ended = threading.Event()

    class Other:
        pass

    def others() -> None:
        while not ended.is_set():
            made: Any = Other()
            clients._stores[id(made)] = made

    kept: Any = [Other() for _ in range(50)]
    clients._stores.update({id(one): one for one in kept})
    wait = start(others, others)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(1000):
            assert store in clients._opened()
    finally:
        ended.set()
        sys.setswitchinterval(interval)
    wait()


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


TRACED = """
import os, random, sys, threading, time
import rallypoint
from rallypoint.store import link, session

chance = random.Random(int(sys.argv[1]))
files = (link.__file__, session.__file__)

def line(frame, event, argument):
    if event == "line" and chance.random() < 0.03:
        time.sleep(0.0003)  # another thread's turn
    return line

def count(store, answers):
    for _ in range(100):
        answers.append(store.add("n", 1))

with rallypoint.serve() as server, rallypoint.connect(server.address, secret=server.secret, timeout=60) as store:
    answers = []
    threads = [threading.Thread(target=count, args=(store, answers)) for _ in range(4)]
    threading.settrace(lambda frame, event, argument: line if frame.f_code.co_filename in files else None)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    threading.settrace(None)
    print(store["n"], len(set(answers)))
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_trace_function_in_which_threads_change_loses_nothing(seed: str) -> None:
    """A debugger's trace function, or coverage's, is a call between any two lines. Two threads then took the same number, and the second
    one got the first one's answer: an `add` was lost without an error."""
    assert output_of(TRACED, seed) == ["400 400"]


def test_without_the_gil_there_is_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(rallypoint.UsageError, match="GIL"):
        rallypoint.connect("tcp://127.0.0.1:1", secret="x" * 16)
