"""The store against plain dicts and lists: any sequence of requests, repetitions, cancellations,
deaths and time.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rallypoint.store.state.quotas import HELD_BYTES, ITEM_BYTES, KEY_BYTES, QUEUE_BYTES
from rallypoint.store.state.state import Session, State
from rallypoint.wire import messages as m

from ..search import tries

encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
LIMITS = m.Limits(10**9, 10**9, 4096, 10**6, 100, 1000)
RANKS = (0, 1, 2)
KEYS = ("a", "a/b", "c")
TTL = 10.0

ranks = st.sampled_from(RANKS)
names = st.sampled_from(KEYS)
values = st.one_of(st.integers(-5, 5), st.text("xy", max_size=3), st.just("long" * 400))


class Blob:
    def __init__(self, size: int) -> None:
        self.size = size


class Model(RuleBasedStateMachine):
    """`keys` is a dict, a queue is a list, a lock is a list whose first is the holder, a barrier is
    a list of who is there.
    """

    @initialize()
    def begin(self) -> None:
        self.state = State(LIMITS)
        self.now = 0.0
        self.revision = 0
        self.keys: dict[str, Any] = {}
        self.owners: dict[str, int] = {}  # of ephemeral keys
        self.expires: dict[str, float] = {}
        self.queues: dict[str, list[tuple[int, Any]]] = {
            name: [] for name in KEYS
        }  # numbered values
        self.held: dict[int, dict[int, tuple[str, Any]]] = {}
        self.locks: dict[str, list[tuple[int, int]]] = {name: [] for name in KEYS}  # (rank, seq)
        self.tokens: dict[str, int] = {}
        self.seats: dict[str, list[tuple[int, int]]] = {name: [] for name in KEYS}
        self.late: dict[
            str, tuple[set[int], int]
        ] = {}  # of a barrier that broke: who was not there, and how many are still to come
        self.expected: list[
            tuple[int, int, str]
        ] = []  # answers to those who waited: rank, seq, type
        self.sessions: dict[int, Session] = {}
        self.seqs = dict.fromkeys(RANKS, 0)
        self.answered: dict[
            tuple[int, int], tuple[m.Request, Any]
        ] = {}  # changing requests that are not acknowledged
        self.blobs: dict[int, Blob] = {}
        self.seen: dict[str, Any] = {}  # what one who watches knows
        self.watched = 0
        self.born = 0
        for rank in RANKS:
            self.open(rank)

    def open(self, rank: int) -> None:
        self.born += 1
        session = self.state.open(
            self.now, self.born.to_bytes(16, "big"), TTL, m.Identity("h", self.born, rank), resume=False, acked=0
        )  # fmt: skip
        assert isinstance(session, Session)
        self.sessions[rank] = session
        self.held[rank] = {}
        self.seqs[rank] = 0

    def ask(
        self,
        rank: int,
        kind: type[m.Request],
        *fields: Any,
        large: Blob | None = None,
        **named: Any,
    ) -> Any:
        self.seqs[rank] += 1
        session = self.sessions[rank]
        request = kind(self.seqs[rank], session.acked_in_slot(0), *fields, **named)
        if large is not None:
            assert self.state.reserve(large.size) is None
        answer = self.state.apply(self.now, session, request, large)
        if request.changes:
            self.answered[rank, request.seq] = (request, answer)
        if answer is None:
            return None
        assert answer.revision == self.state.revision
        return answer

    def read(self, reply: Any) -> Any:
        if isinstance(reply, m.Absent):
            return None
        return decode(reply.value) if isinstance(reply.value, bytes) else "large"

    def changed(self, times: int = 1) -> None:
        self.revision += times

    # --- keys ---

    @rule(
        rank=ranks,
        key=names,
        value=values,
        ephemeral=st.booleans(),
        ttl=st.sampled_from([None, None, 2.0, 5.0]),
    )
    def set(self, rank: int, key: str, value: Any, ephemeral: bool, ttl: float | None) -> None:
        done = self.ask(rank, m.Set, key, encode(value), ephemeral=ephemeral, ttl=ttl)
        assert bool(done.replaced) == (key in self.keys)
        self.written(rank, key, value, ephemeral, ttl)

    @rule(rank=ranks, key=names, size=st.integers(1, 5000))
    def set_large(self, rank: int, key: str, size: int) -> None:
        self.ask(rank, m.Set, key, b"", large=Blob(size))
        self.written(rank, key, "large", False, None)

    def written(self, rank: int, key: str, value: Any, ephemeral: bool, ttl: float | None) -> None:
        self.keys[key] = value
        self.owners.pop(key, None)
        self.expires.pop(key, None)
        if ephemeral:
            self.owners[key] = rank
        if ttl is not None:
            self.expires[key] = self.now + ttl
        self.changed()

    @rule(rank=ranks, key=names, expected=values, value=values)
    def compare_and_set(self, rank: int, key: str, expected: Any, value: Any) -> None:
        reply = self.ask(rank, m.CompareAndSet, key, encode(value), expected=encode(expected))
        if key in self.keys and self.keys[key] == expected:
            assert isinstance(reply, m.Done)
            self.written(rank, key, value, False, None)
        else:
            assert self.read(reply) == self.keys.get(key)

    @rule(rank=ranks, key=names, wanted=st.booleans())
    def delete(self, rank: int, key: str, wanted: bool) -> None:
        reply = self.ask(rank, m.Delete, key, wanted)
        there = key in self.keys
        assert isinstance(reply, m.Absent) == (not there)
        if there:
            if wanted:
                assert self.read(reply) == self.keys[key]
            self.removed(key)

    def removed(self, key: str) -> None:
        del self.keys[key]
        self.owners.pop(key, None)
        self.expires.pop(key, None)
        self.changed()

    @rule(rank=ranks, key=names, amount=st.integers(-300, 300))
    def add(self, rank: int, key: str, amount: int) -> None:
        reply = self.ask(rank, m.Add, key, amount)
        old = self.keys.get(key, 0)
        if isinstance(old, int):
            assert reply.number == old + amount
            self.keys[key] = old + amount
            self.changed()
        else:
            assert reply.code == "wrong-type"

    @rule(rank=ranks, prefix=st.sampled_from(["", "a", "a/", "x"]))
    def look(self, rank: int, prefix: str) -> None:
        expected = sorted(key for key in self.keys if key.startswith(prefix))
        assert sorted(self.ask(rank, m.Keys, prefix).names) == expected
        assert self.ask(rank, m.Keys, prefix, True).number == len(expected)
        assert list(self.ask(rank, m.Exists, KEYS).names) == [
            key for key in KEYS if key in self.keys
        ]
        for key in KEYS:
            assert self.read(self.ask(rank, m.Get, key)) == self.keys.get(key)

    @rule(rank=ranks)
    def watch(self, rank: int) -> None:
        """What is learned from changes alone is what there is."""
        reply = self.ask(rank, m.Watch, "", self.watched, 0.0)
        if isinstance(reply, m.Changes):
            last = self.watched
            for change in reply.changes:
                assert last < change.revision <= reply.until
                last = change.revision
                if change.value is None:
                    del self.seen[change.key]
                else:
                    self.seen[change.key] = "large" if change.large else decode(change.value)
            self.watched = reply.until
        assert self.seen == self.keys

    # --- queues ---

    @rule(rank=ranks, name=names, value=values)
    def push(self, rank: int, name: str, value: Any) -> None:
        self.changed()
        number = self.revision
        self.queues[name].append((number, value))
        assert self.ask(rank, m.Push, name, encode(value)).number == len(self.queues[name])

    @rule(rank=ranks, name=names, hold=st.booleans())
    def pop(self, rank: int, name: str, hold: bool) -> None:
        reply = self.ask(rank, m.Pop, name, None, hold)
        if not self.queues[name]:
            assert isinstance(reply, m.Absent)
            return
        number, value = self.queues[name].pop(0)
        assert (reply.modified, decode(reply.value)) == (number, value)
        if hold:
            self.held[rank][number] = (name, value)
        self.changed()

    @rule(rank=ranks, accept=st.booleans(), data=st.data())
    def settle(self, rank: int, accept: bool, data: st.DataObject) -> None:
        if not self.held[rank]:
            assert isinstance(self.ask(rank, m.Settle, "a", 1, accept), m.Absent)
            return
        number = data.draw(st.sampled_from(sorted(self.held[rank])))
        name, value = self.held[rank].pop(number)
        assert isinstance(self.ask(rank, m.Settle, name, number, accept), m.Done)
        if not accept:
            self.back(name, number, value)
        self.changed()

    def back(self, name: str, number: int, value: Any) -> None:
        self.queues[name] = sorted([*self.queues[name], (number, value)], key=lambda item: item[0])

    @rule(rank=ranks, name=names)
    def length(self, rank: int, name: str) -> None:
        assert self.ask(rank, m.Length, name).number == len(self.queues[name])

    # --- locks and barriers ---

    @rule(rank=ranks, name=names)
    def lock(self, rank: int, name: str) -> None:
        reply = self.ask(rank, m.Lock, name, f"thread {self.seqs[rank]}", None)
        self.locks[name].append((rank, self.seqs[rank]))
        assert (reply is None) == (len(self.locks[name]) > 1)
        if reply is not None:
            self.changed()
            self.tokens[name] = reply.token

    @rule(rank=ranks, name=names)
    def unlock(self, rank: int, name: str) -> None:
        reply = self.ask(rank, m.Unlock, name, self.tokens.get(name, 0))
        mine = bool(self.locks[name]) and self.locks[name][0][0] == rank
        assert isinstance(reply, m.Done) == mine
        if mine:
            self.unlocked(name)

    def unlocked(self, name: str) -> None:
        del self.locks[name][0]
        self.changed()
        self.pass_on(name)

    def pass_on(self, name: str) -> None:
        if self.locks[name]:
            self.changed()
            self.expected.append((*self.locks[name][0], "Granted"))

    @rule(rank=ranks, name=names)
    def arrive(self, rank: int, name: str) -> None:
        reply = self.ask(rank, m.Arrive, name, 3, None)
        seats = self.seats[name]
        late, to_come = self.late.get(name, (set(), 0))
        if rank in late:
            assert reply.code == "barrier-broken"
            self.late[name] = late - {rank}, to_come - 1
            if to_come == 1:
                del self.late[name]
        elif len(seats) == 2:
            self.late.pop(name, None)
            assert isinstance(reply, m.Integer)
            self.expected += [(*seat, "Integer") for seat in seats]
            seats.clear()
            self.changed()
        else:
            assert reply is None
            seats.append((rank, self.seqs[rank]))

    def broken(self, name: str, *left: tuple[int, int]) -> None:
        """Seats of a barrier were left: everybody else there is told, and who has not come
        will be.
        """
        seats = self.seats[name]
        if left:
            self.expected += [(*seat, "Failed") for seat in seats if seat not in left]
            self.late[name] = set(RANKS) - {rank for rank, _ in seats}, 3 - len(seats)
            seats.clear()

    # --- the way there and back ---

    @precondition(lambda self: self.answered)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A request that changes something comes again: it gets the same reply, and nothing
        changes.
        """
        rank, seq = data.draw(st.sampled_from(sorted(self.answered)))
        request, answer = self.answered[rank, seq]
        again = self.state.apply(self.now, self.sessions[rank], request)
        assert again == answer or answer is None

    @rule(rank=ranks)
    def acknowledge(self, rank: int) -> None:
        """All replies up to the first that is waited for have arrived."""
        session = self.sessions[rank]
        acked = min(session.waiting, default=self.seqs[rank] + 1) - 1
        self.state.apply(self.now, session, m.Ping(0, acked))
        assert session.acked_in_slot(0) == acked
        assert all(seq > acked for seq in session.replies)
        for who, seq in list(self.answered):
            if who == rank and seq <= acked:
                del self.answered[who, seq]
                request = m.Add(seq, 0, "a", 1)
                assert self.state.apply(self.now, session, request) is None

    @precondition(lambda self: any(session.waiting for session in self.sessions.values()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Somebody does not wait any longer."""
        rank, seq = data.draw(
            st.sampled_from(
                sorted((rank, seq) for rank in RANKS for seq in self.sessions[rank].waiting)
            )
        )
        self.state.apply(self.now, self.sessions[rank], m.Cancel(0, 0, seq))
        for line in self.locks.values():
            if (rank, seq) in line:
                line.remove((rank, seq))
        for name, line in self.seats.items():
            if (rank, seq) in line:
                self.broken(name, (rank, seq))

    @rule(seconds=st.sampled_from([1.0, 3.0]), lazily=st.booleans())
    def time(self, seconds: float, lazily: bool) -> None:
        self.now += seconds
        for session in self.sessions.values():
            session.heard = self.now
        for key in [key for key, until in self.expires.items() if until <= self.now]:
            self.removed(key)
        if lazily:
            self.ask(0, m.Ping)
        else:
            assert self.state.tick(self.now) == []

    @rule(rank=ranks, silently=st.booleans())
    def die(self, rank: int, silently: bool) -> None:
        """A session ends, at its time or at once, and another takes its place."""
        session = self.sessions[rank]
        if silently:
            self.now += TTL + 1
            for other in self.sessions.values():
                other.heard = self.now if other is not session else other.heard
            for key in [key for key, until in self.expires.items() if until <= self.now]:
                self.removed(key)
            session.heard = min(session.heard, self.now - TTL)
            assert self.state.tick(self.now) == [session]
        else:
            self.state.end(self.now, session)
        for name, line in self.locks.items():
            holder = bool(line) and line[0][0] == rank
            line[:] = [entry for entry in line if entry[0] != rank]
            if holder:
                self.changed()
                self.pass_on(name)
        for number, (name, value) in self.held.pop(rank).items():
            self.back(name, number, value)
            self.changed()
        for name, seats in self.seats.items():
            self.broken(name, *[seat for seat in seats if seat[0] == rank])
        for late, _ in self.late.values():
            late.discard(rank)
        for key in [key for key, owner in self.owners.items() if owner == rank]:
            self.removed(key)
        for who, seq in list(self.answered):
            if who == rank:
                del self.answered[who, seq]
        self.compare_woken()
        self.open(rank)

    # --- what is true at all times ---

    @invariant()
    def compare_woken(self) -> None:
        if not hasattr(self, "state"):
            return
        woken, self.state.woken = self.state.woken, []
        found = []
        for session, reply in woken:
            rank = session.identity.rank
            assert rank is not None
            found.append((rank, reply.seq, type(reply).__name__))
            request, _ = self.answered[rank, reply.seq]
            self.answered[rank, reply.seq] = (request, reply)
            if isinstance(reply, m.Granted):
                assert reply.token > self.tokens[request.name]  # type: ignore[attr-defined]
                self.tokens[request.name] = reply.token  # type: ignore[attr-defined]
        assert sorted(found) == sorted(self.expected)
        self.expected = []
        assert self.state.revision == self.revision

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        if not hasattr(self, "state"):
            return
        state: Any = self.state
        entries = state._keys._entries.values()
        assert {
            entry.key: decode(entry.value) if isinstance(entry.value, bytes) else "large"
            for entry in entries
        } == self.keys
        assert state.budget.keys == len(self.keys)
        used = sum(KEY_BYTES + len(entry.key.encode()) + entry.size for entry in entries)
        items = [(number, value) for queue in self.queues.values() for number, value in queue]
        items += [
            (number, value) for held in self.held.values() for number, (_, value) in held.items()
        ]
        used += sum(ITEM_BYTES + len(encode(value)) for _, value in items)
        used += sum(QUEUE_BYTES + len(name) for name, queue in self.queues.items() if queue)
        used += sum(
            HELD_BYTES + len(held.name) + len(held.owner) for held in state._locks._held.values()
        )
        used += sum(HELD_BYTES + len(name) for name in state._claims._open)
        numbers = {number for number, _ in items}
        left = {
            id(held): held.weight
            for session in self.sessions.values()
            for held in session.kept.values()
            if getattr(held, "number", 0) not in numbers
        }
        used += sum(left.values())
        assert state.budget.used == used

    @invariant()
    def nobody_waits_unknown(self) -> None:
        if not hasattr(self, "state"):
            return
        waiting = sorted((rank, seq) for rank in RANKS for seq in self.sessions[rank].waiting)
        model = [entry for line in self.locks.values() for entry in line[1:]] + [
            seat for seats in self.seats.values() for seat in seats
        ]
        assert waiting == sorted(model)
        assert len(self.state.waiting) == len(model)


Model.TestCase.settings = tries(60, stateful_step_count=40)
TestModel = Model.TestCase
