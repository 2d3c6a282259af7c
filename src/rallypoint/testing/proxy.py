"""A TCP chaos proxy: it stands between a client and a server and breaks their connections.

    with ChaosProxy(server.address) as proxy:
        client = connect(proxy.address)
        proxy.latency(0.05, jitter=0.02)
        proxy.reset_every(0.5)
        with proxy.black_hole():
            ...                             # packets vanish without an error
        proxy.heal()

Real sockets and one thread. Callers change the state themselves, under a lock; the thread then
moves what may move.
"""

from __future__ import annotations

import math
import os
import random
import select
import socket
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType

from rallypoint.clock import Clock
from rallypoint.errors import UsageError
from rallypoint.store.address import set_forwarded
from rallypoint.testing.faults import BOTH, Fault, Faults, To, directions, require
from rallypoint.testing.proxied_connection import ProxiedConnection
from rallypoint.testing.proxy_listener import ProxyAddress, ProxyListener, name_of, resolve


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts of one direction.

    `bytes` that were passed on; `held` bytes are in the proxy now, `swallowed` ones will not be
    passed on.
    """

    bytes: int
    held: int
    swallowed: int


@dataclass(frozen=True, slots=True)
class ProxyStatistics:
    """Counts of a proxy so far.

    `connections` accepted in all, of these `open` now and `unreached` (reset, because the server
    did not take them); `resets` that faults did, counted per connection.
    """

    connections: int
    open: int
    unreached: int
    resets: int
    to_server: Traffic
    to_client: Traffic


class ChaosProxy(Faults):
    """A proxy for TCP and Unix sockets, with faults. It serves until `close`; a context manager.

    `address` is where clients go, `target` where it passes them on. The target need not be there
    yet: a client is reset if the server cannot be reached. Closes and resets of one side reach the
    other one, each direction by itself, after what was sent before. Descriptors that accompany
    bytes (SCM_RIGHTS) pass when both sides are Unix sockets. Jitters are drawn from `seed`.

    All methods may be called from every thread, but not in a process that was forked after the
    proxy was made: there it is closed, so that the child does not keep connections open.
    """

    def __init__(
        self, target: ProxyAddress, *, seed: int = 0, listen: ProxyAddress = "tcp://127.0.0.1:0"
    ) -> None:
        """Listen, and resolve names now.

        `target`, `listen`: `tcp://host:port`, `tcp://[::1]:port`, `unix:///path`, or
        `(host, port)`. Port 0 to listen on is a free one. `UsageError` for an address of another
        form, `OSError` when it cannot be resolved or listened on.

        A store's client refuses an address that only passes it on to the store. Until `close`,
        RALLYPOINT_FORWARDED in this process's environment, and so in that of its children, names
        this one as meant.
        """
        super().__init__(self)
        self.seed = seed
        self._target, self._places = resolve(target)
        self._listener = ProxyListener(listen)
        self.address = self._listener.address
        self._now = Clock().monotonic
        self._random = random.Random(f"{seed} proxy")
        self._counts: Counter[object] = Counter()
        self._connections: list[ProxiedConnection] = []  # in the order of accepting
        self._faults: list[Fault] = []  # that are on or may still come, the oldest first
        self._closed = False
        self._rounds = 0
        self._changed = threading.Condition()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        set_forwarded(self.address, True)
        _proxies.add(self)
        # A daemon: a test that forgets close() must not keep its interpreter from ending.
        self._thread = threading.Thread(target=self._run, name="the chaos proxy", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._connections)} open, {self._faults}"
        return f"<ChaosProxy {self.address} -> {self.target}: {state}>"

    def __enter__(self) -> ChaosProxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections and the address; no thread and no descriptor is left."""
        set_forwarded(self.address, False)
        with self._changed:
            if not self._closed:
                os.eventfd_write(self._wake, 1)
                self._closed = True
        self._thread.join()

    def refuse(self) -> Fault:
        """Refuse new connections (`ConnectionRefusedError`), as when no server runs.

        The port stays reserved. Connections that are open go on: `reset` them as well for a server
        that was killed. Not for Unix sockets.
        """
        require(not self._listener.is_unix, "a Unix socket cannot refuse")
        return self._begin("refuse")

    def black_hole(self, *, to: To = "both", accept: bool = True) -> Fault:
        """Let vanish what goes in that direction, as on one connection.

        The proxy accepts new connections, and the server hears of them after the hole. With
        `accept=False`, not for Unix sockets, their packets vanish too: `connect()` waits, until its
        own timeout or the kernel's next try after the hole (1 s after the first, then 2 s, ...).
        """
        require(accept or not self._listener.is_unix, "a Unix socket accepts")
        return self._begin("black_hole", to, accept=accept)

    def after_bytes(self, size: int, *, of: To = "both") -> Faults:
        """Plan a fault of each connection by itself, when `size` bytes have passed there.

        They are counted to the byte, in the direction `of` ("both": in the two together), from now
        or from the connection's beginning if that is later. `size` 0 is before the first byte:
        `proxy.after_bytes(0, of="client").reset()` lets a server act on a request, and its answer
        never arrives.
        """
        require(size >= 0, f"size={size!r} is less than 0")
        directions(of)
        return Faults(self, size=size, of=of)

    def reset_after(self, size: int, *, of: To = "both") -> Fault:
        """Plan `after_bytes(size).reset()`: every connection lives for that many bytes."""
        return self.after_bytes(size, of=of).reset()

    def reset_every(self, interval: float, *, jitter: float = 0.0) -> Fault:
        """Reset all connections every `interval` seconds, give or take `jitter` (from the seed)."""
        require(interval >= 0.001, f"interval={interval!r} is less than 0.001")
        require(0 <= jitter <= interval, f"jitter={jitter!r} is not within {interval!r}")
        return self._begin("reset", every=interval, jitter=jitter)

    def heal(self) -> None:
        """End all faults and forget all plans. Does nothing after `close`.

        Connections that have lost bytes, and those that were cut off on one side, are reset; all
        others go on. Returns when that is so.
        """
        if not self._closed:
            with self._held():
                self._faults.clear()
                for connection in self._connections:
                    if connection._is_severed:
                        connection._cut(BOTH)

    @property
    def target(self) -> str:
        """Address to which new connections are passed on."""
        return self._target

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Faults that are on or may still come, the oldest first."""
        return tuple(self._faults)

    @property
    def connections(self) -> tuple[ProxiedConnection, ...]:
        """Open connections in the order of accepting: of all whose `connect()` has returned."""
        if self._closed:
            return ()
        with self._held():
            return tuple(self._connections)

    def connection_of(self, client: socket.socket) -> ProxiedConnection:
        """Return the connection of which this socket is the client's end.

        `UsageError` when there is none (any more), and for a Unix socket without a name.
        """
        name = name_of(client.getsockname())
        for connection in self.connections:
            if connection.client == name != "unix:":
                return connection
        raise UsageError("usage", f"no open connection of the proxy comes from {name}")

    def statistics(self) -> ProxyStatistics:
        """Count what was done until now; after `close` until then."""
        if not self._closed:
            with self._held():
                pass
        return self._count()

    def wait_for(
        self, condition: Callable[[ProxyStatistics], object], timeout: float = 30.0
    ) -> ProxyStatistics:
        """Wait until `condition(statistics)` is true, and return those statistics.

        It is looked at whenever something has happened, and the proxy stands still meanwhile; what
        it raises is raised here. `TimeoutError`, with the statistics, after `timeout` real seconds;
        `UsageError` when the proxy is closed first.
        """
        with self._held():
            pass  # the thread goes round, and so takes care of clients that were accepted here
        with self._changed:
            true = self._changed.wait_for(lambda: self._closed or condition(self._count()), timeout)
            seen = self._count()
            if not true:
                raise TimeoutError(f"this did not come true within {timeout:g} s: {seen}")
            self._require_open()
        return seen

    def retarget(self, target: ProxyAddress) -> None:
        """Pass new connections on to another server from now on; open ones stay."""
        found = resolve(target)
        with self._held():
            self._target, self._places = found

    def _require_open(self) -> None:
        require(not self._closed, "the chaos proxy is closed")

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the proxy for a look or a change, after accepting every client that has connected.

        A change is in effect at the end of the block. `UsageError` when the proxy is closed.
        """
        with self._changed:
            self._require_open()
            self._accept_all()
            yield
            # A descriptor that was closed is closed once the thread does not wait for it.
            rounds = self._rounds
            os.eventfd_write(self._wake, 1)
            self._changed.wait_for(lambda: self._rounds > rounds or self._closed)
            self._require_open()

    def _add(self, fault: Fault) -> None:
        """Begin or plan a fault."""
        with self._held():
            if fault.every is not None:
                self._plan(fault, self._now())
            elif fault.size is not None:
                for connection in self._connections:
                    connection._left[fault] = fault.size
            elif fault.name == "reset":
                self._reset(fault)
                return
            else:
                fault.times = 1
            self._faults.append(fault)

    def _end(self, fault: Fault) -> None:
        """End a fault and what of it is planned."""
        with self._held():
            if fault in self._faults:
                self._faults.remove(fault)

    # All below is called with the lock held.

    def _count(self) -> ProxyStatistics:
        to_server, to_client = (
            Traffic(
                self._counts["passed", way],
                sum(connection._streams[index].queued for connection in self._connections),
                self._counts["swallowed", way],
            )
            for index, way in enumerate(BOTH)
        )
        return ProxyStatistics(
            self._counts["accepted"],
            len(self._connections),
            self._counts["unreached"],
            self._counts["resets"],
            to_server,
            to_client,
        )

    def _accept_all(self) -> None:
        while found := self._listener.accept():
            number = self._counts["accepted"]
            self._counts["accepted"] += 1
            self._connections.append(ProxiedConnection(self, number, *found))

    def _plan(self, fault: Fault, last: float) -> None:
        jitter = self._random.uniform(-fault.jitter, fault.jitter)
        fault.due = last + (fault.every or 0.0) + jitter

    def _reset(self, fault: Fault) -> None:
        fault.times += 1
        for connection in self._connections:
            if fault.only in (None, connection):
                connection._cut(fault.ways)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    if self._closed:
                        break
                    self._step()
                    poll, patience = self._poll()
                    self._rounds += 1
                    self._changed.notify_all()
                poll.poll(patience)
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
        finally:
            with self._changed:
                self._listener.close()
                self._let_go()
                self._changed.notify_all()

    def _step(self) -> None:
        """Move whatever the kernel and the faults in effect let move now."""
        self._accept_all()
        for fault in self._faults:
            if fault.due <= self._now():
                self._plan(fault, fault.due)
                self._reset(fault)
        for connection in self._connections:
            connection._step()
        self._connections = [one for one in self._connections if one.is_open]
        self._faults[:] = [one for one in self._faults if one.only is None or one.only.is_open]
        self._listener.become(
            refuses=any(fault.name == "refuse" for fault in self._faults),
            drops=not all(fault.accept for fault in self._faults),
        )

    def _poll(self) -> tuple[select.poll, float | None]:
        """Return what to wait for, and at most how many milliseconds."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if not self._listener.refuses:
            poll.register(self._listener.socket, select.POLLIN)
        due = min((fault.due for fault in self._faults), default=math.inf)
        for connection in self._connections:
            for fd, mask in connection._watched():
                poll.register(fd, mask)
            due = min(due, *(stream.due for stream in connection._streams))
        return poll, None if due == math.inf else max(0.0, (due - self._now()) * 1000)

    def _let_go(self) -> None:
        """Close this process's copies of all descriptors."""
        self._closed = True
        self._faults.clear()
        for connection in self._connections:
            connection._close()
        self._connections.clear()
        self._listener.socket.close()
        os.close(self._wake)


_proxies: weakref.WeakSet[ChaosProxy] = weakref.WeakSet()


def _close_in_child() -> None:
    for proxy in list(_proxies):
        if not proxy._closed:
            proxy._changed = threading.Condition()  # somebody may have held the other one
            proxy._let_go()


os.register_at_fork(after_in_child=_close_in_child)
