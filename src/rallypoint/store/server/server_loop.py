"""One thread, one epoll, all connections: takes requests to the state and its replies back, and
decides nothing itself.

Whatever takes longer than some microseconds happens elsewhere: large values move in `bulk.py`. A
connection that does not read is not read from. Whatever a client sends, the worst that it gets is
its own connection closed.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from rallypoint import __version__
from rallypoint.clock import Clock
from rallypoint.host import system_calls
from rallypoint.host.fd_passing import close_fds
from rallypoint.host.probe import set_for_small_messages
from rallypoint.host.unix_sockets import listener_of, uid_of, way_of
from rallypoint.store.logger import logger
from rallypoint.store.server.admission import GREETING, Gate, Greeting, TurnedAway
from rallypoint.store.server.bulk import Movers, Transfer
from rallypoint.store.server.connection import Gone, Peer
from rallypoint.store.server.large_values import LargeValues, open_files
from rallypoint.store.server.requests import Requests
from rallypoint.store.state.state import Session, State
from rallypoint.store.tls_socket import binding_of, refusal_of
from rallypoint.wire.frames import framed
from rallypoint.wire.messages import (
    HELLO_BYTES,
    MESSAGE_BYTES,
    Closing,
    Hello,
    Identity,
    Proof,
    Refusal,
    Reply,
    Welcome,
    encode,
)

ACCEPTS = 64
"""New connections taken in one turn: the rest waits in the kernel, so that a storm of them does not
stop everybody else."""

EVENTS = 1024
"""Events taken from epoll at once."""

LONGEST_NAP = 3600.0
"""Seconds that one call of epoll may wait: it refuses more than 24 days, and a key may live longer
than that."""

STOOD_STILL = 0.5
"""Seconds by which a look may be late before it counts as this process having stood still. Then the
clients may have, too (a paused container or machine): that time is no session's silence."""

SWEEP = 5.0
"""Seconds between two looks for connections whose session has ended: their clients learn it at
their next request in any case."""

DIED = "its process died"
"""Reason for the end of a session whose process has been seen to end."""

READ_OFF = 16
"""Reads of what a client has sent, when the server stops: closing a socket with unread bytes could
cost the client the last words."""

# A connection whose other end has gone silent is given up after some 20 s: twice the ttl of a
# session, which has then ended.
KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 3),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 20_000),
)

IN, OUT, HUNG_UP = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR

log = logger()


