"""Queues: first in, first out, to the client that has waited longest. Pure.

An item's number is the revision at which it was put, so the order of the numbers is the order of
the queue, also for items that come back: one that was held by a session which ended stands where it
stood.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from rallypoint.store.state.quotas import ITEM_BYTES, QUEUE_BYTES, Stored, bytes_of, check_bytes
from rallypoint.store.state.replies import Held, Kind, Ledger, Session
from rallypoint.wire.messages import (
    Absent,
    Done,
    Integer,
    Length,
    Pop,
    Push,
    Reply,
    Settle,
    TimedOut,
    Value,
)


class Item(Held):
    """A value in a queue, held by a session, or on its way to one."""

    __slots__ = ("number", "queue", "seq", "value")

    def __init__(self, queue: str, number: int, value: Stored) -> None:
        super().__init__(bytes_of(value) + ITEM_BYTES)
        self.holders = 1  # the queue, or the session that holds it
        self.queue = queue
        self.number = number
        self.value = value
        self.seq = 0  # number of the Pop that it went out to

    def __lt__(self, other: Item) -> bool:
        return self.number < other.number


class _Queue:
    """One queue that is not empty. Items that came back were taken before all that are fresh."""

    __slots__ = ("back", "fresh")

    def __init__(self) -> None:
        self.back: list[Item] = []  # a heap
        self.fresh: deque[Item] = deque()

    def __len__(self) -> int:
        return len(self.back) + len(self.fresh)

    def take(self) -> Item:
        return heappop(self.back) if self.back else self.fresh.popleft()


def _weight(name: str) -> int:
    """Return the bytes that a queue is charged beside its items."""
    return QUEUE_BYTES + len(name.encode())


class Queues(Kind):
    """All queues. Nobody waits for a queue that is not empty."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._queues: dict[str, _Queue] = {}

    def push(self, session: Session, request: Push) -> Reply:
        name, size = request.queue, bytes_of(request.value)
        check_bytes(request.value)
        self._budget.check_name(name)
        beside = 0 if name in self._queues else _weight(name)
        self._budget.check_value(size, size + ITEM_BYTES + beside)
        item = Item(name, self._ledger.changed(), request.value)
        self._budget.used += item.weight
        length = 0 if self._handed_over(item) else self._put(item)
        return Integer(request.seq, self._ledger.revision, length)

    def pop(self, session: Session, request: Pop) -> Reply | None:
        name, timeout = request.queue, request.timeout
        queue = self._queues.get(name)
        if queue is not None:
            item = queue.take()
            if not queue:
                del self._queues[name]
                self._budget.used -= _weight(name)
            return self._give(session, request, item)
        if timeout is None:
            return Absent(request.seq, self._ledger.revision)
        if not timeout > 0:
            return TimedOut(request.seq, self._ledger.revision)
        return self._ledger.wait(session, request, self._lines, name)

    def settle(self, session: Session, request: Settle) -> Reply:
        ledger = self._ledger
        item = session.items.get(request.item)
        if item is None or item.queue != request.queue or request.taken not in (0, item.seq):
            return Absent(request.seq, ledger.revision)
        del session.items[item.number]
        if session.kept.pop(item.seq, None) is not None:
            ledger.let_go(item)  # a Cancel of the Pop that comes late takes nothing back
        if request.accept:
            # The client may not get this reply, and then does not know that the item is gone: a
            # Cancel of the request brings it back.
            ledger.keep(session, request.seq, item)
            ledger.let_go(item)
            ledger.changed()
        else:
            self._put_back(item)
        return Done(request.seq, ledger.revision)

    def length(self, session: Session, request: Length) -> Reply:
        length = len(self._queues.get(request.queue, ()))
        return Integer(request.seq, self._ledger.revision, length)

    def undo(self, session: Session, item: Item) -> None:
        """Take back an item whose reply nobody has looked at."""
        if session.items.pop(item.number, None) is None:
            item.holders += 1
        self._put_back(item)

    def end(self, session: Session) -> None:
        super().end(session)
        items = sorted(session.items.values())
        session.items.clear()
        for item in items:
            self._put_back(item)

    def _give(self, session: Session, request: Pop, item: Item) -> Value:
        ledger = self._ledger
        item.seq = request.seq
        ledger.keep(session, request.seq, item)
        if request.hold:
            session.items[item.number] = item
        else:
            ledger.let_go(item)
        return Value(request.seq, ledger.changed(), item.number, item.value)

    def _handed_over(self, item: Item) -> bool:
        """Give the item to the first waiter, if there is one."""
        waiter = self._lines.first(item.queue)
        if waiter is not None:
            self._ledger.answer(waiter, self._give(waiter.session, waiter.request, item))
        return waiter is not None

    def _put_back(self, item: Item) -> None:
        self._ledger.changed()
        if not self._handed_over(item):
            self._put(item, back=True)

    def _put(self, item: Item, *, back: bool = False) -> int:
        """Put the item into its queue; return the queue's length."""
        queue = self._queues.get(item.queue)
        if queue is None:
            queue = self._queues[item.queue] = _Queue()
            self._budget.used += _weight(item.queue)
        if back:
            heappush(queue.back, item)
        else:
            queue.fresh.append(item)
        return len(queue)
