"""One connection through the chaos proxy: two sockets, and the two streams between them.

A stream reads only what it may soon pass on, so the sender feels a slow receiver through the proxy.
"""

from __future__ import annotations

import array
import os
import random
import select
import socket
import struct
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rallypoint.testing.faults import BOTH, Fault, FaultKind, Way

if TYPE_CHECKING:
    from rallypoint.testing.fault_engine import ProxyEngine

READ = 1 << 16
"""Bytes that are read at once."""

IN_FLIGHT = 4 << 20
"""Bytes under way in one direction of a connection with latency: with 50 ms, 80 MB/s pass."""

RST = struct.pack("ii", 1, 0)  # struct linger: on, no time to linger; close() then sends RST
DESCRIPTORS = 253  # SCM_MAX_FD, the most that one message may carry
GONE = select.EPOLLHUP | select.EPOLLERR


@dataclass(slots=True)
class StreamTotals:
    """Counts of one direction over all connections."""

    passed: int = 0
    pieces: int = 0
    swallowed: int = 0


@dataclass(slots=True, eq=False)
class ByteTrigger:
    """A fault that begins on one connection when `left` more bytes have passed.

    The streams of both directions may share it.
    """

    fault: Fault
    left: int


@dataclass(slots=True)
class StreamFaults:
    """The faults in effect on one stream."""

    hole: bool = False
    frozen: bool = False
    latency: FaultKind | None = None


@dataclass(slots=True)
class StreamChunk:
    """Bytes that were read at once, their descriptors, and the time at which they may pass."""

    data: memoryview
    due: float
    descriptors: list[int]

    def close(self) -> None:
        """Close the proxy's copies of the descriptors."""
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors = []


