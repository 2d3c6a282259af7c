"""Connections around state.py: the store as something that is started, has an address, and stops.

The loop (`server_loop.py`) runs in a thread of its own (`start`) or in the caller's
(`serve_forever`).
"""

from __future__ import annotations

import os
import resource
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from rallypoint.clock import Clock
from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.host import threads, unix_sockets
from rallypoint.host.ports import hold_port
from rallypoint.store.address import Address
from rallypoint.store.discovery import checked_secret, new_secret
from rallypoint.store.limits import limits
from rallypoint.store.logger import logger
from rallypoint.store.server.server_loop import Loop, prepare
from rallypoint.store.state.attendance import Roster
from rallypoint.store.state.state import State
from rallypoint.wire.messages import Identity, Limits

if TYPE_CHECKING:
    from rallypoint.store.certificate import TlsIdentity
    from rallypoint.store.tls import TlsThread

DRAIN = 2.0
"""Seconds that clients have to take what was on its way to them when the server stops: a gigabyte
on one host.
"""

FREE_PORT = "let the store take any free port, and tell its clients its address"

EVERYWHERE = ("0.0.0.0", "::")

log = logger()


class Server:
    """A coordination store: keys, locks, queues, barriers in the memory of this process.

    Listening begins with the object, serving with `start` or `serve_forever`. A context manager:
    starts, and stops at the end. After `stop` no thread, descriptor or file of it is left, and it
    cannot be started again.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int | str = 0,
        port_range: tuple[int, int] | None = None,
        max_bytes: int | str | None = None,
        secret: bytes | str | None = None,
        job: str = "",
        listeners: Sequence[socket.socket] | None = None,
        address: str | None = None,
        local: bool = True,
        identity: TlsIdentity | None = None,
        clock: Clock | None = None,
        roster: Roster | None = None,
        on_end: Callable[[Identity, bool, float], None] | None = None,
        on_stranger: Callable[[str, str], None] | None = None,
    ) -> None:
        """`host`: the one address that is bound, nothing else. `port`: a number, or its digits as
        text; 0: any free one, of `port_range` (both ends included) if given. `max_bytes`: see
        `store.limits.limits`. `secret`: at least 16 bytes; None: 32 random ones. `job`: only
        clients of this job, or of none, are let in. `listeners`: sockets that listen already,
        instead of `host` and `port`; they are closed by `stop`. `address`: what clients are to use,
        when it is not what was bound. `local`: listen on a Unix socket too; clients on this host
        are told, and move there by themselves. `identity`: of TLS, which every client must speak that
        does not come by a Unix socket. `roster`: the launcher's knowledge of the job's
        ranks, for errors that name the missing ones; called by the thread that serves. `on_end`:
        called by it with the owner of each session that has run out, whether that was for want of
        signs of life alone, and the seconds since the last one, or since its connections ended.
        `on_stranger`: called by it with the address of each client of another job, version or
        secret, with TLS or without it unlike this side, and why it was not let in.

        Raises UsageError for a secret that is too short, a size, host or port that is none, and
        what `hold_port` raises.
        """
        self.secret: bytes = new_secret() if secret is None else checked_secret(secret)
        self.job = job
        self.limits: Limits = limits(max_bytes, example='max_bytes="2GiB"')
        self._clock = clock or Clock()
        self._path = ""  # of a socket that is ours to remove
        self._thread: threading.Thread | None = None
        self._serving = 0  # the thread's number while the loop runs
        self._changing = threading.Lock()
        self._ended = threading.Event()
        self._state = "listening"
        self._tls: TlsThread | None = None
        bound = [_listen(host, port, port_range)] if listeners is None else list(listeners)
        try:
            paths = [str(sock.getsockname()) for sock in bound if sock.family == socket.AF_UNIX]
            if local and not paths:
                sock, self._path = _private_socket()
                if sock is not None:
                    bound.append(sock)
                    paths = [self._path]
            self.address: str = address or str(_address(bound[0], identity))
            _raise_limit_of_files()
            if identity is not None:
                from rallypoint.store import tls  # here: OpenSSL is slow to load

                self._tls = tls.TlsThread(f"store {self.address}: TLS", identity)
            self._loop: Loop | None = Loop(
                State(self.limits, roster=roster, began=self._clock.wall()),
                bound,
                secret=self.secret,
                job=job,
                local=paths[0] if local and paths else "",
                clock=self._clock,
                encrypt=None if self._tls is None else self._tls.begin,
                on_end=on_end,
                on_stranger=on_stranger,
            )
        except BaseException:
            for sock in bound:
                sock.close()
            if self._path:
                unix_sockets.remove(self._path)
            raise
        self._pid = os.getpid()
        _servers.add(self)

    def __repr__(self) -> str:
        clients = (
            f", {len(self._loop)} clients"
            if self._loop is not None and self._state == "serving"
            else ""
        )
        return f"<Server {self.address}: {self._state}{clients}>"

    def start(self) -> None:
        """Serve, in a thread. `UsageError` when it has been started or stopped."""
        loop = self._begin()
        try:
            self._thread = threads.start(partial(self._run, loop), f"store {self.address}")
        except RuntimeError:  # no thread is to be had
            loop.ask_to_stop("it could not be started", 0.0)
            self._run(loop)
            raise

    def serve_forever(self) -> None:
        """Serve, in this thread, until `stop` is called by another one; not at all if it has been
        called already.
        """
        try:
            loop = self._begin()
        except UsageError:
            if self._state == "stopped":
                return
            raise
        self._run(loop)

    def adopt(self, sock: socket.socket) -> None:
        """Serve a socket that is connected already; it belongs to the server from now on. Raises
        OSError when it is no such socket."""
        if self._loop is None:
            raise UsageError("usage", f"the store {self.address} has been stopped")
        prepare(sock)
        self._loop.adopt(sock)

    def stop(self, reason: str = "the server was stopped", drain: float = DRAIN) -> None:
        """Tell all clients, send what is still to be sent for at most `drain` seconds, close. May
        be called twice, by any thread; does nothing in a forked child. Called by the thread that
        serves, it returns at once, and serving ends soon after."""
        loop = self._loop
        if os.getpid() != self._pid or loop is None:
            return
        loop.ask_to_stop(reason, drain)
        if self._serving == threading.get_ident():
            return
        with self._changing:
            never_served = self._state == "listening"
            if never_served:
                self._state = "stopped"
        if never_served:
            loop.run()  # it has been asked to stop, so that it only closes
            self._over()
        else:
            self._ended.wait()
            if self._thread is not None:
                self._thread.join()

    def _begin(self) -> Loop:
        with self._changing:
            if self._loop is None or self._state != "listening":
                raise UsageError(
                    "usage", f"the store {self.address} is {self._state}: a server is started once"
                )
            if self._tls is not None:
                self._tls.start()
            self._state = "serving"
            return self._loop

    def _run(self, loop: Loop) -> None:
        self._serving = threading.get_ident()
        try:
            loop.run()
        except Exception:
            log.exception("the store %s has failed; please report this", self.address)
            raise
        finally:
            self._serving = 0
            self._over()

    def _over(self) -> None:
        self._state = "stopped"
        self._loop = None
        if self._tls is not None:
            self._tls.stop()
        if self._path:
            unix_sockets.remove(self._path)
        self._ended.set()

    def _forget(self) -> None:
        """Close the sockets in a forked child: its copies would keep the port taken, and connections
        open, after the parent's death."""
        loop, self._loop, self._state = self._loop, None, "in another process"
        if loop is not None:
            loop.forget()
            if self._tls is not None:
                self._tls.close()

    def __enter__(self) -> Server:
        if self._state != "serving":  # what `serve` returns is serving already
            self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def serve(
    host: str = "127.0.0.1",
    port: int | str = 0,
    max_bytes: int | str | None = None,
    secret: bytes | str | None = None,
    *,
    job: str = "",
    port_range: tuple[int, int] | None = None,
) -> Server:
    """Start a store in this process, in a thread; see `Server` for what may be said and what is
    raised.

        with rallypoint.serve() as server:
            store = rallypoint.connect(server.address, secret=server.secret)

    `max_bytes`: what keys and values may take in all, a number or "2GiB"; a quarter of the memory
    that this process may use if it is not given.
    """
    server = Server(
        host=host, port=port, port_range=port_range, max_bytes=max_bytes, secret=secret, job=job
    )
    server.start()
    return server


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _forget_all() -> None:
    for server in list(_servers):
        server._forget()
    _servers.clear()


