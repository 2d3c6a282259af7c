"""`once`: the first to claim a name computes its value, the others get that value. Pure.

A value is remembered for good. A failure is not: those that wait at that moment get it, and a later
claim of the name tries again. When the session that computes ends, or gives up with `retry`, the
next in line computes.
"""

from __future__ import annotations

from typing import NamedTuple

from rallypoint.store.state.quotas import (
    HELD_BYTES,
    KEY_BYTES,
    Refused,
    Stored,
    bytes_of,
    check_bytes,
    quoted,
)
from rallypoint.store.state.replies import Kind, Ledger, Session
from rallypoint.store.state.waiters import Waiter
from rallypoint.wire.messages import (
    Absent,
    Claim,
    Done,
    Failed,
    Granted,
    Reply,
    Resolve,
    TimedOut,
    Value,
)


class _OpenClaim(NamedTuple):
    """A name whose value a session computes."""

    name: str
    session: Session
    token: int
    since: float


def _weight(name: str) -> int:
    """Return the bytes that an open claim is charged."""
    return HELD_BYTES + len(name.encode())


class Claims(Kind):
    """All names that are claimed or resolved."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._open: dict[str, _OpenClaim] = {}
        self._results: dict[str, tuple[int, Stored]] = {}  # revision and value

    def claim(self, session: Session, request: Claim) -> Reply | None:
        name = request.name
        if name in self._results:
            return self._value(request)
        if name not in self._open:
            self._budget.check_name(name)
            self._budget.check_value(0, _weight(name))
            return self._grant(session, request)
        if request.timeout is not None and not request.timeout > 0:
            return self._timed_out(request)
        return self._ledger.wait(session, request, self._lines, name)

    def resolve(self, session: Session, request: Resolve) -> Reply:
        ledger = self._ledger
        claim = self._open.get(request.name)
        if claim is None or claim.session is not session or request.token not in (0, claim.token):
            return Absent(request.seq, ledger.revision)
        if request.retry:
            self.release(session, claim.token)
        else:
            check_bytes(request.value)
            if request.failed:
                self._fail(claim, request.value)
            else:
                self._store(claim, request.value)
        return Done(request.seq, ledger.revision)

    def release(self, session: Session, token: int) -> None:
        """End a claim without a value: the next in line computes. Nothing when it was over."""
        name = session.claims.get(token)
        if name is None:
            return
        self._close(self._open[name])
        self._ledger.changed()
        waiter = self._lines.first(name)
        if waiter is not None:
            self._ledger.answer(waiter, self._grant(waiter.session, waiter.request))

    def end(self, session: Session) -> None:
        super().end(session)
        for token in list(session.claims):
            self.release(session, token)

    def timed_out(self, waiter: Waiter) -> None:
        self._ledger.answer(waiter, self._timed_out(waiter.request))

    def _grant(self, session: Session, request: Claim) -> Granted:
        token = self._ledger.changed()
        self._budget.used += _weight(request.name)
        self._open[request.name] = _OpenClaim(request.name, session, token, self._ledger.now)
        session.claims[token] = request.name
        return Granted(request.seq, token, token)

    def _close(self, claim: _OpenClaim) -> None:
        del self._open[claim.name]
        self._budget.used -= _weight(claim.name)
        del claim.session.claims[claim.token]

    def _store(self, claim: _OpenClaim, value: Stored) -> None:
        name, size = claim.name, bytes_of(value)
        weight = KEY_BYTES + len(name.encode()) + size
        self._budget.check_value(size, weight)
        self._budget.check_key()
        self._close(claim)
        self._budget.keys += 1
        self._budget.used += weight
        self._results[name] = (self._ledger.changed(), value)
        for waiter in self._lines.all(name):
            self._ledger.answer(waiter, self._value(waiter.request))

    def _fail(self, claim: _OpenClaim, error: Stored) -> None:
        if type(error) is not bytes:  # `Failed.value` is part of the message
            size = bytes_of(error)
            raise Refused("value-too-large", f"the error has {size} bytes: shorten it", size=size)
        self._close(claim)
        revision, identity = self._ledger.changed(), claim.session.identity
        text = f"once({quoted(claim.name)}) failed in {identity}"
        for waiter in self._lines.all(claim.name):
            seq = waiter.request.seq
            failed = Failed(seq, revision, "once-failed", text, present=(identity,), value=error)
            self._ledger.answer(waiter, failed)

    def _value(self, request: Claim) -> Value:
        return Value(request.seq, self._ledger.revision, *self._results[request.name])

    def _timed_out(self, request: Claim) -> TimedOut:
        claim, ledger = self._open[request.name], self._ledger
        held_for = ledger.now - claim.since
        holder = claim.session.identity
        return TimedOut(request.seq, ledger.revision, holder=holder, held_for=held_for)
