"""Shared memory of averages: the segments of this process, and those of other processes that it has
mapped.

A rank writes its value into a segment of its own, which the other ranks of its host read; then the
part of the mean that it computes is written over its own value, and the others copy that. A segment
is used again, since fresh pages cost ten times as much as the work on them, once every reader has
written the round's number into its word at the segment's head. The next meeting of the same ranks
comes after that, so two segments are enough for each thread.

After an interruption it is not known which rank reads what: the segment is dropped, and lives as
long as a process has it mapped."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rallypoint.host import memory
from rallypoint.host.memory import Mapped
from rallypoint.primitives.average.participants import Offer, SegmentPlace

if TYPE_CHECKING:
    from rallypoint.store.client.client import Client

PAGE = 4096
_LEFT, _GAVE_UP, _READERS = 0, 8, 64  # offsets of words at the head of a segment

ANY_ROUND = 2**63 - 1
"""Number of a round whose number is not known."""

IDLE_ROUNDS = 16
"""Rounds after which an unused segment is freed: a small and a large average in turn keep
theirs."""

KEPT = 6
"""Maximum free segments of one store: two for each of three threads or sizes in turn."""


def head_of(readers: int) -> int:
    """Return the bytes at the head of a segment with so many readers."""
    return -(-(_READERS + 8 * readers) // PAGE) * PAGE


class OwnSegment:
    """Segment of this process, with the round and the readers to which it was last lent."""

    __slots__ = ("_readers", "_round", "mapped", "used")

    def __init__(self, size: int) -> None:
        self.mapped = Mapped(size)
        self.used = 0
        self._round = 0
        self._readers: Sequence[int] = ()

    def __repr__(self) -> str:
        return f"<{self.mapped!r}, {'read' if self.is_read() else 'unread'} in round {self._round}>"

    @property
    def place(self) -> SegmentPlace:
        return SegmentPlace(self.mapped.fd, self.mapped.inode, self.mapped.capacity)

    def begin(self) -> None:
        """Reset the words of earlier rounds."""
        _write(self.mapped.memory, _LEFT, 0)
        _write(self.mapped.memory, _GAVE_UP, 0)

    def lend(self, number: int, readers: Sequence[int]) -> None:
        """Leave the segment to these participants of the round until each has called
        `mark_read`."""
        self._round, self._readers = number, readers

    def is_read(self) -> bool:
        """Tell whether every reader of the last round has read it."""
        words = (_word(self.mapped.memory, _READERS + 8 * reader) for reader in self._readers)
        return all(word == self._round for word in words)

    def leave(self, number: int) -> None:
        """Tell the readers that the owner's round is over."""
        _write(self.mapped.memory, _LEFT, number)

    def give_up(self, number: int) -> None:
        """Tell the readers that the owner was interrupted in the round."""
        _write(self.mapped.memory, _GAVE_UP, number)


def mark_read(segment: memoryview, reader: int, number: int) -> None:
    """Tell the owner of a segment that this reader needs no more of it."""
    _write(segment, _READERS + 8 * reader, number)


def has_left(segment: memoryview, number: int) -> bool:
    """Tell whether the owner's round is over."""
    return _word(segment, _LEFT) >= number


def has_given_up(segment: memoryview, number: int) -> bool:
    """Tell whether the owner was interrupted in the round."""
    return _word(segment, _GAVE_UP) in (number, ANY_ROUND)


class SegmentCache:
    """Segments that the averages of one store use again in this process. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may average as well
        self._rounds = 0
        self._free: list[OwnSegment] = []
        self._others: dict[tuple[int, int], tuple[memoryview, int, int]] = {}
        # (pid, inode): mapping, descriptor, last round

    def __repr__(self) -> str:
        own = sum(one.mapped.capacity for one in self._free)
        return f"<SegmentCache: {own} bytes free, {len(self._others)} segments of others>"

    def take(self, size: int) -> OwnSegment:
        """Return a segment of `size` bytes or more that nobody reads. Raises OSError."""
        most = max(4 * size, memory.SMALLEST)
        with self._lock:
            for one in reversed(self._free):
                if size <= one.mapped.capacity <= most and one.is_read():
                    self._free.remove(one)
                    one.begin()
                    return one
        return OwnSegment(size)

    def give(self, own: OwnSegment) -> None:
        """Keep a segment for another round."""
        with self._lock:
            own.used = self._rounds
            self._free.append(own)

    def open(self, offer: Offer) -> memoryview:
        """Map the segment of another process. Raises OSError or `memory.Unfit`."""
        there = offer.place
        assert there is not None
        with self._lock:
            known = self._others.get((offer.pid, there.inode))
            if known is None:
                found = memory.attach(offer.pid, there.fd, there.inode, there.capacity)
            else:
                found = known[0]
            self._others[offer.pid, there.inode] = found, there.fd, self._rounds
            return found

    def end_round(self) -> None:
        """Free segments that are not used any more, and mappings of processes that have gone."""
        with self._lock:
            self._rounds += 1
            recent = [one for one in self._free if self._rounds - one.used <= IDLE_ROUNDS]
            self._free = recent[-KEPT:]
            for key, (_, fd, used) in list(self._others.items()):
                if used < self._rounds - 1 and not memory.published(key[0], fd, key[1]):
                    del self._others[key]


def _word(segment: memoryview, at: int) -> int:
    return int.from_bytes(segment[at : at + 8], "little")


def _write(segment: memoryview, at: int, number: int) -> None:
    segment[at : at + 8] = number.to_bytes(8, "little")


_caches: weakref.WeakKeyDictionary[Client, SegmentCache] = weakref.WeakKeyDictionary()


def cache_of(store: Client) -> SegmentCache:
    """Return the segments of a store in this process."""
    found = _caches.get(store)
    return found if found is not None else _caches.setdefault(store, SegmentCache())


def forget(store: Client) -> None:
    """Free the segments of a closed store, but for those of rounds in other threads."""
    _caches.pop(store, None)


os.register_at_fork(after_in_child=_caches.clear)  # a child must not write to its parent's memory
