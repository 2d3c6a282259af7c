"""Locks: first come, first served, held while the holder gives signs of life, each grant with a
fencing token. Pure.

A lock by itself keeps things moving; data is kept right by the token, checked where the data is: a
write with `fence=token` is refused once that grant is over. A token is the revision of its grant,
so tokens grow, over all locks.

A grant is over when it is given back, when its session ends, or when the session gave no sign of
life for the `ttl` of that grant. A session lives for as long as the longest of its grants.

Owners (threads) that wait form a graph: each waits for the holder of the lock that it asked for. A
request that would close a circle in it is refused, for then nobody in it would ever go on. Only a
request can close one: a grant gives the lock to an owner that waits for nothing any more.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice, pairwise

from rallypoint.store.limits import lease
from rallypoint.store.state.quotas import HELD_BYTES, Refused, quoted
from rallypoint.store.state.replies import Kind, Ledger, Session
from rallypoint.store.state.waiters import NEVER, Deadlines, Waiter
from rallypoint.wire.messages import Absent, Done, Granted, Lock, Reply, TimedOut, Unlock

QUEUE_SHOWN = 64
"""Waiters in front that a `TimedOut` names: a person reads no more; 10,000 that time out cost
10,000 short replies."""

CIRCLE_SHOWN = 16
"""Owners in a circle that a refusal names: more than anybody has ever built, and a text that fits a
screen."""

PAST = 4096
"""Grants that are over and still known by name, so that a refused write names the lock of its token;
about a megabyte."""

Owner = tuple[bytes, str]


class HeldLock:
    """A lock that is held."""

    __slots__ = ("deadline", "name", "owner", "session", "since", "token", "ttl")

    def __init__(self, session: Session, request: Lock, token: int, since: float) -> None:
        self.name = request.name
        self.session = session
        self.owner = request.owner
        self.token = token
        self.since = since
        self.ttl = NEVER if request.ttl is None else lease(request.ttl)
        self.deadline = NEVER  # the earliest time at which the lease may be over

    @property
    def weight(self) -> int:
        """Bytes that it is charged."""
        return HELD_BYTES + len(self.name.encode()) + len(self.owner.encode())


def _owner(session: Session, owner: str) -> Owner:
    """Return the key of an owner. A thread names itself behind "#" and is then one owner in all its
    sessions."""
    return (b"" if "#" in owner else session.id, owner)


def _called(session: Session, owner: str) -> str:
    """Return an owner's name for people."""
    thread = owner.partition("#")[0]
    main = thread in ("", "MainThread")
    return f"{session.identity}" if main else f"the thread {thread} of {session.identity}"


