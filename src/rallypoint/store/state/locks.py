"""Locks: first come, first served, held for as long as its holder gives signs of life, each grant
with a fencing token. Pure.

A lock by itself keeps things moving; what keeps data right is the token, checked where the data is:
a write with `fence=token` is refused once that grant is over. A token is the revision of its grant,
so tokens grow, over all locks.

A grant is over when it is given back, when its session ends, or when the session gave no sign of
life for the `ttl` of that grant. A session lives for as long as the longest of its grants: one that
is lost with a short session would not have the lease it asked for.

Who waits for whom is a graph of owners (threads): each waits for the holder of what it asked for. A
request that would close a circle in it is refused, for then nobody in it would ever go on. Only a
request can close one: a grant gives the lock to somebody who waits for nothing any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice, pairwise

from rallypoint.store.limits import lease
from rallypoint.store.state.quotas import HELD_BYTES, Large, quoted
from rallypoint.store.state.replies import Answer, Ledger, Session
from rallypoint.store.state.waiters import NEVER, Deadlines, Line, Lines, Waiter
from rallypoint.wire.messages import (
    Absent,
    CompareAndSet,
    Delete,
    Done,
    Failed,
    Granted,
    Lock,
    Set,
    TimedOut,
    Unlock,
)

QUEUE_SHOWN = 64
"""Of those who wait in front, so many are named in a `TimedOut`: what a person reads; 10,000 that
time out cost 10,000 short replies.
"""

CIRCLE_SHOWN = 16
"""Of those who wait for each other, so many are named: more than anybody has ever built, and a text
that fits a screen.
"""

PAST = 4096
"""Grants that are over and still known by name, so that a stale token is told whose lock it was;
about a megabyte.
"""

Owner = str | tuple[bytes, str]
"""Who holds or waits, to find him again: see `_owner`."""


class _Held:
    """A lock that is held."""

    __slots__ = ("deadline", "name", "owner", "session", "since", "token", "ttl", "who")

    def __init__(self, session: Session, request: Lock, token: int, since: float) -> None:
        self.name = request.name
        self.session = session
        self.owner = request.owner
        self.who = _owner(session, request.owner)
        self.token = token
        self.since = since
        self.ttl = NEVER if request.ttl is None else lease(request.ttl)
        self.deadline = NEVER  # the earliest at which to look whether the lease is over


def _owner(session: Session, owner: str) -> Owner:
    """A thread with several sessions is one owner: behind "#" it has said who it is in all
    of them.
    """
    return owner if "#" in owner else (session.id, owner)


def _called(session: Session, owner: str) -> str:
    """An owner, for people."""
    thread = owner.partition("#")[0]
    return (
        str(session.identity)
        if thread in ("", "MainThread")
        else f"the thread {thread} of {session.identity}"
    )


def _weight(name: str, owner: str) -> int:
    """Bytes that a held lock is charged."""
    return HELD_BYTES + len(name.encode()) + len(owner.encode())


class _Queues(Lines):
    """Who waits for which lock; `by_owner`: for what an owner waits, which is more than one thing
    only in signal handlers.
    """

    __slots__ = ("by_owner",)

    def __init__(self, locks: Locks) -> None:
        super().__init__(locks._timed_out)
        self.by_owner: dict[Owner, Line] = {}

    def join(self, waiter: Waiter, names: Iterable[str]) -> None:
        super().join(waiter, names)
        self.by_owner.setdefault(_owner(waiter.session, waiter.request.owner), OrderedDict())[
            waiter
        ] = None

    def leave(self, waiter: Waiter, name: str) -> None:
        super().leave(waiter, name)
        owner = _owner(waiter.session, waiter.request.owner)
        waits = self.by_owner[owner]
        del waits[waiter]
        if not waits:
            del self.by_owner[owner]


class Locks:
    """All locks that are held, and who waits for them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._held: dict[str, _Held] = {}
        self._tokens: dict[int, _Held] = {}
        self._past: OrderedDict[int, str] = OrderedDict()  # name by token
        self._lines = _Queues(self)
        self.leases: Deadlines[_Held] = Deadlines()

    def lock(
        self, now: float, session: Session, request: Lock, large: Large | None
    ) -> Answer | None:
        budget, seq, revision = self._ledger.budget, request.seq, self._ledger.revision
        held = self._held.get(request.name)
        refused = budget.refuse_name(request.name, seq, revision) or budget.refuse_name(
            request.owner, seq, revision
        )
        at_once = request.timeout is not None and not request.timeout > 0
        only_look = at_once and request.timeout != 0
        if held is None and refused is None and not only_look:
            refused = budget.refuse_value(0, _weight(request.name, request.owner), seq, revision)
        if refused is not None:
            return refused, None
        if held is None:
            return Absent(seq, revision) if only_look else self._grant(now, session, request), None
        if at_once:
            return self._refused(now, request, held, None), None
        if self._is_asker(held, session, request):
            who = _called(held.session, held.owner)
            text = f"{who} asks for the lock {quoted(request.name)} and has it already, for {now - held.since:.1f} s"
            return self._ledger.failed(
                request, "lock-twice", text, token=held.token, held_for=now - held.since
            )
        circle = self._circle(session, request)
        if circle:
            return self._refuse_circle(session, request, circle), None
        return self._ledger.wait(
            now, session, request, request.timeout, self._lines, (request.name,)
        )

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
        self.leases.set(held, NEVER)
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

    def expire(self, now: float) -> None:
        """Pass on what is held by sessions that gave no sign of life for too long. A grant to
        somebody who was silent for as long while he waited is over at once."""
        while (held := self.leases.take(now)) is not None:
            # A sign of life only sets `heard`, as with sessions.
            until = held.session.heard + held.ttl
            if until > now:
                self.leases.set(held, until)
            else:
                self.release(now, held.token)

    def longest(self, session: Session) -> float:
        """The longest lease that the session has, in seconds; 0 without one."""
        ttls = [self._tokens[token].ttl for token in session.locks]
        return max([ttl for ttl in ttls if ttl != NEVER], default=0.0)

    def refuse_fence(self, now: float, request: Set | CompareAndSet | Delete) -> Answer | None:
        """Why a write with this token is refused; None when it has none, or that of a lock which is
        held.
        """
        token = request.fence
        if token is None or token in self._tokens:
            return None
        name = self._past.get(token)
        if name is None:
            return self._ledger.failed(
                request,
                "fence-stale",
                f"{token} is not the token of a lock that is held",
                token=token,
            )
        held = self._held.get(name)
        if held is None:
            text = f"the lock {quoted(name)} with token {token} is no longer held, by nobody"
            return self._ledger.failed(request, "fence-stale", text, token=token, lock=name)
        text = f"the lock {quoted(name)} is no longer held with token {token}: {held.session.identity} has it, with token {held.token}"
        return self._ledger.failed(
            request, "fence-stale", text, token=token, lock=name, held=held.token
        )

    def _grant(self, now: float, session: Session, request: Lock) -> Granted:
        token = self._ledger.changed()
        self._ledger.budget.used += _weight(request.name, request.owner)
        held = _Held(session, request, token, now)
        self._held[held.name] = self._tokens[token] = held
        session.locks[token] = held.name
        if held.ttl != NEVER:
            self.leases.set(held, session.heard + held.ttl)
        return Granted(request.seq, token, token)

    # --- who is told what ---

    def _circle(self, session: Session, request: Lock) -> list[_Held]:
        """What would be waited for in a circle: the lock that is asked for, the one that its holder
        waits for, and so on; the last of them is held by who asks. Empty when there is no circle.
        """
        came: dict[str, str] = {}  # from which lock on the way to which
        ways = [request.name]
        for name in ways:  # which grows
            held = self._held[name]
            if self._is_asker(held, session, request):
                circle = [name]
                while circle[-1] != request.name:
                    circle.append(came[circle[-1]])
                return [self._held[one] for one in reversed(circle)]
            for waiter in self._lines.by_owner.get(held.who, ()):
                wanted = waiter.request.name
                if wanted not in came and wanted != request.name:
                    came[wanted] = name
                    ways.append(wanted)
        return []

    def _is_asker(self, held: _Held, session: Session, request: Lock) -> bool:
        """Whether who asks would wait for himself. A thread that has two sessions may stand for two
        clients, in a test, say: only if it would wait for ever is it told."""
        return held.who == _owner(session, request.owner) and (
            held.session is session or request.timeout is None
        )

    def _refuse_circle(self, session: Session, request: Lock, circle: list[_Held]) -> Failed:
        steps = [
            f"{_called(held.session, held.owner)} has {quoted(held.name)} and waits for {quoted(after.name)}"
            for held, after in pairwise(circle)
        ]
        if len(steps) > CIRCLE_SHOWN:
            steps[CIRCLE_SHOWN:] = [f"{len(steps) - CIRCLE_SHOWN} more in the same way"]
        steps.append(f"{_called(session, request.owner)}, who asks, has {quoted(circle[-1].name)}")
        text = f"waiting for the lock {quoted(request.name)} would never end: {'; '.join(steps)}"
        present = tuple(held.session.identity for held in circle[: CIRCLE_SHOWN + 1])
        return Failed(
            request.seq,
            self._ledger.revision,
            "lock-cycle",
            text,
            (("owners", len(circle)),),
            present,
        )

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
