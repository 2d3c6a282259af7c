"""Memory for large values that come beside their requests: shared with a client, or the server's
own. Descriptors are kept back for the clients that are still to come."""

from __future__ import annotations

import errno
import os
import resource
import weakref
from collections import deque
from functools import partial

from rallypoint.host.memory import Pool, Segment, Unfit, received
from rallypoint.store.server.connection import Body, Malformed, Peer
from rallypoint.store.state.state import Large, State
from rallypoint.wire.messages import AnyRequest, Failed

BULK_BYTES = 1024 * 1024
"""Values from here on live in shared memory and are moved by threads. Smaller ones take the loop
under 200 us, less than handing them over and back would on a busy machine, and a descriptor each
would be many."""

HUGE_BYTES = 64 * 1024 * 1024
"""Values from here on are never copied by the loop, which would hold everybody up for 40 ms and
more."""

RESERVE = 4
"""A quarter of the descriptors that this process may have is not for values: clients that are still
to come need one each, and the store of a job shares its process with the launcher, which needs some
for every rank that starts or ends."""

NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


def _give_back(peer: Peer, number: int, fd: int, capacity: int) -> None:
    """Let a client have its segment again, which the server needs no more."""
    os.close(fd)
    peer.free(number)


class LargeValues:
    """All shared memory of the server."""

    def __init__(self, state: State) -> None:
        self.pool = Pool()
        self.segments: weakref.WeakSet[Segment] = weakref.WeakSet()
        self._state = state

    def close(self) -> None:
        """Close everything."""
        for segment in list(self.segments):
            segment.close()
        self.pool.close()

    def room(self, request: AnyRequest, size: int) -> Segment | bytearray | Failed:
        """Reserve memory for a value that is to come through the socket, or return the reply that
        refuses it."""
        refused = self._state.reserve(size, request.seq)
        if refused is not None:
            return refused
        try:
            segment = self._take(size) if size >= BULK_BYTES else None
            return bytearray(size) if segment is None else segment
        except (OSError, MemoryError) as error:
            return self.undo(request, size, error)

    def undo(self, request: AnyRequest, size: int, error: BaseException | None = None) -> Failed:
        """Give back what was reserved for a value that cannot be held."""
        self._state.release(size)
        return self.cannot_hold(request, getattr(error, "errno", None) or errno.ENOMEM)

    def cannot_hold(self, request: AnyRequest, number: int) -> Failed:
        """Return the reply to a request whose value finds no memory or descriptor."""
        text = f"the server cannot hold this value: {os.strerror(number)}"
        if number in NO_DESCRIPTOR:
            text += (
                f"; a value of {BULK_BYTES} bytes or more takes a descriptor, this process may have {open_files()} (ulimit -n), "
                f"and values leave a quarter of them free"
            )
        return Failed(request.seq, self._state.revision, "store-full", text)

    def shared(
        self, peer: Peer, request: AnyRequest, fd: int, size: int, number: int
    ) -> Large | Failed:
        """Take over the shared memory `fd` that came with a request, or return the reply that
        refuses it. `number`: the client's own for it, 0 when it does not want it back."""
        back = partial(_give_back, peer, number) if number else None
        if back is not None and peer.freed is None:
            peer.freed = deque()
        try:
            segment = received(fd, size, back)
        except Unfit as error:
            raise Malformed(str(error)) from error
        scarce = _is_scarce(segment)
        if scarce and size >= HUGE_BYTES:
            return self.cannot_hold(request, errno.EMFILE)
        refused = self._state.reserve(size, request.seq)
        if refused is not None:
            return refused
        if not scarce and size >= BULK_BYTES:
            self.segments.add(segment)
            return segment
        try:
            data = bytearray(size)
            segment.read(memoryview(data), 0)
        except (OSError, MemoryError) as error:
            return self.undo(request, size, error)
        return Body(data)

    def _take(self, size: int) -> Segment | None:
        """Return shared memory; None when descriptors are scarce."""
        try:
            segment = self.pool.take(size)
        except OSError as error:
            if error.errno not in NO_DESCRIPTOR:
                raise
            return None
        if _is_scarce(segment):
            segment.close()
            return None
        self.segments.add(segment)
        return segment


def open_files() -> int:
    """Return the number of descriptors that this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _is_scarce(segment: Segment) -> bool:
    """Tell whether descriptors have become scarce with this one: the kernel gives out the lowest
    number that is free."""
    limit = open_files()
    return limit != resource.RLIM_INFINITY and segment.fileno() >= limit - limit // RESERVE
