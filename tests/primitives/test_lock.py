"""A lock as its user sees it: whose it is, when it is lost, and that nothing is left behind,
whatever interrupts.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import random
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import pytest

import rallypoint
from rallypoint.clock import Clock
from rallypoint.errors import (
    FenceStale,
    LeaseLost,
    LockTimeout,
    SessionLost,
    StoreClosed,
    StoreTimeout,
    UsageError,
    WouldDeadlock,
)
from rallypoint.primitives.lock import Grant, Lock, _owner
from rallypoint.primitives.store import Store
from rallypoint.store.server.server import Server
from rallypoint.testing import ChaosProxy, Network
from rallypoint.wire import messages as wire

from ..store.live import DEADLINE, Thread, transport, until
from ..store.processes import ServerProcess
from ..store.situations import Storm, alarm, in_child

E = TypeVar("E", bound=BaseException)

SHORT = 2.0
"""Seconds, of a lease that a test can wait for, and in which a busy machine gives three signs of
life.
"""

LONG = 3600.0
"""Seconds, of one that no test waits for."""


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


@pytest.fixture
def store(network: Network) -> Store:
    return network.connect(rank=0)


@pytest.fixture
def other(network: Network) -> Store:
    return network.connect(rank=1)


@pytest.fixture
def server() -> Iterator[Server]:
    with rallypoint.serve() as made:
        yield made


@contextmanager
def ends_in(kind: type[E]) -> Iterator[list[E]]:
    """A block that ends in this exception, which is then in the list."""
    caught: list[E] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    assert caught, f"no {kind.__name__}"


def waiting(store: Store) -> int:
    return store.status()["waiting"]


# --- having it ---


def test_one_has_it_at_a_time(store: Store, other: Store) -> None:
    lock = store.lock("ckpt")
    assert isinstance(lock, rallypoint.Lock)
    assert not lock.held
    assert not lock.locked()
    with lock as grant:
        assert isinstance(grant, rallypoint.Grant)
        assert isinstance(grant.token, int)
        assert isinstance(grant.lost, threading.Event)
        assert not grant.lost.is_set()
        assert 9.0 < grant.left <= 10.0
        assert 0.0 <= grant.held_for < DEADLINE
        grant.check()
        assert lock.held
        assert lock.locked()
        assert other.lock("ckpt").locked()
        assert not other.lock("ckpt").held
        assert other.lock("ckpt").acquire_nowait() is None
        assert not store.lock("another").locked()
    assert not lock.held
    assert not other.lock("ckpt").locked()
    again = other.lock("ckpt").acquire_nowait()
    assert again is not None
    assert again.token > grant.token


def test_each_is_two_requests(store: Store) -> None:
    lock = store.lock("l")
    for _ in range(10):
        with lock:
            pass
    assert store.statistics()["operations"] == {"Lock": 10, "Unlock": 10}


def test_first_come_first_served(network: Network, store: Store) -> None:
    order: list[int] = []
    tokens: list[int] = []

    def work(number: int) -> None:
        with network.connect() as mine, mine.lock("l") as grant:
            order.append(number)
            tokens.append(grant.token)

    grant = store.lock("l").acquire()
    threads = []
    for number in range(8):
        threads.append(Thread(work, number))
        until(lambda: waiting(store) == len(threads))
    store.ask(wire.Unlock, "l", grant.token)
    for thread in threads:
        thread.result()
    assert order == list(range(8))
    assert tokens == sorted(tokens)


def test_threads_of_one_store_queue_up(store: Store) -> None:
    """Also at one Lock object."""
    lock = store.lock("l")
    inside = 0

    def work() -> None:
        nonlocal inside
        for _ in range(50):
            with lock:
                inside += 1
                assert inside == 1
                threading.Event().wait(0)
                inside -= 1

    for thread in [Thread(work) for _ in range(4)]:
        thread.result()
    assert not lock.locked()
    assert store.statistics()["locks"]["l"]["acquisitions"] == 200


def test_objects_say_what_they_are(store: Store) -> None:
    lock = store.lock("ckpt")
    assert repr(lock) == '<Lock "ckpt": not held through this object>'
    grant = lock.acquire()
    assert re.fullmatch(
        rf'<Lock "ckpt": held by this thread for \d\.\d s, token {grant.token}>', repr(lock)
    )
    assert re.fullmatch(rf'<Grant of "ckpt": token {grant.token}, \d\.\d s left>', repr(grant))
    assert repr(grant.lost) == '<lost: not set, of the lock "ckpt">'
    assert Thread(repr, lock).result() == '<Lock "ckpt": held by another thread>'
    store.close()
    assert (
        repr(grant) == f'<Grant of "ckpt": token {grant.token}, lost: this store object was closed>'
    )
    assert repr(grant.lost) == '<lost: set, of the lock "ckpt">'
    assert repr(lock) == '<Lock "ckpt": lost by this thread: this store object was closed>'
    with pytest.raises(LeaseLost):
        lock.release()
    assert repr(lock) == '<Lock "ckpt": not held through this object>'


def test_what_is_given_wrongly(store: Store) -> None:
    for wrong in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="ttl"):
            store.lock("l", ttl=wrong)
    with pytest.raises(TypeError):
        store.lock("l", ttl=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        store.lock(5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="timeout"):
        store.lock("l", timeout=-1.0)
    with pytest.raises(TypeError):
        store.lock("l").acquire(False)  # type: ignore[call-arg]
    assert store.lock("l", ttl=1e-9).ttl == 0.05
    assert store.lock("l", ttl=1e9).ttl == 7 * 24 * 3600.0


# --- not having it ---


def test_a_timeout_names_who_has_it_and_who_waits(
    network: Network, store: Store, other: Store
) -> None:
    third = network.connect(rank=2)
    grant = other.lock("ckpt").acquire()
    in_front = Thread(third.lock("ckpt").acquire)
    until(lambda: waiting(store) == 1)
    clock = Clock()
    with pytest.raises(LockTimeout) as caught:
        store.lock("ckpt", timeout=0.2).acquire()
    assert 0.2 <= clock.elapsed() < DEADLINE
    error = caught.value
    here = f"pid {os.getpid()} on {os.uname().nodename}"
    assert error.code == "lock-timeout"
    assert error.holder == f"rank 1 ({here})"
    assert error.queue == (f"rank 2 ({here})",)
    assert error.held_for >= 0.2
    assert str(error) == (
        f'the lock "ckpt" was not had within 0.2 s: rank 1 ({here}) has had it for {error.held_for:.1f} s; '
        f"in front of this caller waited rank 2 ({here})"
    )
    assert isinstance(error, TimeoutError)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.holder, copy.queue, copy.held_for) == (error.holder, error.queue, error.held_for)
    assert waiting(store) == 1, "it does not stand in the queue any more"
    other.ask(wire.Unlock, "ckpt", grant.token)
    in_front.result()
    figures = store.statistics()["locks"]["ckpt"]
    assert (figures["acquisitions"], figures["timeouts"]) == (0, 1)
    assert figures["wait_seconds"] >= 0.2


def test_a_timeout_of_one_call_or_of_the_lock(store: Store, other: Store) -> None:
    other.lock("l").acquire()
    lock = store.lock("l", timeout=DEADLINE)
    with pytest.raises(LockTimeout, match="at once"):
        lock.acquire(timeout=0)
    with pytest.raises(LockTimeout, match=r"within 0\.1 s"):
        lock.acquire(timeout=0.1)
    with pytest.raises(LockTimeout, match=r"within 0\.1 s"), store.lock("l", timeout=0.1):
        pytest.fail("it was not had")


def test_of_very_many_who_wait_some_are_named(network: Network, store: Store) -> None:
    grant = store.lock("l").acquire()
    clients = [network.connect(rank=rank) for rank in range(1, 9)]
    for number, client in enumerate(clients):
        Thread(client.lock("l").acquire)
        until(lambda number=number: waiting(store) == number + 1)  # type: ignore[misc]
    with pytest.raises(LockTimeout, match=r"rank 4 \(pid \d+ on [^)]+\) and 4 more") as caught:
        network.connect().lock("l").acquire(timeout=0)
    assert len(caught.value.queue) == 8
    assert grant.token


def test_taking_it_twice_is_told(network: Network, store: Store) -> None:
    """Whatever object it is asked with; the thread has it still."""
    again = network.connect()
    with store.lock("l") as grant:
        for lock in (again.lock("l"), store.lock("l")):
            with pytest.raises(WouldDeadlock) as caught:
                lock.acquire()
            assert caught.value.code == "lock-twice"
            assert lock.acquire_nowait() is None
        with pytest.raises(WouldDeadlock):
            store.lock("l", timeout=DEADLINE).acquire()
        with pytest.raises(LockTimeout):  # two store objects may stand for two clients
            again.lock("l", timeout=0.1).acquire()
        with pytest.raises(LockTimeout):
            Thread(lambda: store.lock("l", timeout=0.1).acquire()).result()
        grant.check()
        assert store.set("k", 1, fence=grant.token)
    assert waiting(store) == 0
    assert str(caught.value).startswith(
        f'{store.identity} asks for the lock "l" and has it already, for 0.'
    )


def test_a_circle_is_told_to_who_would_close_it(store: Store, other: Store) -> None:
    with store.lock("a"):

        def theirs() -> Grant:
            with other.lock("b"):
                other["there"] = True
                return other.lock("a").acquire()

        thread = threading.Thread(name="the other", target=lambda: results.append(theirs()))
        results: list[Grant] = []
        thread.start()
        store.wait("there", DEADLINE)
        until(lambda: waiting(store) == 1)
        with pytest.raises(WouldDeadlock) as caught:
            store.lock("b").acquire()
        error = caught.value
        here = f"pid {os.getpid()} on {os.uname().nodename}"
        assert error.code == "lock-cycle"
        assert str(error) == (
            f'waiting for the lock "b" would never end: the thread the other of rank 1 ({here}) has "b" and waits for "a"; '
            f'rank 0 ({here}), who asks, has "a"'
        )
        assert "same order" in error.help[0][0]
        assert waiting(store) == 1
    thread.join(DEADLINE)
    assert results


# --- giving it back ---


def test_giving_back_what_one_does_not_have(store: Store) -> None:
    lock = store.lock("l")
    with pytest.raises(UsageError, match="was not acquired here"):
        lock.release()
    with lock:
        with pytest.raises(UsageError, match="another thread of this process has it"):
            Thread(lock.release).result()
        lock.release()
        with pytest.raises(UsageError, match="was given back before"):
            lock.release()
        lock.acquire()
    assert not lock.locked()


def test_an_exception_gives_it_back(store: Store) -> None:
    with pytest.raises(KeyError, match="mine") as caught, store.lock("l"):
        raise KeyError("mine")
    assert not hasattr(caught.value, "__notes__")
    assert not store.lock("l").locked()


def test_a_server_that_does_not_answer_when_it_is_given_back() -> None:
    """It is given back as soon as the server answers again."""
    with (
        ServerProcess() as process,
        rallypoint.connect(process.address, secret=process.secret, timeout=2.0, ttl=LONG) as store,
    ):
        lock = store.lock("l", ttl=LONG)
        with pytest.raises(StoreTimeout, match='giving back the lock "l"'), lock:
            process.stop()
        assert not lock.held
        process.go_on()
        with rallypoint.connect(process.address, secret=process.secret) as other:
            assert other.lock("l").acquire(timeout=DEADLINE)


def test_an_outage_longer_than_the_session_while_it_is_given_back(
    network: Network, other: Store
) -> None:
    """The server keeps a session for as long as the lease of its lock. The client must not give it
    up before the lock is back.
    """
    store = network.connect(timeout=1.0, ttl=SHORT)
    lock = store.lock("l", ttl=LONG)
    lock.acquire()
    network.refuse()
    network.cut()
    with pytest.raises(StoreTimeout):
        lock.release()
    threading.Event().wait(2 * SHORT)
    network.accept()
    until(lambda: not other.lock("l").locked())
    assert store.statistics()["sessions"] == 1


# --- losing it ---


def test_it_is_kept_for_many_leases(store: Store, other: Store) -> None:
    """Its lease is much shorter than the session's, and signs of life are given for it."""
    with store.lock("l", ttl=SHORT) as grant:
        with pytest.raises(LockTimeout):
            other.lock("l", timeout=2.5 * SHORT).acquire()
        assert not grant.lost.is_set()
        assert 0.0 < grant.left <= SHORT


