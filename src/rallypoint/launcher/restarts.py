"""Decision whether a job is started again after a failure. Pure."""

from __future__ import annotations

SOON_AFTER_START = 10.0
"""Seconds since its start in which an attempt must fail to count among equal ones: one that has
trained for longer may get further.
"""

ENOUGH_TIMES = 3
"""Equal failures in a row, each soon after a start, after which no other attempt is made: two may
be chance.
"""


class Restarts:
    """Count of a job's restarts, and of equal failures in a row."""

    def __init__(self, most: int) -> None:
        """`most` restarts are made."""
        self.most = most
        self.made = 0
        self.times = 0  # how often the last failure has come in a row, soon after each start
        self._same = ""

    def __repr__(self) -> str:
        return f"<Restarts: {self.made} of {self.most}, the same failure {self.times} times>"

    def failed(self, same: str, age: float) -> None:
        """Note a failure, `age` seconds after the start of its attempt. `same`: what two equal
        failures have in common, "" when the next one may be another."""
        again = same == self._same and age <= SOON_AFTER_START
        self._same, self.times = same, self.times + 1 if again else 1

    @property
    def is_left(self) -> bool:
        """Whether another attempt may be made."""
        return self.made < self.most

    @property
    def is_hopeless(self) -> bool:
        """Whether the same failure has come so often that another attempt is in vain."""
        return bool(self._same) and self.times >= ENOUGH_TIMES
