"""A lease on the server: kept alive, lost visibly, releasing what it held; and the pool of
connections by which it is used.

**Slots.** A call takes a slot from the idle ones, sends its request on the slot's connection, waits
for the reply, reads it, and puts the slot back. A slot has one request at a time and numbers of its
own for them, so that nothing is shared between two calls: a thread, or a signal handler in the
middle of a call, takes another slot. (So has a session of NFS 4.1: RFC 8881, section 2.10.6.)

**Exactly once.** A request whose connection broke is sent again, with the same number, on the
slot's next connection. The server keeps the last reply of each slot, and answers a number that it
has seen with that reply.

**After an exception** (a signal handler's, a timeout) the connection is closed, and the
keep-alive's thread tells the server that nobody waits for this request: what it was granted, or
will be, is taken back.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from rallypoint import __version__
from rallypoint.clock import Clock
from rallypoint.errors import RallypointError, StoreClosed, StoreTimeout, StoreUnreachable
from rallypoint.host.unix_sockets import listener_of
from rallypoint.store.address import Address
from rallypoint.store.client import deferred_log
from rallypoint.store.client.call import Call, asked_of, grace, outcome_of, told_of
from rallypoint.store.client.connect import DialFailed, Opened, OpenSocket
from rallypoint.store.client.connect_errors import is_stopped, stopped_server
from rallypoint.store.client.connection import (
    Connection,
    ConnectionBroken,
    ServerCloses,
    TooLate,
    framed,
)
from rallypoint.store.client.failures import Loss, refused
from rallypoint.store.client.keepalive import KeepAlive
from rallypoint.store.client.lease import Leases
from rallypoint.store.client.reconnect import Reach
from rallypoint.wire.frames import HEADS, header
from rallypoint.wire.handshake import NONCE_BYTES, SESSION_BYTES, Joining
from rallypoint.wire.messages import (
    LENDS,
    SLOT_BITS,
    TAGS,
    AnyReply,
    Bye,
    Cancel,
    Failed,
    Identity,
    Limits,
    Ping,
    Refusal,
    Request,
    decode_request,
    encode,
)
from rallypoint.wire.values import Parts

BYE_SECONDS = 1.0
"""Seconds for the server's answer to the end of a session. Without it everything is released when
the lease is over.
"""

PIPELINE = 64
"""Requests of `request_many` that are sent before the first of their replies is read."""

PIPELINE_BYTES = 32 * 1024
"""Bytes of them: less than any socket's buffer. The server stops reading from a client that does
not read.
"""

LONGEST_POLL = 86_400.0
"""Seconds. The kernel counts the milliseconds of a poll in 31 bits."""

QUIET_SECONDS = 2.0
"""Seconds of trying to connect for the first time, before a line says so: a server that is being
started is there by then.
"""

FINAL = frozenset(
    {"foreign", "wrong-secret", "version-skew", "wrong-job", "store-relayed", "store-full"}
)
"""Failures that another attempt would only repeat."""

CLOSED = "this store object was closed"

Answer = tuple[AnyReply, memoryview | None]


class Received(Protocol):
    """What a caller gives along that must know of a reply whatever interrupts it: an exception
    leaves it here, or the server takes it back.
    """

    reply: AnyReply | None
    session: Session | None


class Slot:
    """One of the requests that a session may have under way at a time. Belongs to whoever has taken
    it from the idle ones.
    """

    __slots__ = (
        "_call", "_on_death", "connected_at", "connection", "counts", "given_up", "into", "owed", "received_bytes", "sent_bytes", "seq", "settled"
    )  # fmt: skip

    def __init__(self, number: int, on_death: Callable[[object], None]) -> None:
        """`on_death`: called when a call has ended without settling its request, whatever
        interrupted that.
        """
        self.seq = self.settled = (
            number << SLOT_BITS
        )  # the last request's number, and the last that was answered or cancelled
        self.connection: Connection | None = None
        self.connected_at = 0.0  # monotonic time
        self.into: Received | None = None
        self.given_up = False  # nobody waits for the request under way
        # what the server is to be told before the next request: that nobody waits for the former
        # one
        self.owed = b""
        self._on_death = on_death
        self._call: weakref.ref[Call] | None = None  # the one under way
        self.counts = [0] * (max(TAGS.values()) + 1)  # requests by kind: at its place in `TAGS`
        self.sent_bytes = self.received_bytes = 0  # by connections that are gone

    def begin(
        self,
        kind: type[Request],
        fields: tuple[Any, ...],
        began: float,
        deadline: float,
        patience: float = 0.0,
        value: Parts | None = None,
        batch: int = 0,
    ) -> Call:
        """The next request. All before it, of `batch` before that, are answered or given up."""
        tag = TAGS[kind]
        seq = self.seq + 1
        message = encode((tag, seq, seq - batch - 1, *fields))
        if value is None:
            size = len(message)
            message = HEADS[size] + message if size < len(HEADS) else header(size) + message
        call = Call(kind, fields, seq, message, began, deadline, patience, value)
        self.counts[tag] += 1
        self._call = weakref.ref(call, self._on_death)
        self.seq = seq
        return call

    @property
    def is_abandoned(self) -> bool:
        """Whether a request is under way for which nobody waits."""
        return self.given_up or (self._call is not None and self._call() is None)

    def settle(self) -> None:
        """All requests are answered, or need no cancelling."""
        self.settled, self._call, self.into, self.given_up = self.seq, None, None, False

    def cancel(self) -> None:
        """Let the next request tell the server that nobody waits for those before it."""
        self.disconnect()
        if self.into is not None and self.into.reply is not None:
            self.settled = self.seq  # its caller has it
        self.owed = b"".join(
            [framed(Cancel(0, 0, seq)) for seq in range(self.settled + 1, self.seq + 1)]
        )

    def disconnect(self) -> None:
        """Close the connection; the next request opens another one."""
        connection, self.connection = self.connection, None
        if connection is not None:
            self.sent_bytes += connection.sent_bytes
            self.received_bytes += connection.received_bytes
            connection.close()


class End:
    """Why a session is over. `told`: somebody has been told."""

    def __init__(
        self,
        headline: str,
        loss: Loss | None = None,
        happened: frozenset[int] | None = None,
        *,
        undone: bool = False,
        again: str = "",
    ) -> None:
        """`loss`: it was lost, and not closed; `happened`: what the server did of what it may not
        have answered, when it knows. `undone`: what was sent once and has no answer was not carried
        out. `again`: said once more if the next session finds no server."""
        self.headline = headline
        self.told = False
        self.again = again
        self._loss = loss
        self._happened = happened
        self._undone = undone

    def error(self, call: Call | None) -> RallypointError:
        """For the caller of a request that has no answer, or, without one, for the next who
        asks.
        """
        outcome = outcome_of(call, self._happened) if call is not None else "did not happen"
        if self._loss is not None:
            return (
                self._loss.error(outcome, told_of(call, outcome))
                if call is not None
                else self._loss.error(outcome)
            )
        if call is not None and self._undone and call.tried < 2:
            outcome = "did not happen"
        return StoreClosed("store-closed", self.headline, outcome=outcome)


class SessionOver(Exception):
    """The session ended while a request was under way, or before."""


class Settings(msgspec.Struct, frozen=True):
    """With which a session is made, and the next one if it is lost."""

    address: Address
    secret: bytes
    identity: Identity
    timeout: float  # seconds, for connecting and for every answer that waits for nobody
    ttl: float  # seconds
    job: str = ""
    same_host: bool = True  # False: stay on the given address, and use no shared memory
    clock: Clock = msgspec.field(default_factory=Clock)
    open_socket: OpenSocket | None = None


class Session:
    """See the module. Thread-safe. Belongs to the process that made it: a forked child makes its
    own (`Client` sees to that).
    """

    def __init__(self, settings: Settings, former: Session | None = None) -> None:
        """`former`: the one that was lost before."""
        self.settings = settings
        self.address = settings.address
        self.id = os.urandom(SESSION_BYTES)
        self.end: End | None = None
        self.foreign = False  # it is the parent's, and this a forked child
        self.timeout = settings.timeout
        self.ttl = settings.ttl
        self.limits: Limits | None = former.limits if former is not None else None
        self.reconnects: int = former.reconnects if former is not None else 0
        self.number: int = former.number + 1 if former is not None else 1
        self.news: deferred_log.News = former.news if former is not None else deferred_log.News()
        self._before: tuple[list[int], int, int] = (
            former.totals() if former is not None else ([0] * len(LENDS), 0, 0)
        )
        self._server: bytes = (
            former._server if former is not None else b""
        )  # one that is started again is another one, and empty
        self._server_ended = (
            former.end.again if former is not None and former.end is not None else ""
        )
        self._server_pid = 0  # if it can be seen: on this host
        self._clock = settings.clock
        self._now = settings.clock.monotonic
        self._confirmed = self._now()  # the server had a sign of life that was sent at this time
        self._welcomed = False
        self._disconnected = False  # a connection broke, and none has been made since
        self._lost_at = 0.0  # monotonic time of that
        self._mutex = threading.RLock()  # for `end`, and which connections it has to interrupt
        self._numbers = itertools.count()  # of slots
        self._slots: list[Slot] = []
        self._idle: deque[Slot] = (
            deque()
        )  # with connections; the one that was used last stands last
        self._unconnected: deque[Slot] = deque()
        self.leases = Leases(self, self._now, lambda: self._confirmed)
        self.keep_alive = KeepAlive(self)
        self._set_ttl(settings.ttl)
        self._reach = Reach(
            settings.address,
            same_host=settings.same_host,
            patience=settings.timeout,
            clock=settings.clock,
            open_socket=settings.open_socket,
        )

    # --- asking ---

    def request(
        self,
        kind: type[Request],
        fields: tuple[Any, ...],
        wait: float | None = None,
        value: Parts | None = None,
        into: Received | None = None,
    ) -> Answer:
        """Send a request and return its reply, with the bytes of a large value beside it.

        `fields` are those after `seq` and `acked`. `value`: a large value; at its place among the
        fields stands b"". `wait`: the seconds that the server may let it wait, as in its `timeout`
        field (math.inf: for ever); None or 0: it is answered at once. `into`: gets the reply as
        well, before anything else happens: after an exception it is there, or else the server takes
        back what it gave. Raises StoreTimeout, SessionLost, StoreClosed, StoreUnreachable, and what
        the server refused with.
        """
        began = self._now()
        deadline = began + (wait + grace(wait) if wait else self.timeout)
        calls: list[Call] = []
        slot = self._take()
        try:
            slot.into = into
            call = slot.begin(kind, fields, began, deadline, 0.0 if wait else self.timeout, value)
            calls.append(call)
            reply, body = self._exchange(slot, call)
            if into is not None:
                into.session, into.reply = self, reply
        except BaseException as error:
            if into is not None and into.reply is not None:
                self._put_back(slot)
                raise
            self._give_up(slot, calls, cancel=kind.changes or bool(wait))
            if isinstance(error, (TooLate, SessionOver)):
                raise self._error(calls[0]) from None
            raise
        self._put_back(slot)
        if self.news.lines:
            self.news.tell()
        if type(reply) is Failed:
            raise refused(kind, fields, reply)
        return reply, body

    def request_many(
        self, requests: Sequence[tuple[type[Request], tuple[Any, ...]]]
    ) -> list[Answer]:
        """Send several requests that wait for nobody without waiting in between, and return their
        replies in the same order.

        After an exception those before it in the order have happened, of the others some may have.
        """
        answers: list[Answer] = []
        while len(answers) < len(requests):
            slot = self._take()
            calls: list[Call] = []
            received: list[Answer] = []
            try:
                self._begin_many(slot, requests, len(answers), calls)
                self._exchange_many(slot, calls, received)
            except BaseException as error:
                self._give_up(slot, calls, cancel=True)
                if isinstance(error, (TooLate, SessionOver)):
                    raise self._error(calls[len(received)]) from None
                raise
            self._put_back(slot)
            answers += received
        return answers

    def _begin_many(
        self,
        slot: Slot,
        requests: Sequence[tuple[type[Request], tuple[Any, ...]]],
        first: int,
        calls: list[Call],
    ) -> None:
        """The next batch: a large value alone, or small requests."""
        began = self._now()
        size = 0
        for kind, fields in requests[first : first + PIPELINE]:
            value = None
            if len(fields) > 1 and type(fields[1]) is Parts:
                if calls:
                    return
                value = fields[1]
                fields = (fields[0], b"", *fields[2:])
            call = slot.begin(
                kind, fields, began, began + self.timeout, self.timeout, value, len(calls)
            )
            calls.append(call)
            size += len(call.message)
            if value is not None or size > PIPELINE_BYTES:
                return

    def _exchange(self, slot: Slot, call: Call) -> Answer:
        """Send the request, on as many connections as it takes, until its reply is there."""
        while True:
            try:
                connection = slot.connection or self._connect(slot, call.deadline)
                call.tried += 1
                if call.value is None:
                    connection.send(slot.owed + call.message, call.deadline)
                else:
                    self._send_value(slot, connection, call, call.value)
                call.sent = True
                answer = connection.receive(
                    call.seq,
                    call.deadline,
                    call.patience,
                    self.keep_alive.interval,
                    self._silence,
                    lends=LENDS[TAGS[call.kind]],
                )
            except ConnectionBroken as broken:
                self._lost_connection(slot, str(broken))
            except ServerCloses as closes:
                self._server_closes(str(closes))
                raise SessionOver from None
            else:
                slot.owed = b""
                if call.began > self._confirmed:
                    self._confirm(call.began)
                return answer

    def _exchange_many(self, slot: Slot, calls: Sequence[Call], received: list[Answer]) -> None:
        """The same for several. Those that have an answer are not sent again."""
        while len(received) < len(calls):
            left = calls[len(received) :]
            if len(left) == 1:
                received.append(self._exchange(slot, left[0]))
                return
            try:
                connection = slot.connection or self._connect(slot, left[0].deadline)
                connection.send(
                    slot.owed + b"".join([call.message for call in left]), left[0].deadline
                )
                for call in left:
                    call.sent = True
                    call.tried += 1
                for call in left:
                    deadline = max(call.deadline, self._now() + self.timeout)
                    received.append(
                        connection.receive(
                            call.seq,
                            deadline,
                            call.patience,
                            self.keep_alive.interval,
                            self._silence,
                            lends=True,
                        )
                    )
            except ConnectionBroken as broken:
                self._lost_connection(slot, str(broken))
            except ServerCloses as closes:
                self._server_closes(str(closes))
                raise SessionOver from None
            else:
                slot.owed = b""
                self._confirm(calls[0].began)

    def _send_value(self, slot: Slot, connection: Connection, call: Call, value: Parts) -> None:
        """Send a request with a large value: by shared memory, or else by the socket. Its answer is
        waited for from then on.
        """
        if connection.shared:
            try:
                number, segment = connection.fill(value)
            except OSError as error:
                if isinstance(error, RallypointError) or error.errno is None:
                    raise  # a signal handler's
            else:
                request = msgspec.structs.replace(
                    decode_request(call.message), shared=value.size, segment=number
                )
                connection.send_shared(slot.owed, encode(request), number, segment, call.deadline)
                call.deadline = max(call.deadline, self._now() + call.patience)
                return
        connection.send_value(slot.owed, call.message, value, call.deadline, call.patience)
        call.deadline = max(call.deadline, connection.moved + call.patience)

    # --- slots ---

    def _take(self) -> Slot:
        """An idle slot, the one that was used last if there is a choice, or a new one."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._take_unconnected()

    def _take_coldest(self) -> Slot:
        """The idle slot that was not used for longest: a thread that asks all the time keeps its
        own.
        """
        try:
            return self._idle.popleft()
        except IndexError:
            return self._take_unconnected()

    def _take_unconnected(self) -> Slot:
        try:
            return self._unconnected.pop()
        except IndexError:
            slot = Slot(next(self._numbers), self._on_death)
            self._slots.append(slot)
            return slot

    def _on_death(self, _: object) -> None:
        self.keep_alive.ring()

    def _put_back(self, slot: Slot) -> None:
        slot.settle()
        (self._idle if slot.connection is not None else self._unconnected).append(slot)
        if self.end is not None:
            self.drop_idle()

    def _give_up(self, slot: Slot, calls: Sequence[Call], *, cancel: bool) -> None:
        """Nobody will look at the replies to these requests any more: let the server take back what
        they gave.
        """
        tried = any(call.tried for call in calls)
        if tried:
            slot.disconnect()
        if tried and cancel and self.end is None:
            slot.given_up = True
            self.keep_alive.ring()
        else:
            self._put_back(slot)

    def _error(self, call: Call) -> RallypointError:
        """Why a request has no answer."""
        end = self.end
        if end is None:
            return self._timed_out(call)
        end.told = True
        if self.was_closed:
            stay_when_leaving()
        return end.error(call)

    def _timed_out(self, call: Call) -> StoreTimeout:
        outcome = outcome_of(call)
        took = self._now() - call.began
        headline = (
            f"{asked_of(call)} got no answer from the store at {self.address} within {took:.1f} s"
        )
        why = [told_of(call, outcome)]
        problem = self._reach.problem(look=False) if self._reach.failing else None
        if problem is not None:
            why.append(str(problem))
        elif not call.sent:
            why.append("the server did not take what was sent to it")
        stopped, help = self._stopped(problem)
        return StoreTimeout(
            "store-timeout", headline, outcome=outcome, why=(*why, *stopped), help=help
        )

    def _stopped(
        self, problem: StoreUnreachable | None
    ) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """Why and help when the server's process is seen to stand still. `problem`: with reaching
        it, if it was not reached.
        """
        pid = self._server_pid
        if (
            not pid
            or (problem is not None and problem.code == "port-refused")
            or not is_stopped(pid)
        ):
            return (), ()
        why, help = stopped_server(pid)
        return (why,), help

    # --- connecting ---

    def connect(self) -> None:
        """Open the first connection, trying again while nobody listens there, until `timeout`.
        Raises StoreUnreachable.
        """
        slot = self._take()
        try:
            self._connect(slot, self._now() + self.timeout, first=True)
        except TooLate:
            raise self._reach.problem() from None
        except SessionOver:
            raise self._over().error(None) from None
        except BaseException:
            slot.disconnect()
            raise
        self._put_back(slot)

    def _connect(self, slot: Slot, deadline: float, *, first: bool = False) -> Connection:
        """A connection for this slot. Raises TooLate, SessionOver; StoreUnreachable for what
        another attempt would only repeat.
        """
        began = self._now()
        told = not first
        while True:
            if self.end is not None:
                raise SessionOver
            now = self._now()
            if now >= deadline:
                raise TooLate
            if not told and now - began >= QUIET_SECONDS and self._reach.failing:
                told = True
                deferred_log.notice(
                    f"{self._reach.problem(look=False)}; still trying, for {deadline - now:.0f} s more"
                )
            wait = self._reach.pause(now, deadline, first=first)
            if wait > 0.0:
                select.poll().poll(wait * 1000.0)
                continue
            try:
                opened = self._reach.open(self._greeting, self._welcomed, deadline)
            except DialFailed as failed:
                self._failed(failed, first)
            else:
                return self._opened(slot, opened, now)

    def _greeting(self, resume: bool) -> Joining:
        return Joining(
            self.settings.secret,
            self.settings.job,
            __version__,
            session=self.id,
            nonce=os.urandom(NONCE_BYTES),
            identity=self.settings.identity,
            ttl=self.ttl,
            resume=resume,
            acked=0,
        )

    def _opened(self, slot: Slot, opened: Opened, began: float) -> Connection:
        """Take a connection into use, whose greeting was sent after `began`."""
        welcome = opened.welcome
        connection = Connection(
            opened, self._clock, shared_memory=self._reach.local_allowed, on_sign=self._confirm
        )
        if self._server not in (
            b"",
            welcome.server,
        ):  # after an outage of more than a ttl: nobody was told that the data is gone
            connection.close()
            self._lose(Refusal("session-lost", "", known=False))
            raise SessionOver
        with self._mutex:
            if self.end is not None:
                connection.close()
                raise SessionOver
            slot.connection = connection
            slot.connected_at = self._now()
        self.keep_alive.start()
        self._server, self._server_ended, self._server_pid = (
            welcome.server,
            "",
            listener_of(opened.sock),
        )
        self.limits = welcome.limits
        self._set_ttl(welcome.ttl)  # there is a shortest and a longest one
        self._welcomed = True
        self._confirm(began)
        if self._disconnected:
            self._disconnected = False
            self.reconnects += 1
            self.news.add(
                "warning", f"connected to the store at {self.address} again, by {connection.where}"
            )
            self.keep_alive.ring()
        return connection

    def _set_ttl(self, ttl: float) -> None:
        self.ttl = ttl
        self._silence = min(ttl, LONGEST_POLL)
        self.keep_alive.set_interval()

    def _failed(self, failed: DialFailed, first: bool) -> None:
        """An attempt failed. Raises when there is no use in another one."""
        told = failed.told
        if told.reason == "session-lost" and told.refusal is not None:
            self._lose(told.refusal)
        elif told.reason == "store-closed" and not first:
            self._server_closes("")
        elif told.reason in FINAL and not (told.refusal is not None and told.refusal.passing):
            raise self._reach.problem()
        elif self._server_ended and not first:
            self._finish(End(self._server_ended, again=self._server_ended))
        elif not first and self._now() - self._confirmed > max(
            self.leases.longest(self.ttl), self.timeout
        ):
            self._lose(Refusal("session-lost", "", known=False), self._reach.problem())

    def _lost_connection(self, slot: Slot, why: str) -> None:
        slot.disconnect()
        # A connection from before the last loss was lost with that one: it is not told again.
        if self.end is None and not self._disconnected and slot.connected_at >= self._lost_at:
            self._disconnected = True
            self._lost_at = self._now()
            self._reach.forget()
            self.news.add("warning", f"lost the connection to the store at {self.address}: {why}")

    # --- the end ---

    def _finish(self, end: End, last: Slot | None = None) -> None:
        """Nothing can be asked any more; who waits is woken, and told. `last`: the caller's own, on
        which something is still said.
        """
        with self._mutex:
            if self.end is not None:
                return
            self.end = end
            connections = [slot.connection for slot in self._slots if slot is not last]
        self.leases.end(end.headline)
        for connection in connections:
            if connection is not None:
                connection.interrupt()
        self.keep_alive.ring()

    def _lose(self, refusal: Refusal, unreached: StoreUnreachable | None = None) -> None:
        """All that this session held is released; everybody who waits is told, or else the next one
        who asks.
        """
        silent = self._now() - self._confirmed
        happened = frozenset(refusal.happened) if refusal.known else None
        stopped = self._stopped(unreached) if unreached is not None else ((), ())
        loss = Loss(
            str(self.address),
            self.ttl,
            silent,
            known=refusal.known,
            unreached=unreached,
            stopped=stopped,
        )
        if unreached is None and not refusal.known:
            self._server = b""  # it is told now that this is another one
        self.news.add("error", loss.headline)
        self._finish(End(loss.headline, loss, happened))

    def _server_closes(self, text: str) -> None:
        """The server stops in good order. Whoever asks after that is told so again if one attempt
        to connect finds no server, and is served by one that was started again."""
        headline = (
            f"the store at {self.address} was closed: {text}"
            if text
            else f"the store at {self.address} is closing"
        )
        self._server = b""  # another one is expected
        self._finish(End(headline, undone=bool(text), again=headline))

    def close(self, wait: float = BYE_SECONDS) -> None:
        """End the session: the server releases what it held. Threads that wait get StoreClosed. May
        be called again. `wait`: seconds for the server's answer. In a forked child it does nothing:
        the session is the parent's."""
        if self.foreign or self.end is not None:
            return
        slot = self._take()
        end = End(CLOSED)
        try:
            began = self._now()
            call = slot.begin(Bye, (), began, began + wait)
            if slot.connection is None and wait > 0.0 and self._welcomed:
                self._connect(slot, call.deadline)
            self._finish(end, slot)
            if slot.connection is not None:
                slot.connection.send(slot.owed + call.message, call.deadline)
                if wait > 0.0:
                    slot.connection.receive(
                        call.seq, call.deadline, 0.0, LONGEST_POLL, LONGEST_POLL, lends=False
                    )
        except (ConnectionBroken, ServerCloses, TooLate, SessionOver, StoreUnreachable):
            pass
        finally:
            self._finish(end)
            slot.disconnect()
            self.drop_idle()

    def drop_idle(self) -> None:
        """The session is over: close what nobody uses."""
        while self._idle:
            try:
                self._idle.pop().disconnect()
            except IndexError:  # another thread does the same
                return

    def abandon(self) -> None:
        """In a forked child: the session is the parent's, and so are the connections, of which the
        child closes its descriptors.
        """
        self.foreign = True
        self._mutex = threading.RLock()
        self.leases.end("the parent process has it, not this forked child")
        self.end = self.end or End("the call was begun in the parent process, before the fork")
        for slot in self._slots:
            if slot.connection is not None:
                slot.connection.after_fork()

    # --- for the keep-alive ---

    def _confirm(self, sent: float) -> None:
        """The server had a sign of life that was sent at this time. What was over before does not
        come back by it.
        """
        if self.leases.held:
            self.leases.look()
        if sent > self._confirmed:
            self._confirmed = sent

    @property
    def confirmed(self) -> float:
        """When the last sign of life was sent that the server is known to have had."""
        return self._confirmed

    @property
    def lease_left(self) -> float:
        """Seconds for which the server surely keeps this session, counted from when the last
        confirmed sign of life was *sent*.
        """
        return self._confirmed + self.ttl - self._now()

    def ping(self, seconds: float) -> None:
        """Give a sign of life, and wait for its answer; connect for it, if that has to be done."""
        self.tell(Ping, (), seconds)

    def cancel_abandoned(self, seconds: float) -> None:
        """Tell the server which requests nobody waits for any more: calls that an exception ended,
        or a timeout.
        """
        for slot in list(self._slots):
            if slot.is_abandoned:
                slot.cancel()
                self._tell(slot, Ping, (), seconds)

    def tell(self, kind: type[Request], fields: tuple[Any, ...], seconds: float) -> bool:
        """Ask for something of which only matters that it was answered; whether it was."""
        return self._tell(self._take_coldest(), kind, fields, seconds)

    def _tell(
        self, slot: Slot, kind: type[Request], fields: tuple[Any, ...], seconds: float
    ) -> bool:
        began = self._now()
        call = slot.begin(kind, fields, began, began + seconds)
        answered = False
        try:
            self._exchange(slot, call)
            answered = True
        except TooLate:
            self._lost_connection(slot, f"no sign of life from the server for {seconds:.1f} s")
        except SessionOver:
            pass
        finally:
            if answered:
                slot.settle()
                self._idle.appendleft(slot)
            else:
                slot.disconnect()
                if slot.owed:
                    slot.given_up = True
                else:
                    self._put_back(slot)
        return answered

    def look(self) -> None:
        """Take in what has arrived on idle connections, and close those that were not used for a
        lease's length; one of them stays.
        """
        unused = self._now() - self.ttl
        for _ in range(len(self._idle)):
            slot = self._take_coldest()
            try:
                if slot.connection is not None:
                    slot.connection.look()
                    slot.connection.trim()
                    if slot.connection.heard < unused and self._idle:
                        slot.disconnect()
            except ConnectionBroken as broken:
                self._lost_connection(slot, str(broken))
            except ServerCloses as closes:
                self._server_closes(str(closes))
                slot.disconnect()
            (self._idle if slot.connection is not None else self._unconnected).append(slot)

    # --- about ---

    def _over(self) -> End:
        assert self.end is not None
        return self.end

    @property
    def was_closed(self) -> bool:
        """Whether this process has closed it, or its parent had before the fork."""
        return self.end is not None and self.end.headline == CLOSED

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return any(slot.connection is not None for slot in list(self._slots))

    @property
    def local(self) -> bool:
        """Whether the connections are Unix sockets."""
        return any(
            slot.connection is not None and slot.connection.local for slot in list(self._slots)
        )

    @property
    def where(self) -> str:
        """What the connections lead to: a path, or an address; "" without one."""
        return next(
            (slot.connection.where for slot in list(self._slots) if slot.connection is not None), ""
        )

    def totals(self) -> tuple[list[int], int, int]:
        """Requests by kind, and bytes sent and received beside what went by shared memory; of all
        sessions of this store object.
        """
        counts, sent, received = self._before
        counts = list(counts)
        for slot in list(self._slots):
            counts = [one + more for one, more in zip(counts, slot.counts, strict=True)]
            sent += slot.sent_bytes
            received += slot.received_bytes
            connection = slot.connection
            if connection is not None:
                sent += connection.sent_bytes
                received += connection.received_bytes
        return counts, sent, received


_leaving = False


def leave() -> None:
    """The interpreter is about to end, and closes its stores."""
    global _leaving
    _leaving = True


def stay_when_leaving() -> None:
    """At the end of the interpreter a daemon thread stays where it is, as in every other wait: the
    program has not closed the store, and a traceback at the end of a healthy job is a false alarm.
    """
    if _leaving and threading.current_thread().daemon:
        never = threading.Lock()
        never.acquire()
        never.acquire()
