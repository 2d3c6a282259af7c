"""Two sockets and what passes between them: read, hold, cut, damage, pass on, end.

A connection has two lanes, one to the server and one to the client. A lane reads only what it may soon pass on, so a slow
receiver is felt by the sender through the proxy as it is without.
"""

from __future__ import annotations

import array
import math
import os
import random
import select
import socket
import struct
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from rallypoint.testing.faults import BOTH, Fault, Latency, Slices, Way
from rallypoint.testing.loop import Handler, Loop

BULK = 1 << 20
"""Bytes that are read at once when no fault is on. Measured through one thread: 256 KiB 2.3 GB/s, 1 MiB 2.9 GB/s (splice through
a pipe 2.2), with the fewest turns at the interpreter's lock."""

SHAPED = 1 << 16
"""Bytes that are read at once while a fault is on: what a slow line holds of what the sender believes to have sent."""

IN_FLIGHT = 4 << 20
"""Bytes under way in one direction of one connection with latency. With 50 ms it lets 80 MB/s pass; the kernel's own largest
receive buffer is 6 MiB."""

TURN = 0.01
"""Seconds of bandwidth that a lane takes at once: short enough that connections share smoothly, long against the millisecond to
which the loop keeps time."""

PIECES = 64
"""Pieces that a lane sends before others have their turn: about 0.2 ms."""

RST = struct.pack("ii", 1, 0)  # struct linger: on, no time to linger; close() then sends RST
DESCRIPTORS = 253  # SCM_MAX_FD, the most that one message may carry

GONE = select.EPOLLHUP | select.EPOLLERR


class Tally:
    """What was done in one direction, over all connections."""

    __slots__ = ("corrupted", "duplicated", "passed", "pieces", "swallowed")

    def __init__(self) -> None:
        self.passed = self.pieces = self.swallowed = self.corrupted = self.duplicated = 0


