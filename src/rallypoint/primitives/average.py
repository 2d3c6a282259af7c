"""The weighted mean of what several ranks have, for all of them, in the memory of one host as far as that goes.

    model = store.average("weights", model.state_dict(), size=4)

One call is one round: all meet (`Arrive` of the store, each with an offer), and each gets the mean. What is small travels with the
offers, and everybody computes the same. What is large stays in shared memory, and each rank computes a part of it for all
(`primitives/round.py`).
"""

from __future__ import annotations

import math
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rallypoint.errors import BarrierBroken, BarrierMismatch, BarrierTimeout, UsageError
from rallypoint.host import processes
from rallypoint.primitives import flat, mean
from rallypoint.primitives import pages as shared
from rallypoint.primitives.flat import Layout, Tree
from rallypoint.primitives.mean import Weights
from rallypoint.primitives.offers import PREFIX, Offer, Participant, called, meeting, place, scope
from rallypoint.primitives.pages import Foreseen, Own, Pages
from rallypoint.primitives.round import Round
from rallypoint.primitives.segments import Ours
from rallypoint.store.arguments import described, key_of, seconds_of
from rallypoint.store.budget import quoted
from rallypoint.store.rollcall import attendance, who
from rallypoint.wire.messages import Arrive, Identity, Member, Met, TimedOut
from rallypoint.world import ranks_phrase

if TYPE_CHECKING:
    from torch import Tensor

    from rallypoint.store.client import Client

VERSION = 1
"""Of offers. Ranks of another version are told apart, and all get `average-mismatch`."""

SMALL_BYTES = 48 * 1024
"""Up to here values travel in the offers: one meeting and no shared memory. With the rest of an offer it stays below INLINE_BYTES."""

SMALL_IN_ALL = 256 * 1024
"""... if those of all ranks together have no more than this: everybody gets everybody's."""

EXPLAINING = 5.0
"""Seconds to wait for the others' descriptions when values do not match."""

DESCRIPTION_BYTES = 48 * 1024
"""Of a description, compressed: a state dict of some thousand tensors."""


class Averaged(NamedTuple):
    """What `average(..., details=True)` returns.

    `value`: the mean. `round`: a number that grows from round to round. `present`: who is in the mean, in an order that is the same for
    all. `absent`: who was left out, as far as that is known. `weight`: the sum of the weights. `not_finite`: who brought NaN or
    infinite elements, and in which parts of the value (the first 20).
    """

    value: Any
    round: int
    present: tuple[Identity, ...]
    absent: tuple[Member, ...]
    weight: float
    not_finite: tuple[tuple[Identity, tuple[str, ...]], ...] = ()

    def __repr__(self) -> str:
        left_out = f", without {', '.join(map(str, self.absent))}" if self.absent else ""
        return f"<Averaged: round {self.round}, {len(self.present)} ranks of weight {self.weight:g}{left_out}>"


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
    """The mean of `value` over `size` callers, each counting `weight` times; the same structure, shapes, dtypes and devices.

    `value`: a tensor, or a dict of tensors (also dicts in dicts, lists and tuples; a state dict); numpy arrays and floats are taken as
    well. Sums are kept in float64 for float64 and in float32 for smaller floats, complex numbers likewise. Integers and bools have no
    mean of their type (`average-unsupported`). Tensors on a GPU go through host memory. The result has no gradient.
    `out`: built like the value; the mean is written there, and it is returned. It may be the value itself. After an exception it holds
    what it held, unless it was the interruption of this call while the result was being copied.
    `weight`: 0 takes part and does not count, NaN included; the weights of all must not be 0.
    `timeout`: seconds to wait for the others to come; None: for as long as the server lives. Once all are there, for their part of the
    work as long again (10 s at least).
    `quorum`: with fewer than `size` it completes when the first caller's `timeout` is over, with those who came if they are this many, or
    at once when all are there who were in the last round and live. A rank that dies in the middle is left out as well, if the quorum
    remains. Who was left out is logged, and is in the details. Who comes too late gets BarrierBroken (`barrier-missed`), once.
    `details`: return an `Averaged`.

    Each call is the caller's next round of this name; threads of one process take a seat each. All who get a result get the same, bit
    by bit, and they get it all or none: BarrierTimeout (`barrier-timeout`) when not enough came in time, BarrierBroken
    (`barrier-broken`) when somebody gave up or died, BarrierMismatch (`barrier-size`, `average-mismatch`) when they did not want the
    same. NaN and infinities spread, as in any sum; a warning in the log names the ranks that brought them.

    On one host the data stay in shared memory: the contribution of a rank, and the part of the mean that it computes for all, are
    kept between rounds until the store object goes. Across hosts, the first rank of each exchanges the sums of its host by the store.
    """
    name, seconds = key_of(name), seconds_of(timeout)
    _check(size, weight, quorum)
    tree = Tree(value)
    target = flat.target(out, tree) if out is not None else None
    call = _Call(store, PREFIX + name, tree, Layout(tree), size, float(weight), quorum, seconds)
    import torch

    with torch.no_grad():
        averaged, write = call.meet()
        try:
            tensors = flat.empty(tree) if target is None else {leaf.path: leaf.tensor for leaf in target.leaves}
            write(tensors)
        finally:
            call.end()
    if target is not None:
        flat.deliver(target)
        result = out
    else:
        result = tree.rebuilt(tensors)
    return averaged._replace(value=result) if details else result