class StreamEnd:
    """One of the two sockets of a connection; None before there is one and after it was closed."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.ready = False  # connected
        self.broken = False  # the stream that is read from it ends with a reset
        self.hung = False  # nothing will ever come or go again: watching it would turn the loop
        self.mask: int | None = None  # the events that are watched

    def take(self, sock: socket.socket) -> None:
        """Use this socket."""
        self.socket = sock
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class RelayStream:
    """One direction of one connection.

    `exhausted`: nothing more comes from the source. `ended`: nothing more goes to the sink; what
    still comes is swallowed. `lost`: the stream has a hole, and must not go on.
    """

    def __init__(self, relay: Relay, way: Way, source: StreamEnd, sink: StreamEnd) -> None:
        self.source = source
        self.sink = sink
        self.queue: deque[StreamChunk] = deque()
        self.queued = 0
        self.exhausted = self.ended = self.lost = False
        self.blocked = False  # the sink's buffer is full
        self.is_now = StreamFaults()
        self.triggers: list[ByteTrigger] = []
        self.passed = 0
        self._ending = ""  # "fin" or "rst", after the queue
        self._ending_due = self._last_due = 0.0
        self._way: Way = way
        self._relay = relay
        self._owner = relay.owner
        self._totals = relay.owner.totals[way]
        self._random = random.Random(f"{relay.owner.seed} {relay.number} {way} jitter")

    def refresh(self) -> None:
        """Look which faults are in effect now."""
        had_latency = self.is_now.latency is not None
        self.is_now = self._owner.faults_of(self._relay, self._way)
        if had_latency and self.is_now.latency is None:
            self._last_due = self._ending_due = 0.0
            for chunk in self.queue:
                chunk.due = 0.0

    def wants(self) -> bool:
        """Tell whether to read from the source now."""
        if self.exhausted or not self.source.ready:
            return False
        if self.is_now.hole or self.ended:
            return True
        most = IN_FLIGHT if self.is_now.latency else 1
        return self.sink.ready and not self.is_now.frozen and self.queued < most

    def read(self) -> None:
        """Take what the source has: bytes, its end, or nothing after all."""
        assert self.source.socket is not None
        try:
            data, descriptors = _receive(self.source.socket)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors, self.source.broken = b"", [], True
        if data:
            self.queue.append(StreamChunk(memoryview(data), self._due(), descriptors))
            self.queued += len(data)
        else:
            self.exhausted = True
            if not self.ended:
                self.end_with("rst" if self.source.broken else "fin")
        self.pump()

    def end_with(self, ending: str) -> None:
        """Pass on the end of the stream after what is under way."""
        self._ending, self._ending_due = ending, self._due()

    def pump(self) -> None:
        """Pass on what may pass now; the rest waits for its time, the kernel, or a fault's end."""
        while not self._relay.is_closed:
            if self.ended or self.is_now.hole:
                self._swallow()
                break
            if self.is_now.frozen or not self.sink.ready or self.blocked:
                break
            if not (self.queue or self._ending):
                break
            due = self.queue[0].due if self.queue else self._ending_due
            if due > self._owner.loop.now():
                self._owner.loop.at(due, self.pump)
                break
            if not self.queue:
                ending, self._ending = self._ending, ""
                self._relay.pass_ending(self, ending)
                break
            if (trigger := self._reached()) is not None:  # after 0 bytes: something has come
                self._owner.fire(trigger, self._relay)
            elif not self._send():
                break
        self._relay.settle()

    def drop(self) -> None:
        """Forget what is under way."""
        for chunk in self.queue:
            chunk.close()
        self.queue.clear()
        self.queued = 0
        self._ending = ""

    def _due(self) -> float:
        latency = self.is_now.latency
        if latency is None:
            return 0.0
        delay = latency.seconds + self._random.uniform(-latency.jitter, latency.jitter)
        self._last_due = max(self._last_due, self._owner.loop.now() + delay)
        return self._last_due

    def _reached(self) -> ByteTrigger | None:
        return next((trigger for trigger in self.triggers if not trigger.left), None)

    def _swallow(self) -> None:
        if self.queue or self._ending:
            self._totals.swallowed += self.queued
            # After a proper end nothing is missing: only a black hole leaves a hole in the stream.
            self.lost = self.lost or not self.ended
            self.drop()

    def _send(self) -> bool:
        """Send one piece; False when the kernel takes no more."""
        assert self.sink.socket is not None
        chunk = self.queue[0]
        piece = chunk.data[: min([len(chunk.data), *(trigger.left for trigger in self.triggers)])]
        try:
            if chunk.descriptors and self.sink.socket.family == socket.AF_UNIX:
                sent = socket.send_fds(self.sink.socket, [piece], chunk.descriptors)
            else:
                sent = self.sink.socket.send(piece)
        except BlockingIOError:
            self.blocked = True
            return False
        except OSError:
            self._relay.sink_broke(self)
            return False
        chunk.close()
        chunk.data = chunk.data[sent:]
        if not chunk.data:
            self.queue.popleft()
        self.queued -= sent
        self.passed += sent
        self._totals.passed += sent
        self._totals.pieces += 1
        for trigger in self.triggers:
            trigger.left -= sent
        # One by one: firing may let more pass at once, and so fire others from within.
        while (reached := self._reached()) is not None:
            self._owner.fire(reached, self._relay)
        return True


