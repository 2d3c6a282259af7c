"""Time as an argument.

The only module that reads a clock. Whoever needs the time takes a `Clock`, so that a test can move
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """The real clock. `elapsed()` counts from when this object was made, which is when the job
    started.
    """

    monotonic: Callable[[], float] = staticmethod(time.monotonic)
    """Seconds on a clock that is never set back; only differences mean anything. (No method: the
    store asks it for every message.)
    """

    def __init__(self) -> None:
        self._start = self.monotonic()
        self.started = self.wall()

    def elapsed(self) -> float:
        """Seconds since this clock was made, to the microsecond."""
        return round(self.monotonic() - self._start, 6)

    def wall(self) -> float:
        """Seconds since 1970, for people and for file names; may jump."""
        return time.time()

    def date(self, form: str = "%Y-%m-%d %H:%M:%S") -> str:
        """The local date and time as text."""
        return time.strftime(form, time.localtime(self.wall()))
