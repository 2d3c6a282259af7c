"""A server and its clients in one process, joined by socket pairs: no port, no name, no firewall,
and connections that you cut.

What crosses is the real protocol between the real client and the real server; only the network is
not there. For what a network does to bytes on their way (latency, black holes, resets in the middle
of an answer) stand a `ChaosProxy` between them.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import weakref
from types import TracebackType

from rallypoint.errors import UsageError
from rallypoint.primitives.store import Store
from rallypoint.store.address import Address
from rallypoint.store.client.session import Options
from rallypoint.store.server.server import Server

ADDRESS = Address("192.0.2.1", 1)
"""Address at which clients believe the server to be: one that is set aside for documentation (RFC
5737), so that nothing is ever there.
"""


class Network:
    """A store's server with clients that reach it without a network. Use it as a context manager.

    >>> with Network() as network:
    ...     a, b = network.connect(), network.connect()
    ...     a["x"] = 1
    ...     network.cut()  # every connection breaks, as a reset would
    ...     b.add("x", 1)  # ... and is opened again: exactly once all the same
    2
    """

    def __init__(self, *, max_bytes: int | str | None = None) -> None:
        """`max_bytes`: as for `rallypoint.serve`."""
        self.server = Server(max_bytes=max_bytes, listeners=(), address=str(ADDRESS), local=False)
        self.opened = 0  # connections in all, those of a reconnect included
        self.refused = 0
        self._refusing = False
        self._ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._stores: weakref.WeakSet[Store] = weakref.WeakSet()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Network: {len(self)} connections{', refusing new ones' if self._refusing else ''}, {self.opened} opened in all>"

    def __len__(self) -> int:
        """Count the connections that there are now."""
        with self._lock:
            return sum(1 for end in self._ends if end.fileno() >= 0)

    def __enter__(self) -> Network:
        self.server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the stores that are left, and stops the server."""
        self.accept()
        for store in list(self._stores):
            store.close()
        self.server.stop()

    def connect(
        self,
        *,
        rank: int | None = None,
        timeout: float = 10.0,
        ttl: float = 10.0,
        allow_pickle: bool = False,
        strict: bool = False,
        same_host: bool = True,
    ) -> Store:
        """Make a client, as `rallypoint.connect` does. `rank`: its rank, as other clients see
        it."""
        options = Options(ADDRESS, rank, "", timeout, ttl, allow_pickle, strict, same_host)
        store = Store(options, self.server.secret, self._open)
        self._stores.add(store)
        return store

    def cut(self) -> int:
        """Break every connection; how many there were. Clients notice at once and connect again."""
        with self._lock:
            ends = [end for end in self._ends if end.fileno() >= 0]
        for end in ends:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:  # its owner was quicker
                continue
        return len(ends)

    def refuse(self) -> None:
        """Refuse new connections from now on, as if nothing listened; those that are open go on."""
        self._refusing = True

    def accept(self) -> None:
        """Take new connections again."""
        self._refusing = False

    def _open(self, family: socket.AddressFamily, sockaddr: tuple[object, ...]) -> socket.socket:
        refused = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        with self._lock:
            if self._refusing:
                self.refused += 1
                raise refused
            mine, theirs = socket.socketpair()
            try:
                mine.setblocking(False)
                self.server.adopt(theirs)
            except UsageError as stopped:
                mine.close()
                theirs.close()
                raise refused from stopped
            self.opened += 1
            self._ends.add(mine)
        return mine
