"""Requests that wait: for which thing, in what order, until when.

A `Waiter` is one request without an answer yet. It stands in one or several lines of one kind: "the
clients that wait for key k", "the queue for lock l". A line is first come, first served; leaving it
from anywhere costs the same. This file knows no requests and no replies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from rallypoint.store.state.replies import Kind, Session

NEVER = float("inf")
"""The deadline of a thing that has none."""

SWEEP = 64
"""Dead entries that a heap of deadlines may always have: below that, sweeping costs more than they
do."""


class Timed(Protocol):
    deadline: float


T = TypeVar("T", bound=Timed)


class Deadlines(Generic[T]):
    """Things with their deadlines, the earliest first.

    The thing's own `deadline` is the truth: an entry whose time differs from it is dead. It is
    skipped when it comes up, or swept out with the others when half of all entries are dead
    (otherwise a lock that is granted at once, with a timeout of an hour, would be remembered for an
    hour).
    """

    __slots__ = ("_count", "_dead", "_heap", "next")

    def __init__(self) -> None:
        # The time at which `take` may have something; early when the first entry is dead.
        self.next = NEVER
        self._heap: list[tuple[float, int, T]] = []
        self._count = 0
        self._dead = 0

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, thing: T, deadline: float) -> None:
        """Replace the deadline of `thing`."""
        if thing.deadline != NEVER:
            self.clear(thing)
        thing.deadline = deadline
        if deadline != NEVER:
            self._count += 1
            heappush(self._heap, (deadline, self._count, thing))
            self.next = self._heap[0][0]

    def clear(self, thing: T) -> None:
        """Take the deadline of `thing` away."""
        if thing.deadline != NEVER:
            thing.deadline = NEVER
            self._sweep()

    def _sweep(self) -> None:
        """Count one more dead entry, and remove all when they are half of the heap."""
        self._dead += 1
        if self._dead < len(self._heap) and (
            self._dead <= SWEEP or self._dead * 2 <= len(self._heap)
        ):
            return
        self._heap = [entry for entry in self._heap if entry[2].deadline == entry[0]]
        heapify(self._heap)
        self._dead = 0
        self.next = self._heap[0][0] if self._heap else NEVER

    def take(self, now: float) -> T | None:
        """Take the next thing whose deadline has passed; it has none any more. None at the end."""
        while self.next <= now:
            deadline, _, thing = heappop(self._heap)
            self.next = self._heap[0][0] if self._heap else NEVER
            if thing.deadline == deadline:
                thing.deadline = NEVER
                return thing
            self._dead -= 1
        return None


class Waiter:
    """A request that waits since `since`, in the lines `names` of its kind."""

    __slots__ = ("deadline", "lines", "names", "request", "session", "since")

    def __init__(self, session: Session, request: Any, lines: Lines, since: float) -> None:
        self.session = session
        self.request = request
        self.lines = lines
        self.names: set[Hashable] = set()
        self.since = since
        self.deadline = NEVER

    def __repr__(self) -> str:
        return f"<Waiter {self.request!r} of {self.session.identity}>"


Line = OrderedDict[Waiter, None]
"""The waiters for one thing, in order. Not a plain dict: finding the first of one again and again,
each removed, is quadratic."""


class Lines(dict[Hashable, Line]):
    """The lines of one kind, by the name of the thing. Empty lines are removed."""

    __slots__ = ("kind",)

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind

    def first(self, name: Hashable) -> Waiter | None:
        """Return the waiter that is to be served next."""
        line = self.get(name)
        return next(iter(line)) if line else None

    def all(self, name: Hashable) -> list[Waiter]:
        """Return a copy of a line, so that waiters may leave while it is gone through."""
        return list(self.get(name, ()))

    def join(self, waiter: Waiter, names: Iterable[Hashable]) -> None:
        """Put the waiter at the end of each of these lines."""
        for name in names:
            self.setdefault(name, OrderedDict())[waiter] = None
            waiter.names.add(name)

    def leave(self, waiter: Waiter, name: Hashable) -> None:
        """Remove the waiter from one of its lines."""
        waiter.names.remove(name)
        line = self[name]
        del line[waiter]
        if not line:
            del self[name]


class Waiting:
    """All waiters of all kinds."""

    __slots__ = ("count", "deadlines")

    def __init__(self) -> None:
        self.deadlines: Deadlines[Waiter] = Deadlines()
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def add(self, waiter: Waiter, names: Iterable[Hashable], deadline: float) -> None:
        """Put the waiter at the end of each of these lines of its kind."""
        waiter.lines.join(waiter, names)
        self.count += 1
        self.deadlines.set(waiter, deadline)

    def remove(self, waiter: Waiter) -> None:
        """Remove the waiter from all its lines."""
        lines = waiter.lines
        for name in waiter.names:
            line = lines[name]
            del line[waiter]
            if not line:
                del lines[name]
        waiter.names.clear()
        self.count -= 1
        self.deadlines.clear(waiter)
