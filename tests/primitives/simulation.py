"""Processes that die, freeze, lose connections and come back with what is not theirs any more,
around a `State`: one seed, one history.

Everything is decided by the seed: which process does what, which message is delivered next, how
often a connection is cut with messages and replies in it, when a request comes a second time, who
dies and whether the server learns of it at once or by the lease, who stops for longer than his
lease, and who loses patience in the middle of a call. What comes out is the history as the
processes saw it, for `histories.check`.

    PYTHONPATH=src:. python -m tests.primitives.simulation SEED [COUNT]     prints the history, or what is wrong in COUNT of them
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from rallypoint.store.state.state import Session, State
from rallypoint.wire import messages as m

from .histories import Event, Kind, Told, Violation, check

LIMITS = m.Limits(10**9, 10**9, 4096, 10**6, 1000, 10_000)

TTL = 1.0
STEP = 0.001
"""Seconds that pass with each thing that happens."""

STEPS = 10_000
"""So many things happen in no history that ends; usually it is five hundred."""

CALM = 2_000
"""After so many things nothing goes wrong any more: whoever still waits then must be served,
without the help of Ctrl-C.
"""

LOCKS = ("a", "b")
BARRIERS: dict[str, tuple[int, int | None]] = {
    "two": (2, None),
    "three": (3, None),
    "quorum": (4, 2),
}
"""Size and quorum."""
ONCE = ("first", "second")

NOT_DONE = frozenset({"barrier-broken", "barrier-size", "barrier-missed"})


class Call:
    """A request without an answer. `on`: the link it was sent on, at its `place` among what was
    sent there.
    """

    __slots__ = (
        "cancelled_on",
        "cancelled_place",
        "event",
        "given_up",
        "on",
        "place",
        "repeated",
        "request",
        "thread",
    )

    def __init__(self, request: m.Request, event: Event, thread: Thread) -> None:
        self.request = request
        self.event = event
        self.thread = thread
        self.given_up = self.repeated = False
        self.on: Link | None = None
        self.place = 0
        self.cancelled_on: Link | None = None
        self.cancelled_place = 0


class Thread:
    """Of a process: makes one call at a time, and remembers what it has, or thinks it has."""

    __slots__ = (
        "call",
        "claims",
        "items",
        "left",
        "locks",
        "name",
        "stale_claims",
        "stale_items",
        "stale_locks",
    )

    def __init__(self, name: str, left: int) -> None:
        self.name = name
        self.left = left
        self.call: Call | None = None
        self.locks: dict[str, int] = {}
        self.claims: dict[str, int] = {}
        self.items: list[
            tuple[int, int]
        ] = []  # numbers, and which requests they were handed out to
        self.stale_locks: list[tuple[str, int]] = []
        self.stale_claims: list[tuple[str, int]] = []
        self.stale_items: list[tuple[int, int]] = []

    @property
    def done(self) -> bool:
        return (
            self.call is None and self.left <= 0 and not (self.locks or self.claims or self.items)
        )


class Link:
    """A connection. What is in it is delivered in order, or lost with it."""

    __slots__ = ("pinged", "pings", "sent", "session", "to_client", "to_server")

    def __init__(self, session: Session, now: float) -> None:
        self.session = session
        self.to_server: deque[m.Request] = deque()
        self.to_client: deque[m.Reply] = deque()
        self.sent = 0
        self.pings: deque[tuple[int, float]] = (
            deque()
        )  # the place of each that has no answer yet, and when it was sent
        self.pinged = now

    def send(self, request: m.Request) -> int:
        self.to_server.append(request)
        self.sent += 1
        return self.sent


class Process:
    """A client as `store/client/session.py` is one, with threads that make calls."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.identity = m.Identity("h", number, number)
        self.link: Link | None = None
        self.seq = 0
        self.calls: dict[int, Call] = {}
        self.frozen_until = 0.0
        self.proof = world.now  # when that was sent to which the server has answered last
        self.begin_session()
        self.threads = [Thread(f"{number}.{index}", world.length) for index in range(world.threads)]

    def begin_session(self) -> None:
        self.born = next(self.world.births)
        self.id = self.born.to_bytes(16, "big")
        self.welcomed = False

    @property
    def acked(self) -> int:
        return next(iter(self.calls), self.seq + 1) - 1

    @property
    def done(self) -> bool:
        return all(thread.done for thread in self.threads)

    # --- asking ---

    def ask(
        self, thread: Thread, kind: type[m.Request], *fields: Any, event: Event, **named: Any
    ) -> None:
        self.seq += 1
        event.session = str(self.born)
        event.who = thread.name
        call = Call(m.Ping(0, 0), event, thread)
        self.calls[self.seq] = call
        call.request = kind(self.seq, self.acked, *fields, **named)
        thread.call = call
        self.world.history.append(event)
        self.send(call)

    def send(self, call: Call) -> None:
        if self.link is not None:
            call.repeated = call.repeated or call.on is not None
            call.on, call.place = self.link, self.link.send(call.request)

    def ping(self) -> int:
        assert self.link is not None
        self.link.pinged = self.world.now
        place = self.link.send(m.Ping(0, self.acked))
        self.link.pings.append((place, self.world.now))
        return place

    def sign(self) -> None:
        """Of life."""
        self.ping()

    def give_up(self, call: Call) -> None:
        """Ctrl-C: nobody will look at the answer."""
        event = call.event
        event.left = max(event.left, self.proof)
        call.given_up, call.thread.call = True, None
        if call.on is None:
            event.told = "not done"
            del self.calls[call.request.seq]
        elif self.link is not None:
            self.cancel(call)

    def cancel(self, call: Call) -> None:
        assert self.link is not None
        self.link.send(m.Cancel(0, self.acked, call.request.seq))
        call.cancelled_on, call.cancelled_place = self.link, self.ping()

    # --- connections ---

    def connect(self) -> None:
        world = self.world
        found = world.state.open(
            world.now, self.id, TTL, self.identity, resume=self.welcomed, acked=self.acked
        )
        if isinstance(found, m.Refusal):
            if found.code == "session-lost":
                self.lost(found)
            return
        world.of[found] = self
        if world.rng.random() < 0.05:
            return  # the welcome was lost
        self.welcomed = True
        self.link = Link(found, world.now)
        for call in list(self.calls.values()):
            if call.given_up:
                self.cancel(call)
        for call in self.calls.values():
            if not call.given_up:
                self.send(call)
        self.ping()

    def lost(self, refusal: m.Refusal) -> None:
        """The session is over. What the server knows of it, it says."""
        for seq, call in list(self.calls.items()):
            event = call.event
            event.left = max(event.left, self.proof)
            if not call.given_up:
                call.thread.call = None
                if call.on is None or (refusal.known and seq not in refusal.happened):
                    event.told = "not done"
                elif refusal.known and event.kind in ("put", "accept", "write"):
                    event.told, event.end = "done", self.world.now
        self.calls.clear()
        for thread in self.threads:
            thread.stale_locks += thread.locks.items()
            thread.stale_items += thread.items
            thread.stale_claims += thread.claims.items()
            thread.locks, thread.claims, thread.items = {}, {}, []
        self.begin_session()

    def die(self) -> None:
        for call in self.calls.values():
            call.event.left = max(call.event.left, self.proof)
        self.calls.clear()
        self.threads = []

    # --- answers ---

    def hear(self, reply: m.Reply) -> None:
        assert self.link is not None
        if reply.seq == 0:
            self.answered(*self.link.pings.popleft())
            return
        call = self.calls.get(reply.seq)
        if call is None or call.given_up:
            return
        del self.calls[reply.seq]
        call.thread.call = None
        self.proof = max(self.proof, call.event.start)
        self.finish(call, reply)

    def answered(self, place: int, sent: float) -> None:
        """A sign of life was: what had been sent before it on this link is with the server."""
        now, link = self.world.now, self.link
        self.proof = max(self.proof, sent)
        for seq, call in list(self.calls.items()):
            if call.given_up:
                if call.cancelled_on is link and call.cancelled_place <= place:
                    del self.calls[seq]
            elif call.on is link and call.place < place:
                call.event.queued = min(call.event.queued, now)

    def finish(self, call: Call, reply: m.Reply) -> None:
        event, request, thread = call.event, call.request, call.thread
        event.end, event.revision = self.world.now, reply.revision
        event.told = told(request, reply)
        if event.told == "timed out":
            event.left = max(event.left, event.start + (getattr(request, "timeout", None) or 0.0))
        if isinstance(reply, m.Granted):
            event.token = reply.token
            (thread.locks if isinstance(request, m.Lock) else thread.claims)[event.name] = (
                reply.token
            )
        elif isinstance(reply, m.Value):
            event.token, event.value = reply.modified, json.loads(reply.value)
            if event.held:
                thread.items.append((reply.modified, reply.seq))
        elif isinstance(reply, m.Integer) and event.kind == "arrive":
            event.token = reply.number
        elif isinstance(reply, m.Met):
            event.token, event.value = (
                reply.generation,
                [json.loads(seat.value) for seat in reply.seats],
            )
            if event.value[reply.mine] != event.mine:
                event.value = []  # the seat that it was told is another's
        elif isinstance(reply, m.Failed) and reply.value:
            event.value = json.loads(reply.value)

    # --- what a thread does next ---

    def act(self, thread: Thread) -> None:
        world = self.world
        rng = world.rng
        thread.left -= 1
        if (
            thread.left < 0
            or (thread.locks and rng.random() < 0.3)
            or (thread.items and rng.random() < 0.3)
        ):
            self.put_away(thread)
            return
        if thread.claims and rng.random() < 0.7:
            self.resolve(thread, *rng.choice(list(thread.claims.items())))
            return
        what = rng.random()
        if thread.locks and what < 0.3:
            self.write(thread, *rng.choice(list(thread.locks.items())))
        elif thread.stale_locks and what < 0.4:
            name, token = rng.choice(thread.stale_locks)
            if rng.random() < 0.7:
                self.write(thread, name, token)
            else:
                self.ask(
                    thread, m.Unlock, name, token, event=world.event("unlock", name, token=token)
                )
        elif thread.stale_items and what < 0.5:
            self.settle(thread, *rng.choice(thread.stale_items), accept=rng.random() < 0.7)
        elif thread.stale_claims and what < 0.55:
            self.resolve(thread, *rng.choice(thread.stale_claims))
        elif what < 0.6:
            self.lock(thread, rng.choice(LOCKS))
        elif what < 0.7:
            self.arrive(thread, rng.choice(list(BARRIERS)))
        elif what < 0.82:
            item = next(world.items)
            self.ask(
                thread,
                m.Push,
                "q",
                json.dumps(item).encode(),
                event=world.event("put", "q", value=item),
            )
        elif what < 0.94:
            hold = rng.random() < 0.8
            timeout = rng.choice((None, 0.0, 0.5, 3.0))
            self.ask(thread, m.Pop, "q", timeout, hold, event=world.event("take", "q", held=hold))
        elif len(thread.claims) < 1:
            name = rng.choice(ONCE)
            self.ask(
                thread, m.Claim, name, rng.choice((0.5, 3.0)), event=world.event("claim", name)
            )
        else:
            self.put_away(thread)

    def put_away(self, thread: Thread) -> None:
        if thread.claims:
            self.resolve(thread, *next(iter(thread.claims.items())))
        elif thread.locks:
            name, token = next(iter(thread.locks.items()))
            del thread.locks[name]
            thread.stale_locks.append((name, token))
            self.ask(
                thread, m.Unlock, name, token, event=self.world.event("unlock", name, token=token)
            )
        elif thread.items:
            self.settle(thread, *thread.items.pop(), accept=self.world.rng.random() < 0.7)

    def write(self, thread: Thread, name: str, token: int) -> None:
        event = self.world.event("write", name, token=token)
        self.ask(
            thread, m.Set, f"data of {name}", json.dumps(token).encode(), event=event, fence=token
        )

    def settle(self, thread: Thread, number: int, taken: int, *, accept: bool) -> None:
        event = self.world.event("accept" if accept else "return", "q", token=number)
        self.ask(thread, m.Settle, "q", number, accept, taken, event=event)

    def lock(self, thread: Thread, name: str) -> None:
        rng = self.world.rng
        if name in thread.locks and rng.random() < 0.7:
            return
        timeout = rng.choice(
            (0.0, 0.5, 3.0)
            if thread.locks or thread.claims or thread.items
            else (None, None, 0.0, 0.5, 3.0)
        )
        ttl = rng.choice((None, None, 0.5, 2 * TTL))
        event = self.world.event("lock", name, leased=ttl is not None)
        self.ask(thread, m.Lock, name, thread.name, timeout, ttl, event=event)

    def arrive(self, thread: Thread, name: str) -> None:
        rng = self.world.rng
        size, quorum = BARRIERS[name]
        if rng.random() < 0.03:
            size += 1
        mine = next(self.world.items) if quorum is not None else None
        event = self.world.event("arrive", name, size=size, quorum=quorum or 0, mine=mine)
        value = b"" if mine is None else json.dumps(mine).encode()
        self.ask(
            thread,
            m.Arrive,
            name,
            size,
            rng.choice((0.0, 0.5, 2.0, 2.0)),
            value,
            quorum,
            event=event,
        )

    def resolve(self, thread: Thread, name: str, token: int) -> None:
        rng = self.world.rng
        thread.claims.pop(name, None)
        how = rng.choice(("value", "failed", "retry"))
        value = None if how == "retry" else next(self.world.items)
        event = self.world.event("resolve", name, token=token, value=value, failed=how == "failed")
        data = b"" if value is None else json.dumps(value).encode()
        self.ask(
            thread, m.Resolve, name, data, 0, how == "failed", how == "retry", 0, token, event=event
        )


