"""The meetings within a round of an average, and what is known of those who do not come.

Each is a barrier of the store at which all say how it went; whoever gets its answer sees what the others see, and decides the same. Who
is missing there is waited for, unless he is known to be dead.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rallypoint.clock import Clock
from rallypoint.errors import BarrierBroken, BarrierMismatch
from rallypoint.host import memory, processes
from rallypoint.primitives.offers import Participant, Place, called, meeting, scope
from rallypoint.primitives.progress import Progress
from rallypoint.primitives.segments import Segments
from rallypoint.store.rollcall import who
from rallypoint.wire.messages import Arrive, Met

if TYPE_CHECKING:
    from rallypoint.store.client import Client

LOOK = 1.0
"""Seconds that a meeting within a round waits before those who are there look whether the others live. What the work takes for 1 GB."""

PAUSE = 0.5
"""Seconds between two such looks at most."""

DOUBLINGS = 16
"""Of the pause, which begins with 5 ms: more than it takes to reach PAUSE. Without an end, after a thousand, no float could hold it."""

PATIENCE = 10.0
"""Seconds, at least, for the others to finish their part once all have come: `timeout` may be short because everybody is known to come
at once, and a busy machine is slow."""

SLOWEST = 50e6
"""Bytes per second at which the slowest rank is expected to work, on a machine that swaps."""


class Told(msgspec.Struct, frozen=True, array_like=True):
    """What each says at a meeting within a round. Numbers are places in the list of those who take part."""

    round: int
    turn: int  # counts how often the round was begun again
    me: int
    result: Place | None = None
    final: Place | None = None
    gone: tuple[int, ...] = ()  # who is dead, as far as I can see
    late: bool = False  # I have waited long enough
    unreadable: tuple[int, ...] = ()  # whose memory I cannot open
    again: bool = False  # I could not do my part, and can now
    failed: str = ""  # I cannot do my part
    silent: bool = False  # ... because of somebody who sent nothing
    finite: bool = True  # of my part
    leaves: tuple[str, ...] = ()  # in which I brought a NaN or an infinity


class Missing(Exception):
    """Some will not come to a meeting any more. `late`: they live, but time is over."""

    def __init__(self, absent: Sequence[int], told: dict[int, Told], *, late: bool) -> None:
        super().__init__()
        self.absent = absent
        self.told = told  # by those who did come
        self.late = late


class Meetings:
    """Those of one caller in one round of the average `name`. `timeout`: seconds that he gave; `size`: bytes of the value."""

    def __init__(
        self, store: Client, name: str, number: int, participants: Sequence[Participant], me: int, segments: Segments, progress: Progress,
        *, timeout: float, size: int,
    ) -> None:  # fmt: skip
        self.turn = 0
        self.living = list(range(len(participants)))
        self._store = store
        self._name = name
        self._number = number
        self._participants = participants
        self._me = me
        self._segments = segments
        self._progress = progress
        self._clock = Clock()
        self._patience = max(timeout, PATIENCE) + size / SLOWEST

    @property
    def elapsed(self) -> float:
        """Seconds since all had come."""
        return self._clock.elapsed()

    @property
    def left(self) -> float:
        """Seconds for which the others are waited for."""
        return self._patience - self._clock.elapsed()

    def who(self, indices: Iterable[int]) -> str:
        """Participants in a text."""
        return who(self._participants[index].identity for index in indices)

    def hold(self, stage: str, told: dict[str, Any], on_death: Callable[[], None]) -> dict[int, Told]:
        """What everybody says who is still in it; `told`: what we say. Raises Missing, for all who are there alike, and BarrierBroken
        (`barrier-missed`) when the others have gone on without us. `on_death()`: somebody who is waited for is known to be dead."""
        absent: list[int] = []
        attempts = 0
        while True:
            gone = tuple(filter(self._is_gone, absent))
            met = self._arrive(stage, Told(self._number, self.turn, self._me, gone=gone, late=self.left < 0, **told))
            got = self._heard(met)
            absent = [index for index in self.living if index not in got]
            if not absent:
                return got
            left = list(map(self._segments.has_left, absent))
            if any(left) and all(left[at] or self._is_gone(index) for at, index in enumerate(absent)):
                raise self._missed()
            given_up = {index for one in got.values() for index in one.gone} | self._ended(met, absent)
            if got and given_up.issuperset(absent):
                raise Missing(absent, got, late=False)
            if any(one.late for one in got.values()):
                raise Missing(absent, got, late=True)
            if any(map(self._is_gone, absent)):
                on_death()
            self._progress.waiting(stage, functools.partial(self.who, absent))
            attempts += 1
            threading.Event().wait(min(PAUSE, 0.005 * 2 ** min(attempts, DOUBLINGS)))

    def ask(self, stage: str, told: dict[str, Any]) -> dict[int, Told]:
        """What those say who come at once. Nobody is waited for longer than LOOK."""
        met = self._arrive(stage, Told(self._number, self.turn, self._me, **told))
        return self._heard(met) if met is not None else {}

    def _arrive(self, stage: str, mine: Told) -> Met | None:
        size = len(self.living)
        name = meeting(self._name, f"{stage}/{size}")
        try:
            # A server that is slow to answer is no reason to give the seat up: as for what waits for nobody, it has the store's timeout.
            reply, _ = self._store.ask(Arrive, name, size, LOOK, _encode(mine), 1, wait=LOOK + self._store.timeout)
        except (BarrierBroken, BarrierMismatch):  # who was late for another round was told so; the next attempt is a new meeting
            return None
        return reply if isinstance(reply, Met) else None

    def _heard(self, met: Met | None) -> dict[int, Told]:
        """What was said at the meeting, about this turn of this round."""
        told: dict[int, Told] = {}
        for seat in met.seats if met is not None else ():
            one = _told(seat.value)
            if one.round > self._number:
                raise self._missed()
            if one.round == self._number and one.turn == self.turn and one.me in self.living:
                told[one.me] = one
        return told if self._me in told else {}

    def _ended(self, met: Met | None, absent: Sequence[int]) -> set[int]:
        """Of these, whose session is over according to the server."""
        over = {member.identity for member in (met.absent if met is not None else ()) if member.ended and member.identity is not None}
        return {index for index in absent if self._participants[index].identity in over and not self._segments.has_left(index)}

    def _is_gone(self, index: int) -> bool:
        """Whether he is certainly dead, or has given up."""
        offer = self._participants[index].offer
        if self._segments.has_given_up(index):
            return True
        if offer.scope != scope() or self._segments.has_left(index):
            return False
        assert offer.place is not None
        if not self._segments.has_opened(index) and not memory.published(offer.pid, offer.place.fd, offer.place.inode):
            return True  # before I had opened it
        found = processes.status(offer.pid)
        return found is None or found.started != offer.started or found.state in "ZX"

    def _missed(self) -> BarrierBroken:
        title = f"{called(self._name)}, round {self._number},"
        return BarrierBroken("barrier-missed", f"{title} was completed without this caller, who was silent for {self.elapsed:.1f} s")


_encode = msgspec.msgpack.Encoder().encode
_told = msgspec.msgpack.Decoder(Told).decode
