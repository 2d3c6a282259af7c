"""Differences between a connection with TLS and one without it, where either may be used.

Loads no OpenSSL: `store/tls.py` and `store/client/encrypted_socket.py` do, and are loaded only where
TLS is used.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

TLS_BEGINS, ALERT_BEGINS = b"\x16\x03", b"\x15\x03"
"""First bytes of every TLS client and server, and of one that refuses the other's."""


class TlsSocket(socket.socket):
    """Socket before a server's TLS connection. It has the names of the TCP connection, and takes and
    gives what travels there encrypted."""

    def __init__(self, end: socket.socket, tcp: socket.socket, binding: bytes) -> None:
        names = tcp.getsockname(), tcp.getpeername()  # OSError: it has gone, and `end` stays
        super().__init__(fileno=end.detach())
        self.binding = binding  # SHA-256 of the server's certificate
        self.refusal = ""  # why the thread has turned the other side away before it ends
        self._family = tcp.family
        self._names = names

    @property
    def family(self) -> socket.AddressFamily:
        """Family of the TCP connection: nothing but bytes gets through."""
        return self._family

    def getsockname(self) -> object:
        """Return the TCP connection's address on this side."""
        return self._names[0]

    def getpeername(self) -> object:
        """Return the TCP connection's address on the other side."""
        return self._names[1]


def is_plain(first: bytes) -> bool:
    """Tell whether no connection with TLS begins with what has arrived of it."""
    return len(first) > 1 and not first.startswith((TLS_BEGINS, ALERT_BEGINS))


def binding_of(sock: socket.socket) -> bytes:
    """Return what the proofs on this connection must cover besides what was said: b"" without TLS."""
    binding: bytes = getattr(sock, "binding", b"")
    return binding


def refusal_of(sock: socket.socket) -> str:
    """Return why a connection that has ended was turned away for want of TLS, "" if it was not."""
    return sock.refusal if isinstance(sock, TlsSocket) else ""


def poll_of(sock: socket.socket) -> Callable[[float], object]:
    """Return what waits for so many milliseconds, and tells whether there may be something to read."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    if not hasattr(sock, "holds"):
        return poll.poll
    return lambda milliseconds: sock.holds or poll.poll(milliseconds)
