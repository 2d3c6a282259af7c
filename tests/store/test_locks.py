"""The server's half of locks: whose turn it is, until when, and who would wait for ever."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rallypoint.store.limits import LONGEST_TTL, SHORTEST_TTL
from rallypoint.store.state.locks import CIRCLE_SHOWN
from rallypoint.store.state.state import Session, State
from rallypoint.wire import messages as m

from ..search import tries

MIB = 1024 * 1024
ROOMY = m.Limits(64 * MIB, 64 * MIB, 4096, 10_000, 1000, 10_000)


class World:
    """A store whose time stands still, and its clients."""

    def __init__(self) -> None:
        self.state = State(ROOMY)
        self.now = 1000.0

    def client(self, rank: int, ttl: float = 10.0) -> Client:
        return Client(self, rank, ttl)

    def wait(self, seconds: float) -> None:
        """Time passes in which nobody gives a sign of life."""
        self.now += seconds
        self.state.tick(self.now)

    def woken(self) -> list[tuple[int, m.Reply]]:
        woken, self.state.woken = self.state.woken, []
        return [(session.identity.rank or 0, reply) for session, reply in woken]


class Client:
    def __init__(self, world: World, rank: int, ttl: float) -> None:
        self.world = world
        self.rank = rank
        session = world.state.open(
            world.now,
            bytes([rank]) * 16,
            ttl,
            m.Identity("n0", 100 + rank, rank),
            resume=False,
            acked=0,
        )
        assert isinstance(session, Session)
        self.session = session
        self.seq = 0

    def ask(self, kind: type[m.Request], *fields: Any) -> Any:
        """The reply, None when it waits."""
        self.session.heard = self.world.now
        self.seq += 1
        return self.world.state.apply(self.world.now, self.session, kind(self.seq, 0, *fields))

    def lock(
        self,
        name: str = "l",
        owner: str = "MainThread",
        timeout: float | None = None,
        ttl: float | None = None,
    ) -> Any:
        return self.ask(m.Lock, name, owner, timeout, ttl)

    def unlock(self, granted: m.Reply, name: str = "l") -> Any:
        assert isinstance(granted, m.Granted)
        return self.ask(m.Unlock, name, granted.token)

    def live(self) -> None:
        self.session.heard = self.world.now

    def cancel(self, seq: int) -> None:
        self.session.heard = self.world.now
        assert self.world.state.apply(self.world.now, self.session, m.Cancel(0, 0, seq)) is None


@pytest.fixture
def world() -> World:
    return World()


# --- whose turn it is ---


def test_giving_it_back_is_what_hands_it_over(world: World) -> None:
    """One round trip: the answer to the next one is there when the answer to `Unlock` is."""
    a, b, c = (world.client(rank) for rank in range(3))
    first = a.lock()
    assert (b.lock(), c.lock()) == (None, None)
    assert isinstance(a.unlock(first), m.Done)
    [(rank, second)] = world.woken()
    assert isinstance(second, m.Granted)
    assert rank == 1
    assert second.token == second.revision > first.token
    assert isinstance(b.unlock(second), m.Done)
    assert [rank for rank, _ in world.woken()] == [2]


def test_looking_changes_nothing(world: World) -> None:
    a, b = world.client(0), world.client(1)
    assert isinstance(b.lock(timeout=-1.0), m.Absent)
    granted = a.lock(ttl=5.0)
    seen = b.lock(timeout=-1.0)
    assert isinstance(seen, m.TimedOut)
    assert seen.holder == a.session.identity
    assert isinstance(a.lock(timeout=-1.0), m.TimedOut)  # for who has it, too
    a.unlock(granted)
    assert isinstance(b.lock(timeout=-1.0), m.Absent)
    assert world.woken() == []
    assert world.state.budget.used == 0


def test_a_thread_that_has_it_is_told_so(world: World) -> None:
    a = world.client(3)
    a.lock(owner="MainThread#one")
    world.wait(2.0)
    told = a.lock(owner="MainThread#one")
    assert told.code == "lock-twice"
    assert told.text == 'rank 3 (pid 103 on n0) asks for the lock "l" and has it already, for 2.0 s'
    assert a.lock(owner="MainThread#two") is None, "another thread waits"
    assert isinstance(a.lock(owner="MainThread#one", timeout=0.0), m.TimedOut), (
        "who does not wait for it is told who has it"
    )


def test_a_thread_is_the_same_in_all_its_sessions(world: World) -> None:
    """Two store objects of a process, and one thread that uses both."""
    a, b = world.client(0), world.client(1)
    a.lock(owner="MainThread#one")
    assert b.lock(owner="MainThread#one").code == "lock-twice"
    assert b.lock(owner="MainThread#one", timeout=5.0) is None, "that has an end"
    a.lock("m", owner="MainThread")
    assert b.lock("m", owner="MainThread") is None, (
        "without a name of its own a thread is another one in each session"
    )


# --- until when ---


def test_it_is_passed_on_after_its_own_ttl(world: World) -> None:
    a, b = world.client(0, ttl=10.0), world.client(1)
    first = a.lock(ttl=2.0)
    assert b.lock() is None
    world.wait(1.9)
    assert world.woken() == []
    assert world.state.due() == pytest.approx(1002.0)
    world.wait(0.1)
    [(rank, second)] = world.woken()
    assert rank == 1
    assert not a.session.ended
    assert isinstance(a.unlock(first), m.Absent)
    stale = a.ask(m.Set, "k", b"\x01", 0, None, False, first.token)
    assert stale.code == "fence-stale"
    assert str(b.session.identity) in stale.text
    assert isinstance(second, m.Granted)
    assert isinstance(b.ask(m.Set, "k", b"\x01", 0, None, False, second.token), m.Done)


def test_signs_of_life_keep_it(world: World) -> None:
    a, b = world.client(0), world.client(1)
    a.lock(ttl=2.0)
    assert b.lock() is None
    for _ in range(10):
        world.wait(1.9)
        a.live()
        b.live()
    assert world.woken() == []
    b.live()
    world.wait(2.0)
    assert [rank for rank, _ in world.woken()] == [1]


def test_a_session_lives_as_long_as_its_longest_lease(world: World) -> None:
    a = world.client(0, ttl=10.0)
    long = a.lock("long", ttl=60.0)
    a.lock("short", ttl=2.0)
    world.wait(59.9)
    assert list(a.session.locks.values()) == ["long"]
    assert not a.session.ended
    a.unlock(long, "long")
    world.wait(9.9)
    assert not a.session.ended
    world.wait(0.2)
    assert a.session.ended, "and not for longer, once that is given back"


def test_it_ends_with_its_longest_lease(world: World) -> None:
    a, b = world.client(0, ttl=1.0), world.client(1, ttl=100.0)
    a.lock(ttl=60.0)
    assert b.lock() is None
    world.wait(60.0)
    assert a.session.ended
    assert a.session.because == "nothing was heard of it for 60 s"
    assert [rank for rank, _ in world.woken()] == [1]


def test_a_grant_to_somebody_silent_is_over_at_once(world: World) -> None:
    """He was stopped while he waited; those behind him do not wait for his lease."""
    a, b, c = (world.client(rank, ttl=100.0) for rank in range(3))
    granted = a.lock(ttl=50.0)
    assert b.lock(ttl=2.0) is None
    world.wait(5.0)
    assert c.lock(ttl=2.0) is None
    a.unlock(granted)
    world.state.tick(world.now)
    grants = world.woken()
    assert [rank for rank, _ in grants] == [1, 2]
    assert list(b.session.locks) == []
    assert list(c.session.locks.values()) == ["l"]


@pytest.mark.parametrize(
    ("asked", "given"),
    [(0.0, SHORTEST_TTL), (float("nan"), SHORTEST_TTL), (-1.0, SHORTEST_TTL), (1e30, LONGEST_TTL)],
)
def test_a_lease_is_never_too_short_or_without_an_end(
    world: World, asked: float, given: float
) -> None:
    a = world.client(0, ttl=LONGEST_TTL * 2)
    a.lock(ttl=asked)
    world.wait(given * 0.99)
    assert list(a.session.locks) != []
    world.wait(given * 0.01)
    assert list(a.session.locks) == []


def test_the_end_of_a_session_passes_on_all_it_had(world: World) -> None:
    a, b = world.client(0), world.client(1)
    for name in "xyz":
        a.lock(name, ttl=60.0)
        assert b.lock(name, owner=name) is None
    world.state.end(world.now, a.session, "its process died")
    assert [rank for rank, _ in world.woken()] == [1, 1, 1]
    assert world.state.due() == pytest.approx(1010.0), "no lease of it is left to look at"


def test_leases_leave_nothing_behind(world: World) -> None:
    a = world.client(0)
    for _ in range(1000):
        a.unlock(a.lock(ttl=3600.0))
    assert len(world.state._locks.leases) < 200
    assert not world.state._locks._lines
    assert world.state.budget.used == 0


# --- who would wait for ever ---


def test_a_circle_of_one_thread_with_two_sessions(world: World) -> None:
    a, b, c = (world.client(rank) for rank in range(3))
    a.lock("a", "MainThread#one")
    c.lock("c", "MainThread#two")
    assert c.lock("a", "MainThread#two") is None
    assert b.lock("c", "MainThread#one").code == "lock-cycle"
    assert b.lock("c", "MainThread#one", 5.0) is None


def test_two_that_wait_for_each_other(world: World) -> None:
    a, b = world.client(0), world.client(1)
    a.lock("a")
    b.lock("b")
    assert a.lock("b") is None
    told = b.lock("a")
    assert told.code == "lock-cycle"
    assert told.text == (
        'waiting for the lock "a" would never end: rank 0 (pid 100 on n0) has "a" and waits for "b"; '
        'rank 1 (pid 101 on n0), who asks, has "b"'
    )
    assert told.present == (a.session.identity, b.session.identity)
    assert len(world.state.waiting) == 1, "who asked does not wait; who waited before still does"


def test_a_circle_of_many_threads_and_processes(world: World) -> None:
    a, b = world.client(0), world.client(1)
    a.lock("1", "one#1")
    a.lock("2", "two#2")
    b.lock("3", "three#3")
    b.lock("4", "MainThread")
    assert a.lock("2", "one#1") is None
    assert a.lock("3", "two#2") is None
    assert b.lock("4", "three#3") is None
    told = b.lock("1", "MainThread")
    assert told.code == "lock-cycle"
    assert told.text == (
        'waiting for the lock "1" would never end: the thread one of rank 0 (pid 100 on n0) has "1" and waits for "2"; '
        'the thread two of rank 0 (pid 100 on n0) has "2" and waits for "3"; the thread three of rank 1 (pid 101 on n0) has "3" and '
        'waits for "4"; rank 1 (pid 101 on n0), who asks, has "4"'
    )


def test_a_circle_behind_others_who_wait(world: World) -> None:
    """Each stands behind somebody who has nothing to do with it."""
    a, b, c, d = (world.client(rank) for rank in range(4))
    a.lock("a")
    b.lock("b")
    assert c.lock("b") is None
    assert d.lock("a") is None
    assert a.lock("b") is None
    assert b.lock("a").code == "lock-cycle"
    # c has nothing that anybody waits for, and may ask for more by another thread.
    assert c.lock("a", "other") is None


def test_a_circle_by_what_was_handed_over(world: World) -> None:
    """Who holds changes while others wait; the question is asked of those who hold now."""
    a, b, c = (world.client(rank) for rank in range(3))
    first = a.lock("a")
    b.lock("b")
    assert c.lock("a", "waits") is None
    assert b.lock("a") is None
    a.unlock(first, "a")
    assert [rank for rank, _ in world.woken()] == [2]
    assert c.lock("b", "waits").code == "lock-cycle"
    assert c.lock("b", "another") is None


def test_a_line_is_no_circle(world: World) -> None:
    clients = [world.client(rank) for rank in range(60)]
    for rank, client in enumerate(clients):
        client.lock(str(rank))
    for rank, client in enumerate(clients[:-1]):
        assert client.lock(str(rank + 1)) is None
    assert isinstance(clients[-1].lock("0", timeout=0.0), m.TimedOut), (
        "who does not wait closes no circle"
    )
    told = clients[-1].lock("0")
    assert told.code == "lock-cycle"
    assert dict(told.details)["owners"] == 60
    assert f"{59 - CIRCLE_SHOWN} more in the same way" in told.text
    assert len(told.text) < 2000


@pytest.mark.parametrize("how", ["cancelled", "timed out", "ended"])
def test_who_waits_no_longer_is_in_no_circle(world: World, how: str) -> None:
    a, b = world.client(0), world.client(1)
    a.lock("a")
    b.lock("b")
    assert a.lock("b", timeout=5.0) is None
    if how == "cancelled":
        a.cancel(a.seq)
    elif how == "timed out":
        b.live()
        world.wait(5.0)
    else:
        world.state.end(world.now, a.session)
    told = b.lock("a")
    assert isinstance(told, m.Granted) if how == "ended" else told is None


# --- all of it, against a model ---

NAMES = ("x", "y", "z")
OWNERS = ("MainThread", "other")
TTLS = (None, 0.5, 3.0, 30.0)
RANKS = st.integers(0, 2)

Owner = tuple[int, str]


class Machine(RuleBasedStateMachine):
    """Locks as lists: the first has it, the others wait, each with its owner, the number of the
    request and the ttl.
    """

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.all = [self.world.client(rank, ttl) for rank, ttl in enumerate((10.0, 10.0, 3.0))]
        self.locks: dict[str, list[tuple[Owner, int, float | None]]] = {name: [] for name in NAMES}
        self.tokens: dict[str, int] = {}
        self.newest = 0

    def who_holds(self, name: str) -> Owner | None:
        return self.locks[name][0][0] if self.locks[name] else None

    def would_wait_for(self, name: str) -> set[Owner]:
        """Everybody whom one who asks for it would wait for, over others too: by brute force."""
        found: set[Owner] = set()
        names = {name}
        while True:
            holders = {holder for holder in map(self.who_holds, names) if holder is not None}
            if holders <= found:
                return found
            found |= holders
            names |= {
                other
                for other, line in self.locks.items()
                if any(owner in found for owner, _, _ in line[1:])
            }

    def connected(self, rank: int) -> Client:
        """Who lost his session has a new one, under another rank."""
        client = self.all[-3 + rank]
        if client.session.ended:
            self.all += [self.world.client(len(self.all) + more, 10.0) for more in range(3)]
        return self.all[-3 + rank]

    @rule(
        rank=RANKS,
        name=st.sampled_from(NAMES),
        owner=st.sampled_from(OWNERS),
        ttl=st.sampled_from(TTLS),
        waits=st.integers(0, 9),
    )
    def lock(self, rank: int, name: str, owner: str, ttl: float | None, waits: int) -> None:
        client = self.connected(rank)
        reply = client.lock(name, owner, None if waits else 0.0, ttl)
        line, me = self.locks[name], (client.rank, owner)
        if not line:
            assert isinstance(reply, m.Granted)
            line.append((me, client.seq, ttl))
            self.granted(name, reply.token)
        elif not waits:
            assert isinstance(reply, m.TimedOut)
            assert reply.holder == self.all[line[0][0][0]].session.identity
            assert reply.queue == tuple(
                self.all[rank].session.identity for (rank, _), _, _ in line[1:]
            )
        elif line[0][0] == me:
            assert reply.code == "lock-twice"
        elif me in self.would_wait_for(name):
            assert reply.code == "lock-cycle"
        else:
            assert reply is None
            line.append((me, client.seq, ttl))

    @rule(rank=RANKS, name=st.sampled_from(NAMES))
    def unlock(self, rank: int, name: str) -> None:
        client = self.connected(rank)
        reply = client.ask(m.Unlock, name, self.tokens.get(name, 0))
        mine = bool(self.locks[name]) and self.locks[name][0][0][0] == client.rank
        assert isinstance(reply, m.Done if mine else m.Absent)
        if mine:
            self.over(name)

    @rule(rank=RANKS, name=st.sampled_from(NAMES))
    def give_up(self, rank: int, name: str) -> None:
        """Who waits goes; who has it and has not seen the answer yet gives it back."""
        client = self.connected(rank)
        for entry in self.locks[name]:
            if entry[0][0] == client.rank:
                client.cancel(entry[1])
                if entry is self.locks[name][0]:
                    self.over(name)
                else:
                    self.locks[name].remove(entry)
                return

    @rule(rank=RANKS)
    def sign_of_life(self, rank: int) -> None:
        self.connected(rank).live()

    @precondition(lambda self: self.newest > 5)
    @rule(rank=RANKS)
    def goodbye(self, rank: int) -> None:
        self.world.state.end(self.world.now, self.connected(rank).session)
        self.ended()

    @rule(seconds=st.sampled_from([0.25, 0.5, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.wait(seconds)
        now = self.world.now
        self.ended()

        def overdue() -> list[str]:
            def silent(name: str) -> float:
                return now - self.all[self.locks[name][0][0][0]].session.heard

            held = [name for name, line in self.locks.items() if line and line[0][2] is not None]
            return [name for name in held if silent(name) >= (self.locks[name][0][2] or 0.0)]

        while late := overdue():
            self.over(late[0])
        for client in self.all:  # with what was passed on to it just now
            mine = [
                line[0][2] for line in self.locks.values() if line and line[0][0][0] == client.rank
            ]
            assert (
                client.session.ended
                or client.session.heard + max([client.session.ttl, *[ttl or 0.0 for ttl in mine]])
                > now
            )

    def ended(self) -> None:
        """Waits of sessions that are over end before what they had is passed on."""
        dead = {client.rank for client in self.all if client.session.ended}
        for line in self.locks.values():
            line[1:] = [entry for entry in line[1:] if entry[0][0] not in dead]
        for name, line in self.locks.items():
            while line and line[0][0][0] in dead:
                self.over(name)

    def over(self, name: str) -> None:
        """The next has it."""
        del self.locks[name][0]
        self.tokens.pop(name, None)
        if self.locks[name]:
            self.tokens[name] = -1  # until it is seen

    def granted(self, name: str, token: int) -> None:
        assert token > self.newest, "tokens grow over all locks"
        self.newest = token
        self.tokens[name] = token

    @invariant()
    def all_is_as_in_the_model(self) -> None:
        state = self.world.state
        for rank, reply in self.world.woken():
            assert isinstance(reply, m.Granted)
            granted = [
                name
                for name, line in self.locks.items()
                if line and line[0][:2] == ((rank, line[0][0][1]), reply.seq)
            ]
            if granted:
                self.granted(granted[0], reply.token)
            else:
                self.newest = max(self.newest, reply.token)  # and it was lost at once
        held = {
            name: (entry.session.identity.rank, entry.owner, entry.token)
            for name, entry in state._locks._held.items()
        }
        assert held == {
            name: (*line[0][0], self.tokens[name]) for name, line in self.locks.items() if line
        }
        lines = {
            name: [waiter.request.seq for waiter in line]
            for name, line in state._locks._lines.items()
            if isinstance(name, str)
        }
        assert lines == {
            name: [seq for _, seq, _ in line[1:]] for name, line in self.locks.items() if line[1:]
        }
        assert sum(map(len, state._locks._lines.values())) == 2 * sum(map(len, lines.values()))
        for token in self.tokens.values():
            state._locks.check_fence(token)
        assert set(state._locks._tokens) == set(self.tokens.values())


def test_against_a_model() -> None:
    run_state_machine_as_test(Machine, settings=tries(150, stateful_step_count=40))
