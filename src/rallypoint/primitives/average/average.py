"""Weighted mean of tensors over several callers, through the memory of one host as far as it goes.

    model = store.average("weights", model.state_dict(), size=4)

One call is one round: all meet at a barrier of the store, each with an offer, and each gets the
mean. Small values travel in the offers, and every caller computes the same. Large values stay in
shared memory, and each rank computes a part of the mean for all (`primitives/average/sync.py`).
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rallypoint.errors import BarrierBroken, BarrierMismatch, BarrierTimeout, UsageError
from rallypoint.host import process_status
from rallypoint.primitives.average.layout import (
    Layout,
    MeanWriter,
    Tree,
    deliver,
    empty,
    target_of,
    typed,
)
from rallypoint.primitives.average.mismatch import mismatch
from rallypoint.primitives.average.participants import (
    PREFIX,
    VERSION,
    Offer,
    Participant,
    called,
    in_order,
    say_warning,
    scope,
)
from rallypoint.primitives.average.segments import ANY_ROUND, OwnSegment, cache_of, head_of
from rallypoint.primitives.average.sync import NAMED, AverageRound
from rallypoint.primitives.average.work_split import Weights, combine, sum_of
from rallypoint.store.client.arguments import described, key_of, seconds_of, size_of
from rallypoint.store.state.attendance import attendance, who
from rallypoint.store.state.quotas import quoted
from rallypoint.wire.messages import Arrive, Identity, Member, Met, TimedOut

if TYPE_CHECKING:
    from torch import Tensor

    from rallypoint.store.client.client import Client

SMALL_BYTES = 48 * 1024
"""Maximum bytes of a value that travels in the offers: one meeting and no shared memory. With the
rest of an offer it stays below INLINE_BYTES."""

SMALL_IN_ALL = 256 * 1024
"""Maximum bytes of such values of all ranks together: every rank gets every other's."""


class Averaged(NamedTuple):
    """Result of `average(..., details=True)`.

    `value`: the mean. `round`: a number that grows from round to round. `present`: the callers in
    the mean, in an order that is the same for all. `absent`: those left out, as far as they are
    known. `weight`: the sum of the weights. `not_finite`: the callers that brought NaN or infinite
    elements, and the parts of the value that had them (the first 20).
    """

    value: Any
    round: int
    present: tuple[Identity, ...]
    absent: tuple[Member, ...]
    weight: float
    not_finite: tuple[tuple[Identity, tuple[str, ...]], ...] = ()

    def __repr__(self) -> str:
        left_out = f", without {', '.join(map(str, self.absent))}" if self.absent else ""
        ranks = f"{len(self.present)} ranks of weight {self.weight:g}"
        return f"<Averaged: round {self.round}, {ranks}{left_out}>"


def average(
    store: Client,
    name: str,
    value: Any,
    size: int,
    *,
    weight: float = 1.0,
    quorum: int | None = None,
    timeout: float | timedelta | None = 30.0,
    out: Any = None,
    details: bool = False,
) -> Any:
    """Return the mean of `value` over `size` callers, each counting `weight` times.

    The mean has the structure, shapes, dtypes and devices of the value.

    `value`: a tensor, or a dict of tensors (also dicts in dicts, lists and tuples; a state dict);
    numpy arrays and floats are taken as well. Sums are kept in float64 for float64 and in float32
    for smaller floats, complex numbers likewise. Integers and bools have no mean of their type
    (`average-unsupported`). Tensors on a GPU go through host memory. The result has no gradient.
    `out`: built like the value; the mean is written there, and it is returned. It may be the value
    itself. After an exception it holds what it held, unless it was the interruption of this call
    while the result was being copied. `weight`: 0 takes part and does not count, NaN included; the
    weights of all must not be 0. `timeout`: seconds to wait for the others to come; None: for as
    long as the server lives. Once all are there, for their part of the work as long again (10 s at
    least). `quorum`: with fewer than `size` callers the round completes when the first caller's
    `timeout` is over, with those that came if they are this many, or at once when all are there
    that were in the last round and live. A rank that dies in the middle is left out as well, if the
    quorum remains. Ranks that were left out are logged, and are in the details. A rank that comes
    too late gets BarrierBroken (`barrier-missed`), once. `details`: return an `Averaged`.

    Each call is the caller's next round of this name; threads of one process take a seat each. All
    that get a result get the same, bit by bit, and they get it all or none: BarrierTimeout
    (`barrier-timeout`) when not enough came in time, BarrierBroken (`barrier-broken`) when a caller
    gave up or died, BarrierMismatch (`barrier-size`, `average-mismatch`) when they did not want the
    same. NaN and infinities spread, as in any sum; a warning in the log names the ranks that
    brought them.

    On one host the data stay in shared memory, which is kept between rounds until the store object
    goes. Across hosts, the first rank of each exchanges the sums of its host through the store.
    """
    name, seconds = key_of(name), seconds_of(timeout)
    _check(size, weight, quorum)
    tree = Tree(value)
    target = target_of(out, tree) if out is not None else None
    call = _AverageCall(store, PREFIX + name, tree, size, float(weight), quorum, seconds)
    import torch

    with torch.no_grad():
        averaged, write = call.meet()
        try:
            if target is None:
                tensors = empty(tree)
            else:
                tensors = {leaf.path: leaf.tensor for leaf in target.leaves}
            write(tensors)
        finally:
            call.end()
    if target is not None:
        deliver(target)
        result = out
    else:
        result = tree.rebuilt(tensors)
    return averaged._replace(value=result) if details else result


