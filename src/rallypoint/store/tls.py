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
import errno
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from rallypoint.clock import Clock
from rallypoint.store.certificate import TlsIdentity
from rallypoint.store.logger import logger
from rallypoint.store.tls_connection import RECORD_BYTES, TURN_BYTES, TlsConnection
from rallypoint.store.tls_socket import TlsSocket
from rallypoint.wire.frames import framed
from rallypoint.wire.messages import Refusal, encode

BUFFER_BYTES = 1024 * 1024
"""Bytes that a plain end may hold. The kernel gives less, as a rule twice its usual 208 KiB, which is
enough for both sides of it to work at the same time: a quarter more of large values."""

LINGER = 1.0
"""Seconds in which the last bytes of a connection must have left, once its user has closed it."""

FULL_PAUSE = 0.2
"""Seconds for which no connection is accepted after one was refused for want of a descriptor."""

ACCEPTS = 64
"""New connections taken in one turn, so that a storm of them does not stop the others."""

ALL_SIGNALS = signal.valid_signals()

log = logger()


class TlsThread:
    """Thread that encrypts and decrypts all TLS connections of a server.

    It accepts connections, and has their plain ends adopted before their handshake: how many
    strangers there may be, and for how long, is decided where all others are counted.
    """

    def __init__(
        self,
        name: str,
        *,
        identity: TlsIdentity,
        listeners: Sequence[socket.socket],
        adopt: Callable[[TlsSocket], None],
    ) -> None:
        """Take the listeners over. `adopt`: called with the plain end of each connection."""
        self._identity = identity
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._adopt = adopt
        self._now = Clock().monotonic
        self._connections: dict[int, TlsConnection] = {}  # by both descriptors of each
        self._leaving: set[TlsConnection] = set()
        self._ends_at = inf  # stop was asked for
        self._accepts_at = inf  # again, after a pause
        self._scratch = memoryview(bytearray(TURN_BYTES + 2 * RECORD_BYTES))
        # Given up when there is no descriptor for a newcomer, which is told so.
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        for fd in self._listeners:
            self._epoll.register(fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

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

    # --- the thread

    def _run(self) -> None:
        # A signal that the kernel gave to this thread would not wake the main thread, which has to
        # handle it.
        signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)
        try:
            while self._now() < self._ends_at and (self._connections or self._ends_at == inf):
                self._turn()
        finally:
            self.close()

    def _turn(self) -> None:
        """Wait for events, and handle them."""
        due = min(self._ends_at, self._accepts_at, *(one.until for one in self._leaving))
        events = self._epoll.poll(None if due == inf else max(0.0, due - self._now()))
        for fd, event in events:
            if one := self._connections.get(fd):
                self._guarded(one, partial(self._handle, one, fd == one.fds[0], event))
        # Last: a new connection may get the number of one that has just been closed.
        for fd, _ in events:
            if fd in self._listeners and self._ends_at == self._accepts_at == inf:
                self._accept(self._listeners[fd])
        if self._ends_at < inf:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            for one in set(self._connections.values()):
                self._watch(one)
        now = self._now()
        for one in [one for one in self._leaving if one.until <= now]:
            self._end(one)
        if now >= self._accepts_at:
            self._accepts_at = inf
            for fd in self._listeners:
                self._epoll.register(fd, select.EPOLLIN)

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

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS):
            tcp = None
            try:
                tcp, _ = listener.accept()
                self._begin(tcp)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._no_room(listener, tcp, error)
                    return
                if tcp is not None:
                    tcp.close()
                continue  # it has gone already

    def _begin(self, tcp: socket.socket) -> None:
        """Have the plain end of a new connection adopted. Raises OSError when it has gone already."""
        context, binding = self._identity
        near, far = socket.socketpair()
        for end in (near, far):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        try:
            with far:
                user = TlsSocket(far, tcp, binding)
        except OSError:
            near.close()
            raise
        near.setblocking(False)
        user.setblocking(False)
        tcp.setblocking(False)
        one = TlsConnection(tcp, near, user, context)
        self._connections.update(dict.fromkeys(one.fds, one))
        self._guarded(one, partial(self._adopt, user))

    def _no_room(self, listener: socket.socket, tcp: socket.socket | None, error: OSError) -> None:
        """Turn a new connection away with a reason, as there are no descriptors for it."""
        log.warning("the store can take no new connection: %s", error.strerror)
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1
        with contextlib.suppress(OSError), tcp or listener.accept()[0] as refused:
            refused.setblocking(False)
            text = f"its server cannot take another connection now: {error.strerror}"
            answer = framed(encode(Refusal("store-full", text, passing=True)))
            refused.send(answer, socket.MSG_NOSIGNAL)
            refused.recv(RECORD_BYTES)  # left unread it could cost the client the answer
        with contextlib.suppress(OSError):  # another thread was faster
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._accepts_at = self._now() + FULL_PAUSE
        for fd in self._listeners:
            self._epoll.unregister(fd)

    def close(self) -> None:
        """Close everything: at the end, and in a forked child, since a connection must end with the
        thread. May be called again."""
        for one in set(self._connections.values()):
            one.tcp.close()
            one.inner.close()
        self._connections.clear()
        for listener in self._listeners.values():
            listener.close()
        self._epoll.close()
        for fd in (self._wake, self._reserve):
            if fd >= 0:
                os.close(fd)
        self._wake = self._reserve = -1
