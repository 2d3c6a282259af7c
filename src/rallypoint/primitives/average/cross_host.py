"""Exchange of the sums of several hosts through the store, which makes them one mean.

The first rank of each host adds up the values of its host, and takes part in the exchange. The
bytes are cut into chunks, each of which one host completes: it gets the sums of all others, adds
them in the order of the hosts, and gives the mean to all. So each host sends and receives about
twice its data, however many hosts there are; all have the same bits; the store holds a few chunks
at a time.

The keys are ephemeral: what a host wrote goes with its session. What was read is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rallypoint.clock import Clock
from rallypoint.errors import BarrierBroken
from rallypoint.primitives.average.layout import ALIGNMENT, PAGE, Layout, TypedRun, typed
from rallypoint.primitives.average.work_split import accumulator, combine
from rallypoint.wire.messages import Get, Value

if TYPE_CHECKING:
    from torch import Tensor

    from rallypoint.store.client.client import Client

CHUNK_BYTES = 16 * 1024 * 1024
"""Bytes of sums that one host has in the store at a time: far above what a request costs, far below
what a store holds."""

SMALLEST_CHUNK = 256 * 1024

LOOK = 1.0
"""Seconds between two looks at the time, while a chunk is waited for."""

Sums = Callable[[TypedRun, "Tensor"], object]
"""Writes this host's sums of the elements to a tensor of their accumulator's dtype."""


class HostSilent(BarrierBroken):
    """Another host sends nothing: time is over, or a rank there is known to be dead."""


def called_off(name: str) -> str:
    """Return the key that says that a rank of an exchange is dead."""
    return f"{name}/off"


class Exchange:
    """One host's side of an exchange.

    `name`: of this turn of the round, and of no other. `into`: where the mean goes, from byte
    `head` on. `seconds`: after which other hosts are waited for no longer.
    """

    def __init__(
        self, store: Client, name: str, layout: Layout, me: int, hosts: int, seconds: float
    ) -> None:
        self._store = store
        self._name = name
        self._layout = layout
        self._me = me
        self._hosts = hosts
        self._seconds = seconds
        self._clock = Clock()
        self._written: set[str] = set()  # keys that may still be there

    def run(self, sums: Sums, into: memoryview, head: int, divisor: float) -> bool:
        """Write the mean of all hosts; tell whether what this host completed of it is finite.

        Raises HostSilent when another host does not send its sums.
        """
        chunks = list(self._chunks())
        finite = True
        former = ""  # key of the last mean that this host gave
        for first in range(0, len(chunks), self._hosts):
            batch = list(enumerate(chunks[first : first + self._hosts]))
            for owner, (start, stop) in batch:
                if owner != self._me:
                    self._write(self._key(first + owner, self._me), self._packed(sums, start, stop))
            for owner, (start, stop) in batch:
                if owner == self._me:
                    key = self._key(first + owner)
                    finite = (
                        self._complete(first, start, stop, sums, into, head, divisor) and finite
                    )
                    if former:  # the others have read it: they have sent for this batch
                        self._forget(former)
                    former = key
                    self._write(key, self._bytes(into, head, start, stop))
            for owner, (start, stop) in batch:
                if owner != self._me:
                    mean = self._wait(self._key(first + owner), owner)
                    self._written.discard(
                        self._key(first + owner, self._me)
                    )  # deleted by the owner
                    self._bytes(into, head, start, stop).copy_(mean)
        return finite

    def clean(self) -> None:
        """Delete what is left of what this host wrote. Nobody needs it any more."""
        for key in list(self._written):
            self._forget(key)

    def _complete(
        self,
        first: int,
        start: int,
        stop: int,
        sums: Sums,
        into: memoryview,
        head: int,
        divisor: float,
    ) -> bool:
        """Write the mean of this host's chunk of a batch."""
        sent = []
        for host in range(self._hosts):
            if host == self._me:
                sent.append(self._packed(sums, start, stop))
            else:
                key = self._key(first + self._me, host)
                sent.append(self._wait(key, host))
                self._store.delete(key)
        finite = True
        for run, at, size in self._places(start, stop):
            parts = [packed[at : at + size].view(accumulator(run.dtype)) for packed in sent]
            target = typed(into, run.dtype, head + run.start, run.length)
            finite = combine(target, parts, [1.0] * len(parts), divisor) and finite
        return finite

    def _packed(self, sums: Sums, start: int, stop: int) -> Tensor:
        """Return this host's sums for these bytes of the layout, as bytes."""
        import torch

        places = list(self._places(start, stop))
        packed = torch.empty(places[-1][1] + places[-1][2], dtype=torch.uint8, device="cpu")
        for run, at, size in places:
            sums(run, packed[at : at + size].view(accumulator(run.dtype)))
        return packed

    def _places(self, start: int, stop: int) -> Iterator[tuple[TypedRun, int, int]]:
        """Yield (elements, where their sums begin, bytes of them) for a packed chunk."""
        at = 0
        for run in self._layout.runs_in(start, stop):
            size = run.length * accumulator(run.dtype).itemsize
            yield run, at, size
            at += -(-size // ALIGNMENT) * ALIGNMENT

    def _bytes(self, into: memoryview, head: int, start: int, stop: int) -> Tensor:
        import torch

        return typed(into, torch.uint8, head + start, stop - start)

    def _write(self, key: str, packed: Tensor) -> None:
        self._written.add(key)
        self._store.set(key, packed, ephemeral=True)

    def _forget(self, key: str) -> None:
        self._store.delete(key)
        self._written.discard(key)

    def _wait(self, key: str, host: int) -> Any:
        while True:
            # A server that is slow to answer has the store's timeout, as for all that does not
            # wait.
            reply, body = self._store.ask(Get, key, LOOK, wait=LOOK + self._store.timeout)
            if isinstance(reply, Value):
                return self._store.decoded(reply, body)
            seconds = self._clock.elapsed()
            if seconds >= self._seconds or called_off(self._name) in self._store:
                text = f"sums of host {host} of {self._hosts} had not come after {seconds:.1f} s"
                raise HostSilent("barrier-broken", text)

    def _key(self, chunk: int, host: int | None = None) -> str:
        return f"{self._name}/{chunk}/{'mean' if host is None else host}"

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """Yield the layout's bytes in pieces whose sums are no larger than a chunk."""
        widest = max(
            accumulator(run.dtype).itemsize // run.dtype.itemsize for run in self._layout.runs
        )
        size = max(SMALLEST_CHUNK, CHUNK_BYTES // (self._hosts - 1)) // widest // PAGE * PAGE
        for start in range(0, self._layout.size, size):
            yield start, min(self._layout.size, start + size)
