"""Keys and their values: get, set, compare and set, delete, list, add, append. Pure.

The store never decodes a value, with two exceptions: the integer of `Add` and the bytes of `Append`
and of torch's `add`. The methods named like requests are what `State.apply` calls; `get`, `set` and
`add` of a key that is there are the paths which every training loop takes, and are written flat for
that reason.
"""

from __future__ import annotations

import re

import msgspec

from rallypoint.store.state.locks import Locks
from rallypoint.store.state.quotas import KEY_BYTES, Large, quoted
from rallypoint.store.state.replies import Answer, Ledger, Session
from rallypoint.store.state.waiters import NEVER, Deadlines, Lines, Waiter
from rallypoint.store.state.watches import History
from rallypoint.wire.messages import (
    Absent,
    Add,
    Append,
    CompareAndSet,
    Delete,
    Done,
    Exists,
    Failed,
    Get,
    Identity,
    Integer,
    Keys,
    Names,
    Set,
    TimedOut,
    Value,
)

LOWEST, HIGHEST = -(2**63), 2**63 - 1

WAITED_KEYS = 4096
"""Missing keys that one request may wait for: to line up for them and to leave again takes 20 ms,
in which nobody else is served.
"""

APPEND_BYTES = 8 * 1024 * 1024
"""The longest bytes value that is appended to: every append copies the whole, and this copy takes a
millisecond. torch's TCPStore takes values up to the same size."""

# First bytes in msgpack: an integer of any width; bytes with a length of 1, 2 or 4 bytes.
_INTEGERS = frozenset([*range(0x80), *range(0xE0, 0x100), *range(0xCC, 0xD4)])
_BYTES = frozenset([0xC4, 0xC5, 0xC6])
_DIGITS = re.compile(rb"[+-]?[0-9]{1,19}")

_encode = msgspec.msgpack.Encoder().encode
_decode_integer = msgspec.msgpack.Decoder(int).decode
_decode_bytes = msgspec.msgpack.Decoder(bytes).decode


class Entry:
    """One key's value. `large` holds it when `value` is empty."""

    __slots__ = (
        "deadline",
        "key",
        "large",
        "modified",
        "owner",
        "size",
        "value",
        "weight",
        "writer",
    )

    def __init__(self, key: str, weight: int) -> None:
        self.key = key
        self.weight = weight  # bytes beside the value
        self.value = b""
        self.large: Large | None = None
        self.size = 0  # bytes of the value
        self.modified = 0
        self.writer: Identity | None = None
        self.owner: Session | None = None  # it goes when this session ends
        self.deadline = NEVER  # it goes then

    def thing(self) -> object:
        """Whatever holds the value's bytes."""
        return self.value if self.large is None else self.large


