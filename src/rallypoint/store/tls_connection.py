"""One TLS connection of a server: its handshake, and the bytes on their way through it. Belongs to
the thread of `store/tls.py`."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from math import inf

from rallypoint.store.tls_socket import TlsSocket, is_plain
from rallypoint.wire.frames import framed
from rallypoint.wire.messages import Refusal, encode

TURN_BYTES = 128 * 1024
"""Bytes that one connection moves before the others have their turn: some 50 us of encryption. Of
64 KiB each costs a fifth more, and of 256 KiB the caches do not hold what both ends work at."""

RECORD_BYTES = 16 * 1024
"""The largest record of TLS, which is decrypted as a whole."""

NO_LENGTHS = bytes(10)
"""Rest of the header of a client's first frame, after the two bytes that its length needs."""

NO_PLAIN = framed(encode(Refusal("tls-mismatch", "it speaks TLS, and this client does not")))
"""Answer to a client without TLS."""


class TlsConnection:
    """One TLS connection and the socketpair before it. Only the thread touches it."""

    __slots__ = (
        "ended", "fds", "first", "incoming", "inner", "left", "masks", "open", "outgoing", "said_all", "shut", "tcp", "tls",
        "to_inner", "to_tcp", "until", "user",
    )  # fmt: skip

    def __init__(
        self, tcp: socket.socket, inner: socket.socket, user: TlsSocket, context: ssl.SSLContext
    ) -> None:
        self.tcp = tcp
        self.inner = inner
        self.fds = tcp.fileno(), inner.fileno()
        self.user = user
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=True)
        self.to_tcp = self.to_inner = memoryview(b"")
        self.open = False  # the handshake is over
        self.first = b""  # that came from the other side
        self.ended = False  # nothing more comes from the other side
        self.left = False  # its user has closed its end
        self.said_all = False  # nothing more goes to the other side than `to_tcp`
        self.shut = False  # the other side has been told so
        self.until = inf  # when it is given up, once its user has left
        self.masks: dict[int, int] = {}  # what epoll watches

    def wanted(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the events to watch for at both sockets; 0: not even for its end."""
        at_tcp = select.EPOLLOUT if self.to_tcp else 0
        if not self.ended and not self.to_inner:
            at_tcp |= select.EPOLLIN
        at_inner = select.EPOLLOUT if self.to_inner else 0
        if not self.left:
            at_inner |= select.EPOLLRDHUP
        if self.open and not self.said_all and not self.to_tcp:
            at_inner |= select.EPOLLIN
        return (self.fds[0], at_tcp), (self.fds[1], at_inner)

    @property
    def is_over(self) -> bool:
        """Whether both sides have had everything that they can get."""
        return self.ended and (self.left or not self.to_inner)

    def leave(self, until: float) -> None:
        """Note that its user has closed its end: what comes is thrown away."""
        if not self.left:
            self.left, self.until, self.to_inner = True, until, memoryview(b"")

    # --- from the network

    def read_tcp(self, scratch: memoryview) -> None:
        """Take what has arrived, and hand it on."""
        try:
            count = self.tcp.recv_into(scratch[:TURN_BYTES])
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self.ended = True
            self.incoming.write_eof()
        else:
            if not self.open and len(self.first) < RECORD_BYTES:
                self.first += scratch[:count]
            self.incoming.write(scratch[:count])
        if self.open or self._shake_hands():
            self._decrypt(scratch)

    def _shake_hands(self) -> bool:
        """Go on with the handshake, and tell whether it is over."""
        try:
            if is_plain(self.first):
                raise ssl.SSLError  # OpenSSL would wait for more of what it takes for its own
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            self.flush()
            return False
        except ssl.SSLError:
            self._give_up()
            return False
        self.open = True
        self.flush()
        return True

    def _give_up(self) -> None:
        """End a handshake that failed, and refuse a client without TLS in a way that it understands."""
        if is_plain(self.first):
            self.to_tcp = memoryview(NO_PLAIN)
            if self.first[2:12] == NO_LENGTHS:
                self.user.refusal = "it does not speak TLS, and this side does (--tls)"
        self.ended = self.said_all = True
        self.flush()

    def _decrypt(self, scratch: memoryview) -> None:
        while True:
            count, more = 0, True
            try:
                while more and len(scratch) - count >= RECORD_BYTES:
                    got: int = self.tls.read(len(scratch), scratch[count:])  # type: ignore[assignment]
                    count += got
                    self.ended = self.ended or not got
                    # another read would raise where nothing is left, which costs as much as this one
                    more = got > 0 and bool(self.incoming.pending or self.tls.pending())
            except ssl.SSLWantReadError:
                more = False
            except ssl.SSLError:  # its end, or bytes that are not the other side's
                self.ended, more = True, False
            if count and not self.left:
                if self.to_inner:
                    self.to_inner = memoryview(bytes(self.to_inner) + scratch[:count])
                else:
                    self._hand_on(scratch[:count])
            if not more:
                return

    def _hand_on(self, data: memoryview) -> None:
        try:
            sent = self.inner.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError:  # its user has left, which the next event tells
            return
        self.to_inner = memoryview(bytes(data[sent:]))

    def flush_inner(self) -> None:
        """Hand on what its user had no room for."""
        data, self.to_inner = self.to_inner, memoryview(b"")
        if data:
            self._hand_on(data)

    # --- to the network

    def read_inner(self, scratch: memoryview) -> None:
        """Take what its user has said, and send it."""
        try:
            count = self.inner.recv_into(scratch[:TURN_BYTES])
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if count:
            self.tls.write(scratch[:count])
        else:
            self.said_all = True
            with contextlib.suppress(
                ssl.SSLError
            ):  # it wants the other side's word, and has no need
                self.tls.unwrap()
        self.flush()

    def flush(self) -> None:
        """Send what the network takes."""
        while data := self.to_tcp or memoryview(self.outgoing.read()):
            try:
                sent = self.tcp.send(data, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self.to_tcp = data
                return
            except OSError:  # what the other side said before it ended is still read
                self.to_tcp, self.said_all = memoryview(b""), True
                self.outgoing.read()
                return
            self.to_tcp = data[sent:]
        if self.said_all and not self.shut:
            self.shut = True
            with contextlib.suppress(OSError):  # it has ended meanwhile
                self.tcp.shutdown(socket.SHUT_WR)
