"""A clock you move: time stands still until the test says otherwise.

Whatever takes a `Clock` takes a `ManualClock`, so a test of "after 30 seconds" needs no 30 seconds
and no luck.
"""

from __future__ import annotations

import threading

from rallypoint.clock import Clock
from rallypoint.errors import UsageError

WALL = 1_700_000_000.0
"""Seconds since 1970 at which a new clock stands unless told otherwise: a fixed moment (2023-11-14,
22:13:20 UTC), so that dates in what a test prints are the same every day."""


class ManualClock(Clock):
    """A `Clock` that moves only by `advance` (and `set_wall`). May be used from any thread.

    >>> clock = ManualClock()
    >>> clock.advance(30.0)
    >>> clock.elapsed()
    30.0
    """

    def __init__(self, *, wall: float = WALL) -> None:
        """`wall`: seconds since 1970 that the wall clock shows at first. The monotonic one starts
        at 0.
        """
        self._lock = threading.Lock()
        self._monotonic = 0.0
        self._wall = wall
        super().__init__()

    def __repr__(self) -> str:
        return f"<ManualClock at {self.monotonic():g} s, wall {self.date()}>"

    def monotonic(self) -> float:
        """Seconds that `advance` was told in all."""
        return self._monotonic

    def wall(self) -> float:
        """Seconds since 1970: where it began or was set, and what `advance` was told since."""
        return self._wall

    def advance(self, seconds: float) -> None:
        """Move both clocks forward, in one step. `UsageError` when `seconds` is negative: a
        monotonic clock is never set back."""
        if not seconds >= 0:
            raise UsageError("usage", f"a clock is moved forward, not by {seconds!r} s")
        with self._lock:
            self._monotonic += seconds
            self._wall += seconds

    def set_wall(self, wall: float) -> None:
        """Let the wall clock jump to `wall` seconds since 1970, back too, as it does when someone
        sets the date; the monotonic clock stays."""
        with self._lock:
            self._wall = wall