def test_who_waits_gives_signs_of_life_for_the_lease_to_come(network: Network) -> None:
    """The server would pass it on at once to the next, if it had heard nothing for that long."""
    holder, waiter = network.connect(), network.connect(ttl=LONG)
    grant = holder.lock("l").acquire()
    thread = Thread(waiter.lock("l", ttl=SHORT).acquire)
    until(lambda: waiting(holder) == 1)
    threading.Event().wait(2 * SHORT)
    holder.ask(wire.Unlock, "l", grant.token)
    mine = thread.result()
    assert not mine.lost.is_set()
    assert waiter.statistics()["locks"]["l"]["wait_seconds"] >= 2 * SHORT
    assert waiter.statistics()["operations"]["Lock"] == 1


def test_a_reconnect_keeps_it(network: Network, store: Store, other: Store) -> None:
    with store.lock("l", ttl=LONG) as grant:
        # a cut may meet the keep-alive's connection alone
        while store.statistics()["reconnects"] < 5:
            network.cut()
            assert store.set("k", 1, fence=grant.token)
        assert not grant.lost.is_set()
        assert other.lock("l").locked()


def test_an_outage_longer_than_the_lease_loses_it(network: Network) -> None:
    store, other = network.connect(rank=0, ttl=LONG), network.connect(rank=1)
    lock = store.lock("l", ttl=SHORT)
    with ends_in(LeaseLost) as caught, lock as grant:
        watcher = Thread(grant.lost.wait, DEADLINE)
        clock = Clock()
        network.refuse()
        network.cut()
        assert grant.lost.wait(DEADLINE)
        assert SHORT / 2 < clock.elapsed() < DEADLINE
        assert watcher.result()
        assert not lock.held
        with pytest.raises(LeaseLost):
            grant.check()
        assert grant.left == 0.0
        threading.Event().wait(
            SHORT
            # the holder stops counting on it before the server's lease is over, which a reconnect
            # would renew
        )
        network.accept()
        assert other.lock("l").acquire(timeout=DEADLINE).token > grant.token
        assert grant.lost.is_set(), "it does not come back with the connection"
        grant.lost.clear()
        assert grant.lost.is_set()
        for write in (
            lambda: store.set("k", 1, fence=grant.token),
            lambda: store.delete("k", fence=grant.token),
            lambda: store.compare_and_set("k", rallypoint.ABSENT, 1, fence=grant.token),
            lambda: store.update("k", lambda value: 1, fence=grant.token),
        ):
            with pytest.raises(FenceStale):
                write()
        assert "k" not in other
    [error] = caught
    assert error.code == "lock-lost"
    here = f"pid {os.getpid()} on {os.uname().nodename}"
    assert str(error).startswith(f'rank 0 ({here}) lost the lock "l", which it had for ')
    assert str(error).endswith(f"(its ttl is {SHORT:g} s)")
    assert f"no sign of life of this process was confirmed for {SHORT:.1f} s" in str(error)
    assert error.why[0] == "the server had passed it on when it was to be given back"
    assert store.statistics()["locks"]["l"]["losses"] == 1
    assert store.statistics()["sessions"] == 1