os.register_at_fork(after_in_child=_forget_all)


def _listen(host: str, port: int | str, port_range: tuple[int, int] | None) -> socket.socket:
    if (
        not isinstance(host, str) or not host.strip()
    ):  # "" and None are all addresses of this machine to the kernel
        raise UsageError(
            "usage",
            f"host={host!r} is not an address to listen on",
            help=(("this machine alone", 'host="127.0.0.1"'),),
        )
    try:
        held = hold_port(_port(port), host, port_range)
    except EnvironmentProblem as error:
        if error.code != "port-in-use":
            raise
        help = ((FREE_PORT, "port=0"),)
        raise EnvironmentProblem(error.code, error.headline, why=error.why, help=help) from error
    if held.host in EVERYWHERE:
        log.warning(
            "the store listens on all addresses of this machine (%s): whoever reaches port %d may try its secret",
            host,
            held.port,
        )
    return socket.socket(fileno=held.detach())


def _port(given: int | str) -> int:
    """Return a port's number, which may be given as text. Its range is checked by `hold_port`."""
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) <= 5:
        return int(given)
    raise UsageError(
        "port-invalid", f"port={given!r} is no port number: 1-65535, or 0 for any free one"
    )


def _private_socket() -> tuple[socket.socket | None, str]:
    try:
        return unix_sockets.private_socket("store.sock")
    except EnvironmentProblem as error:  # TCP serves local clients as well, more slowly
        log.info("the store has no Unix socket for clients on this host: %s", error)
        return None, ""


def _address(sock: socket.socket, identity: TlsIdentity | None) -> Address:
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return Address(path=str(name))
    return Address(str(name[0]), int(name[1]), tls=identity is not None)


def _raise_limit_of_files() -> None:
    """Allow this process as many open files as it may have without asking: each client takes one,
    each value in shared memory too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # a sandbox, or macOS's hard limit that is none
            log.info("the limit of open files stays at %d: %s", soft, error)
