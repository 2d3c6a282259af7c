"""One connection to a server, seen from the client: a request out, its reply in, large values
beside them.

One thread uses a connection at a time, and nothing here knows sessions: `Session` does. A
connection that failed in any way, or in which an exception struck, is closed: what was half sent or
half read cannot be told.
"""

from __future__ import annotations

import array
import contextlib
import errno
import itertools
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from rallypoint.clock import Clock
from rallypoint.host import memory
from rallypoint.host.unix_sockets import CLOEXEC, NOSIGNAL, TRUNCATED, descriptors_in
from rallypoint.store.client.call import Call
from rallypoint.store.client.connect import Opened
from rallypoint.store.client.failures import of_a_handler
from rallypoint.store.tls_socket import poll_of
from rallypoint.wire.frames import FrameError, framed, header
from rallypoint.wire.messages import (
    LENDS,
    MESSAGE_BYTES,
    UNDECODABLE,
    AnyReply,
    Closing,
    Done,
    Failed,
    Freed,
    Ping,
    Release,
    Value,
    decode_reply,
    decode_request,
    encode,
)
from rallypoint.wire.values import Parts, alloc

READ_BYTES = 16 * 1024
"""Bytes asked for by one read: room that is at hand, which 64 KiB are not. What is missing of a
large value is read to where it belongs."""

BUFFERS = 512
"""Buffers of one sendmsg: half of Linux's IOV_MAX."""

CHUNK_BYTES = 64 * 1024 * 1024
"""Bytes of shared memory that are copied between two looks at pending signals: some 5 ms."""

FREE_SEGMENTS = 8
"""Free segments that are kept for the next large value. Two are enough for one key written over and
over; state dicts use several sizes.
"""

FREE_BYTES = 256 * 1024 * 1024
"""The same in bytes, except that the last one is kept whatever its size: the next value is most
often as large.
"""

FREE_ROUNDS = 3
"""Rounds of the keep-alive, a lease's length together, after which a free segment that nobody used
is given back to the machine.
"""

LENT_SEGMENTS = 64
"""Segments in use by the server that are kept for later. Beyond these (large values under many
keys) a segment is used once: each costs this process a descriptor."""

DESCRIPTORS = 16
"""Descriptors that one read may deliver; the server sends one per frame."""

LONGEST_POLL = 2e6
"""Seconds of one wait, which stand for every longer time: the kernel counts the milliseconds of a
poll in 31 bits.
"""

UNANSWERED = 3
"""Signs of life without an answer, after which none is sent: TCP keeps repeating those. With a
fourth message on its way, it would double the time between two repetitions of a lost one."""

SOONER = 4
"""Shares of the interval after which a sign of life follows one without an answer: its arrival
tells TCP at once that the one before was lost."""

_ANCILLARY_BYTES = socket.CMSG_SPACE(4 * DESCRIPTORS)


_PING = framed(encode(Ping(0, 0)))


class ConnectionBroken(Exception):
    """A connection is of no use any more: the server closed it, or it failed."""


class TooLate(Exception):
    """A deadline passed while something was sent or waited for."""


class ServerCloses(Exception):
    """The server says that it stops, and will answer nothing more."""


Answer = tuple[AnyReply, memoryview | None]
"""A reply, and the bytes of a large value beside it."""