class Loop:
    """The loop. `wake`, `adopt` and `ask_to_stop` may be called from any thread, and from a signal
    handler; the rest belongs to the thread of `run`."""

    def __init__(
        self,
        state: State,
        listeners: Sequence[socket.socket],
        *,
        secret: bytes,
        job: str,
        local: str,
        clock: Clock,
        encrypt: Callable[[socket.socket], socket.socket] | None = None,
        on_end: Callable[[Identity, bool, float], None] | None = None,
        on_stranger: Callable[[str, str], None] | None = None,
    ) -> None:
        """Take the listeners over. `local`: the path that clients are told. `encrypt`: called with
        each TCP connection, returns the plain socket before its TLS. `on_end`: called with
        the owner of each session whose time is over, whether that was for want of signs of life
        alone, and the seconds since the last one, or since its connections ended. `on_stranger`:
        called with the address of each client of another job, version or secret, with TLS or
        without it unlike this side, and why it was not let in."""
        self._state = state
        self._secret = secret
        self._job = job
        self._local = local
        self._encrypt = encrypt
        self._on_end = on_end
        self._on_stranger = on_stranger
        self._now = clock.monotonic
        self._id = os.urandom(16)
        self._peers: dict[int, Peer] = {}
        self._by_session: dict[Session, dict[Peer, None]] = {}
        self._admitted = itertools.count(1)
        # The process of a session whose last connection has ended without a goodbye.
        self._pidfds: dict[Session, int] = {}
        self._gate = Gate()
        self._values = LargeValues(state)
        self._movers = Movers(self.wake)
        self._requests = Requests(state, self._values, self._movers, self._now)
        self._next_sweep = 0.0
        self._adopted: deque[socket.socket] = deque()
        self._asked: tuple[str, float] | None = None  # to stop: why, and the seconds for draining
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._reserve = -1  # a descriptor that is given up when there is none for a newcomer
        # Descriptors in epoll that are no connection, with what to do when they are readable.
        self._others: dict[int, Callable[[], None]] = {self._wake: self._awake}
        try:
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            self._epoll = select.epoll()
            self._epoll.register(self._wake, IN)
            for fd, listener in self._listeners.items():
                prepare(listener)
                self._epoll.register(fd, IN)
                self._others[fd] = partial(self._accept, listener)
        except BaseException:
            close_fds(self._wake, self._reserve)
            raise

    def __len__(self) -> int:
        """Return the number of sessions that are connected."""
        return len(self._by_session)

    # --- from other threads ---

    def wake(self) -> None:
        """Make the loop look around."""
        try:
            os.eventfd_write(self._wake, 1)
        except OSError:  # awake for a long time already, or closed
            pass

    def adopt(self, sock: socket.socket) -> None:
        """Serve a connected socket as if it had been accepted."""
        self._adopted.append(sock)
        self.wake()

    def ask_to_stop(self, reason: str, drain: float) -> None:
        """Let `run` tell the clients and return."""
        self._asked = self._asked or (reason, drain)
        self.wake()

    def forget(self) -> None:
        """Close, in a forked child, everything that the parent serves, so that its end is an end
        for its clients too."""
        if self._wake < 0:  # it was closed already, and the numbers may be others' by now
            return
        self._epoll.close()
        sockets = [peer.sock for peer in self._peers.values()]
        for sock in [*self._listeners.values(), *sockets, *self._adopted]:
            sock.close()
        close_fds(self._wake, self._reserve, *self._pidfds.values())
        for peer in self._peers.values():
            peer.drop_unclaimed()
        self._values.close()

    # --- the loop ---

    def run(self) -> None:
        """Serve until asked to stop. Then everything is closed, and this object of no more use."""
        try:
            while self._asked is None:
                self._turn(min(self._state.due(), self._gate.due))
            self._wind_up(*self._asked)
        finally:
            self._close()

    def _turn(self, until: float) -> None:
        """Wait for events until then, and handle them."""
        began = self._now()
        wait = max(0.0, min(until - began, LONGEST_NAP)) + 0.001
        others = []
        found = self._epoll.poll(wait, EVENTS)
        took = self._now() - began
        if took > wait + STOOD_STILL:
            for session in self._by_session:
                session.heard += took
        for fd, events in found:
            peer = self._peers.get(fd)
            if peer is not None:
                self._attend(peer, events)
            else:
                others.append(fd)
        # Last, because a new connection may get the number of one that has just been closed.
        for fd in others:
            action = self._others.get(fd)
            if action is not None:
                action()
        if self._now() >= until:
            self._catch_up()
            self._expire(self._now())
        # Again when a reply finds that its process has died, which tells others.
        while self._state.woken:
            self._deliver()
        if self._values.pool.dropped:
            self._values.pool.tidy()

    def _catch_up(self) -> None:
        """Read what one look has not shown, before any session is declared dead. (The kernel ends
        an `epoll_wait` of a process that was stopped with no events: signal(7).)"""
        for _ in range(len(self._peers) // EVENTS + 2):
            served = 0
            for fd, events in self._epoll.poll(0, EVENTS):
                peer = self._peers.get(fd)
                if peer is not None:
                    self._attend(peer, events)
                    served += 1
            if not served:
                return

    def _expire(self, now: float) -> None:
        for transfer in self._movers.moving:
            # Threads hold on to a transfer only while it moves: that is a sign of life, though no
            # request may get through beside it.
            session = transfer.peer.session
            if session is not None:
                session.heard = max(session.heard, now)
        try:
            for session in self._state.tick(now):
                if self._on_end is not None:
                    since = session.heard if session.silent else session.alone
                    self._on_end(session.identity, session.silent, self._now() - since)
        except Exception:  # the next tick goes on behind the one that failed
            log.exception("the store failed on what ran out; please report this")
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP
            for session in [session for session in self._by_session if session.ended]:
                for peer in list(self._by_session[session]):
                    self._drop(peer)
            for session in [session for session in self._pidfds if session.ended]:
                self._unwatch(session)
        for peer in self._gate.overdue(now):
            self._gate.complain(peer.source, f"no proof within {GREETING:g} s", now)
            self._drop(peer)

    def _awake(self) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass
        while (transfer := self._movers.take()) is not None:
            self._attend(transfer.peer, transfer)
        while self._adopted:
            self._admit(self._adopted.popleft())

    def _attend(self, peer: Peer, happened: int | Transfer | Reply) -> None:
        """Handle what happened at a connection: events of epoll's, a value that a thread has moved,
        a reply to a request that has waited. A failure costs this connection, and no other."""
        requests, session = self._requests, peer.session
        try:
            if not isinstance(happened, int):
                if isinstance(happened, Transfer):
                    requests.moved(peer, happened)
                else:
                    requests.tell(peer, happened)
                happened = 0
            if happened & OUT:
                requests.can_send(peer)
            if not happened & IN:
                if happened & HUNG_UP and not happened & OUT:
                    raise Gone
            elif peer.arriving is not None:
                requests.read_body(peer, peer.arriving)
            elif session is None:
                self._greet(peer)
            elif session.ended:  # the client comes back, and is told what became of it
                raise Gone
            else:
                fresh = peer.read()
                # What was sent while this turn stood still counts for the client from then on.
                session.heard = self._now()
                requests.work(peer, session, fresh)
        except BlockingIOError:
            pass
        except Exception as error:
            self._give_up(peer, error)
            return
        if peer.mask != IN or peer.out is not None or peer.arriving is not None:  # seldom
            self._watch(peer, peer.wanted())

    def _give_up(self, peer: Peer, error: Exception) -> None:
        """Drop a connection on which something failed, and say so where that is no everyday thing."""
        session = peer.session
        who = peer.source if session is None else str(session.identity)
        if isinstance(error, Gone):
            if str(error):
                what = "turned away" if session is None else "closed the connection of"
                self._gate.complain(who, str(error), self._now(), what)
        elif not isinstance(error, OSError):
            log.error(
                "the store failed on the connection of %s; please report this", who, exc_info=error
            )
        self._drop(peer)

    def _watch(self, peer: Peer, mask: int) -> None:
        if mask != peer.mask >= 0:
            self._epoll.modify(peer.fd, mask)
            peer.mask = mask

    def _deliver(self) -> None:
        """Send the replies to requests that have waited."""
        woken, self._state.woken = self._state.woken, []
        for session, reply in woken:
            peer = session.routes.pop(reply.seq, None)
            # Otherwise it is kept by the state, or asked for again.
            if peer is not None and not peer.closing and peer.session is session:
                self._attend(peer, reply)

    # --- coming and going ---

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS):
            sock = None
            try:
                sock, _ = listener.accept()
                end = sock
                if self._encrypt is not None and sock.family != socket.AF_UNIX:
                    end = self._encrypt(sock)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._no_room(listener, sock, error)
                    return
                if sock is not None:
                    sock.close()
                continue  # whoever it was has gone already
            self._admit(end)

    def _no_room(self, listener: socket.socket, sock: socket.socket | None, error: OSError) -> None:
        """Turn somebody away with a reason, as there is no descriptor for a new connection: that
        connection if it has been accepted, or else the oldest stranger, or else accept it for that
        (left waiting, it would keep epoll reporting it)."""
        why = f"{error.strerror} (ulimit -n: {open_files()})"
        self._gate.complain("a new connection", why, self._now())
        text = f"its server cannot take another connection now: {why}"
        answer = framed(encode(Refusal("store-full", text, passing=True)))
        oldest = self._gate.oldest()
        if sock is None and oldest is not None:
            _turn_away(oldest.sock, answer)
            self._drop(oldest)
            return
        reserve, self._reserve = self._reserve, -1
        close_fds(reserve)
        try:
            with sock or listener.accept()[0] as refused:
                _turn_away(refused, answer)
        except OSError:  # another thread has taken the descriptor
            pass
        try:
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            pass  # another thread was faster: the newcomer waits until there is one again

    def _admit(self, sock: socket.socket) -> None:
        """Take a new connection in, as a stranger."""
        source, now = None, self._now()
        try:
            sock.setblocking(False)
            source = _source(sock)
            way = way_of(sock.family, sock.getsockname())
            if source is not None:
                self._epoll.register(sock.fileno(), IN)
        except OSError:  # it has gone already; or this user has too many descriptors in epolls
            sock.close()
            return
        if source is None:
            text = "this store's Unix socket is for its own user"
            self._gate.complain("a process of another user", text, now)
            sock.close()
            return
        proved_by, binding = now + GREETING, binding_of(sock)
        greeting = Greeting(self._secret, self._job, __version__, proved_by, way, binding)
        peer = Peer(sock, source, greeting.cutter)
        self._peers[peer.fd] = peer
        peer.mask = IN
        oldest = self._gate.admit(peer, greeting)
        if oldest is not None:
            text = "too many connections without proof, and this was the oldest"
            self._gate.complain(oldest.source, text, now)
            self._drop(oldest)

    def _greet(self, peer: Peer) -> None:
        greeting = self._gate.strangers[peer]
        try:
            peer.cutter.data += peer.read()
            said = greeting.receive()
        except TurnedAway as error:
            if error.answer:
                peer.send(error.answer)
            if error.is_client and self._on_stranger is not None:
                self._on_stranger(peer.source, str(error))
            raise Gone(str(error)) from error
        except Gone:
            because = refusal_of(peer.sock)
            if greeting.is_challenged:
                because = "it has another secret: it left after this side's proof"
            if because and self._on_stranger is not None:
                self._on_stranger(peer.source, because)
            raise
        if isinstance(said, bytes):
            peer.drop_unclaimed()
            if said:
                peer.send(said)
        else:
            self._welcome(peer, *said)

    def _welcome(self, peer: Peer, hello: Hello, proof: Proof) -> None:
        state, resume, acked = self._state, proof.resume, proof.acked
        session = state.open(
            self._now(),
            hello.session,
            proof.ttl,
            proof.identity,
            resume=resume,
            acked=acked,
            orphan=proof.orphan,
        )
        self._gate.leave(peer)
        if isinstance(session, Refusal):
            peer.send(framed(encode(session)))
            raise Gone
        if session in self._pidfds:  # its process lives, and has come back
            self._unwatch(session)
        self._by_session.setdefault(session, {})[peer] = None
        peer.session = session
        peer.number = next(self._admitted)
        peer.pid = _process(peer.sock, session)
        peer.cutter.message_bytes = MESSAGE_BYTES
        # The state says what is too large, and the connection lives on.
        peer.cutter.body_bytes = 2**64 - 1
        limits, revision = state.budget.limits, state.revision
        welcome = Welcome(self._id, __version__, limits, self._local, revision, session.ttl)
        peer.send(framed(encode(welcome)))
        if peer.cutter.data:
            self._requests.work(peer, session)

    def _drop(self, peer: Peer) -> None:
        """End the connection; the session goes on. May be called again."""
        session = peer.session
        peers = self._by_session.get(session, {}) if session is not None else {}
        if session is not None and peer in peers:
            del peers[peer]
            if not peers:
                del self._by_session[session]
                if not session.ended and self._asked is None:
                    self._state.leave_alone(self._now(), session)
                    if peer.pid:
                        self._watch_process(peer.pid, session)
        self._gate.leave(peer)
        if peer.mask >= 0:
            peer.mask = -1
            self._epoll.unregister(peer.fd)
        if peer.moves:
            # A thread is using the socket: its number must not become another's. This ends its
            # call.
            peer.closing = True
            try:
                peer.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            return
        if self._peers.pop(peer.fd, None) is None:
            return
        if peer.arriving is not None:
            self._state.release(peer.arriving.reserved)
        self._state.release(peer.held)
        peer.abandon()

    def _watch_process(self, pid: int, session: Session) -> None:
        """End the session when its process, whose connection ended without a goodbye, has ended,
        too: nobody need wait for its lease.

        The kernel closes the sockets of a process that dies before it calls it dead. (If the
        process has been reaped and its number is another's already, this waits for that one, and
        the lease decides.)
        """
        try:
            fd = system_calls.pidfd_open(pid)
        except ProcessLookupError:
            self._state.end(self._now(), session, DIED)
            return
        except OSError:  # no descriptor for it: the lease decides
            return
        try:
            self._epoll.register(fd, IN)
        except OSError:
            os.close(fd)
            return
        self._pidfds[session] = fd
        self._others[fd] = partial(self._left, session, fd)

    def _left(self, session: Session, fd: int) -> None:
        """End the session of a process that has died, unless this is what epoll said of another
        descriptor that had this number a moment ago."""
        ended = select.poll()
        ended.register(fd, select.POLLIN)
        if ended.poll(0):
            self._unwatch(session)
            self._state.end(self._now(), session, DIED)

    def _unwatch(self, session: Session) -> None:
        fd = self._pidfds.pop(session)
        del self._others[fd]
        self._epoll.unregister(fd)
        os.close(fd)

    # --- the end ---

    def _wind_up(self, reason: str, drain: float) -> None:
        """Tell everybody; send what is still to be sent, for `drain` seconds at most."""
        until = self._now() + drain
        for fd, listener in self._listeners.items():
            self._epoll.unregister(fd)
            del self._others[fd]
            listener.close()
        self._listeners.clear()
        for peer in list(self._gate.strangers):
            self._drop(peer)
        notice = framed(encode(Closing(0, self._state.revision, reason)))
        for peer in [peer for peers in self._by_session.values() for peer in peers]:
            try:
                peer.send(notice)
                peer.closing = True
                self._watch(peer, peer.wanted())
            except (Gone, OSError):
                self._drop(peer)
        while True:
            for peer in list(self._peers.values()):
                if not peer.out and peer.outgoing is None:
                    _read_off(peer)
                    self._drop(peer)
            if not self._by_session or self._now() >= until:
                return
            self._turn(until)

    def _close(self) -> None:
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._movers.stop()
        while (transfer := self._movers.take()) is not None:
            self._drop(transfer.peer)
        for listener in self._listeners.values():
            listener.close()
        while self._adopted:
            self._adopted.popleft().close()
        for session in list(self._pidfds):
            self._unwatch(session)
        self._epoll.close()
        wake, self._wake = self._wake, -1
        close_fds(wake, self._reserve)
        self._values.close()


