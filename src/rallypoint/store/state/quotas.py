"""Limits of the store, the bytes in use, and the refusals. Pure.

Every byte that a client makes the store keep is charged here, so that no client can bring down the
server, or the machine it shares with the training.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from rallypoint.wire.messages import INLINE_BYTES, Failed, Identity, Limits, Member

KEY_BYTES = 320
"""Cost of a key beside the bytes of its name and value: the entry (104), the headers of name and
value (49 + 33), the integer of its revision (28), its slot in the table with the table's spare room
(up to 60), and the allocator's share. Measured 294 at most over 400,000 keys in CPython 3.11; a ttl
adds a place in a heap, which the rest nearly covers."""

ITEM_BYTES = 160
"""Cost of an item of a queue beside its value: the object (80), the value's header (33), its number
(28), its place (8). Measured 153 with a value of 16 bytes, in CPython 3.11."""

QUEUE_BYTES = 1024
"""Cost of a queue that is not empty beside its name and items: the object and its two empty
collections (40 + 56 + 624), its place in the table, and the allocator's share."""

HELD_BYTES = 600
"""Cost of a lock or a claim that is held beside its name: the object (80 to 100), up to four places
in tables (100 each), numbers."""

RAISE = "max_bytes= of serve() and --max-bytes raise that"


class Large(Protocol):
    """A value that is too large for a message. The state knows only its size in bytes."""

    @property
    def size(self) -> int: ...


Stored: TypeAlias = Any
"""A stored value: its encoded bytes, or the `Large` that has them."""


def bytes_of(value: Stored) -> int:
    """Return the size of a stored value."""
    return len(value) if type(value) is bytes else value.size


class Refused(Exception):
    """Refusal of a request that has changed nothing. `State.apply` answers it with `Failed`.

    `text` is a complete sentence in lower case, `details` the figures in it.
    """

    def __init__(
        self,
        code: str,
        text: str,
        present: tuple[Identity, ...] = (),
        absent: tuple[Member, ...] = (),
        **details: int | float | str,
    ) -> None:
        super().__init__(text)
        self._fields = (code, text, tuple(details.items()), present, b"", absent)

    def reply(self, seq: int, revision: int) -> Failed:
        """Return the reply to request `seq`."""
        return Failed(seq, revision, *self._fields)


class Budget:
    """Bytes and keys in use against the limits. A check that fails raises Refused."""

    __slots__ = ("keys", "limits", "used")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.used = 0
        self.keys = 0

    def check_value(self, size: int, growth: int) -> None:
        """Check that a value of `size` bytes is allowed and that the store may grow by `growth`."""
        limits = self.limits
        if size > limits.value_bytes:
            text = (
                f"the value has {size} bytes, and one value may have {limits.value_bytes}; {RAISE}"
            )
            raise Refused("value-too-large", text, size=size, limit=limits.value_bytes)
        if growth > 0 and self.used + growth > limits.store_bytes:
            both = (
                "; a large value that replaces another needs room for both until it has arrived"
                if size > INLINE_BYTES
                else ""
            )
            text = (
                f"{growth} bytes do not fit: the store holds {self.used} of the {limits.store_bytes} bytes it may{both}; {RAISE}"
            )  # fmt: skip
            raise Refused("store-full", text, size=growth, used=self.used, limit=limits.store_bytes)

    def check_name(self, name: str) -> None:
        """Check the length of the name of a key, queue, lock, claim or barrier."""
        limit = self.limits.key_bytes
        if len(name) * 4 > limit and (size := len(name.encode())) > limit:
            text = f"{quoted(name)} has {size} bytes, and a name may have {limit}; nothing raises that: keep what is long in the value"
            raise Refused("key-too-long", text, size=size, limit=limit)

    def check_key(self) -> None:
        """Check that one more key is allowed."""
        limit = self.limits.keys
        if self.keys >= limit:
            text = f"the store holds {self.keys} keys, and may hold {limit}; nothing raises that: delete keys, or give them ttl="
            raise Refused("too-many-keys", text, size=self.keys + 1, limit=limit)

    def check_waiting(self, count: int) -> None:
        """Check that one more request may wait beside `count` others."""
        limit = self.limits.waiting
        if count >= limit:
            text = f"{count} requests wait already, and {limit} may; nothing raises that"
            raise Refused("too-many-waiting", text, size=count + 1, limit=limit)


def quoted(name: str) -> str:
    """Return a name as a text shows it, its middle left out when it is long."""
    return f'"{name}"' if len(name) <= 80 else f'"{name[:60]}...{name[-17:]}"'


def check_bytes(value: Stored) -> None:
    """Refuse an empty value: every encoded value has at least one byte."""
    if type(value) is bytes and not value:
        raise Refused("bad-request", "a value has at least one byte")