def test_a_lock_that_went_with_its_store_was_not_passed_on() -> None:
    """Nobody else can have it, no longer lease helps, and what was written is gone with it."""
    with rallypoint.serve() as server:
        store = rallypoint.connect(server.address, secret=server.secret)
        lock = store.lock("l")
        grant = lock.acquire()
    with pytest.raises(StoreClosed):
        store.get("k")
    for call in (grant.check, lock.release):
        with pytest.raises(LeaseLost) as caught:
            call()
        (why,) = caught.value.why
        assert "keeps nothing" in why
        assert not caught.value.help


def test_what_may_have_been_lost_counts_as_lost(network: Network) -> None:
    """Nobody wanted it meanwhile: the server says so, and the block ends in the exception that
    `lost` had announced.
    """
    store = network.connect(ttl=LONG)
    with ends_in(LeaseLost) as caught, store.lock("l", ttl=LONG) as grant:
        grant._lease.ttl = 0.0  # what this side counts; the other is not asked
        assert grant.lost.is_set()
    assert (
        caught[0].why[0]
        == "the server still had it for this process: nobody else has had it meanwhile"
    )
    assert not store.lock("l").locked()


def test_another_exception_gets_a_note(store: Store) -> None:
    with ends_in(KeyError) as caught, store.lock("l") as grant:
        grant.lost.set()
        raise KeyError("mine")
    [note] = caught[0].__notes__
    assert note.startswith("  then   rank 0 ")
    assert note.endswith("somebody set `lost` (its ttl is 10 s)")