class Locks(Kind):
    """All locks that are held. A waiter stands in the line of its lock and in that of its owner."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._held: dict[str, HeldLock] = {}
        self._tokens: dict[int, HeldLock] = {}
        self._past: OrderedDict[int, str] = OrderedDict()  # name by token
        self.leases: Deadlines[HeldLock] = Deadlines()

    def lock(self, session: Session, request: Lock) -> Reply | None:
        ledger, name = self._ledger, request.name
        self._budget.check_name(name)
        self._budget.check_name(request.owner)
        held = self._held.get(name)
        at_once = request.timeout is not None and not request.timeout > 0
        if held is None:
            if at_once and request.timeout != 0:  # the client only looks
                return Absent(request.seq, ledger.revision)
            return self._grant(session, request)
        if at_once:
            return self._timed_out(request)
        if self._is_asker(held, session, request):
            held_for = ledger.now - held.since
            who = _called(held.session, held.owner)
            text = (
                f"{who} asks for the lock {quoted(name)} and has it already, for {held_for:.1f} s"
            )
            raise Refused("lock-twice", text, token=held.token, held_for=held_for)
        self._check_circle(session, request)
        return ledger.wait(session, request, self._lines, name, _owner(session, request.owner))

    def unlock(self, session: Session, request: Unlock) -> Reply:
        held = self._tokens.get(request.token)
        if held is None or held.name != request.name or held.session is not session:
            return Absent(request.seq, self._ledger.revision)
        self.release(held.token)
        return Done(request.seq, self._ledger.revision)

    def release(self, token: int) -> None:
        """End a grant; the next in line has the lock. Nothing when it was over before."""
        held = self._tokens.pop(token, None)
        if held is None:
            return
        self._budget.used -= held.weight
        self.leases.set(held, NEVER)
        del self._held[held.name]
        del held.session.locks[token]
        self._past[token] = held.name
        if len(self._past) > PAST:
            self._past.popitem(last=False)
        self._ledger.changed()
        waiter = self._lines.first(held.name)
        if waiter is not None:
            self._ledger.answer(waiter, self._grant(waiter.session, waiter.request, charge=False))

    def end(self, session: Session) -> None:
        super().end(session)
        for token in list(session.locks):
            self.release(token)

    def expire(self) -> None:
        """Pass on the locks of sessions that gave no sign of life for too long. A grant to a waiter
        that was silent for as long is over at once."""
        while (held := self.leases.take(self._ledger.now)) is not None:
            # A sign of life only sets `heard`, as with sessions.
            until = held.session.heard + held.ttl
            if until > self._ledger.now:
                self.leases.set(held, until)
            else:
                self.release(held.token)

    def longest(self, session: Session) -> float:
        """Return the longest lease that the session has, in seconds; 0 without one."""
        ttls = [self._tokens[token].ttl for token in session.locks]
        return max([ttl for ttl in ttls if ttl != NEVER], default=0.0)

    def check_fence(self, token: int | None) -> None:
        """Refuse a write whose token is not that of a lock which is held."""
        if token is None or token in self._tokens:
            return
        name = self._past.get(token)
        if name is None:
            text = f"{token} is not the token of a lock that is held"
            raise Refused("fence-stale", text, token=token)
        held = self._held.get(name)
        if held is None:
            text = f"the lock {quoted(name)} with token {token} is no longer held, by nobody"
            raise Refused("fence-stale", text, token=token, lock=name)
        text = f"the lock {quoted(name)} is no longer held with token {token}: {held.session.identity} has it, with token {held.token}"
        raise Refused("fence-stale", text, token=token, lock=name, held=held.token)

    def timed_out(self, waiter: Waiter) -> None:
        self._ledger.answer(waiter, self._timed_out(waiter.request, waiter))

    def _grant(self, session: Session, request: Lock, charge: bool = True) -> Granted:
        held = HeldLock(session, request, self._ledger.revision + 1, self._ledger.now)
        if charge:  # a waiter is granted the lock in any case
            self._budget.check_value(0, held.weight)
        token = self._ledger.changed()
        self._budget.used += held.weight
        self._held[held.name] = self._tokens[token] = held
        session.locks[token] = held.name
        if held.ttl != NEVER:
            self.leases.set(held, session.heard + held.ttl)
        return Granted(request.seq, token, token)

    def _is_asker(self, held: HeldLock, session: Session, request: Lock) -> bool:
        """Tell whether the asking owner would wait for itself. A thread that has two sessions may
        stand for two clients, in a test, say: only if it would wait for ever is it refused."""
        return _owner(held.session, held.owner) == _owner(session, request.owner) and (
            held.session is session or request.timeout is None
        )

    def _check_circle(self, session: Session, request: Lock) -> None:
        """Refuse to wait for a lock whose holder waits, over any number of others, for the asking
        owner."""
        circle: dict[HeldLock, None] = {}
        held = self._held[request.name]
        while not self._is_asker(held, session, request):
            circle[held] = None
            waiter = self._lines.first(_owner(held.session, held.owner))
            if waiter is None or (held := self._held[waiter.request.name]) in circle:
                return
        chain = [*circle, held]
        steps = [
            f"{_called(one.session, one.owner)} has {quoted(one.name)} and waits for {quoted(after.name)}"
            for one, after in pairwise(chain)
        ]
        if len(steps) > CIRCLE_SHOWN:
            steps[CIRCLE_SHOWN:] = [f"{len(steps) - CIRCLE_SHOWN} more in the same way"]
        steps.append(f"{_called(session, request.owner)}, who asks, has {quoted(held.name)}")
        text = f"waiting for the lock {quoted(request.name)} would never end: {'; '.join(steps)}"
        present = tuple(one.session.identity for one in chain[: CIRCLE_SHOWN + 1])
        raise Refused("lock-cycle", text, present, owners=len(chain))

    def _timed_out(self, request: Lock, until: Waiter | None = None) -> TimedOut:
        """Tell the holder, and the waiters in front of `until` (None: of somebody new)."""
        held, ledger = self._held[request.name], self._ledger
        front = []
        for waiter in islice(self._lines.get(request.name, ()), QUEUE_SHOWN):
            if waiter is until:
                break
            front.append(waiter.session.identity)
        holder, held_for = held.session.identity, ledger.now - held.since
        return TimedOut(
            request.seq, ledger.revision, holder=holder, held_for=held_for, queue=tuple(front)
        )
