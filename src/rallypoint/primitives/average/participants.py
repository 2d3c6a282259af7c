"""Offers, which the callers of an average bring to its meeting, and the names that all of them use
alike."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from rallypoint.host import memory
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


@functools.cache
def scope() -> bytes:
    """Return `memory.scope()`, which is equal in processes that can open each other's memory."""
    return memory.scope()


def say_warning(text: str) -> None:
    """Write a line to the program's log."""
    from rallypoint.store.logger import logger  # here: logging takes 8 ms to load

    logger().warning(text)
