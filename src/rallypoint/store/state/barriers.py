"""Barriers: all arrive, or all who wait learn at once that it will not be, and who was there. Pure.

A barrier's generation exists from its first arrival until all `size` are there, or it breaks:
somebody's timeout passed, somebody gave up or his session ended, or two disagree about the size.
One request is one seat: the threads of one session may each take one.

With a quorum, whose seat is lost is merely not there, and the generation is complete when everybody
is there who was at the former one and still lives, or when the first timeout of those who wait is
over; it breaks when the quorum is not there by then, or cannot be any more.

The next arrival under the name begins the next generation, with one exception: who did not come to
a generation that broke, or was complete without him, is told so when he does come, once, and does
not sit down among those who are a round ahead of him. That is `_Over`; it is forgotten when all who
did not come were told, or when a generation of the name is complete.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Generic, TypeVar

from rallypoint.store.state import attendance as rollcall
from rallypoint.store.state.attendance import Roster, attendance, who
from rallypoint.store.state.quotas import LEND_BYTES, Budget, Large, quoted
from rallypoint.store.state.replies import Answer, Ledger, Session
from rallypoint.store.state.waiters import Line, Lines, Waiter
from rallypoint.wire.messages import (
    INLINE_BYTES,
    Arrive,
    Failed,
    Identity,
    Integer,
    Member,
    Met,
    Seat,
    TimedOut,
)

PRESENT_WHOLE = 1024
"""Up to so many seats a failure names everybody who was there, and everybody who was not."""

PRESENT_SHOWN = 100
"""Of more than that, so many are named: each of 10,000 getting 10,000 names would be gigabytes."""

MET_BYTES = 16 * 1024 * 1024
"""Of the values of one generation: everybody gets all of them in one message, a quarter of what
that may have.
"""

NAMES_KEPT = 4096
"""Names of which the last generation is remembered. A program that gives each round a name of its
own must not fill the server.
"""

SEATS_KEPT = 65_536
"""Sessions, and ranks that did not come, in all that these remember, as many as may live: 50 MB at
most, if all of them have ended.
"""

RANKS_KEPT = 65_536
"""Ranks of which the last session that ended is remembered."""

T = TypeVar("T")


class _Generation:
    """A barrier at which somebody waits."""

    __slots__ = ("expected", "gone", "quorum", "size")

    def __init__(self, size: int, quorum: int | None) -> None:
        self.size = size
        self.quorum = quorum
        # With a quorum: those of the former generation who live and are not here yet, with their
        # seats; None: there was none.
        self.expected: dict[Session, int] | None = None
        self.gone: list[Session] = []  # who had arrived, and died or gave up: once for each seat


class _Former:
    """The last complete generation of a name."""

    __slots__ = ("seated", "size")

    def __init__(self, size: int, seated: list[Session]) -> None:
        self.size = size
        self.seated = seated


class _Over:
    """The last generation of a name to which not everybody came: what those who come too late are
    told.
    """

    __slots__ = ("absent", "at", "code", "details", "late", "opened", "present", "seated", "text")

    def __init__(
        self, at: float, opened: int, code: str, text: str, details: tuple[tuple[str, int], ...], present: tuple[Identity, ...],
        absent: tuple[Member, ...], seated: set[Session], late: int,
    ) -> None:  # fmt: skip
        self.at = at
        self.opened = (
            opened  # sessions that there had been by then: who began later was not expected
        )
        self.code = code
        self.text = text
        self.details = details
        self.present = present
        self.absent = absent
        self.seated = seated  # who was there, or has been told
        self.late = late  # how many are still to come


class _Recent(Generic[T]):
    """What was last, by name; the oldest is forgotten first, when there are too many names, or too
    many sessions in them.
    """

    __slots__ = ("_seats", "kept")

    def __init__(self) -> None:
        self.kept: OrderedDict[str, tuple[T, int]] = (
            OrderedDict()
        )  # and how many sessions are in each
        self._seats = 0

    def get(self, name: str) -> T | None:
        kept = self.kept.get(name)
        return None if kept is None else kept[0]

    def keep(self, name: str, thing: T, seats: int) -> None:
        self.forget(name)
        self.kept[name] = thing, seats
        self._seats += seats
        while len(self.kept) > NAMES_KEPT or self._seats > SEATS_KEPT:
            self._seats -= self.kept.popitem(last=False)[1][1]

    def forget(self, name: str) -> None:
        kept = self.kept.pop(name, None)
        if kept is not None:
            self._seats -= kept[1]


class _Seats(Lines):
    """Who waits at each barrier. However a seat is left, its value counts no more
    (`Barriers.arrive` charges it); with the last one the generation is over."""

    __slots__ = ("_budget", "expecting", "generations")

    def __init__(self, barriers: Barriers, budget: Budget) -> None:
        super().__init__(barriers.timed_out)
        self._budget = budget
        self.generations: dict[str, _Generation] = {}
        self.expecting: dict[
            str, _Generation
        ] = {}  # of these, the ones that anybody's death may complete

    def leave(self, waiter: Waiter, name: str) -> None:
        super().leave(waiter, name)
        if waiter.request.value:
            self._budget.used -= len(waiter.request.value)
        if name not in self:
            self._empty(name)

    def dismiss(self, name: str) -> Line:
        line = super().dismiss(name)
        for waiter in line:
            if waiter.request.value:
                self._budget.used -= len(waiter.request.value)
        if line:
            self._empty(name)
        return line

    def _empty(self, name: str) -> None:
        """Nobody waits there any more."""
        del self.generations[name]
        self.expecting.pop(name, None)


class Barriers:
    """All barriers at which somebody waits, and what is remembered of those before."""

    def __init__(
        self, ledger: Ledger, sessions: dict[bytes, Session], roster: Roster | None = None
    ) -> None:
        """`sessions`: those that live. `roster`: what the launcher knows of the ranks, asked when
        somebody is missing.
        """
        self._ledger = ledger
        self._sessions = sessions
        self._roster = roster
        self._seats = _Seats(self, ledger.budget)
        self._generations = self._seats.generations
        self._former: _Recent[_Former] = _Recent()
        self._over: _Recent[_Over] = _Recent()
        self._ended: OrderedDict[int, Session] = OrderedDict()  # by rank

    def arrive(
        self, now: float, session: Session, request: Arrive, large: Large | None
    ) -> Answer | None:
        name, quorum = request.name, request.quorum
        if (
            self._over.kept
            and (over := self._over.get(name)) is not None
            and session not in over.seated
            and session.number <= over.opened
        ):
            return self._tell_late(now, session, request, over)
        generation = self._generations.get(name)
        if request.value or generation is None:
            refused = self._refused(request)
            if refused is not None:
                return refused, None
        if generation is None:
            generation = self._begun(name, request.size, quorum)
            arrived = 1
        elif request.size != generation.size or quorum != generation.quorum:
            return self._disagree(now, session, request, generation)
        else:
            arrived = len(self._seats[name]) + 1
            if generation.gone:
                _back(generation, session)
        if arrived == generation.size:
            return self._complete(now, name, generation, session, request)
        if quorum is not None:
            at_once = request.timeout is not None and not request.timeout > 0
            _here(generation, session)
            if arrived >= quorum and (at_once or _all_here(generation)):
                return self._complete(now, name, generation, session, request)
        if request.timeout is not None and not request.timeout > 0:
            return self._did_not_wait(now, name, generation, session, request)
        answer = self._ledger.wait(now, session, request, request.timeout, self._seats, (name,))
        if answer is None:
            if arrived == 1:
                self._generations[name] = generation
                if generation.expected is not None:
                    self._seats.expecting[name] = generation
            if request.value:
                self._ledger.budget.used += len(request.value)
        return answer

    def is_seat(self, waiter: Waiter) -> bool:
        """Whether this waiter waits at a barrier."""
        return waiter.lines is self._seats

    def give_up(self, now: float, waiter: Waiter) -> None:
        """The caller was interrupted: his seat is empty, and the others need not wait for him."""
        self._leave(
            now,
            [waiter],
            f"{waiter.session.identity} left after {now - waiter.since:.1f} s: an exception ended its call",
        )

    def end(self, now: float, session: Session, seats: list[Waiter]) -> None:
        """The session has ended; these are all its seats."""
        rank = session.identity.rank
        if rank is not None:
            self._ended.pop(rank, None)
            self._ended[rank] = session
            if len(self._ended) > RANKS_KEPT:
                self._ended.popitem(last=False)
        if seats:
            self._leave(
                now,
                seats,
                f"the session of {session.identity} ended while it waited: {session.because}",
            )
        for name, generation in list(
            self._seats.expecting.items()
        ):  # not of all: there may be a hundred thousand, and as many ends
            if generation.expected and generation.expected.pop(session, 0):
                self._perhaps_complete(now, name, generation)

    def timed_out(self, now: float, waiter: Waiter) -> None:
        """The time of somebody who waits is over."""
        request = waiter.request
        name = request.name
        generation = self._generations[name]
        if generation.quorum is not None and len(self._seats[name]) >= generation.quorum:
            self._complete(now, name, generation)
            return
        because = f"{waiter.session.identity} gave up after {now - waiter.since:.1f} s"
        self._break(now, name, generation, because, waiter)

    # --- complete ---

    def _begun(self, name: str, size: int, quorum: int | None) -> _Generation:
        """A new generation, at which nobody waits yet."""
        generation = _Generation(size, quorum)
        former = self._former.get(name) if quorum is not None else None
        if former is not None and former.size == size:
            generation.expected = {}
            for one in former.seated:
                if not one.ended:
                    generation.expected[one] = generation.expected.get(one, 0) + 1
        return generation

    def _perhaps_complete(self, now: float, name: str, generation: _Generation) -> None:
        """Somebody will not come: perhaps all others are there."""
        if (
            generation.quorum is not None
            and len(self._seats.get(name, ())) >= generation.quorum
            and _all_here(generation)
        ):
            self._complete(now, name, generation)

    def _complete(
        self,
        now: float,
        name: str,
        generation: _Generation,
        session: Session | None = None,
        request: Arrive | None = None,
    ) -> Answer | None:
        """Everybody is there, or as many as suffice; `session` and `request` are of the last to
        arrive, if that made it complete, who is answered by what is returned. The generation's
        number is the revision at which that was so: it grows, and needs no memory."""
        ledger = self._ledger
        waiters = self._seats.all(name)
        seated = [waiter.session for waiter in waiters]
        requests: list[Arrive] = [waiter.request for waiter in waiters]
        if session is not None and request is not None:
            seated.append(session)
            requests.append(request)
        number = ledger.changed()
        absent: tuple[Member, ...] = ()
        if len(seated) < generation.size:
            absent = self._missed(now, name, generation, number, seated)
        else:
            self._over.forget(name)
        self._former.keep(name, _Former(generation.size, seated), len(seated))
        answers: list[Integer | Met]
        if [one for one in requests if one.value]:
            answers = self._meeting(number, seated, requests, absent)
        else:
            answers = [Integer(one.seq, number, number) for one in requests]
        ledger.answer_all(self._seats, name, answers)
        return None if session is None else (answers[-1], None)

    def _meeting(
        self, number: int, seated: list[Session], requests: list[Arrive], absent: tuple[Member, ...]
    ) -> list[Integer | Met]:
        """Who brought something gets what all have brought; the values are one piece of memory,
        whoever holds the answers.
        """
        seats = tuple(
            Seat(session.identity, request.value)
            for session, request in zip(seated, requests, strict=True)
        )
        size = sum(len(seat.value) for seat in seats)
        answers: list[Integer | Met] = []
        for mine, (session, request) in enumerate(zip(seated, requests, strict=True)):
            if request.value:
                answers.append(Met(request.seq, number, number, mine, seats, absent))
                if size >= LEND_BYTES:
                    self._ledger.keep(session, request.seq, seats, size, stored=False, changed=True)
            else:
                answers.append(Integer(request.seq, number, number))
        return answers

    def _missed(
        self, now: float, name: str, generation: _Generation, number: int, seated: list[Session]
    ) -> tuple[Member, ...]:
        """It is complete without somebody: he will be told when he comes. Returns who that is."""
        size, arrived = generation.size, len(seated)
        present = [session.identity for session in seated]
        absent = self._absent(now, name, size, present)
        late = size - arrived - len(generation.gone)
        if late > 0:
            text = (
                f"round {number} of the barrier {quoted(name)} was complete with {arrived} of {size} "
                f"({who(present)}; the quorum is {generation.quorum})"
            )
            details = (("size", size), ("arrived", arrived), ("generation", number))
            everybody = {*seated, *generation.gone}
            over = _Over(
                now,
                self._ledger.opened,
                "barrier-missed",
                text,
                details,
                _shown(present),
                _shown(absent),
                everybody,
                late,
            )
            self._over.keep(name, over, len(everybody) + len(over.absent))
        else:
            self._over.forget(name)
        return _shown(absent)

    # --- broken ---

    def _leave(self, now: float, seats: list[Waiter], because: str) -> None:
        """These seats are given up. With a quorum the others go on, if that can still be had."""
        left: dict[str, _Generation] = {}
        for waiter in seats:
            name = waiter.request.name
            generation = left[name] = self._generations.get(name) or left[name]
            generation.gone.append(waiter.session)
            self._ledger.remove(waiter)
        for name, generation in left.items():
            quorum = generation.quorum
            if quorum is None:
                self._break(now, name, generation, because)
            elif (
                len(self._seats.get(name, ())) < quorum
                and generation.size - sum(one.ended for one in generation.gone) < quorum
            ):
                self._break(
                    now,
                    name,
                    generation,
                    f"{because}; the quorum of {quorum} cannot be had any more",
                )
            else:
                self._perhaps_complete(now, name, generation)

    def _did_not_wait(
        self, now: float, name: str, generation: _Generation, session: Session, request: Arrive
    ) -> Answer:
        generation.gone.append(session)
        here = [waiter.session.identity for waiter in self._seats.get(name, ())]
        present = [*here, session.identity]
        absent = self._absent(now, name, generation.size, present)
        self._break(now, name, generation, f"{session.identity} did not wait")
        return TimedOut(
            request.seq, self._ledger.revision, present=_shown(present), absent=_shown(absent), arrived=len(present)
        ), None  # fmt: skip

    def _break(
        self,
        now: float,
        name: str,
        generation: _Generation,
        because: str,
        late: Waiter | None = None,
    ) -> None:
        """Tell all who wait, and remember it for those who are still to come. `late`: whose time is
        over.
        """
        ledger, size = self._ledger, generation.size
        waiters = self._seats.all(name)
        came = [waiter.session for waiter in waiters] + generation.gone
        present = [session.identity for session in came]
        absent = self._absent(now, name, size, present)
        text = (
            f"the barrier {quoted(name)} of {_said(size, generation.quorum)} is broken: {because}; "
            f"{attendance(size, len(came), present, absent)}"
        )  # fmt: skip
        details = (("size", size), ("arrived", len(came)))
        self._end_with(
            now, name, "barrier-broken", text, details, present, absent, came, size - len(came)
        )
        shown, missing, revision = _shown(present), _shown(absent), ledger.revision
        for waiter in waiters:
            seq = waiter.request.seq
            if waiter is late:
                ledger.answer(
                    waiter,
                    TimedOut(seq, revision, present=shown, absent=missing, arrived=len(came)),
                )
            else:
                ledger.answer(
                    waiter,
                    Failed(seq, revision, "barrier-broken", text, details, shown, b"", missing),
                )

    def _disagree(
        self, now: float, session: Session, request: Arrive, generation: _Generation
    ) -> Answer:
        name, ledger = request.name, self._ledger
        waiters = self._seats.all(name)
        here = [waiter.session.identity for waiter in waiters]
        text = (
            f"the barrier {quoted(name)} has no one size: {who(here)} said {_said(generation.size, generation.quorum)}, "
            f"{session.identity} said {_said(request.size, request.quorum)}"
        )
        details = (("size", generation.size), ("asked", request.size))
        present = [*here, session.identity]
        came = [waiter.session for waiter in waiters] + [session] + generation.gone
        self._end_with(
            now,
            name,
            "barrier-size",
            text,
            details,
            present,
            (),
            came,
            max(generation.size, request.size) - len(came),
        )
        shown, revision = _shown(present), ledger.revision
        for waiter in waiters:
            ledger.answer(
                waiter, Failed(waiter.request.seq, revision, "barrier-size", text, details, shown)
            )
        return Failed(request.seq, revision, "barrier-size", text, details, shown), None

    def _end_with(
        self, now: float, name: str, code: str, text: str, details: tuple[tuple[str, int], ...], present: list[Identity],
        absent: tuple[Member, ...], came: list[Session], late: int,
    ) -> None:  # fmt: skip
        """Remember how it ended, for those who are still to come."""
        if late <= 0:
            self._over.forget(name)
            return
        over = _Over(
            now,
            self._ledger.opened,
            code,
            text,
            details,
            _shown(present),
            _shown(absent),
            set(came),
            late,
        )
        self._over.keep(name, over, len(over.seated) + len(over.absent))

    def _tell_late(self, now: float, session: Session, request: Arrive, over: _Over) -> Answer:
        """He comes to a round that is over. His next call is his next round: with a quorum, the
        others wait for him again.
        """
        name = request.name
        over.late -= 1
        over.seated.add(session)
        if over.late <= 0:
            self._over.forget(name)
        former = self._former.get(name)
        if over.code == "barrier-missed" and former is not None:
            former.seated.append(session)
            generation = self._generations.get(name)
            if generation is not None and generation.expected is not None:
                generation.expected[session] = generation.expected.get(session, 0) + 1
        text = f"{over.text}; that was {now - over.at:.1f} s before this caller came"
        return Failed(
            request.seq,
            self._ledger.revision,
            over.code,
            text,
            over.details,
            over.present,
            b"",
            over.absent,
        ), None

    # --- what is asked ---

    def _refused(self, request: Arrive) -> Failed | None:
        """The failure for what no barrier can be, or a value that cannot be passed on."""
        ledger, size, quorum = self._ledger, request.size, request.quorum
        if size < 1:
            return ledger.failed(
                request, "bad-request", f"a barrier of {size} has nobody to wait for", size=size
            )[0]
        if quorum is not None and not 1 <= quorum <= size:
            return ledger.failed(
                request,
                "bad-request",
                f"a quorum of {quorum} is none of {size}",
                size=size,
                quorum=quorum,
            )[0]
        length = len(request.value)
        if length > min(INLINE_BYTES, MET_BYTES // size):
            limit = min(INLINE_BYTES, MET_BYTES // size)
            text = f"the value has {length} bytes, and what {size} bring to a barrier may have {limit} each"
            return ledger.failed(request, "value-too-large", text, size=length, limit=limit)[0]
        return (
            ledger.budget.refuse_value(length, length, request.seq, ledger.revision)
            if length
            else None
        )

    def _absent(
        self, now: float, name: str, size: int, present: list[Identity]
    ) -> tuple[Member, ...]:
        if len(present) >= size:
            return ()
        former = self._former.get(name)
        seated = former.seated if former is not None and former.size == size else None
        try:
            roster = self._roster() if self._roster is not None else None
        except OSError:
            # the launcher cannot look at its ranks now; what the sessions tell is known all the
            # same
            roster = None
        return rollcall.absent(
            now, size, present, seated, self._sessions.values(), self._ended, roster
        )


def _back(generation: _Generation, session: Session) -> None:
    """Somebody comes: if he had given up before, or died and was started again as the same rank, he
    is no more one of those who left.
    """
    rank = session.identity.rank
    former = session if session in generation.gone else None
    if former is None and rank is not None:
        former = next(
            (one for one in generation.gone if one.ended and one.identity.rank == rank), None
        )
    if former is not None:
        generation.gone.remove(former)


def _here(generation: _Generation, session: Session) -> None:
    """He is not waited for any more."""
    expected = generation.expected
    if expected and session in expected:
        expected[session] -= 1
        if not expected[session]:
            del expected[session]


def _all_here(generation: _Generation) -> bool:
    """Whether all are here who were at the former generation and live."""
    return generation.expected is not None and not generation.expected


def _said(size: int, quorum: int | None) -> str:
    return f"{size}" if quorum is None else f"{size} with a quorum of {quorum}"


S = TypeVar("S")


def _shown(them: Collection[S]) -> tuple[S, ...]:
    listed = tuple(them)
    return listed if len(listed) <= PRESENT_WHOLE else listed[:PRESENT_SHOWN]
