"""The server's end of one connection: bytes that wait to be sent, a value that has half arrived,
memory that the other end may still read."""

from __future__ import annotations

import array
import select
import socket
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from rallypoint.host.fd_passing import close_fds
from rallypoint.host.memory import Segment
from rallypoint.host.unix_sockets import CLOEXEC, NOSIGNAL, TRUNCATED, descriptors_in
from rallypoint.wire.frames import Cutter, framed
from rallypoint.wire.messages import Freed, encode

if TYPE_CHECKING:
    from rallypoint.store.server.bulk import Transfer
    from rallypoint.store.state.replies import Session
    from rallypoint.wire.messages import AnyRequest

READ_BYTES = 64 * 1024
"""Bytes asked for by one read: hundreds of small requests. More would be taken from memory's slow end for
each read, however little comes.
"""

PAUSE_BYTES = 1024 * 1024
"""Unsent replies above which no further request of this client is looked at: it does not read what
it asked for.
"""

PAUSE_ITEMS = 256
"""The same for large values, of which only the handle waits."""

BACKLOG_BYTES = 64 * 1024 * 1024
"""Unsent replies at which the connection is closed. Only answers to requests that waited can bring
it there, and a client that comes back is given them again."""

DESCRIPTORS = 8
"""Maximum of descriptors that have arrived and belong to no request yet: each comes with its request,
so one is usual."""

LENT = 64
"""Segments that a client has been handed and has not released. Further values are sent to it
through the socket.
"""

_ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTORS * array.array("i").itemsize)


class Gone(Exception):
    """The end of a connection; the text, if any, says what the other end did wrong."""


class Malformed(Exception):
    """A client that has proved itself does not keep to the protocol."""


class Lending(NamedTuple):
    """A frame that a segment's descriptor accompanies."""

    frame: bytes
    segment: Segment


class Body:
    """A value in the server's own memory."""

    __slots__ = ("data", "size")

    def __init__(self, data: bytearray | bytes) -> None:
        self.data = data
        self.size = len(data)

    def __repr__(self) -> str:
        return f"<Body {self.size} bytes>"


class Arriving(msgspec.Struct):
    """A request whose body has not arrived as a whole. `body` is filled by the loop; without it a
    transfer does that, or, for a request that was refused, `left` bytes are thrown away."""

    request: AnyRequest | None
    left: int
    body: bytearray | None = None
    reserved: int = 0


