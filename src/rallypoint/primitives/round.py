"""One round of an average, from when it is known who takes part until each has the mean.

Each rank computes one part of it for all. Ranks of one host read each other's contributions in shared memory:

    offers met       who takes part, and where their contributions are
    [ready]          somebody had to bring more than was foreseen: all have it now
    add up my part   of all contributions of this host, into my result
    [across]         several hosts: `primitives/hosts.py`
    done             everybody has; the contributions may be written to again
    copy             the parts of the others, out of their results

Every meeting is a barrier of the store at which all say how it went; whoever gets its answer sees what the others see, and decides the
same. Who is missing there is waited for, unless he is known to be dead: then the others begin again without him, or all of them raise.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rallypoint.clock import Clock
from rallypoint.errors import BarrierBroken, BarrierMismatch, BarrierTimeout, RallypointError, UsageError
from rallypoint.host import memory, processes
from rallypoint.primitives import flat, hosts, mean
from rallypoint.primitives import pages as shared
from rallypoint.primitives.flat import Layout, Span
from rallypoint.primitives.hosts import Silent
from rallypoint.primitives.mean import Weights
from rallypoint.primitives.pages import Foreseen, Own, Pages
from rallypoint.primitives.progress import Progress
from rallypoint.store.rollcall import who
from rallypoint.wire.messages import Arrive, Identity, Met

if TYPE_CHECKING:
    from torch import Tensor

    from rallypoint.store.client import Client

LOOK = 1.0
"""Seconds that a meeting within a round waits before those who are there look whether the others live. What the work takes for 1 GB."""

PAUSE = 0.5
"""Seconds between two such looks at most."""

PATIENCE = 10.0
"""Seconds, at least, for the others to finish their part once all have come: `timeout` may be short because everybody is known to come
at once, and a busy machine is slow."""

SLOWEST = 50e6
"""Bytes per second at which the slowest rank is expected to work, on a machine that swaps."""

NAMED = 20
"""Leaves with a NaN that a rank names."""


PREFIX = "average/"
"""Before the names of averages among those of barriers."""

_QUORUM = (("go on with those who are left", "store.average(name, value, size, quorum=...)"),)


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a segment is: a descriptor of the process, and what it is to be."""

    fd: int
    inode: int
    capacity: int


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What each brings to a round. With `data` that is all; otherwise his contribution is at `place`, all of it but the bytes `skip`,
    which only he needs if he gets the part that he expects."""

    version: int
    digest: bytes
    weight: float
    size: int
    thread: int
    data: bytes = b""
    scope: bytes = b""
    pid: int = 0
    started: int = 0
    place: Place | None = None
    result: Place | None = None
    skip: tuple[int, int] = (0, 0)


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


class Participant(NamedTuple):
    """Somebody who takes part."""

    identity: Identity
    offer: Offer


class Missing(Exception):
    """Some will not come to a meeting any more. `late`: they live, but time is over."""

    def __init__(self, absent: Sequence[int], told: dict[int, Told], *, late: bool) -> None:
        super().__init__()
        self.absent = absent
        self.told = told  # by those who did come
        self.late = late


class Settled(NamedTuple):
    """How a round ended: who of the participants is in the mean, and what was not finite, by participant."""

    living: tuple[int, ...]
    strange: dict[int, tuple[str, ...]]
    finite: bool


class Ours(NamedTuple):
    """What a caller has of his own in a round."""

    pages: Pages
    contribution: Own
    result: Own
    skip: tuple[int, int]


class Round:
    """See the module. `run` returns when the mean can be read, `copy` reads it."""

    def __init__(
        self, store: Client, name: str, layout: Layout, participants: Sequence[Participant], me: int, number: int, ours: Ours,
        *, quorum: int | None, timeout: float, say: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self.number = number
        self.participants = participants
        self.me = me
        self.layout = layout
        self.living = list(range(len(participants)))
        self.progress = Progress(f"{called(name)}, round {number}", say)
        self.contribution, self.result = ours.contribution, ours.result
        self.final: Own | None = None  # several hosts, and I am the first of mine: the whole mean
        self.interrupted = True  # until it has ended in order
        self._store = store
        self._name = name
        self._pages = ours.pages
        self._skip = ours.skip
        self._quorum = quorum
        self._say = say
        self._clock = Clock()
        self._timeout = timeout
        self._patience = max(timeout, PATIENCE) + layout.size / SLOWEST
        self._turn = 0
        self._alone: set[int] = set()  # whose memory others cannot open: each a host of his own
        self._memories: dict[int, memoryview] = {}  # the contributions of my host
        self._results: dict[int, memoryview] = {}
        self._finals: dict[int, memoryview] = {}
        self._exchanges: list[hosts.Exchange] = []
        self._failed: Exception | None = None
        self._called_off = ""  # the key that says so
        self._places = {index: one.offer.result for index, one in enumerate(participants)}
        self._finite = True

    # --- the course of it ---

    def run(self) -> Settled:
        """Until everybody has done his part. Raises what `average` does."""
        try:
            while not self._done():
                self._turn += 1
            strange = {} if self._finite else self._ask_who_was_strange()
            self.interrupted = False
            return Settled(tuple(self.living), strange, self._finite)
        except (BarrierBroken, BarrierTimeout, UsageError):  # all who are in it have come to the same end
            self.interrupted = False
            raise

    def _done(self) -> bool:
        """One turn: whether it went well for all."""
        self._plan()
        try:
            if self._needs_ready():
                ready = self._do(self._make_ready)
                told = self._meet("ready", self._told(**ready))
                self._check(told)
                self._places = {index: one.result for index, one in told.items()}
            done = self._do(self._add_up)
            if len(self._groups) > 1:
                told = self._meet("sums", self._told(**done))
                if not any(one.unreadable or one.again or one.failed for one in told.values()):
                    done = self._do(functools.partial(self._across, told))
            return self._agreed(self._meet("done", self._told(**done)))
        except Missing as missing:
            self._go_on_without(missing)
            return False

    def _do(self, part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Do my part of something, and return what there is to tell of it. What fails is told, so that nobody waits, and then raised."""
        try:
            return part()
        except Silent as error:
            return {"failed": error.headline, "silent": True}
        except (RallypointError, OSError, MemoryError, RuntimeError) as error:
            self._failed = error
            return {"failed": f"{type(error).__name__}: {error}"}

    def _agreed(self, told: dict[int, Told]) -> bool:
        """Everybody is there: was everybody able to do his part?"""
        self._check(told)
        unreadable = {index for one in told.values() for index in one.unreadable}
        self._alone |= unreadable
        if self.me in unreadable:
            self._pages.private = True
        self._finite = all(one.finite for one in told.values())
        if not unreadable and not any(one.again for one in told.values()):
            return True
        self._take_back()
        return False

    def _check(self, told: dict[int, Told], *, silent: bool = False) -> None:
        """Somebody was not able to: there is no result. With `silent` it is known why nothing was heard of another host."""
        if self._failed is not None and self.me in told:
            self.interrupted = False  # the others know
            raise self._failed
        for index, one in sorted(told.items()):
            if one.failed and not (silent and one.silent):
                raise BarrierBroken("barrier-broken", f"{self._title} failed in {self._who([index])}: {one.failed}")

    def _take_back(self) -> None:
        """Nobody will read the results of this turn."""
        for own in (self.result, self.final):
            if own is not None:
                own.take_back(self.number)

    def _go_on_without(self, missing: Missing) -> None:
        """Some are lost: begin again without them, if the quorum allows it."""
        self._check(missing.told, silent=True)
        them = self._who(missing.absent)
        left = [index for index in self.living if index not in missing.absent]
        why = f"did not finish within {self._clock.elapsed():.1f} s" if missing.late else "died or gave up before it was complete"
        present = tuple(str(self.participants[index].identity) for index in left)
        absent = tuple(str(self.participants[index].identity) for index in missing.absent)
        if self._quorum is None or len(left) < self._quorum:
            more = f", and {len(left)} of the quorum of {self._quorum} are left" if self._quorum is not None else ""
            text = f"{self._title} has no result: {them} {why}{more}"
            if missing.late:
                raise BarrierTimeout("barrier-timeout", text, present=present, absent=absent)
            raise BarrierBroken("barrier-broken", text, present=present, absent=absent, help=_QUORUM)
        self._say("warning", f"{self._title} goes on without {them}, who {why}")
        self.living = left
        self._take_back()

    # --- meetings ---

    def _told(self, **more: Any) -> dict[str, Any]:
        return {"result": place(self.result), "final": place(self.final), **more}

    def _meet(self, stage: str, told: dict[str, Any]) -> dict[int, Told]:
        """What everybody says who is still in it. Raises Missing, for all who are there alike, and BarrierBroken (`barrier-missed`) when
        the others have gone on without us."""
        absent: list[int] = []
        attempts = 0
        while True:
            late = self._clock.elapsed() > self._patience
            mine = Told(self.number, self._turn, self.me, gone=tuple(filter(self._is_gone, absent)), late=late, **told)
            met = self._arrive(stage, mine)
            got = self._heard(met)
            absent = [index for index in self.living if index not in got]
            if not absent:
                return got
            left = list(map(self._has_left, absent))
            if any(left) and all(left[at] or self._is_gone(index) for at, index in enumerate(absent)):
                raise self._missed()
            given_up = {index for one in got.values() for index in one.gone} | self._ended(met, absent)
            if got and given_up.issuperset(absent):
                raise Missing(absent, got, late=False)
            if any(one.late for one in got.values()):
                raise Missing(absent, got, late=True)
            self._call_off(absent)
            self.progress.waiting(stage, functools.partial(self._who, absent))
            attempts += 1
            threading.Event().wait(min(PAUSE, 0.005 * 2**attempts))

    def _call_off(self, absent: Sequence[int]) -> None:
        """Somebody is dead: who waits for another host's sums need not wait until time is over."""
        if len(self._groups) > 1 and not self._called_off and any(map(self._is_gone, absent)):
            self._called_off = hosts.called_off(self._exchange_name)
            self._store.set(self._called_off, True, ephemeral=True)

    def _arrive(self, stage: str, mine: Told) -> Met | None:
        name, size = f"{self._name}/{stage}/{len(self.living)}", len(self.living)
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
            if one.round > self.number:
                raise self._missed()
            if one.round == self.number and one.turn == self._turn and one.me in self.living:
                told[one.me] = one
        return told if self.me in told else {}

    def _ended(self, met: Met | None, absent: Sequence[int]) -> set[int]:
        """Of these, whose session is over according to the server."""
        over = {member.identity for member in (met.absent if met is not None else ()) if member.ended and member.identity is not None}
        return {index for index in absent if self.participants[index].identity in over and not self._has_left(index)}

    def _is_gone(self, index: int) -> bool:
        """Whether he is certainly dead, or has given up."""
        offer = self.participants[index].offer
        if index in self._memories and shared.has_given_up(self._memories[index], self.number):
            return True
        if offer.scope != scope() or self._has_left(index):
            return False
        assert offer.place is not None
        if index not in self._memories and not memory.published(offer.pid, offer.place.fd, offer.place.inode):
            return True  # before I had opened it
        found = processes.status(offer.pid)
        return found is None or found.started != offer.started or found.state in "ZX"

    def _has_left(self, index: int) -> bool:
        """Whether he has ended this round, without us."""
        return index in self._memories and shared.has_left(self._memories[index], self.number)

    def _missed(self) -> BarrierBroken:
        return BarrierBroken(
            "barrier-missed", f"{self._title} was completed without this caller, who was silent for {self._clock.elapsed():.1f} s"
        )

    # --- who does what ---

    def _plan(self) -> None:
        """Hosts, the first of whose ranks leads it, and the parts of mine. From what everybody knows, alike for all."""
        by_scope: dict[bytes, list[int]] = {}
        for index in self.living:
            scope = self.participants[index].offer.scope if index not in self._alone else b"%d" % index
            by_scope.setdefault(scope, []).append(index)
        self._groups = list(by_scope.values())
        self._group = next(group for group in self._groups if self.me in group)
        self._parts = dict(zip(self._group, flat.cuts(self.layout.size, len(self._group)), strict=True))
        self._weights = Weights([self.participants[index].offer.weight for index in self.living])
        if not self._weights.counted:
            raise UsageError("usage", f"{self._title}: the weights of all who are in it are 0, and there is no such mean")
        self._wide = hosts.Wide(self.layout) if len(self._groups) > 1 else None
        self._finite = True

    def _weight(self, index: int) -> float:
        """What his contribution is multiplied by; 0: it is not read."""
        at = self.living.index(index)
        return self._weights.each[self._weights.counted.index(at)] if at in self._weights.counted else 0.0

    def _room(self, part: tuple[int, int]) -> int:
        """The size of a result that holds this part."""
        size = part[1] - part[0] if self._wide is None else self._wide.at(part[1]) - self._wide.at(part[0])
        return shared.head(len(self.participants)) + size

    def _needs_ready(self) -> bool:
        """Whether somebody has to bring more before all can begin: this is known to all."""
        if self._turn or len(self._groups) > 1:
            return True
        for index, part in self._parts.items():
            offer = self.participants[index].offer
            assert offer.result is not None
            if offer.result.capacity < self._room(part) or offer.skip not in ((0, 0), part):
                return True
        return False

    def _make_ready(self) -> dict[str, Any]:
        """All of my contribution, and a result that is large enough."""
        if self._turn:
            flat.put(self.layout, self.contribution.mapped.memory, shared.PAGE, 0, self.layout.size)
        elif self._skip[0] < self._skip[1]:
            flat.put(self.layout, self.contribution.mapped.memory, shared.PAGE, *self._skip)
        self._skip = (0, 0)
        room = self._room(self._parts[self.me])
        if self.result.mapped.capacity < room or not self.result.unread():
            self._pages.give_result(self.result)
            self.result = self._pages.unread_result(room)
        if self._wide is not None and self._group[0] == self.me and self.final is None:
            self.final = self._pages.unread_result(shared.head(len(self.participants)) + self.layout.size)
        return {}

    def _open(self) -> tuple[int, ...]:
        """Map what the others of my host have; whose memory cannot be had."""
        unreadable = []
        for index in self._group:
            offer = self.participants[index].offer
            try:
                self._memories[index] = self._mapped(index, offer.pid, offer.place)
                self._results[index] = self._mapped(index, offer.pid, self._places[index])
            except (OSError, memory.Unfit):
                unreadable.append(index)
        return tuple(unreadable)

    def _mapped(self, index: int, pid: int, there: Place | None) -> memoryview:
        assert there is not None
        if index == self.me:
            own = self.contribution if there.inode == self.contribution.mapped.inode else self.result
            return own.mapped.memory
        return self._pages.of(pid, there.fd, there.inode, there.capacity)

    # --- the work ---

    def _add_up(self) -> dict[str, Any]:
        """My part of my host's sum, or of the mean if there is no other host."""
        unreadable = self._open()
        if unreadable:
            return {"unreadable": unreadable}
        if not self.result.unread():  # by somebody who was stopped in the middle of a former round
            return {"again": True}
        start, stop = self._parts[self.me]
        base = shared.head(len(self.participants))
        into = self.result.mapped.memory
        self.progress.begin("adding up", stop - start)
        self.result.lend(self.number, [index for index in self._group if index != self.me])
        for span in self.layout.spans(start, stop, direct=True):
            if self._wide is None:
                target = flat.typed(into, span.run.dtype, base + span.start - start, span.length)
                self._combine(target, span, self._weights.total)
            else:
                sums = flat.accumulator(span.run.dtype)
                target = flat.typed(into, sums, base + self._wide.at(span.start) - self._wide.at(start), span.length)
                self._combine(target, span, None)
        return {"finite": self._finite}

    def _combine(self, target: Tensor, span: Span, divisor: float | None) -> None:
        parts, weights = [], []
        for index in self._group:
            weight = self._weight(index)
            if weight > 0.0:
                parts.append(self._source(index, span))
                weights.append(weight)
        if not parts:
            target.zero_()
            return
        item = span.run.dtype.itemsize
        tell = lambda count: self.progress.more(count * item)  # noqa: E731
        if not mean.combine(target, parts, None if self._weights.equal else weights, divisor, tell):
            self._finite = False

    def _source(self, index: int, span: Span) -> Tensor:
        """What this rank contributes there: mine is read in my own tensors where that can be."""
        if index == self.me and span.leaf is not None:
            return span.leaf.tensor.view(-1)[span.at : span.at + span.length]
        return flat.typed(self._memories[index], span.run.dtype, shared.PAGE + span.start, span.length)

    def _across(self, told: dict[int, Told]) -> dict[str, Any]:
        """Other hosts have sums, too."""
        leads = self._group[0] == self.me
        if leads:
            assert self.final is not None
            self.final.lend(self.number, [index for index in self._group if index != self.me])
            exchange = hosts.Exchange(
                self._store,
                self._exchange_name,
                self.layout,
                self._groups.index(self._group),
                len(self._groups),
                deadline=self._patience - self._clock.elapsed(),
                progress=self.progress,
            )
            self._exchanges.append(exchange)
            head = shared.head(len(self.participants))
            finite = exchange.run(self._sum_of_my_host, self.final.mapped.memory, head, self._weights.total)
            return {"finite": self._finite and finite}
        else:
            first = self._group[0]
            there = told[first].final
            assert there is not None
            try:
                self._finals[first] = self._pages.of(self.participants[first].offer.pid, there.fd, there.inode, there.capacity)
            except (OSError, memory.Unfit):  # it has just died
                return {"unreadable": (first,)}
        return {"finite": self._finite}

    def _sum_of_my_host(self, start: int, stop: int) -> list[tuple[Span, list[Tensor]]]:
        """The sums of my host for these bytes, as they lie in the results of its ranks: for each span one tensor after the other."""
        assert self._wide is not None
        base = shared.head(len(self.participants))
        found = []
        for span in self.layout.spans(start, stop):
            item, pieces = span.run.dtype.itemsize, []
            for index, (first, last) in self._parts.items():
                begin, end = max(first, span.start), min(last, span.start + span.length * item)
                if begin < end:
                    at = base + self._wide.at(begin) - self._wide.at(first)
                    memory = self._results[index] if index != self.me else self.result.mapped.memory
                    pieces.append(flat.typed(memory, flat.accumulator(span.run.dtype), at, (end - begin) // item))
            found.append((span, pieces))
        return found

    # --- the end ---

    def copy(self, targets: dict[str, Tensor]) -> None:
        """Write the mean to these tensors, by path."""
        head = shared.head(len(self.participants))
        self.progress.begin("copying", self.layout.size)
        if len(self._groups) > 1:
            first = self._group[0]
            memory = self.final.mapped.memory if self.final is not None else self._finals[first]
            sources = [(first, 0, self.layout.size, memory)]
        else:
            sources = [(index, *self._parts[index], self._memory_of_result(index)) for index in self._group]
        split: dict[str, Tensor] = {}
        for index, start, stop, memory in sources:
            self._copy_part(targets, split, start, stop, memory, head)
            if index != self.me:
                shared.read(memory, self.me, self.number)
        for path, whole in split.items():
            targets[path].copy_(whole)
        if len(self._groups) > 1:
            for index in self._group:  # the sums have been read by the first of us, and by nobody else
                if index != self.me:
                    shared.read(self._results[index], self.me, self.number)

    def _copy_part(
        self, targets: dict[str, Tensor], split: dict[str, Tensor], start: int, stop: int, memory: memoryview, head: int
    ) -> None:  # fmt: skip
        import torch

        for leaf, first, count, offset in self.layout.within(start, stop):
            source = flat.typed(memory, leaf.tensor.dtype, head + offset - start, count)
            target = targets[leaf.path]
            if target.is_contiguous():
                target.view(-1)[first : first + count].copy_(source)
            elif count == target.numel():
                target.copy_(source.view(target.shape))
            else:
                if leaf.path not in split:
                    split[leaf.path] = torch.empty(target.shape, dtype=target.dtype, device="cpu")
                split[leaf.path].view(-1)[first : first + count].copy_(source)
            self.progress.more(source.numel() * source.element_size())

    def _memory_of_result(self, index: int) -> memoryview:
        return self.result.mapped.memory if index == self.me else self._results[index]

    def _ask_who_was_strange(self) -> dict[int, tuple[str, ...]]:
        """Something is not finite: which ranks have brought that, and in which leaves. Nobody is waited for longer than usual."""
        mine = tuple(leaf.path for leaf in self.layout.leaves if mean.not_finite(leaf.tensor))[:NAMED]
        met = self._arrive("strange", Told(self.number, self._turn, self.me, leaves=mine))
        got = self._heard(met) if met is not None else {}
        return {index: got[index].leaves for index in sorted(got) if got[index].leaves}

    def foreseen(self) -> Foreseen:
        """What the next round will be like, if it is like this one."""
        return Foreseen(self._group.index(self.me), len(self._group), self._room(self._parts[self.me]))

    def end(self) -> None:
        """Give the memory back. After an interruption it is dropped: the others may still read it."""
        shared.leave(self.contribution.mapped.memory, self.number, gave_up=self.interrupted)
        if not self.interrupted:
            self._pages.give_contribution(self.contribution)
            for own in (self.result, self.final):
                if own is not None:
                    self._pages.give_result(own)
        self._pages.tidy()
        for exchange in self._exchanges:
            with contextlib.suppress(RallypointError):  # without the store, its keys go with the session
                exchange.clean()
        if self._called_off:
            with contextlib.suppress(RallypointError):
                self._store.delete(self._called_off)

    # --- names ---

    @property
    def _exchange_name(self) -> str:
        return f"{self._name}/{self.number}.{self._turn}"

    @property
    def _title(self) -> str:
        return f"{called(self._name)}, round {self.number},"

    def _who(self, indices: Iterable[int]) -> str:
        return who(self.participants[index].identity for index in indices)


_encode = msgspec.msgpack.Encoder().encode
_told = msgspec.msgpack.Decoder(Told).decode


def called(name: str) -> str:
    """An average in a text; `name` is that of its meeting."""
    return f'the average "{name.removeprefix(PREFIX)}"'


def place(own: Own | None) -> Place | None:
    """Where a segment of ours is."""
    return None if own is None else Place(own.mapped.fd, own.mapped.inode, own.mapped.capacity)


@functools.cache
def scope() -> bytes:
    """See `memory.scope`."""
    return memory.scope()
