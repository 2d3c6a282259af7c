"""The chaos proxy's listening socket, and the addresses that it understands."""

from __future__ import annotations

import ctypes
import socket
import struct
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from rallypoint.errors import UsageError

ProxyAddress: TypeAlias = str | tuple[str, int]
Place: TypeAlias = tuple[int, tuple[str, int] | str]
"""An address family and what `connect` takes."""

BACKLOG = 4096
"""Connections that may wait to be accepted: hundreds of clients that start at once get in."""

ATTACH_FILTER, DETACH_FILTER = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER
NO_PACKET = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
"""A filter program for a socket: one instruction, "return 0", which lets no packet in."""


class ProxyListener:
    """A listening socket that can refuse connections, or let no packet in, and keeps its port."""

    def __init__(self, address: ProxyAddress) -> None:
        family, where = resolve(address)[1][0]
        if isinstance(where, tuple) and not where[1]:
            # A port of the kernel's choice is given up when nothing listens, one by number is not.
            with socket.socket(family) as chosen:
                chosen.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                chosen.bind(where)
                where = chosen.getsockname()
                self.socket = socket.create_server(where, family=family, backlog=BACKLOG)
        else:
            self.socket = socket.create_server(where, family=family, backlog=BACKLOG)
        self.socket.setblocking(False)
        no_delay(self.socket)  # the sockets that it accepts inherit this
        self.address = name_of(self.socket.getsockname())
        self.is_unix = family == socket.AF_UNIX
        self.refuses = self._drops = False

    def accept(self) -> tuple[socket.socket, str] | None:
        """Return the next client and its name, or None when there is none now."""
        while not self.refuses:
            try:
                sock, where = self.socket.accept()
            except BlockingIOError:
                break
            except ConnectionAbortedError:
                continue  # it has gone again
            sock.setblocking(False)
            return sock, name_of(where)
        return None

    def become(self, *, refuses: bool, drops: bool) -> None:
        """Begin or end to refuse connections, and to drop all packets that arrive."""
        if refuses and not self.refuses:
            self.socket.shutdown(socket.SHUT_RDWR)
        elif self.refuses and not refuses:
            self.socket.listen(BACKLOG)
        if drops != self._drops:
            program = struct.pack("HP", 1, ctypes.addressof(NO_PACKET))
            option = ATTACH_FILTER if drops else DETACH_FILTER
            self.socket.setsockopt(socket.SOL_SOCKET, option, program)
        self.refuses, self._drops = refuses, drops

    def close(self) -> None:
        """Give the address up."""
        if self.is_unix:
            Path(self.socket.getsockname()).unlink(missing_ok=True)
        # A process forked in this moment has a copy, which would go on listening.
        self.become(refuses=True, drops=False)
        self.socket.close()


def resolve(address: ProxyAddress) -> tuple[str, list[Place]]:
    """Return an address in its one form, and the places that it means, at least one.

    `UsageError` when it has another form, `OSError` when its name is not known.
    """
    if isinstance(address, str):
        if address.startswith("unix:///"):
            return address, [(socket.AF_UNIX, address.removeprefix("unix://"))]
        try:
            parts = urlsplit(address)
            host, port = parts.hostname, parts.port
        except ValueError:  # a port that is no number
            host, port = None, None
        if host is None or port is None or parts.scheme != "tcp" or parts.path:
            text = f"{address!r} is no address: tcp://host:port, unix:///path or (host, port)"
            raise UsageError("usage", text)
        address = host, port
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    return name_of(address), [(family, where) for family, _, _, _, where in found]  # type: ignore[misc]


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
