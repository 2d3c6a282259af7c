"""apply(state, now, request) -> reply, and replies to requests that have waited.

Everything the store decides is decided here and in the files beside it, without a clock, socket or
thread; `store/server/server_loop.py` sends the replies. This file has the sessions and the way a
request takes; the meaning of a request is with its kind:

    keys.py      Get Set CompareAndSet Delete Keys Exists Add Append
    watches.py   Watch
    queues.py    Push Pop Settle Length
    once.py      Claim Resolve
    locks.py     Lock Unlock, and the fence of Set, CompareAndSet and Delete
    barriers.py  Arrive

A new operation is a message in `wire/messages.py`, a method of its kind (`Kind` in `replies.py` has
the rules), and a line in `State._handlers`. Things that a session holds are a field of `Session`,
given back in `Kind.end`. Exactly once is not the method's business: `apply` sees to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from msgspec.structs import replace

from rallypoint.store.limits import lease
from rallypoint.store.state import watches as histories
from rallypoint.store.state.attendance import Roster
from rallypoint.store.state.barriers import Barriers
from rallypoint.store.state.keys import KeyTable
from rallypoint.store.state.locks import Locks
from rallypoint.store.state.once import Claims
from rallypoint.store.state.queues import Item, Queues
from rallypoint.store.state.quotas import Large, Refused
from rallypoint.store.state.replies import Ledger, Session
from rallypoint.store.state.waiters import NEVER, Deadlines
from rallypoint.store.state.watches import History
from rallypoint.wire import messages as m

__all__ = ["Large", "Session", "State"]

TOMBSTONES = 65_536
"""Ended sessions that are remembered: as many as may live, so that all of a cluster can be told
what happened after its network was away. 20 MB at most."""

TOMBSTONE_AGE = 3600.0
"""Seconds that an ended session is remembered: longer than any deadline at which a client still
asks for the outcome of a request."""

REVISIONS = 1_000_000
"""Revisions a second. The first revision of a server is as many as seconds have passed since 1970,
times this: higher than the last one of a server that ran before it, which makes fewer changes a
second. So fencing tokens, which are revisions, grow over restarts too, and no revision of one
server is taken for one of another."""

LATE = 1.5
"""Shares of `orphan` after which a session without a connection begins to count anew: the server
stood still for half of that time, and may not have seen yet that the client is back."""

LISTED = 400
"""Requests that a refusal lists at most: it must fit a message before the proof. Of more, the
outcome cannot be known."""


class _Tombstone(NamedTuple):
    """The rest of an ended session: the requests that it did and may not know of."""

    ended: float
    because: str
    happened: tuple[int, ...]


class State(Ledger):
    """The store. Replies to requests that waited are put into `woken`, which the caller empties."""

    def __init__(
        self,
        limits: m.Limits,
        *,
        history: int = histories.CHANGES,
        history_bytes: int = histories.CHANGE_BYTES,
        roster: Roster | None = None,
        began: float = 0.0,
    ) -> None:
        """`history`, `history_bytes`: changes that are kept for watches, and the bytes of their
        values. `roster`: the launcher's knowledge of its ranks; called when somebody is missing at
        a barrier. `began`: seconds since 1970."""
        super().__init__(limits, int(began * REVISIONS))
        self.limits = limits
        self._sessions: dict[bytes, Session] = {}
        self._deadlines: Deadlines[Session] = Deadlines()
        self._tombstones: OrderedDict[bytes, _Tombstone] = OrderedDict()
        self._locks = Locks(self)
        self._claims = Claims(self)
        self._queues = Queues(self)
        self._barriers = Barriers(self, self._sessions, roster)
        self._history = History(self, history, history_bytes)
        self._keys = KeyTable(self, self._history, self._locks)
        # In the order in which a session gives back what it held of them.
        self._kinds = (
            self._locks,
            self._claims,
            self._queues,
            self._barriers,
            self._history,
            self._keys,
        )
        self._handlers: dict[type[m.Request], Callable[[Session, Any], m.Reply | None]] = {
            m.Ping: self._ping,
            m.Get: self._keys.get,
            m.Set: self._keys.set,
            m.CompareAndSet: self._keys.compare_and_set,
            m.Delete: self._keys.delete,
            m.Keys: self._keys.keys,
            m.Exists: self._keys.exists,
            m.Add: self._keys.add,
            m.Append: self._keys.append,
            m.Push: self._queues.push,
            m.Pop: self._queues.pop,
            m.Settle: self._queues.settle,
            m.Length: self._queues.length,
            m.Watch: self._history.watch,
            m.Claim: self._claims.claim,
            m.Resolve: self._claims.resolve,
            m.Lock: self._locks.lock,
            m.Unlock: self._locks.unlock,
            m.Arrive: self._barriers.arrive,
            m.Status: self._status,
            m.Bye: self._bye,
            m.Cancel: self._cancel,
            m.Release: lambda session, request: None,  # shared memory is the server's business
        }

    def __repr__(self) -> str:
        return (
            f"<State at revision {self.revision}: {len(self._keys)} keys, {self.budget.used} bytes, "
            f"{len(self._sessions)} sessions, {len(self.waiting)} waiting>"
        )

    # --- requests ---

    def apply(
        self, now: float, session: Session, request: m.Request, large: Large | None = None
    ) -> m.Reply | None:
        """Carry out a request and return its reply. None: it has no reply, it waits, or it is a
        repetition of one whose reply nobody wants any more. A repeated request that changes
        something gets its first reply.

        `large`: the request's value, when it is not in the message; its bytes must have been
        reserved (`reserve`), and are the store's from here on. The `value` of a Value reply may be
        such a `Large`.
        """
        self.now = now
        if now >= self._keys.deadlines.next:
            self._keys.expire()
        if large is not None:
            self.budget.used -= large.size
            request = replace(request, value=large)
        if request.acked:
            self.acknowledge(session, request.acked)
        seq, replies, changes = request.seq, session.replies, request.changes
        if changes:
            if seq in replies:
                return replies[seq]
            if session.ended or seq <= session.acked[seq >> m.SLOT_BITS]:
                return None
        try:
            reply = self._handlers[type(request)](session, request)
        except Refused as refused:
            reply = refused.reply(seq, self.revision)
        if changes:
            replies[seq] = reply
        return reply

    def reserve(self, size: int, seq: int = 0) -> m.Failed | None:
        """Charge a large value of request `seq` that is about to be received, or return the reply
        that refuses it."""
        try:
            self.budget.check_value(size, size)
        except Refused as refused:
            return refused.reply(seq, self.revision)
        self.budget.used += size
        return None

    def release(self, size: int) -> None:
        """Take back the charge for a value that did not arrive."""
        self.budget.used -= size

    def _ping(self, session: Session, request: m.Ping) -> m.Reply:
        return m.Done(request.seq, self.revision)

    def _status(self, session: Session, request: m.Status) -> m.Reply:
        keys, used, sessions = self.budget.keys, self.budget.used, len(self._sessions)
        waiting, limits = len(self.waiting), self.budget.limits
        return m.State(request.seq, self.revision, keys, used, sessions, waiting, limits)

    def _bye(self, session: Session, request: m.Bye) -> m.Reply:
        session.replies[request.seq] = reply = m.Done(request.seq, self.revision)
        self.end(self.now, session, "it said goodbye")
        return reply

    def _cancel(self, session: Session, request: m.Cancel) -> None:
        """Take back `target`, whose reply nobody will look at. When it comes after this (a late
        copy), it is not carried out."""
        target = request.target
        waiter = session.waiting.get(target)
        if waiter is not None:
            waiter.lines.kind.give_up(waiter)
        if session.ended or target <= session.acked_in_slot(target):
            return
        reply, held = session.replies.get(target), session.kept.get(target)
        if isinstance(held, Item):
            self._queues.undo(session, held)
        self.forget(session, target)
        session.replies[target] = None
        if isinstance(reply, m.Granted):
            self._claims.release(session, reply.token)
            if reply.token in session.locks:
                self._locks.release(reply.token)

    # --- sessions ---

    def open(
        self,
        now: float,
        session_id: bytes,
        ttl: float,
        identity: m.Identity,
        *,
        resume: bool,
        acked: int,
        orphan: float = NEVER,
    ) -> Session | m.Refusal:
        """Return a new session, or the same again after a reconnect (`resume`: it has been welcomed
        before, a new one must not begin). `orphan`: seconds without a connection after which it
        ends."""
        self.now = now
        session = self._sessions.get(session_id)
        if session is not None:
            # Also without `resume`: then the Welcome was lost, and nothing has been asked yet.
            session.heard = max(session.heard, now)
            session.alone = NEVER
            self.acknowledge(session, acked)
            return session
        if resume:
            return self._lost(session_id, acked)
        limit = self.limits.sessions
        if len(self._sessions) >= limit:
            text = f"the store serves {limit} sessions, and may serve {limit}; nothing raises that"
            return m.Refusal("store-full", text)
        self.opened += 1
        session = Session(session_id, identity, lease(ttl), now, self.opened, lease(orphan))
        self._sessions[session_id] = session
        self.acknowledge(session, acked)
        self._deadlines.set(session, now + session.ttl)
        self._tombstones.pop(session_id, None)
        return session

    def leave_alone(self, now: float, session: Session) -> None:
        """Note that the last connection of a session has ended: it ends, too, unless its client
        connects again in time."""
        session.alone = now
        if now + session.orphan < session.deadline:
            self._deadlines.set(session, now + session.orphan)

    def end(self, now: float, session: Session, because: str = "it was ended") -> None:
        """End a session, and pass on everything it held. May be called twice."""
        if session.ended:
            return
        self.now = now
        session.ended, session.ended_at, session.because = True, now, because
        del self._sessions[session.id]
        self._deadlines.set(session, NEVER)
        self._bury(session)
        for kind in self._kinds:
            kind.end(session)
        for seq in list(session.replies):
            self.forget(session, seq)

    def tick(self, now: float) -> list[Session]:
        """End keys, sessions, leases of locks and waits whose time is over; return the sessions
        that ended.

        Call it when `due` says so, after everything that has arrived was read and heard: a server
        that was stopped for a while must not end sessions whose signs of life it has not read yet.
        """
        self.now = now
        ended = []
        self._keys.expire()
        while (session := self._deadlines.take(now)) is not None:
            # A sign of life only sets `heard`: the deadline is the earliest time at which to look
            # again. A session lives for as long as its longest lease of a lock; but the lock may be
            # given back any moment, so that is looked at in steps of the session's own ttl.
            ttl = max(session.ttl, self._locks.longest(session))
            until, because = session.heard + ttl, f"nothing was heard of it for {ttl:g} s"
            session.silent = True
            orphan = session.orphan
            if session.alone + orphan < until:
                if now - session.alone > orphan * LATE:
                    session.alone = now
                until = session.alone + orphan
                because = f"its connections ended, and it made no other within {orphan:g} s"
                session.silent = False
            if until > now:
                self._deadlines.set(session, min(until, now + session.ttl))
            else:
                self.end(now, session, because)
                ended.append(session)
        self._locks.expire()
        while (waiter := self.waiting.deadlines.take(now)) is not None:
            waiter.lines.kind.timed_out(waiter)
        return ended

    def due(self) -> float:
        """Return the time at which `tick` must be called next, perhaps early; infinity: not before
        something else happens."""
        return min(
            self.waiting.deadlines.next,
            self._keys.deadlines.next,
            self._deadlines.next,
            self._locks.leases.next,
        )

    def _bury(self, session: Session) -> None:
        tombstones, oldest = self._tombstones, self.now - TOMBSTONE_AGE
        happened = tuple(sorted(seq for seq in session.replies if session.happened(seq)))
        tombstones[session.id] = _Tombstone(self.now, session.because, happened)
        while len(tombstones) > TOMBSTONES or next(iter(tombstones.values())).ended < oldest:
            tombstones.popitem(last=False)

    def _lost(self, session_id: bytes, acked: int) -> m.Refusal:
        tombstone = self._tombstones.get(session_id)
        if tombstone is None or tombstone.ended < self.now - TOMBSTONE_AGE:
            text = "this server does not know the session, or has forgotten it"
            return m.Refusal("session-lost", text)
        ago = self.now - tombstone.ended
        text = f"the session ended {ago:.1f} s ago: {tombstone.because}; what it held was released"
        happened = tuple(seq for seq in tombstone.happened if seq > acked)
        if len(happened) > LISTED:
            return m.Refusal("session-lost", text)
        return m.Refusal("session-lost", text, known=True, happened=happened)