def _check(size: object, weight: object, quorum: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"size={size!r}: the number of those who average is an int, not {described(size)}")
    if not 0 < size < 1 << 31:
        raise UsageError("usage", f"size={size}: at least one takes part in an average, and fewer than {1 << 31}")
    if isinstance(weight, bool | str) or not hasattr(weight, "__float__"):
        raise TypeError(f"weight={weight!r}: a weight is a number, not {described(weight)}")
    try:
        number = float(weight)
    except OverflowError:  # an int beyond all floats
        number = math.inf
    if not 0.0 <= number < math.inf:
        raise UsageError("usage", f"weight={weight!r} is no number from 0: a mean is made of non-negative parts")
    if quorum is None:
        return
    if isinstance(quorum, bool) or not isinstance(quorum, int):
        raise TypeError(f"quorum={quorum!r}: the number of those who suffice is an int, not {described(quorum)}")
    if not 1 <= quorum <= size:
        raise UsageError("usage", f"quorum={quorum} is none of {size}: give 1 to {size}")


Write = Callable[[dict[str, "Tensor"]], None]


class _Call:
    """One call of `average`, on its way to a round."""

    def __init__(
        self, store: Client, name: str, tree: Tree, layout: Layout, size: int, weight: float, quorum: int | None, timeout: float
    ) -> None:
        self._store = store
        self._name = name
        self._tree = tree
        self._layout = layout
        self._size = size
        self._weight = weight
        self._quorum = quorum
        self._timeout = timeout
        self._round: Round | None = None

    def meet(self) -> tuple[Averaged, Write]:
        """Until the mean can be read: who is in it, and what writes it."""
        if self._layout.size <= min(SMALL_BYTES, SMALL_IN_ALL // self._size):
            return self._meet_small()
        return self._meet_large()

    def end(self) -> None:
        """The mean has been read, or will not be."""
        if self._round is not None:
            self._round.end()

    # --- small: in the offers ---

    def _meet_small(self) -> tuple[Averaged, Write]:
        layout = self._layout
        memory = bytearray(layout.size)
        flat.put(layout, memory, 0, 0, layout.size)
        met, participants, _ = self._arrive(Offer(VERSION, layout.digest, self._weight, layout.size, threading.get_ident(), bytes(memory)))
        weights = self._weights(participants)
        parts = [bytearray(participants[index].offer.data) for index in weights.counted]
        finite = True
        for span in layout.spans(0, layout.size):
            tensors = [flat.typed(part, span.run.dtype, span.start, span.length) for part in parts]
            into = flat.typed(memory, span.run.dtype, span.start, span.length)
            finite = mean.combine(into, tensors, None if weights.equal else weights.each, weights.total) and finite
        strange = {}
        if not finite:
            for index in weights.counted:
                leaves = tuple(self._strange(bytearray(participants[index].offer.data)))
                if leaves:
                    strange[index] = leaves
        averaged = self._averaged(met, participants, range(len(participants)), strange, finite)

        def write(targets: dict[str, Tensor]) -> None:
            for leaf, _, count, offset in layout.within(0, layout.size):
                targets[leaf.path].copy_(flat.typed(memory, leaf.tensor.dtype, offset, count).view(leaf.tensor.shape))

        return averaged, write

    def _strange(self, data: bytearray) -> list[str]:
        within = self._layout.within(0, self._layout.size)
        return [leaf.path for leaf, _, count, offset in within if mean.not_finite(flat.typed(data, leaf.tensor.dtype, offset, count))]

    # --- large: in shared memory ---

    def _meet_large(self) -> tuple[Averaged, Write]:
        pages = shared.pages(self._store)
        key = (self._name, self._size, threading.get_ident())
        layout = self._layout
        foreseen = self._foreseen(pages, key)
        skip = flat.cuts(layout.size, foreseen.parts)[foreseen.slot] if foreseen.slot >= 0 else (0, 0)
        contribution = pages.contribution(shared.PAGE + layout.size)
        result = pages.result(foreseen.room)
        shared.begin(contribution.mapped.memory)
        flat.put(layout, contribution.mapped.memory, shared.PAGE, 0, layout.size, skip)
        offer = self._offer(pages, contribution, result, skip)
        try:
            met, participants, me = self._arrive(offer)
        except (BarrierTimeout, BarrierBroken, BarrierMismatch):  # nobody has seen the offer
            pages.give_contribution(contribution)
            pages.give_result(result)
            pages.tidy()
            raise
        except BaseException:  # it may have been seen: the memory is left to whoever reads it
            shared.leave(contribution.mapped.memory, shared.ANY_ROUND, gave_up=True)
            raise
        self._round = Round(
            self._store, self._name, layout, participants, me, met.generation, Ours(pages, contribution, result, skip),
            quorum=self._quorum, timeout=self._timeout, say=_say,
        )  # fmt: skip
        try:
            self._weights(participants)
            settled = self._round.run()
        except BaseException:
            self._round.end()
            raise
        pages.foresee(key, self._round.foreseen())
        return self._averaged(met, participants, settled.living, settled.strange, settled.finite), self._round.copy

    def _foreseen(self, pages: Pages, key: tuple[str, int, int]) -> Foreseen:
        """Which part will be ours: the same one as last time, or, with ranks, that of our rank on one host."""
        known = pages.foreseen.get(key)
        size, layout = self._size, self._layout
        if known is not None:
            slot, parts = known.slot, known.parts
        else:
            rank = self._store.identity.rank
            slot, parts = (rank, size) if rank is not None and 0 <= rank < size else (-1, size)
        start, stop = flat.cuts(layout.size, parts)[max(slot, 0)]
        return Foreseen(slot, parts, shared.head(size) + stop - start + flat.PAGE)

    def _offer(self, pages: Pages, contribution: Own, result: Own, skip: tuple[int, int]) -> Offer:
        pid = os.getpid()
        status = processes.status("self")
        return Offer(
            VERSION,
            self._layout.digest,
            self._weight,
            self._layout.size,
            threading.get_ident(),
            b"",
            os.urandom(16) if pages.private else scope(),
            pid,
            status.started if status is not None else 0,
            place(contribution),
            place(result),
            skip,
        )

    # --- both ---

    def _arrive(self, offer: Offer) -> tuple[Met, list[Participant], int]:
        """Meet the others: who they are, in an order that is the same for all, and where we are in it."""
        seconds = self._timeout
        try:
            reply, _ = self._store.ask(Arrive, self._name, self._size, seconds, _encode(offer), self._quorum, wait=seconds)
        except (BarrierBroken, BarrierMismatch) as error:
            raise self._reworded(error) from None
        if isinstance(reply, TimedOut):
            raise self._timed_out(reply)
        assert isinstance(reply, Met), reply
        seats = [Participant(seat.identity, _decode(seat.value)) for seat in reply.seats]
        mine = seats[reply.mine]
        participants = sorted(seats, key=_order)
        if any((one.offer.version, one.offer.digest) != (offer.version, offer.digest) for one in participants):
            self._explain(reply, participants)
        return reply, participants, participants.index(mine)

    def _weights(self, participants: Sequence[Participant]) -> Weights:
        weights = Weights([one.offer.weight for one in participants])
        if not weights.counted:
            raise UsageError(
                "usage",
                f"{called(self._name)}: the weights of {who(one.identity for one in participants)} are all 0, and there is no such mean",
            )
        return weights

    def _averaged(
        self, met: Met, participants: Sequence[Participant], living: Sequence[int], strange: dict[int, tuple[str, ...]], finite: bool
    ) -> Averaged:
        present = tuple(participants[index].identity for index in living)
        lost = tuple(
            Member(one.identity, one.identity.rank) for index, one in enumerate(participants) if index not in living
        )  # fmt: skip
        absent = met.absent + lost
        if met.absent or len(participants) < self._size:
            came = attendance(self._size, len(participants), [one.identity for one in participants], met.absent)
            _say("warning", f"{called(self._name)}, round {met.generation}, is complete without all of {self._size}: {came}")
        who_was = tuple((participants[index].identity, leaves) for index, leaves in strange.items())
        if not finite:
            what = (
                "; ".join(f"{identity} in {', '.join(leaves)}" for identity, leaves in who_was) or "the sum of finite numbers is too large"
            )
            _say("warning", f"{called(self._name)}, round {met.generation}, has NaN or infinite elements: {what}")
        weight = mean.total(participants[index].offer.weight for index in living)
        return Averaged(None, met.generation, present, absent, weight, who_was)

    # --- what goes wrong ---

    def _reworded(self, error: BarrierBroken | BarrierMismatch) -> BarrierBroken | BarrierMismatch:
        text = error.headline.replace(f"the barrier {quoted(self._name)}", called(self._name))
        if isinstance(error, BarrierMismatch):
            return BarrierMismatch(error.code, text, why=error.why, help=error.help)
        return BarrierBroken(error.code, text, present=error.present, absent=error.absent, why=error.why, help=error.help)

    def _timed_out(self, reply: TimedOut) -> BarrierTimeout:
        came = attendance(self._size, reply.arrived, reply.present, reply.absent)
        of = f"{self._size}" if self._quorum is None else f"{self._size} with a quorum of {self._quorum}"
        help = () if self._quorum is not None else _WITHOUT
        return BarrierTimeout(
            "barrier-timeout",
            f"{called(self._name)} of {of} timed out after {self._timeout:.1f} s: {came}",
            present=tuple(map(str, reply.present)),
            absent=tuple(map(str, reply.absent)),
            help=(("if the others need longer, give it more time", "store.average(name, value, size, timeout=...)"), *help),
        )

    def _explain(self, met: Met, participants: Sequence[Participant]) -> None:
        """Values do not match: all describe theirs to each other, and raise the same."""
        mine = zlib.compress(_encode(self._tree.described()))
        brought = _encode(mine if len(mine) <= DESCRIPTION_BYTES else b"")
        try:
            name = meeting(self._name, "described")
            reply, _ = self._store.ask(Arrive, name, len(participants), EXPLAINING, brought, 1, wait=EXPLAINING)
        except (BarrierBroken, BarrierMismatch):
            reply = None
        told: list[tuple[Identity, dict[str, str]]] = []
        for seat in reply.seats if isinstance(reply, Met) else ():
            packed = msgspec.msgpack.decode(seat.value, type=bytes)
            if packed:
                leaves = msgspec.msgpack.decode(zlib.decompress(packed), type=list[tuple[str, str, list[int]]])
                told.append((seat.identity, {path: f"{dtype} {shape}" for path, dtype, shape in leaves}))
        told.sort(key=lambda one: _rank(one[0]))
        found = _differences(told)
        versions = sorted({one.offer.version for one in participants})
        if len(versions) > 1:
            found = [f"they run different versions of rallypoint, whose averages have the versions {', '.join(map(str, versions))}"]
        if not found:
            groups: dict[bytes, list[Identity]] = {}
            for one in participants:
                groups.setdefault(one.offer.digest, []).append(one.identity)
            found = [f"{who(group)} have the same" for group in groups.values()]
        raise BarrierMismatch(
            "average-mismatch",
            f"{called(self._name)} got values that do not match: {found[0]}",
            why=tuple(found[1:]),
            help=(("give all ranks the same keys, shapes and dtypes", ""),),
        )


_WITHOUT = (("to go on without them, say how many suffice", "store.average(name, value, size, quorum=...)"),)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Offer).decode

