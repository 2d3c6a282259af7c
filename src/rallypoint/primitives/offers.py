"""What each brings when an average's callers meet: his value, or where it lies in shared memory; and names that all of them use alike."""

from __future__ import annotations

import functools
from typing import NamedTuple

import msgspec

from rallypoint.host import memory
from rallypoint.primitives.pages import Own
from rallypoint.wire.messages import Identity

PREFIX = "rallypoint/average/"
"""Before the names of averages among those of barriers, where users have names of their own; "average/loss" may be one of them."""

WITHIN = "rallypoint/within-average/"
"""Before those of the meetings within a round. The stage comes before the average's name, which may be anything."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a segment is: a descriptor of the process, and what it is to be."""

    fd: int
    inode: int
    capacity: int


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What each brings to a round. With `data` that is all; otherwise his contribution is at `place`, all of it but the bytes `skip`,
    which only he needs if he gets the part that he expects."""

    version: int
    digest: bytes
    weight: float
    size: int
    thread: int
    data: bytes = b""
    scope: bytes = b""
    pid: int = 0
    started: int = 0
    place: Place | None = None
    result: Place | None = None
    skip: tuple[int, int] = (0, 0)


class Participant(NamedTuple):
    """Somebody who takes part."""

    identity: Identity
    offer: Offer


def called(name: str) -> str:
    """An average in a text; `name` is that of its meeting."""
    return f'the average "{name.removeprefix(PREFIX)}"'


def meeting(name: str, stage: str) -> str:
    """The name of a meeting within a round of an average, whose own meeting is `name`."""
    return f"{WITHIN}{stage}/{name.removeprefix(PREFIX)}"


def place(own: Own | None) -> Place | None:
    """Where a segment of ours is."""
    return None if own is None else Place(own.mapped.fd, own.mapped.inode, own.mapped.capacity)


@functools.cache
def scope() -> bytes:
    """See `memory.scope`."""
    return memory.scope()
