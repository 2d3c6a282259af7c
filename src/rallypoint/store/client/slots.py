"""Slots of a session, each for one call at a time, and the pool from which calls take them.

A slot has a connection and numbers of its own for its requests, so that two calls share nothing: a
thread, or a signal handler in the middle of a call, takes another slot. (A session of NFS 4.1 works
alike: RFC 8881, section 2.10.6.)
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from rallypoint.store.client.call import Call
from rallypoint.store.client.connection import Connection
from rallypoint.wire.frames import HEADER, framed
from rallypoint.wire.messages import (
    CARRIERS,
    SLOT_BITS,
    TAGS,
    AnyReply,
    Cancel,
    Request,
    encode,
)
from rallypoint.wire.values import Parts

if TYPE_CHECKING:
    from rallypoint.store.client.session import Session

PIPELINE = 64
"""Requests that are sent before the first of their replies is read."""

PIPELINE_BYTES = 32 * 1024
"""Bytes of them: less than any socket's buffer. The server stops reading from a client that does
not read.
"""

Asked: TypeAlias = tuple[type[Request], tuple[Any, ...]]
"""A request without its number: its kind, and its fields after `seq` and `acked`."""


class ReplyKeeper(Protocol):
    """Place for a reply that must be known whatever interrupts the call: an exception leaves the
    reply here, or the server takes back what it gave.
    """

    reply: AnyReply | None
    session: Session | None


class Ticket:
    """The right to use a slot. The queue of idle slots has it, or one call. When it is lost, the
    thread of the keep-alive brings the slot back."""

    __slots__ = ("__weakref__", "slot")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot


class Slot:
    """One of the requests that a session may have under way at a time."""

    __slots__ = (
        "_on_loss", "_ticket", "connected_at", "connection", "counts", "given_up", "into", "owed", "seq", "settled", "traffic"
    )  # fmt: skip

    def __init__(self, number: int, on_loss: Callable[[object], None]) -> None:
        """Make a slot without a ticket. `on_loss`: called when the slot's ticket is lost."""
        # numbers of the last request, and of the last one that was answered or cancelled
        self.seq = self.settled = number << SLOT_BITS
        self.connection: Connection | None = None
        self.connected_at = 0.0  # monotonic time
        self.into: ReplyKeeper | None = None  # of the request under way
        self.given_up = False  # nobody waits for the request under way
        self.owed = b""  # frames that cancel former requests, to be sent before the next one
        self.counts = [0] * (max(TAGS.values()) + 1)  # requests by kind: at its place in `TAGS`
        self.traffic = [0, 0]  # bytes sent and received
        self._on_loss = on_loss
        self._ticket: weakref.ref[Ticket] | None = None

    def ticket(self) -> Ticket:
        """Make the slot's only ticket; a former one does not count any more."""
        ticket = Ticket(self)
        self._ticket = weakref.ref(ticket, self._on_loss)
        self.given_up = False
        return ticket

    def begin(
        self, requests: Sequence[Asked], began: float, deadline: float, patience: float = 0.0
    ) -> list[Call]:
        """Make the slot's next requests, as many as are sent together: small ones, or one with a
        large value, which goes beside the message."""
        calls: list[Call] = []
        size = 0
        for kind, fields in requests[:PIPELINE]:
            value: Parts | None = None
            if kind in CARRIERS and type(fields[1]) is Parts:
                if calls:
                    break
                value, fields = fields[1], (fields[0], b"", *fields[2:])
            tag, seq = TAGS[kind], self.seq + 1
            message = encode((tag, seq, self.settled, *fields))
            if value is None:
                message = HEADER.pack(len(message), 0) + message
            self.counts[tag] += 1
            self.seq = seq
            calls.append(Call(kind, fields, seq, message, began, deadline, patience, value))
            size += len(message)
            if value is not None or size > PIPELINE_BYTES:
                break
        return calls

    @property
    def is_abandoned(self) -> bool:
        """True if no call has the slot, and it is not idle."""
        return self.given_up or self._ticket is None or self._ticket() is None

    def cancel(self) -> None:
        """Let the next request tell the server that nobody waits for those before it."""
        self.disconnect()
        if self.into is not None and self.into.reply is not None:
            self.settled = self.seq  # its caller has it
        self.into = None
        self.owed = b"".join(
            [framed(encode(Cancel(0, 0, seq))) for seq in range(self.settled + 1, self.seq + 1)]
        )

    def disconnect(self) -> None:
        """Close the connection; the next request opens another one."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()


class Slots:
    """All slots of a session. No method needs a lock: each step is one of a deque's."""

    def __init__(self, on_loss: Callable[[object], None]) -> None:
        """`on_loss`: called when the ticket of a slot is lost."""
        self.is_over = False  # nobody takes a slot any more, except to end the session
        self._on_loss = on_loss
        self._numbers = itertools.count()
        self._all: list[Slot] = []
        self._idle: deque[Ticket] = deque()  # with connections; the last one was used last
        self._unconnected: deque[Ticket] = deque()

    def __iter__(self) -> Iterator[Slot]:
        """Iterate over the slots that there are now."""
        return iter(self._all[:])

    def take(self, *, cold: bool = False) -> Ticket:
        """Take an idle slot, the one that was used last if there is a choice, or a new one. `cold`:
        the one that was not used for longest, since a thread that asks all the time keeps its own.
        """
        for idle in (self._idle, self._unconnected):
            try:
                return idle.popleft() if cold else idle.pop()
            except IndexError:
                continue
        slot = Slot(next(self._numbers), self._on_loss)
        ticket = slot.ticket()
        self._all.append(slot)
        return ticket

    def put_back(self, ticket: Ticket, *, cold: bool = False) -> None:
        """Put a slot back of which all is answered, or needs no cancelling."""
        slot = ticket.slot
        slot.settled, slot.into = slot.seq, None
        if slot.connection is None:
            self._unconnected.append(ticket)
        elif cold:
            self._idle.appendleft(ticket)
        else:
            self._idle.append(ticket)
        if self.is_over:
            self.drop_idle()

    def drop_idle(self) -> None:
        """Close the connections that no call uses: the session is over."""
        while self._idle:
            try:
                self._idle.pop().slot.disconnect()
            except IndexError:  # another thread does the same
                break
        for slot in self:
            if slot.is_abandoned:
                slot.disconnect()

    @property
    def connection(self) -> Connection | None:
        """One of the connections, if there is any."""
        return next((slot.connection for slot in self if slot.connection), None)

    @property
    def idle(self) -> int:
        """Number of the slots that are idle and have a connection."""
        return len(self._idle)

    @property
    def has_calls(self) -> bool:
        """True while a call is under way, or was given up."""
        return len(self._idle) + len(self._unconnected) < len(self._all)
