"""Plain end of a TLS connection, which looks like the TCP connection behind it.

Made by `store/tls.py`, which is loaded only where TLS is used.
"""

from __future__ import annotations

import socket

TLS_BEGINS, ALERT_BEGINS = b"\x16\x03", b"\x15\x03"
"""First bytes of every TLS client and server, and of one that refuses the other's."""


class TlsSocket(socket.socket):
    """Socket of a TLS connection's user. It has the names of the TCP connection, and takes and gives
    what travels there encrypted."""

    def __init__(self, end: socket.socket, tcp: socket.socket, binding: bytes) -> None:
        names = tcp.getsockname(), tcp.getpeername()  # OSError: it has gone, and `end` stays
        super().__init__(fileno=end.detach())
        self.binding = binding  # SHA-256 of the server's certificate, as it was seen here
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


def binding_of(sock: socket.socket) -> bytes:
    """Return what the proofs on this connection must cover besides what was said: b"" without TLS."""
    return sock.binding if isinstance(sock, TlsSocket) else b""


def refusal_of(sock: socket.socket) -> str:
    """Return why a connection that has ended was turned away for want of TLS, "" if it was not."""
    return sock.refusal if isinstance(sock, TlsSocket) else ""
