"""apply(state, now, request) -> replies, wake-ups.

Everything the store decides is decided here and in the files beside it, without a clock, socket or
thread; `store/server/server.py` does what comes back. This file has the sessions and the way a
request takes; what a request means is with its kind:

    keys.py      Get Set CompareAndSet Delete Keys Exists Add Append
    watches.py   Watch
    queues.py    Push Pop Settle Length
    once.py    Claim Resolve
    locks.py     Lock Unlock, and the fence of Set, CompareAndSet and Delete
    barriers.py  Arrive

A new operation is a message in `wire/messages.py`, a method of its kind, and a line in
`State._handlers`. A method answers at once, or lets the request wait in the lines of its kind
(`Ledger.wait`) and answers it later (`Ledger.answer`); what a session holds is a field of
`Session`, given back in `State.end`. Exactly once is not its business: `apply` sees to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from rallypoint.store.limits import lease
from rallypoint.store.state import watches as histories
from rallypoint.store.state.attendance import Roster
from rallypoint.store.state.barriers import Barriers
from rallypoint.store.state.keys import KeyTable
from rallypoint.store.state.locks import Locks
from rallypoint.store.state.once import Claims
from rallypoint.store.state.queues import Queues
from rallypoint.store.state.quotas import Large
from rallypoint.store.state.replies import Answer, Ledger, Session
from rallypoint.store.state.waiters import NEVER, Deadlines
from rallypoint.store.state.watches import History
from rallypoint.wire import messages as m
from rallypoint.wire.messages import SLOT_BITS

__all__ = ["Answer", "Large", "Session", "State"]

TOMBSTONES = 65_536
"""Ended sessions that are remembered: as many as may live, so that all of a cluster can be told
what happened after its network was away. 20 MB at most."""

TOMBSTONE_AGE = 3600.0
"""Seconds that an ended session is remembered: longer than any deadline at which a client still
asks for the outcome of a request.
"""

REVISIONS = 1_000_000
"""A second. The first revision of a server is as many as seconds have passed since 1970, times
this: higher than the last one of a server that ran before it and made fewer changes a second than
that, which each does. So fencing tokens, which are revisions, grow over restarts too, and no
revision of one server is taken for one of another."""

LISTED = 400
"""Requests that a refusal lists at most: it must fit a message before the proof. Of more, the
outcome cannot be known.
"""

_NOT_WANTED = object()


class _Tombstone:
    """What is left of a session: what it did that it may not know of."""

    __slots__ = ("because", "ended", "happened")

    def __init__(self, ended: float, because: str, happened: tuple[int, ...]) -> None:
        self.ended = ended
        self.because = because
        self.happened = happened


class State(Ledger):
    """The store. Time is what it is told; answers to requests that waited are put into `woken`,
    which the caller empties.
    """

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
        values. `roster`: what the launcher of the job knows of its ranks; called when somebody is
        missing at a barrier. `began`: seconds since 1970."""
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
        self._expiring = self._keys.deadlines
        self._handlers: dict[
            type[m.Request], Callable[[float, Session, Any, Large | None], Answer | None]
        ] = {
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
            m.Release: self._release,
        }

    def __repr__(self) -> str:
        return (
            f"<State at revision {self.revision}: {len(self._keys)} keys, {self.budget.used} bytes, "
            f"{len(self._sessions)} sessions, {len(self.waiting)} waiting>"
        )

    # --- requests ---

    def apply(
        self, now: float, session: Session, request: m.Request, large: Large | None = None
    ) -> Answer | None:
        """Carry out a request. None: it has no reply, it waits, or it is a repetition of one whose
        reply nobody wants any more. A repeated request that changes something gets its first reply.

        `large`: the request's value, when it is not in the message; its bytes must have been
        reserved (`reserve`), and count as the store's from here on, whatever the answer. In a reply
        to a large value `value` is empty and `shared` 0: how it travels is the caller's business.
        """
        if now >= self._expiring.next:
            self._keys.expire(now)
        if large is not None:
            self.budget.used -= large.size
        acked = request.acked
        if acked:
            before = session.acked_in_slot(acked)
            if acked == before + 1 and not session.kept:
                # Nearly always: the slot's last reply has arrived.
                session.acked[acked >> SLOT_BITS] = acked
                if session.replies.pop(acked, _NOT_WANTED) is None:
                    self.abandon(session, acked)
            elif acked > before:
                self.acknowledge(session, acked)
        if not request.changes:
            return self._handlers[type(request)](now, session, request, large)
        seq, replies = request.seq, session.replies
        if seq in replies:
            return replies[seq]
        if session.ended or seq <= session.acked_in_slot(seq):
            return None
        replies[seq] = answer = self._handlers[type(request)](now, session, request, large)
        return answer

    def reserve(self, size: int, seq: int = 0) -> m.Failed | None:
        """Charge a large value of request `seq` that is about to be received, or say why it cannot
        be: then nothing is charged.
        """
        refused = self.budget.refuse_value(size, size, seq, self.revision)
        if refused is None:
            self.budget.used += size
        return refused

    def release(self, size: int) -> None:
        """What was reserved did not arrive."""
        self.budget.used -= size

    def _ping(self, now: float, session: Session, request: m.Ping, large: Large | None) -> Answer:
        return m.Done(request.seq, self.revision), None

    def _status(
        self, now: float, session: Session, request: m.Status, large: Large | None
    ) -> Answer:
        budget = self.budget
        return m.State(
            request.seq,
            self.revision,
            budget.keys,
            budget.used,
            len(self._sessions),
            len(self.waiting),
            budget.limits,
        ), None

    def _bye(self, now: float, session: Session, request: m.Bye, large: Large | None) -> Answer:
        session.replies[request.seq] = answer = m.Done(request.seq, self.revision), None
        self.end(now, session, "it said goodbye")
        return answer

    def _cancel(self, now: float, session: Session, request: m.Cancel, large: Large | None) -> None:
        """Nobody will look at the reply to `target`: also when it comes after this (a late copy),
        it is not carried out.
        """
        target = request.target
        waiter = session.waiting.get(target)
        if waiter is not None:
            if self._barriers.is_seat(waiter):
                self._barriers.give_up(now, waiter)
            else:
                self.remove(waiter)
        if session.ended or target <= session.acked_in_slot(target):
            return
        answer = session.replies.get(target)
        kept = session.kept.get(target)
        self.forget(session, target)
        session.replies[target] = None
        if answer is None:
            return
        reply = answer[0]
        if kept is not None and kept.item is not None:
            self._queues.undo(session, kept.item)
        elif type(reply) is m.Granted:
            if reply.token in session.locks:
                self._locks.release(now, reply.token)
            else:
                self._claims.release(now, session, reply.token)

    def _release(
        self, now: float, session: Session, request: m.Release, large: Large | None
    ) -> None:
        """What was read of shared memory is the server's business."""

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
    ) -> Session | m.Refusal:
        """A new session, or the same again after a reconnect (`resume`: it has been welcomed
        before, a new one must not begin).
        """
        session = self._sessions.get(session_id)
        if session is not None:
            # Also without `resume`: then the Welcome was lost, and nothing has been asked yet.
            session.heard = max(session.heard, now)
            if acked > session.acked_in_slot(acked):
                self.acknowledge(session, acked)
            return session
        if resume:
            return self._lost(now, session_id, acked)
        refused = self.budget.refuse_session(len(self._sessions))
        if refused is not None:
            return refused
        session = self._sessions[session_id] = Session(session_id, identity, lease(ttl), now)
        self.opened += 1
        session.number = self.opened
        if acked > 0:
            session.acked[acked >> SLOT_BITS] = acked
        self._deadlines.set(session, now + session.ttl)
        self._tombstones.pop(session_id, None)
        return session

    def end(self, now: float, session: Session, because: str = "it was ended") -> None:
        """The session is over, and everything it held goes to whoever waits for it. May be called
        twice.
        """
        if session.ended:
            return
        session.ended, session.ended_at, session.because = True, now, because
        del self._sessions[session.id]
        self._deadlines.set(session, NEVER)
        self._bury(now, session, because)
        waiters = list(session.waiting.values())
        seats = [waiter for waiter in waiters if self._barriers.is_seat(waiter)]
        for waiter in waiters:
            if not self._barriers.is_seat(waiter):
                self.remove(waiter)
        self._locks.end(now, session)
        self._claims.end(now, session)
        self._queues.end(session)
        self._barriers.end(now, session, seats)
        self._keys.end(session)
        for seq in list(session.replies):
            self.forget(session, seq)

    def tick(self, now: float) -> list[Session]:
        """End what has run out: keys, sessions, leases of locks, then waits; return the sessions
        that ended.

        Call it when `due` says so, after everything that has arrived was read and heard: a server
        that was stopped for a while must not end sessions whose signs of life it has not read yet.
        """
        ended = []
        self._keys.expire(now)
        while (session := self._deadlines.take(now)) is not None:
            # A sign of life only sets `heard`: the time in the heap is the earliest at which to
            # look again. While it has a lock with a longer lease it lives for as long; but the lock
            # may be given back any moment, so that is looked at in steps of its own ttl.
            ttl = max(session.ttl, self._locks.longest(session))
            until = session.heard + ttl
            if until > now:
                self._deadlines.set(session, min(until, now + session.ttl))
            else:
                self.end(now, session, f"nothing was heard of it for {ttl:g} s")
                ended.append(session)
        self._locks.expire(now)
        while (waiter := self.waiting.expire(now)) is not None:
            waiter.lines.timed_out(now, waiter)
        return ended

    def due(self) -> float | None:
        """When `tick` must be called next; None: not before something else happens. May be
        early.
        """
        due = min(
            self._expiring.next,
            self._deadlines.next,
            self._locks.leases.next,
            self.waiting.deadlines.next,
        )
        return None if due == NEVER else due

    def _bury(self, now: float, session: Session, because: str) -> None:
        tombstones = self._tombstones
        happened = tuple(sorted(seq for seq in session.replies if session.happened(seq)))
        tombstones[session.id] = _Tombstone(now, because, happened)
        while (
            len(tombstones) > TOMBSTONES
            or next(iter(tombstones.values())).ended < now - TOMBSTONE_AGE
        ):
            tombstones.popitem(last=False)

    def _lost(self, now: float, session_id: bytes, acked: int) -> m.Refusal:
        tombstone = self._tombstones.get(session_id)
        if tombstone is None or tombstone.ended < now - TOMBSTONE_AGE:
            return m.Refusal(
                "session-lost", "this server does not know the session, or has forgotten it"
            )
        text = f"the session ended {now - tombstone.ended:.1f} s ago: {tombstone.because}; what it held was released"
        happened = tuple(seq for seq in tombstone.happened if seq > acked)
        if len(happened) > LISTED:
            return m.Refusal("session-lost", text)
        return m.Refusal("session-lost", text, known=True, happened=happened)
