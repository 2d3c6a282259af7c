"""One connection through the chaos proxy: two sockets, and the two streams between them.

A stream reads only what it may soon pass on, so the sender feels a slow receiver through the proxy.
"""

from __future__ import annotations

import errno
import math
import os
import random
import select
import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rallypoint.testing.faults import BOTH, Fault, FaultName, Faults, Way
from rallypoint.testing.proxy_listener import no_delay

if TYPE_CHECKING:
    from rallypoint.testing.proxy import ChaosProxy

READ = 1 << 16
"""Bytes that are read at once."""

IN_FLIGHT = 4 << 20
"""Bytes under way in one direction of a connection with latency: with 50 ms, 80 MB/s pass."""

RST = struct.pack("ii", 1, 0)  # struct linger: on, no time to linger; close() then sends RST
DESCRIPTORS = 253  # SCM_MAX_FD, the most that one message may carry


@dataclass(slots=True)
class StreamChunk:
    """Bytes that were read at once, or the stream's end (without bytes), and when they may pass."""

    data: memoryview
    due: float
    descriptors: list[int]

    def close(self) -> None:
        """Close the proxy's copies of the descriptors."""
        while self.descriptors:
            os.close(self.descriptors.pop())


@dataclass(slots=True)
class StreamEnd:
    """One of the two sockets of a connection; None before there is one and after it was closed."""

    socket: socket.socket | None = None
    ready: bool = False  # connected
    broken: bool = False  # the peer has reset the connection

    def close(self) -> None:
        """Close the socket, if there is one."""
        if self.socket is not None:
            self.socket.close()
            self.socket, self.ready = None, False


class ProxiedStream:
    """One direction of one connection.

    `exhausted`: nothing more comes from the source. `ended`: nothing more goes to the sink; what
    still comes is swallowed. `lost`: the stream has a hole, and must not go on.
    """

    def __init__(
        self, connection: ProxiedConnection, way: Way, source: StreamEnd, sink: StreamEnd
    ) -> None:
        self.source, self.sink = source, sink
        self.queue: deque[StreamChunk] = deque()
        self.queued = self.passed = 0  # bytes
        self.exhausted = self.ended = self.lost = False
        self.blocked = False  # the sink's buffer is full
        self._last_due = 0.0
        self._connection = connection
        self._proxy = connection._proxy
        self._way: Way = way
        self._random = random.Random(f"{self._proxy.seed} {connection.number} {way} jitter")

    @property
    def faults(self) -> dict[FaultName, Fault]:
        """The faults in effect now, by name; of one name that begun last."""
        return {
            fault.name: fault
            for fault in self._proxy.faults
            if self._way in fault.ways
            and fault.only in (None, self._connection)
            and (fault.size is None or fault in self._connection._begun)
        }

    def wants(self) -> bool:
        """Tell whether to read from the source now."""
        faults = self.faults
        most = IN_FLIGHT if "latency" in faults else 1
        may_pass = self.sink.ready and "freeze" not in faults and self.queued < most
        swallows = self.ended or "black_hole" in faults
        return self.source.ready and not self.exhausted and (swallows or may_pass)

    @property
    def due(self) -> float:
        """Time at which the next chunk may pass, if only a latency holds it back."""
        held = self.blocked or "freeze" in self.faults or not self.sink.ready
        return self.queue[0].due if self.queue and not held else math.inf

    def read(self) -> None:
        """Take what the source has: bytes, its end, or nothing after all."""
        assert self.source.socket is not None
        try:
            data, descriptors, _, _ = socket.recv_fds(self.source.socket, READ, DESCRIPTORS)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors, self.source.broken = b"", [], True
        for fd in descriptors:
            os.set_inheritable(fd, False)
        self.exhausted = not data
        self.queued += len(data)
        if latency := self.faults.get("latency"):
            delay = latency.seconds + self._random.uniform(-latency.jitter, latency.jitter)
            self._last_due = max(self._last_due, self._proxy._now() + delay)
        self.queue.append(StreamChunk(memoryview(data), self._last_due, descriptors))

    def pump(self) -> None:
        """Pass on what may pass now; the rest waits for its time, the kernel, or a fault's end."""
        self.blocked = False
        while self.queue:
            faults, chunk = self.faults, self.queue[0]
            early = "latency" in faults and chunk.due > self._proxy._now()
            if self.ended or "black_hole" in faults:
                self._proxy._counts["swallowed", self._way] += self.queued
                # After a proper end nothing is missing: only a black hole leaves a hole.
                self.lost = self.lost or not self.ended
                self.drop()
            elif early or self.blocked or "freeze" in faults or not self.sink.ready:
                return
            elif not chunk.data:
                self.queue.popleft()
                self._connection._pass_ending(self)
            elif not self._connection._fire(self._way):
                self._send(chunk)

    def drop(self) -> None:
        """Forget what is under way."""
        while self.queue:
            self.queue.popleft().close()
        self.queued = 0

    def _send(self, chunk: StreamChunk) -> None:
        assert self.sink.socket is not None
        left = self._connection._left
        counted = self._connection._counted(self._way)
        piece = chunk.data[: min((left[fault] for fault in counted), default=READ)]
        try:
            if chunk.descriptors and self.sink.socket.family == socket.AF_UNIX:
                sent = socket.send_fds(self.sink.socket, [piece], chunk.descriptors)
            else:
                sent = self.sink.socket.send(piece)
        except BlockingIOError:
            self.blocked = True
            return
        except OSError:
            self._connection._sink_broke(self)
            return
        chunk.close()
        chunk.data = chunk.data[sent:]
        if not chunk.data:
            self.queue.popleft()
        self.queued -= sent
        self.passed += sent
        self._proxy._counts["passed", self._way] += sent
        for fault in counted:
            left[fault] -= sent
        self._connection._fire(self._way)


