"""One open connection to a server, seen from the client: requests out, replies in, large values beside them.

Nothing here knows sessions, sequence numbers or time-outs of requests: `Session` does. A link that failed in any way, or in which
an exception (also one raised by a signal handler) struck while bytes were on their way, is thrown away: what was left half sent
or half read cannot be told. The session repeats on the next link whatever has not been answered.

**Who does what.** Any thread may `post`, which never waits. One at a time is the *writer*; what others post meanwhile is queued behind
it, and so is what the socket does not take at once. A writer that finds something queued in the end has to `pump` until all is out.
`wait` and `receive` are for the thread that drives the session, and for a signal handler's calls inside that.

**One step.** As in `session.py`: no locks; where the comment says so the code depends on nothing being called in between.
"""

from __future__ import annotations

import array
import contextlib
import errno
import itertools
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rallypoint.clock import Clock
from rallypoint.host import memory
from rallypoint.host.sockets import CLOEXEC, NOSIGNAL, TRUNCATED
from rallypoint.store.dial import Opened
from rallypoint.store.failures import of_a_handler
from rallypoint.wire.frames import HEADER, HEADER_BYTES, HEADS, FrameError
from rallypoint.wire.messages import MESSAGE_BYTES, UNDECODABLE, AnyReply, Freed, Value, decode_reply
from rallypoint.wire.values import Parts, alloc

READ_BYTES = 64 * 1024

FIRST_BYTES = 448
"""Of the first read for a reply, which is small as a rule: for so few, Python has room of its own at hand. A large buffer is fetched from
libc each time, and most of it given back."""

BUFFERS = 512
"""Of one sendmsg: half of Linux's IOV_MAX."""

CHUNK_BYTES = 64 * 1024 * 1024
"""Of shared memory, copied between two looks at pending signals: some 5 ms."""

DISCARD_BYTES = 1024 * 1024
"""Read and thrown away by one call, of a value for which there is no memory."""

FREE_SEGMENTS = 8
"""Free segments kept for the next large value. Two are enough for one key written over and over; state dicts use several sizes."""

FREE_BYTES = 256 * 1024 * 1024
"""The same in bytes, except that the last one is kept whatever its size: the next value is most often as large."""

FREE_ROUNDS = 3
"""Rounds of the keeper, a lease's length together, after which a free segment that nobody used is given back to the machine."""

LENT_SEGMENTS = 64
"""Segments in use by the server that are kept for later. Beyond these (large values under many keys) a segment is used once: each
costs this process a descriptor."""

DESCRIPTORS = 16
"""That may come with one read; the server sends one per frame."""

_ANCILLARY_BYTES = socket.CMSG_SPACE(4 * DESCRIPTORS)

_GONE = (errno.EPIPE, errno.ECONNRESET)

_pack = HEADER.pack


class LinkBroken(Exception):
    """The connection is of no use any more. `gone`: because the server has closed it; there may still be something to receive."""

    def __init__(self, why: str, *, gone: bool = False) -> None:
        super().__init__(why)
        self.gone = gone


class TooLate(Exception):
    """The deadline passed while something was being sent. The link is of no use any more either."""


class Unread:
    """Stands for the bytes of a large value that came and could not be kept; `error` says why."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


Received = tuple[AnyReply, memoryview | Unread | None]


class _Piece(NamedTuple):
    """Something to send. `owner` stands with the last piece of its frame; `segment`'s descriptor goes with the first byte."""

    data: bytes | memoryview
    owner: object | None = None
    segment: memory.Segment | None = None


class _Descriptors(deque[int]):
    """That have arrived and belong to nobody yet; -1 for one that this process had no room for. Closed with this, wherever it goes.

    Apart from the link, which needs no finalizer of its own then: what a signal handler raises in one is lost.
    """

    def close(self) -> None:
        with contextlib.suppress(IndexError):  # several threads may come here
            while True:
                _close(self.popleft())

    __del__ = close


