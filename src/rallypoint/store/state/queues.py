"""Queues: what is put first is taken first, by whoever has waited longest. Pure.

An item's number is the revision at which it was put, so the order of the numbers is the order of
the queue, also for items that come back: one that was held by a session which ended stands where it
stood.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from rallypoint.store.state.quotas import ITEM_BYTES, QUEUE_BYTES, Large
from rallypoint.store.state.replies import Answer, Ledger, Session
from rallypoint.store.state.waiters import Lines, Waiter
from rallypoint.wire.messages import (
    Absent,
    Done,
    Integer,
    Length,
    Pop,
    Push,
    Settle,
    TimedOut,
    Value,
)


class Item:
    """A value in a queue, held by a session, or on its way to one."""

    __slots__ = ("large", "number", "queue", "seq", "size", "value")

    def __init__(
        self, queue: str, number: int, value: bytes, large: Large | None, size: int
    ) -> None:
        self.queue = queue
        self.number = number
        self.value = value
        self.large = large
        self.size = size
        self.seq = 0  # of the request that it went out to

    def __lt__(self, other: Item) -> bool:
        return self.number < other.number

    def thing(self) -> object:
        """Whatever holds the value's bytes."""
        return self.value if self.large is None else self.large


class _Queue:
    """One queue that is not empty. All that came back was taken before all that was never taken."""

    __slots__ = ("back", "fresh")

    def __init__(self) -> None:
        self.back: list[Item] = []  # a heap
        self.fresh: deque[Item] = deque()

    def __len__(self) -> int:
        return len(self.back) + len(self.fresh)

    def take(self) -> Item:
        return heappop(self.back) if self.back else self.fresh.popleft()


def _weight(name: str) -> int:
    """Bytes that a queue is charged beside its items."""
    return QUEUE_BYTES + len(name.encode())


class Queues:
    """All queues, and who waits for their items."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._queues: dict[str, _Queue] = {}
        self._lines = Lines(self._timed_out)  # nobody waits for a queue that is not empty

    def push(self, now: float, session: Session, request: Push, large: Large | None) -> Answer:
        ledger, budget, name, seq = self._ledger, self._ledger.budget, request.queue, request.seq
        if large is None and not request.value:
            return ledger.failed(request, "bad-request", "a value has at least one byte")
        size = len(request.value) if large is None else large.size
        queue = self._queues.get(name)
        growth = size + ITEM_BYTES + (_weight(name) if queue is None else 0)
        refused = budget.refuse_name(name, seq, ledger.revision) or budget.refuse_value(
            size, growth, seq, ledger.revision
        )
        if refused is not None:
            return refused, None
        budget.used += size + ITEM_BYTES
        item = Item(name, ledger.changed(), request.value, large, size)
        waiter = self._lines.first(name)
        if waiter is not None:
            self._hand_over(waiter, item)
            return Integer(seq, ledger.revision, 0), None
        if queue is None:
            queue = self._begin(name)
        queue.fresh.append(item)
        return Integer(seq, ledger.revision, len(queue)), None

    def pop(self, now: float, session: Session, request: Pop, large: Large | None) -> Answer | None:
        name, timeout = request.queue, request.timeout
        queue = self._queues.get(name)
        if queue is not None:
            item = queue.take()
            if not queue:
                del self._queues[name]
                self._ledger.budget.used -= _weight(name)
            return self._give(session, request, item), item.large
        if timeout is None:
            return Absent(request.seq, self._ledger.revision), None
        if not timeout > 0:
            return TimedOut(request.seq, self._ledger.revision), None
        return self._ledger.wait(now, session, request, timeout, self._lines, (name,))

    def settle(self, now: float, session: Session, request: Settle, large: Large | None) -> Answer:
        item = session.items.get(request.item)
        if item is None or item.queue != request.queue or request.taken not in (0, item.seq):
            return Absent(request.seq, self._ledger.revision), None
        del session.items[item.number]
        if (kept := session.kept.get(item.seq)) is not None:
            kept.item = None  # a Cancel that comes late takes nothing back
        if request.accept:
            # Whoever does not get this answer does not know that the item is gone: a Cancel of the
            # request brings it back.
            self._ledger.keep(
                session, request.seq, item.thing(), item.size, stored=True, changed=True, item=item
            )
            self._free(item)
            self._ledger.changed()
        else:
            self._put_back(item)
        return Done(request.seq, self._ledger.revision), None

    def length(self, now: float, session: Session, request: Length, large: Large | None) -> Answer:
        return Integer(
            request.seq, self._ledger.revision, len(self._queues.get(request.queue, ()))
        ), None

    def undo(self, session: Session, item: Item) -> None:
        """Nobody has looked at the reply with which this item left, to its taker or for good: it
        comes back. The reply must have been forgotten before."""
        if session.items.pop(item.number, None) is None:
            self._ledger.budget.take_back(item.size + ITEM_BYTES, item.thing())
        self._put_back(item)

    def end(self, session: Session) -> None:
        """What the session holds comes back, in its old order."""
        items = sorted(session.items.values())
        session.items.clear()
        for item in items:
            self._put_back(item)

    def _give(self, session: Session, request: Pop, item: Item) -> Value:
        ledger = self._ledger
        item.seq = request.seq
        ledger.keep(
            session, request.seq, item.thing(), item.size, stored=True, changed=True, item=item
        )
        if request.hold:
            session.items[item.number] = item
        else:
            self._free(item)
        return Value(request.seq, ledger.changed(), item.number, item.value)

    def _hand_over(self, waiter: Waiter, item: Item) -> None:
        self._ledger.answer(waiter, self._give(waiter.session, waiter.request, item), item.large)

    def _put_back(self, item: Item) -> None:
        self._ledger.changed()
        waiter = self._lines.first(item.queue)
        if waiter is not None:
            self._hand_over(waiter, item)
            return
        queue = self._queues.get(item.queue)
        if queue is None:
            queue = self._begin(item.queue)
        heappush(queue.back, item)

    def _begin(self, name: str) -> _Queue:
        """A queue in which there was nothing."""
        queue = self._queues[name] = _Queue()
        self._ledger.budget.used += _weight(name)
        return queue

    def _free(self, item: Item) -> None:
        self._ledger.budget.free(item.size + ITEM_BYTES, item.thing())

    def _timed_out(self, now: float, waiter: Waiter) -> None:
        self._ledger.answer(waiter, TimedOut(waiter.request.seq, self._ledger.revision))