def test_the_end_of_the_session_is_the_end_of_its_locks(server: Server) -> None:
    """Its connection is silent for longer than its ttl."""
    with ExitStack() as stack:
        proxy = stack.enter_context(ChaosProxy(server.address))
        store = stack.enter_context(
            rallypoint.connect(
                proxy.address, secret=server.secret, same_host=False, ttl=SHORT, timeout=SHORT
            )
        )
        direct = stack.enter_context(rallypoint.connect(server.address, secret=server.secret))
        with ends_in(LeaseLost) as caught, store.lock("l", ttl=SHORT) as grant:
            hole = proxy.freeze()
            direct.lock("l").acquire(timeout=DEADLINE)
            until(grant.lost.is_set)
            hole.heal()
            proxy.reset()
            with ends_in(SessionLost):
                store.add("n")
                store.add("n")
        assert store.add("n") >= 1
        assert "no sign of life" in str(caught[0])


def test_a_silent_link_is_replaced_in_time(server: Server) -> None:
    """Packets vanish, without a reset; a new connection gets through. The session's own ttl would
    be waited for much too long.
    """
    with ExitStack() as stack:
        proxy = stack.enter_context(ChaosProxy(server.address))
        store = stack.enter_context(
            rallypoint.connect(
                proxy.address, secret=server.secret, same_host=False, ttl=LONG, timeout=LONG
            )
        )
        with store.lock("l", ttl=6.0) as grant:
            [connection] = proxy.connections
            connection.freeze()
            until(lambda: store.statistics()["reconnects"] == 1)
            assert not grant.lost.is_set()
            assert store.set("k", 1, fence=grant.token)
            assert store.statistics()["sessions"] == 1


