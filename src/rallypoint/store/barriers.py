"""Barriers: all arrive, or all who wait learn at once that it will not be, and who was there. Pure.

A barrier exists from its first arrival until all `size` are there, or it breaks: somebody's timeout passed, somebody's session
ended, or two disagree about the size. The next arrival under its name begins a new generation. One request is one seat: the
threads of one session may each take one.
"""

from __future__ import annotations

from rallypoint.store.budget import Large, quoted
from rallypoint.store.ledger import Answer, Ledger, Session
from rallypoint.store.waiting import Lines, Waiter
from rallypoint.wire.messages import Arrive, Failed, Identity, Integer, TimedOut

PRESENT_WHOLE = 1024
"""Up to so many seats a failure names everybody who was there, so that who is missing can be told."""

PRESENT_SHOWN = 100
"""Of more than that, so many are named: each of 10,000 getting 10,000 names would be gigabytes."""


class Barriers:
    """All barriers at which somebody waits."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._seats = Lines(self._timed_out)  # the size of a barrier is what the first one there said

    def arrive(self, now: float, session: Session, request: Arrive, large: Large | None) -> Answer | None:
        name, size, ledger = request.name, request.size, self._ledger
        seats = self._seats.get(name)
        if seats is None:
            if size < 1:
                return ledger.failed(request, "bad-request", f"a barrier of {size} has nobody to wait for", size=size)
        elif size != next(iter(seats)).request.size:
            return self._disagree(session, request)
        if (0 if seats is None else len(seats)) + 1 == size:
            return self._complete(request), None
        if request.timeout is not None and not request.timeout > 0:
            present = self._present(name, session.identity)
            self._break(name, size, f"{session.identity} did not wait", present)
            return TimedOut(request.seq, ledger.revision, present=present), None
        return ledger.wait(now, session, request, request.timeout, self._seats, (name,))

    def is_seat(self, waiter: Waiter) -> bool:
        """Whether this waiter waits at a barrier."""
        return waiter.lines is self._seats

    def desert(self, names: list[str], session: Session) -> None:
        """The session has ended; its seats at these barriers are empty already."""
        for name in names:
            waiter = self._seats.first(name)
            if waiter is not None:
                self._break(name, waiter.request.size, f"the session of {session.identity} ended while it waited", self._present(name))

    def _complete(self, request: Arrive) -> Integer:
        """Everybody is there. The generation is the revision at which that was so: it grows, and needs no memory between rounds."""
        name, ledger = request.name, self._ledger
        generation = ledger.changed()
        for waiter in self._seats.all(name):
            ledger.answer(waiter, Integer(waiter.request.seq, generation, generation))
        return Integer(request.seq, generation, generation)

    def _timed_out(self, now: float, waiter: Waiter) -> None:
        request = waiter.request
        present = self._present(request.name)
        self._ledger.answer(waiter, TimedOut(request.seq, self._ledger.revision, present=present))
        self._break(request.name, request.size, f"{waiter.session.identity} gave up after {now - waiter.since:.1f} s", present)

    def _break(self, name: str, size: int, because: str, present: tuple[Identity, ...]) -> None:
        """Tell all who wait; `present` is who has arrived and lives."""
        waiters = self._seats.all(name)
        text = f"the barrier {quoted(name)} is broken: {because}"
        details = (("size", size), ("waiting", len(waiters)))
        for waiter in waiters:
            seq = waiter.request.seq
            self._ledger.answer(waiter, Failed(seq, self._ledger.revision, "barrier-broken", text, details, present))

    def _disagree(self, session: Session, request: Arrive) -> Answer:
        name, revision = request.name, self._ledger.revision
        waiters = self._seats.all(name)
        size = waiters[0].request.size
        others = f" and {len(waiters) - 1} more" if len(waiters) > 1 else ""
        text = (
            f"the barrier {quoted(name)} has no one size: {waiters[0].session.identity}{others} said {size}, "
            f"{session.identity} said {request.size}"
        )
        details = (("size", size), ("asked", request.size))
        present = self._shown([waiter.session.identity for waiter in waiters] + [session.identity])
        for waiter in waiters:
            self._ledger.answer(waiter, Failed(waiter.request.seq, revision, "barrier-size", text, details, present))
        return Failed(request.seq, revision, "barrier-size", text, details, present), None

    def _present(self, name: str, *more: Identity) -> tuple[Identity, ...]:
        return self._shown([waiter.session.identity for waiter in self._seats.get(name, ())] + list(more))

    def _shown(self, present: list[Identity]) -> tuple[Identity, ...]:
        return tuple(present if len(present) <= PRESENT_WHOLE else present[:PRESENT_SHOWN])
