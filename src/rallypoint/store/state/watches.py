"""The last changes of keys, in order: watches are answered from them. Pure.

Bounded in number and bytes. A watch from before the first change that is known is told `compacted`,
never given a gap.
"""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter

from rallypoint.store.state.quotas import Refused, Stored
from rallypoint.store.state.replies import Kind, Ledger, Session
from rallypoint.wire.messages import Change, Changes, Reply, TimedOut, Watch

CHANGES = 65_536
"""Changes that are kept: three seconds of the fastest writers that were measured, hours of a usual
job. 15 MB at most with small values."""

CHANGE_BYTES = 16 * 1024 * 1024
"""Bytes of values that only the history keeps; not part of the store's limit."""

BATCH = 1024
"""Changes in one reply: a watcher that fell behind does not hold up the others."""

BATCH_BYTES = 1024 * 1024
"""Bytes of values in one reply, for the same reason; one change is always sent."""

_revision = itemgetter(0)


class History(Kind):
    """Changes of keys, and the watches that wait for more of them, by prefix."""

    def __init__(self, ledger: Ledger, count: int = CHANGES, size: int = CHANGE_BYTES) -> None:
        super().__init__(ledger)
        # revision, key, value, large: as in `Change`
        self._changes: list[tuple[int, str, bytes | None, bool]] = []
        self._count = count
        self._size = size
        self._bytes = 0
        self._first = ledger.revision  # before any change
        self._forgotten = 0  # revision of the last change that is no longer known

    def record(self, key: str, value: Stored | None) -> int:
        """Add a change of a key, None when it was removed, and tell the watches. Return its
        revision."""
        self._ledger.revision = revision = self._ledger.revision + 1
        large = value is not None and type(value) is not bytes
        shown = b"" if large else value
        self._changes.append((revision, key, shown, large))
        self._bytes += len(shown or b"")
        if len(self._changes) > self._count or self._bytes > self._size:
            self._shorten()
        if self._lines:
            batch = (Change(key, revision, shown, large),)
            for length in range(len(key) + 1):
                for waiter in self._lines.all(key[:length]):
                    changes = Changes(waiter.request.seq, revision, batch, revision)
                    self._ledger.answer(waiter, changes)
        return revision

    def watch(self, session: Session, request: Watch) -> Reply | None:
        seq, since, revision = request.seq, request.since, self._ledger.revision
        if since is None:
            return Changes(seq, revision, (), revision)
        text = ""
        if since > revision or 0 < since < self._first:
            text = f"revision {since} is another server's: here they go from {self._first} to {revision}"
        elif since < self._forgotten:
            text = f"the changes after revision {since} are no longer all known, only those after {self._forgotten} are"
        if text:
            raise Refused("compacted", text, since=since, oldest=self._forgotten, revision=revision)
        batch, until = self._batch(since, request.prefix)
        if batch:
            return Changes(seq, revision, batch, until)
        if not request.timeout > 0:
            return TimedOut(seq, revision)
        return self._ledger.wait(session, request, self._lines, request.prefix)

    def _batch(self, since: int, prefix: str) -> tuple[tuple[Change, ...], int]:
        """Return changes after `since`, and the revision up to which they are complete."""
        batch: list[Change] = []
        size = 0
        for at in range(bisect_right(self._changes, since, key=_revision), len(self._changes)):
            revision, key, value, large = self._changes[at]
            if not key.startswith(prefix):
                continue
            size += len(value or b"")
            if batch and (len(batch) >= BATCH or size > BATCH_BYTES):
                return tuple(batch), batch[-1].revision
            batch.append(Change(key, revision, value, large))
        return tuple(batch), self._ledger.revision

    def _shorten(self) -> None:
        """Drop the oldest changes until an eighth of the room is free, so that this is rare."""
        changes = self._changes
        surplus = len(changes) - self._count * 7 // 8
        gone = 0
        while gone < len(changes) and (gone < surplus or self._bytes > self._size * 7 // 8):
            self._bytes -= len(changes[gone][2] or b"")
            gone += 1
        if gone:
            self._forgotten = changes[gone - 1][0]
            del changes[:gone]
