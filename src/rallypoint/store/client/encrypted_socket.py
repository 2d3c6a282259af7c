"""A client's end of TLS: it is used like the non-blocking TCP socket that it was, and needs no
thread. Loaded only where TLS is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
from collections.abc import Iterable
from typing import Any

from rallypoint.store.certificate import client_context
from rallypoint.store.tls_socket import is_plain

READ_BYTES = 64 * 1024
"""Bytes taken from the network at once: four of the largest records of TLS."""

WRITE_BYTES = 128 * 1024
"""Bytes that are encrypted before they are sent."""

UNKNOWN = b"no certificate yet"
"""Binding of a connection before its handshake: no server's proof covers it."""

_context = client_context()  # before a fork: to make it costs a client as much as its handshake


class EncryptedSocket(socket.socket):
    """Socket of a connection to a server with TLS. `poll_of` waits for what it has to read."""

    def __init__(self, tcp: socket.socket) -> None:
        """Take over a connected socket. What is sent first begins the handshake, and goes after it."""
        self.binding = UNKNOWN  # SHA-256 of the server's certificate
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = _context.wrap_bio(self._incoming, self._outgoing)
        self._early = b""  # to be sent after the handshake
        self._first = b""  # that came from the server before that
        self._sealed = memoryview(b"")  # encrypted, and to be sent
        self._taken = 0  # bytes that were encrypted into it
        super().__init__(tcp.family, tcp.type, tcp.proto, fileno=tcp.detach())
        self.setblocking(False)

    @property
    def holds(self) -> bool:
        """True if there may be something to read that the network has delivered before."""
        return bool(self._incoming.pending or self._tls.pending())

    # --- out

    def send(self, data: Any, *_: object) -> int:
        """Do what `sendmsg` does."""
        return self.sendmsg([data])

    def sendmsg(self, buffers: Iterable[Any], *_: object) -> int:
        """Encrypt and send. After BlockingIOError the same bytes must be given again, since they are
        encrypted already."""
        if self.binding is UNKNOWN:
            self._early = b"".join(buffers)
            self._shake_hands()
            return len(self._early)
        for buffer in () if self._taken else buffers:
            self._taken += self._tls.write(memoryview(buffer)[: WRITE_BYTES - self._taken])
            if self._taken == WRITE_BYTES:
                break
        self._flush()
        taken, self._taken = self._taken, 0
        return taken

    def _flush(self) -> None:
        while data := self._sealed or memoryview(self._outgoing.read()):
            self._sealed = data
            self._sealed = data[super().send(data, socket.MSG_NOSIGNAL) :]

    # --- in

    def recv(self, size: int, *_: object) -> bytes:
        """Return bytes of one record of TLS at most."""
        return self._read(size)  # type: ignore[no-any-return]

    def recv_into(self, buffer: Any, *_: object) -> int:
        """Put there bytes of one record of TLS at most."""
        return self._read(len(buffer), buffer)  # type: ignore[no-any-return]

    def _read(self, size: int, buffer: memoryview | None = None) -> Any:
        """Return what `SSLObject.read` does."""
        while True:
            if self.binding is not UNKNOWN and self.holds:
                try:
                    return self._tls.read(size, buffer)
                except ssl.SSLWantReadError:  # the rest of a record has not arrived
                    pass
            if not (data := super().recv(READ_BYTES)):
                return b"" if buffer is None else 0
            self._incoming.write(data)
            if self.binding is UNKNOWN:
                self._first += data
                try:
                    self._shake_hands()
                except ssl.SSLError:  # as it is: a refusal, or what another service says
                    with contextlib.suppress(OSError):  # it has ended already
                        self.shutdown(socket.SHUT_RDWR)
                    said, self._first = self._first, b""
                    return said if is_plain(said) else b""

    def _shake_hands(self) -> None:
        """Go on with the handshake. Raises SSLError when it has failed."""
        try:
            if is_plain(self._first):
                raise ssl.SSLError  # OpenSSL would wait for more of what it takes for its own
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            pass
        else:
            certificate = self._tls.getpeercert(binary_form=True)
            self.binding = hashlib.sha256(certificate or b"").digest()
            self._tls.write(self._early)
        self._flush()
