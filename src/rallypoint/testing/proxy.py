"""A TCP chaos proxy: it stands between a client and a server and breaks their connections.

    with ChaosProxy(server.address) as proxy:
        client = connect(proxy.address)
        proxy.latency(0.05, jitter=0.02)
        proxy.reset_every(0.5)
        with proxy.black_hole():
            ...                             # packets vanish without an error
        proxy.heal()

Real sockets and one thread; for Unix sockets too.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable
from types import TracebackType

from rallypoint.errors import UsageError
from rallypoint.store.address import set_forwarded
from rallypoint.testing.fault_engine import ProxyEngine, ProxyStatistics
from rallypoint.testing.faults import (
    Fault,
    Faults,
    To,
    check_at_least,
    check_jitter,
    directions,
)
from rallypoint.testing.proxy_listener import ProxyAddress, name_of, resolve
from rallypoint.testing.proxy_relay import Relay


class ProxiedConnection(Faults):
    """One connection through the proxy. Faults that are called here concern it alone."""

    def __init__(self, engine: ProxyEngine, relay: Relay) -> None:
        super().__init__(engine, only=relay)
        self._relay = relay

    def __repr__(self) -> str:
        passed = f"{self.bytes_to_server} B to the server, {self.bytes_to_client} B to the client"
        state = "open" if self.is_open else "closed"
        return f"<ProxiedConnection {self.number} from {self.client}: {state}, {passed}>"

    @property
    def number(self) -> int:
        """Position in the order of accepting, from 0. With the seed it decides what is drawn."""
        return self._relay.number

    @property
    def client(self) -> str:
        """The client's address: `tcp://127.0.0.1:40312`, or `unix:` (mostly without a name)."""
        return self._relay.client

    @property
    def is_open(self) -> bool:
        """True while something may pass, or a side does not know that the other one is gone."""
        return not self._relay.is_closed

    @property
    def bytes_to_server(self) -> int:
        """Bytes passed on to the server so far."""
        return self._relay.streams["server"].passed

    @property
    def bytes_to_client(self) -> int:
        """Bytes passed on to the client so far."""
        return self._relay.streams["client"].passed


