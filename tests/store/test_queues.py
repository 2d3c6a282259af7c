"""An item is in the queue, or with one session, or acknowledged: nothing else can become of it."""

from __future__ import annotations

import random

import msgspec
import pytest

from rallypoint.wire import messages as m

from .test_state import Blob, Client, Store

encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def a(store: Store) -> Client:
    return store.client(0)


@pytest.fixture
def b(store: Store) -> Client:
    return store.client(1)


@pytest.mark.parametrize("large", [False, True])
def test_an_acknowledgement_whose_answer_nobody_saw_is_taken_back(
    store: Store, a: Client, b: Client, large: bool
) -> None:
    """Its caller is told by an exception that he does not have the item: so it is not gone."""
    for n in range(3):
        b.ask(m.Push, "q", b"" if large else encode(n), large=Blob(5000 + n) if large else None)
    used = store.used
    item = a.ask(m.Pop, "q", None, True)
    settle = a.request(m.Settle, "q", item.modified, True)
    assert isinstance(a.send(settle), m.Done)
    a.send(m.Cancel(0, 0, settle.seq))
    assert store.used == used
    again = b.ask(m.Pop, "q", None, True)
    assert (again.modified, again.value) == (item.modified, item.value)
    assert a.session.items == {}


def test_it_goes_to_who_waits(store: Store, a: Client, b: Client) -> None:
    a.ask(m.Push, "q", b"\x07")
    item = a.ask(m.Pop, "q", None, True)
    b.ask(m.Pop, "q", 5.0, True)
    settle = a.request(m.Settle, "q", item.modified, True)
    a.send(settle)
    assert store.woken() == []
    a.send(m.Cancel(0, 0, settle.seq))
    [(rank, value)] = store.woken()
    assert isinstance(value, m.Value)
    assert (rank, value.modified, value.value) == (1, item.modified, b"\x07")


def test_an_acknowledgement_that_arrived_stays(store: Store, a: Client, b: Client) -> None:
    a.ask(m.Push, "q", b"\x01")
    item = a.ask(m.Pop, "q", None, True)
    settle = a.request(m.Settle, "q", item.modified, True)
    a.send(settle)
    a.ask(m.Ping)  # says that the answer is there
    a.send(m.Cancel(0, 0, settle.seq))
    assert b.ask(m.Length, "q").number == 0
    assert store.used == 0


def test_a_repeated_acknowledgement_gets_its_first_answer(store: Store, a: Client) -> None:
    a.ask(m.Push, "q", b"\x01")
    item = a.ask(m.Pop, "q", None, True)
    settle = a.request(m.Settle, "q", item.modified, True)
    assert a.send(settle) == a.send(settle)
    a.end()
    assert store.client(2).ask(m.Length, "q").number == 0


def test_an_acknowledgement_that_comes_after_its_cancellation_is_not_carried_out(
    a: Client, b: Client
) -> None:
    """Then the item is still held: who gave up gives it back by another request."""
    a.ask(m.Push, "q", b"\x01")
    item = a.ask(m.Pop, "q", None, True)
    late = a.request(m.Settle, "q", item.modified, True)
    a.send(m.Cancel(0, 0, late.seq))
    assert a.send(late) is None
    assert isinstance(a.ask(m.Settle, "q", item.modified, False), m.Done)
    assert b.ask(m.Pop, "q").modified == item.modified


@pytest.mark.parametrize("accept", [True, False])
def test_a_late_settlement_does_not_strike_the_same_item_in_another_hand(
    a: Client, b: Client, accept: bool
) -> None:
    """It came back and was handed out again, to another thread of the session perhaps."""
    a.ask(m.Push, "q", b"\x01")
    first = a.ask(m.Pop, "q", None, True)
    a.ask(m.Settle, "q", first.modified, False, first.seq)
    second = a.ask(m.Pop, "q", None, True)
    assert second.modified == first.modified
    assert isinstance(a.ask(m.Settle, "q", first.modified, accept, first.seq), m.Absent)
    assert isinstance(a.ask(m.Settle, "q", second.modified, accept, second.seq), m.Done)
    assert b.ask(m.Length, "q").number == (not accept)


@pytest.mark.parametrize("seed", range(300))
def test_nothing_is_lost_and_nothing_is_there_twice(seed: int) -> None:
    """Any history of puts, takes, acknowledgements, returns, cancellations and deaths. What goes
    out is always the first.
    """
    dice = random.Random(seed)
    store = Store()
    clients = [store.client(rank) for rank in range(3)]
    born = len(clients)
    waiting: list[int] = []  # numbers of the items in the queue
    held: dict[int, Client] = {}
    done: set[int] = set()
    for _ in range(60):
        one = dice.choice(clients)
        kind = dice.choice(["put", "put", "take", "take", "settle", "settle", "die"])
        mine = sorted(number for number, holder in held.items() if holder is one)
        if kind == "put":
            large = Blob(dice.randrange(4000, 9000)) if dice.random() < 0.3 else None
            one.ask(m.Push, "q", b"" if large else b"\x01", large=large)
            waiting.append(store.state.revision)
        elif kind == "take":
            one.acked = one.seq
            pop = one.request(m.Pop, "q", None, True)
            reply = one.send(pop)
            if not waiting:
                assert isinstance(reply, m.Absent)
                continue
            assert isinstance(reply, m.Value)
            assert reply.modified == min(waiting), "it is the first of those that are there"
            if dice.random() < 0.3:
                one.send(m.Cancel(0, 0, pop.seq))
            else:
                waiting.remove(reply.modified)
                held[reply.modified] = one
        elif kind == "settle" and mine:
            number, accept, interrupted = (
                dice.choice(mine),
                dice.random() < 0.6,
                dice.random() < 0.3,
            )
            one.acked = one.seq
            settle = one.request(m.Settle, "q", number, accept)
            one.send(settle)
            del held[number]
            if accept and not interrupted:
                done.add(number)
            else:
                waiting.append(number)
            if interrupted:
                one.send(m.Cancel(0, 0, settle.seq))
        elif kind == "die":
            one.end()
            for number in mine:
                del held[number]
            waiting += mine
            clients[clients.index(one)] = store.client(born)
            born += 1
        assert clients[0].ask(m.Length, "q").number == len(waiting)
        assert not set(waiting) & done
    for one in clients[1:]:
        one.end()
    mine = [number for number, holder in held.items() if holder is clients[0]]
    for number in mine:
        clients[0].ask(m.Settle, "q", number, False)
    left = sorted({*waiting, *held})
    assert [clients[0].ask(m.Pop, "q").modified for _ in left] == left
    assert isinstance(clients[0].ask(m.Pop, "q"), m.Absent)
    clients[0].ask(m.Ping)
    assert store.used == 0
