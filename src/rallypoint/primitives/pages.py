"""The shared memory in which ranks of one host average: what this process has of its own, and what it has mapped of others'.

Each rank has two segments in a round: its *contribution*, which the others read, and a *result*, the part of the mean that it computes
for all. They are kept and used again, since fresh pages cost ten times as much as what is done with them. When that may be:

- A contribution: when everybody who reads it has met after reading it, or will not return what he read.
- A result: when every reader has written the round's number into his word at its head. (By the next meeting of the same ranks all have,
  so that is only looked at then. Who was stopped in the middle of reading is waited for by nobody: his segment is left to him, and
  another one is taken.)

In an exception nobody knows who reads what: the segments are dropped, and who has them mapped keeps them as long as he needs them.
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.host import memory
from rallypoint.host.memory import Mapped

if TYPE_CHECKING:
    from rallypoint.store.client import Client

PAGE = 4096
_LEFT, _GAVE_UP, _READERS = 0, 8, 64  # offsets at the head of a segment

ANY_ROUND = 2**63 - 1
"""The number of a round whose number is not known."""

IDLE_ROUNDS = 16
"""Rounds after which a segment that none of them needed is freed: averages of several names, big and small in turn, find theirs again."""

NAMES = 256
"""Averages whose last round is remembered."""

KEPT = 4
"""Free segments of either kind at most."""


def head(readers: int) -> int:
    """Bytes at the head of a segment that so many look into."""
    return -(-(_READERS + 8 * readers) // PAGE) * PAGE


class Foreseen(NamedTuple):
    """What a thread's last round of a name was like. The next one is expected to be so."""

    slot: int  # which part of the mean was mine, of how many
    parts: int
    room: int  # bytes of my result


class Pages:
    """What one store's averages use in this process. Threads may share it: whatever changes is one step for the interpreter."""

    def __init__(self) -> None:
        self.private = False  # others could not look into this process
        self.foreseen: OrderedDict[tuple[str, int, int], Foreseen] = OrderedDict()  # by name, size and thread
        self._rounds = 0
        self._contributions: list[Own] = []
        self._results: list[Own] = []
        self._others: dict[tuple[int, int], tuple[memoryview, int, int]] = {}  # (pid, inode): mapping, fd, last used

    def __repr__(self) -> str:
        own = sum(one.mapped.capacity for one in (*self._contributions, *self._results))
        return f"<Pages: {own} bytes free, {len(self._others)} segments of others>"

    def foresee(self, key: tuple[str, int, int], foreseen: Foreseen) -> None:
        """Remember it for the next round."""
        self.foreseen[key] = foreseen
        while len(self.foreseen) > NAMES:
            self.foreseen.popitem(last=False)

    def contribution(self, size: int) -> Own:
        """A segment for `size` bytes behind its head, which nobody reads."""
        return self._taken(self._contributions, size)

    def result(self, size: int) -> Own:
        """Likewise; see `Own.unread` for whether somebody still reads it."""
        return self._taken(self._results, size)

    def unread_result(self, size: int) -> Own:
        """A result that certainly nobody reads."""
        for one in list(self._results):
            if one.mapped.capacity >= size and one.unread() and _took(self._results, one):
                return one
        return Own(size)

    def give_contribution(self, own: Own) -> None:
        """It may be written to again."""
        self._given(self._contributions, own)

    def give_result(self, own: Own) -> None:
        """It may be written to again as soon as it is unread."""
        self._given(self._results, own)

    def of(self, pid: int, fd: int, inode: int, size: int) -> memoryview:
        """Somebody else's segment. Raises OSError or `memory.Unfit` when it cannot be had."""
        known = self._others.get((pid, inode))
        mapping = known[0] if known is not None and len(known[0]) >= size else memory.attach(pid, fd, inode, size)
        self._others[pid, inode] = mapping, fd, self._rounds
        return mapping

    def tidy(self) -> None:
        """A round is over: let go of what is not used any more, here and of processes that are gone."""
        self._rounds += 1
        for free in (self._contributions, self._results):
            for own in list(free):
                if self._rounds - own.used > IDLE_ROUNDS or len(free) > KEPT:
                    _took(free, own)
        for (pid, inode), (_, fd, used) in list(self._others.items()):
            if used < self._rounds - 1 and not memory.published(pid, fd, inode):
                self._others.pop((pid, inode), None)

    def _taken(self, free: list[Own], size: int) -> Own:
        for own in reversed(list(free)):  # the last one given back: the same one for a thread that asks again and again
            if size <= own.mapped.capacity <= max(4 * size, memory.SMALLEST) and _took(free, own):
                return own
        return Own(size)

    def _given(self, free: list[Own], own: Own) -> None:
        own.used = self._rounds
        free.append(own)


class Own:
    """A segment of this process."""

    __slots__ = ("_readers", "_round", "mapped", "used")

    def __init__(self, size: int) -> None:
        self.mapped = Mapped(size)
        self.used = 0
        self._round = 0
        self._readers: Sequence[int] = ()

    def __repr__(self) -> str:
        return f"<{self.mapped!r}, {'unread' if self.unread() else 'read'} in round {self._round}>"

    def lend(self, round: int, readers: Sequence[int]) -> None:
        """These readers (their numbers in the round) will read it, or be known not to."""
        self._round, self._readers = round, readers

    def take_back(self, round: int) -> None:
        """Nobody will read what was lent in this round. (What is read of an earlier one still is.)"""
        if self._round == round:
            self._readers = ()

    def unread(self) -> bool:
        """Whether all readers have read it."""
        here = self.mapped.memory
        return all(_word(here, _READERS + 8 * reader) == self._round for reader in self._readers)


def read(memory: memoryview, reader: int, round: int) -> None:
    """This reader has read what it wanted."""
    _write(memory, _READERS + 8 * reader, round)


def begin(memory: memoryview) -> None:
    """A contribution is to be used again: nobody has left its round yet."""
    _write(memory, _LEFT, 0)
    _write(memory, _GAVE_UP, 0)


def leave(memory: memoryview, round: int, *, gave_up: bool) -> None:
    """The owner of a contribution has nothing more to do with the round: he has a result, or was told of its failure; or he gave up."""
    _write(memory, _GAVE_UP if gave_up else _LEFT, round)


def has_left(memory: memoryview, round: int) -> bool:
    """Whether the owner of this contribution is through with the round."""
    return _word(memory, _LEFT) >= round


def has_given_up(memory: memoryview, round: int) -> bool:
    """Whether the owner of this contribution was interrupted in this round."""
    return _word(memory, _GAVE_UP) in (round, ANY_ROUND)


def _word(memory: memoryview, at: int) -> int:
    return int.from_bytes(memory[at : at + 8], "little")


def _write(memory: memoryview, at: int, number: int) -> None:
    memory[at : at + 8] = number.to_bytes(8, "little")


def _took(free: list[Own], own: Own) -> bool:
    try:
        free.remove(own)  # one step: of two threads one has it
    except ValueError:
        return False
    return True


_pages: weakref.WeakKeyDictionary[Client, Pages] = weakref.WeakKeyDictionary()


def pages(store: Client) -> Pages:
    """Those of this store in this process. They go with the store."""
    found = _pages.get(store)
    if found is None:
        found = _pages.setdefault(store, Pages())
    return found


def let_go(store: Client) -> None:
    """The store is closed: nobody averages with it any more. A round that still runs in another thread keeps what it has."""
    _pages.pop(store, None)


os.register_at_fork(after_in_child=_pages.clear)  # a child must not write to its parent's memory
