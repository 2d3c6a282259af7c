"""Barriers: all arrive, or all that wait learn at once that it will not be, and who was there. Pure.

A barrier's generation exists from its first arrival until all `size` are there, or it breaks: a
timeout passed, a caller gave up or its session ended, or two disagree about the size. One request
is one seat: the threads of one session may each take one.

With a quorum, a seat that is lost is merely empty. The generation is complete when everybody is
there that was at the former one and still lives, or when the first timeout of the waiters is over;
it breaks when the quorum is not there by then, or cannot be any more.

The next arrival under the name begins the next generation, with one exception: a session that did
not come to a generation that broke, or was complete without it, is told so when it does come, once,
and takes no seat among those that are a round ahead. That is forgotten when all were told, or when
a generation of the name is complete with everybody.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import TypeVar

from msgspec.structs import replace

from rallypoint.store.state.attendance import Roster, absent_members, attendance, who
from rallypoint.store.state.quotas import Refused, quoted
from rallypoint.store.state.replies import Kind, Ledger, Session
from rallypoint.store.state.waiters import Waiter
from rallypoint.wire.messages import (
    INLINE_BYTES,
    Arrive,
    Failed,
    Identity,
    Integer,
    Member,
    Met,
    Reply,
    Seat,
    TimedOut,
)

PRESENT_WHOLE = 1024
"""Seats up to which a failure names everybody who was there, and everybody who was not."""

PRESENT_SHOWN = 100
"""Seats that it names of more than that: each of 10,000 getting 10,000 names would be gigabytes."""

MET_BYTES = 16 * 1024 * 1024
"""Bytes of the values of one generation: everybody gets all of them in one message, a quarter of
what a message may have. They are not charged once the generation is complete."""

NAMES_KEPT = 4096
"""Names of which the last generation is remembered. A program that gives each round a name of its
own must not fill the server."""

SEATS_KEPT = 65_536
"""Sessions, and ranks that did not come, in all that these remember: 50 MB at most."""

RANKS_KEPT = 65_536
"""Ranks of which the last session that ended is remembered."""

T = TypeVar("T")


class _Generation:
    """A barrier at which a request waits."""

    __slots__ = ("expected", "gone", "name", "quorum", "size")

    def __init__(self, request: Arrive) -> None:
        self.name = request.name
        self.size = request.size
        self.quorum = request.quorum
        # With a quorum: the living sessions of the former generation that are not here yet, with
        # their seats; None: there was no former one.
        self.expected: Counter[Session] | None = None
        self.gone: list[Session] = []  # had arrived, and died or gave up: once for each seat

    def __str__(self) -> str:
        return _wanted(self.size, self.quorum)

    def came(self, session: Session) -> None:
        """Note that a session takes a seat: it is not expected, nor gone, any more."""
        if self.expected and session in self.expected:
            self.expected[session] -= 1
            if not self.expected[session]:
                del self.expected[session]
        rank = session.identity.rank
        for one in self.gone:
            # The same session, or the same rank started again after its death.
            if one is session or (rank is not None and one.ended and one.identity.rank == rank):
                self.gone.remove(one)
                return

    def is_enough(self, arrived: int, at_once: bool) -> bool:
        """Tell whether the quorum is there and nobody else is waited for."""
        if self.quorum is None or arrived < self.quorum:
            return arrived == self.size
        return at_once or arrived == self.size or self.expected == {}


class _LastRound:
    """The last complete generation of a name, and the last one to which not everybody came."""

    __slots__ = ("at", "failure", "late", "opened", "seated", "size", "told", "weight")

    def __init__(self) -> None:
        self.size = 0
        self.seated: list[Session] = []
        self.failure: Failed | None = None  # late sessions are told this
        self.at = 0.0
        self.opened = 0  # sessions that there had been by then: later ones were not expected
        self.told: set[Session] = set()  # was there, or has been told
        self.late = 0  # number of seats that are still to be told
        self.weight = 0  # sessions and members in it


class Barriers(Kind):
    """All barriers at which a request waits, and the last rounds of those before."""

    def __init__(
        self, ledger: Ledger, sessions: dict[bytes, Session], roster: Roster | None = None
    ) -> None:
        """`sessions`: those that live. `roster`: the launcher's knowledge of the ranks, asked for
        when somebody is missing."""
        super().__init__(ledger)
        self._sessions = sessions
        self._roster = roster
        self._generations: dict[str, _Generation] = {}
        # The generations that the end of any session may complete: few, while there may be a
        # hundred thousand generations, and as many ends.
        self._expecting: dict[str, _Generation] = {}
        self._last: OrderedDict[str, _LastRound] = OrderedDict()
        self._weight = 0  # of all in `_last`
        self._ended: OrderedDict[int, Session] = OrderedDict()  # by rank

    def arrive(self, session: Session, request: Arrive) -> Reply | None:
        name = request.name
        last = self._last.get(name)
        if last and last.late > 0 and session not in last.told and session.number <= last.opened:
            return self._tell_late(session, request, last)
        self._check(request)
        generation = self._generations.get(name) or self._begun(request)
        if (request.size, request.quorum) != (generation.size, generation.quorum):
            return self._disagree(session, request, generation)
        arrived = len(self._lines.get(name, ())) + 1
        at_once = request.timeout is not None and not request.timeout > 0
        generation.came(session)
        if generation.is_enough(arrived, at_once):
            return self._complete(generation, session, request)
        if at_once:
            generation.gone.append(session)
            timed_out, _ = self._break(generation, f"{session.identity} did not wait")
            return replace(timed_out, seq=request.seq)
        self._ledger.wait(session, request, self._lines, name)
        self._budget.used += len(request.value)
        self._generations[name] = generation
        if generation.expected is not None:
            self._expecting[name] = generation
        return None

    def give_up(self, waiter: Waiter) -> None:
        """Leave a seat empty whose caller was interrupted: the others need not wait for it."""
        waited = self._ledger.now - waiter.since
        because = f"left after {waited:.1f} s: an exception ended its call"
        self._leave([waiter], f"{waiter.session.identity} {because}")

    def end(self, session: Session) -> None:
        rank = session.identity.rank
        if rank is not None:
            self._ended.pop(rank, None)
            self._ended[rank] = session
            if len(self._ended) > RANKS_KEPT:
                self._ended.popitem(last=False)
        because = f"the session of {session.identity} ended while it waited: {session.because}"
        self._leave(self._waiters(session), because)
        for generation in list(self._expecting.values()):
            if generation.expected and generation.expected.pop(session, 0):
                self._perhaps_complete(generation)

    def timed_out(self, waiter: Waiter) -> None:
        generation = self._generations[waiter.request.name]
        if generation.quorum is not None and len(self._lines[generation.name]) >= generation.quorum:
            self._complete(generation)
        else:
            waited = self._ledger.now - waiter.since
            self._break(
                generation, f"{waiter.session.identity} gave up after {waited:.1f} s", waiter
            )

    # --- complete ---

    def _begun(self, request: Arrive) -> _Generation:
        generation = _Generation(request)
        last = self._last.get(request.name)
        if request.quorum is not None and last is not None and last.size == request.size:
            generation.expected = Counter(one for one in last.seated if not one.ended)
        return generation

    def _perhaps_complete(self, generation: _Generation) -> None:
        """Complete it if the others were waiting only for a seat that stays empty."""
        if generation.is_enough(len(self._lines.get(generation.name, ())), at_once=False):
            self._complete(generation)

    def _complete(
        self,
        generation: _Generation,
        session: Session | None = None,
        request: Arrive | None = None,
    ) -> Reply | None:
        """Answer all seats, and return the reply to `request`, if its arrival made it complete.

        The generation's number is the revision at which it was complete: it grows, and needs no
        memory.
        """
        name, ledger = generation.name, self._ledger
        seated = [(waiter.session, waiter.request) for waiter in self._lines.get(name, ())]
        if session is not None and request is not None:
            seated.append((session, request))
        number, came = ledger.changed(), [one for one, _ in seated]
        last = _LastRound()
        last.size, last.seated = generation.size, came
        absent = self._absent(generation, came)
        if len(came) < generation.size:
            text = (
                f"round {number} of the barrier {quoted(name)} was complete with {len(came)} of {generation.size} "
                f"({who(_identities(came))}; the quorum is {generation.quorum})"
            )
            details = (("size", generation.size), ("arrived", len(came)), ("generation", number))
            present = _shown(_identities(came))
            failure = Failed(0, 0, "barrier-missed", text, details, present, b"", _shown(absent))
            self._fail(last, failure, came + generation.gone, generation.size)
        self._keep(name, last)
        seats: tuple[Seat, ...] = ()
        if any(one.value for _, one in seated):
            seats = tuple(Seat(one.identity, arrival.value) for one, arrival in seated)
        replies = [
            Met(one.seq, number, number, mine, seats, _shown(absent))
            if one.value
            else Integer(one.seq, number, number)
            for mine, (_, one) in enumerate(seated)
        ]
        self._answer(generation, replies)
        return None if request is None else replies[-1]

    def _answer(self, generation: _Generation, replies: Sequence[Reply]) -> None:
        """End the generation with a reply for each waiter."""
        waiters = self._lines.all(generation.name)
        self._generations.pop(generation.name, None)
        self._expecting.pop(generation.name, None)
        for waiter, reply in zip(waiters, replies, strict=False):
            self._budget.used -= len(waiter.request.value)
            self._ledger.answer(waiter, reply)

    # --- broken ---

    def _leave(self, seats: list[Waiter], because: str) -> None:
        """Give up these seats. With a quorum the others go on, if that can still be had."""
        left: dict[str, _Generation] = {}
        for waiter in seats:
            name = waiter.request.name
            left[name] = self._generations[name]
            left[name].gone.append(waiter.session)
            self._budget.used -= len(waiter.request.value)
            self._ledger.remove(waiter)
        for name, generation in left.items():
            here, quorum = len(self._lines.get(name, ())), generation.quorum
            possible = generation.size - sum(one.ended for one in generation.gone)
            if quorum is None:
                self._break(generation, because)
            elif max(here, possible) < quorum:
                self._break(generation, f"{because}; the quorum of {quorum} cannot be had any more")
            else:
                self._perhaps_complete(generation)
            if name not in self._lines:
                self._answer(generation, ())

    def _break(
        self, generation: _Generation, because: str, late: Waiter | None = None
    ) -> tuple[TimedOut, Failed]:
        """Tell all waiters; `late` is the one whose time is over."""
        size = generation.size
        came = self._came(generation)
        present, absent = _identities(came), self._absent(generation, came)
        text = (
            f"the barrier {quoted(generation.name)} of {generation} is broken: {because}; "
            f"{attendance(size, len(came), present, absent)}"
        )
        details = (("size", size), ("arrived", len(came)))
        return self._broken(generation, "barrier-broken", text, details, came, absent, size, late)

    def _disagree(self, session: Session, request: Arrive, generation: _Generation) -> Reply:
        here = [waiter.session.identity for waiter in self._lines.all(generation.name)]
        text = (
            f"the barrier {quoted(generation.name)} has no one size: {who(here)} said {generation}, "
            f"{session.identity} said {_wanted(request.size, request.quorum)}"
        )
        details = (("size", generation.size), ("asked", request.size))
        came, size = [*self._came(generation), session], max(generation.size, request.size)
        _, failure = self._broken(generation, "barrier-size", text, details, came, (), size)
        return replace(failure, seq=request.seq)

    def _came(self, generation: _Generation) -> list[Session]:
        """Return the sessions that have arrived, those that left again at the end."""
        here = [waiter.session for waiter in self._lines.all(generation.name)]
        return here + generation.gone

    def _broken(
        self, generation: _Generation, code: str, text: str, details: tuple[tuple[str, int], ...], came: list[Session],
        absent: tuple[Member, ...], size: int, late: Waiter | None = None,
    ) -> tuple[TimedOut, Failed]:  # fmt: skip
        """Tell all waiters, and remember it for the sessions that are still to come."""
        present, missing = _shown(_identities(came)), _shown(absent)
        revision = self._ledger.revision
        timed_out = TimedOut(0, revision, present=present, absent=missing, arrived=len(came))
        failure = Failed(0, revision, code, text, details, present, b"", missing)
        last = self._last.get(generation.name) or _LastRound()
        self._fail(last, failure, came, size)
        self._keep(generation.name, last)
        replies = [
            replace(timed_out if one is late else failure, seq=one.request.seq)
            for one in self._lines.get(generation.name, ())
        ]
        self._answer(generation, replies)
        return timed_out, failure

    def _fail(self, last: _LastRound, failure: Failed, came: list[Session], size: int) -> None:
        last.failure, last.at, last.opened = failure, self._ledger.now, self._ledger.opened
        last.told, last.late = set(came), size - len(came)

    def _keep(self, name: str, last: _LastRound) -> None:
        """Remember it; the oldest are forgotten when there are too many."""
        former = self._last.pop(name, None)
        self._weight -= former.weight if former is not None else 0
        absent = last.failure.absent if last.failure is not None else ()
        last.weight = len(last.seated) + len(last.told) + len(absent)
        self._last[name] = last
        self._weight += last.weight
        while len(self._last) > NAMES_KEPT or self._weight > SEATS_KEPT:
            self._weight -= self._last.popitem(last=False)[1].weight

    def _tell_late(self, session: Session, request: Arrive, last: _LastRound) -> Reply:
        """Answer a session that comes to a round that is over. Its next call is its next round:
        with a quorum, the others wait for it again."""
        failure = last.failure
        assert failure is not None
        last.late -= 1
        last.told.add(session)
        if failure.code == "barrier-missed":
            last.seated.append(session)
            generation = self._generations.get(request.name)
            if generation is not None and generation.expected is not None:
                generation.expected[session] += 1
        text = (
            f"{failure.text}; that was {self._ledger.now - last.at:.1f} s before this caller came"
        )
        return replace(failure, seq=request.seq, revision=self._ledger.revision, text=text)

    # --- questions ---

    def _check(self, request: Arrive) -> None:
        """Refuse sizes that no barrier can have, and what is too long to be kept or passed on."""
        self._budget.check_name(request.name)  # its last round is remembered by it
        size, quorum, length = request.size, request.quorum, len(request.value)
        if size < 1:
            raise Refused("bad-request", f"a barrier of {size} has nobody to wait for", size=size)
        if quorum is not None and not 1 <= quorum <= size:
            text = f"a quorum of {quorum} is none of {size}"
            raise Refused("bad-request", text, size=size, quorum=quorum)
        limit = min(INLINE_BYTES, MET_BYTES // size)
        if length > limit:
            text = f"the value has {length} bytes, and what {size} bring to a barrier may have {limit} each"
            raise Refused("value-too-large", text, size=length, limit=limit)
        self._budget.check_value(length, length)

    def _absent(self, generation: _Generation, came: list[Session]) -> tuple[Member, ...]:
        if len(came) >= generation.size:
            return ()
        last = self._last.get(generation.name)
        seated = last.seated if last is not None and last.size == generation.size else None
        try:
            roster = self._roster() if self._roster is not None else None
        except OSError:
            # The launcher cannot look at its ranks now; the sessions are known all the same.
            roster = None
        present, living = _identities(came), self._sessions.values()
        now, size = self._ledger.now, generation.size
        return absent_members(now, size, present, seated, living, self._ended, roster)


def _identities(sessions: list[Session]) -> list[Identity]:
    return [session.identity for session in sessions]


def _wanted(size: int, quorum: int | None) -> str:
    return f"{size}" if quorum is None else f"{size} with a quorum of {quorum}"


def _shown(members: Sequence[T]) -> tuple[T, ...]:
    return tuple(members if len(members) <= PRESENT_WHOLE else members[:PRESENT_SHOWN])