def test_a_lease_longer_than_the_session_keeps_the_session(network: Network) -> None:
    """Longer away than ttl and timeout of the session; the lock and its session are there all the
    same.
    """
    store, other = network.connect(ttl=0.3, timeout=1.0), network.connect()
    with store.lock("l", ttl=LONG) as grant:
        network.refuse()
        network.cut()
        clock = Clock()
        while clock.elapsed() < 3.0:
            with pytest.raises(StoreTimeout):
                store.add("n")
        network.accept()
        until(lambda: transport(store))
        assert store.set("k", 1, fence=grant.token)
        assert not grant.lost.is_set()
        assert other.lock("l").locked()
    assert store.statistics()["sessions"] == 1


def test_closing_the_store_gives_it_back_and_says_so(store: Store, other: Store) -> None:
    with ends_in(LeaseLost) as caught, store.lock("l") as grant:
        store.close()
        assert grant.lost.is_set()
        assert other.lock("l").acquire(timeout=DEADLINE)
    assert str(caught[0]).endswith(": this store object was closed")


def test_what_was_given_back_is_not_lost_later(network: Network) -> None:
    store = network.connect(ttl=SHORT)
    with store.lock("l", ttl=SHORT) as grant:
        pass
    store.close()
    assert not grant.lost.wait(1.5 * SHORT)
    grant.check()


