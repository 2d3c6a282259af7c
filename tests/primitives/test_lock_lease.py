"""How a holder counts its lease, by a clock that stands still."""

from __future__ import annotations

import gc
import math
import sys
import threading
from typing import Any

import pytest

from rallypoint.store.client import lease as leases
from rallypoint.store.client.lease import SURE, Figures, Lease, Leases, names_held
from rallypoint.testing import ManualClock

from ..store.live import Thread


class Holder:
    """A session, as its leases see it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.confirmed = 0.0
        self.keep_alive: Any = self
        self.looks = 0
        self.leases = self.more()

    def more(self) -> Leases:
        session: Any = self
        return Leases(session, self.clock.monotonic, lambda: self.confirmed)

    def set_interval(self) -> None:
        """As the keep-alive does."""
        self.looks += 1

    ring = set_interval

    def lease(self, ttl: float = 10.0, name: str = "l", token: int = 1) -> Lease:
        lease = Lease(self.leases, name, f"the lock {name}", ttl, Figures())
        lease.begin()
        if token:
            lease.token, lease.state = token, "held"
        return lease

    def answer(self, sent: float) -> None:
        """To a sign of life arrives now."""
        self.leases.look()
        self.confirmed = max(self.confirmed, sent)


@pytest.fixture
def holder() -> Holder:
    return Holder()


def test_it_is_counted_from_when_the_sign_of_life_was_sent(holder: Holder) -> None:
    lease = holder.lease(10.0)
    holder.clock.advance(5.0)
    assert lease.left == pytest.approx(10.0 * SURE - 5.0)
    holder.answer(sent=2.0)
    assert lease.until == pytest.approx(2.0 + 10.0 * SURE)
    holder.clock.advance(6.8)
    assert not lease.lost.is_set()
    holder.clock.advance(0.1)
    assert lease.lost.is_set()
    assert lease.left == 0.0
    assert lease.because == "no sign of life of this process was confirmed for 9.9 s"


def test_it_is_over_before_the_server_can_think_so(holder: Holder) -> None:
    """The server counts from when a sign of life arrived, which is later than it was sent."""
    lease = holder.lease(10.0)
    holder.clock.advance(9.9)
    assert lease.over


def test_it_begins_with_the_request_that_asks_for_it(holder: Holder) -> None:
    """The last sign of life before it may be older than the whole lease; the request itself
    is one.
    """
    holder.clock.advance(100.0)
    lease = holder.lease(1.0)
    assert not lease.over
    holder.clock.advance(0.5)
    assert not lease.over


def test_what_was_over_does_not_come_back(holder: Holder) -> None:
    """A process was stopped; its next sign of life is confirmed before anybody has looked at the
    lease.
    """
    lease, waiting = holder.lease(2.0), holder.lease(2.0, token=0)
    holder.clock.advance(30.0)
    holder.answer(sent=30.0)
    assert holder.confirmed == 30.0
    assert lease.over
    assert lease.lost.is_set()
    assert waiting.over, "its turn may have come and gone"
    lease.lost.clear()
    assert lease.lost.is_set()


def test_of_several_each_is_counted_by_itself(holder: Holder) -> None:
    short, long = holder.lease(2.0), holder.lease(60.0)
    assert holder.leases.shortest(10.0) == 2.0
    assert holder.looks == 2
    assert holder.leases.look() == pytest.approx(2.0 * SURE)
    assert (holder.leases.shortest(10.0), holder.leases.longest(10.0)) == (2.0, 60.0)
    holder.clock.advance(2.0)
    assert holder.leases.look() == pytest.approx(60.0 * SURE)
    assert (short.over, long.over) == (True, False)
    short.drop()
    long.drop()
    assert holder.leases.look() == math.inf
    assert (holder.leases.shortest(10.0), holder.leases.longest(10.0)) == (10.0, 10.0)


def test_only_what_is_held_makes_the_server_keep_the_session(holder: Holder) -> None:
    lease = holder.lease(60.0, token=0)
    assert holder.leases.longest(10.0) == 10.0
    lease.token = 5
    assert holder.leases.longest(10.0) == 60.0
    lease.gone = True
    assert holder.leases.longest(10.0) == 10.0


def test_what_went_with_its_session_needs_no_signs_of_life(holder: Holder) -> None:
    lease = holder.lease(0.5)
    assert holder.leases.shortest(10.0) == 0.5
    holder.leases.end("the session is over")
    assert lease in holder.leases.held
    assert holder.leases.shortest(10.0) == 10.0


def test_the_end_of_the_session_is_the_end_of_all(holder: Holder) -> None:
    lease = holder.lease()
    holder.leases.end("the session is over")
    holder.leases.end("another reason")
    assert lease.gone
    assert lease.lost.is_set()
    assert lease.because == "the session is over"


def test_what_was_given_back_is_not_counted(holder: Holder) -> None:
    lease = holder.lease()
    lease.state = "done"
    holder.clock.advance(100.0)
    assert not lease.over
    assert not lease.lost.is_set()


def test_what_is_left_for_the_keeper(holder: Holder) -> None:
    class Block:
        pass

    block = Block()
    held, done, unwanted, orphan, lost = (holder.lease() for _ in range(5))
    done.state = "done"
    unwanted.state = "unwanted"
    orphan.end_with(block)
    held.end_with(holder)
    lost.state = "unwanted"
    lost.gone = True
    assert holder.leases.tidy() == [unwanted]
    assert list(holder.leases.held) == [held, unwanted, orphan]
    before = holder.looks
    del block
    assert holder.looks > before, "the keep-alive looks when the object goes"
    assert holder.leases.tidy() == [unwanted, orphan]


def test_who_waits_for_the_loss_is_woken_by_whoever_finds_it(holder: Holder) -> None:
    lease = holder.lease(2.0)
    woken: list[bool] = []
    threads = [
        threading.Thread(target=lambda: woken.append(lease.lost.wait(60.0))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    while len(lease.lost._sleepers) < 3:
        threading.Event().wait(0.001)
    holder.clock.advance(2.0)
    holder.leases.look()
    for thread in threads:
        thread.join(60.0)
    assert woken == [True] * 3
    assert lease.lost._sleepers == []
    assert lease.lost.wait(0)


def test_what_a_thread_holds_is_asked_while_sessions_come_and_go(holder: Holder) -> None:
    lease = holder.lease(name="mine")
    ended = threading.Event()

    def others() -> None:
        while not ended.is_set():
            holder.more()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    kept = [holder.more() for _ in range(50)]
    threads = [Thread(others) for _ in range(2)]
    try:
        for _ in range(300):
            assert "mine" in names_held(lease.thread)
    finally:
        ended.set()
        sys.setswitchinterval(interval)
    for thread in threads:
        thread.result()
    del kept
    holder.leases.held.clear()
    gc.collect()
    assert not [ref for ref in list(leases._all) if ref() is None]
