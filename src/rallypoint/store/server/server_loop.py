"""One thread, one epoll, all connections: takes requests to the state and its answers back, and
decides nothing itself.

Whatever takes longer than some microseconds happens elsewhere: large values move in `bulk.py`. A
connection that does not read is not read from. Whatever a client sends, the worst that it gets is
its own connection closed.
"""

from __future__ import annotations

import errno
import itertools
import os
import resource
import select
import socket
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from rallypoint import __version__
from rallypoint.clock import Clock
from rallypoint.host import system_calls
from rallypoint.host.memory import Pool, Segment, Unfit, received
from rallypoint.host.unix_sockets import listener_of, uid_of, way_of
from rallypoint.store.logger import logger
from rallypoint.store.server.admission import GREETING, Gate, Greeting, TurnedAway, refusal
from rallypoint.store.server.bulk import Movers, Transfer
from rallypoint.store.server.connection import READ_BYTES, Arriving, Body, Gone, Lending, Peer
from rallypoint.store.state.state import Large, Session, State
from rallypoint.wire.frames import HEADER, HEADER_BYTES, HEADS, FrameError
from rallypoint.wire.messages import (
    HELLO_BYTES,
    MESSAGE_BYTES,
    AnyRequest,
    Closing,
    CompareAndSet,
    Failed,
    Freed,
    Hello,
    Proof,
    Push,
    Refusal,
    Release,
    Reply,
    Resolve,
    Set,
    Value,
    Welcome,
    decode_request,
    encode,
    seq_of,
)

BULK_BYTES = 1024 * 1024
"""Values from here on live in shared memory and are moved by threads. Smaller ones take the loop
under 200 us, less than handing them over and back would on a busy machine, and a descriptor each
would be many."""

HUGE_BYTES = 64 * 1024 * 1024
"""Values from here on are never copied by the loop, which would hold everybody up for 40 ms and
more.
"""

RESERVE = 4
"""A quarter of the descriptors that this process may have is not for values: clients that are still
to come need one each, and the store of a job shares its process with the launcher, which needs some
for every rank that starts or ends."""

ACCEPTS = 64
"""New connections taken in one turn: the rest waits in the kernel, so that a storm of them does not
stop everybody else.
"""

FLUSH_BYTES = 256 * 1024
"""Replies to pipelined requests are collected up to here and sent by one call."""

DISCARD_BYTES = 256 * 1024
"""Read and thrown away by one call, of a body that was refused."""

EVENTS = 1024
"""Taken from epoll at once."""

LONGEST_NAP = 3600.0
"""Seconds that one call of epoll may wait: it refuses more than 24 days, and a key may live longer
than that.
"""

UNACKNOWLEDGED = 262_144
"""Kept replies at which a session is ended: some 60 MB. A client acknowledges with every request;
this one's bookkeeping is broken.
"""

SWEEP = 5.0
"""Seconds between two looks for connections whose session has ended: their clients learn it at
their next request in any case.
"""

DIED = "its process died"
"""Why a session is over whose process has been seen to end."""

READ_OFF = 16
"""Reads of what a client has sent, when the server stops: closing a socket with unread bytes could
cost the client our last words.
"""

# A connection whose other end has gone silent is given up after some 20 s: twice the ttl of a
# session, which has then ended.
KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 3),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 20_000),
)

CARRIERS = (Set, CompareAndSet, Push, Resolve)
"""The requests that bring a value."""

_REPEATED = Body(b"")
"""Stands for the value of a request that was answered before: nobody needs it."""

_SPECIAL = frozenset((*CARRIERS, Release))
_Carrier = Set | CompareAndSet | Push | Resolve

IN, OUT, HUNG_UP = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR
_pack = HEADER.pack
_SHORT = len(HEADS)
_SMALL = HEADER_BYTES + _SHORT

log = logger()


class _Malformed(Exception):
    """A client that has proved itself does not keep to the protocol."""