SHOWN = 5
"""Differences that an error lists."""


def _differences(told: Sequence[tuple[Identity, dict[str, str]]]) -> list[str]:
    """The first parts of the value that are not the same for all, and who has what."""
    found = []
    ranks = {identity.rank for identity, _ in told}
    by_rank = None not in ranks and len(ranks) == len(told)  # then the numbers say enough
    for path in sorted({path for _, leaves in told for path in leaves}):
        sides: dict[str, list[Identity]] = {}
        for identity, leaves in told:
            sides.setdefault(leaves.get(path, "nothing"), []).append(identity)
        if len(sides) > 1:
            had = [f"{what} in {ranks_phrase(one.rank or 0 for one in them) if by_rank else who(them)}" for what, them in sides.items()]
            said = f"{', '.join(had[:-1])} and {had[-1]}"
            found.append(said if path == "value" else f"{path} is {said}")  # "value": it is no container
    return found if len(found) <= SHOWN else [*found[:SHOWN], f"and {len(found) - SHOWN} more parts differ"]


def _order(one: Participant) -> tuple[Any, ...]:
    """Ranks by number, the rest by process and thread: the same in every round, so that everybody gets the part that he expects."""
    return (*_rank(one.identity), one.offer.thread)


def _rank(identity: Identity) -> tuple[Any, ...]:
    return identity.rank is None, identity.rank or 0, identity.host, identity.pid


def _say(level: str, text: str) -> None:
    from rallypoint.store.logbook import logger  # here: logging takes 8 ms to load

    log = logger()
    (log.warning if level == "warning" else log.info)(text)
