"""One round of an average, from when it is known who takes part until each has the mean.

Each rank computes one part of it for all. Ranks of one host read each other's contributions in shared memory:

    offers met       who takes part, and where their contributions are
    [ready]          somebody had to bring more than was foreseen: all have it now
    add up my part   of all contributions of this host, into my result
    [across]         several hosts: `primitives/hosts.py`
    done             everybody has; the contributions may be written to again
    copy             the parts of the others, out of their results

Where somebody is lost on the way, the others begin again without him, or all of them raise (`primitives/meetings.py`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rallypoint.errors import BarrierBroken, BarrierTimeout, RallypointError, UsageError
from rallypoint.primitives import hosts, mean
from rallypoint.primitives.division import Division
from rallypoint.primitives.flat import Layout
from rallypoint.primitives.hosts import Silent
from rallypoint.primitives.meetings import Meetings, Missing, Told
from rallypoint.primitives.offers import Participant, called
from rallypoint.primitives.pages import Foreseen
from rallypoint.primitives.progress import Progress
from rallypoint.primitives.reduction import Reduction
from rallypoint.primitives.segments import Ours, Segments

if TYPE_CHECKING:
    from torch import Tensor

    from rallypoint.store.client import Client

NAMED = 20
"""Leaves with a NaN that a rank names."""

_QUORUM = (("go on with those who are left", "store.average(name, value, size, quorum=...)"),)


class Settled(NamedTuple):
    """How a round ended: who of the participants is in the mean, and what was not finite, by participant."""

    living: tuple[int, ...]
    strange: dict[int, tuple[str, ...]]
    finite: bool


class Round:
    """See the module. `run` returns when the mean can be read, `copy` reads it."""

    def __init__(
        self, store: Client, name: str, layout: Layout, participants: Sequence[Participant], me: int, number: int, ours: Ours,
        *, quorum: int | None, timeout: float, say: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self._store = store
        self._name = name
        self._layout = layout
        self._participants = participants
        self._me = me
        self._number = number
        self._quorum = quorum
        self._say = say
        self._title = f"{called(name)}, round {number}"
        self._progress = Progress(self._title, say)
        self._segments = Segments(ours, layout, participants, me, number)
        self._meetings = Meetings(
            store, name, number, participants, me, self._segments, self._progress, timeout=timeout, size=layout.size
        )  # fmt: skip
        self._alone: set[int] = set()  # whose memory others cannot open: each a host of his own
        self._interrupted = True  # until it has ended in order
        self._failed: Exception | None = None
        self._exchanges: list[hosts.Exchange] = []
        self._called_off: list[str] = []  # the keys that say so, one for each turn's exchange
        self._finite = True

    def run(self) -> Settled:
        """Until everybody has done his part. Raises what `average` does."""
        try:
            while not self._done():
                self._meetings.turn += 1
            strange = {} if self._finite else self._ask_who_was_strange()
            self._interrupted = False
            return Settled(tuple(self._meetings.living), strange, self._finite)
        except (BarrierBroken, BarrierTimeout, UsageError):  # all who are in it have come to the same end
            self._interrupted = False
            raise

    def copy(self, targets: dict[str, Tensor]) -> None:
        """Write the mean to these tensors, by path."""
        self._work.copy(targets)

    def foreseen(self) -> Foreseen:
        """What the next round will be like, if it is like this one."""
        host = self._division.host
        return Foreseen(host.index(self._me), len(host), self._division.room(self._me))

    def end(self) -> None:
        """Give the memory back, and remove what is left in the store."""
        self._segments.leave(interrupted=self._interrupted)
        for exchange in self._exchanges:
            with contextlib.suppress(RallypointError):  # without the store, its keys go with the session
                exchange.clean()
        for key in self._called_off:
            with contextlib.suppress(RallypointError):
                self._store.delete(key)

    # --- a turn ---

    def _done(self) -> bool:
        """One turn: whether it went well for all."""
        self._divide()
        try:
            if self._meetings.turn or not self._division.is_as_foreseen(self._participants):
                ready = self._do(self._make_ready)
                told = self._meet("ready", ready)
                self._check(told)
                self._segments.places = {index: one.result for index, one in told.items()}
            done = self._do(self._add_up)
            if self._division.several_hosts:
                told = self._meet("sums", done)
                if not any(one.unreadable or one.again or one.failed for one in told.values()):
                    done = self._do(functools.partial(self._across, told))
            return self._agreed(self._meet("done", done))
        except Missing as missing:
            self._go_on_without(missing)
            return False

    def _divide(self) -> None:
        self._division = Division(self._layout, self._participants, self._me, self._meetings.living, self._alone)
        if not self._division.weights.counted:
            raise UsageError("usage", f"{self._title}: the weights of all who are left in it are 0, and there is no such mean")
        self._work = Reduction(self._layout, self._number, self._division, self._segments, self._progress)
        self._finite = True

    def _do(self, part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Do my part of something, and return what there is to tell of it. What fails is told, so that nobody waits, and then raised."""
        try:
            return part()
        except Silent as error:
            return {"failed": error.headline, "silent": True}
        except (RallypointError, OSError, MemoryError, RuntimeError) as error:
            self._failed = error
            return {"failed": f"{type(error).__name__}: {error}"}

    def _make_ready(self) -> dict[str, Any]:
        self._segments.complete(self._division, all_of_it=self._meetings.turn > 0)
        return {}

    def _add_up(self) -> dict[str, Any]:
        unreadable = self._segments.open(self._division)
        if unreadable:
            return {"unreadable": unreadable}
        if not self._segments.result.unread():  # by somebody who was stopped in the middle of a former round
            return {"again": True}
        self._finite = self._work.add_up()
        return {"finite": self._finite}

    def _across(self, told: dict[int, Told]) -> dict[str, Any]:
        """Other hosts have sums, too."""
        division, final = self._division, self._segments.final
        if not division.leads:
            if not self._segments.open_final(division.first, told[division.first].final):
                return {"unreadable": (division.first,)}
            return {"finite": self._finite}
        assert final is not None
        final.lend(self._number, division.others)
        exchange = hosts.Exchange(
            self._store, self._exchange_name, self._layout, division.hosts.index(division.host), len(division.hosts),
            deadline=self._meetings.left, progress=self._progress,
        )  # fmt: skip
        self._exchanges.append(exchange)
        finite = exchange.run(self._work.sum_of_my_host, final.mapped.memory, division.head, division.weights.total)
        return {"finite": self._finite and finite}

    # --- how it went ---

    def _agreed(self, told: dict[int, Told]) -> bool:
        """Everybody is there: was everybody able to do his part?"""
        self._check(told)
        unreadable = {index for one in told.values() for index in one.unreadable}
        self._alone |= unreadable
        if self._me in unreadable:
            self._segments.keep_private()
        self._finite = all(one.finite for one in told.values())
        if not unreadable and not any(one.again for one in told.values()):
            return True
        self._segments.take_back()
        return False

    def _check(self, told: dict[int, Told], *, silent: bool = False) -> None:
        """Somebody was not able to: there is no result. With `silent` it is known why nothing was heard of another host."""
        if self._failed is not None and self._me in told:
            self._interrupted = False  # the others know
            raise self._failed
        for index, one in sorted(told.items()):
            if one.failed and not (silent and one.silent):
                raise BarrierBroken("barrier-broken", f"{self._title}, failed in {self._meetings.who([index])}: {one.failed}")

    def _go_on_without(self, missing: Missing) -> None:
        """Some are lost: begin again without them, if the quorum allows it."""
        self._check(missing.told, silent=True)
        them = self._meetings.who(missing.absent)
        left = [index for index in self._meetings.living if index not in missing.absent]
        why = f"did not finish within {self._meetings.elapsed:.1f} s" if missing.late else "died or gave up before it was complete"
        present = tuple(str(self._participants[index].identity) for index in left)
        absent = tuple(str(self._participants[index].identity) for index in missing.absent)
        if self._quorum is None or len(left) < self._quorum:
            more = f", and {len(left)} of the quorum of {self._quorum} are left" if self._quorum is not None else ""
            text = f"{self._title}, has no result: {them} {why}{more}"
            if missing.late:
                raise BarrierTimeout("barrier-timeout", text, present=present, absent=absent)
            raise BarrierBroken("barrier-broken", text, present=present, absent=absent, help=_QUORUM)
        self._say("warning", f"{self._title}, goes on without {them}, who {why}")
        self._meetings.living = left
        self._segments.take_back()

    def _ask_who_was_strange(self) -> dict[int, tuple[str, ...]]:
        """Something is not finite: which ranks have brought that, and in which leaves. Nobody is waited for longer than usual."""
        mine = tuple(leaf.path for leaf in self._layout.leaves if mean.not_finite(leaf.tensor))[:NAMED]
        got = self._meetings.ask("strange", {"leaves": mine})
        return {index: got[index].leaves for index in sorted(got) if got[index].leaves}

    def _meet(self, stage: str, told: dict[str, Any]) -> dict[int, Told]:
        return self._meetings.hold(stage, self._segments.told() | told, self._call_off)

    def _call_off(self) -> None:
        """Somebody is dead: who waits for another host's sums need not wait until time is over."""
        key = hosts.called_off(self._exchange_name)
        if self._division.several_hosts and key not in self._called_off:
            self._called_off.append(key)
            self._store.set(key, True, ephemeral=True)

    @property
    def _exchange_name(self) -> str:
        return f"{self._name}/{self._number}.{self._meetings.turn}"