class _Return:
    """What becomes of a client's segment when the server needs it no more."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        self._peer = peer
        self._number = number

    def __call__(self, fd: int, capacity: int) -> None:
        os.close(fd)
        self._peer.free(self._number)


class Loop:
    """See the module. `wake`, `adopt` and `ask_to_stop` may be called from any thread, and from a
    signal handler; the rest is `run`'s.
    """

    def __init__(
        self,
        state: State,
        listeners: Sequence[socket.socket],
        *,
        secret: bytes,
        job: str,
        local: str,
        clock: Clock,
    ) -> None:
        """Takes the listeners over. `local`: the path that clients are told."""
        self._state = state
        self._secret = secret
        self._job = job
        self._local = local
        self._now = clock.monotonic
        self._id = os.urandom(16)
        self._peers: dict[int, Peer] = {}
        self._by_session: dict[Session, dict[Peer, None]] = {}
        self._admitted = itertools.count(1)
        self._leaving: dict[
            int, Session
        ] = {}  # by pidfd: its connection has ended, without a goodbye
        self._pidfds: dict[Session, int] = {}  # the same the other way round
        self._moving: dict[Transfer, Peer] = {}
        self._gate = Gate()
        self._pool = Pool()
        self._movers = Movers(self.wake)
        self._next_sweep = 0.0
        self._adopted: deque[socket.socket] = deque()
        self._discarded = bytearray()
        self._segments: weakref.WeakSet[Segment] = weakref.WeakSet()
        self._asked: tuple[str, float] | None = None  # to stop: why, and the seconds for draining
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._reserve = -1  # a descriptor that is given up when there is none for a newcomer
        try:
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            self._epoll = select.epoll()
            self._epoll.register(self._wake, IN)
            for fd, listener in self._listeners.items():
                prepare(listener)
                self._epoll.register(fd, IN)
        except BaseException:
            for fd in (self._wake, self._reserve):
                if fd >= 0:
                    os.close(fd)
            raise

    def __len__(self) -> int:
        """How many sessions are connected."""
        return len(self._by_session)

    # --- from other threads ---

    def wake(self) -> None:
        """Make the loop look around."""
        try:
            os.eventfd_write(self._wake, 1)
        except (BlockingIOError, OSError):  # awake for a long time already, or closed
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
        """In a forked child: close what the parent serves, so that its end is an end for its
        clients too.
        """
        if self._wake < 0:  # it was closed already, and the numbers may be others' by now
            return
        self._epoll.close()
        for sock in [
            *self._listeners.values(),
            *(peer.sock for peer in self._peers.values()),
            *self._adopted,
        ]:
            sock.close()
        for fd in (self._wake, self._reserve, *self._leaving):
            if fd >= 0:
                os.close(fd)
        for peer in self._peers.values():
            peer.drop_unclaimed()
        for segment in list(self._segments):
            segment.close()
        self._pool.close()

    # --- the loop ---

    def run(self) -> None:
        """Serve until asked to stop. Then everything is closed, and this object of no more use."""
        try:
            while self._asked is None:
                self._turn(self._due())
            self._wind_up(*self._asked)
        finally:
            self._close()

    def _due(self) -> float:
        """When something is to be done without anybody asking for it."""
        due = self._state.due()
        return self._gate.due() if due is None else min(due, self._gate.due())

    def _turn(self, until: float) -> None:
        """Wait for events until then, and handle them."""
        now = self._now()
        events = self._epoll.poll(max(0.0, min(until - now, LONGEST_NAP)) + 0.001, EVENTS)
        now = self._now()
        peers = self._peers
        others: list[int] | None = None
        for fd, what in events:
            peer = peers.get(fd)
            if peer is not None:
                self._attend(peer, what, now)
            elif others is None:
                others = [fd]
            else:
                others.append(fd)
        if (
            others
        ):  # last, because a new connection may get the number of one that has just been closed
            for fd in others:
                if fd == self._wake:
                    self._awake(now)
                elif fd in self._listeners:
                    self._accept(self._listeners[fd], now)
                elif fd in self._leaving:
                    self._left(fd, now)
        if now >= until:
            self._catch_up()
            self._expire(now)
        while (
            self._state.woken
        ):  # again when somebody could not be told: his process has died, and that tells others
            self._deliver(now)
        if self._pool.dropped:
            self._pool.tidy()

    def _catch_up(self) -> None:
        """More may have arrived than one look has shown: read it before anybody is declared dead.
        (The kernel ends an `epoll_wait` of a process that was stopped with no events: signal(7).)
        """
        for _ in range(len(self._peers) // EVENTS + 2):
            events = self._epoll.poll(0, EVENTS)
            now = self._now()
            served = 0
            for fd, what in events:
                peer = self._peers.get(fd)
                if peer is not None:
                    self._attend(peer, what, now)
                    served += 1
            if not served:
                return

    def _expire(self, now: float) -> None:
        for transfer, peer in self._moving.items():
            # Threads hold on to a transfer only while it moves: that is a sign of life, though no
            # request may get through beside it.
            if peer.session is not None and (
                peer.incoming_moves if transfer.incoming else peer.outgoing_moves
            ):
                peer.session.heard = max(peer.session.heard, now)
        try:
            self._state.tick(now)
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

    def _awake(self, now: float) -> None:
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            pass
        while (transfer := self._movers.take()) is not None:
            self._given_back(transfer, now)
        while self._adopted:
            self._admit(self._adopted.popleft(), now)

    def _attend(self, peer: Peer, what: int, now: float) -> None:
        """Something happened at this connection."""
        try:
            if what & OUT:
                self._can_send(peer, now)
            if what & IN:
                session = peer.session
                if peer.arriving is not None:
                    self._read_body(peer, peer.arriving, now)
                elif session is None:
                    self._greet(peer, peer.read(), now)
                elif session.ended:  # the client comes back, and is told what became of it
                    raise Gone
                else:
                    data = peer.read()
                    # Not `now`: what was sent while this turn stood still counts for the client
                    # from then on, and so it must here.
                    session.heard = self._now()
                    if not self._work_one(peer, session, data, now):
                        peer.cutter.feed(data)
                        self._work(peer, session, now)
                    if (
                        what == IN and peer.out is None and peer.arriving is None
                    ):  # nearly always; it may have been dropped meanwhile, too
                        return
            elif what & HUNG_UP and not what & OUT:
                raise Gone
        except BlockingIOError:
            pass
        except Gone as error:
            self._gone(peer, error, now)
            return
        except OSError:
            self._drop(peer)
            return
        except Exception:
            self._failed(peer)
            return
        self._rewatch(peer)

    def _rewatch(self, peer: Peer) -> None:
        mask = peer.wanted()
        if mask != peer.mask:
            self._watch(peer, mask)

    def _watch(self, peer: Peer, mask: int) -> None:
        if peer.mask >= 0:
            self._epoll.modify(peer.fd, mask)
            peer.mask = mask

    # --- coming and going ---

    def _accept(self, listener: socket.socket, now: float) -> None:
        for _ in range(ACCEPTS):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._no_room(listener, error, now)
                    return
                continue  # whoever it was has gone already
            self._admit(sock, now)

    def _no_room(self, listener: socket.socket, error: OSError, now: float) -> None:
        """There is no descriptor for a new connection: the oldest stranger goes for it, or else it
        is turned away itself (left waiting, it would keep epoll reporting it). Whoever goes is told
        why."""
        why = f"{error.strerror} (ulimit -n: {resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"
        self._gate.complain("a new connection", why, now)
        answer = refusal(
            Refusal(
                "store-full", f"its server cannot take another connection now: {why}", passing=True
            )
        )
        oldest = self._gate.oldest()
        if oldest is not None:
            _turn_away(oldest.sock, answer)
            self._drop(oldest)
            return
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1
            try:
                sock, _ = listener.accept()
            except OSError:
                pass
            else:
                _turn_away(sock, answer)
                sock.close()
        try:
            self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except (
            OSError
        ):  # another thread of this process was faster: the newcomer waits until there is one again
            pass

    def _admit(self, sock: socket.socket, now: float) -> None:
        """A new connection: a stranger."""
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
            self._gate.complain(
                "a process of another user", "this store's Unix socket is for its own user", now
            )
            sock.close()
            return
        greeting = Greeting(self._secret, self._job, __version__, now + GREETING, way)
        peer = Peer(sock, source, greeting.cutter)
        self._peers[peer.fd] = peer
        peer.mask = IN
        oldest = self._gate.admit(peer, greeting)
        if oldest is not None:
            self._gate.complain(
                oldest.source, "too many connections without proof, and this was the oldest", now
            )
            self._drop(oldest)

    def _greet(self, peer: Peer, data: bytes, now: float) -> None:
        try:
            said = self._gate.strangers[peer].receive(data)
        except TurnedAway as error:
            if error.answer:
                peer.send(error.answer)
            raise Gone(str(error)) from error
        if isinstance(said, bytes):
            peer.drop_unclaimed()
            if said:
                peer.send(said)
        else:
            self._welcome(peer, *said, now)

    def _welcome(self, peer: Peer, hello: Hello, proof: Proof, now: float) -> None:
        session = self._state.open(
            now, hello.session, proof.ttl, proof.identity, resume=proof.resume, acked=proof.acked
        )
        self._gate.leave(peer)
        if isinstance(session, Refusal):
            peer.send(refusal(session))
            raise Gone
        if session in self._pidfds:  # its process lives, and has come back
            self._unwatch(session)
        self._by_session.setdefault(session, {})[peer] = None
        peer.session = session
        peer.number = next(self._admitted)
        peer.pid = _process(peer.sock, session)
        peer.cutter.message_bytes = MESSAGE_BYTES
        peer.cutter.body_bytes = (
            2**64 - 1
        )  # the state says what is too large, and the connection lives on
        message = encode(
            Welcome(
                self._id,
                __version__,
                self._state.budget.limits,
                self._local,
                self._state.revision,
                session.ttl,
            )
        )
        peer.send(_pack(len(message), 0) + message)
        if len(peer.cutter):
            self._work(peer, session, now)

    def _gone(self, peer: Peer, error: Gone, now: float) -> None:
        if str(error):
            if peer.session is None:
                self._gate.complain(peer.source, str(error), now)
            else:
                self._gate.complain(
                    str(peer.session.identity), str(error), now, "closed the connection of"
                )
        self._drop(peer)

    def _failed(self, peer: Peer) -> None:
        """We failed on this connection: it is closed, and everybody else is served."""
        who = peer.session.identity if peer.session else peer.source
        log.exception("the store failed on the connection of %s; please report this", who)
        self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        """The connection is over; the session is not. May be called again."""
        session = peer.session
        if (
            session is not None
            and (peers := self._by_session.get(session)) is not None
            and peer in peers
        ):
            del peers[peer]
            if not peers:
                del self._by_session[session]
                if peer.pid and not session.ended and self._asked is None:
                    self._watch_process(peer.pid, session)
        self._gate.leave(peer)
        if peer.mask >= 0:
            peer.mask = -1
            self._epoll.unregister(peer.fd)
        if peer.incoming_moves or peer.outgoing_moves:
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
        for transfer in (peer.incoming, peer.outgoing):
            if transfer is not None:
                self._moving.pop(transfer, None)
        if peer.arriving is not None:
            self._state.release(peer.arriving.reserved)
        self._state.release(peer.held)
        peer.abandon()

    def _watch_process(self, pid: int, session: Session) -> None:
        """A connection ended without a goodbye: if its process has, too, what it held need not wait
        for its lease. The kernel closes the sockets of a process that dies before it calls it dead,
        so that is waited for. (If the process has been reaped and its number is another's already,
        this waits for that one, and the lease decides.)"""
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
        self._leaving[fd] = session
        self._pidfds[session] = fd

    def _left(self, fd: int, now: float) -> None:
        """A process that is watched has died, unless this is what epoll said of another one that
        had this number a moment ago.
        """
        ended = select.poll()
        ended.register(fd, select.POLLIN)
        if ended.poll(0):
            session = self._leaving[fd]
            self._unwatch(session)
            self._state.end(now, session, DIED)

    def _unwatch(self, session: Session) -> None:
        fd = self._pidfds.pop(session)
        del self._leaving[fd]
        self._epoll.unregister(fd)
        os.close(fd)

    # --- in ---

    def _work_one(self, peer: Peer, session: Session, data: bytes, now: float) -> bool:
        """Carry out what has arrived, if that is nearly everything that ever arrives: one small
        request, and whole. Whether it was.
        """
        if (
            not HEADER_BYTES < len(data) < _SMALL
            or peer.descriptors
            or peer.out is not None
            or peer.freed
        ):
            return False
        if not data.startswith(HEADS[len(data) - HEADER_BYTES]) or not peer.cutter.empty:
            return False
        try:
            request = decode_request(data[HEADER_BYTES:])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False  # `_work` says what is wrong with it
        if type(request) in _SPECIAL and (type(request) is Release or request.shared):
            return False
        try:
            answer = self._state.apply(now, session, request)
        except Exception:
            answer = self._fault(request)
        data = b""
        if answer is None:
            _expect(peer, session, request.seq)
        else:
            reply, held = answer, _large_of(answer)
            if held is not None:
                parts: list[bytes] = []
                self._put(peer, parts, reply, held)
                del answer, reply, held
                data = b"".join(parts)
            else:
                message = encode(reply)
                size = len(message)
                data = HEADS[size] + message if size < _SHORT else _pack(size, 0) + message
        if len(session.replies) > UNACKNOWLEDGED or len(session.acked) > UNACKNOWLEDGED:
            self._state.end(
                now, session, f"it acknowledged none of its last {len(session.replies)} replies"
            )
            raise Gone(f"it acknowledges none of {UNACKNOWLEDGED} replies")
        if peer.freed:
            data += self._freed(peer)
        if data:
            peer.send(data)
        if self._state.woken:
            self._deliver(now)
        return True

    def _work(self, peer: Peer, session: Session, now: float) -> None:
        """Carry out the requests that have arrived."""
        cut, apply = peer.cutter.next, self._state.apply
        parts: list[bytes] = []
        size = 0
        if peer.held and len(peer.cutter) >= peer.cutter.announced:
            self._state.release(peer.held)
            peer.held = 0
        try:
            while (frame := cut()) is not None:
                try:
                    request = decode_request(frame[0])
                except (
                    msgspec.MsgspecError,
                    ValueError,
                    RecursionError,
                ) as error:  # ValueError: text that is not UTF-8
                    raise _Malformed(f"a message that is not rallypoint's: {error}") from error
                large: Large | None = None
                if type(request) in _SPECIAL or frame[1] or frame[2]:
                    if type(request) is Release and not frame[1] and not frame[2]:
                        peer.release(request.of)
                    elif frame[1] or frame[2] or request.shared:
                        value = self._value(peer, session, request, frame[1], frame[2])
                        if value is None:  # it has to arrive first
                            break
                        if isinstance(value, Failed):
                            message = encode(value)
                            parts += (_pack(len(message), 0), message)
                            continue
                        large = None if value is _REPEATED else value
                        value = None
                try:
                    answer = apply(now, session, request, large)
                except Exception:
                    answer = self._fault(request)
                # Whoever drops a value last frees its memory: that must not be a variable here,
                # some requests later.
                large = None
                if answer is None:
                    _expect(peer, session, request.seq)
                    continue
                reply, held = answer, _large_of(answer)
                if held is not None:
                    self._put(peer, parts, reply, held)
                    del answer, reply, held
                    size = 0
                else:
                    message = encode(reply)
                    parts.append(_pack(len(message), 0))
                    parts.append(message)
                    size += len(message)
                if size > FLUSH_BYTES or peer.out is not None:
                    self._flush_parts(peer, parts)
                    size = 0
                    if peer.paused:
                        peer.stalled = True
                        break
        except (FrameError, _Malformed) as error:
            message = encode(Failed(0, self._state.revision, "bad-request", str(error)))
            parts += (_pack(len(message), 0), message)
            self._flush_parts(peer, parts)
            raise Gone(str(error)) from error
        if peer.cutter.announced > READ_BYTES and not peer.held:
            parts += self._hold(peer, peer.cutter.announced)
        if len(session.replies) > UNACKNOWLEDGED or len(session.acked) > UNACKNOWLEDGED:
            self._state.end(
                now, session, f"it acknowledged none of its last {len(session.replies)} replies"
            )
            raise Gone(f"it acknowledges none of {UNACKNOWLEDGED} replies")
        if peer.descriptors and peer.arriving is None and not len(peer.cutter):
            peer.drop_unclaimed()
        if peer.freed:
            parts.append(self._freed(peer))
        if parts:
            peer.send(b"".join(parts))
        if self._state.woken:
            self._deliver(now)

    def _hold(self, peer: Peer, size: int) -> tuple[bytes, ...]:
        """A long message has begun to arrive: charge it until it is whole, or say that there is no
        room, and throw the rest away.
        """
        refused = self._state.reserve(size)
        if refused is None:
            peer.held = size
            return ()
        begun, missing = peer.cutter.skip()
        peer.arriving = Arriving(None, missing)
        message = encode(msgspec.structs.replace(refused, seq=seq_of(begun)))
        return _pack(len(message), 0), message

    def _fault(self, request: AnyRequest) -> Reply:
        """The state failed, which is our fault: this client learns it at once, and everybody else
        is served.
        """
        log.exception("the store failed on a %s; please report this", type(request).__name__)
        text = (
            f"rallypoint itself failed on this {type(request).__name__}; the server's log says how"
        )
        return Failed(request.seq, self._state.revision, "bad-request", text)

    def _value(
        self, peer: Peer, session: Session, request: AnyRequest, body: bytes, missing: int
    ) -> Large | Failed | None:
        """The value that comes beside this request: itself, or why it is not taken, or _REPEATED
        when it is not needed because the request has been answered before, or None when it has yet
        to arrive."""
        if not isinstance(request, CARRIERS) or request.value:
            raise _Malformed(f"a {type(request).__name__} with a body beside it")
        if request.shared:
            if body or missing:
                raise _Malformed("a value in shared memory with a body beside it")
            return self._shared_value(peer, session, request)
        if _is_repeated(session, request.seq):
            if missing:
                peer.arriving = Arriving(None, missing)
            return _REPEATED
        size = len(body) + missing
        refused = self._state.reserve(size, request.seq)
        segment = data = None
        if refused is None and missing:
            try:
                segment = self._take(size) if size >= BULK_BYTES else None
                if segment is not None:
                    segment.write(body, 0)
                else:
                    data = bytearray(size)
                    data[: len(body)] = body
            except (OSError, MemoryError) as error:
                self._state.release(size)
                refused = self._no_memory(
                    request, error if isinstance(error, OSError) else _no_memory()
                )
        if refused is not None:
            if missing:
                peer.arriving = Arriving(None, missing)
            return refused
        if not missing:
            return Body(body)
        peer.arriving = Arriving(request, missing, data, size)
        if segment is not None:
            peer.incoming = Transfer(peer.sock, segment, incoming=True, at=len(body))
            self._move(peer, peer.incoming)
        return None

    def _shared_value(self, peer: Peer, session: Session, request: _Carrier) -> Large | Failed:
        fd = peer.descriptor()
        if fd is None:
            raise _Malformed("a value in shared memory that did not come with it")
        if fd < 0:
            return self._no_memory(request, OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        if _is_repeated(session, request.seq):
            os.close(fd)
            return _REPEATED
        back = None
        if request.segment:
            back = _Return(peer, request.segment)
            if peer.freed is None:
                peer.freed = deque()
        try:
            segment = received(fd, request.shared, back)
        except Unfit as error:
            raise _Malformed(str(error)) from error
        scarce = _is_scarce(segment)
        if scarce and segment.size >= HUGE_BYTES:
            return self._no_memory(request, OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        refused = self._state.reserve(segment.size, request.seq)
        if refused is not None:
            return refused
        if scarce or segment.size < BULK_BYTES:
            try:
                data = bytearray(segment.size)
                segment.read(memoryview(data), 0)
            except (OSError, MemoryError) as error:
                self._state.release(segment.size)
                return self._no_memory(
                    request, error if isinstance(error, OSError) else _no_memory()
                )
            except BaseException:
                self._state.release(segment.size)
                raise
            return Body(data)
        self._segments.add(segment)
        return segment

    def _take(self, size: int) -> Segment | None:
        """Shared memory for a value that is to come; None when descriptors are scarce, and then the
        loop's own memory has to do.
        """
        try:
            segment = self._pool.take(size)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            return None
        if _is_scarce(segment):
            segment.close()
            return None
        self._segments.add(segment)
        return segment

    def _no_memory(self, request: AnyRequest, error: OSError) -> Failed:
        text = f"the server cannot hold this value: {error.strerror}"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            text += (
                f"; a value of {BULK_BYTES} bytes or more takes a descriptor, this process may have {limit} (ulimit -n), "
                f"and values leave a quarter of them free"
            )
        return Failed(request.seq, self._state.revision, "store-full", text)

    def _read_body(self, peer: Peer, arriving: Arriving, now: float) -> None:
        """More of a body is there."""
        if peer.incoming is not None:
            self._move(peer, peer.incoming)
            return
        if arriving.body is not None:
            count = peer.sock.recv_into(memoryview(arriving.body)[-arriving.left :])
        else:
            if not self._discarded:
                self._discarded = bytearray(DISCARD_BYTES)
            count = peer.sock.recv_into(self._discarded, min(arriving.left, DISCARD_BYTES))
        if not count:
            raise Gone
        if peer.session is not None:
            peer.session.heard = self._now()
        arriving.left -= count
        if arriving.left:
            return
        peer.arriving = None
        if arriving.body is not None:
            self._arrived(peer, arriving, Body(arriving.body), now)

    def _arrived(self, peer: Peer, arriving: Arriving, value: Large, now: float) -> None:
        """A request has its value at last."""
        assert peer.session is not None
        assert arriving.request is not None
        try:
            answer = self._state.apply(now, peer.session, arriving.request, value)
        except Exception:
            answer = self._fault(arriving.request)
        if answer is None:
            _expect(peer, peer.session, arriving.request.seq)
        else:
            parts: list[bytes] = []
            reply, held = answer, _large_of(answer)
            if held is not None:
                self._put(peer, parts, reply, held)
            else:
                message = encode(reply)
                parts = [_pack(len(message), 0), message]
            if peer.freed:
                parts.append(self._freed(peer))
            self._flush_parts(peer, parts)
        if self._state.woken:
            self._deliver(now)

    # --- out ---

    def _deliver(self, now: float) -> None:
        """Send the answers to requests that have waited."""
        woken = self._state.woken[:]
        self._state.woken.clear()
        for session, reply in woken:
            held = _large_of(reply)
            peer = session.routes.pop(reply.seq, None)
            if peer is None or peer.closing or peer.session is not session:
                continue  # kept by the state, or asked for again
            try:
                if held is None and not peer.freed:
                    message = encode(reply)
                    size = len(message)
                    peer.send(HEADS[size] + message if size < _SHORT else _pack(size, 0) + message)
                    if (
                        peer.out is None
                    ):  # nearly always: there may be ten thousand to be told of one barrier
                        continue
                else:
                    parts: list[bytes] = []
                    if held is not None:
                        self._put(peer, parts, reply, held)
                    else:
                        message = encode(reply)
                        parts = [_pack(len(message), 0), message]
                    if peer.freed:
                        parts.append(self._freed(peer))
                    self._flush_parts(peer, parts)
            except Gone as error:
                self._gone(peer, error, now)
            except OSError:
                self._drop(peer)
            except Exception:
                self._failed(peer)
            else:
                self._rewatch(peer)

    def _put(self, peer: Peer, parts: list[bytes], reply: Reply, held: Large) -> None:
        """Queue a reply with a large value, behind `parts`."""
        if isinstance(held, Segment) and type(reply) is Value and peer.can_lend():
            message = encode(Value(reply.seq, reply.revision, reply.modified, b"", held.size))
            self._flush_parts(peer, parts)
            peer.lend(reply.seq, held)
            peer.queue(Lending(_pack(len(message), 0) + message, held))
        else:
            assert type(reply) is Value
            message = encode(Value(reply.seq, reply.revision, reply.modified, b""))
            parts.append(_pack(len(message), held.size) + message)
            self._flush_parts(peer, parts)
            if isinstance(held, Segment):
                peer.queue(held)
            else:
                assert isinstance(held, Body)
                peer.queue(memoryview(held.data))
        self._flush(peer)

    def _flush_parts(self, peer: Peer, parts: list[bytes]) -> None:
        if parts:
            peer.send(parts[0] if len(parts) == 1 else b"".join(parts))
            parts.clear()

    def _flush(self, peer: Peer) -> None:
        """Send what waits, unless a thread is sending."""
        if peer.outgoing is None:
            segment = peer.flush()
            if segment is not None:
                peer.outgoing = Transfer(peer.sock, segment, incoming=False)
                self._move(peer, peer.outgoing)

    def _can_send(self, peer: Peer, now: float) -> None:
        if peer.outgoing is not None:
            self._move(peer, peer.outgoing)
            return
        self._flush(peer)
        if (
            len(peer.cutter)
            and not peer.paused
            and not peer.closing
            and peer.session is not None
            and peer.arriving is None
        ):
            peer.stalled = False
            self._work(peer, peer.session, now)

    def _freed(self, peer: Peer) -> bytes:
        """The notice that the client may use segments again."""
        numbers = []
        while peer.freed:  # emptied one by one: another thread may add to it
            numbers.append(peer.freed.popleft())
        message = encode(Freed(0, self._state.revision, tuple(numbers)))
        return _pack(len(message), 0) + message

    # --- bulk ---

    def _move(self, peer: Peer, transfer: Transfer) -> None:
        """Let a thread go on with it. Nothing when one does so already: what epoll said of this
        socket is older than that, then.
        """
        if peer.incoming_moves if transfer.incoming else peer.outgoing_moves:
            return
        self._movers.submit(transfer)
        self._moving[transfer] = peer
        if transfer.incoming:
            peer.incoming_moves = True
        else:
            peer.outgoing_moves = True

    def _given_back(self, transfer: Transfer, now: float) -> None:
        """A thread can do no more for this transfer."""
        peer = self._moving[transfer]
        if transfer.incoming:
            peer.incoming_moves = False
        else:
            peer.outgoing_moves = False
        if peer.session is not None:
            peer.session.heard = self._now()
        try:
            if peer.mask < 0 or transfer.outcome == "gone":
                raise Gone
            if transfer.outcome == "turn":
                self._move(peer, transfer)
                return
            if transfer.outcome != "waiting":
                del self._moving[transfer]
                if transfer.incoming:
                    self._taken_in(peer, transfer, now)
                else:
                    peer.outgoing = None
                    del transfer
                    self._can_send(peer, now)
        except Gone as error:
            self._gone(peer, error, now)
        except OSError:
            self._drop(peer)
        except Exception:
            self._failed(peer)
        else:
            self._rewatch(peer)

    def _taken_in(self, peer: Peer, transfer: Transfer, now: float) -> None:
        arriving = peer.arriving
        assert arriving is not None
        assert arriving.request is not None
        peer.incoming = peer.arriving = None
        if transfer.outcome == "whole":
            segment = transfer.segment
            del transfer
            self._arrived(peer, arriving, segment, now)
            return
        self._state.release(arriving.reserved)
        if transfer.at < transfer.size:
            peer.arriving = Arriving(None, transfer.size - transfer.at)
        message = encode(self._no_memory(arriving.request, _no_memory()))
        peer.send(_pack(len(message), 0) + message)

    # --- the end ---

    def _wind_up(self, reason: str, drain: float) -> None:
        """Tell everybody; send what is still to be sent, for `drain` seconds at most."""
        until = self._now() + drain
        for fd, listener in self._listeners.items():
            self._epoll.unregister(fd)
            listener.close()
        self._listeners.clear()
        for peer in list(self._gate.strangers):
            self._drop(peer)
        message = encode(Closing(0, self._state.revision, reason))
        notice = _pack(len(message), 0) + message
        for peer in [peer for peers in self._by_session.values() for peer in peers]:
            try:
                peer.send(notice)
                peer.closing = True
                self._watch(peer, peer.wanted())
            except (Gone, OSError):
                self._drop(peer)
        while True:
            for peer in [
                peer for peer in self._peers.values() if not peer.out and peer.outgoing is None
            ]:
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
            self._given_back(transfer, self._now())
        for listener in self._listeners.values():
            listener.close()
        while self._adopted:
            self._adopted.popleft().close()
        for session in list(self._pidfds):
            self._unwatch(session)
        self._epoll.close()
        wake, self._wake = self._wake, -1
        os.close(wake)
        if self._reserve >= 0:
            os.close(self._reserve)
        self._pool.close()
        for segment in list(self._segments):
            segment.close()


def prepare(sock: socket.socket) -> None:
    """Options of a listener, which the connections accepted from it inherit (tcp(7)), or of a
    connection.
    """
    sock.setblocking(False)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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


def _large_of(reply: Reply) -> Large | None:
    """Return the large value of a reply, which travels beside it."""
    value: Any = reply.value if type(reply) is Value else b""
    return None if type(value) is bytes else value


def _expect(peer: Peer, session: Session, seq: int) -> None:
    """This request waits: its answer goes to the newest connection on which it came. (A copy of it
    may still be read from an older one.)
    """
    if seq in session.waiting:
        former = session.routes.get(seq)
        if former is None or former.number <= peer.number:
            session.routes[seq] = peer


def _is_repeated(session: Session, seq: int) -> bool:
    """Whether `apply` answers this request as before, whatever its value."""
    return seq in session.replies or seq <= session.acked_in_slot(seq)


def _is_scarce(segment: Segment) -> bool:
    """Whether descriptors have become scarce with this one: the kernel gives out the lowest number
    that is free.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit != resource.RLIM_INFINITY and segment.fileno() >= limit - limit // RESERVE


def _no_memory() -> OSError:
    return OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def _source(sock: socket.socket) -> str | None:
    """Where a connection comes from, by number: no name is ever looked up. None for another user's
    process.
    """
    if sock.family != socket.AF_UNIX:
        return str(sock.getpeername()[0])
    return f"process {listener_of(sock)}" if uid_of(sock) == os.geteuid() else None


def _process(sock: socket.socket, session: Session) -> int:
    """The process at the other end of a Unix socket, if the session is its own; 0 where that is not
    certain: it could be a proxy, or see itself under another number, in another namespace."""
    if sock.family != socket.AF_UNIX:
        return 0
    pid, identity = listener_of(sock), session.identity
    return pid if pid == identity.pid and identity.host == os.uname().nodename else 0


def _read_off(peer: Peer) -> None:
    try:
        for _ in range(READ_OFF):
            if peer.incoming_moves or not peer.sock.recv(65536):
                return
    except OSError:  # nothing more
        pass
