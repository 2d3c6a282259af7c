"""One connection through the chaos proxy: two sockets, and the two streams between them.

`Relay.step` moves whatever the kernel and the faults in effect let move now. A stream reads only
what it may soon pass on, so the sender feels a slow receiver through the proxy.
"""

from __future__ import annotations

import array
import errno
import math
import os
import random
import select
import socket
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rallypoint.testing.faults import BOTH, Fault, FaultName, Way
from rallypoint.testing.proxy_listener import no_delay

if TYPE_CHECKING:
    from rallypoint.testing.fault_engine import ProxyEngine

READ = 1 << 16
"""Bytes that are read at once."""

IN_FLIGHT = 4 << 20
"""Bytes under way in one direction of a connection with latency: with 50 ms, 80 MB/s pass."""

RST = struct.pack("ii", 1, 0)  # struct linger: on, no time to linger; close() then sends RST
DESCRIPTORS = 253  # SCM_MAX_FD, the most that one message may carry


@dataclass(slots=True, eq=False)
class ByteTrigger:
    """A fault that begins on one connection when `left` more bytes have passed.

    The streams of both directions may share it.
    """

    fault: Fault
    left: int


@dataclass(slots=True)
class StreamChunk:
    """Bytes that were read at once, or the stream's end (without bytes), and when they may pass."""

    data: memoryview
    due: float
    descriptors: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Close the proxy's copies of the descriptors."""
        while self.descriptors:
            os.close(self.descriptors.pop())


class StreamEnd:
    """One of the two sockets of a connection; None before there is one and after it was closed."""

    def __init__(self, sock: socket.socket | None = None) -> None:
        self.socket = sock
        self.ready = sock is not None  # connected
        self.broken = False  # the peer has reset the connection


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
        self.triggers: list[ByteTrigger] = []
        self.passed = 0
        self._last_due = 0.0
        self._way: Way = way
        self._relay = relay
        self._owner = relay.owner
        self._random = random.Random(f"{relay.owner.seed} {relay.number} {way} jitter")

    @property
    def faults(self) -> dict[FaultName, Fault]:
        """The faults that are in effect now."""
        return self._owner.faults_of(self._relay, self._way)

    def wants(self) -> bool:
        """Tell whether to read from the source now."""
        if self.exhausted or not self.source.ready:
            return False
        faults = self.faults
        if "black hole" in faults or self.ended:
            return True
        most = IN_FLIGHT if "latency" in faults else 1
        return self.sink.ready and "frozen" not in faults and self.queued < most

    @property
    def due(self) -> float:
        """Time at which the next chunk may pass, if only a latency holds it back."""
        faults = self.faults
        held = "latency" in faults and "frozen" not in faults and self.sink.ready
        return self.queue[0].due if self.queue and held and not self.blocked else math.inf

    def read(self) -> None:
        """Take what the source has: bytes, its end, or nothing after all."""
        assert self.source.socket is not None
        try:
            data, descriptors = _receive(self.source.socket)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors, self.source.broken = b"", [], True
        self.exhausted = not data
        self.queued += len(data)
        due = 0.0
        if latency := self.faults.get("latency"):
            delay = latency.seconds + self._random.uniform(-latency.jitter, latency.jitter)
            due = self._last_due = max(self._last_due, self._owner.now() + delay)
        self.queue.append(StreamChunk(memoryview(data), due, descriptors))

    def pump(self) -> None:
        """Pass on what may pass now; the rest waits for its time, the kernel, or a fault's end."""
        self.blocked = False
        while self.queue and not self._relay.is_closed:
            faults, chunk = self.faults, self.queue[0]
            if self.ended or "black hole" in faults:
                self._owner.swallowed[self._way] += self.queued
                # After a proper end nothing is missing: only a black hole leaves a hole.
                self.lost = self.lost or not self.ended
                self.drop()
            elif (
                "frozen" in faults
                or not self.sink.ready
                or self.blocked
                or ("latency" in faults and chunk.due > self._owner.now())
            ):
                return
            elif not chunk.data:
                self.queue.popleft()
                self._relay.pass_ending(self)
            elif trigger := next((one for one in self.triggers if not one.left), None):
                self._owner.fire(trigger, self._relay)
            else:
                self._send(chunk)

    def drop(self) -> None:
        """Forget what is under way."""
        while self.queue:
            self.queue.popleft().close()
        self.queued = 0

    def _send(self, chunk: StreamChunk) -> None:
        assert self.sink.socket is not None
        piece = chunk.data[: min([len(chunk.data), *(trigger.left for trigger in self.triggers)])]
        try:
            if chunk.descriptors and self.sink.socket.family == socket.AF_UNIX:
                sent = socket.send_fds(self.sink.socket, [piece], chunk.descriptors)
            else:
                sent = self.sink.socket.send(piece)
        except BlockingIOError:
            self.blocked = True
            return
        except OSError:
            self._relay.sink_broke(self)
            return
        chunk.close()
        chunk.data = chunk.data[sent:]
        if not chunk.data:
            self.queue.popleft()
        self.queued -= sent
        self.passed += sent
        self._owner.passed[self._way] += sent
        for trigger in list(self.triggers):
            trigger.left -= sent
            if not trigger.left:
                self._owner.fire(trigger, self._relay)