def prepare(sock: socket.socket) -> None:
    """Set the options of a connection, or of a listener: the connections accepted from it inherit
    them (tcp(7))."""
    sock.setblocking(False)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        set_for_small_messages(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _turn_away(sock: socket.socket, answer: bytes) -> None:
    """Say why, and read what has arrived: closing a socket with unread bytes could cost the client
    the answer.
    """
    try:
        sock.send(answer, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        sock.recv(HELLO_BYTES, socket.MSG_DONTWAIT)
    except OSError:  # it has gone, or has not said anything
        pass


def _source(sock: socket.socket) -> str | None:
    """Return the other end of a connection, by number: no name is ever looked up. None for another
    user's process."""
    if sock.family != socket.AF_UNIX:
        return str(sock.getpeername()[0])
    return f"process {listener_of(sock)}" if uid_of(sock) == os.geteuid() else None


def _process(sock: socket.socket, session: Session) -> int:
    """Return the process at the other end of a Unix socket, if the session is its own; 0 where that
    is not certain: it could be a proxy, or have another number in its own namespace."""
    if sock.family != socket.AF_UNIX:
        return 0
    pid, identity = listener_of(sock), session.identity
    return pid if pid == identity.pid and identity.host == os.uname().nodename else 0


def _read_off(peer: Peer) -> None:
    try:
        for _ in range(READ_OFF):
            if peer.moves or not peer.sock.recv(65536):
                return
    except OSError:  # nothing more
        pass
