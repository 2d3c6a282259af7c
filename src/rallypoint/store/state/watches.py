"""The last changes of keys, in order: what watches are answered from. Pure.

Bounded in number and bytes. Whoever asks for changes older than that is told `compacted`, never
given a gap.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter

from rallypoint.store.state.quotas import Large
from rallypoint.store.state.replies import Answer, Ledger, Session
from rallypoint.store.state.waiters import Lines, Waiter
from rallypoint.wire.messages import Change, Changes, TimedOut, Watch

CHANGES = 65_536
"""Changes that are kept: three seconds of the fastest writers we have measured, hours of a usual
job. 15 MB at most with small values.
"""

CHANGE_BYTES = 16 * 1024 * 1024
"""Bytes of values that are kept alive only by being history; not part of what the store's limit
counts.
"""

BATCH = 1024
"""Changes in one reply: a watcher that fell behind does not hold up the others."""

BATCH_BYTES = 1024 * 1024
"""Bytes of values in one reply, for the same reason; one change is always sent, whatever it weighs.
"""

_revision = itemgetter(0)


class History:
    """What happened to keys, and who waits for more of it."""

    def __init__(self, ledger: Ledger, count: int = CHANGES, size: int = CHANGE_BYTES) -> None:
        self._ledger = ledger
        self._changes: list[
            tuple[int, str, bytes | None, bool]
        ] = []  # revision, key, value, large: as in `Change`
        self._count = count
        self._size = size
        self._bytes = 0
        self._first = ledger.revision  # before any change
        self._forgotten = 0  # the revision of the last change that is no longer known
        self._lines = Lines(self._timed_out)  # by prefix
        self._lengths: list[
            int
            # of all these prefixes, ascending, and perhaps of some that nobody waits for any more
        ] = []

    def record(self, revision: int, key: str, value: bytes | None, large: bool) -> None:
        """A key has changed; `value` None: it was removed, b"" with `large`: see `Change`."""
        self._changes.append((revision, key, value, large))
        if value:
            self._bytes += len(value)
        if len(self._changes) > self._count or self._bytes > self._size:
            self._shorten()
        if self._lines:
            self._wake(revision, key, value, large)

    def watch(
        self, now: float, session: Session, request: Watch, large: Large | None
    ) -> Answer | None:
        seq, since, prefix = request.seq, request.since, request.prefix
        ledger = self._ledger
        revision = ledger.revision
        if since is None:
            return Changes(seq, revision, (), revision), None
        if since > revision or 0 < since < self._first:
            text = f"revision {since} is another server's: here they go from {self._first} to {revision}"
            return ledger.failed(
                request, "compacted", text, since=since, oldest=self._forgotten, revision=revision
            )
        if since < self._forgotten:
            text = f"the changes after revision {since} are no longer all known, only those after {self._forgotten} are"
            return ledger.failed(
                request, "compacted", text, since=since, oldest=self._forgotten, revision=revision
            )
        batch, until = self._batch(since, prefix)
        if batch:
            return Changes(seq, revision, batch, until), None
        if not request.timeout > 0:
            return TimedOut(seq, revision), None
        at = bisect_left(self._lengths, len(prefix))
        if at == len(self._lengths) or self._lengths[at] != len(prefix):
            self._lengths = sorted({len(prefix), *map(len, self._lines)})
        return ledger.wait(now, session, request, request.timeout, self._lines, (prefix,))

    def _batch(self, since: int, prefix: str) -> tuple[tuple[Change, ...], int]:
        """What to answer, and up to which revision that is everything."""
        changes = self._changes
        batch: list[Change] = []
        size = 0
        for at in range(bisect_right(changes, since, key=_revision), len(changes)):
            revision, key, value, large = changes[at]
            if not key.startswith(prefix):
                continue
            size += len(value or b"")
            if batch and (len(batch) >= BATCH or size > BATCH_BYTES):
                return tuple(batch), batch[-1].revision
            batch.append(Change(key, revision, value, large))
        return tuple(batch), self._ledger.revision

    def _wake(self, revision: int, key: str, value: bytes | None, large: bool) -> None:
        for length in self._lengths:
            if length > len(key):
                break
            prefix = key[:length]
            if prefix in self._lines:
                batch = (Change(key, revision, value, large),)
                for waiter in self._lines.all(prefix):
                    self._ledger.answer(
                        waiter, Changes(waiter.request.seq, revision, batch, revision)
                    )

    def _shorten(self) -> None:
        """Drop the oldest changes until an eighth of the room is free, so that this is done
        rarely.
        """
        changes = self._changes
        surplus = max(len(changes) - self._count * 7 // 8, 0)
        gone = 0
        while gone < len(changes) and (gone < surplus or self._bytes > self._size * 7 // 8):
            self._bytes -= len(changes[gone][2] or b"")
            gone += 1
        if gone:
            self._forgotten = changes[gone - 1][0]
            del changes[:gone]

    def _timed_out(self, now: float, waiter: Waiter) -> None:
        self._ledger.answer(waiter, TimedOut(waiter.request.seq, self._ledger.revision))
