"""The chaos proxy's listening socket: its address stays reserved, whatever happens there."""

from __future__ import annotations

import os
import socket
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from rallypoint.errors import UsageError

ProxyAddress: TypeAlias = str | tuple[str, int]
Place: TypeAlias = tuple[int, tuple[str, int] | str]
"""An address family and what `connect` takes."""

ListenerState: TypeAlias = Literal["accepting", "silent", "full", "refusing"]

BACKLOG = 4096
"""Connections that may wait to be accepted: hundreds of clients that start at once get in."""


class ProxyListener:
    """A listening socket with four states.

    `accepting`; `silent`: the kernel accepts, the proxy does not; `full`: the kernel's queue is
    full, so it drops what arrives; `refusing`: no socket listens.
    """

    def __init__(self, address: ProxyAddress) -> None:
        self._family, self._where = resolve(address)[1][0]
        self._path = ""  # of a Unix socket that this listener has made
        self._held: socket.socket | None = None
        self._socket: socket.socket | None = None
        self._fillers: dict[str, socket.socket] = {}
        self.state: ListenerState = "accepting"
        try:
            if self._family != socket.AF_UNIX:
                # A second socket has the port also while none listens on it.
                self._held = self._bound(self._where)
                self._where = self._held.getsockname()
            self._listen()
        except OSError:
            self.close()
            raise
        self.address = name_of(self._where)

    def fileno(self) -> int:
        """Return the listening socket's descriptor. Not while `refusing`."""
        assert self._socket is not None
        return self._socket.fileno()

    def accept(self) -> tuple[socket.socket, str] | None:
        """Return the next client and its name, or None when there is none now."""
        assert self._socket is not None
        while True:
            try:
                sock, where = self._socket.accept()
            except BlockingIOError:
                return None
            except ConnectionAbortedError:
                continue  # it has gone again
            name = name_of(where)
            if name not in self._fillers:
                sock.setblocking(False)
                no_delay(sock)
                return sock, name
            sock.close()
            self._fillers.pop(name).close()

    def become(self, state: ListenerState) -> None:
        """Change the state. The caller has accepted what had arrived."""
        self.state = state
        if state == "refusing":
            self._stop()
            return
        if self._socket is None:
            self._listen()
        assert self._socket is not None
        self._socket.listen(0 if state == "full" else BACKLOG)
        if state == "full":
            # Linux drops a connection request when more wait than the backlog says: with 0, one.
            filler = socket.socket(self._family, socket.SOCK_STREAM)
            filler.setblocking(False)
            if self._family == socket.AF_UNIX:
                filler.bind("")  # the kernel chooses a name, by which `accept` knows it again
            filler.connect_ex(self._where)
            self._fillers[name_of(filler.getsockname())] = filler

    def close(self) -> None:
        """Give the address up. May be called twice."""
        self._stop()
        if self._held is not None:
            self._held.close()
        if self._path:
            try:
                os.unlink(self._path)
            except FileNotFoundError:
                pass  # removed by someone else
            self._path = ""

    def forget(self) -> None:
        """Close this process's copies of the descriptors, in a forked child."""
        for sock in (self._socket, self._held, *self._fillers.values()):
            if sock is not None:
                sock.close()

    def _bound(self, where: tuple[str, int] | str) -> socket.socket:
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
        except OSError:
            sock.close()
            raise
        return sock

    def _listen(self) -> None:
        if self._path:
            os.unlink(self._path)
        self._socket = self._bound(self._where)
        self._path = self._where if isinstance(self._where, str) else ""
        self._socket.listen(BACKLOG)

    def _stop(self) -> None:
        if self._socket is not None:
            # A process forked in this moment may hold a copy, which closing would leave listening.
            self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._socket = None
        for filler in self._fillers.values():
            filler.close()
        self._fillers.clear()


def resolve(address: ProxyAddress) -> tuple[str, list[Place]]:
    """Return an address in its one form, and the places that it means, at least one.

    `UsageError` when it has another form, `OSError` when its name is not known.
    """
    if isinstance(address, tuple):
        host, port = address
    elif address.startswith("unix:///"):
        return address, [(socket.AF_UNIX, address.removeprefix("unix://"))]
    else:
        host, port = _host_and_port(address)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    places = [(family, where) for family, _, _, _, where in found]
    return name_of((host, port)), places  # type: ignore[return-value]


def _host_and_port(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:  # a port that is no number
        host, port = None, None
    if host is None or port is None or parts.scheme != "tcp" or parts.path:
        text = f"{address!r} is no address: tcp://host:port, unix:///path or (host, port)"
        raise UsageError("usage", text)
    return host, port


def name_of(where: object) -> str:
    """Return what `getsockname` or `accept` returned as an address."""
    if isinstance(where, tuple):
        host, port = where[:2]
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    text = where.decode("utf-8", "backslashreplace") if isinstance(where, bytes) else str(where)
    return f"unix://{text}" if text.startswith("/") else f"unix:{text}"


def no_delay(sock: socket.socket) -> None:
    """Send small pieces at once."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
