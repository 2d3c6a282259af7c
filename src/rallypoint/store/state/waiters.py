"""Who waits for what, in what order, until when.

A `Waiter` is one request without an answer yet. It stands in one or several lines of one kind: "the
clients that wait for key k", "the queue for lock l". A line is first come, first served; leaving it
from anywhere costs the same. What a kind of thing does with its waiters is its own business
(`store/state/keys.py`, `queues.py`, `locks.py`, `once.py`, `barriers.py`, `watches.py`); this file
knows no requests and no replies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from rallypoint.store.state.replies import Session

NEVER = float("inf")
"""The deadline of what has none."""

SWEEP = 64
"""So many dead entries a heap of deadlines may always have: below that, sweeping costs more than
they do.
"""


class Timed(Protocol):
    deadline: float


T = TypeVar("T", bound=Timed)


class Deadlines(Generic[T]):
    """Things and when their time comes, the earliest first.

    The thing's own `deadline` is the truth: an entry whose time differs from it is dead and is
    skipped when it comes up, or swept out with the others when half of all entries are dead
    (otherwise a lock that is had at once, with a timeout of an hour, would be remembered for an
    hour).
    """

    __slots__ = ("_count", "_dead", "_heap", "next")

    def __init__(self) -> None:
        self.next = (
            NEVER  # when `take` may have something; may be early, as the first entry may be dead
        )
        self._heap: list[tuple[float, int, T]] = []
        self._count = 0
        self._dead = 0

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, thing: T, deadline: float) -> None:
        """The time of `thing` is now `deadline`, whatever it was."""
        if thing.deadline != NEVER:
            thing.deadline = NEVER
            self._died(1)
        thing.deadline = deadline
        if deadline != NEVER:
            self._count += 1
            heappush(self._heap, (deadline, self._count, thing))
            self.next = self._heap[0][0]

    def drop(self, things: Iterable[T]) -> None:
        """These have no time any more."""
        died = 0
        for thing in things:
            if thing.deadline != NEVER:
                thing.deadline = NEVER
                died += 1
        self._died(died)

    def _died(self, entries: int) -> None:
        """So many more are dead."""
        self._dead = dead = self._dead + entries
        if dead == len(self._heap):  # as after a barrier at which everybody gave the same timeout
            self._heap.clear()
        elif dead > SWEEP and dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].deadline == entry[0]]
            heapify(self._heap)
        else:
            return
        self._dead = 0
        self.next = self._heap[0][0] if self._heap else NEVER

    def take(self, now: float) -> T | None:
        """The next thing whose time has come, which then has none any more; None when there is no
        further.
        """
        heap = self._heap
        while self.next <= now:
            deadline, _, thing = heappop(heap)
            self.next = heap[0][0] if heap else NEVER
            if thing.deadline == deadline:
                thing.deadline = NEVER
                return thing
            self._dead -= 1
        return None


class Waiter:
    """A request that waits. `names` are the lines of `lines` it stands in, `since` is when
    it came.
    """

    __slots__ = ("deadline", "lines", "names", "request", "session", "since")

    def __init__(self, session: Session, request: Any, lines: Lines, since: float) -> None:
        self.session = session
        self.request = request
        self.lines = lines
        self.names: set[str] = set()
        self.since = since
        self.deadline = NEVER

    def __repr__(self) -> str:
        return f"<Waiter {self.request!r} of {self.session.identity}>"


Line = OrderedDict[Waiter, None]
"""Who waits for one thing, in order. Not a plain dict: finding the first of one again and again,
each removed, is quadratic.
"""


class Lines(dict[str, Line]):
    """The lines for the things of one kind, by name; a line that nobody stands in is not there.

    `timed_out(now, waiter)` is to be called when a waiter's time is over, while it still stands in
    its lines; it answers the waiter.
    """

    __slots__ = ("timed_out",)

    def __init__(self, timed_out: Callable[[float, Waiter], None]) -> None:
        super().__init__()
        self.timed_out = timed_out

    def first(self, name: str) -> Waiter | None:
        """Who is to be served next."""
        line = self.get(name)
        return next(iter(line)) if line else None

    def all(self, name: str) -> list[Waiter]:
        """Everybody in line, the first first; a list of its own, so that they may leave while it is
        gone through.
        """
        return list(self.get(name, ()))

    def join(self, waiter: Waiter, names: Iterable[str]) -> None:
        """The waiter stands at the end of each of these lines."""
        for name in names:
            line = self.get(name)
            if line is None:
                line = self[name] = OrderedDict()
            line[waiter] = None
            waiter.names.add(name)

    def leave(self, waiter: Waiter, name: str) -> None:
        """The waiter no longer stands in this one of its lines."""
        waiter.names.remove(name)
        line = self[name]
        del line[waiter]
        if not line:
            del self[name]

    def dismiss(self, name: str) -> Line:
        """Nobody stands in this line any more. For lines whose waiters stand in no other one.
        Returns who did.
        """
        return self.pop(name, None) or OrderedDict()


class Waiting:
    """All waiters, whatever they wait for."""

    __slots__ = ("count", "deadlines")

    def __init__(self) -> None:
        self.deadlines: Deadlines[Waiter] = Deadlines()
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def add(self, waiter: Waiter, names: Iterable[str], deadline: float) -> None:
        """Put the waiter at the end of each of these lines of its kind."""
        waiter.lines.join(waiter, names)
        self.count += 1
        self.deadlines.set(waiter, deadline)

    def remove(self, waiter: Waiter) -> None:
        """The waiter leaves all its lines."""
        for name in list(waiter.names):
            waiter.lines.leave(waiter, name)
        self.count -= 1
        self.deadlines.set(waiter, NEVER)

    def dismiss(self, lines: Lines, name: str) -> Line:
        """All who stand in this line leave it, and stand in no other one. Returns them, in
        order.
        """
        line = lines.dismiss(name)
        self.count -= len(line)
        self.deadlines.drop(line)
        return line

    def expire(self, now: float) -> Waiter | None:
        """The next waiter whose time is over; it still stands in its lines. None when there is no
        further.
        """
        return self.deadlines.take(now)