def test_no_garbage_is_left(store: Store) -> None:
    """Nothing that only the collector would find."""
    lock = store.lock("l")
    with lock:
        pass
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            with lock:
                pass
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_who_sleeps_until_it_is_lost(store: Store) -> None:
    with ends_in(LeaseLost), store.lock("l") as grant:
        assert not grant.lost.wait(0.01)
        assert not grant.lost.wait(0)
        sleepers = [Thread(grant.lost.wait) for _ in range(4)]
        store.close()
        assert [sleeper.result() for sleeper in sleepers] == [True] * 4


# --- forks, signals, processes ---


def test_a_forked_child_does_not_hold_it(server: Server) -> None:
    with rallypoint.connect(server.address, secret=server.secret) as store:
        lock = store.lock("l")
        with lock as grant:

            def child() -> dict[str, Any]:
                seen: dict[str, Any] = {
                    "held": lock.held,
                    "lost": grant.lost.is_set(),
                    "repr": repr(lock),
                }
                with pytest.raises(LeaseLost) as lost:
                    grant.check()
                seen["check"] = str(lost.value)
                with pytest.raises(UsageError) as caught:
                    lock.release()
                seen["release"] = str(caught.value)
                seen["nowait"] = lock.acquire_nowait() is not None
                try:
                    lock.acquire(timeout=0.1)
                except LockTimeout as error:
                    seen["holder"] = error.holder
                return seen

            seen = in_child(child)
            here = f"pid {os.getpid()} on {os.uname().nodename}"
            whose = f'the lock "l" is held by the parent process (pid {os.getpid()}), not by this forked child'
            assert seen == {
                "held": False, "lost": True, "repr": '<Lock "l": not held through this object>', "check": whose, "release": whose,
                "nowait": False, "holder": here,
            }  # fmt: skip
            assert not grant.lost.is_set()
            assert store.set("k", 1, fence=grant.token)
        assert in_child(lambda: lock.acquire(timeout=DEADLINE).token) > grant.token


def _work(store: Store, lock: Lock, count: int) -> None:
    for _ in range(count):
        with lock as grant:
            store.set("n", store.get("n", 0) + 1, fence=grant.token)


def test_it_goes_to_other_processes_with_its_store(server: Server) -> None:
    with rallypoint.connect(server.address, secret=server.secret) as store:
        lock = store.lock("l", ttl=7.0, timeout=DEADLINE)
        assert lock.held is False
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=_work, args=(store, lock, 50)) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(DEADLINE)
            assert process.exitcode == 0
        assert store["n"] == 100