class Relay:
    """A client's socket, the one to the server, and the streams between them.

    `number` counts from 0 in the order of accepting.
    """

    def __init__(self, owner: ProxyEngine, number: int, client: str, sock: socket.socket) -> None:
        self.owner = owner
        self.number = number
        self.client = client
        self.is_closed = False
        self.is_severed = False  # one side was not told that the other one was cut off
        self.client_end, self.server_end = StreamEnd(sock), StreamEnd()
        self.streams: dict[Way, RelayStream] = {
            "server": RelayStream(self, "server", self.client_end, self.server_end),
            "client": RelayStream(self, "client", self.server_end, self.client_end),
        }
        self._places = list(owner.places)  # of the server, still to be tried

    def step(self) -> None:
        """Move what can move; reset the connection when a stream has lost something."""
        if not (self.server_end.ready or self.is_severed):
            self._reach()
        streams = self.streams.values()
        for stream in streams:
            if stream.wants():
                stream.read()
            stream.pump()
        if any(stream.lost and "black hole" not in stream.faults for stream in streams):
            self.owner.cut(self, BOTH)
        elif all(stream.exhausted and stream.ended for stream in streams):
            self.close()

    def watched(self) -> Iterator[tuple[int, int]]:
        """Yield the descriptors to wait for, each with its events."""
        to_server, to_client = self.streams.values()
        for end, reads, writes in (
            (self.client_end, to_server, to_client),
            (self.server_end, to_client, to_server),
        ):
            mask = select.POLLIN if reads.wants() else 0
            if writes.blocked or not end.ready:
                mask |= select.POLLOUT
            if end.socket is not None and mask:
                yield end.socket.fileno(), mask

    def pass_ending(self, stream: RelayStream) -> None:
        """Tell the sink that the stream has ended, when all of it has been passed on."""
        stream.ended = True
        if stream.source.broken:
            self._cut_off(stream.sink)
            return
        assert stream.sink.socket is not None
        try:
            stream.sink.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.sink_broke(stream)

    def sink_broke(self, stream: RelayStream) -> None:
        """End a stream after its receiver has reset the connection.

        The other stream passes this on, after what it still holds.
        """
        stream.drop()
        stream.ended = True
        stream.sink.broken = True
        if self.streams["client" if stream is self.streams["server"] else "server"].ended:
            self._cut_off(stream.source)

    def reset(self, ways: tuple[Way, ...]) -> None:
        """Cut both sides off, or one of them without telling the other."""
        if "client" in ways:
            self._cut_off(self.client_end)
        if "server" in ways:
            self._cut_off(self.server_end)
        self.is_severed = True
        if ways == BOTH:
            self.close()

    def close(self) -> None:
        """Let both sockets go."""
        if self.is_closed:
            return
        self.is_closed = True
        for end in (self.client_end, self.server_end):
            self._close_end(end)
        for stream in self.streams.values():
            stream.drop()
        self.owner.closed(self)

    def _reach(self) -> None:
        """Connect to the server, one of its places after the other, unless it must not hear."""
        end = self.server_end
        if end.socket is not None:
            error = end.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error in (0, errno.ECONNRESET, errno.EPIPE):
                # The last two come after the connection was made: read what was sent before.
                end.broken = error != 0
                end.ready = end.broken or _is_connected(end.socket)
                return
        elif "black hole" in self.streams["server"].faults:
            return
        while self._places:
            self._close_end(end)
            family, where = self._places.pop(0)
            end.socket = socket.socket(family, socket.SOCK_STREAM)
            end.socket.setblocking(False)
            no_delay(end.socket)
            if end.socket.connect_ex(where) in (0, errno.EINPROGRESS):
                return
        self.owner.unreached += 1
        self.reset(BOTH)

    def _cut_off(self, end: StreamEnd) -> None:
        """Send RST to one side. Nothing passes from it or to it any more."""
        for stream in self.streams.values():
            stream.drop()
            stream.ended = True
            stream.exhausted |= stream.source is end
        if end.socket is not None and end.socket.family != socket.AF_UNIX:
            end.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
        self._close_end(end)

    def _close_end(self, end: StreamEnd) -> None:
        if end.socket is not None:
            end.socket.close()
            end.socket, end.ready = None, False


def _is_connected(sock: socket.socket) -> bool:
    """Tell whether a connection that was begun is there."""
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


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