class Relay:
    """A client's socket, the one to the server, and the streams between them.

    `number` counts from 0 in the order of accepting.
    """

    def __init__(self, owner: ProxyEngine, number: int, client: str) -> None:
        self.owner = owner
        self.number = number
        self.client = client
        self.is_closed = False
        self.is_reaching = False  # connecting to the server has begun
        self.is_severed = False  # one side was not told that the other one was cut off
        self.client_end, self.server_end = StreamEnd(), StreamEnd()
        self.to_server = RelayStream(self, "server", self.client_end, self.server_end)
        self.to_client = RelayStream(self, "client", self.server_end, self.client_end)
        self.streams = (self.to_server, self.to_client)

    def __str__(self) -> str:
        return f"connection {self.number}"

    def stream(self, way: Way) -> RelayStream:
        """Return the stream of this direction."""
        return self.to_server if way == "server" else self.to_client

    def refresh(self) -> None:
        """Look which faults are in effect, and let pass what may pass now."""
        if self.is_closed:
            return
        for stream in self.streams:
            stream.refresh()
        if any(stream.lost and not stream.is_now.hole for stream in self.streams):
            self.owner.cut(self, BOTH)
            return
        for stream in self.streams:
            stream.pump()

    def settle(self) -> None:
        """Close what is over; else wait for what is of use."""
        if self.is_closed:
            return
        if all(stream.exhausted and stream.ended for stream in self.streams):
            self.close()
            return
        self._watch(self.client_end, self.to_server, self.to_client)
        self._watch(self.server_end, self.to_client, self.to_server)

    def pass_ending(self, stream: RelayStream, ending: str) -> None:
        """Tell the sink that the stream has ended, when all of it has been passed on."""
        stream.ended = True
        if ending == "rst":
            self._cut_off(stream.sink)
            return
        assert stream.sink.socket is not None
        try:
            stream.sink.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.sink_broke(stream)

    def sink_broke(self, stream: RelayStream) -> None:
        """End a stream whose receiver has reset the connection.

        The other stream passes this on, after what it still holds.
        """
        back = self.to_client if stream is self.to_server else self.to_server
        stream.drop()
        stream.ended = True
        stream.sink.broken = True
        if not back.exhausted:
            self.settle()  # what was sent before the reset is still to be read
        elif not back.ended:
            back.end_with("rst")
            back.pump()
        else:
            self._cut_off(stream.source)
            self.settle()

    def reset(self, ways: tuple[Way, ...]) -> None:
        """Cut both sides off, or one of them without telling the other."""
        if self.is_closed:
            return
        if ways == BOTH:
            self._cut_off(self.client_end)
            self._cut_off(self.server_end)
            self.close()
        else:
            self.is_severed = True
            self._cut_off(self.server_end if ways == ("server",) else self.client_end)
            self.settle()

    def close(self) -> None:
        """Let both sockets go."""
        if self.is_closed:
            return
        self.is_closed = True
        for end in (self.client_end, self.server_end):
            self._close_end(end)
        for stream in self.streams:
            stream.drop()
        self.owner.closed(self)

    def _event(self, end: StreamEnd, reads: RelayStream, writes: RelayStream, mask: int) -> None:
        if mask & (select.EPOLLIN | GONE) and reads.wants():
            reads.read()
        if end.socket is not None and writes.blocked and mask & (select.EPOLLOUT | GONE):
            writes.blocked = False
            writes.pump()
        if end.socket is not None and reads.exhausted and mask & GONE:
            end.hung = True
            error = end.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error and not writes.ended:
                self.sink_broke(writes)
        self.settle()

    def _watch(self, end: StreamEnd, reads: RelayStream, writes: RelayStream) -> None:
        if not end.ready or end.socket is None:
            return
        readable = select.EPOLLIN if reads.wants() else 0
        mask: int | None = readable | (select.EPOLLOUT if writes.blocked else 0)
        if not mask:
            # Half closed: a reset can still come. Mask 0 is only for that: with bytes unread,
            # errors would turn the loop.
            still = [stream.is_now.hole or stream.is_now.frozen for stream in self.streams]
            mask = 0 if reads.exhausted and not (end.hung or any(still)) else None
        if mask != end.mask:
            end.mask = mask
            handler = partial(self._event, end, reads, writes)
            self.owner.loop.watch(end.socket.fileno(), mask, handler)

    def _cut_off(self, end: StreamEnd) -> None:
        """Send RST to one side. Nothing passes from it or to it any more."""
        for stream in self.streams:
            stream.drop()
            stream.ended = True
        (self.to_client if end is self.server_end else self.to_server).exhausted = True
        if end.socket is not None and end.socket.family != socket.AF_UNIX:
            end.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
        self._close_end(end)

    def _close_end(self, end: StreamEnd) -> None:
        if end.socket is not None:
            self.owner.loop.watch(end.socket.fileno(), None, lambda _: None)
            end.socket.close()
            end.socket, end.ready, end.mask = None, False, None


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Read bytes, and the descriptors that came with them (Unix sockets)."""
    if sock.family != socket.AF_UNIX:
        return sock.recv(READ), []
    space = socket.CMSG_SPACE(DESCRIPTORS * struct.calcsize("i"))
    data, messages, _, _ = sock.recvmsg(READ, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, found in messages:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(found[: len(found) - len(found) % descriptors.itemsize])
    return data, list(descriptors)