class KeyTable:
    """All keys, and who waits for one that is not there."""

    def __init__(self, ledger: Ledger, history: History, locks: Locks) -> None:
        self._ledger = ledger
        self._budget = ledger.budget
        self._history = history
        self._locks = locks
        self._entries: dict[str, Entry] = {}
        self._absent = Lines(
            self._timed_out
        )  # who waits for keys that are not there; nobody ever waits for one that is
        self.deadlines: Deadlines[Entry] = Deadlines()

    def __len__(self) -> int:
        return len(self._entries)

    def expire(self, now: float) -> None:
        """Remove the keys whose time has come."""
        while (entry := self.deadlines.take(now)) is not None:
            self._remove(entry)

    def end(self, session: Session) -> None:
        """Remove the keys that go with this session."""
        for key in list(session.ephemeral):
            self._remove(self._entries[key])

    # --- reading ---

    def get(self, now: float, session: Session, request: Get, large: Large | None) -> Answer | None:
        entry = self._entries.get(request.key)
        if entry is not None:
            return Value(
                request.seq, self._ledger.revision, entry.modified, entry.value
            ), entry.large
        timeout = request.timeout
        if timeout is None:
            return Absent(request.seq, self._ledger.revision), None
        if not timeout > 0:
            return TimedOut(request.seq, self._ledger.revision, (request.key,)), None
        return self._ledger.wait(now, session, request, timeout, self._absent, (request.key,))

    def keys(self, now: float, session: Session, request: Keys, large: Large | None) -> Answer:
        prefix, revision = request.prefix, self._ledger.revision
        found = (
            [key for key in self._entries if key.startswith(prefix)] if prefix else self._entries
        )
        if request.count:
            return Integer(request.seq, revision, len(found)), None
        return Names(request.seq, revision, tuple(found)), None

    def exists(
        self, now: float, session: Session, request: Exists, large: Large | None
    ) -> Answer | None:
        entries, timeout = self._entries, request.timeout
        if timeout is None:
            return Names(
                request.seq,
                self._ledger.revision,
                tuple([key for key in request.keys if key in entries]),
            ), None
        missing = self._missing(request)
        if not missing:
            return Names(request.seq, self._ledger.revision, request.keys), None
        if not timeout > 0:
            return TimedOut(request.seq, self._ledger.revision, missing), None
        if len(missing) > WAITED_KEYS:
            text = f"one request waits for {len(missing)} keys, and may wait for {WAITED_KEYS}; nothing raises that: wait for some at a time"
            return self._ledger.failed(
                request, "too-many-waiting", text, size=len(missing), limit=WAITED_KEYS
            )
        return self._ledger.wait(now, session, request, timeout, self._absent, missing)

    def _missing(self, request: Exists) -> tuple[str, ...]:
        entries = self._entries
        return tuple([key for key in request.keys if key not in entries])

    # --- writing ---

    def set(self, now: float, session: Session, request: Set, large: Large | None) -> Answer:
        entry = self._entries.get(request.key)
        value = request.value
        ledger = self._ledger
        if (
            entry is None or large is not None or not value
            or request.fence is not None or request.ttl is not None or request.ephemeral
            or entry.owner is not None or entry.deadline != NEVER or entry.large is not None
            or entry.size < len(value)
        ):  # fmt: skip
            return self._set(now, session, request, large, entry)
        # The flat path: one plain value over another that is not smaller.
        replaced, writer = entry.modified, entry.writer
        self._budget.free(entry.size - len(value), entry.value)
        ledger.revision = revision = ledger.revision + 1
        entry.value = value
        entry.size = len(value)
        entry.modified = revision
        entry.writer = session.identity
        self._history.record(revision, entry.key, value, False)
        seen = request.seen
        if seen is None or seen == replaced or writer is session.identity:
            return Done(request.seq, revision, replaced), None
        return Done(request.seq, revision, replaced, str(writer)), None

    def _set(
        self, now: float, session: Session, request: Set, large: Large | None, entry: Entry | None
    ) -> Answer:
        replaced, writer = (0, None) if entry is None else (entry.modified, entry.writer)
        refused = self._locks.refuse_fence(now, request) or self._write(
            now, session, request, large, entry, request.ephemeral
        )
        if refused is not None:
            return refused
        lost = (
            request.seen is not None
            and request.seen != replaced
            and writer is not None
            and writer is not session.identity
        )
        return Done(request.seq, self._ledger.revision, replaced, str(writer) if lost else ""), None

    def compare_and_set(
        self, now: float, session: Session, request: CompareAndSet, large: Large | None
    ) -> Answer:
        refused = self._locks.refuse_fence(now, request)
        if refused is not None:
            return refused
        entry = self._entries.get(request.key)
        if request.modified is not None:
            same = request.modified == (0 if entry is None else entry.modified)
        elif request.expected is None:
            same = entry is None
        else:
            # A large value cannot be compared here: it never equals; its revision can be compared.
            same = entry is not None and entry.large is None and entry.value == request.expected
        if not same:
            if entry is None:
                return Absent(request.seq, self._ledger.revision), None
            self._ledger.keep(
                session, request.seq, entry.thing(), entry.size, stored=True, changed=False
            )
            return Value(
                request.seq, self._ledger.revision, entry.modified, entry.value
            ), entry.large
        replaced = 0 if entry is None else entry.modified
        refused = self._write(now, session, request, large, entry, False)
        return refused or (Done(request.seq, self._ledger.revision, replaced), None)

    def delete(self, now: float, session: Session, request: Delete, large: Large | None) -> Answer:
        entry = self._entries.get(request.key)
        refused = self._locks.refuse_fence(now, request)
        if refused is not None:
            return refused
        if entry is None:
            return Absent(request.seq, self._ledger.revision), None
        if request.wanted:
            self._ledger.keep(
                session, request.seq, entry.thing(), entry.size, stored=True, changed=True
            )
        self._remove(entry)
        revision = self._ledger.revision
        if request.wanted:
            return Value(request.seq, revision, entry.modified, entry.value), entry.large
        return Done(request.seq, revision, entry.modified), None

    def add(self, now: float, session: Session, request: Add, large: Large | None) -> Answer:
        """Keeps a key's ttl and owner as they are."""
        entry = self._entries.get(request.key)
        if entry is None or request.text:
            return self._add(session, request, entry)
        value = entry.value
        if not value or value[0] not in _INTEGERS:
            return self._not_a_number(request, entry)
        try:
            number = _decode_integer(value) + request.amount
        except msgspec.DecodeError:  # it only begins like one
            return self._not_a_number(request, entry)
        if not LOWEST <= number <= HIGHEST:
            return self._overflow(request, number)
        value = _encode(number)
        ledger = self._ledger
        # At most eight bytes more than before: the limit of the store is not asked for those.
        self._budget.used += len(value) - entry.size
        ledger.revision = revision = ledger.revision + 1
        entry.value = value
        entry.size = len(value)
        entry.modified = revision
        entry.writer = session.identity
        self._history.record(revision, entry.key, value, False)
        return Integer(request.seq, revision, number), None

    def _add(self, session: Session, request: Add, entry: Entry | None) -> Answer:
        number = request.amount
        if entry is not None:
            digits = self._bytes_of(entry)
            if digits is None or not _DIGITS.fullmatch(digits):
                return self._not_a_number(request, entry)
            number += int(digits)
        if not LOWEST <= number <= HIGHEST:
            return self._overflow(request, number)
        value = _encode(b"%d" % number if request.text else number)
        return self._replace(session, request, entry, value) or (
            Integer(request.seq, self._ledger.revision, number),
            None,
        )

    def append(self, now: float, session: Session, request: Append, large: Large | None) -> Answer:
        """Keeps a key's ttl and owner as they are."""
        entry = self._entries.get(request.key)
        old = b"" if entry is None else self._bytes_of(entry)
        if entry is not None and entry.large is not None:
            return self._too_long(request, entry.size)
        if old is None:
            text = f"{quoted(request.key)} does not hold bytes: nothing can be appended to it"
            return self._ledger.failed(request, "wrong-type", text)
        length = len(old) + len(request.data)
        if length > APPEND_BYTES:
            return self._too_long(request, length)
        value = _encode(old + request.data)
        return self._replace(session, request, entry, value) or (
            Integer(request.seq, self._ledger.revision, length),
            None,
        )

    # --- the table ---

    def _write(
        self,
        now: float,
        session: Session,
        request: Set | CompareAndSet,
        large: Large | None,
        entry: Entry | None,
        ephemeral: bool,
    ) -> Answer | None:
        """Put a value, with everything a Set may say about it. None when done, otherwise
        why not.
        """
        ttl, key = request.ttl, request.key
        if large is None and not request.value:
            return self._ledger.failed(request, "bad-request", "a value has at least one byte")
        if ttl is not None and not ttl > 0:  # nor NaN
            return self._ledger.failed(
                request,
                "bad-request",
                f"{quoted(key)} cannot live for {ttl} seconds: ttl= is more than 0",
                ttl=ttl,
            )
        failure = self._replace(session, request, entry, request.value, large)
        if failure is not None:
            return failure
        entry = self._entries[key]
        if entry.owner is not None:
            del entry.owner.ephemeral[key]
            entry.owner = None
        if ephemeral:
            entry.owner = session
            session.ephemeral[key] = None
        self.deadlines.set(entry, NEVER if ttl is None else now + ttl)
        return None

    def _replace(
        self,
        session: Session,
        request: Set | CompareAndSet | Add | Append,
        entry: Entry | None,
        value: bytes,
        large: Large | None = None,
    ) -> tuple[Failed, None] | None:
        """Put a value in the place of the entry's, or in a new entry, within the limits. None when
        done.
        """
        ledger, budget, key, seq = self._ledger, self._budget, request.key, request.seq
        size = len(value) if large is None else large.size
        if entry is None:
            weight = KEY_BYTES + len(key.encode())
            refused = (
                budget.refuse_name(key, seq, ledger.revision)
                or budget.refuse_value(size, size + weight, seq, ledger.revision)
                or budget.refuse_key(seq, ledger.revision)
            )
        else:
            refused = budget.refuse_value(size, size - entry.size, seq, ledger.revision)
        if refused is not None:
            return refused, None
        fresh = entry is None
        if entry is None:
            entry = self._entries[key] = Entry(key, weight)
            budget.keys += 1
            budget.used += weight + size
        else:
            budget.free(entry.size, entry.thing())
            budget.used += size
        entry.value = value
        entry.large = large
        entry.size = size
        entry.modified = revision = ledger.changed()
        entry.writer = session.identity
        self._history.record(revision, key, value, large is not None)
        if fresh and key in self._absent:
            self._appeared(entry)
        return None

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self.deadlines.set(entry, NEVER)
        if entry.owner is not None:
            del entry.owner.ephemeral[entry.key]
        self._budget.keys -= 1
        self._budget.used -= entry.weight
        self._budget.free(entry.size, entry.thing())
        self._history.record(self._ledger.changed(), entry.key, None, False)

    # --- waiting ---

    def _appeared(self, entry: Entry) -> None:
        """Answer those who waited for this key, and for no other that is still missing."""
        ledger, revision = self._ledger, self._ledger.revision
        for waiter in self._absent.all(entry.key):
            request = waiter.request
            if type(request) is Get:
                ledger.answer(
                    waiter, Value(request.seq, revision, entry.modified, entry.value), entry.large
                )
                continue
            self._absent.leave(waiter, entry.key)
            if not waiter.names:
                # The last that was missing is there; another may have gone meanwhile.
                self._absent.join(waiter, self._missing(request))
            if not waiter.names:
                ledger.answer(waiter, Names(request.seq, revision, request.keys))

    def _timed_out(self, now: float, waiter: Waiter) -> None:
        request = waiter.request
        missing = (request.key,) if type(request) is Get else self._missing(request)
        self._ledger.answer(waiter, TimedOut(request.seq, self._ledger.revision, missing))

    # --- values that the store looks into ---

    def _bytes_of(self, entry: Entry) -> bytes | None:
        value = entry.value
        if not value or value[0] not in _BYTES:
            return None
        try:
            return _decode_bytes(value)
        except msgspec.DecodeError:  # it only begins like bytes
            return None

    def _not_a_number(self, request: Add, entry: Entry) -> Answer:
        kind = "decimal digits in bytes" if request.text else "an integer"
        return self._ledger.failed(
            request,
            "wrong-type",
            f"{quoted(entry.key)} does not hold {kind}: nothing can be added to it",
        )

    def _overflow(self, request: Add, number: int) -> Answer:
        text = (
            f"{quoted(request.key)} would be {number}, and an integer that is added to has 64 bits"
        )
        return self._ledger.failed(request, "integer-overflow", text)

    def _too_long(self, request: Append, length: int) -> Answer:
        text = f"{quoted(request.key)} would have {length} bytes or more, and what is appended to may have {APPEND_BYTES}; use a queue"
        return self._ledger.failed(
            request, "value-too-large", text, size=length, limit=APPEND_BYTES
        )
