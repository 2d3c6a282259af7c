"""The place where clients arrive: its address stays ours, whatever happens there."""

from __future__ import annotations

import os
import socket
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from rallypoint.errors import UsageError

Address: TypeAlias = str | tuple[str, int]
Place: TypeAlias = tuple[int, tuple[str, int] | str]
"""An address family and what `connect` takes."""

State: TypeAlias = Literal["accepting", "silent", "full", "refusing"]

BACKLOG = 4096
"""Connections that may wait to be accepted: hundreds of clients that start at once must not wait for a second try of theirs."""


class Listener:
    """A listening socket that can be deaf in three ways.

    `accepting`; `silent`: the kernel accepts, and nobody comes to the door; `full`: the kernel's queue is full, so it drops what
    arrives; `refusing`: nobody listens.
    """

    def __init__(self, address: Address) -> None:
        _, places = resolved(address)
        self._family, self._where = places[0]
        self._path = ""  # of a Unix socket that is there because of us
        self._held: socket.socket | None = None
        self._socket: socket.socket | None = None
        self._fillers: dict[str, socket.socket] = {}
        self.state: State = "accepting"
        try:
            if self._family != socket.AF_UNIX:
                # A second socket has the port also while nobody listens on it; SO_REUSEADDR lets the two share it.
                self._held = self._bound(self._where)
                self._where = self._held.getsockname()
            self._listen()
        except OSError:
            self.close()
            raise
        self.address = name_of(self._where)

    def fileno(self) -> int:
        """Of the listening socket. Not while `refusing`."""
        assert self._socket is not None
        return self._socket.fileno()

    def accept(self) -> tuple[socket.socket, str] | None:
        """The next client and its name, or None when there is none now."""
        assert self._socket is not None
        while True:
            try:
                sock, where = self._socket.accept()
            except BlockingIOError:
                return None
            except ConnectionAbortedError:
                continue  # it has gone again
            name = name_of(where)
            if name in self._fillers:
                sock.close()
                self._fillers.pop(name).close()
                continue
            sock.setblocking(False)
            return sock, name

    def become(self, state: State) -> None:
        """Accept first whoever has arrived already."""
        if state == "refusing":
            self._stop()
        else:
            if self._socket is None:
                self._listen()
            if state == "full":
                self._fill()
            elif self._socket is not None:
                self._socket.listen(BACKLOG)
        self.state = state

    def close(self) -> None:
        """Give the address up. May be called twice."""
        self._stop()
        if self._held is not None:
            self._held.close()
        if self._path:
            try:
                os.unlink(self._path)
            except FileNotFoundError:
                pass  # somebody tidied up before us
            self._path = ""

    def forget(self) -> None:
        """In a forked child: close our copies of the descriptors, no more."""
        for sock in (self._socket, self._held, *self._fillers.values()):
            if sock is not None:
                sock.close()

    def _bound(self, where: tuple[str, int] | str) -> socket.socket:
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            if self._family != socket.AF_UNIX:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
        except OSError:
            sock.close()
            raise
        return sock

    def _listen(self) -> None:
        if self._family == socket.AF_UNIX and self._path:
            # The path is ours and there: replaced in one step, so that nobody ever finds none.
            beside = f"{self._path}~"
            sock = self._bound(beside)
            sock.listen(BACKLOG)
            os.rename(beside, self._path)
        else:
            sock = self._bound(self._where)
            self._path = self._where if isinstance(self._where, str) else ""
            sock.listen(BACKLOG)
        self._socket = sock

    def _stop(self) -> None:
        if self._socket is not None:
            # A process that was forked in this moment may hold a copy: closing ours alone would leave it listening.
            self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._socket = None
        for filler in self._fillers.values():
            filler.close()
        self._fillers.clear()

    def _fill(self) -> None:
        """Linux drops a connection request when more wait to be accepted than the backlog says: with 0, when one does."""
        assert self._socket is not None
        self._socket.listen(0)
        filler = socket.socket(self._family, socket.SOCK_STREAM)
        filler.setblocking(False)
        if self._family == socket.AF_UNIX:
            filler.bind("")  # the kernel chooses a name, by which we know it again
        filler.connect_ex(self._where)
        self._fillers[name_of(filler.getsockname())] = filler


def resolved(address: Address) -> tuple[str, list[Place]]:
    """An address in its one form, and the places that it means, at least one. `UsageError` when it has another form, `OSError`
    when its name is not known."""
    if isinstance(address, tuple):
        host, port = address
    elif address.startswith("unix:///"):
        return address, [(socket.AF_UNIX, address.removeprefix("unix://"))]
    else:
        host, port = _host_and_port(address)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return name_of((host, port)), [(family, where) for family, _, _, _, where in found]  # type: ignore[misc]


def _host_and_port(address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError:  # a port that is no number
        host, port = None, None
    if host is None or port is None or parts.scheme != "tcp" or parts.path:
        raise UsageError("usage", f"{address!r} is no address: tcp://host:port, unix:///path or (host, port)")
    return host, port


def name_of(where: object) -> str:
    """What `getsockname` or `accept` returned, as an address."""
    if isinstance(where, tuple):
        host, port = where[:2]
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
    text = where.decode("utf-8", "backslashreplace") if isinstance(where, bytes) else str(where)
    return f"unix://{text}" if text.startswith("/") else f"unix:{text}"