class ChaosProxy(Faults):
    """A proxy for TCP and Unix sockets, with faults. It serves until `close`; a context manager.

    `address` is where clients go, `target` where it passes them on. The target need not be there
    yet: a client is reset if the server cannot be reached. Closes and resets of one side reach the
    other one, each direction by itself, after what was sent before. Descriptors that accompany
    bytes (SCM_RIGHTS) pass when both sides are Unix sockets.

    What faults draw (jitter) comes from `seed`. Not decided by the seed: when a thread runs, and in
    which order clients that connect at the same time are numbered.

    All methods may be called from every thread, but not in a process that was forked after the
    proxy was made: there it is closed, so that the child does not keep connections open.
    """

    def __init__(
        self, target: ProxyAddress, *, seed: int = 0, listen: ProxyAddress = "tcp://127.0.0.1:0"
    ) -> None:
        """Listen, and resolve names now.

        `target`, `listen`: `tcp://host:port`, `tcp://[::1]:port`, `unix:///path`, or
        `(host, port)`. Port 0 to listen on is a free one.

        A store's client refuses an address that only passes it on to the store. Until `close`,
        RALLYPOINT_FORWARDED in this process's environment, and so in that of its children, names
        this one as meant.

        `UsageError` for an address of another form, `OSError` when it cannot be resolved or
        listened on.
        """
        super().__init__(ProxyEngine(target, listen, seed))
        self.seed = seed
        self.address = self._engine.listener.address
        set_forwarded(self.address, True)
        _open_engines.add(self._engine)

    def __repr__(self) -> str:
        names = f"{self.address} -> {self.target}"
        if self._engine.is_closed:
            return f"<ChaosProxy {names}: closed>"
        count = len(self._engine.relays)
        faults = ", ".join(str(fault) for fault in self.faults) or "no fault"
        return f"<ChaosProxy {names}: {count} {'connection' if count == 1 else 'connections'}, {faults}>"

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
        """Close all connections and the address; no thread and no descriptor is left.

        May be called twice. `InternalError` when the proxy had failed.
        """
        set_forwarded(self.address, False)
        self._engine.close()

    def refuse(self) -> Fault:
        """Refuse new connections (`ConnectionRefusedError`), as when no server runs.

        The port stays reserved. Connections that are open go on: `reset` them as well for a server
        that was killed.
        """
        return self._begin("refusing connections")

    def black_hole(self, *, to: To = "both", accept: bool = True) -> Fault:
        """Let vanish what goes in that direction, as on one connection.

        New connections are accepted by the proxy, and the server hears of them when nothing
        vanishes in its direction any more. With `accept=False` new connections are not accepted:
        `connect()` waits, until its own timeout or, after the hole, the kernel's next try (1 s
        after the first, then 2 s, 4 s, ...).
        """
        return self._begin("black hole", to, accept=accept)

    def after_bytes(self, size: int, *, of: To = "both") -> Faults:
        """Plan a fault of each connection by itself, when `size` bytes have passed there.

        They are counted to the byte, in the direction `of` ("both": in the two together), from now
        or from the connection's beginning if that is later.

        `size` 0 is before the first byte: `proxy.after_bytes(0, of="client").reset()` lets a server
        act on a request, and its answer never arrives.
        """
        check_at_least("size", size, 0)
        return Faults(self._engine, size=size, of=directions(of))

    def reset_after(self, size: int, *, of: To = "both") -> Fault:
        """Plan `after_bytes(size).reset()`: every connection lives for that many bytes.

        The receiver gets them all, if it reads what it is sent.
        """
        return self.after_bytes(size, of=of).reset()

    def reset_every(self, interval: float, *, jitter: float = 0.0) -> Fault:
        """Reset all connections every `interval` seconds, give or take `jitter` (from the seed)."""
        check_at_least("interval", interval, 0.001)
        check_jitter(jitter, interval)
        return self._begin("reset", every=interval, jitter=jitter)

    def heal(self) -> None:
        """End all faults and forget all plans. Does nothing after `close`.

        Connections that have lost bytes, and those that were cut off on one side, are reset; all
        others go on. Returns when that is so.
        """
        if not self._engine.is_closed:
            self._engine.heal()

    @property
    def target(self) -> str:
        """Address to which new connections are passed on."""
        return self._engine.target

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Faults that are on or may still come, the oldest first."""
        return tuple(self._engine.faults)

    @property
    def connections(self) -> tuple[ProxiedConnection, ...]:
        """Open connections in the order of accepting.

        Every client whose `connect()` has returned is among them, unless none is accepted at the
        moment (`freeze`, `refuse`, `black_hole(accept=False)`).
        """
        if self._engine.is_closed:
            return ()
        with self._engine.held():
            return tuple(ProxiedConnection(self._engine, relay) for relay in self._engine.relays)

    def connection_of(self, client: socket.socket) -> ProxiedConnection:
        """Return the connection of which this socket is the client's end.

        `UsageError` when there is none (any more), and for a Unix socket, which mostly has no
        address to know it by.
        """
        name = name_of(client.getsockname())
        for connection in self.connections:
            if connection.client == name != "unix:":
                return connection
        raise UsageError("usage", f"no open connection of the proxy comes from {name}")

    def statistics(self) -> ProxyStatistics:
        """Count what was done until now; after `close` until then."""
        if not self._engine.is_closed:
            with self._engine.held():
                pass
        return self._engine.statistics()

    def wait_for(
        self, condition: Callable[[ProxyStatistics], object], timeout: float = 30.0
    ) -> ProxyStatistics:
        """Wait until `condition(statistics)` is true, and return those statistics.

        `proxy.wait_for(lambda seen: seen.resets >= 3)`. It is looked at whenever something has
        happened, and the proxy stands still meanwhile; what it raises is raised here.

        `TimeoutError`, with the statistics, after `timeout` real seconds; `UsageError` when the
        proxy is closed first.
        """
        return self._engine.wait_for(condition, timeout)

    def retarget(self, target: ProxyAddress) -> None:
        """Pass new connections on to another server from now on; open ones stay."""
        name, places = resolve(target)
        with self._engine.held():
            self._engine.target, self._engine.places = name, places


_open_engines: weakref.WeakSet[ProxyEngine] = weakref.WeakSet()


def _forget_in_child() -> None:
    for engine in list(_open_engines):
        if not engine.is_closed:
            engine.forget()


os.register_at_fork(after_in_child=_forget_in_child)
