"""What is said after an outage that was longer than the session's lease, and what a signal handler
may raise in a wait.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

import pytest

import rallypoint
from rallypoint.errors import SessionLost, StoreTimeout, StoreUnreachable
from rallypoint.store.client.reconnect import Reach
from rallypoint.testing import ChaosProxy

from .live import Thread, kept_port, until
from .processes import ServerProcess
from .raw import DEADLINE

SECRET = b"sixteen bytes or more"


def outage(store: rallypoint.Store) -> SessionLost:
    """Ask until this client's session is over."""
    for _ in range(20):
        try:
            store.add("n")
        except SessionLost as lost:
            return lost
        except StoreTimeout:
            continue
    pytest.fail("the session was never given up")


def test_a_server_that_is_gone_is_not_blamed_on_the_client_and_one_that_is_new_is_told() -> None:
    with rallypoint.serve(secret=SECRET) as first, ChaosProxy(first.address) as proxy:
        store = rallypoint.connect(
            proxy.address, secret=SECRET, ttl=1.0, timeout=2.0, same_host=False
        )
        store.add("n", 5)
        gone = proxy.refuse()
        proxy.reset()
        lost = outage(store)
        assert "has not been reached for" in str(lost)
        assert not lost.same_server
        said = " ".join((str(lost), *lost.why, *(text + command for text, command in lost.help)))
        assert "nothing listens there" in said
        assert "GIL" not in said
        assert "ttl=" not in said
        with rallypoint.serve(secret=SECRET) as second:
            proxy.retarget(second.address)
            gone.heal()
            told = outage(store)
            assert "another server than before, with none of its data" in str(told)
            assert told.outcome == "did not happen"
            assert store.add("n") == 1
            store.close()


def test_a_session_that_is_confirmed_while_the_reason_is_looked_for_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was lost, "not reached for 0.8 s, longer than the session's ttl of 3 s"."""
    with (
        ServerProcess() as server,
        rallypoint.connect(server.address, secret=server.secret, ttl=1.0, timeout=1.0) as store,
    ):
        store["k"] = 1
        problem, answered, looked = Reach.problem, threading.Event(), threading.Event()

        def slow(reach: Reach, *, look: bool = True) -> StoreUnreachable:
            if look:
                server.go_on()
                assert answered.wait(DEADLINE)
                looked.set()
            return problem(reach, look=look)

        monkeypatch.setattr(Reach, "problem", slow)
        server.stop()
        assert store.wait("k", timeout=DEADLINE) == 1
        answered.set()
        assert looked.wait(DEADLINE)
        for _ in range(300):  # the thread that looked goes on meanwhile
            assert store.add("n") > 0


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, KeyboardInterrupt, TimeoutError])
def test_whatever_a_signal_handler_raises_in_a_wait_comes_out(kind: type[BaseException]) -> None:
    def raises(number: int, frame: FrameType | None) -> None:
        raise kind("60 s left")

    before = signal.signal(signal.SIGALRM, raises)
    try:
        with (
            rallypoint.serve() as server,
            rallypoint.connect(server.address, secret=server.secret) as store,
        ):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(kind, match="60 s left"):
                store.wait("go", timeout=30.0)
            assert store.add("n") == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("same_host", [True, False])
def test_a_store_that_was_stopped_in_good_order_and_started_again_has_its_clients_back(
    same_host: bool,
) -> None:
    """After a kill -9 and a restart a client went on with the new server; after SIGTERM, a rolling
    update for example, its object was of no use for ever: StoreClosed at every call."""
    with (
        kept_port() as port,
        rallypoint.serve(secret=SECRET, port=port) as first,
        rallypoint.connect(
            first.address, secret=SECRET, same_host=same_host, timeout=60.0
        ) as store,
        rallypoint.connect(first.address, secret=SECRET, same_host=same_host, timeout=60.0) as idle,
    ):
        store.add("n", 5)
        grant = store.lock("l").acquire()
        waits = [Thread(store.wait, "never"), Thread(lambda: list(store.watch("never")))]
        until(lambda: store.status()["waiting"] == 2)
        first.stop()
        for wait in waits:
            with pytest.raises(rallypoint.StoreClosed) as caught:
                wait.result()
            assert caught.value.outcome == "did not happen"
        assert grant.lost
        with pytest.raises(rallypoint.StoreClosed):
            idle["a"] = 1
        with rallypoint.serve(secret=SECRET, port=port) as second:
            assert second.address == first.address
            for one in (store, idle):
                assert one.add("n") in (1, 2)
            assert store["n"] == 2
            with store.lock("l", timeout=60.0):
                assert idle.get("n") == 2
        with pytest.raises(rallypoint.StoreClosed):
            idle.wait("n")
