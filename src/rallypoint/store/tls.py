"""TLS at the edges of the store: the server's loop and the client's calls use a plain socket, and a
thread beside them encrypts what they send there.

    loop or session ── TlsSocket ═ socketpair ═ TlsThread ── TLS 1.3 ── TlsThread ═ ... ── loop

No certificate authority is asked, and no fingerprint has to travel: the server's certificate is made
in memory for one job, each side has the digest of the certificate that it saw (`TlsSocket.binding`),
and the proofs of the handshake (`wire/handshake.py`) cover it. An attacker in between needs a
certificate of its own, for which it cannot make a proof.

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
import ssl
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from rallypoint.clock import Clock
from rallypoint.store.certificate import TlsIdentity, client_context
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

UNKNOWN = b"no certificate yet"
"""Binding of a client's connection before its handshake: no server's proof covers it."""

log = logger()


class TlsThread:
    """Thread that encrypts and decrypts all TLS connections of a server, or of a process's clients.

    With listeners it accepts connections, and has their plain ends adopted before their handshake:
    how many strangers there may be, and for how long, is decided where all others are counted.
    """

    def __init__(
        self,
        name: str,
        *,
        identity: TlsIdentity | None = None,
        listeners: Sequence[socket.socket] = (),
        adopt: Callable[[TlsSocket], None] | None = None,
    ) -> None:
        """`identity`, `listeners`, `adopt`: of a server; the listeners are the thread's from now on."""
        self._identity = identity
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._adopt = adopt
        self._now = Clock().monotonic
        self._connections: dict[int, TlsConnection] = {}  # by both descriptors of each
        self._leaving: set[TlsConnection] = set()
        self._added: deque[TlsConnection] = deque()
        self._ends_at = inf  # stop was asked for
        self._accepts_at = inf  # again, after a pause
        self._scratch = memoryview(bytearray(TURN_BYTES + 2 * RECORD_BYTES))
        self.has_ended = False
        # Given up when there is no descriptor for a newcomer, which is told so.
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) if listeners else -1
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        for fd in self._listeners:
            self._epoll.register(fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        _threads.add(self)

    def start(self) -> None:
        """Start it. Raises RuntimeError when there is no thread to be had."""
        self._thread.start()

    @property
    def has_started(self) -> bool:
        """Whether it runs, or has run."""
        return self._thread.ident is not None

    def add(self, tcp: socket.socket, context: ssl.SSLContext, binding: bytes) -> TlsSocket:
        """Return the plain end of a connection, which belongs to this thread from now on."""
        near, far = socket.socketpair()
        for end in (near, far):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        try:
            with far:
                user = TlsSocket(far, tcp, binding)
        except OSError:  # the other side has gone already
            near.close()
            raise
        near.setblocking(False)
        user.setblocking(False)
        tcp.setblocking(False)
        self._added.append(TlsConnection(tcp, near, user, context))
        self._look()
        return user

    def stop(self) -> None:
        """Let what is on its way leave, for LINGER seconds at most, and end. Every plain end has been
        closed before. The thread need not have been started."""
        self._ends_at = self._now() + LINGER
        self._look()
        if self.has_started:
            self._thread.join()
        else:
            self._close()

    def forget(self) -> None:
        """Close, in a forked child, what the parent's thread has: a connection must end with it."""
        if not self.has_ended:
            self._close()

    def _look(self) -> None:
        with contextlib.suppress(OSError):  # awake already, or ended
            os.eventfd_write(self._wake, 1)

    # --- the thread

    def _run(self) -> None:
        # A signal that the kernel gave to this thread would not wake the main thread, which has to
        # handle it.
        signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)
        try:
            while self._now() < self._ends_at and not self._is_done():
                self._turn()
        finally:
            self._close()

    def _turn(self) -> None:
        """Wait for events, and handle them."""
        due = min(self._ends_at, self._accepts_at, *(one.until for one in self._leaving))
        events = self._epoll.poll(None if due == inf else max(0.0, due - self._now()))
        others = [fd for fd, event in events if not self._attend(fd, event)]
        # Last: a new connection may get the number of one that has just been closed.
        for fd in others:
            if fd in self._listeners and self._ends_at == self._accepts_at == inf:
                self._accept(self._listeners[fd])
        self._begin_added()
        if self._ends_at < inf:
            for one in set(self._connections.values()):
                self._watch(one)
        now = self._now()
        for one in [one for one in self._leaving if one.until <= now]:
            self._end(one)
        if now >= self._accepts_at:
            self._accepts_at = inf
            for fd in self._listeners:
                self._epoll.register(fd, select.EPOLLIN)

    def _is_done(self) -> bool:
        """Tell whether nothing is left to do: a server's thread waits for the end of the server."""
        if self._connections or self._added:
            return False
        if self._adopt is not None:
            return self._ends_at < inf
        with _sharing:
            self.has_ended = not self._added
            return self.has_ended

    def _begin_added(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._added:
            one = self._added.popleft()
            self._connections.update(dict.fromkeys(one.fds, one))
            self._guarded(one, one.shake_hands)

    def _attend(self, fd: int, events: int) -> bool:
        """Handle what happened at a descriptor; False if it is no connection's."""
        one = self._connections.get(fd)
        if one is None:
            return False
        self._guarded(one, partial(self._handle, one, fd == one.fds[0], events))
        return True

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
        assert self._identity is not None
        assert self._adopt is not None
        for _ in range(ACCEPTS):
            tcp = None
            try:
                tcp, _ = listener.accept()
                user = self.add(tcp, *self._identity)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._no_room(listener, tcp, error)
                    return
                if tcp is not None:
                    tcp.close()
                continue  # it has gone already
            self._adopt(user)

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

    def _close(self) -> None:
        self.has_ended = True
        while self._added:
            one = self._added.popleft()
            self._connections[one.fds[0]] = one
        for one in set(self._connections.values()):
            one.tcp.close()
            one.inner.close()
        self._connections.clear()
        for listener in self._listeners.values():
            listener.close()
        self._epoll.close()
        wake, self._wake = self._wake, -1
        for fd in (wake, self._reserve):
            if fd >= 0:
                os.close(fd)


def secured(tcp: socket.socket) -> TlsSocket:
    """Return a client's end of TLS on a connected socket, which is the thread's from now on."""
    global _shared
    with _sharing:
        if _shared is not None and not _shared.has_ended:
            return _shared.add(tcp, _context, UNKNOWN)
        thread = TlsThread("rallypoint: TLS")
        try:
            user = thread.add(tcp, _context, UNKNOWN)
            thread.start()
        except BaseException as error:  # its connection has gone, no thread is to be had, Ctrl-C
            if not thread.has_started:  # else it ends with its connection
                thread.forget()
            if isinstance(error, RuntimeError):
                raise OSError(errno.ENOMEM, str(error)) from error
            raise
        _shared = thread
        return user


_sharing = threading.RLock()
_context = client_context()  # before a fork: to make it costs a client as much as its handshake
_shared: TlsThread | None = None  # of this process's clients
_threads: weakref.WeakSet[TlsThread] = weakref.WeakSet()


def _after_fork() -> None:
    global _sharing, _shared
    _sharing, _shared = threading.RLock(), None
    for thread in list(_threads):
        thread.forget()
    _threads.clear()


os.register_at_fork(after_in_child=_after_fork)
