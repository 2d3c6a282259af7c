"""Keys and their values: get, set, compare and set, delete, list, add, append. Pure.

The store never decodes a value, with two exceptions: the integer of `Add` and the bytes of `Append`
and of torch's `add`.
"""

from __future__ import annotations

import re

import msgspec

from rallypoint.store.state.locks import Locks
from rallypoint.store.state.quotas import (
    KEY_BYTES,
    Refused,
    Stored,
    bytes_of,
    check_bytes,
    quoted,
)
from rallypoint.store.state.replies import Held, Kind, Ledger, Session
from rallypoint.store.state.waiters import NEVER, Deadlines, Waiter
from rallypoint.store.state.watches import History
from rallypoint.wire.messages import (
    Absent,
    Add,
    Append,
    CompareAndSet,
    Delete,
    Done,
    Exists,
    Get,
    Identity,
    Integer,
    Keys,
    Names,
    Reply,
    Set,
    TimedOut,
    Value,
)

LOWEST, HIGHEST = -(2**63), 2**63 - 1

WAITED_KEYS = 4096
"""Missing keys that one request may wait for: to line up for them and to leave again takes 20 ms,
in which nobody else is served."""

APPEND_BYTES = 8 * 1024 * 1024
"""The longest bytes value that is appended to: every append copies the whole, and this copy takes a
millisecond. torch's TCPStore takes values up to the same size."""

_DIGITS = re.compile(rb"[+-]?[0-9]{1,19}")

_encode = msgspec.msgpack.Encoder().encode
_decode_integer = msgspec.msgpack.Decoder(int).decode
_decode_bytes = msgspec.msgpack.Decoder(bytes).decode


class Entry:
    """One key with its value."""

    __slots__ = ("deadline", "key", "modified", "owner", "size", "value", "weight", "writer")

    def __init__(self, key: str, weight: int) -> None:
        self.key = key
        self.weight = weight  # bytes beside the value
        self.value: Stored = b""
        self.size = 0  # bytes of the value
        self.modified = 0
        self.writer: Identity | None = None
        self.owner: Session | None = None  # the session with which the key goes
        self.deadline = NEVER  # the time at which the key goes


