"""Locks: first come, first served, held by a session, each grant with a fencing token. Pure.

A lock by itself keeps things moving; what keeps data right is the token, checked where the data is: a write with `fence=token` is
refused once that grant is over. A token is the revision of its grant, so tokens grow, over all locks.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from rallypoint.store.budget import HELD_BYTES, Large, quoted
from rallypoint.store.ledger import Answer, Ledger, Session
from rallypoint.store.waiting import Lines, Waiter
from rallypoint.wire.messages import Absent, CompareAndSet, Delete, Done, Granted, Lock, Set, TimedOut, Unlock

QUEUE_SHOWN = 64
"""Of those who wait in front, so many are named in a `TimedOut`: what a person reads; 10,000 that time out cost 10,000 short replies."""

PAST = 4096
"""Grants that are over and still known by name, so that a stale token is told whose lock it was; about a megabyte."""


class _Held:
    """A lock that is held."""

    __slots__ = ("name", "owner", "session", "since", "token")

    def __init__(self, name: str, session: Session, owner: str, token: int, since: float) -> None:
        self.name = name
        self.session = session
        self.owner = owner
        self.token = token
        self.since = since


def _weight(name: str, owner: str) -> int:
    """Bytes that a held lock is charged."""
    return HELD_BYTES + len(name.encode()) + len(owner.encode())


class Locks:
    """All locks that are held, and who waits for them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._held: dict[str, _Held] = {}
        self._tokens: dict[int, _Held] = {}
        self._past: OrderedDict[int, str] = OrderedDict()  # name by token
        self._lines = Lines(self._timed_out)

    def lock(self, now: float, session: Session, request: Lock, large: Large | None) -> Answer | None:
        budget, seq, revision = self._ledger.budget, request.seq, self._ledger.revision
        held = self._held.get(request.name)
        refused = budget.refuse_name(request.name, seq, revision) or budget.refuse_name(request.owner, seq, revision)
        if held is None and refused is None:
            refused = budget.refuse_value(0, _weight(request.name, request.owner), seq, revision)
        if refused is not None:
            return refused, None
        if held is None:
            return self._grant(now, session, request), None
        if held.session is session and held.owner == request.owner:
            text = f"the lock {quoted(request.name)} is held already by {request.owner} of {session.identity}, who asks for it again"
            return self._ledger.failed(request, "lock-twice", text, token=held.token, held_for=now - held.since)
        if request.timeout is not None and not request.timeout > 0:
            return self._refused(now, request, held, None), None
        return self._ledger.wait(now, session, request, request.timeout, self._lines, (request.name,))

    def unlock(self, now: float, session: Session, request: Unlock, large: Large | None) -> Answer:
        held = self._tokens.get(request.token)
        if held is None or held.name != request.name or held.session is not session:
            return Absent(request.seq, self._ledger.revision), None
        self.release(now, held.token)
        return Done(request.seq, self._ledger.revision), None

    def release(self, now: float, token: int) -> None:
        """The grant is over; the next in line has the lock. Nothing when it was over before."""
        held = self._tokens.pop(token, None)
        if held is None:
            return
        name = held.name
        self._ledger.budget.used -= _weight(name, held.owner)
        del self._held[name]
        del held.session.locks[token]
        self._past[token] = name
        if len(self._past) > PAST:
            self._past.popitem(last=False)
        self._ledger.changed()
        waiter = self._lines.first(name)
        if waiter is not None:
            self._ledger.answer(waiter, self._grant(now, waiter.session, waiter.request))

    def end(self, now: float, session: Session) -> None:
        """Pass on what the session holds."""
        for token in list(session.locks):
            self.release(now, token)

    def refuse_fence(self, now: float, request: Set | CompareAndSet | Delete) -> Answer | None:
        """Why a write with this token is refused; None when it has none, or that of a lock which is held."""
        token = request.fence
        if token is None or token in self._tokens:
            return None
        name = self._past.get(token)
        if name is None:
            return self._ledger.failed(request, "fence-stale", f"{token} is not the token of a lock that is held", token=token)
        held = self._held.get(name)
        if held is None:
            text = f"the lock {quoted(name)} with token {token} is no longer held, by nobody"
            return self._ledger.failed(request, "fence-stale", text, token=token, lock=name)
        text = f"the lock {quoted(name)} is no longer held with token {token}: {held.session.identity} has it, with token {held.token}"
        return self._ledger.failed(request, "fence-stale", text, token=token, lock=name, held=held.token)

    def _grant(self, now: float, session: Session, request: Lock) -> Granted:
        token = self._ledger.changed()
        self._ledger.budget.used += _weight(request.name, request.owner)
        held = _Held(request.name, session, request.owner, token, now)
        self._held[request.name] = self._tokens[token] = held
        session.locks[token] = request.name
        return Granted(request.seq, token, token)

    def _timed_out(self, now: float, waiter: Waiter) -> None:
        request = waiter.request
        self._ledger.answer(waiter, self._refused(now, request, self._held[request.name], waiter))

    def _refused(self, now: float, request: Lock, held: _Held, until: Waiter | None) -> TimedOut:
        """Who holds it, and who waits in front of this waiter (None: of somebody new)."""
        front = []
        for waiter in islice(self._lines.get(request.name, ()), QUEUE_SHOWN):
            if waiter is until:
                break
            front.append(waiter.session.identity)
        return TimedOut(
            request.seq, self._ledger.revision, holder=held.session.identity, held_for=now - held.since, queue=tuple(front)
        )  # fmt: skip
