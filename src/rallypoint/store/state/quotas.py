"""What the store may hold, what it holds, and how it says no.

Every byte that a client makes the store keep is charged here, so that no client can bring down the
server, or the machine it shares with the training. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rallypoint.wire.messages import INLINE_BYTES, Failed, Limits, Refusal

KEY_BYTES = 320
"""What a key costs beside the bytes of its name and value: the entry (104), the headers of name and
value (49 + 33), the integer of its revision (28), its slot in the table with the table's spare room
(up to 60), and what the allocator adds. Measured 294 at most over 400,000 keys in CPython 3.11; a
ttl adds a place in a heap, which the rest nearly covers."""

ITEM_BYTES = 160
"""What an item of a queue costs beside its value: the object (80), the value's header (33), its
number (28), its place (8). Measured 153 with a value of 16 bytes, in CPython 3.11."""

QUEUE_BYTES = 1024
"""What a queue that is not empty costs beside its name and items: the object and its two empty
collections (40 + 56 + 624), its place in the table, and what the allocator adds."""

HELD_BYTES = 600
"""What a lock or a claim that is held costs beside its name: the object (80 to 100), up to four
places in tables (100 each), numbers.
"""

LEND_BYTES = 1024
"""Values below this are not accounted for while only a cached reply holds them: they weigh no more
than the reply around them.
"""


class Large(Protocol):
    """A large value that the server holds: all that is known here is its size in bytes."""

    @property
    def size(self) -> int: ...


class _Loan:
    """A value that cached replies hold. `stored`: the store itself holds it too, so its bytes are
    charged there.
    """

    __slots__ = ("holders", "size", "stored", "thing")

    def __init__(self, thing: object, size: int, stored: bool) -> None:
        self.thing = thing  # keeps the id from being used again
        self.size = size
        self.stored = stored
        self.holders = 0


class Budget:
    """Bytes in use against the limits.

    A value may be held by the store and by any number of cached replies at once (`once` gives one
    value to everybody), and is one piece of memory all the while: `lend` and `settle` see to it
    that it counts once, until the last of them lets go.
    """

    __slots__ = ("_loans", "keys", "limits", "used")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.used = 0
        self.keys = 0
        self._loans: dict[int, _Loan] = {}

    def refuse_value(self, size: int, growth: int, seq: int, revision: int) -> Failed | None:
        """The failure if a value has too many bytes, or if the store would grow too large; None if
        it fits. Charges nothing.
        """
        limits = self.limits
        if size > limits.value_bytes:
            return failed(
                seq, revision, "value-too-large",
                f"the value has {size} bytes, and one value may have {limits.value_bytes}; "
                "max_bytes= of serve() and --max-bytes raise that",
                {"size": size, "limit": limits.value_bytes},
            )  # fmt: skip
        if growth > 0 and self.used + growth > limits.store_bytes:
            both = (
                "; a large value that replaces another needs room for both until it has arrived"
                if size > INLINE_BYTES
                else ""
            )
            return failed(
                seq, revision, "store-full",
                f"{growth} bytes do not fit: the store holds {self.used} of the {limits.store_bytes} bytes it may{both}; "
                "max_bytes= of serve() and --max-bytes raise that",
                {"size": growth, "used": self.used, "limit": limits.store_bytes},
            )  # fmt: skip
        return None

    def refuse_name(self, name: str, seq: int, revision: int) -> Failed | None:
        """The failure if the name of a key, queue, lock, claim or barrier is too long."""
        limit = self.limits.key_bytes
        if len(name) * 4 <= limit or (size := len(name.encode())) <= limit:
            return None
        return failed(
            seq, revision, "key-too-long",
            f"{quoted(name)} has {size} bytes, and a name may have {limit}; nothing raises that: keep what is long in the value",
            {"size": size, "limit": limit},
        )  # fmt: skip

    def refuse_key(self, seq: int, revision: int) -> Failed | None:
        """The failure if one more key is one too many."""
        count, limit = self.keys, self.limits.keys
        if count < limit:
            return None
        return failed(
            seq, revision, "too-many-keys",
            f"the store holds {count} keys, and may hold {limit}; nothing raises that: delete keys, or give them ttl=",
            {"size": count + 1, "limit": limit},
        )  # fmt: skip

    def refuse_waiter(self, count: int, seq: int, revision: int) -> Failed | None:
        """The failure if `count` requests wait and one more is one too many."""
        limit = self.limits.waiting
        if count < limit:
            return None
        return failed(
            seq, revision, "too-many-waiting",
            f"{count} requests wait already, and {limit} may; nothing raises that",
            {"size": count + 1, "limit": limit},
        )  # fmt: skip

    def refuse_session(self, count: int) -> Refusal | None:
        """The refusal if there are `count` sessions and one more is one too many."""
        limit = self.limits.sessions
        if count < limit:
            return None
        return Refusal(
            "store-full",
            f"the store serves {count} sessions, and may serve {limit}; nothing raises that",
        )

    def free(self, size: int, thing: object) -> None:
        """The store lets go of a value of `size` bytes (`thing`: the bytes or the Large): it is
        free unless a cached reply holds it.
        """
        self.used -= size
        if self._loans and (loan := self._loans.get(id(thing))) is not None:
            loan.stored = False
            self.used += loan.size

    def take_back(self, size: int, thing: object) -> None:
        """The store has a value again that it let go of (`free`)."""
        self.used += size
        if self._loans and (loan := self._loans.get(id(thing))) is not None and not loan.stored:
            loan.stored = True
            self.used -= loan.size

    def lend(self, thing: object, size: int, *, stored: bool) -> object | None:
        """A cached reply holds this value. What is returned must be given to `settle` when the
        reply is forgotten.
        """
        if size < LEND_BYTES:
            return None
        loan = self._loans.get(id(thing))
        if loan is None:
            loan = self._loans[id(thing)] = _Loan(thing, size, stored)
            if not stored:
                self.used += size
        loan.holders += 1
        return thing

    def settle(self, thing: object) -> None:
        """A cached reply that held this value is forgotten."""
        loan = self._loans[id(thing)]
        loan.holders -= 1
        if not loan.holders:
            del self._loans[id(thing)]
            if not loan.stored:
                self.used -= loan.size


def quoted(name: str) -> str:
    """A name as a text shows it, its middle left out when it is long."""
    return f'"{name}"' if len(name) <= 80 else f'"{name[:60]}...{name[-17:]}"'


def failed(
    seq: int,
    revision: int,
    code: str,
    text: str,
    details: Mapping[str, int | float | str] | None = None,
) -> Failed:
    """A `Failed` reply; `text` is a complete sentence in lower case, `details` the figures
    in it.
    """
    return Failed(seq, revision, code, text, tuple(details.items()) if details else ())
