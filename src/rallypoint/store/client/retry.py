"""Try again, with the same policy as the store's client, for code of the user's own."""

from __future__ import annotations

import random
import select
from collections.abc import Callable
from typing import TypeVar

from rallypoint.clock import Clock
from rallypoint.errors import UsageError
from rallypoint.store.client import backoff

T = TypeVar("T")

MOST_KINDS = 8
"""Kinds of failure that are told apart. A message with a time in it is another kind every time, and
an error is read by people.
"""

OTHERS = "others"


def retry(
    fn: Callable[[], T],
    on: tuple[type[BaseException], ...] | type[BaseException] = (ConnectionError,),
    timeout: float = 30.0,
) -> T:
    """Call `fn` until it returns, and return what it returns; exceptions of the types `on` are
    tried again, others go through.

    Between attempts it waits with exponential backoff and full jitter (at most a second). After
    `timeout` seconds, or when the next wait would end later than that, the last exception is
    raised, with a note of how many attempts there were and what each kind said. `fn` itself is not
    interrupted: give it a deadline of its own. Signal handlers run during the waits.
    """
    if not timeout >= 0:
        raise UsageError("usage", f"timeout={timeout!r} is no number of seconds from 0")
    clock = Clock()
    kinds: dict[str, int] = {}
    attempt = 0
    while True:
        try:
            return fn()
        except on as error:
            _count(kinds, f"{type(error).__name__}: {error}")
            pause = backoff.pause(attempt, random.random())
            attempt += 1
            if clock.elapsed() + pause > timeout:
                error.add_note(
                    f"tried {attempt} times in {clock.elapsed():.1f} s: {_folded(kinds)}"
                )
                raise
        select.poll().poll(pause * 1000.0)


def _count(kinds: dict[str, int], said: str) -> None:
    if said not in kinds and len(kinds) >= MOST_KINDS:
        said = OTHERS
    kinds[said] = kinds.get(said, 0) + 1


def _folded(kinds: dict[str, int]) -> str:
    """Fold them: `12 x ConnectionRefusedError: ...; 1 x TimeoutError: ...; 3 others`, in the order
    in which they came."""
    return "; ".join(
        f"{count} {OTHERS}" if said == OTHERS else f"{count} x {said}"
        for said, count in kinds.items()
    )
