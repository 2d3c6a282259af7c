"""Sums of several hosts become one mean, by the store.

The first rank of each host has the sums of its host, in the dtype in which sums are kept. The bytes are cut into chunks, each of which
one host completes: it gets the sums of all others, adds them in the order of the hosts, and gives the mean to all. So each host sends
and receives about twice its data, however many there are, all have the same bits, and the store holds a few chunks at a time.

The keys are ephemeral: what a host wrote that dies goes with its session. What was read is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rallypoint.clock import Clock
from rallypoint.errors import BarrierBroken
from rallypoint.primitives import flat, mean
from rallypoint.primitives.flat import ALIGNMENT, Layout, Span
from rallypoint.primitives.progress import Progress
from rallypoint.wire.messages import Get, Value

if TYPE_CHECKING:
    from torch import Tensor

    from rallypoint.store.client import Client

CHUNK_BYTES = 16 * 1024 * 1024
"""Of sums, that one host has in the store at a time: far above what a request costs, far below what a store holds."""

SMALLEST_CHUNK = 256 * 1024

LOOK = 1.0
"""Seconds between two looks at the time, while a chunk is waited for."""


class Wide:
    """Where the sums of a layout lie, if each element has the size of a sum."""

    def __init__(self, layout: Layout) -> None:
        self._runs: list[tuple[int, int, int, int]] = []  # start, stop, wide start, how many times as wide
        at = 0
        for run in layout.runs:
            at = -(-at // ALIGNMENT) * ALIGNMENT
            times = flat.accumulator(run.dtype).itemsize // run.dtype.itemsize
            self._runs.append((run.start, run.stop, at, times))
            at += (run.stop - run.start) * times
        self.size = at

    def at(self, byte: int) -> int:
        """The wide place of a byte of the layout, which is the first of an element or between two runs."""
        found = 0
        for start, stop, wide, times in self._runs:
            if byte < start:
                break
            found = wide + (min(byte, stop) - start) * times
        return found


class Silent(BarrierBroken):
    """Another host sends nothing: time is over, or somebody there is known to be dead."""


def called_off(name: str) -> str:
    """The key that says that somebody in an exchange is dead."""
    return f"{name}/off"


class Exchange:
    """One host's side of it. `name`: of this round, and of no other. `deadline`: seconds from now."""

    def __init__(
        self, store: Client, name: str, layout: Layout, me: int, hosts: int, *, deadline: float, progress: Progress
    ) -> None:  # fmt: skip
        self._store = store
        self._name = name
        self._prefix = f"{name}/"
        self._layout = layout
        self._me = me
        self._hosts = hosts
        self._deadline = deadline
        self._progress = progress
        self._clock = Clock()
        self._written: set[str] = set()  # keys that may be there still

    def run(self, sums: Callable[[int, int], list[tuple[Span, list[Tensor]]]], into: memoryview, head: int, divisor: float) -> bool:
        """Write the mean of all hosts to `into`, from `head` on; whether what this host completed of it is finite. `sums(start, stop)`:
        this host's. Raises Silent when another host does not send its sums."""
        chunks = list(self._chunks())
        finite = True
        former = ""  # the last mean that we gave
        self._progress.begin("exchanging with other hosts", self._layout.size)
        for first in range(0, len(chunks), self._hosts):
            batch = chunks[first : first + self._hosts]
            for owner, (start, stop) in enumerate(batch):
                if owner != self._me:
                    self._write(self._key(first + owner, self._me), _packed(sums(start, stop)))
            if self._me < len(batch):
                start, stop = batch[self._me]
                finite = self._complete(first + self._me, start, stop, sums(start, stop), into, head, divisor) and finite
                if former:  # who has sent for this batch has read all of the one before
                    self._forget(former)
                former = self._key(first + self._me)
            for owner, (start, stop) in enumerate(batch):
                if owner != self._me:
                    whole = self._wait(self._key(first + owner), owner)
                    self._written.discard(self._key(first + owner, self._me))  # the owner has read it, and deleted it
                    flat.typed(into, whole.dtype, head + start, stop - start).copy_(whole)
                self._progress.more(stop - start)
        return finite

    def clean(self) -> None:
        """Everybody is through with it, or will not be: remove what is left of what this host wrote."""
        for key in list(self._written):
            self._forget(key)

    def _write(self, key: str, packed: Tensor) -> None:
        self._written.add(key)
        self._store.set(key, packed, ephemeral=True)

    def _forget(self, key: str) -> None:
        self._store.delete(key)
        self._written.discard(key)

    def _complete(
        self, index: int, start: int, stop: int, own: list[tuple[Span, list[Tensor]]], into: memoryview, head: int, divisor: float
    ) -> bool:
        """The mean of one chunk."""
        import torch

        sent: list[Any] = []
        for host in range(self._hosts):
            if host == self._me:
                sent.append(_packed(own))
            else:
                key = self._key(index, host)
                sent.append(self._wait(key, host))
                self._store.delete(key)
        finite, at = True, 0
        for span, _ in own:
            kind = flat.accumulator(span.run.dtype)
            size = span.length * kind.itemsize
            parts = [one[at : at + size].view(kind) for one in sent]
            target = flat.typed(into, span.run.dtype, head + span.start, span.length)
            finite = mean.combine(target, parts, None, divisor) and finite
            at += -(-size // ALIGNMENT) * ALIGNMENT
        self._write(self._key(index), flat.typed(into, torch.uint8, head + start, stop - start))
        return finite

    def _wait(self, key: str, host: int) -> Any:
        while True:
            # As for what waits for nobody, a server that is slow to answer has the store's timeout.
            reply, body = self._store.ask(Get, key, LOOK, wait=LOOK + self._store.timeout)
            if isinstance(reply, Value):
                return self._store.decoded(reply, body)
            if self._clock.elapsed() >= self._deadline or called_off(self._name) in self._store:
                raise Silent("barrier-broken", f"host {host} of {self._hosts} had sent nothing after {self._clock.elapsed():.1f} s")

    def _key(self, chunk: int, host: int | None = None) -> str:
        return f"{self._prefix}{chunk}/{'mean' if host is None else host}"

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """The layout's bytes in pieces whose sums are no larger than a chunk."""
        widest = max((flat.accumulator(run.dtype).itemsize // run.dtype.itemsize for run in self._layout.runs), default=1)
        size = max(SMALLEST_CHUNK, CHUNK_BYTES // max(1, self._hosts - 1)) // widest // flat.PAGE * flat.PAGE
        for start in range(0, self._layout.size, size):
            yield start, min(self._layout.size, start + size)


def _packed(sums: list[tuple[Span, list[Tensor]]]) -> Tensor:
    """The bytes of these tensors, those of each span at a multiple of ALIGNMENT."""
    import torch

    size = sum(-(-sum(piece.numel() * piece.element_size() for piece in pieces) // ALIGNMENT) * ALIGNMENT for _, pieces in sums)
    packed = torch.empty(size, dtype=torch.uint8, device="cpu")
    at = 0
    for _, pieces in sums:
        begin = at
        for piece in pieces:
            length = piece.numel() * piece.element_size()
            packed[at : at + length].view(piece.dtype).copy_(piece)
            at += length
        at = begin + -(-(at - begin) // ALIGNMENT) * ALIGNMENT
    return packed
