"""Waits before another attempt.

Full jitter: the wait is uniform between 0 and a ceiling that doubles with each attempt. Of the
usual variants it spreads a herd of clients best, and needs the fewest calls in all (Marc Brooker,
"Exponential Backoff and Jitter", AWS Architecture Blog, 2015).
"""

from __future__ import annotations

FIRST = 0.02
"""Seconds, the first ceiling: a process that is just starting to listen does so within this."""

MOST = 1.0
"""Seconds, the last ceiling: more delay would be noticed when a server comes back."""


def ceiling(attempt: int, most: float = MOST) -> float:
    """Return the longest wait after failed attempt number `attempt` (from 0), in seconds; never
    more than `most`."""
    return min(MOST, most, FIRST * 2.0 ** min(attempt, 32))


def pause(attempt: int, uniform: float, most: float = MOST) -> float:
    """Return the wait after failed attempt `attempt`; `uniform` is a random number in [0, 1)."""
    return uniform * ceiling(attempt, most)