def _check(size: int, weight: object, quorum: int | None) -> None:
    size_of(size, "an average")
    if isinstance(weight, bool | str) or not hasattr(weight, "__float__"):
        raise TypeError(f"weight={weight!r}: a weight is a number, not {described(weight)}")
    try:
        number = float(weight)
    except OverflowError:  # an int beyond all floats
        number = math.inf
    if not 0.0 <= number < math.inf:
        what = "is no number from 0: a mean is made of non-negative parts"
        raise UsageError("usage", f"weight={weight!r} {what}")
    if quorum is None:
        return
    if isinstance(quorum, bool) or not isinstance(quorum, int):
        raise TypeError(f"quorum={quorum!r}: a quorum is an int, not {described(quorum)}")
    if not 1 <= quorum <= size:
        raise UsageError("usage", f"quorum={quorum} is none of {size}: give 1 to {size}")


Write = Callable[[dict[str, "Tensor"]], None]


class _AverageCall:
    """One call of `average`, until its mean can be read."""

    def __init__(
        self,
        store: Client,
        name: str,
        tree: Tree,
        size: int,
        weight: float,
        quorum: int | None,
        timeout: float,
    ) -> None:
        self._store = store
        self._name = name
        self._tree = tree
        self._layout = Layout(tree)
        self._size = size
        self._weight = weight
        self._quorum = quorum
        self._timeout = timeout
        self._round: AverageRound | None = None

    def meet(self) -> tuple[Averaged, Write]:
        """Wait until the mean can be read; return its details, and a function that writes it."""
        if self._layout.size <= min(SMALL_BYTES, SMALL_IN_ALL // self._size):
            return self._meet_small()
        return self._meet_large()

    def end(self) -> None:
        """Give back what the round holds, whether its mean was read or not."""
        if self._round is not None:
            self._round.end()

    # --- small values, in the offers ---

    def _meet_small(self) -> tuple[Averaged, Write]:
        layout = self._layout
        memory = bytearray(layout.size)
        layout.put(memory, 0)
        offer = Offer(VERSION, layout.digest, self._weight, threading.get_ident(), bytes(memory))
        met, participants = self._arrive(offer)
        weights = self._weights(participants)
        values = {index: bytearray(participants[index].offer.data) for index in weights.each}
        finite = True
        for run in layout.runs:
            parts = [typed(value, *run) for value in values.values()]
            mean = typed(memory, *run)
            finite = combine(mean, parts, [*weights.each.values()], weights.total) and finite
        strange = {}
        if not finite:
            found = {index: layout.paths_not_finite(value, 0) for index, value in values.items()}
            strange = {index: tuple(paths[:NAMED]) for index, paths in found.items() if paths}
        averaged = self._averaged(met, participants, range(len(participants)), strange, finite)
        return averaged, lambda targets: MeanWriter(layout, targets).write(
            memory, 0, 0, layout.size
        )

    # --- large values, in shared memory ---

    def _meet_large(self) -> tuple[Averaged, Write]:
        cache = cache_of(self._store)
        own = cache.take(head_of(self._size) + self._layout.size)
        self._layout.put(own.mapped.memory, head_of(self._size))
        offer = self._offer(own)
        try:
            met, participants = self._arrive(offer)
        except (BarrierTimeout, BarrierBroken, BarrierMismatch):  # nobody reads it
            cache.give(own)
            cache.end_round()
            raise
        except BaseException:  # the others may have seen the offer: the segment is left to them
            own.give_up(ANY_ROUND)
            raise
        me = [one.offer for one in participants].index(offer)
        self._round = AverageRound(
            self._store,
            self._name,
            self._layout,
            participants,
            me,
            met.generation,
            self._size,
            own,
            cache,
            quorum=self._quorum,
            timeout=self._timeout,
        )
        try:
            self._weights(participants)
            outcome = self._round.run()
        except BaseException:
            self._round.end()
            raise
        averaged = self._averaged(met, participants, *outcome)
        return averaged, self._round.copy

    def _offer(self, own: OwnSegment) -> Offer:
        status = process_status.status("self")
        return Offer(
            VERSION,
            self._layout.digest,
            self._weight,
            threading.get_ident(),
            scope=scope(),
            pid=os.getpid(),
            started=status.started if status else 0,
            place=own.place,
        )

    # --- all values ---

    def _arrive(self, offer: Offer) -> tuple[Met, list[Participant]]:
        """Meet the other callers; return them in an order that is the same for all."""
        seconds, data = self._timeout, msgspec.msgpack.encode(offer)
        try:
            reply, _ = self._store.ask(
                Arrive, self._name, self._size, seconds, data, self._quorum, wait=seconds
            )
        except (BarrierBroken, BarrierMismatch) as error:
            raise self._reworded(error) from None
        if isinstance(reply, TimedOut):
            raise self._timed_out(reply)
        assert isinstance(reply, Met), reply
        seats = [Participant(seat.identity, _decode(seat.value)) for seat in reply.seats]
        participants = in_order(seats)
        expected = offer.version, offer.digest
        if any((one.offer.version, one.offer.digest) != expected for one in participants):
            raise mismatch(self._store, self._name, self._tree, participants)
        return reply, participants

    def _weights(self, participants: Sequence[Participant]) -> Weights:
        weights = Weights([one.offer.weight for one in participants])
        if not weights.each:
            them = who(one.identity for one in participants)
            what = f"the weights of {them} are all 0, and there is no such mean"
            raise UsageError("usage", f"{called(self._name)}: {what}")
        return weights

    def _averaged(
        self,
        met: Met,
        participants: Sequence[Participant],
        living: Sequence[int],
        strange: dict[int, tuple[str, ...]],
        finite: bool,
    ) -> Averaged:
        title = f"{called(self._name)}, round {met.generation},"
        identities = [one.identity for one in participants]
        if met.absent or len(participants) < self._size:
            came = attendance(self._size, len(participants), identities, met.absent)
            say_warning(f"{title} is complete without all of {self._size}: {came}")
        brought = tuple((identities[index], leaves) for index, leaves in strange.items())
        if not finite:
            which = "; ".join(f"{identity} in {', '.join(leaves)}" for identity, leaves in brought)
            which = which or "the sum of finite numbers is too large"
            say_warning(f"{title} has NaN or infinite elements: {which}")
        lost = [one for index, one in enumerate(identities) if index not in living]
        return Averaged(
            None,
            met.generation,
            tuple(identities[index] for index in living),
            met.absent + tuple(Member(identity, identity.rank) for identity in lost),
            sum_of(participants[index].offer.weight for index in living),
            brought,
        )

    # --- errors ---

    def _reworded(self, error: BarrierBroken | BarrierMismatch) -> BarrierBroken | BarrierMismatch:
        text = error.headline.replace(f"the barrier {quoted(self._name)}", called(self._name))
        if isinstance(error, BarrierMismatch):
            return BarrierMismatch(error.code, text, why=error.why, help=error.help)
        return BarrierBroken(
            error.code,
            text,
            present=error.present,
            absent=error.absent,
            why=error.why,
            help=error.help,
        )

    def _timed_out(self, reply: TimedOut) -> BarrierTimeout:
        came = attendance(self._size, reply.arrived, reply.present, reply.absent)
        longer = ("if the others need longer, give it more time", f"{_CALL}, timeout=...)")
        without = ("to go on without them, say how many suffice", f"{_CALL}, quorum=...)")
        of = f"{self._size}"
        if self._quorum is not None:
            of += f" with a quorum of {self._quorum}"
        return BarrierTimeout(
            "barrier-timeout",
            f"{called(self._name)} of {of} timed out after {self._timeout:.1f} s: {came}",
            present=tuple(map(str, reply.present)),
            absent=tuple(map(str, reply.absent)),
            help=(longer,) if self._quorum is not None else (longer, without),
        )


_CALL = "store.average(name, value, size"

_decode = msgspec.msgpack.Decoder(Offer).decode