def told(request: m.Request, reply: m.Reply) -> Told:
    """What an answer says, in one word."""
    match reply:
        case m.Granted():
            return "granted"
        case m.Value():
            return "value"
        case m.TimedOut():
            return "timed out"
        case m.Absent():
            return "absent"
        case m.Met():
            return "passed"
        case m.Integer():
            return "passed" if isinstance(request, m.Arrive) else "done"
        case m.Failed(code="barrier-broken"):
            return "broken"
        case m.Failed(code="barrier-size"):
            return "mismatch"
        case m.Failed(code="barrier-missed"):
            return "missed"
        case m.Failed(code="once-failed"):
            return "failed"
        case m.Failed():
            return "refused"
    return "done"


class Stuck(Exception):
    """It does not end."""


class World:
    """Some processes and a store."""

    def __init__(
        self,
        seed: int,
        *,
        processes: int = 4,
        threads: int = 2,
        length: int = 9,
        state: Callable[[m.Limits], State] = State,
    ) -> None:
        """`state`: another one that is wrong in some way, so that the checker can be tested."""
        self.rng = random.Random(f"{seed} primitives")
        self.now = 0.0
        self.threads = threads
        self.length = length
        self.state = state(LIMITS)
        self.births = itertools.count(1)
        self.items = itertools.count(1)
        self.history: list[Event] = []
        self.faults: Counter[str] = Counter()
        self.of: dict[Session, Process] = {}
        self.past: deque[tuple[Link, m.Request]] = deque(maxlen=30)
        self.processes = [Process(self, number) for number in range(1, processes + 1)]
        self.numbers = itertools.count(processes + 1)
        self.spare = 2  # processes that take the place of dead ones

    def event(self, kind: Kind, name: str, **fields: Any) -> Event:
        return Event("", "", kind, name, self.now, **fields)

    def run(self) -> list[Event]:
        """Until every process is done, and then empty the queue. Raises Stuck."""
        rng = self.rng
        quiet = 0
        for count in range(STEPS):
            if all(process.done for process in self.processes):
                break
            self.now += STEP
            if rng.random() < 0.02 and count < CALM:
                self.misfortune(
                    rng.choice([process for process in self.processes if not process.done])
                )
            quiet = 0 if self.step(rng.choice(self.processes)) else quiet + 1
            if quiet > 3 or rng.random() < 0.01:
                self.now += rng.uniform(0.0, 0.3)
                quiet = 0
            due = self.state.due()
            if due is not None and due <= self.now and rng.random() < 0.5:
                self.state.tick(self.now)
                self.deliver()
        else:
            waiting = [
                str(process.calls[seq].event) for process in self.processes for seq in process.calls
            ]
            raise Stuck("it does not end: " + "; ".join(waiting))
        self.drain()
        return self.history

    def step(self, process: Process) -> bool:
        """Something that this process does, or that happens to it; whether there was anything."""
        rng, link = self.rng, process.link
        frozen = process.frozen_until > self.now
        if link is None:
            if frozen or rng.random() < 0.5:
                return False
            process.connect()
            return True
        possible: list[Callable[[], None]] = []
        if link.to_server:
            possible.append(lambda: self.serve(link, link.to_server.popleft()))
        if not frozen:
            if link.to_client:
                possible.append(lambda: process.hear(link.to_client.popleft()))
            idle = [thread for thread in process.threads if thread.call is None and not thread.done]
            if idle:
                possible.append(lambda: process.act(rng.choice(idle)))
            if self.now - link.pinged > TTL / 3:
                possible.append(process.sign)
        if not possible:
            return False
        rng.choice(possible)()
        return True

    # --- the server's side ---

    def serve(self, link: Link, request: m.Request, *, heard: bool = True) -> None:
        """`heard=False`: nobody will see the reply."""
        session = link.session
        if session.ended:  # the connection is closed, and the client told when it comes back
            process = self.of[session]
            if process.link is link:
                process.link = None
            return
        session.heard = self.now
        answer = self.state.apply(self.now, session, request)
        if request.seq:
            self.past.append((link, request))
        if answer is not None and heard:
            link.to_client.append(answer)
        self.deliver()

    def deliver(self) -> None:
        for session, reply in self.state.woken:
            link = self.of[session].link
            if link is not None and link.session is session:
                link.to_client.append(reply)
        self.state.woken.clear()

    # --- what goes wrong ---

    def misfortune(self, process: Process) -> None:
        rng = self.rng
        what = rng.choice(
            (
                "cut",
                "cut",
                "cut",
                "freeze",
                "die",
                "impatience",
                "impatience",
                "again",
                "again",
                "again",
            )
        )
        self.faults[what] += 1
        if what == "cut":
            self.cut(process)
        elif what == "freeze":
            process.frozen_until = self.now + rng.choice((0.1, 1.5 * TTL, 3 * TTL))
        elif what == "die":
            self.kill(process)
        elif what == "impatience":
            waiting = [call for call in process.calls.values() if not call.given_up]
            if waiting:
                process.give_up(rng.choice(waiting))
        elif self.past:
            link, request = rng.choice(self.past)
            if not link.session.ended:
                self.serve(link, request)  # a second copy

    def cut(self, process: Process) -> None:
        """The server has read some of what was in it."""
        link, process.link = process.link, None
        if link is not None:
            for _ in range(self.rng.randint(0, len(link.to_server))):
                self.serve(link, link.to_server.popleft(), heard=False)

    def kill(self, process: Process) -> None:
        """The server learns of it at once, or by the lease."""
        self.cut(process)
        process.die()
        for session, other in list(self.of.items()):
            if other is process and not session.ended and self.rng.random() < 0.5:
                self.state.end(self.now, session, "its process ended")
                self.deliver()
        if self.spare:
            self.spare -= 1
            self.processes[self.processes.index(process)] = Process(self, next(self.numbers))
        elif len(self.processes) > 1:
            self.processes.remove(process)

    def drain(self) -> None:
        """Whoever is dead has lost his lease; what is in the queue then is taken out."""
        for process in self.processes:
            link = process.link
            while link is not None and link.to_server:
                self.serve(link, link.to_server.popleft())
        for _ in range(3):
            self.now += 10 * TTL
            self.state.tick(self.now)
            self.deliver()
        session = self.state.open(
            self.now, b"observer".ljust(16), 1e6, m.Identity("h", 0), resume=False, acked=0
        )
        assert isinstance(session, Session)
        for seq in itertools.count(1):
            event = Event("observer", "observer", "take", "q", self.now, self.now + STEP)
            answer = self.state.apply(self.now, session, m.Pop(seq, seq - 1, "q"))
            assert answer is not None
            self.now += 2 * STEP
            if not isinstance(answer, m.Value):
                return
            event.told, event.revision = "value", answer.revision
            event.token, event.value = answer.modified, json.loads(answer.value)
            self.history.append(event)


def judged(seed: int, **options: Any) -> tuple[World, list[Violation]]:
    """One history, and what is wrong with it."""
    world = World(seed, **options)
    try:
        world.run()
    except Stuck as stuck:
        return world, [Violation("end", str(stuck)), *check(world.history)]
    return world, check(world.history)


def counts(worlds: Iterable[World]) -> Counter[str]:
    """Of what was asked and told, and of what went wrong: whether a history was worth checking."""
    found: Counter[str] = Counter()
    for world in worlds:
        found.update(f"{event.kind} {event.told}" for event in world.history)
        found.update({f"fault {name}": count for name, count in world.faults.items()})
    return found


def main(first: int, count: int) -> int:
    """Prints one line of JSON: how many were checked, what they were made of, and the seeds that
    went wrong with the reasons.
    """
    total: Counter[str] = Counter()
    wrong: dict[int, list[str]] = {}
    for seed in range(first, first + count):
        world, violations = judged(seed)
        total += counts([world])
        if violations:
            wrong[seed] = [str(violation) for violation in violations]
        if count == 1:
            print(*world.history, *violations, sep="\n", file=sys.stderr)
    print(json.dumps({"checked": count, "counts": total, "wrong": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1))
