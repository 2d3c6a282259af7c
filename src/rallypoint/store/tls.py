"""TLS at the edges of the store: the server's loop uses a plain socket, and a thread beside it
encrypts what is sent there. A client's calls use a socket that encrypts by itself.

    session ── EncryptedSocket ── TLS 1.3 ── TlsThread ═ socketpair ═ TlsSocket ── loop

No certificate authority is asked, and no fingerprint has to travel: the server's certificate is made
in memory for one job, each side has the digest of the certificate that it saw (`binding`), and the
proofs of the handshake (`wire/handshake.py`) cover it. An attacker in between needs a certificate of
its own, for which it cannot make a proof.

The end of a connection is passed on in both directions, and a side that does not read stops the
other: the thread holds at most what it has read in one turn.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf

from rallypoint.clock import Clock
from rallypoint.host.fd_passing import close_fds
from rallypoint.host.threads import OwnThread
from rallypoint.store.certificate import TlsIdentity
from rallypoint.store.logger import logger
from rallypoint.store.tls_connection import RECORD_BYTES, TURN_BYTES, TlsConnection
from rallypoint.store.tls_socket import TlsSocket

BUFFER_BYTES = 1024 * 1024
"""Bytes that a plain end may hold. The kernel gives less, as a rule twice its usual 208 KiB, which is
enough for both sides of it to work at the same time: a quarter more of large values."""

LINGER = 1.0
"""Seconds in which the last bytes of a connection must have left, once its user has closed it."""

log = logger()


class TlsThread:
    """Thread that encrypts and decrypts all TLS connections of a server.

    The server's loop accepts them, and admits their plain ends before their handshake: how many
    strangers there may be, and for how long, is decided where all others are counted.
    """

    def __init__(self, name: str, identity: TlsIdentity) -> None:
        self._identity = identity
        self._new: deque[TlsConnection] = deque()
        self._now = Clock().monotonic
        self._connections: dict[int, TlsConnection] = {}  # by both descriptors of each
        self._leaving: set[TlsConnection] = set()
        self._ends_at = inf  # stop was asked for
        self._scratch = memoryview(bytearray(TURN_BYTES + 2 * RECORD_BYTES))
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._thread = OwnThread(self._run, name)

    def start(self) -> None:
        """Start it. Raises RuntimeError when there is no thread to be had."""
        self._thread.start()

    def stop(self) -> None:
        """Let what is on its way leave, for LINGER seconds at most, and end. Every plain end has been
        closed before. The thread need not have been started."""
        self._ends_at = self._now() + LINGER
        with contextlib.suppress(OSError):  # it has ended
            os.eventfd_write(self._wake, 1)
        if self._thread.ident is not None:
            self._thread.join()
        self.close()

    def begin(self, tcp: socket.socket) -> TlsSocket:
        """Take a connection over, and return the plain end before it. May be called by any thread.
        Raises OSError when it has gone already, or there is no descriptor."""
        context, binding = self._identity
        near, far = socket.socketpair()
        try:
            for end in (near, far):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
            user = TlsSocket(far, tcp, binding)
        except OSError:
            near.close()
            far.close()
            raise
        near.setblocking(False)
        tcp.setblocking(False)
        self._new.append(TlsConnection(tcp, near, user, context))
        os.eventfd_write(self._wake, 1)
        return user

    # --- the thread

    def _run(self) -> None:
        try:
            while self._now() < self._ends_at and (self._connections or self._ends_at == inf):
                self._turn()
        finally:
            self.close()

    def _turn(self) -> None:
        """Wait for events, and handle them."""
        due = min((one.until for one in self._leaving), default=inf)
        due = min(due, self._ends_at)
        events = self._epoll.poll(None if due == inf else max(0.0, due - self._now()))
        for fd, event in events:
            if one := self._connections.get(fd):
                self._guarded(one, partial(self._handle, one, fd == one.fds[0], event))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        # Last: a new connection may have the number of one that has just been closed.
        while self._new:
            one = self._new.popleft()
            self._connections.update(dict.fromkeys(one.fds, one))
            self._guarded(one, one.flush)
        if self._ends_at < inf:
            for one in set(self._connections.values()):
                self._watch(one)
        now = self._now()
        for one in [one for one in self._leaving if one.until <= now]:
            self._end(one)

    def _handle(self, one: TlsConnection, is_tcp: bool, events: int) -> None:
        ended = events & (select.EPOLLHUP | select.EPOLLERR)
        if is_tcp:
            if events & select.EPOLLOUT or (ended and one.to_tcp):
                one.flush()
            if events & select.EPOLLIN or (ended and not one.to_tcp):
                one.read_tcp(self._scratch)
            return
        if events & select.EPOLLRDHUP or ended:
            one.leave(self._now() + LINGER)
            self._leaving.add(one)
        if events & select.EPOLLOUT:
            one.flush_inner()
        if events & select.EPOLLIN and one.open and not one.said_all:
            one.read_inner(self._scratch)

    def _guarded(self, one: TlsConnection, action: Callable[[], object]) -> None:
        """Do something for a connection. If it fails, it costs this connection, and no other."""
        try:
            action()
            self._watch(one)
        except OSError:  # of TLS, too: the other side does not keep to it
            self._end(one)
        except Exception:
            log.exception("TLS failed on a connection; please report this")
            self._end(one)

    def _watch(self, one: TlsConnection) -> None:
        has_said = one.said_all and not one.to_tcp
        if one.is_over or (one.left and not one.open) or (has_said and self._ends_at < inf):
            self._end(one)
            return
        for fd, mask in one.wanted():
            known = one.masks.get(fd, 0)
            if mask == known:
                continue
            if not known:
                self._epoll.register(fd, mask)
            elif mask:
                self._epoll.modify(fd, mask)
            else:
                self._epoll.unregister(fd)
            one.masks[fd] = mask

    def _end(self, one: TlsConnection) -> None:
        for fd, mask in one.masks.items():
            if mask:
                with contextlib.suppress(OSError):  # an exception has closed it elsewhere
                    self._epoll.unregister(fd)
        for fd, sock in zip(one.fds, (one.tcp, one.inner), strict=True):
            self._connections.pop(fd, None)
            sock.close()
        self._leaving.discard(one)

    def close(self) -> None:
        """Close everything: at the end, and in a forked child, since a connection must end with the
        thread. May be called again."""
        for one in {*self._connections.values(), *self._new}:
            one.tcp.close()
            one.inner.close()
        self._connections.clear()
        self._epoll.close()
        wake, self._wake = self._wake, -1
        close_fds(wake)