def test_ctrl_c_leaves_the_queue(store: Store, other: Store) -> None:
    Thread(other.lock("l").acquire).result()
    clock = Clock()
    with alarm(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        store.lock("l").acquire()
    assert clock.elapsed() < DEADLINE / 5
    until(lambda: waiting(other) == 0)


def given_up(store: Store, name: str) -> tuple[int, threading.Timer]:
    """The server has granted it to this thread, which does not know. The token, and what tells the
    server a moment after its start.
    """
    reply, _ = store.ask(wire.Lock, name, _owner(), None, LONG)
    assert isinstance(reply, wire.Granted)
    return reply.token, threading.Timer(0.1, store.ask, (wire.Unlock, name, reply.token))


def test_what_was_given_up_and_not_told_yet_is_not_had_twice(store: Store) -> None:
    token, told = given_up(store, "l")
    told.start()
    with store.lock("l") as grant:
        assert grant.token > token


def test_what_was_given_up_and_not_told_yet_is_no_circle(store: Store, other: Store) -> None:
    def take() -> None:
        with other.lock("n"), other.lock("m"):
            pass

    _, told = given_up(store, "m")
    thread = Thread(take)
    until(lambda: waiting(store) == 1)
    told.start()
    with store.lock("n"):
        pass
    thread.result()


def test_a_handler_may_ask_for_another_lock(store: Store, other: Store) -> None:
    """While the frame below it waits, and although that stands for this thread."""
    grant = Thread(other.lock("a").acquire).result()
    seen: list[int] = []

    def handler() -> None:
        with store.lock("b", ttl=0.5) as inner:
            seen.append(inner.token)
        other.ask(wire.Unlock, "a", grant.token)

    with alarm(0.1, handler), store.lock("a", timeout=DEADLINE) as outer:
        assert outer.token > seen[0]


def test_a_handler_that_asks_by_the_same_object_just_as_it_is_had(store: Store) -> None:
    lock = store.lock("l")

    class Grants(dict[int, list[Grant]]):
        """A signal handler runs when the thread's list has been looked up, and nothing is in it
        yet.
        """

        def setdefault(self, key: int, default: Any = None) -> Any:
            found = super().setdefault(key, default)
            if not found:
                with pytest.raises(LockTimeout):
                    lock.acquire(timeout=0)
            return found

    lock._grants = Grants()
    lock.acquire()
    assert lock.held
    lock.release()
    assert not lock.locked()


def test_a_handler_that_asks_for_what_the_frame_below_it_waits_for(
    store: Store, other: Store
) -> None:
    """It stands in the queue already, and cannot go on before the handler returns."""
    grant = Thread(other.lock("a").acquire).result()
    lock = store.lock("a", timeout=DEADLINE)
    told: list[str] = []

    def handler() -> None:
        with pytest.raises(WouldDeadlock) as caught:
            lock.acquire()
        told.append(caught.value.code)
        assert lock.acquire_nowait() is None
        other.ask(wire.Unlock, "a", grant.token)

    def strike() -> None:
        until(lambda: waiting(other) == 1)
        os.kill(os.getpid(), signal.SIGALRM)

    with alarm(LONG, handler):
        thread = Thread(strike)
        with lock:
            thread.result()
            assert told == ["lock-twice"]
            assert lock.held
    assert not lock.locked()


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_signals_leaves_no_lock_behind(server: Server, seed: int) -> None:
    """Handlers that raise anywhere, also while an exception is on its way; each time the lock is
    free in the end, for somebody else. Its lease is so long that it would be in the way, the
    session's so short that the keeper comes by."""

    def child() -> int:
        with (
            rallypoint.connect(
                server.address, secret=server.secret, ttl=3.0, timeout=DEADLINE
            ) as store,
            rallypoint.connect(server.address, secret=server.secret, timeout=DEADLINE) as other,
        ):

            def use() -> None:
                with store.lock("l", ttl=LONG):
                    pass

            def use_for_long() -> None:
                for _ in range(20):
                    with store.lock("l", ttl=LONG):
                        pass

            with Storm(seed) as storm:
                while storm.raised < 40:
                    storm.strike(use if storm.chance.random() < 0.5 else use_for_long)
                    with other.lock("l", timeout=DEADLINE):
                        pass
            until(lambda: store.status()["waiting"] == 0)
            return int(store.statistics()["sessions"])

    assert in_child(child) == 1


@pytest.mark.parametrize("seed", range(2))
def test_a_storm_of_signals_while_it_waits(server: Server, seed: int) -> None:
    """The grant comes just when the handler raises."""

    def child() -> int:
        with (
            rallypoint.connect(
                server.address, secret=server.secret, ttl=3.0, timeout=DEADLINE
            ) as store,
            rallypoint.connect(server.address, secret=server.secret, timeout=DEADLINE) as other,
        ):
            chance = random.Random(seed)
            go, done = threading.Event(), threading.Event()
            stop = False

            def hold() -> None:
                while True:
                    go.wait()
                    go.clear()
                    if stop:
                        return
                    with other.lock("l"):
                        done.set()
                        threading.Event().wait(chance.random() * 0.003)

            holder = threading.Thread(target=hold)
            holder.start()

            def use() -> None:
                with store.lock("l", ttl=LONG):
                    pass

            with Storm(seed) as storm:
                while storm.raised < 40:
                    done.clear()
                    go.set()
                    done.wait()
                    storm.strike(use)
                    with other.lock("l", timeout=DEADLINE):
                        pass
            stop = True
            go.set()
            holder.join()
            until(lambda: store.status()["waiting"] == 0)  # the keep-alive cancels given-up calls
            return 0

    assert in_child(child) == 0


def test_a_second_signal_in_the_end_of_a_call_leaves_no_waiter(server: Server) -> None:
    """An exception that struck while an exception was handled kept the lease as one that is asked
    for: the thread's next call was refused as one of a signal handler."""
    with (
        rallypoint.connect(server.address, secret=server.secret, ttl=3.0) as store,
        rallypoint.connect(server.address, secret=server.secret) as other,
    ):
        held, over = threading.Event(), threading.Event()

        def hold() -> None:
            with other.lock("l"):
                held.set()
                over.wait(DEADLINE)

        holder = Thread(hold)
        held.wait(DEADLINE)
        lock = store.lock("l")

        def raise_again(_: object) -> None:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rallypoint.store.client.lease.Lease.give_up", raise_again)
            with alarm(0.3, lambda: 1 // 0), pytest.raises(KeyboardInterrupt):  # while it waits
                lock.acquire()
        with pytest.raises(rallypoint.LockTimeout):
            lock.acquire(timeout=0.05)
        until(lambda: store.status()["waiting"] == 0)
        over.set()
        holder.result()


# --- what is counted and written down ---


def test_statistics_of_each_lock(store: Store) -> None:
    assert store.statistics()["locks"] == {}
    for _ in range(3):
        with store.lock("a"):
            threading.Event().wait(0.02)
    with store.lock("b"):
        pass
    seen = store.statistics()["locks"]
    assert sorted(seen) == ["a", "b"]
    assert seen["a"]["acquisitions"] == 3
    assert seen["a"]["hold_seconds"] >= 0.06
    assert seen["a"]["wait_seconds"] > 0
    assert (seen["a"]["timeouts"], seen["a"]["losses"], seen["b"]["acquisitions"]) == (0, 0, 1)


def test_statistics_have_an_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.store.client.client.SEEN_LOCKS", 3)
    for number in range(5):
        with store.lock(str(number)):
            pass
    assert sorted(store.statistics()["locks"]) == ["2", "3", "4"]


def test_long_waits_are_in_the_log(
    network: Network, other: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store = network.connect(ttl=SHORT)
    grant = other.lock("ckpt").acquire()

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]

    with caplog.at_level(logging.INFO, "rallypoint"):
        thread = Thread(store.lock("ckpt", ttl=SHORT).acquire)
        until(said)
        [while_it_waits] = said()
        assert while_it_waits.startswith(f'waiting for the lock "ckpt" at {store.address} for 1.')
        other.ask(wire.Unlock, "ckpt", grant.token)
        thread.result()
        until(lambda: len(said()) == 2)
    assert said()[1].startswith("waited ")
    assert said()[1].endswith(f' s for the lock "ckpt" at {store.address}')
