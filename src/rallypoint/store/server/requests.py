"""Requests from a connection to the state, and replies from the state to the connection.

A large value moves beside its message: through the loop's memory, by a thread (`bulk.py`), or as a
descriptor of shared memory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from rallypoint.host.memory import Segment
from rallypoint.store.logger import logger
from rallypoint.store.server.bulk import Movers, Transfer
from rallypoint.store.server.connection import (
    READ_BYTES,
    Arriving,
    Body,
    Gone,
    Lending,
    Malformed,
    Peer,
)
from rallypoint.store.server.large_values import LargeValues
from rallypoint.store.state.state import Large, Session, State
from rallypoint.wire.frames import HEADER, FrameError, framed
from rallypoint.wire.messages import (
    UNDECODABLE,
    AnyRequest,
    CompareAndSet,
    Failed,
    Push,
    Release,
    Reply,
    Resolve,
    Set,
    Value,
    decode_request,
    encode,
    seq_of,
)

FLUSH_BYTES = 16 * 1024
"""Replies to pipelined requests are collected up to here and sent by one call: few enough to be
copied for each reply that is added."""

DISCARD_BYTES = 256 * 1024
"""Read and thrown away by one call, of a body that was refused."""

UNACKNOWLEDGED = 262_144
"""Kept replies at which a session is ended: some 60 MB. A client acknowledges with every request;
the bookkeeping of this one is broken."""

_NOT_NEEDED = Body(b"")
"""Stands for the value of a request that was answered before."""

log = logger()


class Requests:
    """Way of requests and replies between all connections and the state."""

    def __init__(
        self, state: State, values: LargeValues, movers: Movers, now: Callable[[], float]
    ) -> None:
        self._state = state
        self._values = values
        self._movers = movers
        self._now = now
        self._discarded = bytearray()

    # --- in ---

    def work(self, peer: Peer, session: Session, fresh: bytes = b"") -> None:
        """Carry out the requests that have arrived, for as long as the client reads the replies.
        `fresh`: what has just been read. Raises Gone."""
        cutter = peer.cutter
        if peer.held and len(cutter.data) + len(fresh) >= cutter.announced:
            self._state.release(peer.held)
            peer.held = 0
        peer.stalled = False
        try:
            frame = cutter.next(fresh)
            while frame is not None:
                message, body, missing = frame
                try:
                    request = decode_request(message)
                except UNDECODABLE as error:
                    raise Malformed(f"a message that is not rallypoint's: {error}") from error
                if body or missing or getattr(request, "shared", 0):
                    self._handle_large(peer, session, request, body, missing)
                else:
                    self._carry_out(peer, session, request)
                if not cutter.data:
                    break
                if len(peer.batch) > FLUSH_BYTES or peer.out is not None:
                    peer.send()
                    peer.stalled = peer.paused
                frame = None if peer.stalled else cutter.next()
        except (FrameError, Malformed) as error:
            peer.send(framed(encode(Failed(0, self._state.revision, "bad-request", str(error)))))
            raise Gone(str(error)) from error
        if cutter.data:
            self._hold(peer)
        elif peer.descriptors and peer.arriving is None:
            peer.drop_unclaimed()
        peer.send()

    def _handle_large(
        self, peer: Peer, session: Session, request: AnyRequest, body: bytes, missing: int
    ) -> None:
        """Carry out a request with a value beside it, if that is there."""
        found = self._value(peer, session, request, body, missing)
        if isinstance(found, Failed):
            self.put(peer, found)
        elif found is not None:  # None: it has to arrive first
            value = found if found is not _NOT_NEEDED else None
            del found  # its last reference must not be here
            self._carry_out(peer, session, request, value)

    def _carry_out(
        self, peer: Peer, session: Session, request: AnyRequest, large: Large | None = None
    ) -> None:
        """Let the state carry out a request, and queue the reply."""
        try:
            reply = self._state.apply(self._now(), session, request, large)
        except Exception:  # this client learns it at once, and all others are served
            name = type(request).__name__
            log.exception("the store failed on a %s; please report this", name)
            text = f"rallypoint itself failed on this {name}; the server's log says how"
            reply = Failed(request.seq, self._state.revision, "bad-request", text)
        if reply is not None:
            self.put(peer, reply)
        elif request.seq in session.waiting:
            # The reply goes to the newest connection on which the request came. (A copy of it may
            # still be read from an older one.)
            former = session.routes.get(request.seq)
            if former is None or former.number <= peer.number:
                session.routes[request.seq] = peer
        elif type(request) is Release:
            peer.release(request.of)
        if len(session.replies) > UNACKNOWLEDGED or len(session.acked) > UNACKNOWLEDGED:
            because = f"it acknowledged none of its last {len(session.replies)} replies"
            self._state.end(self._now(), session, because)
            raise Gone(f"it acknowledges none of {UNACKNOWLEDGED} replies")

    def _hold(self, peer: Peer) -> None:
        """Charge a long message that has begun to arrive until it is whole; if there is no room,
        say so, and throw the rest away."""
        size = peer.cutter.announced
        if peer.held or size <= max(READ_BYTES, len(peer.cutter.data)):
            return
        refused = self._state.reserve(size)
        if refused is None:
            peer.held = size
            return
        begun, missing = peer.cutter.skip()
        peer.arriving = Arriving(None, missing)
        self.put(peer, replace(refused, seq=seq_of(begun)))

    def _value(
        self, peer: Peer, session: Session, request: AnyRequest, body: bytes, missing: int
    ) -> Large | Failed | None:
        """Return the value that comes beside this request, or the reply that refuses it, or
        _NOT_NEEDED, or None when it has yet to arrive."""
        if not isinstance(request, Set | CompareAndSet | Push | Resolve) or request.value:
            raise Malformed(f"a {type(request).__name__} with a body beside it")
        repeated = request.seq in session.replies or (
            request.seq <= session.acked_in_slot(request.seq)
        )
        if request.shared:
            if body or missing:
                raise Malformed("a value in shared memory with a body beside it")
            fd = peer.descriptor()
            if fd is None:
                raise Malformed("a value in shared memory that did not come with it")
            if fd < 0:
                return self._values.cannot_hold(request, errno.EMFILE)
            if not repeated:
                return self._values.shared(peer, request, fd, request.shared, request.segment)
            os.close(fd)
            return _NOT_NEEDED
        size = len(body) + missing
        room = _NOT_NEEDED if repeated else self._values.room(request, size)
        if isinstance(room, Body | Failed):
            peer.arriving = Arriving(None, missing) if missing else None
            return room
        try:
            if isinstance(room, Segment):
                room.write(body, 0)
            else:
                room[: len(body)] = body
        except OSError as error:
            peer.arriving = Arriving(None, missing) if missing else None
            return self._values.undo(request, size, error)
        if not missing:
            return room if isinstance(room, Segment) else Body(room)
        if isinstance(room, Segment):
            peer.arriving = Arriving(request, missing, None, size)
            peer.incoming = Transfer(peer, room, incoming=True, at=len(body))
            self._movers.submit(peer.incoming)
        else:
            peer.arriving = Arriving(request, missing, room, size)
        return None

    def read_body(self, peer: Peer, arriving: Arriving) -> None:
        """Read more of a body."""
        if peer.incoming is not None:
            self._movers.submit(peer.incoming)
            return
        if arriving.body is not None:
            count = peer.sock.recv_into(memoryview(arriving.body)[-arriving.left :])
        else:
            if not self._discarded:
                self._discarded = bytearray(DISCARD_BYTES)
            count = peer.sock.recv_into(self._discarded, min(arriving.left, DISCARD_BYTES))
        if not count:
            raise Gone
        if peer.session is not None:
            peer.session.heard = self._now()
        arriving.left -= count
        if arriving.left:
            return
        peer.arriving = None
        if arriving.body is not None:
            self._arrived(peer, arriving, Body(arriving.body))

    def _arrived(self, peer: Peer, arriving: Arriving, value: Large) -> None:
        """Carry out a request whose value is there at last."""
        assert peer.session is not None
        assert arriving.request is not None
        self._carry_out(peer, peer.session, arriving.request, value)
        peer.send()

    # --- out ---

    def put(self, peer: Peer, reply: Reply) -> None:
        """Queue a reply, and its large value behind it."""
        if type(reply) is not Value or type(reply.value) is bytes:
            message = encode(reply)
            peer.batch += HEADER.pack(len(message), 0) + message
            return
        value: Any = reply.value
        peer.send()
        bare = Value(reply.seq, reply.revision, reply.modified, b"")
        if isinstance(value, Segment) and peer.can_lend():
            peer.lend(reply.seq, value)
            peer.queue(Lending(framed(encode(replace(bare, shared=value.size))), value))
        else:
            peer.queue(framed(encode(bare), value.size))
            peer.queue(value if isinstance(value, Segment) else memoryview(value.data))
        self._flush(peer)

    def tell(self, peer: Peer, reply: Reply) -> None:
        """Send the reply to a request that has waited."""
        self.put(peer, reply)
        peer.send()

    def _flush(self, peer: Peer) -> None:
        """Send what waits, unless a thread is sending."""
        if peer.outgoing is None and (segment := peer.flush()) is not None:
            peer.outgoing = Transfer(peer, segment, incoming=False)
            self._movers.submit(peer.outgoing)

    def can_send(self, peer: Peer) -> None:
        """Go on sending, and then with the requests that had to wait for it."""
        if peer.outgoing is not None:
            self._movers.submit(peer.outgoing)
            return
        self._flush(peer)
        idle = not peer.paused and not peer.closing and peer.arriving is None
        if idle and peer.cutter.data and peer.session is not None:
            self.work(peer, peer.session)

    # --- large values that threads move ---

    def moved(self, peer: Peer, transfer: Transfer) -> None:
        """Go on with a transfer that a thread has given back."""
        if peer.session is not None:
            peer.session.heard = self._now()
        if peer.mask < 0 or transfer.outcome == "gone":
            raise Gone
        if transfer.outcome == "turn":
            self._movers.submit(transfer)
        elif transfer.outcome == "waiting":
            pass  # epoll watches the socket again
        elif transfer.incoming:
            self._taken_in(peer, transfer)
        else:
            peer.outgoing = None
            self.can_send(peer)

    def _taken_in(self, peer: Peer, transfer: Transfer) -> None:
        arriving = peer.arriving
        assert arriving is not None
        assert arriving.request is not None
        peer.incoming = peer.arriving = None
        if transfer.outcome == "whole":
            self._arrived(peer, arriving, transfer.segment)
            return
        refused = self._values.undo(arriving.request, arriving.reserved)
        if transfer.at < transfer.size:
            peer.arriving = Arriving(None, transfer.size - transfer.at)
        self.tell(peer, refused)