class KeyTable(Kind):
    """All keys. Requests wait only for keys that are not there."""

    def __init__(self, ledger: Ledger, history: History, locks: Locks) -> None:
        super().__init__(ledger)
        self._history = history
        self._locks = locks
        self._entries: dict[str, Entry] = {}
        self.deadlines: Deadlines[Entry] = Deadlines()

    def __len__(self) -> int:
        return len(self._entries)

    def expire(self) -> None:
        """Remove the keys whose time has come."""
        while (entry := self.deadlines.take(self._ledger.now)) is not None:
            self._remove(entry)

    def end(self, session: Session) -> None:
        super().end(session)
        for key in list(session.ephemeral):
            self._remove(self._entries[key])

    # --- reading ---

    def get(self, session: Session, request: Get) -> Reply | None:
        entry = self._entries.get(request.key)
        if entry is not None:
            return Value(request.seq, self._ledger.revision, entry.modified, entry.value)
        timeout = request.timeout
        if timeout is None:
            return Absent(request.seq, self._ledger.revision)
        if not timeout > 0:
            return TimedOut(request.seq, self._ledger.revision, (request.key,))
        return self._ledger.wait(session, request, self._lines, request.key)

    def keys(self, session: Session, request: Keys) -> Reply:
        found = tuple(key for key in self._entries if key.startswith(request.prefix))
        if request.count:
            return Integer(request.seq, self._ledger.revision, len(found))
        return Names(request.seq, self._ledger.revision, found)

    def exists(self, session: Session, request: Exists) -> Reply | None:
        missing, revision = self._missing(request), self._ledger.revision
        if request.timeout is None or not missing:
            there = [key for key in request.keys if key in self._entries]
            return Names(request.seq, revision, tuple(there))
        if not request.timeout > 0:
            return TimedOut(request.seq, revision, missing)
        if len(missing) > WAITED_KEYS:
            text = f"one request waits for {len(missing)} keys, and may wait for {WAITED_KEYS}; nothing raises that: wait for some at a time"
            raise Refused("too-many-waiting", text, size=len(missing), limit=WAITED_KEYS)
        return self._ledger.wait(session, request, self._lines, *missing)

    def _missing(self, request: Exists) -> tuple[str, ...]:
        return tuple([key for key in request.keys if key not in self._entries])

    # --- writing ---

    def set(self, session: Session, request: Set) -> Reply:
        entry = self._entries.get(request.key)
        replaced, writer = (0, None) if entry is None else (entry.modified, entry.writer)
        self._write(session, request, entry, request.ephemeral)
        # The session may have overwritten a value of another one that it had not read.
        lost = request.seen not in (None, replaced) and writer is not session.identity
        by = str(writer) if lost and writer is not None else ""
        return Done(request.seq, self._ledger.revision, replaced, by)

    def compare_and_set(self, session: Session, request: CompareAndSet) -> Reply:
        self._locks.check_fence(request.fence)  # also when nothing is written
        entry = self._entries.get(request.key)
        modified = 0 if entry is None else entry.modified
        if request.modified is not None:
            same = request.modified == modified
        else:
            # A large value equals none: its bytes are not looked at. Its revision can be compared.
            same = (None if entry is None else entry.value) == request.expected
        if same:
            self._write(session, request, entry)
            return Done(request.seq, self._ledger.revision, modified)
        if entry is None:
            return Absent(request.seq, self._ledger.revision)
        return Value(request.seq, self._ledger.revision, modified, entry.value)

    def delete(self, session: Session, request: Delete) -> Reply:
        self._locks.check_fence(request.fence)
        entry, ledger = self._entries.get(request.key), self._ledger
        if entry is None:
            return Absent(request.seq, ledger.revision)
        self._remove(entry)
        if not request.wanted:
            return Done(request.seq, ledger.revision, entry.modified)
        self._budget.used += entry.size  # until the reply is acknowledged
        ledger.keep(session, request.seq, Held(entry.size))
        return Value(request.seq, ledger.revision, entry.modified, entry.value)

    def add(self, session: Session, request: Add) -> Reply:
        """Keeps a key's ttl and owner as they are."""
        entry, number = self._entries.get(request.key), request.amount
        if entry is not None and request.text:
            number += self._digits(entry)
        elif entry is not None:
            try:
                number += _decode_integer(entry.value)
            except (msgspec.DecodeError, TypeError):  # TypeError: a large value
                raise _no_number(entry, "an integer") from None
        if not LOWEST <= number <= HIGHEST:
            text = f"{quoted(request.key)} would be {number}, and an integer that is added to has 64 bits"
            raise Refused("integer-overflow", text)
        value = _encode(b"%d" % number if request.text else number)
        self._replace(session, request.key, entry, value, len(value))
        return Integer(request.seq, self._ledger.revision, number)

    def _digits(self, entry: Entry) -> int:
        """Return the number of a key that torch's `add` writes. Raises Refused."""
        try:
            digits = _decode_bytes(entry.value)
        except (msgspec.DecodeError, TypeError):
            digits = b""
        if not _DIGITS.fullmatch(digits):
            raise _no_number(entry, "decimal digits in bytes")
        return int(digits)

    def append(self, session: Session, request: Append) -> Reply:
        """Keeps a key's ttl and owner as they are."""
        entry, old = self._entries.get(request.key), b""
        large = entry is not None and type(entry.value) is not bytes
        if entry is not None and not large:
            try:
                old = _decode_bytes(entry.value)
            except msgspec.DecodeError:
                text = f"{quoted(request.key)} does not hold bytes: nothing can be appended to it"
                raise Refused("wrong-type", text) from None
        length = len(old) + len(request.data)
        if large or length > APPEND_BYTES:
            length = max(length, entry.size if entry is not None else 0)
            text = f"{quoted(request.key)} would have {length} bytes or more, and what is appended to may have {APPEND_BYTES}; use a queue"
            raise Refused("value-too-large", text, size=length, limit=APPEND_BYTES)
        value = _encode(old + request.data)
        self._replace(session, request.key, entry, value, len(value))
        return Integer(request.seq, self._ledger.revision, length)

    # --- the table ---

    def _write(
        self,
        session: Session,
        request: Set | CompareAndSet,
        entry: Entry | None,
        ephemeral: bool = False,
    ) -> None:
        """Put the request's value, with its ttl and owner. Raises Refused."""
        ttl, key = request.ttl, request.key
        self._locks.check_fence(request.fence)
        check_bytes(request.value)
        if ttl is not None and not ttl > 0:  # nor NaN
            text = f"{quoted(key)} cannot live for {ttl} seconds: ttl= is more than 0"
            raise Refused("bad-request", text, ttl=ttl)
        entry = self._replace(session, key, entry, request.value, bytes_of(request.value))
        if entry.owner is not None:
            del entry.owner.ephemeral[key]
            entry.owner = None
        if ephemeral:
            entry.owner = session
            session.ephemeral[key] = None
        self.deadlines.set(entry, NEVER if ttl is None else self._ledger.now + ttl)

    def _replace(
        self, session: Session, key: str, entry: Entry | None, value: Stored, size: int
    ) -> Entry:
        """Put a value of `size` bytes into the key's entry, or a new one, within the limits."""
        budget, fresh = self._budget, entry is None
        if entry is None:
            weight = KEY_BYTES + len(key.encode())
            budget.check_name(key)
            budget.check_value(size, size + weight)
            budget.check_key()
            entry = self._entries[key] = Entry(key, weight)
            budget.keys += 1
            budget.used += weight
        else:
            budget.check_value(size, size - entry.size)
        budget.used += size - entry.size
        entry.value = value
        entry.size = size
        entry.writer = session.identity
        entry.modified = self._history.record(key, value)
        if fresh and key in self._lines:
            self._appeared(entry)
        return entry

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self.deadlines.set(entry, NEVER)
        if entry.owner is not None:
            del entry.owner.ephemeral[entry.key]
        self._budget.keys -= 1
        self._budget.used -= entry.weight + entry.size
        self._history.record(entry.key, None)

    # --- waiting ---

    def _appeared(self, entry: Entry) -> None:
        """Answer the requests that waited for this key, and for no other that is still missing."""
        ledger, revision = self._ledger, self._ledger.revision
        for waiter in self._lines.all(entry.key):
            request = waiter.request
            if type(request) is Get:
                value = Value(request.seq, revision, entry.modified, entry.value)
                ledger.answer(waiter, value)
                continue
            self._lines.leave(waiter, entry.key)
            if not waiter.names:
                # The last that was missing is there; another may have gone meanwhile.
                self._lines.join(waiter, self._missing(request))
            if not waiter.names:
                ledger.answer(waiter, Names(request.seq, revision, request.keys))

    def timed_out(self, waiter: Waiter) -> None:
        request = waiter.request
        missing = (request.key,) if type(request) is Get else self._missing(request)
        self._ledger.answer(waiter, TimedOut(request.seq, self._ledger.revision, missing))


def _no_number(entry: Entry, kind: str) -> Refused:
    text = f"{quoted(entry.key)} does not hold {kind}: nothing can be added to it"
    return Refused("wrong-type", text)
