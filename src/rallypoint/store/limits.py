"""Limits of a server, each default with its reason, and sizes as people write them."""

from __future__ import annotations

import os
import re

from rallypoint.errors import UsageError
from rallypoint.host.kernel_files import cgroup_folders, number_in
from rallypoint.wire.messages import Limits

SHARE = 4
"""The store may take one in this many bytes of the machine's memory: the job it serves needs the
rest, and two stores that meet on one machine by accident must not bring it down together."""

SMALLEST_STORE = 1024 * 1024
"""Bytes; below this not even the keys of one `init_process_group` fit, and a forgotten unit
(`--max-bytes 2`) is the likelier cause.
"""

KEY_BYTES = 4096
"""As long as a path may be: torch's own keys, prefix upon prefix, reach some hundred bytes. A key
is held twice and named in errors.
"""

KEYS = 1_000_000
"""About half a gigabyte of bookkeeping if all are used; a listing of them (`Keys`) still fits one
message.
"""

SESSIONS = 65_536
"""Six times the 10,000 that we measure; a connection each is what this costs, and the kernel's
limit of open files comes first.
"""

WAITING = 262_144
"""Four for each session: its main thread, a watch, and two to spare. One costs under a kilobyte."""

SHORTEST_TTL = 0.05
"""Seconds. Below this a client's keep-alive cannot be in time on a busy machine, and tests need no
less.
"""

ORPHAN = 0.5
"""Seconds after the end of its last connection at which a session is over that asked for it: the
kernel ends the connections of a process that dies, and a client that lives connects again in one
round trip, or a few."""

LONGEST_TTL = 7 * 24 * 3600.0
"""Seconds. What a dead client holds is released after a week at the latest."""

_UNITS = {"": 1, "b": 1, "kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4} | {
    spelling: 1024**power
    for power, letter in enumerate("kmgt", 1)
    for spelling in (letter, letter + "ib")
}


def limits(max_bytes: int | str | None = None, *, example: str = "--max-bytes 2GiB") -> Limits:
    """Return the limits of a server. `max_bytes`: what keys and values may take in all, a number or
    text such as "2GiB"; None: a quarter of the memory that this process may use. Raises UsageError for
    a size that is none, or too small to be meant; `example` is how the caller would have given one
    that would do."""
    store = memory() // SHARE if max_bytes is None else size(max_bytes)
    if store < SMALLEST_STORE:
        if max_bytes is None:
            store = SMALLEST_STORE
        else:
            raise UsageError(
                "usage",
                f"a store of {store} bytes holds nothing: the least is {SMALLEST_STORE}",
                help=(("give the unit", example),),
            )
    # One value may fill the store: there is no second limit to run into.
    return Limits(store, store, KEY_BYTES, KEYS, SESSIONS, WAITING)


def lease(ttl: float) -> float:
    """Return the seconds of a lease, of a session or a lock, as they are counted."""
    return max(SHORTEST_TTL, min(ttl, LONGEST_TTL))  # in this order NaN becomes the shortest


def size(given: int | str) -> int:
    """Return bytes: 2147483648, "2GiB", "1.5G", "500MB" (MB is a million, M and MiB are 1024 x
    1024). Raises UsageError."""
    if isinstance(given, int) and not isinstance(given, bool):
        if given >= 0:
            return given
        raise _no_size(str(given))
    found = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", given)
        if isinstance(given, str)
        else None
    )
    unit = found and _UNITS.get(found[2].lower())
    if not found or not unit:
        raise _no_size(repr(given))
    return int((float if "." in found[1] else int)(found[1]) * unit)


def memory(root: str = "/") -> int:
    """Return the bytes of memory that this process may use: the machine's, or its control group's
    where that is smaller."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder, unified in cgroup_folders("memory", root):
        found.append(number_in(folder, "memory.max" if unified else "memory.limit_in_bytes"))
    return min(filter(None, found))


def _no_size(text: str) -> UsageError:
    return UsageError(
        "usage", f"{text} is not a size in bytes", help=(("write a number with its unit", "2GiB"),)
    )
