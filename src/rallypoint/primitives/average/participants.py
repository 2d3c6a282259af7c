"""Messages between the callers of an average, and the names that all of them use alike."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from rallypoint.host import memory, process_status
from rallypoint.wire.messages import Identity

PREFIX = "rallypoint/average/"
"""Prefix of the names of averages among the names of barriers, which users choose."""

WITHIN = "rallypoint/within-average/"
"""Prefix of the meetings within a round. The stage precedes the average's name, which may be
anything."""

VERSION = 2
"""Version of offers. Ranks of another version are told apart, and all get `average-mismatch`."""


class SegmentPlace(msgspec.Struct, frozen=True, array_like=True):
    """Location of a shared segment: a descriptor of its process, and what that has to be."""

    fd: int
    inode: int
    capacity: int


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """Contribution of one caller: its value as `data`, or the `place` of the shared memory with its
    value."""

    version: int
    digest: bytes
    weight: float
    thread: int
    data: bytes = b""
    scope: bytes = b""
    pid: int = 0
    started: int = 0
    place: SegmentPlace | None = None


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    """Statement of a rank at a barrier within a round. Numbers are places among the
    participants."""

    round: int
    turn: int  # how often the round was begun again
    me: int
    gone: tuple[int, ...] = ()  # dead, as far as this rank sees
    late: bool = False  # this rank has waited long enough
    failed: str = ""  # this rank cannot do its part
    silent: bool = False  # ... because another rank, or host, is gone
    finite: bool = True  # of this rank's part
    leaves: tuple[str, ...] = ()  # in which this rank brought a NaN or an infinity


class Participant(NamedTuple):
    """One caller that takes part in a round."""

    identity: Identity
    offer: Offer


def called(name: str) -> str:
    """Return how a text calls an average; `name` is that of its meeting."""
    return f'the average "{name.removeprefix(PREFIX)}"'


def meeting(name: str, stage: str) -> str:
    """Return the name of a meeting within a round of an average, whose own meeting is `name`."""
    return f"{WITHIN}{stage}/{name.removeprefix(PREFIX)}"


def in_order(participants: Sequence[Participant]) -> list[Participant]:
    """Sort ranks by number, and others by process and thread: in the same way in every process."""
    return sorted(participants, key=lambda one: (*rank_order(one.identity), one.offer.thread))


def rank_order(identity: Identity) -> tuple[Any, ...]:
    """Return the sort key of a client."""
    return identity.rank is None, identity.rank or 0, identity.host, identity.pid


def has_died(offer: Offer, *, is_mapped: bool) -> bool:
    """Tell whether a caller is certainly dead. `is_mapped`: its memory is mapped here already."""
    place = offer.place
    if offer.scope != scope() or place is None:
        return False
    if not is_mapped and not memory.published(offer.pid, place.fd, place.inode):
        return True
    found = process_status.status(offer.pid)
    return found is None or found.started != offer.started or found.state in "ZX"


@functools.cache
def scope() -> bytes:
    """Return `memory.scope()`, which is equal in processes that can open each other's memory."""
    return memory.scope()


def say_warning(text: str) -> None:
    """Write a line to the program's log."""
    from rallypoint.store.logger import logger  # here: logging takes 8 ms to load

    logger().warning(text)
