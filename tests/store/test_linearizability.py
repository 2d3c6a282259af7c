"""The checker itself, and the state behind a network that loses, repeats and reorders."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.store.state.state import Session, State
from rallypoint.wire import messages as m

from ..search import tries
from .linearizability import Kind, Operation, _step, check

encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
LIMITS = m.Limits(10**9, 10**9, 4096, 10**6, 100, 1000)


def op(
    client: int,
    start: float,
    end: float,
    kind: Kind,
    *arguments: Any,
    gives: Any = None,
    key: str = "k",
) -> Operation:
    return Operation(client, kind, key, arguments, gives, start, end)


# --- the checker ---


def test_overlapping_operations_may_have_happened_in_either_order() -> None:
    assert check([op(1, 0, 3, "set", 1), op(2, 1, 2, "get", gives=None)])
    assert check([op(1, 0, 3, "set", 1), op(2, 1, 2, "get", gives=1)])


@pytest.mark.parametrize(
    "history",
    [
        [
            op(1, 0, 1, "set", 1),
            op(2, 2, 3, "get", gives=None),
        ],  # a read that misses an answered write
        [
            op(1, 0, 1, "set", 1),
            op(1, 2, 3, "set", 2),
            op(2, 4, 5, "get", gives=1),
        ],  # a read of what was written over
        [
            op(1, 0, 9, "set", 1),
            op(2, 1, 2, "get", gives=1),
            op(3, 3, 4, "get", gives=None),
        ],  # back in time
        [op(1, 0, 9, "add", 1, gives=1), op(2, 0, 9, "add", 1, gives=1)],  # a lost update
        [op(1, 0, 1, "add", 1, gives=1), op(2, 2, 3, "get", gives=2)],  # done twice
        [
            op(1, 0, 9, "cas", None, 1, gives=True),
            op(2, 0, 9, "cas", None, 2, gives=True),
        ],  # two winners
        [
            op(1, 0, 1, "set", 1),
            op(2, 2, 3, "delete", gives=True),
            op(3, 4, 5, "delete", gives=True),
        ],
        [op(1, 0, 1, "get", gives=5)],  # never written
        [
            op(1, 0, math.inf, "set", 1),
            op(2, 1, 2, "get", gives=1),
            op(2, 3, 4, "get", gives=None),
        ],  # it happened, and then it did not
        [op(1, 5, math.inf, "set", 1), op(2, 1, 2, "get", gives=1)],  # before it was asked for
    ],
)
def test_wrong_histories_are_rejected(history: list[Operation]) -> None:
    verdict = check(history)
    assert verdict.outcome == "violated"
    assert verdict.key == "k"
    assert verdict.blame in history


def test_what_got_no_answer_may_happen_later_or_never() -> None:
    lost = op(1, 0, math.inf, "set", 1)
    assert check([lost])
    assert check([lost, op(2, 5, 6, "get", gives=None), op(2, 7, 8, "get", gives=1)])
    assert check([lost, op(2, 5, 6, "get", gives=None), op(2, 7, 8, "get", gives=None)])
    assert check([op(1, 0, math.inf, "add", 5), op(2, 1, 2, "add", 1, gives=6)])


def test_keys_are_looked_at_one_by_one() -> None:
    good = [op(1, 0, 1, "set", 1), op(1, 2, 3, "get", gives=1)]
    bad = [op(1, 0, 1, "set", 1, key="x"), op(1, 2, 3, "get", key="x", gives=2)]
    assert check(good)
    assert check([*good, *bad])[:2] == ("violated", "x")


def test_a_search_that_is_too_long_is_said_to_be_unknown() -> None:
    history = [op(n, 0, 100, "set", n) for n in range(1, 20)] + [op(99, 101, 102, "get", gives=-1)]
    assert check(history, steps=1000).outcome == "unknown"
    assert (
        check([*history, op(1, 0, 1, "get", key="x", gives=1)], steps=1000).outcome
        != "linearizable"
    )


def test_thousands_of_operations_are_no_matter() -> None:
    rng = random.Random(1)
    history = [
        op(n % 8, n - rng.uniform(0.1, 6), n + rng.uniform(0.1, 6), "add", 1, gives=n)
        for n in range(1, 5001)
    ]
    assert check(history)
    history[2500] = history[2500]._replace(result=history[2499].result)
    assert check(history).outcome == "violated"


def by_force(history: list[Operation]) -> bool:
    """The definition: try every order."""
    unknown = [operation for operation in history if operation.end == math.inf]
    known = [operation for operation in history if operation.end != math.inf]
    for count in range(len(unknown) + 1):
        for some in itertools.combinations(unknown, count):
            for order in itertools.permutations([*known, *some]):
                if any(late.end < early.start for early, late in itertools.combinations(order, 2)):
                    continue
                value = None
                for operation in order:
                    possible, value = _step(value, operation)
                    if not possible:
                        break
                else:
                    return True
    return False


small = st.integers(1, 2)
kinds = st.one_of(
    st.tuples(st.just("get"), st.just(()), st.one_of(st.none(), small)),
    st.tuples(st.just("set"), st.tuples(small), st.none()),
    st.tuples(st.just("delete"), st.just(()), st.booleans()),
    st.tuples(st.just("add"), st.tuples(st.just(1)), st.integers(1, 3)),
    st.tuples(st.just("cas"), st.tuples(st.one_of(st.none(), small), small), st.booleans()),
)
times = st.tuples(st.integers(0, 8), st.one_of(st.integers(1, 4), st.just(math.inf)))


@tries(300)
@given(st.lists(st.tuples(kinds, times), min_size=1, max_size=5))
def test_the_search_agrees_with_trying_every_order(raw: list[Any]) -> None:
    history = [
        Operation(n, kind, "k", arguments, result, start + n / 100, start + length + n / 100)
        for n, ((kind, arguments, result), (start, length)) in enumerate(raw)
    ]
    assert bool(check(history)) == by_force(history)


# --- the state behind a bad network ---


class Simulated:
    """A client with one thread: one request at a time, repeated until there is a reply, now and
    then given up.
    """

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.seq = 0
        self.answered = 0
        self.given_up: set[int] = set()  # and the server does not know it yet
        self.request: m.Request | None = None
        self.operation: Operation | None = None
        self.left = world.length
        self.token: int | None = None
        self.pushed = 0
        self.known: dict[str, Any] = {}
        session = world.state.open(
            0.0, bytes([number]) * 16, 1e6, m.Identity("h", number), resume=False, acked=0
        )
        assert isinstance(session, Session)
        self.session = session

    @property
    def acked(self) -> int:
        return min(self.given_up) - 1 if self.given_up else self.answered

    @property
    def done(self) -> bool:
        return self.request is None and self.left <= 0 and self.token is None

    def act(self) -> None:
        """Ask for something new, or once more for the same."""
        world, rng = self.world, self.world.rng
        for target in self.given_up:
            world.send(self, m.Cancel(0, self.acked, target))
        if self.request is None:
            self.left -= 1
            self.begin()
        elif not isinstance(self.request, m.Lock | m.Unlock) and rng.random() < world.giving_up:
            self.give_up()
            return
        assert self.request is not None
        world.send(self, self.request)

    def begin(self) -> None:
        rng = self.world.rng
        self.seq += 1
        key = rng.choice(("x", "y"))
        fresh = self.number * 10_000 + self.seq  # every written value is another
        first = (self.seq, self.acked)
        if self.token is not None and (self.left <= 0 or rng.random() < 0.5):
            self.world.inside.remove(self.number)
            self.request = m.Unlock(*first, "l", self.token)
            self.token = None
            return
        choice = rng.random()
        if choice < 0.1 and self.token is None and self.left > 2:
            self.request = m.Lock(*first, "l", "main", None)
        elif choice < 0.2:
            self.pushed += 1
            self.request = m.Push(*first, "q", encode((self.number, self.pushed)))
        elif choice < 0.3:
            self.request = m.Pop(*first, "q")
        elif choice < 0.5:
            self.record("add", "n", rng.randint(1, 9))
            assert self.operation is not None
            self.request = m.Add(*first, "n", self.operation.arguments[0])
        elif choice < 0.7:
            self.record("get", key)
            self.request = m.Get(*first, key)
        elif choice < 0.85:
            expected = self.known.get(key)
            self.record("cas", key, expected, fresh)
            self.request = m.CompareAndSet(
                *first, key, encode(fresh), expected=None if expected is None else encode(expected)
            )
        elif choice < 0.95:
            self.record("set", key, fresh)
            self.request = m.Set(*first, key, encode(fresh))
        else:
            self.record("delete", key)
            self.request = m.Delete(*first, key)

    def record(self, kind: Kind, key: str, *arguments: Any) -> None:
        self.operation = Operation(self.number, kind, key, arguments, None, self.world.tick())

    def give_up(self) -> None:
        """Its outcome is unknown from here on, and stays so."""
        world = self.world
        if self.operation is not None:
            world.history.append(self.operation)
        elif type(self.request) is m.Push:
            world.perhaps_pushed.add((self.number, self.pushed))
        self.given_up.add(self.seq)
        self.finish()

    def finish(self) -> None:
        self.request = self.operation = None
        self.answered = self.seq

    def hear(self, reply: m.Reply) -> None:
        if self.request is None or reply.seq != self.seq:
            return  # a second copy, or too late
        world, request, operation = self.world, self.request, self.operation
        if operation is not None:
            result: Any = None
            if isinstance(request, m.Get | m.CompareAndSet):
                found = decode(reply.value) if isinstance(reply, m.Value) else None
                if isinstance(reply, m.Done):
                    assert isinstance(request, m.CompareAndSet)
                    found = decode(request.value)
                self.known[operation.key] = found
                result = found if isinstance(request, m.Get) else isinstance(reply, m.Done)
            elif isinstance(reply, m.Integer):
                result = reply.number
            elif isinstance(request, m.Delete):
                result = isinstance(reply, m.Done)
            world.history.append(operation._replace(result=result, end=world.tick()))
        elif isinstance(request, m.Lock):
            assert isinstance(reply, m.Granted)
            assert reply.token > world.last_token
            world.last_token = reply.token
            assert not world.inside, "two have the lock"
            world.inside.add(self.number)
            self.token = reply.token
        elif isinstance(request, m.Unlock):
            assert isinstance(reply, m.Done)
        elif isinstance(request, m.Push):
            world.pushed.append((self.number, self.pushed))
        elif isinstance(reply, m.Value):
            world.popped.append(decode(reply.value, type=tuple[int, int]))
        self.finish()


class World:
    """Clients, a network whose messages are lost, doubled and overtake each other, and the
    state.
    """

    def __init__(
        self, seed: int, clients: int = 4, length: int = 40, giving_up: float = 0.02
    ) -> None:
        self.rng = random.Random(seed)
        self.state = State(LIMITS)
        self.length = length
        self.giving_up = giving_up
        self.clock = 0
        self.to_server: list[tuple[Simulated, m.Request]] = []
        self.to_client: list[tuple[Simulated, m.Reply]] = []
        self.history: list[Operation] = []
        self.pushed: list[tuple[int, int]] = []
        self.perhaps_pushed: set[tuple[int, int]] = set()
        self.popped: list[tuple[int, int]] = []
        self.inside: set[int] = set()
        self.last_token = 0
        self.clients = [Simulated(self, number) for number in range(1, clients + 1)]
        observer = self.state.open(
            0.0, b"observer".ljust(16), 1e6, m.Identity("h", 0), resume=False, acked=0
        )
        assert isinstance(observer, Session)
        self.observer, self.observed = observer, 0
        self.of = {client.session: client for client in self.clients}

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def observe(self, kind: type[m.Request], *fields: Any) -> Any:
        """The value that a client without a network would get."""
        self.observed += 1
        answer = self.state.apply(
            float(self.tick()), self.observer, kind(self.observed, self.observed - 1, *fields)
        )
        assert answer is not None
        return answer.value if isinstance(answer, m.Value) else None

    def read(self, key: str) -> Any:
        value = self.observe(m.Get, key)
        return None if value is None else decode(value)

    def pop(self, queue: str) -> tuple[int, int] | None:
        value = self.observe(m.Pop, queue)
        return None if value is None else decode(value, type=tuple[int, int])

    def run(self) -> None:
        rng = self.rng
        while busy := [client for client in self.clients if not client.done]:
            what = rng.random()
            if what < 0.3 or not (self.to_server or self.to_client):
                rng.choice(busy).act()
            elif what < 0.65 and self.to_server:
                self.deliver_to_server()
            elif self.to_client:
                client, reply = self.taken(self.to_client)
                client.hear(reply)
        while self.to_server or any(
            client.given_up for client in self.clients
        ):  # late copies do no harm
            for client in self.clients:
                for target in client.given_up:
                    self.send(client, m.Cancel(0, client.acked, target))
            self.deliver_to_server()

    def send(self, client: Simulated, request: m.Request) -> None:
        self.to_server.append((client, request))
        if len(self.to_server) > 30:  # congestion
            del self.to_server[self.rng.randrange(30)]

    def taken(self, line: list[Any]) -> Any:
        """A message from anywhere in the line: often a copy stays behind, sometimes it was lost and
        the next one comes.
        """
        rng = self.rng
        at = rng.randrange(len(line))
        message = line[at]
        if rng.random() < 0.8:
            del line[at]
        if rng.random() < 0.2 and line:
            del line[rng.randrange(len(line))]
        return message

    def deliver_to_server(self) -> None:
        client, request = self.taken(self.to_server)
        answer = self.state.apply(float(self.tick()), client.session, request)
        if isinstance(request, m.Cancel):
            client.given_up.discard(request.target)
        if answer is not None:
            self.to_client.append((client, answer))
        for session, reply in self.state.woken:
            self.to_client.append((self.of[session], reply))
        self.state.woken.clear()


@pytest.mark.parametrize("seed", range(40))
def test_histories_over_a_bad_network_have_one_order_and_everything_happens_once(seed: int) -> None:
    world = World(seed)
    world.run()
    verdict = check(world.history)
    assert verdict.outcome == "linearizable", verdict
    # The direct way to see the same: the sum.
    adds = [operation for operation in world.history if operation.kind == "add"]
    least = sum(operation.arguments[0] for operation in adds if operation.end != math.inf)
    unknown = sum(operation.arguments[0] for operation in adds if operation.end == math.inf)
    total = world.read("n") or 0
    assert least <= total <= least + unknown
    # Every item comes out once, also when the one who took it gave up.
    while (item := world.pop("q")) is not None:
        world.popped.append(item)
    assert max(Counter(world.popped).values(), default=0) <= 1
    assert set(world.pushed) <= set(world.popped) <= set(world.pushed) | world.perhaps_pushed


def test_the_simulation_is_as_bad_as_it_says() -> None:
    """Without the memory of replies nearly every history is wrong: otherwise the test above would
    show nothing.
    """
    wrong = 0
    for seed in range(10):
        world = World(seed)
        for client in world.clients:
            client.session.replies = Forgetful()
        try:
            world.run()
        except AssertionError:
            wrong += 1
            continue
        wrong += not check(world.history, steps=100_000)
    assert wrong >= 8


class Forgetful(dict[int, Any]):
    def __contains__(self, seq: object) -> bool:
        return False