class Peer:
    """One connection. Only the loop's thread touches it."""

    __slots__ = (
        "arriving", "batch", "closing", "cutter", "descriptors", "fd", "freed", "held", "incoming", "lent", "local", "mask",
        "number", "out", "outgoing", "pid", "queued", "session", "sock", "source", "stalled",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, source: str, cutter: Cutter) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.local = sock.family == socket.AF_UNIX
        self.source = source  # for the log
        self.number = 0  # of those that were admitted, in the order in which they were
        self.pid = 0  # of the process whose session this is, when that is certain
        self.cutter = cutter
        self.held = 0  # bytes that are charged for a long message, of which a part has arrived
        self.session: Session | None = None  # None: a stranger
        self.mask = 0  # what epoll watches; -1: nothing, not even for a hang-up
        self.closing = False  # to be closed when `out` is sent, or when a thread has given it back
        self.out: deque[bytes | memoryview | Lending | Segment] | None = None
        self.queued = 0  # bytes in `out`, segments aside
        self.batch = b""  # frames that are sent together
        self.arriving: Arriving | None = None
        self.incoming: Transfer | None = None
        self.outgoing: Transfer | None = None
        # whole requests wait here until the other end has read its replies: no event would tell of
        # them
        self.stalled = False
        self.descriptors: deque[int] | None = (
            None  # -1: it was lost on the way, because this process has too many
        )
        self.lent: dict[int, Segment] | None = None  # by the seq of the reply
        self.freed: deque[int] | None = (
            None  # numbers of the client's segments that it may use again
        )

    def __repr__(self) -> str:
        return f"<Peer {self.source}: {self.session or 'a stranger'}, {self.queued} bytes to send>"

    # --- in ---

    def read(self) -> bytes:
        """Return what has arrived. Raises BlockingIOError when that is nothing, Gone at the end."""
        try:
            if not self.local:
                data = self.sock.recv(READ_BYTES)
            else:
                data, ancillary, flags, _ = self.sock.recvmsg(READ_BYTES, _ANCILLARY_BYTES, CLOEXEC)
                if ancillary or flags & TRUNCATED:
                    self._descriptors_of(ancillary, flags)
        except BlockingIOError:
            raise
        except OSError as error:
            raise Gone from error
        if not data:
            raise Gone
        return data

    def _descriptors_of(self, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        if self.descriptors is None:
            self.descriptors = deque()
        self.descriptors.extend(descriptors_in(ancillary))
        if (
            flags & TRUNCATED
        ):  # its place stays: the next request's descriptor must not be taken for this one's
            self.descriptors.append(-1)
        if len(self.descriptors) > DESCRIPTORS:
            raise Gone("it sends descriptors that belong to no request")

    def descriptor(self) -> int | None:
        """Return the descriptor of the request that was just cut, the caller's from now on; -1 when
        it was lost, None when there was none."""
        return self.descriptors.popleft() if self.descriptors else None

    def drop_unclaimed(self) -> None:
        """Close descriptors that came with no request, when everything that has arrived was cut."""
        while self.descriptors:
            close_fds(self.descriptors.popleft())

    # --- out ---

    def send(self, frame: bytes = b"") -> None:
        """Send what is in `batch`, the notice that the client may use segments again, and this
        frame, by one call; queue what the socket does not take. Raises OSError when the connection
        is broken, Gone when too much waits."""
        if self.freed:
            numbers = []
            while self.freed:  # emptied one by one: another thread may add to it
                numbers.append(self.freed.popleft())
            self.batch += framed(encode(Freed(0, 0, tuple(numbers))))
        data, self.batch = self.batch + frame, b""
        sent = 0
        if data and not self.out and self.outgoing is None:
            try:
                sent = self.sock.send(data, NOSIGNAL)
            except BlockingIOError:
                pass
        if sent < len(data):
            self.queue(memoryview(data)[sent:])

    def queue(self, item: bytes | memoryview | Lending | Segment) -> None:
        """Put at the end of what waits to be sent. Raises Gone when that is too much."""
        if self.out is None:
            self.out = deque()
        self.out.append(item)
        kind = type(item)
        if kind is not Segment:
            self.queued += len(item.frame) if isinstance(item, Lending) else len(item)  # type: ignore[arg-type]
            if self.queued > BACKLOG_BYTES:
                raise Gone(f"it does not read: {self.queued} bytes wait for it")

    def flush(self) -> Segment | None:
        """Send what the socket takes. Returns a segment when it is its turn: a transfer sends it,
        and then `flush` goes on.
        """
        out = self.out
        while out:
            first = out[0]
            try:
                if isinstance(first, Segment):
                    out.popleft()
                    return first
                if isinstance(first, Lending):
                    rights = array.array("i", [first.segment.fileno()])
                    sent = self.sock.sendmsg(
                        [first.frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], NOSIGNAL
                    )
                    self.queued -= sent
                    out.popleft()
                    if sent < len(first.frame):
                        out.appendleft(memoryview(first.frame)[sent:])
                else:
                    self._flush_bytes(out)
            except BlockingIOError:
                return None
        self.out = None
        return None

    def _flush_bytes(self, out: deque[bytes | memoryview | Lending | Segment]) -> None:
        """Send as many plain items as go at once."""
        buffers: list[bytes | memoryview] = []
        for item in out:
            if isinstance(item, (Segment, Lending)) or len(buffers) == 64:
                break
            buffers.append(item)
        sent = self.sock.sendmsg(buffers, [], NOSIGNAL)
        self.queued -= sent
        for buffer in buffers:
            if sent < len(buffer):
                if sent:
                    out[0] = memoryview(buffer)[sent:]
                return
            sent -= len(buffer)
            out.popleft()

    @property
    def paused(self) -> bool:
        """True while the other end must read before more of its requests are looked at."""
        return self.out is not None and (self.queued > PAUSE_BYTES or len(self.out) > PAUSE_ITEMS)

    def wanted(self) -> int:
        """Return the events that epoll is to watch for."""
        incoming, outgoing, mask = self.incoming, self.outgoing, 0
        if not incoming.moves if incoming else not self.closing and not self.paused:
            mask = select.EPOLLIN
        waits = self.out or (self.stalled and not self.closing)
        if not outgoing.moves if outgoing else waits:
            mask |= select.EPOLLOUT
        return mask

    @property
    def moves(self) -> bool:
        """True while a thread uses the socket."""
        return any(each is not None and each.moves for each in (self.incoming, self.outgoing))

    # --- shared memory ---

    def can_lend(self) -> bool:
        """Tell whether a descriptor may accompany the next value."""
        return self.local and (self.lent is None or len(self.lent) < LENT)

    def lend(self, seq: int, segment: Segment) -> None:
        """Note that the other end reads from this segment until `release`."""
        if self.lent is None:
            self.lent = {}
        self.lent[seq] = segment

    def release(self, seqs: tuple[int, ...]) -> None:
        """Note that the other end has read the segments that came with these replies."""
        if self.lent:
            for seq in seqs:
                self.lent.pop(seq, None)

    def free(self, number: int) -> None:
        """Note that a segment of the client's is not needed any more. Called by whichever thread
        drops its last reference."""
        freed = self.freed
        if freed is not None:
            freed.append(number)

    def abandon(self) -> None:
        """Close everything. Memory that was lent may still be read by the other end, and is never
        written again."""
        self.sock.close()
        self.drop_unclaimed()
        for segment in (self.lent or {}).values():
            segment.abandon()
        for item in self.out or ():
            if isinstance(item, Lending):
                item.segment.abandon()
        self.lent = self.out = self.freed = self.arriving = self.incoming = self.outgoing = None
        self.queued = 0
        self.session = None
