"""One round of an average, from when its participants are known until the mean can be copied.

    offers met       the participants, and
     where their values are
    reduce           each rank adds up its part of all values of this host, over its own value
    [exchange]       several hosts: the first rank of each does all of that (`cross_host.py`)
    done             a barrier at which all say how it went
    copy             the parts of the others, out of their memory

Whoever gets the answer of the barrier sees what the others see, and decides the same. Where a rank
is lost, the others begin again without it, from their values, or all of them raise.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rallypoint.clock import Clock
from rallypoint.errors import (
    BarrierBroken,
    BarrierMismatch,
    BarrierTimeout,
    RallypointError,
    UsageError,
)
from rallypoint.host import memory
from rallypoint.primitives.average import cross_host, work_split
from rallypoint.primitives.average.cross_host import Exchange, HostSilent
from rallypoint.primitives.average.layout import Layout, MeanWriter, TypedRun, not_finite, typed
from rallypoint.primitives.average.participants import (
    Participant,
    RankReport,
    called,
    has_died,
    meeting,
    say_warning,
)
from rallypoint.primitives.average.segments import (
    OwnSegment,
    SegmentCache,
    has_given_up,
    has_left,
    head_of,
    mark_read,
)
from rallypoint.primitives.average.work_split import Split
from rallypoint.store.state.attendance import who
from rallypoint.wire.messages import Arrive, Met

if TYPE_CHECKING:
    from torch import Tensor

    from rallypoint.store.client.client import Client

LOOK = 1.0
"""Seconds that a barrier within a round waits before those at it look whether the others live."""

PAUSE = 0.5
"""Maximum seconds between two such looks."""

PATIENCE = 10.0
"""Minimum seconds for the others to finish their part once all have come: a machine may be busy."""

SLOWEST = 50e6
"""Bytes per second at which the slowest rank is expected to work, on a machine that swaps."""

NAMED = 20
"""Maximum leaves with a NaN that a rank names."""

QUIET = 5.0
"""Seconds before a line names the ranks that are waited for."""

_QUORUM = (("go on with those who are left", "store.average(name, value, size, quorum=...)"),)


class Missing(Exception):
    """Some will not come to a barrier any more. `late`: they live, but time is over."""

    def __init__(self, absent: Sequence[int], told: dict[int, RankReport], *, late: bool) -> None:
        super().__init__()
        self.absent = absent
        self.told = told  # by those who did come
        self.late = late


class RoundOutcome(NamedTuple):
    """Result of a round: the participants in the mean, and the leaves that were not finite."""

    living: tuple[int, ...]
    strange: dict[int, tuple[str, ...]]
    finite: bool


class AverageRound:
    """One caller's side of a round.

    `run` returns when the mean can be copied, `copy` copies it, and `end` gives the memory back.
    """

    def __init__(
        self,
        store: Client,
        name: str,
        layout: Layout,
        participants: Sequence[Participant],
        me: int,
        number: int,
        size: int,
        own: OwnSegment,
        cache: SegmentCache,
        *,
        quorum: int | None,
        timeout: float,
    ) -> None:
        self._store = store
        self._name = name
        self._layout = layout
        self._participants = participants
        self._me = me
        self._number = number
        self._head = head_of(size)
        self._own = own
        self._cache = cache
        self._quorum = quorum
        self._title = f"{called(name)}, round {number}"
        self._clock = Clock()
        self._patience = max(timeout, PATIENCE) + layout.size / SLOWEST
        self._turn = 0
        self._living = list(range(len(participants)))
        self._noticed = False  # a line has said who is waited for
        self._open: dict[int, memoryview] = {me: own.mapped.memory}
        self._exchanges: list[Exchange] = []
        self._called_off: set[str] = set()  # keys
        self._failed: Exception | None = None
        self._interrupted = True  # until the round has ended in order

    def run(self) -> RoundOutcome:
        """Do this rank's part, and wait for all others. Raises the exceptions of `average`."""
        try:
            while not self._done():
                self._turn += 1
                self._failed = None
            strange = {} if self._finite else self._ask_who_was_strange()
            self._interrupted = False
            if len(self._split.hosts) == 1 or self._split.leads:
                self._own.lend(self._number, [one for one in self._split.host if one != self._me])
            return RoundOutcome(tuple(self._living), strange, self._finite)
        except (BarrierBroken, BarrierTimeout, UsageError):  # all have come to the same end
            self._interrupted = False
            raise

    def copy(self, targets: dict[str, Tensor]) -> None:
        """Write the mean to these tensors, by path."""
        writer = MeanWriter(self._layout, targets)
        for index, (start, stop) in self._split.parts.items():
            writer.write(self._open[index], self._head, start, stop)
        writer.finish()
        for index in self._split.parts:
            if index != self._me:
                mark_read(self._open[index], self._me, self._number)

    def end(self) -> None:
        """Give the memory back, and delete what is left in the store."""
        if self._interrupted:  # the others may still read the segment: it is theirs
            self._own.give_up(self._number)
        else:
            self._own.leave(self._number)
            self._cache.give(self._own)
        self._cache.end_round()
        for exchange in self._exchanges:
            # Without the store, its keys go with the session.
            with contextlib.suppress(RallypointError):
                exchange.clean()
        for key in self._called_off:
            with contextlib.suppress(RallypointError):
                self._store.delete(key)

    # --- a turn ---

    def _done(self) -> bool:
        """Do one turn; tell whether it went well for all."""
        size, participants = self._layout.size, self._participants
        self._split = Split(size, participants, self._me, self._living)
        if not self._split.weights:
            text = "the weights of all who are left in it are 0, and there is no such mean"
            raise UsageError("usage", f"{self._title}: {text}")
        try:
            if self._turn:  # the reduction has overwritten a part of the value
                self._check(self._meet("ready", self._attempt(self._put)))
            told = self._meet("done", self._attempt(self._reduce))
            self._check(told)
        except Missing as missing:
            self._go_on_without(missing)
            return False
        self._finite = all(one.finite for one in told.values())
        return True

    def _attempt(self, part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Do a part of the work, and return what there is to tell of it.

        A failure is told to the others, so that nobody waits, and then raised.
        """
        try:
            return part()
        except HostSilent as error:
            return {"failed": error.headline, "silent": True}
        except (FileNotFoundError, ProcessLookupError, memory.Unfit) as error:
            return {"failed": f"the memory of another rank is gone ({error})", "silent": True}
        except (RallypointError, OSError, MemoryError, RuntimeError) as error:
            self._failed = error
            return {"failed": f"{type(error).__name__}: {error}"}

    def _put(self) -> dict[str, Any]:
        self._layout.put(self._own.mapped.memory, self._head)
        return {}

    def _reduce(self) -> dict[str, Any]:
        for index in self._split.host:
            if index not in self._open:
                self._open[index] = self._cache.open(self._participants[index].offer)
        if len(self._split.hosts) > 1:
            return {"finite": self._exchange()} if self._split.leads else {}
        finite = True
        for run in self._layout.runs_in(*self._split.parts[self._me]):
            into = typed(self._own.mapped.memory, run.dtype, self._head + run.start, run.length)
            finite = self._sum_of_host(run, into, self._split.total) and finite
        return {"finite": finite}

    def _sum_of_host(self, run: TypedRun, into: Tensor, divisor: float = 1.0) -> bool:
        weights = self._split.weights
        # This rank's own value comes first: the sum may be written over it.
        host = sorted(self._split.host, key=lambda index: index != self._me)
        counted = [index for index in host if index in weights]
        parts = [
            typed(self._open[index], run.dtype, self._head + run.start, run.length)
            for index in counted
        ]
        return work_split.combine(into, parts, [weights[index] for index in counted], divisor)

    def _exchange(self) -> bool:
        """Make the mean of all hosts; tell whether what this host completed of it is finite."""
        hosts, name = self._split.hosts, self._exchange_name
        me = hosts.index(self._split.host)
        exchange = Exchange(self._store, name, self._layout, me, len(hosts), self._left)
        self._exchanges.append(exchange)
        into = self._own.mapped.memory
        return exchange.run(self._sum_of_host, into, self._head, self._split.total)

    # --- how it went ---

    def _check(self, told: dict[int, RankReport], *, silent: bool = False) -> None:
        """Raise if a rank has failed. With `silent` it is known why a host was silent."""
        if self._failed is not None and self._me in told:
            self._interrupted = False  # the others know
            raise self._failed
        for index, one in sorted(told.items()):
            if one.failed and not (silent and one.silent):
                them = self._who([index])
                text = f"{self._title}, failed in {them}: {one.failed}"
                raise BarrierBroken("barrier-broken", text)

    def _go_on_without(self, missing: Missing) -> None:
        """Leave the missing ranks out of the next turn, if the quorum allows it."""
        self._check(missing.told, silent=True)
        them = self._who(missing.absent)
        left = [index for index in self._living if index not in missing.absent]
        why = "died or gave up before it was complete"
        if missing.late:
            why = f"did not finish within {self._clock.elapsed():.1f} s"
        if self._quorum is not None and len(left) >= self._quorum:
            say_warning(f"{self._title}, goes on without {them}, who {why}")
            self._living = left
            return
        quorum = f", and {len(left)} of the quorum of {self._quorum} are left"
        more = "" if self._quorum is None else quorum
        text = f"{self._title}, has no result: {them} {why}{more}"
        present = tuple(str(self._participants[index].identity) for index in left)
        absent = tuple(str(self._participants[index].identity) for index in missing.absent)
        if missing.late:
            raise BarrierTimeout("barrier-timeout", text, present=present, absent=absent)
        raise BarrierBroken("barrier-broken", text, present=present, absent=absent, help=_QUORUM)

    def _ask_who_was_strange(self) -> dict[int, tuple[str, ...]]:
        """Ask the others which leaves they brought that are not finite; wait for LOOK at most."""
        mine = [leaf.path for leaf in self._layout.leaves if not_finite(leaf.tensor)][:NAMED]
        got = self._heard(self._arrive("strange", self._told(leaves=tuple(mine))))
        counted = self._split.weights  # what has the weight 0 is in no sum
        return {at: one.leaves for at, one in sorted(got.items()) if one.leaves and at in counted}

    # --- barriers ---

    def _meet(self, stage: str, what: dict[str, Any]) -> dict[int, RankReport]:
        """Return the statements of all that are still in the round; `what`: this rank's.

        Raises Missing, for all at the barrier alike, and BarrierBroken (`barrier-missed`) when the
        others have gone on without this rank.
        """
        absent: list[int] = []
        pause = 0.005
        while True:
            gone = tuple(filter(self._is_gone, absent))
            met = self._arrive(stage, self._told(gone=gone, late=self._left < 0, **what))
            got = self._heard(met)
            absent = [index for index in self._living if index not in got]
            if not absent:
                return got
            left = [index for index in absent if self._has_left(index)]
            if left and all(index in left or self._is_gone(index) for index in absent):
                raise self._missed()
            given_up = {index for one in got.values() for index in one.gone}
            if got and (given_up | self._ended(met, absent)).issuperset(absent):
                raise Missing(absent, got, late=False)
            if any(one.late for one in got.values()):
                raise Missing(absent, got, late=True)
            if any(map(self._is_gone, absent)):
                self._call_off()
            if not self._noticed and self._clock.elapsed() > QUIET:
                self._noticed = True
                say_warning(f"{self._title}, waits for {self._who(absent)}")
            threading.Event().wait(pause)
            pause = min(PAUSE, pause * 2)

    def _told(self, **what: Any) -> RankReport:
        return RankReport(self._number, self._turn, self._me, **what)

    def _arrive(self, stage: str, mine: RankReport) -> Met | None:
        size = len(self._living)
        name = meeting(self._name, f"{stage}/{size}")
        value = msgspec.msgpack.encode(mine)
        wait = LOOK + self._store.timeout  # as long as a server may be slow to answer anything
        try:
            reply, _ = self._store.ask(Arrive, name, size, LOOK, value, 1, wait=wait)
        except (BarrierBroken, BarrierMismatch):
            return None  # told to whoever was late for another round; the next attempt is a new one
        return reply if isinstance(reply, Met) else None

    def _heard(self, met: Met | None) -> dict[int, RankReport]:
        """Return the statements about this turn of this round, if this rank's is among them."""
        told: dict[int, RankReport] = {}
        for seat in met.seats if met else ():
            one = _decode(seat.value)
            if one.round > self._number:
                raise self._missed()
            if (one.round, one.turn) == (self._number, self._turn) and one.me in self._living:
                told[one.me] = one
        return told if self._me in told else {}

    def _ended(self, met: Met | None, absent: Sequence[int]) -> set[int]:
        """Return the absent ranks with a session that is over according to the server."""
        members = met.absent if met else ()
        over = {member.identity for member in members if member.ended and member.identity}
        return {
            index
            for index in absent
            if self._participants[index].identity in over and not self._has_left(index)
        }

    def _has_left(self, index: int) -> bool:
        """Tell whether the rank's round is over."""
        return index in self._open and has_left(self._open[index], self._number)

    def _is_gone(self, index: int) -> bool:
        """Tell whether the rank is certainly dead, or has given up."""
        if index in self._open and has_given_up(self._open[index], self._number):
            return True
        if self._has_left(index):
            return False
        return has_died(self._participants[index].offer, is_mapped=index in self._open)

    def _call_off(self) -> None:
        """Tell ranks that wait for another host's sums that a rank is dead."""
        key = cross_host.called_off(self._exchange_name)
        if len(self._split.hosts) > 1 and key not in self._called_off:
            self._called_off.add(key)
            self._store.set(key, True, ephemeral=True)

    def _missed(self) -> BarrierBroken:
        silent = f"who was silent for {self._clock.elapsed():.1f} s"
        text = f"{self._title}, was completed without this caller, {silent}"
        return BarrierBroken("barrier-missed", text)

    @property
    def _left(self) -> float:
        """Seconds for which the others are still waited for."""
        return self._patience - self._clock.elapsed()

    @property
    def _exchange_name(self) -> str:
        return f"{self._name}/{self._number}.{self._turn}"

    def _who(self, indices: Iterable[int]) -> str:
        return who(self._participants[index].identity for index in indices)


_decode = msgspec.msgpack.Decoder(RankReport).decode
