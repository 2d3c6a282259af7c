"""Keys and times as users may write them, checked before a request is under way with it."""

from __future__ import annotations

import math
import operator
from datetime import timedelta

from rallypoint.errors import UsageError
from rallypoint.wire import values

LARGEST_SIZE = 1 << 31
"""Limit of sizes: more than any store serves sessions, and small enough for whatever counts."""


def key_of(key: object) -> str:
    """Return a key or a name as it is given. TypeError for what is no str, UsageError for what has
    no bytes."""
    if type(key) is str and key.isascii():
        return key
    if not isinstance(key, str):
        raise TypeError(f"a key is a str, not {type(key).__name__}")
    # What it consists of: `str()` of a member of an Enum is the member's name.
    key = str.__str__(key)
    _check_text(key)
    return key


def _check_text(key: str) -> None:
    """Raise UsageError for a str that has no bytes, before a request is under way with it."""
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            "usage",
            f"the key {values.shown(key)} is no text: character {error.start} is a lone surrogate, which UTF-8 has no bytes for",
            help=(
                ("write such characters out", 'key.encode("utf-8", "backslashreplace").decode()'),
            ),
        ) from None


def seconds_of(timeout: float | timedelta | None) -> float:
    """Return how long to wait: math.inf for None, which is for ever. UsageError below 0 and for
    NaN."""
    if timeout is None:
        return math.inf
    seconds = _number("timeout", timeout)
    if not seconds >= 0:
        raise UsageError("usage", f"timeout={timeout!r} is no number of seconds from 0")
    return seconds


def positive(name: str, given: float | timedelta) -> float:
    """Return a time that has an end and is not 0. `name`: of the argument."""
    seconds = _number(name, given)
    if not 0 < seconds < math.inf:
        raise UsageError("usage", f"{name}={given!r} is no number of seconds above 0")
    return seconds


def number(name: str, given: object, what: str) -> int | None:
    """Return a whole number that this store gave out, or None. `name`: of the argument; `what`:
    what it is, "the token of a lock"."""
    if given is None:
        return None
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        token = getattr(given, "token", None)
        right = f": {name}=grant.token" if isinstance(token, int) else ""
        raise TypeError(f"{name}={given!r}: {what} is an int, not {described(given)}{right}")
    whole = operator.index(given)
    if not 0 <= whole < 1 << 63:
        raise UsageError("usage", f"{name}={given!r} is not {what}")
    return whole


def size_of(size: object, what: str) -> int:
    """Check the number of callers of `what`, "a barrier"."""
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise TypeError(
            f"size={size!r}: the number of callers of {what} is an int, not {described(size)}"
        )
    number = operator.index(size)
    if not 0 < number < LARGEST_SIZE:
        raise UsageError(
            "usage", f"size={size}: at least one comes to {what}, and fewer than {LARGEST_SIZE}"
        )
    return number


def _number(name: str, given: object) -> float:
    """Return seconds, from a number of whatever kind or a timedelta."""
    if isinstance(given, timedelta):
        return given.total_seconds()
    if isinstance(given, bool | str) or not hasattr(given, "__float__"):
        raise TypeError(
            f"{name}={given!r}: seconds are a number or a timedelta, not {described(given)}"
        )
    return float(given)


def described(thing: object) -> str:
    """Describe a thing for an error: "a Server", "a numpy.int64"."""
    kind = type(thing)
    if thing is None:
        return "None"
    name = (
        kind.__qualname__
        if kind.__module__.partition(".")[0] in ("builtins", "rallypoint")
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    return values.article(name)