class Connection:
    """See the module. `interrupt` may be called from any thread."""

    __slots__ = (
        "_closing", "_cutter", "_descriptors", "_free", "_lent", "_now", "_numbered", "_on_sign", "_pings", "_poll", "_ready", "_recv",
        "_recvmsg", "_round", "_send", "_signed", "_traffic", "closed", "heard", "local", "moved", "shared", "sock", "where",
    )  # fmt: skip

    def __init__(
        self,
        opened: Opened,
        clock: Clock,
        traffic: list[int],
        *,
        shared_memory: bool,
        on_sign: Callable[[float], None],
    ) -> None:
        """Take over a conversation. `traffic`: bytes sent and received, to be added to.
        `shared_memory`: large values go by descriptor, over a Unix socket. `on_sign`: called with
        the time at which a sign of life was sent that the server has answered."""
        self.sock = opened.sock
        self.where = opened.where
        self.local = opened.sock.family == socket.AF_UNIX
        self.shared = shared_memory and self.local
        self.heard = self.moved = (
            clock.monotonic()
        )  # when bytes came last, or a request was sent; and when bytes moved last
        self._traffic = traffic
        self.closed = False
        self._closing = (
            threading.RLock()
        )  # a descriptor's number may be another file's once it is closed
        self._now = clock.monotonic
        self._on_sign = on_sign
        self._pings: deque[float] = deque()  # when those were sent that have no answer yet
        self._poll = poll_of(self.sock)
        self._send = self.sock.send
        self._recv = self.sock.recv
        self._recvmsg = self.sock.recvmsg
        self._cutter = opened.cutter
        self._cutter.message_bytes = MESSAGE_BYTES
        self._cutter.body_bytes = (
            1 << 62
        )  # the server has proved itself; a value that it has is one that somebody could store
        self._ready: deque[Answer] = deque()
        self._descriptors: deque[int] = (
            deque()
        )  # that have arrived and belong to no reply yet; -1: this process had no room for it
        self._lent: dict[int, memory.Segment] = {}  # in use by the server, by number
        self._free: list[
            tuple[int, memory.Segment, int]
        ] = []  # number, segment, and the round in which it came back
        self._numbered = 0
        self._signed = 0.0
        self._round = 0

    def __repr__(self) -> str:
        return f"<Connection to {self.where}{', shared memory' if self.shared else ''}{': closed' if self.closed else ''}>"

    # --- the end ---

    def interrupt(self) -> None:
        """Wake the thread that waits for this connection: its call ends in ConnectionBroken."""
        with self._closing:
            if not self.closed:
                with contextlib.suppress(OSError):  # the server was quicker
                    self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the conversation. Called by the thread that has the connection."""
        self.interrupt()
        self._dispose()

    def after_fork(self) -> None:
        """Close what a forked child has inherited. The parent's conversation goes on."""
        self._closing = threading.RLock()
        self._dispose()

    def _dispose(self) -> None:
        # A program that closes all descriptors, as a daemon does, gets another connection.
        with self._closing, contextlib.suppress(OSError):
            self.closed = True
            self.sock.close()
        while self._descriptors:
            fd = self._descriptors.popleft()
            if fd >= 0:
                os.close(fd)
        for segment in (*self._lent.values(), *(segment for _, segment, _ in self._free)):
            segment.close()
        self._lent.clear()
        self._free.clear()

    def __del__(self) -> None:
        if hasattr(self, "_closing"):  # an exception may strike in the middle of `__init__`
            self._dispose()

    # --- out ---

    def send(self, before: bytes, calls: Sequence[Call]) -> None:
        """Send the frames `before`, and these requests. The last one may have a large value beside
        it; then its deadline is some time after bytes moved last. Raises ConnectionBroken or
        TooLate; then the last request was not sent to its end.
        """
        last = calls[-1]
        frames = before
        for call in calls:
            call.tried += 1
            frames += call.message
            if call is not last:
                call.sent = True  # should the sending be broken off, it may have gone
        if last.value is not None:
            self._send_value(before, last, last.value)
        else:
            try:
                sent = self._send(frames, NOSIGNAL)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise self._unsendable(error) from error
            self._traffic[0] += sent
            if sent < len(frames):
                self._send_all([memoryview(frames)[sent:]], last.deadline)
        last.sent = True

    def _send_value(self, before: bytes, call: Call, value: Parts) -> None:
        """Send a request with a large value behind it, by shared memory if possible. Its deadline
        moves on: to `patience` seconds after bytes moved last.
        """
        if self.shared:
            try:
                number, segment = self._fill(value)
            except OSError as error:  # no memory, or no descriptor, is left for it
                if of_a_handler(error):
                    raise
            else:
                request = msgspec.structs.replace(
                    decode_request(call.message), shared=value.size, segment=number
                )
                self._send_all([before], call.deadline)
                if number:
                    self._lent[number] = segment
                fds = array.array("i", [segment.fileno()])
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
                self._send_all([framed(encode(request))], call.deadline, rights=rights)
                call.deadline = max(call.deadline, self._now() + call.patience)
                return
        front = before + header(len(call.message), value.size) + call.message
        self._send_all([front, *value.buffers], call.deadline, call.patience)
        call.deadline = max(call.deadline, self.moved + call.patience)

    def _send_all(
        self,
        buffers: Sequence[bytes | memoryview],
        deadline: float,
        patience: float = 0.0,
        rights: Sequence[tuple[int, int, array.array[int]]] = (),
    ) -> None:
        """Send these bytes, the first of them with `rights`. The deadline moves on while bytes do:
        it passes `patience` seconds after any went.
        """
        pieces = deque(memoryview(buffer) for buffer in buffers if len(buffer))
        self.moved = self._now()
        while pieces:
            try:
                sent = self.sock.sendmsg(list(itertools.islice(pieces, BUFFERS)), rights, NOSIGNAL)
            except BlockingIOError:
                self._wait_for_room(max(deadline, self.moved + patience))
                continue
            except OSError as error:
                raise self._unsendable(error) from error
            rights = ()
            self._traffic[0] += sent
            self.moved = self._now()
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.popleft())
            if sent:
                pieces[0] = pieces[0][sent:]

    def _wait_for_room(self, deadline: float) -> None:
        ready = select.poll()
        ready.register(self.sock, select.POLLOUT)
        if not ready.poll(max(0.0, min(deadline - self._now(), LONGEST_POLL)) * 1000.0):
            raise TooLate

    # --- shared memory of ours ---

    def _fill(self, value: Parts) -> tuple[int, memory.Segment]:
        """Put a value into a segment, a free one or a new one: its number, 0 for one that is used
        only once. Raises OSError when there is no memory or no descriptor left."""
        number, segment = self._segment(value.size)
        at = 0
        for buffer in value.buffers:
            for start in range(0, len(buffer), CHUNK_BYTES):
                chunk = buffer[start : start + CHUNK_BYTES]
                segment.write(chunk, at)
                at += len(chunk)
        return number, segment

    def _segment(self, size: int) -> tuple[int, memory.Segment]:
        fitting = [
            entry for entry in self._free if size <= entry[1].capacity <= 2 * size + (1 << 20)
        ]
        if fitting:
            entry = min(fitting, key=lambda entry: entry[1].capacity)
            self._free.remove(entry)
            return entry[0], entry[1]
        capacity = memory.capacity_for(size)
        segment = memory.Segment(memory.create(capacity), size, capacity)
        if len(self._lent) >= LENT_SEGMENTS:
            return 0, segment
        self._numbered += 1
        return self._numbered, segment

    def _freed(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            segment = self._lent.pop(number, None)
            if segment is not None:
                self._free.append((number, segment, self._round))
        free = self._free
        while len(free) > FREE_SEGMENTS or (
            len(free) > 1 and sum(segment.capacity for _, segment, _ in free) > FREE_BYTES
        ):
            del free[0]

    def trim(self) -> None:
        """Give back segments that were not used for a while. Called by the keep-alive."""
        self._round += 1
        self._free = [entry for entry in self._free if entry[2] > self._round - FREE_ROUNDS]

    # --- in ---

    def receive(self, call: Call, deadline: float, interval: float, silence: float) -> Answer:
        """Wait for the reply to a request. Raises TooLate, ConnectionBroken, ServerCloses.

        While it waits it gives a sign of life every `interval` seconds, and takes the connection
        for broken after `silence` seconds in which nothing came.
        """
        now = self.heard = self._signed = self._now()
        while True:
            while self._ready:
                answer = self._ready.popleft()
                if answer[0].seq == call.seq:
                    return answer
                self._notice(answer[0])
            due = self._signed + interval
            if self._pings:
                sooner = len(self._pings) < UNANSWERED
                due = self._signed + interval / SOONER if sooner else now + interval
            wait = min(deadline, due) - now
            if self._poll(wait * 1000.0 if wait > 0.0 else 0):
                self._read(deadline, silence, call)
                now = self.heard
            else:
                now = self._sign_of_life(deadline, silence)

    def look(self) -> None:
        """Take in notices that have arrived while nobody used the connection. Raises
        ConnectionBroken, ServerCloses.
        """
        while self._poll(0):
            self._read(self._now(), 0.0)
            while self._ready:
                self._notice(self._ready.popleft()[0])

    def _sign_of_life(self, deadline: float, silence: float) -> float:
        """Give up, or say that this client lives, since nothing has arrived so far; return the
        time."""
        now = self._now()
        if now >= deadline:
            raise TooLate
        if now - self.heard >= silence:
            raise ConnectionBroken(f"no sign of life from the server for {now - self.heard:.1f} s")
        if len(self._pings) >= UNANSWERED:
            return now
        self._signed = now
        self._pings.append(now)
        try:
            self._send_all([_PING], now)
        except TooLate:
            raise ConnectionBroken("the server did not take what was sent to it") from None
        return now

    def _read(self, deadline: float, silence: float, call: Call | None = None) -> None:
        """Read what has arrived, the replies into `_ready`; of a large value all is read. `call`:
        what is waited for. Its reply may come with a descriptor, which takes a read of twice the
        work. Raises ConnectionBroken, and for a large value TooLate."""
        try:
            if self.local and call is not None and call.kind in LENDS:
                data, ancillary, flags, _ = self._recvmsg(READ_BYTES, _ANCILLARY_BYTES, CLOEXEC)
                if ancillary:
                    self._descriptors.extend(descriptors_in(ancillary))
                if flags & TRUNCATED:
                    self._descriptors.append(-1)
            else:
                data = self._recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._broken(error) from error
        if not data:
            raise ConnectionBroken("the server closed the connection")
        self.heard = self._now()
        self._traffic[1] += len(data)
        try:
            frame = self._cutter.next(data)
            while frame is not None:
                message, begun, missing = frame
                try:
                    reply = decode_reply(message)
                except UNDECODABLE as error:
                    text = f"the server sent a message that is not rallypoint's: {error}"
                    raise ConnectionBroken(text) from error
                body = None
                if begun or missing or (type(reply) is Value and reply.shared):
                    patience = call.patience if call is not None else 0.0
                    body = self._value_of(reply, begun, missing, deadline, patience, silence)
                self._ready.append((reply, body))
                frame = self._cutter.next() if self._cutter.data else None
        except FrameError as error:
            raise ConnectionBroken(f"the server sent {error}") from error

    def _value_of(
        self,
        reply: AnyReply,
        begun: bytes,
        missing: int,
        deadline: float,
        patience: float,
        silence: float,
    ) -> memoryview:
        """Read the large value of a reply."""
        if type(reply) is not Value:
            raise ConnectionBroken(f"the server sent a {type(reply).__name__} with a body")
        if begun or missing:
            return self._read_body(begun, missing, deadline, patience, silence)
        body = self._read_shared(reply.shared)
        release = framed(encode(Release(0, 0, (reply.seq,))))
        self._send_all([release], max(deadline, self._now() + patience))
        return body

    def _notice(self, reply: AnyReply) -> None:
        if type(reply) is Freed:
            self._freed(reply.numbers)
        elif type(reply) is Done and reply.seq == 0:
            if self._pings:
                self._on_sign(self._pings.popleft())
        elif type(reply) is Closing:
            raise ServerCloses(reply.text)
        elif type(reply) is Failed and reply.seq == 0:
            raise ConnectionBroken(f"the server ended the conversation: {reply.text}")

    def _read_body(
        self, begun: bytes, missing: int, deadline: float, patience: float, silence: float
    ) -> memoryview:
        """Read a large value, of which `begun` is there. The deadline moves on while bytes do."""
        view = _room(len(begun) + missing)
        view[: len(begun)] = begun
        while missing:
            try:
                count = self.sock.recv_into(view[len(view) - missing :])
            except BlockingIOError:
                until = max(deadline, self.heard + patience)
                if not self._poll(max(0.0, min(until - self._now(), silence)) * 1000.0):
                    self._sign_of_life(until, silence)
                continue
            except OSError as error:
                raise self._broken(error) from error
            if not count:
                raise ConnectionBroken("the server closed the connection in the middle of a value")
            self.heard = self._now()
            self._traffic[1] += count
            missing -= count
        return view

    def _read_shared(self, size: int) -> memoryview:
        """Read the bytes of a value that came as a descriptor."""
        if not self._descriptors:
            raise ConnectionBroken("the server announced shared memory and sent none")
        fd = self._descriptors.popleft()
        if fd < 0:
            raise OSError(
                errno.EMFILE,
                "this process has no descriptor left for a value in shared memory (ulimit -n)",
            )
        try:
            view = _room(size)
            done = 0
            while done < size:
                count = os.preadv(fd, [view[done : done + CHUNK_BYTES]], done)
                if not count:
                    raise ConnectionBroken("the server sent less shared memory than it announced")
                done += count
        finally:
            os.close(fd)
        return view

    def _unsendable(self, error: OSError) -> ConnectionBroken:
        """Make the same for sending: if the server has closed the connection, what it said last may
        still be there."""
        broken = self._broken(error)
        with contextlib.suppress(ConnectionBroken):
            self.look()
        return broken

    def _broken(self, error: OSError) -> ConnectionBroken:
        """Make the exception for an error of the socket. What a signal handler raised goes on as
        it is.
        """
        if of_a_handler(error):
            raise
        return ConnectionBroken(error.strerror or str(error))


def _room(size: int) -> memoryview:
    try:
        return alloc(size)
    except (MemoryError, OSError, ValueError, OverflowError) as error:  # of numpy, or of a mapping
        raise MemoryError(f"there is no memory here for a value of {size} bytes") from error