class Line:
    """A cable of a certain bandwidth, shared by whoever sends through it."""

    __slots__ = ("free_at", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.free_at = -math.inf

    def quantum(self) -> int:
        return max(1, int(self.rate * TURN))

    def took(self, size: int, since: float) -> None:
        """`size` bytes that could have gone `since` then. What waited loses nothing by a late wake-up; an idle line saves nothing."""
        self.free_at = max(self.free_at, since) + size / self.rate


class Trigger:
    """A fault that begins on one connection when `left` more bytes have passed. Lanes in both directions may share it."""

    __slots__ = ("fault", "left")

    def __init__(self, fault: Fault, left: int) -> None:
        self.fault = fault
        self.left = left


class End:
    """One of the two sockets of a connection. `socket` is None before there is one, and after it was closed."""

    __slots__ = ("broken", "fd", "hung", "mask", "ready", "socket", "unix")

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.ready = False  # connected
        self.broken = False  # what ends the stream read from it is a reset
        self.hung = False  # nothing will ever come or go again: asking the kernel would only turn the loop
        self.unix = False
        self.fd = -1
        self.mask: int | None = None

    def take(self, sock: socket.socket) -> None:
        self.socket = sock
        self.fd = sock.fileno()
        self.unix = sock.family == socket.AF_UNIX
        if not self.unix:
            # Pieces leave as they are sent; without it the kernel would hold back and join small ones (Nagle).
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


@dataclass(slots=True)
class Chunk:
    """Bytes that were read at once, and what came with them. `since`: when they could be passed on, but for what holds them up."""

    data: memoryview
    since: float
    descriptors: list[int]

    def close(self) -> None:
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors = []


@dataclass(slots=True)
class Conditions:
    """What is in effect on one lane."""

    hole: bool = False
    frozen: bool = False
    latency: Latency | None = None
    line: Line | None = None
    slices: Slices | None = None


class Overseer(Protocol):
    """Whom connections belong to: the proxy, as they see it."""

    loop: Loop
    buffer: memoryview
    seed: int
    tallies: dict[Way, Tally]

    def conditions(self, connection: Connection, way: Way) -> Conditions: ...

    def fire(self, trigger: Trigger, connection: Connection) -> None: ...

    def cut(self, connection: Connection, ways: tuple[Way, ...]) -> None: ...

    def closed(self, connection: Connection) -> None: ...


class Lane:
    """One direction of one connection.

    `exhausted`: nothing more comes from the source. `ended`: nothing more goes to the sink; what still comes is swallowed. When
    both are true of both lanes, the connection is closed. `lost`: the stream has a hole, and must not go on.
    """

    def __init__(self, connection: Connection, way: Way, source: End, sink: End) -> None:
        self.way = way
        self.source = source
        self.sink = sink
        self.queue: deque[Chunk] = deque()
        self.queued = 0
        self.exhausted = False
        self.ended = False
        self.lost = False
        self.ending = ""  # "fin" or "rst", after the queue
        self.ending_due = -math.inf
        self.blocked = False  # the sink's buffer is full
        self.is_now = Conditions()
        self.corrupt = False
        self.duplicate = False
        self.triggers: list[Trigger] = []
        self.passed = 0
        self._connection = connection
        self._overseer = connection.overseer
        self._tally = connection.overseer.tallies[way]
        self._plain = True
        self._piece = 0  # what is left of the slice that was begun
        self._next_piece_at = -math.inf
        self._last_due = -math.inf
        self._wake_at = math.inf
        self._generators: dict[str, random.Random] = {}

    def random(self, purpose: str) -> random.Random:
        """A generator for each purpose, so that what one fault draws does not move what another one does."""
        if purpose not in self._generators:
            self._generators[purpose] = random.Random(f"{self._overseer.seed} {self._connection.number} {self.way} {purpose}")
        return self._generators[purpose]

    def refresh(self) -> None:
        """Faults have begun or ended."""
        was, self.is_now = self.is_now, self._overseer.conditions(self._connection, self.way)
        if self.is_now.slices != was.slices:
            self._piece, self._next_piece_at = 0, -math.inf
        if self.is_now.latency is None and was.latency is not None:
            now = self._overseer.loop.now()
            self._last_due = self.ending_due = -math.inf
            for chunk in self.queue:
                chunk.since = min(chunk.since, now)
        self._plain = self.is_now == Conditions() and not (self.corrupt or self.duplicate or self.triggers)

    def wants(self) -> bool:
        """Whether to read from the source now."""
        if self.exhausted or not self.source.ready:
            return False
        if self.is_now.hole or self.ended:
            return True
        return self.sink.ready and not self.is_now.frozen and self.queued < (IN_FLIGHT if self.is_now.latency else 1)

    def read(self) -> None:
        """The source has something: bytes, its end, or nothing after all."""
        assert self.source.socket is not None
        descriptors: list[int] = []
        size = BULK if self._plain else SHAPED
        buffer = self._overseer.buffer
        try:
            if self.source.unix:
                count, descriptors = _receive(self.source.socket, buffer[:size])
            else:
                count = self.source.socket.recv_into(buffer, size)
        except BlockingIOError:
            return
        except OSError:
            count, self.source.broken = 0, True
        if not count:
            self.end_of_source()
            return
        data = buffer[:count]
        if self._plain and not self.queue and not self.ended and not descriptors:
            try:
                sent = self.sink.socket.send(data) if self.sink.socket else 0
            except BlockingIOError:
                sent = 0
            except OSError:
                self._connection.sink_broke(self)
                return
            if sent:
                self._count(sent)
            if sent == count:
                return
            data = data[sent:]
        self._put(Chunk(memoryview(bytes(data)), self._due(), descriptors))
        self.pump()

    def end_of_source(self) -> None:
        """Nothing more comes; what has come goes on, and then the news."""
        self.exhausted = True
        if not self.ended:
            self.ending = "rst" if self.source.broken else "fin"
            self.ending_due = self._due()
        self.pump()

    def close_after_queue(self) -> None:
        """Tell the sink that this is the end, whatever the source says later."""
        if not (self.ended or self.ending):
            self.ending, self.ending_due = "fin", self._due()
            self.pump()

    def pump(self) -> None:
        """Pass on what may pass now. What may not waits for its time, for the kernel, or for the end of a fault."""
        pieces = 0
        while not self._connection.is_closed:
            if self.ended or self.is_now.hole:
                self._swallow()
                break
            if self.is_now.frozen or not self.sink.ready or self.blocked:
                break
            if not (self.queue or self.ending):
                break
            due = self._ready_at()
            if due > self._overseer.loop.now():
                self._wake(due)
                break
            if not self.queue:
                self._connection.pass_ending(self)
                break
            if (reached := self._reached()) is not None:  # after 0 bytes: something has come
                self._overseer.fire(reached, self._connection)
            elif not self._send_piece():
                break
            else:
                pieces += 1
                if self.queue and (self.is_now.line or pieces == PIECES):
                    self._wake(self._ready_at())  # also when that is now: others have their turn first
                    break
        self._connection.settle()

    def drop(self) -> None:
        """Forget what is under way."""
        for chunk in self.queue:
            chunk.close()
        self.queue.clear()
        self.queued = 0
        self.ending = ""

    def _due(self) -> float:
        now = self._overseer.loop.now()
        latency = self.is_now.latency
        if latency is None:
            return now
        delay = latency.seconds
        if latency.jitter:
            delay += self.random("jitter").uniform(-latency.jitter, latency.jitter)
        self._last_due = max(self._last_due, now + delay)
        return self._last_due

    def _put(self, chunk: Chunk) -> None:
        self.queue.append(chunk)
        self.queued += len(chunk.data)

    def _ready_at(self) -> float:
        if not self.queue:
            return self.ending_due
        return max(self.queue[0].since, self._next_piece_at, self.is_now.line.free_at if self.is_now.line else -math.inf)

    def _wake(self, at: float) -> None:
        if at < self._wake_at:
            self._wake_at = at
            self._overseer.loop.at(at, partial(self._woken, at))

    def _woken(self, at: float) -> None:
        if at == self._wake_at:
            self._wake_at = math.inf
        self.pump()

    def _reached(self) -> Trigger | None:
        return next((trigger for trigger in self.triggers if not trigger.left), None)

    def _swallow(self) -> None:
        if self.queue or self.ending:
            self._tally.swallowed += self.queued
            # A half-closed direction ended properly: only what a black hole takes is a hole in the stream.
            self.lost = self.lost or not self.ended
            self.drop()

    def _send_piece(self) -> bool:
        """Send what may go at once; False when the kernel takes no more."""
        assert self.sink.socket is not None
        chunk = self.queue[0]
        if self.corrupt:
            self._damage(chunk)
        if self.duplicate:
            self._double(chunk)
        size = len(chunk.data)
        has = self.is_now
        if has.line:
            size = min(size, has.line.quantum())
        if has.slices:
            self._piece = self._piece or self.random("slices").randint(has.slices.smallest, has.slices.largest)
            size = min(size, self._piece)
        for trigger in self.triggers:
            size = min(size, trigger.left)
        try:
            if chunk.descriptors and self.sink.unix:
                sent = socket.send_fds(self.sink.socket, [chunk.data[:size]], chunk.descriptors)
            else:
                sent = self.sink.socket.send(chunk.data[:size])
        except BlockingIOError:
            self.blocked = True
            return False
        except OSError:
            self._connection.sink_broke(self)
            return False
        chunk.close()
        self.queued -= sent
        if sent == len(chunk.data):
            self.queue.popleft()
        else:
            chunk.data = chunk.data[sent:]
        if has.line:
            has.line.took(sent, chunk.since)
        if has.slices:
            self._piece -= sent
            if has.slices.pause:
                self._next_piece_at = max(self._next_piece_at, chunk.since) + has.slices.pause
        self._count(sent)
        for trigger in self.triggers:
            trigger.left -= sent
        # One by one: firing may let more pass at once, and so fire others from within.
        while (reached := self._reached()) is not None:
            self._overseer.fire(reached, self._connection)
        return True

    def _count(self, sent: int) -> None:
        self.passed += sent
        self._tally.passed += sent
        self._tally.pieces += 1

    def _damage(self, chunk: Chunk) -> None:
        data = bytearray(chunk.data)
        data[0] ^= self.random("corrupt").randint(1, 255)
        chunk.data = memoryview(data)
        self._tally.corrupted += 1
        self.corrupt = False
        self.refresh()

    def _double(self, chunk: Chunk) -> None:
        self.queue.insert(1, Chunk(chunk.data, chunk.since, []))
        self.queued += len(chunk.data)
        self._tally.duplicated += len(chunk.data)
        self.duplicate = False
        self.refresh()


class Connection:
    """A client's socket, the one to the server, and what passes between them. `number` counts from 0 in the order of accepting."""

    def __init__(self, overseer: Overseer, number: int, client: str) -> None:
        self.overseer = overseer
        self.number = number
        self.client = client
        self.is_closed = False
        self.is_reaching = False  # the way to the server was begun
        self.is_severed = False  # one side was not told that the other one was cut off
        self.client_end, self.server_end = End(), End()
        self.to_server = Lane(self, "server", self.client_end, self.server_end)
        self.to_client = Lane(self, "client", self.server_end, self.client_end)

    def __str__(self) -> str:
        return f"connection {self.number}"

    def lane(self, way: Way) -> Lane:
        return self.to_server if way == "server" else self.to_client

    def refresh(self) -> None:
        """Faults have begun or ended: let pass what may pass now."""
        if self.is_closed:
            return
        lanes = (self.to_server, self.to_client)
        for lane in lanes:
            lane.refresh()
        if any(lane.lost and not lane.is_now.hole for lane in lanes):
            self.overseer.cut(self, BOTH)
            return
        for lane in lanes:
            lane.pump()

    def client_event(self, mask: int) -> None:
        self._event(mask, self.client_end, self.to_server, self.to_client)

    def server_event(self, mask: int) -> None:
        self._event(mask, self.server_end, self.to_client, self.to_server)

    def _event(self, mask: int, end: End, reads: Lane, writes: Lane) -> None:
        if mask & (select.EPOLLIN | GONE) and reads.wants():
            reads.read()
        if end.socket is None:
            return
        if writes.blocked and mask & (select.EPOLLOUT | GONE):
            writes.blocked = False
            writes.pump()
        if end.socket is not None and reads.exhausted and mask & GONE:
            end.hung = True
            if end.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) and not writes.ended:
                self.sink_broke(writes)
        self.settle()

    def settle(self) -> None:
        """Close what is over; else wait for what is of use."""
        if self.is_closed:
            return
        if self.to_server.exhausted and self.to_server.ended and self.to_client.exhausted and self.to_client.ended:
            self.close()
            return
        self._watch(self.client_end, self.to_server, self.to_client, self.client_event)
        self._watch(self.server_end, self.to_client, self.to_server, self.server_event)

    def _watch(self, end: End, reads: Lane, writes: Lane, handler: Handler) -> None:
        if not end.ready:
            return
        mask: int | None = (select.EPOLLIN if reads.wants() else 0) | (select.EPOLLOUT if writes.blocked else 0)
        if not mask:
            # Half closed: a reset can still come. (Mask 0 is only for that: with bytes unread, errors would turn the loop.)
            faults = reads.is_now.hole or reads.is_now.frozen or writes.is_now.hole or writes.is_now.frozen
            mask = 0 if reads.exhausted and not (end.hung or faults) else None
        if mask != end.mask:
            end.mask = mask
            self.overseer.loop.watch(end.fd, mask, handler)

    def pass_ending(self, lane: Lane) -> None:
        """All of the stream has been passed on; now its end."""
        ending, lane.ending = lane.ending, ""
        lane.ended = True
        assert lane.sink.socket is not None
        if ending == "fin":
            try:
                lane.sink.socket.shutdown(socket.SHUT_WR)
            except OSError:
                self.sink_broke(lane)
        else:
            self._cut_off(lane.sink)

    def sink_broke(self, lane: Lane) -> None:
        """Whoever this lane goes to has reset the connection. The other lane has the news to pass on, after what it still holds."""
        back = self.to_client if lane is self.to_server else self.to_server
        lane.drop()
        lane.ended = True
        lane.sink.broken = True
        if not back.exhausted:
            # What was sent before the reset is still to be read.
            self.settle()
        elif not back.ended:
            back.ending = "rst"
            back.pump()
        else:
            self._cut_off(lane.source)
            self.settle()

    def reset(self, ways: tuple[Way, ...]) -> None:
        """Cut both sides off, or only one of them and leave the other in the dark."""
        if self.is_closed:
            return
        if ways != BOTH:
            self.is_severed = True
            self._cut_off(self.server_end if ways == ("server",) else self.client_end)
            self.settle()
            return
        self._cut_off(self.client_end)
        self._cut_off(self.server_end)
        self.close()

    def _cut_off(self, end: End) -> None:
        """RST to one side. Nothing passes from it or to it any more."""
        to, back = (self.to_server, self.to_client) if end is self.server_end else (self.to_client, self.to_server)
        to.drop()
        back.drop()
        to.ended = back.ended = back.exhausted = True
        self._close_end(end, reset=True)

    def _close_end(self, end: End, *, reset: bool = False) -> None:
        if end.socket is None:
            return
        self.overseer.loop.watch(end.fd, None, self.client_event)
        if reset and not end.unix:
            end.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
        end.socket.close()
        end.socket, end.ready, end.mask = None, False, None

    def close(self) -> None:
        """Let both sockets go."""
        if self.is_closed:
            return
        self.is_closed = True
        self._close_end(self.client_end)
        self._close_end(self.server_end)
        self.to_server.drop()
        self.to_client.drop()
        self.overseer.closed(self)


def _receive(sock: socket.socket, buffer: memoryview) -> tuple[int, list[int]]:
    """Bytes, and the descriptors that came with them (Unix sockets)."""
    space = socket.CMSG_SPACE(DESCRIPTORS * struct.calcsize("i"))
    count, messages, _, _ = sock.recvmsg_into([buffer], space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, data in messages:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return count, list(descriptors)