class ProxiedConnection(Faults):
    """One connection through the proxy. Faults that are called here concern it alone."""

    def __init__(self, proxy: ChaosProxy, number: int, sock: socket.socket, client: str) -> None:
        super().__init__(proxy, only=self)
        self._number = number
        self._client = client
        self._places = list(proxy._places)  # of the server, still to be tried
        # Bytes after which a fault begins here.
        self._left = {one: one.size for one in proxy.faults if one.size is not None}
        self._begun: set[Fault] = set()  # faults that have begun so
        self._is_closed = False
        self._is_severed = False  # one side was not told that the other one was cut off
        ends = self._client_end, self._server_end = StreamEnd(sock, True), StreamEnd()
        self._to_server = ProxiedStream(self, "server", *ends)
        self._to_client = ProxiedStream(self, "client", *reversed(ends))
        self._streams = self._to_server, self._to_client

    def __repr__(self) -> str:
        passed = f"{self.bytes_to_server} B to the server, {self.bytes_to_client} B to the client"
        state = "open" if self.is_open else "closed"
        return f"<ProxiedConnection {self.number} from {self.client}: {state}, {passed}>"

    @property
    def number(self) -> int:
        """Position in the order of accepting, from 0. With the seed it decides what is drawn."""
        return self._number

    @property
    def client(self) -> str:
        """The client's address: `tcp://127.0.0.1:40312`, or `unix:` (mostly without a name)."""
        return self._client

    @property
    def is_open(self) -> bool:
        """True while something may pass, or a side does not know that the other one is gone."""
        return not self._is_closed

    @property
    def bytes_to_server(self) -> int:
        """Bytes passed on to the server so far."""
        return self._to_server.passed

    @property
    def bytes_to_client(self) -> int:
        """Bytes passed on to the client so far."""
        return self._to_client.passed

    # All below is called by the proxy and the streams, with the proxy's lock held.

    def _step(self) -> None:
        """Move whatever the kernel and the faults in effect let move now."""
        if any(one.lost and "black_hole" not in one.faults for one in self._streams):
            self._cut(BOTH)
            return
        if not (self._server_end.ready or self._is_severed):
            self._reach()
        for stream in self._streams:
            if stream.wants():
                stream.read()
            stream.pump()
        if all(stream.exhausted and stream.ended for stream in self._streams):
            self._close()

    def _watched(self) -> Iterator[tuple[int, int]]:
        """Yield the descriptors to wait for, each with its events."""
        for reads, writes in (self._streams, self._streams[::-1]):
            end = reads.source
            mask = select.POLLIN if reads.wants() else 0
            if writes.blocked or not end.ready:
                mask |= select.POLLOUT
            if end.socket is not None and mask:
                yield end.socket.fileno(), mask

    def _counted(self, way: Way) -> list[Fault]:
        """Return the faults that are to begin here after some bytes of this direction."""
        faults = (fault for fault in self._proxy.faults if fault in self._left)
        return [fault for fault in faults if fault.of in (way, "both")]

    def _fire(self, way: Way) -> bool:
        """Begin the faults for which enough bytes have passed; tell whether there was one."""
        ready = [fault for fault in self._counted(way) if not self._left[fault]]
        for fault in ready:
            del self._left[fault]
            self._begun.add(fault)
            fault.times += 1
            if fault.name == "reset":
                self._cut(fault.ways)
        return bool(ready)

    def _pass_ending(self, stream: ProxiedStream) -> None:
        """Tell the sink that the stream has ended, when all of it has been passed on."""
        stream.ended = True
        if stream.source.broken:
            self._reset_end(stream.sink)
            return
        assert stream.sink.socket is not None
        try:
            stream.sink.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self._sink_broke(stream)

    def _sink_broke(self, stream: ProxiedStream) -> None:
        """End a stream after its receiver has reset the connection.

        The other stream passes this on, after what it still holds.
        """
        stream.drop()
        stream.ended = True
        stream.sink.broken = True
        if self._to_server.ended and self._to_client.ended:
            self._reset_end(stream.source)

    def _cut(self, ways: tuple[Way, ...]) -> None:
        """Reset both sides because of a fault, or one of them without telling the other."""
        if self._is_closed:
            return
        self._proxy._counts["resets"] += 1
        self._is_severed = True
        for way in ways:
            self._reset_end(self._client_end if way == "client" else self._server_end)
        if ways == BOTH:
            self._close()

    def _close(self) -> None:
        self._is_closed = True
        for stream in self._streams:
            stream.source.close()
            stream.drop()

    def _reach(self) -> None:
        """Connect to the server, one of its places after the other, unless it must not hear."""
        end = self._server_end
        if end.socket is not None:
            error = end.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error in (0, errno.ECONNRESET, errno.EPIPE):
                # The last two come after the connection was made: read what was sent before.
                end.broken = end.ready = error != 0
                with suppress(OSError):  # not connected yet
                    end.socket.getpeername()
                    end.ready = True
                return
        elif not {"black_hole", "freeze"}.isdisjoint(self._to_server.faults):
            return
        while self._places:
            end.close()
            family, where = self._places.pop(0)
            end.socket = socket.socket(family)
            end.socket.setblocking(False)
            no_delay(end.socket)
            if end.socket.connect_ex(where) in (0, errno.EINPROGRESS):
                return
        self._proxy._counts["unreached"] += 1
        self._reset_end(self._client_end)
        self._close()

    def _reset_end(self, end: StreamEnd) -> None:
        """Send RST to one side. Nothing passes from it or to it any more."""
        for stream in self._streams:
            stream.drop()
            stream.ended = True
            stream.exhausted |= stream.source is end
        if end.socket is not None:
            end.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
        end.close()
