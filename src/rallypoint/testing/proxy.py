"""A TCP chaos proxy: it stands between a client and a server and does to their connections what networks do.

    with ChaosProxy(server.address) as proxy:
        client = connect(proxy.address)
        proxy.latency(0.05, jitter=0.02)
        proxy.reset_every(0.5)
        with proxy.black_hole():
            ...                             # packets vanish; nobody is told
        proxy.heal()

Real sockets and one thread; for Unix sockets too. `faults` has the words, `engine` what carries them out.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType

from rallypoint.clock import Clock
from rallypoint.errors import UsageError
from rallypoint.store.address import set_forwarded
from rallypoint.testing.engine import Engine, ProxyStatistics
from rallypoint.testing.faults import Fault, Faults, ListenerFaults, To, counted, repeated, timed
from rallypoint.testing.lanes import Connection
from rallypoint.testing.listener import Address, name_of, resolved


class ProxiedConnection(Faults):
    """One connection through the proxy. Faults that are called here concern this connection alone."""

    def __init__(self, engine: Engine, connection: Connection) -> None:
        super().__init__(engine, only=connection)
        self._connection = connection

    def __repr__(self) -> str:
        passed = f"{self.bytes_to_server} B to the server, {self.bytes_to_client} B to the client"
        return f"<ProxiedConnection {self.number} from {self.client}: {'open' if self.is_open else 'closed'}, {passed}>"

    @property
    def number(self) -> int:
        """Connections are counted from 0 as they are accepted. With the seed it decides what is drawn for this one."""
        return self._connection.number

    @property
    def client(self) -> str:
        """Whose it is: `tcp://127.0.0.1:40312`, or `unix:` (such a client mostly has no address)."""
        return self._connection.client

    @property
    def is_open(self) -> bool:
        """Whether something may still pass, or a side has not been told that the other one is gone."""
        return not self._connection.is_closed

    @property
    def bytes_to_server(self) -> int:
        """Passed on so far."""
        return self._connection.to_server.passed

    @property
    def bytes_to_client(self) -> int:
        """Passed on so far."""
        return self._connection.to_client.passed


class ChaosProxy(ListenerFaults):
    """A proxy for TCP and Unix sockets, with faults. It serves from when it was made until `close`; use it as a context manager.

    `address` is where clients go, `target` where it passes them on. The target need not be there yet: a client whose server
    cannot be reached is reset. Closes and resets of one side reach the other one, each direction by itself, after what was
    sent before. Descriptors that accompany bytes (SCM_RIGHTS) pass when both sides are Unix sockets.

    What faults draw (jitter, cuts, damaged bytes, which connection) comes from `seed`, the connection's number and its stream;
    the same seed and the same traffic give the same faults. Two things are not decided by the seed: when a thread runs, and in
    which order clients that connect at the same time are numbered.

    All methods may be called from every thread, but not in a process that was forked after the proxy was made: there it is
    closed, so that the child does not keep connections open.
    """

    def __init__(self, target: Address, *, seed: int = 0, listen: Address = "tcp://127.0.0.1:0", clock: Clock | None = None) -> None:
        """`target`, `listen`: `tcp://host:port`, `tcp://[::1]:port`, `unix:///path`, or `(host, port)`; names are resolved here and
        now. Port 0 to listen on is a free one. With a `ManualClock` everything that is counted in seconds happens when that is
        moved, and has happened when `advance` returns.

        A store's client refuses an address that only passes it on to the store. Until `close`, RALLYPOINT_FORWARDED in this
        process's environment, and so in that of its children, names this one as meant.

        `UsageError` for an address of another form, `OSError` when it cannot be resolved or listened on.
        """
        engine = Engine(target, listen, seed, clock or Clock())
        super().__init__(engine)
        self._engine: Engine = engine
        self.seed = seed
        self.address = engine.listener.address
        self._is_closed = False
        set_forwarded(self.address, True)
        engine.loop.start()
        _open_proxies.add(self)

    def __repr__(self) -> str:
        names = f"{self.address} -> {self.target}"
        if self._is_closed:
            return f"<ChaosProxy {names}: closed>"
        count = len(self._engine.connections)
        faults = ", ".join(fault.words() for fault in self.faults) or "no fault"
        return f"<ChaosProxy {names}: {count} {'connection' if count == 1 else 'connections'}, {faults}>"

    def __enter__(self) -> ChaosProxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections and the address; no thread and no descriptor is left when this returns. May be called twice.
        `InternalError` when the proxy had failed."""
        self._is_closed = True
        _open_proxies.discard(self)
        set_forwarded(self.address, False)
        self._engine.loop.stop()

    # When

    def after(self, seconds: float, *, lasting: float | None = None) -> ListenerFaults:
        """A fault that begins `seconds` from now, and ends by itself after `lasting` seconds more:
        `proxy.after(3.0, lasting=30.0).black_hole()`. `proxy.after(0, lasting=1.0)` begins now."""
        return ListenerFaults(self._engine, timed(seconds, lasting))

    def every(self, interval: float, *, jitter: float = 0.0, lasting: float | None = None) -> ListenerFaults:
        """A fault that begins every `interval` seconds, give or take `jitter`, the first time in one `interval` from now, and lasts
        `lasting` seconds each time (without it: from the first time on): `proxy.every(5.0, lasting=0.2).refuse()`."""
        return ListenerFaults(self._engine, repeated(interval, jitter, lasting))

    def after_bytes(self, size: int, *, of: To = "both", again: bool = False, lasting: float | None = None) -> Faults:
        """A fault of each connection by itself, as soon as `size` bytes in the direction `of` ("both": in the two together) have
        passed there, to the byte; counted from now, or from the connection's beginning if that is later. With `again` once more
        after each further `size` bytes: `proxy.after_bytes(1000, of="client", again=True).corrupt(to="client")`.

        `size` 0 is before the first byte: `proxy.after_bytes(0, of="client").reset()` lets a server act on a request, and its
        answer never arrive."""
        return Faults(self._engine, counted(size, of, again, lasting))

    def reset_every(self, interval: float, *, count: int | None = None, jitter: float = 0.0) -> Fault:
        """`every(interval).reset()`: all connections, or `count` of them chosen by the seed."""
        return self.every(interval, jitter=jitter).reset(count=count)

    def reset_after(self, size: int, *, of: To = "both") -> Fault:
        """`after_bytes(size).reset()`: every connection lives for that many bytes. The receiver gets them all, if it reads what it
        is sent: a reset drops what waits in the sender's kernel."""
        return self.after_bytes(size, of=of).reset()

    def heal(self) -> None:
        """End all faults and forget all plans. Connections whose stream has a hole, and those of which one side was cut off, are
        reset; all others go on. Returns when that is so. Does nothing after `close`."""
        if not self._is_closed:
            self._engine.loop.call(self._engine.heal)

    # What was done

    @property
    def target(self) -> str:
        """Where new connections are passed on to."""
        return self._engine.target

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Those that are on or may still come, the oldest first."""
        return tuple(self._engine.faults)

    @property
    def connections(self) -> tuple[ProxiedConnection, ...]:
        """The open ones, in the order in which they were accepted; every client whose `connect()` has returned is among them,
        unless nobody is accepted at the moment (`freeze`, `refuse`, `black_hole(accept=False)`)."""
        if self._is_closed:
            return ()

        def get() -> list[Connection]:
            self._engine.accept_all()
            return list(self._engine.connections)

        return tuple(ProxiedConnection(self._engine, connection) for connection in self._engine.loop.call(get))

    def connection_of(self, client: socket.socket) -> ProxiedConnection:
        """The connection that this socket is the client's end of. `UsageError` when there is none (any more), and for a Unix
        socket, which mostly has no address to know it by."""
        name = name_of(client.getsockname())
        found = [connection for connection in self.connections if connection.client == name != "unix:"]
        if not found:
            raise UsageError("usage", f"no open connection of the proxy comes from {name}")
        return found[0]

    def statistics(self) -> ProxyStatistics:
        """What was done until now; after `close` until then."""
        if self._is_closed:
            return self._engine.statistics()

        def get() -> ProxyStatistics:
            self._engine.accept_all()
            return self._engine.statistics()

        return self._engine.loop.call(get)

    def wait_for(self, condition: Callable[[ProxyStatistics], object], timeout: float = 30.0) -> ProxyStatistics:
        """Wait until `condition(statistics)` is true, and return those statistics: `proxy.wait_for(lambda seen: seen.resets >= 3)`.
        It is looked at whenever something has happened, in the proxy's thread; what it raises is raised here.

        `TimeoutError`, with the statistics, after `timeout` real seconds; `UsageError` when the proxy is closed first."""
        answer: Future[ProxyStatistics] = Future()
        self._engine.loop.call(lambda: self._engine.waiters.append((condition, answer)))
        try:
            return answer.result(timeout)
        except TimeoutError:
            if answer.done():
                raise  # it was the condition that raised it
            raise TimeoutError(f"this did not come true within {timeout:g} s: {self.statistics()}") from None
        finally:
            answer.cancel()  # or the proxy would go on looking

    def retarget(self, target: Address) -> None:
        """Pass new connections on to another server from now on, for one that was started again elsewhere; open ones stay."""
        name, places = resolved(target)
        self._engine.loop.call(lambda: self._engine.retarget(name, places))

    def _forget(self) -> None:
        self._is_closed = True
        self._engine.forget()


_open_proxies: weakref.WeakSet[ChaosProxy] = weakref.WeakSet()


def _forget_in_child() -> None:
    for proxy in list(_open_proxies):
        proxy._forget()


os.register_at_fork(after_in_child=_forget_in_child)
