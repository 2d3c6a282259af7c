"""`once`: the first to claim a name computes its value, the others get that value. Pure.

A value is remembered for good. A failure is not: those who wait at that moment get it, and whoever
claims the name later tries again. When the one who computes dies, or gives up with `retry`, the
next in line does it.
"""

from __future__ import annotations

from rallypoint.store.state.quotas import HELD_BYTES, KEY_BYTES, Large, quoted
from rallypoint.store.state.replies import Answer, Ledger, Session
from rallypoint.store.state.waiters import Lines, Waiter
from rallypoint.wire.messages import Absent, Claim, Done, Failed, Granted, Resolve, TimedOut, Value


class _Open:
    """A name that somebody computes."""

    __slots__ = ("name", "session", "since", "token")

    def __init__(self, name: str, session: Session, token: int, since: float) -> None:
        self.name = name
        self.session = session
        self.token = token
        self.since = since


class _Result:
    """A name whose value is known."""

    __slots__ = ("large", "modified", "size", "value")

    def __init__(self, value: bytes, large: Large | None, size: int, modified: int) -> None:
        self.value = value
        self.large = large
        self.size = size
        self.modified = modified


def _weight(name: str) -> int:
    """Bytes that an open claim is charged."""
    return HELD_BYTES + len(name.encode())


class Claims:
    """All names that are claimed or resolved, and who waits for them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._open: dict[str, _Open] = {}
        self._results: dict[str, _Result] = {}
        self._lines = Lines(self._timed_out)

    def claim(
        self, now: float, session: Session, request: Claim, large: Large | None
    ) -> Answer | None:
        name = request.name
        result = self._results.get(name)
        if result is not None:
            return self._value(session, request, result)
        claim = self._open.get(name)
        if claim is None:
            budget, seq, revision = self._ledger.budget, request.seq, self._ledger.revision
            refused = budget.refuse_name(name, seq, revision) or budget.refuse_value(
                0, _weight(name), seq, revision
            )
            if refused is not None:
                return refused, None
            return self._grant(now, session, request), None
        if request.timeout is not None and not request.timeout > 0:
            return self._refused(now, request, claim), None
        return self._ledger.wait(now, session, request, request.timeout, self._lines, (name,))

    def resolve(
        self, now: float, session: Session, request: Resolve, large: Large | None
    ) -> Answer:
        ledger, name = self._ledger, request.name
        claim = self._open.get(name)
        if claim is None or claim.session is not session or request.token not in (0, claim.token):
            return Absent(request.seq, ledger.revision), None
        if request.retry:
            self.release(now, session, claim.token)
            return Done(request.seq, ledger.revision), None
        if large is None and not request.value:
            return ledger.failed(request, "bad-request", "a value has at least one byte")
        if request.failed:
            # `Failed.value` is part of the message: an error that is too large for that cannot be
            # passed on.
            if large is not None:
                return ledger.failed(
                    request,
                    "value-too-large",
                    f"the error has {large.size} bytes: shorten it",
                    size=large.size,
                )
            self._fail(claim, request.value)
        else:
            refused = self._store(claim, request, large)
            if refused is not None:
                return refused, None
        return Done(request.seq, ledger.revision), None

    def release(self, now: float, session: Session, token: int) -> None:
        """The session gives this claim up: the next in line computes. Nothing when it was over
        before.
        """
        name = session.claims.get(token)
        if name is None:
            return
        self._close(self._open[name])
        self._ledger.changed()
        waiter = self._lines.first(name)
        if waiter is not None:
            self._ledger.answer(waiter, self._grant(now, waiter.session, waiter.request))

    def end(self, now: float, session: Session) -> None:
        """Pass on what the session has claimed."""
        for token in list(session.claims):
            self.release(now, session, token)

    def _grant(self, now: float, session: Session, request: Claim) -> Granted:
        token = self._ledger.changed()
        self._ledger.budget.used += _weight(request.name)
        self._open[request.name] = _Open(request.name, session, token, now)
        session.claims[token] = request.name
        return Granted(request.seq, token, token)

    def _close(self, claim: _Open) -> None:
        del self._open[claim.name]
        self._ledger.budget.used -= _weight(claim.name)
        del claim.session.claims[claim.token]

    def _store(self, claim: _Open, request: Resolve, large: Large | None) -> Failed | None:
        ledger, budget, name = self._ledger, self._ledger.budget, claim.name
        size = len(request.value) if large is None else large.size
        weight = KEY_BYTES + len(name.encode()) + size
        refused = budget.refuse_value(
            size, weight, request.seq, ledger.revision
        ) or budget.refuse_key(request.seq, ledger.revision)
        if refused is not None:
            return refused
        self._close(claim)
        budget.keys += 1
        budget.used += weight
        result = self._results[name] = _Result(request.value, large, size, ledger.changed())
        for waiter in self._lines.all(name):
            reply, _ = self._value(waiter.session, waiter.request, result)
            ledger.answer(waiter, reply, large)
        return None

    def _fail(self, claim: _Open, error: bytes) -> None:
        ledger, name = self._ledger, claim.name
        self._close(claim)
        revision = ledger.changed()
        who = claim.session.identity
        for waiter in self._lines.all(name):
            seq = waiter.request.seq
            ledger.keep(waiter.session, seq, error, len(error), stored=False, changed=False)
            text = f"once({quoted(name)}) failed in {who}"
            ledger.answer(
                waiter, Failed(seq, revision, "once-failed", text, present=(who,), value=error)
            )

    def _value(self, session: Session, request: Claim, result: _Result) -> Answer:
        thing = result.value if result.large is None else result.large
        self._ledger.keep(session, request.seq, thing, result.size, stored=True, changed=False)
        return Value(
            request.seq, self._ledger.revision, result.modified, result.value
        ), result.large

    def _timed_out(self, now: float, waiter: Waiter) -> None:
        self._ledger.answer(
            waiter, self._refused(now, waiter.request, self._open[waiter.request.name])
        )

    def _refused(self, now: float, request: Claim, claim: _Open) -> TimedOut:
        return TimedOut(
            request.seq,
            self._ledger.revision,
            holder=claim.session.identity,
            held_for=now - claim.since,
        )
