"""Things that all kinds share: the revision, the time, sessions, and replies that are given once.

`State` (`store/state/state.py`) is a ledger, and hands itself to the kinds: keys, queues, locks,
claims, barriers, history. Pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from rallypoint.store.state.quotas import Budget
from rallypoint.store.state.waiters import NEVER, Lines, Waiter, Waiting
from rallypoint.wire.messages import (
    SLOT_BITS,
    Absent,
    Failed,
    Identity,
    Limits,
    Reply,
    TimedOut,
    Value,
)

_ANOTHER = object()


class Held:
    """A charge of `weight` bytes for a value that left the store with a reply. It is charged until
    the store and all cached replies have let go of it."""

    __slots__ = ("holders", "weight")

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.holders = 0


class Acknowledged(dict[int, int]):
    """Last number whose replies have arrived, by slot: the one before its first, at first."""

    def __missing__(self, slot: int) -> int:
        return slot << SLOT_BITS


class Session:
    """One client, across all its connections. The server sets `heard` at every sign of life;
    everything else belongs to the state.

    `replies` has, by seq, the replies to changing requests that are not acknowledged; None: the
    request waits, or nobody wants the reply any more.
    """

    __slots__ = (
        "acked", "alone", "because", "claims", "deadline", "ended", "ended_at", "ephemeral", "heard", "id", "identity", "items", "kept",
        "locks", "number", "orphan", "replies", "routes", "silent", "ttl", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        id: bytes,
        identity: Identity,
        ttl: float,
        now: float,
        number: int,
        orphan: float = NEVER,
    ) -> None:
        self.id = id
        # An object of its own, so that "was it this session?" is asked by `is`, and an entry that
        # outlives its writer keeps only this.
        self.identity = Identity(identity.host, identity.pid, identity.rank)
        self.ttl = ttl
        self.orphan = orphan  # seconds that it lives without a connection
        self.alone = NEVER  # since when it has no connection
        self.number = number  # in the order in which the sessions of this server began
        self.heard = now
        self.deadline = NEVER
        self.ended = False
        self.ended_at = NEVER
        self.because = ""  # reason of the end
        # it ended for want of signs of life, while it had a connection
        self.silent = False
        self.acked = Acknowledged()
        self.replies: dict[int, Reply | None] = {}
        self.waiting: dict[int, Waiter] = {}  # by seq, in the order of arrival
        # by seq: the server's connection on which a request that waits has come last
        self.routes: dict[int, Any] = {}
        # From here on: things that the session holds and gives back when it ends.
        self.kept: dict[int, Held] = {}  # values that left with a cached reply, by its seq
        self.locks: dict[int, str] = {}  # name by token, in the order of the grants
        self.claims: dict[int, str] = {}  # likewise
        self.items: dict[int, Any] = {}  # held items of queues, by number
        self.ephemeral: dict[str, None] = {}  # keys, in the order in which they were written

    def __repr__(self) -> str:
        state = "ended" if self.ended else f"{len(self.waiting)} waiting"
        return f"<Session {self.id.hex()[:8]} of {self.identity}: {state}>"

    def acked_in_slot(self, seq: int) -> int:
        """Return the last number in the slot of `seq` whose replies have arrived."""
        return self.acked[seq >> SLOT_BITS]

    def happened(self, seq: int) -> bool:
        """Tell whether a request whose reply is kept did change something."""
        reply = self.replies[seq]
        if reply is None or isinstance(reply, Failed | TimedOut | Absent):
            return False
        # A Value that did not leave the store only says what is there.
        return type(reply) is not Value or seq in self.kept


class Ledger:
    """One revision, one time, one order of replies."""

    def __init__(self, limits: Limits, revision: int = 0) -> None:
        """Begin with `revision`, before any change."""
        self.revision = revision
        self.now = 0.0  # time of the call that is being carried out
        self.opened = 0  # number of sessions that there have been
        self.woken: list[tuple[Session, Reply]] = []  # replies to requests that have waited
        self.budget = Budget(limits)
        self.waiting = Waiting()

    def changed(self) -> int:
        """Count one change that others can see, and return its revision."""
        self.revision += 1
        return self.revision

    def wait(self, session: Session, request: Any, lines: Lines, *names: Hashable) -> Reply | None:
        """Let the request wait in these lines for its `timeout`; return None. Raises Refused.

        A read that is repeated after a reconnect keeps its place and its deadline.
        """
        if session.ended or request.seq in session.waiting:
            return None
        self.budget.check_waiting(self.waiting.count)
        for name in names:
            if isinstance(name, str):
                self.budget.check_name(name)
        waiter = session.waiting[request.seq] = Waiter(session, request, lines, self.now)
        timeout = request.timeout
        self.waiting.add(waiter, names, NEVER if timeout is None else self.now + timeout)
        return None

    def remove(self, waiter: Waiter) -> None:
        """End a wait without a reply."""
        self.waiting.remove(waiter)
        del waiter.session.waiting[waiter.request.seq]
        waiter.session.routes.pop(waiter.request.seq, None)

    def answer(self, waiter: Waiter, reply: Reply) -> None:
        """End a wait with a reply."""
        session = waiter.session
        self.waiting.remove(waiter)
        del session.waiting[reply.seq]
        if waiter.request.changes:
            session.replies[reply.seq] = reply
        self.woken.append((session, reply))

    def keep(self, session: Session, seq: int, held: Held) -> None:
        """Charge a value for as long as the cached reply to `seq` carries it."""
        held.holders += 1
        session.kept[seq] = held

    def let_go(self, held: Held) -> None:
        """Count one holder less; the last one frees the bytes."""
        held.holders -= 1
        if not held.holders:
            self.budget.used -= held.weight

    def acknowledge(self, session: Session, upto: int) -> None:
        """Forget the replies up to this number, in its slot: they have arrived."""
        slot = upto >> SLOT_BITS
        before = session.acked[slot]
        if upto <= before:
            return
        session.acked[slot] = upto
        replies = session.replies
        if not replies:
            return
        numbers: Iterable[int] = range(before + 1, upto + 1)
        if upto - before > len(replies):
            numbers = [seq for seq in replies if before < seq <= upto]
        for seq in numbers:
            if session.kept or replies.get(seq) is None:
                self.forget(session, seq)
            else:
                del replies[seq]

    def forget(self, session: Session, seq: int) -> None:
        """Drop a cached reply, or the wait for it."""
        if session.replies.pop(seq, _ANOTHER) is None and seq in session.waiting:
            waiter = session.waiting[seq]
            waiter.lines.kind.give_up(waiter)
        if session.kept and (held := session.kept.pop(seq, None)) is not None:
            self.let_go(held)


class Kind:
    """Base of each kind of thing: keys, queues, locks, claims, barriers, history.

    A method named like a request (`Queues.pop` for `Pop`) takes the session and the request, and
    returns the reply. It may instead let the request wait in the kind's lines (`Ledger.wait`), and
    answer it later (`Ledger.answer`), or raise Refused before it has changed anything.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._budget = ledger.budget
        self._lines = Lines(self)

    def timed_out(self, waiter: Waiter) -> None:
        """Answer a waiter whose time is over."""
        self._ledger.answer(waiter, TimedOut(waiter.request.seq, self._ledger.revision))

    def give_up(self, waiter: Waiter) -> None:
        """Remove a waiter whose client does not wait any more."""
        self._ledger.remove(waiter)

    def end(self, session: Session) -> None:
        """Give back what a session that has ended held of this kind."""
        for waiter in self._waiters(session):
            self._ledger.remove(waiter)

    def _waiters(self, session: Session) -> list[Waiter]:
        return [waiter for waiter in session.waiting.values() if waiter.lines is self._lines]