class Link:
    """See the module. `writer`: the thread that is sending, 0 for none; then nothing is queued. `driven`: how many calls, one inside the
    other, are about to use the socket for receiving. `receiving`: one of them is in the middle of `receive`. `lends`: a reply with a
    descriptor may be on its way; whoever asks for what may have such a reply says so before. Without that `exchange` reads with `recv`,
    which is half the work of `recvmsg`."""

    __slots__ = (
        "_blind", "_clean", "_cutter", "_descriptors", "_filling", "_free", "_left", "_lent", "_now", "_numbered", "_queue",
        "_recv", "_recvmsg", "_round", "_send", "closed", "driven", "heard", "lends", "local", "moved", "number", "poll",
        "received_bytes", "receiving", "sent_bytes", "shared", "sock", "welcome", "where", "writer",
    )  # fmt: skip

    def __init__(self, opened: Opened, clock: Clock, number: int, *, shared_memory: bool) -> None:
        """`number`: which of the session's links this is, from 1. `shared_memory`: large values go by descriptor, over a Unix socket."""
        self._descriptors: _Descriptors | None = None  # that have arrived
        self.sock = opened.sock
        self.number = number
        self.welcome = opened.welcome
        self.where = opened.where
        self.local = opened.sock.family == socket.AF_UNIX
        self.shared = shared_memory and self.local
        self.heard = clock.monotonic()  # when bytes came last
        self.moved = self.heard  # when queued bytes last went
        self.sent_bytes = 0
        self.received_bytes = 0
        self.closed = False
        self.writer = 0
        self.driven = 0
        self.receiving = False
        self.lends = False
        self._now = clock.monotonic
        readable = select.poll()
        readable.register(self.sock, select.POLLIN)
        self._send = self.sock.send
        self._recvmsg = self.sock.recvmsg
        self._recv = self.sock.recv
        self.poll = readable.poll  # milliseconds; RuntimeError when it is asked while it waits, see `wait_again`
        self._queue: deque[_Piece] = deque()
        self._cutter = opened.cutter
        self._cutter.message_bytes = MESSAGE_BYTES
        self._cutter.body_bytes = 1 << 62  # the server has proved itself; a value that it has is one that somebody could store
        self._clean = False  # the cutter is known to be empty
        self._blind = 0  # bytes in front of what the cutter has that were read without their descriptors
        self._filling: tuple[AnyReply, memoryview | Unread] | None = None  # the large value that is on its way in
        self._left = 0  # bytes of it that are still to come
        self._lent: dict[int, memory.Segment] = {}  # in use by the server, by number
        self._free: deque[tuple[int, memory.Segment, int]] = deque()  # number, segment, and the round in which it came back
        self._numbered = 0
        self._round = 0

    def __repr__(self) -> str:
        return f"<Link to {self.where}{', shared memory' if self.shared else ''}{': closed' if self.closed else ''}>"

    # --- the end ---

    def close(self) -> None:
        """End the conversation, which wakes whoever waits for the socket. May be called again."""
        if not self.closed:
            self.closed = True
            with contextlib.suppress(OSError):  # the peer was quicker
                self.sock.shutdown(socket.SHUT_RDWR)
            self._lent.clear()
            self._free.clear()
        self.dispose()

    def dispose(self) -> None:
        """Close the descriptors of a closed link, unless a thread is between looking up the socket's number and the kernel: the number
        could be another file's by then. That thread calls this again when it is out."""
        if not self.driven and not self.writer:
            self._dispose()

    def _dispose(self) -> None:
        self.sock.close()
        if self._descriptors is not None:
            self._descriptors.close()

    def abandon(self) -> None:
        """In a forked child, which has no other thread: close what it has inherited. The parent's conversation goes on."""
        self.closed = True
        self._dispose()
        for segment in (*self._lent.values(), *(segment for _, segment, _ in self._free)):
            segment.close()

    # --- out ---

    def post(self, frames: bytes, owner: object, me: int) -> bool:
        """Send whole frames without bodies, by thread `me`, as far as they go without waiting; whether all of it is out. If not, and
        `writer` is `me`, this thread has to `pump`. Raises LinkBroken; then nothing of it was sent."""
        mine = False
        if not self.writer and not self.closed: self.writer = me; mine = True  # one step  # fmt: skip
        if not mine:
            return self._queue_up((_Piece(frames, owner),), me)
        try:
            sent = self._send(frames, NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            if of_a_handler(error):
                raise
            self.writer = 0
            raise LinkBroken(_said(error), gone=error.errno in _GONE) from error
        self.sent_bytes += sent
        if sent < len(frames):
            self._queue.appendleft(_Piece(memoryview(frames)[sent:], owner))
            return False
        if not self._queue: self.writer = 0; mine = False  # one step  # fmt: skip
        if mine:
            return False
        if self.closed:
            self.dispose()
        return True

    def post_with(self, message: bytes, value: Parts, owner: object, me: int) -> bool:
        """The same for a message with a large value behind it. Leaves all of it to `pump`."""
        *front, last = value.buffers
        head = _Piece(_pack(len(message), value.size) + message)
        return self._queue_up((head, *map(_Piece, front), _Piece(last, owner)), me)

    def post_lent(self, message: bytes, number: int, segment: memory.Segment, owner: object, me: int) -> bool:
        """The same for a message that announces a segment from `fill`, which is the server's until that says otherwise."""
        if number:
            self._lent[number] = segment
        return self._queue_up((_Piece(_pack(len(message), 0) + message, owner, segment),), me)

    def try_post(self, message: bytes, me: int) -> bool:
        """Send a small message if nobody is sending and it can go at once; whether it went. `writer` as with `post`. Raises LinkBroken."""
        data = _pack(len(message), 0) + message
        mine = False
        if not self.writer and not self.closed: self.writer = me; mine = True  # one step  # fmt: skip
        if not mine:
            return False
        try:
            sent = self.sock.send(data, NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            if of_a_handler(error):
                raise
            self.writer = 0
            raise LinkBroken(_said(error), gone=error.errno in _GONE) from error
        self.sent_bytes += sent
        if 0 < sent < len(data):
            self.close()  # before another thread can send behind a part of this
            self.writer = 0
            self.dispose()
            raise LinkBroken("the connection is congested")
        if not self._queue: self.writer = 0; mine = False  # one step  # fmt: skip
        if not mine and self.closed:
            self.dispose()
        return sent > 0

    def _queue_up(self, pieces: tuple[_Piece, ...], me: int) -> bool:
        if self.closed:
            raise LinkBroken("the connection was closed")
        if self.writer == me:
            raise LinkBroken("a signal handler used the store while something was being sent")
        self._queue.extend(pieces)
        # Whoever writes does not leave while something is queued; if it left before that, this thread writes.
        if self.writer == 0: self.writer = me  # one step  # fmt: skip
        return False

    def unsent(self) -> Iterator[object]:
        """Whose frames the kernel has not taken to the end."""
        return (piece.owner for piece in list(self._queue) if piece.owner is not None)

    def pump(self, deadline: float, patience: float, look_in: Callable[[], bool]) -> None:
        """Send what is queued, waiting for room until `deadline`, and until `patience` seconds after anything went. Raises LinkBroken,
        TooLate.

        The server stops reading from whoever does not read: `look_in` is called when something has arrived, and returns whether it
        took that in; if not, another thread is about to.
        """
        ready = select.poll()
        ready.register(self.sock, select.POLLOUT | select.POLLIN)
        queue = self._queue
        while True:
            if not queue: self.writer = 0; return  # one step  # fmt: skip
            batch, ancillary = self._batch()
            try:
                sent = self.sock.sendmsg(batch, ancillary, NOSIGNAL)
            except BlockingIOError:
                found = ready.poll(max(0.0, max(deadline, self.moved + patience) - self._now()) * 1000.0)
                if not found:
                    raise TooLate from None
                if found[0][1] & select.POLLIN and not look_in():
                    ready.modify(self.sock, select.POLLOUT)
                continue
            except OSError as error:
                if of_a_handler(error):
                    raise
                raise LinkBroken(_said(error), gone=error.errno in _GONE) from error
            self.sent_bytes += sent
            self.moved = self._now()
            while queue and sent >= len(queue[0].data):
                sent -= len(queue.popleft().data)
            if sent:
                queue[0] = _Piece(memoryview(queue[0].data)[sent:], queue[0].owner)

    def _batch(self) -> tuple[list[bytes | memoryview], list[tuple[int, int, array.array[int]]]]:
        """What one sendmsg can take from the front of the queue; a descriptor goes with the first byte of all."""
        pieces = list(self._queue)[:BUFFERS]  # one call: an iterator made in one would not outlive what another thread adds before the next
        first = pieces[0].segment
        if first is not None:
            return [pieces[0].data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [first.fileno()]))]
        return [piece.data for piece in itertools.takewhile(lambda piece: piece.segment is None, pieces)], []

    # --- shared memory of ours ---

    def fill(self, value: Parts) -> tuple[int, memory.Segment]:
        """Put a value into a segment, a free one or a new one: its number, 0 for one that is used only once. Raises OSError when there
        is no memory or no descriptor left, and LinkBroken."""
        number, segment = self._segment(value.size)
        at = 0
        for buffer in value.buffers:
            for start in range(0, len(buffer), CHUNK_BYTES):
                chunk = buffer[start : start + CHUNK_BYTES]
                segment.write(chunk, at)
                at += len(chunk)
        return number, segment

    def _segment(self, size: int) -> tuple[int, memory.Segment]:
        if self.closed:
            raise LinkBroken("the connection was closed")
        fitting = [entry for entry in list(self._free) if size <= entry[1].capacity <= 2 * size + (1 << 20)]
        for entry in sorted(fitting, key=lambda entry: entry[1].capacity):
            with contextlib.suppress(ValueError):  # another thread was quicker
                self._free.remove(entry)
                return entry[0], entry[1]
        capacity = memory.capacity_for(size)
        segment = memory.Segment(memory.create(capacity), size, capacity)
        if len(self._lent) >= LENT_SEGMENTS:
            return 0, segment
        self._numbered = number = self._numbered + 1
        return number, segment

    def _freed(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            segment = self._lent.pop(number, None)
            if segment is not None:
                self._free.append((number, segment, self._round))
        while (free := list(self._free)) and (
            len(free) > FREE_SEGMENTS or (len(free) > 1 and sum(segment.capacity for _, segment, _ in free) > FREE_BYTES)
        ):
            self._drop(free[0])

    def trim(self) -> None:
        """Give back segments that nobody has used for a while. Called by the keeper."""
        self._round += 1
        for entry in list(self._free):
            if entry[2] <= self._round - FREE_ROUNDS:
                self._drop(entry)

    def _drop(self, entry: tuple[int, memory.Segment, int]) -> None:
        with contextlib.suppress(ValueError):  # another thread was quicker
            self._free.remove(entry)

    # --- in ---

    def exchange(self, frame: bytes, owner: object, me: int, seconds: float) -> AnyReply | None:
        """`post`, `wait` and `receive` in one, for the thread that drives: the way that nearly every request takes.

        A reply, whoever asked for it: `receiving` is for the caller to unset, when it has been handed over. None when it is not that
        simple: not everything could be sent (`writer` is `me`), or nothing has come, or, if the link is `receiving`, something else than
        one small reply: see `backlog`. Raises LinkBroken; then nothing was sent, unless the link is `receiving`.
        """
        mine = False
        if not self.writer and not self.closed: self.writer = me; mine = True  # one step  # fmt: skip
        if not mine:
            self._queue_up((_Piece(frame, owner),), me)
            return None
        send = self._send
        try:
            sent = send(frame, NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            if of_a_handler(error):
                raise
            self.writer = 0
            raise LinkBroken(_said(error), gone=error.errno in _GONE) from error
        self.sent_bytes += sent
        if sent < len(frame):
            self._queue.appendleft(_Piece(memoryview(frame)[sent:], owner))
            return None
        if not self._queue: self.driven += 1; self.writer = 0; mine = False  # one step: one of the two keeps the socket open  # fmt: skip
        if mine:
            return None
        try:
            poll = self.poll
            if self.closed or not poll(seconds * 1000.0):
                return None
            self.receiving = True
            if self._filling is not None:
                return None
            blind = not self.lends and self._clean
            if self.local and not blind:  # `_read`, in place
                recvmsg = self._recvmsg
                data, ancillary, flags, _ = recvmsg(FIRST_BYTES, _ANCILLARY_BYTES, CLOEXEC)
                if ancillary or flags & TRUNCATED:
                    self._take_descriptors(ancillary, flags)
            else:
                recv = self._recv
                data = recv(FIRST_BYTES)
            if not data:
                raise LinkBroken("the server closed the connection")
            now = self._now
            self.heard = now()
            size = len(data)
            self.received_bytes += size
            if size == FIRST_BYTES:
                self._blind = size if blind else 0
                self._cutter.feed(data)
                with contextlib.suppress(LinkBroken):  # what came before the end is still to be handed over, and the end is found again
                    self._cutter.feed(self._read())
            else:
                if self._clean and data[0] == size - HEADER_BYTES:
                    # One small frame, and whole, if this can be decoded: no message is the beginning of another one, so that all of its
                    # length is in the first byte; and nothing but a Value has a body. The cutter would say the same in four times the time.
                    try:
                        reply: AnyReply = decode_reply(data[HEADER_BYTES:])
                    except UNDECODABLE:
                        pass  # the beginning of a longer one, or no message: `backlog` says which
                    else:
                        if type(reply) is Value:
                            if not reply.shared and data.startswith(HEADS[size - HEADER_BYTES]):
                                return reply
                        elif type(reply) is not Freed:
                            return reply
                self._blind = size if blind else 0
                self._cutter.feed(data)
            return None
        except BlockingIOError:
            return None
        except OSError as error:
            if of_a_handler(error):
                raise
            raise LinkBroken(_said(error)) from error
        finally:
            self.driven -= 1
            if self.closed:
                self.dispose()

    def wait(self, seconds: float) -> bool:
        """Wait until `receive` has something to do, at most `seconds`. Signal handlers run meanwhile, and may raise."""
        try:
            return bool(self.poll(seconds * 1000.0))
        except RuntimeError as error:
            return self.wait_again(seconds, error)

    def wait_again(self, seconds: float, error: RuntimeError) -> bool:
        """The same, in a signal handler that runs in the middle of such a wait. `error`: what `poll` raised; it is raised when it is
        that of a signal handler."""
        if str(error) != "concurrent poll() invocation":
            raise  # we are in the caller's except clause
        another = select.poll()
        another.register(self.sock, select.POLLIN)
        return bool(another.poll(seconds * 1000.0))

    @property
    def filling(self) -> int:
        """The request whose large value is on its way in, 0: none."""
        return self._filling[0].seq if self._filling is not None else 0

    def receive(self) -> list[Received]:
        """What has arrived, without waiting: replies, each with the bytes of its large value. Raises LinkBroken.

        A large value may take several calls. After an exception the link is of no use.
        """
        self.receiving = True
        try:
            if self._filling is not None:
                return self._fill()
            self._cutter.feed(self._read())
        except BlockingIOError:
            self.receiving = False
            return []
        return self.backlog()

    def _read(self) -> bytes:
        """Some bytes. Raises BlockingIOError, LinkBroken."""
        try:
            if self.local:
                data, ancillary, flags, _ = self._recvmsg(READ_BYTES, _ANCILLARY_BYTES, CLOEXEC)
                if ancillary or flags & TRUNCATED:
                    self._take_descriptors(ancillary, flags)
            else:
                data = self._recv(READ_BYTES)
        except BlockingIOError:
            raise
        except OSError as error:
            if of_a_handler(error):
                raise
            raise LinkBroken(_said(error)) from error
        if not data:
            raise LinkBroken("the server closed the connection")
        self.heard = self._now()
        self.received_bytes += len(data)
        return data

    def backlog(self) -> list[Received]:
        """What has arrived and was not returned yet, also with the end of the handshake. Raises LinkBroken."""
        received: list[Received] = []
        cutter = self._cutter
        try:
            while (frame := cutter.next()) is not None:
                message, body, missing = frame
                blind = self._blind
                if blind:
                    self._blind = max(0, blind - HEADER_BYTES - len(message) - len(body))
                reply = _decoded(message)
                if type(reply) is Value and (body or missing):
                    view = _room(len(body) + missing)
                    if not isinstance(view, Unread):
                        view[: len(body)] = body
                    if missing:
                        self._filling, self._left = (reply, view), missing
                        break
                    received.append((reply, view))
                elif body or missing:
                    raise LinkBroken(f"the server sent a {type(reply).__name__} with a body")
                elif type(reply) is Value and reply.shared:
                    if blind:  # it was asked for between our last look and the reading, by another thread
                        raise LinkBroken("the server sent shared memory while none was expected")
                    received.append((reply, self._read_shared(reply.shared)))
                elif type(reply) is Freed:
                    self._freed(reply.numbers)
                else:
                    received.append((reply, None))
        except FrameError as error:
            raise LinkBroken(f"the server sent {error}") from error
        self._clean = not len(cutter)
        self.receiving = False
        return received

    def _take_descriptors(self, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        if self._descriptors is None:
            self._descriptors = _Descriptors()
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
                self._descriptors.extend(fds)
        if flags & TRUNCATED:
            self._descriptors.append(-1)

    def _fill(self) -> list[Received]:
        """More of the large value that is under way."""
        assert self._filling is not None
        reply, view = self._filling
        try:
            if isinstance(view, Unread):
                count = self.sock.recv_into(bytearray(min(self._left, DISCARD_BYTES)))
            else:
                count = self.sock.recv_into(view[len(view) - self._left :])
        except BlockingIOError:
            raise
        except OSError as error:
            if of_a_handler(error):
                raise
            raise LinkBroken(_said(error)) from error
        if not count:
            raise LinkBroken("the server closed the connection in the middle of a value")
        self.heard = self._now()
        self.received_bytes += count
        self._left -= count
        self.receiving = False
        if self._left:
            return []
        self._filling = None
        return [(reply, view)]

    def _read_shared(self, size: int) -> memoryview | Unread:
        """The bytes of a value that came as a descriptor. They are the server's again when the session has sent Release."""
        if not self._descriptors:
            raise LinkBroken("the server announced shared memory and sent none")
        fd = self._descriptors[0]
        try:
            if fd < 0:
                return Unread(OSError(errno.EMFILE, "this process has no descriptor left for a value in shared memory (ulimit -n)"))
            view = _room(size)
            if isinstance(view, Unread):
                return view
            done = 0
            while done < size:
                count = os.preadv(fd, [view[done : done + CHUNK_BYTES]], done)
                if not count:
                    raise LinkBroken("the server sent less shared memory than it announced")
                done += count
        except OSError as error:
            if of_a_handler(error):
                raise
            raise LinkBroken(_said(error)) from error
        finally:
            _close(self._descriptors.popleft())
        return view


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _decoded(message: bytes) -> AnyReply:
    try:
        reply: AnyReply = decode_reply(message)
    except UNDECODABLE as error:
        raise _undecodable(error) from error
    return reply


def _undecodable(error: Exception) -> LinkBroken:
    return LinkBroken(f"the server sent a message that is not rallypoint's: {error}")


def _room(size: int) -> memoryview | Unread:
    try:
        return alloc(size)
    except (MemoryError, OSError, ValueError, OverflowError) as error:  # of numpy, or of a mapping
        lack = MemoryError(f"there is no memory here for a value of {size} bytes")
        lack.__cause__ = error
        return Unread(lack)


def _said(error: OSError) -> str:
    return error.strerror or str(error)
