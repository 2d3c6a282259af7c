"""A lease on the server, kept alive and lost visibly, with the pool of connections that uses it.

A call takes a slot (`slots.py`) from the idle ones, sends its request on the slot's connection, waits
for the reply, reads it, and puts the slot back.

**Exactly once.** A request whose connection broke is sent again, with the same number, on the
slot's next connection. The server keeps the last reply of each slot, and answers a number that it
has seen with that reply.

**After an exception** (a signal handler's, a timeout) the connection is closed, and the thread of
the keep-alive tells the server that nobody waits for this request: the server takes back what it
granted. The same thread finds a slot whose `Ticket` was lost between two steps.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Sequence
from math import inf
from typing import Any, Literal, NamedTuple

from rallypoint import __version__
from rallypoint.clock import Clock
from rallypoint.errors import Advice, RallypointError, StoreTimeout, StoreUnreachable
from rallypoint.host import threads
from rallypoint.host.unix_sockets import listener_of
from rallypoint.store.address import Address
from rallypoint.store.client import deferred_log
from rallypoint.store.client.call import GRACE, Call, asked_of, outcome_of, told_of
from rallypoint.store.client.connect import DialFailed, Failure, Opened, OpenSocket
from rallypoint.store.client.connect_errors import stopped
from rallypoint.store.client.connection import (
    LONGEST_POLL,
    Answer,
    Connection,
    ConnectionBroken,
    ServerCloses,
    TooLate,
)
from rallypoint.store.client.failures import SessionEnd, lost_session
from rallypoint.store.client.keepalive import KeepAlive
from rallypoint.store.client.lease import SURE, Leases
from rallypoint.store.client.reconnect import Reach
from rallypoint.store.client.slots import Asked, ReplyKeeper, Slot, Slots, Ticket
from rallypoint.wire.handshake import NONCE_BYTES, SESSION_BYTES, Joining
from rallypoint.wire.messages import (
    TAGS,
    Bye,
    Identity,
    Limits,
    Ping,
    Refusal,
    Request,
)

BYE_SECONDS = 1.0
"""Seconds for the server's answer to the end of a session. Without it everything is released when
the lease is over.
"""

GIVEN_UP = 0.8
"""Share of the ttl after which a connection on which nothing comes is given up: a firewall that
has forgotten it lets another one pass, and the session, and a call of 10 s, live on."""

QUIET_SECONDS = 2.0
"""Seconds of trying to connect for the first time, before a line says so: a server that is being
started is there by then.
"""

FINAL = frozenset(
    (
        *("foreign", "wrong-secret", "version-skew", "wrong-job", "store-relayed", "store-full"),
        *("tls-mismatch", "tls-intercepted"),
    )
)
"""Failures that another attempt would only repeat. Where a server has several addresses, somebody
else may have all but one of them."""

CLOSED = "this store object was closed"


class Options(NamedTuple):
    """Settings of a store object, for its next session and for the child that makes it again."""

    address: Address
    rank: int | None
    job: str
    timeout: float  # seconds, for connecting and for every answer that waits for nobody
    ttl: float  # seconds
    allow_pickle: bool
    strict: bool
    same_host: bool  # False: stay on the given address, and use no shared memory
    signs: int = 3  # of life per ttl, of the session or the shortest lease in it
    orphan: float = inf  # seconds that the session lives on the server without a connection
    others: tuple[Address, ...] = ()  # that the server may have instead of `address`

    @property
    def identity(self) -> Identity:
        """Identity of this process, also in a forked child that has not used the store yet."""
        return Identity(os.uname().nodename, os.getpid(), self.rank)


class SessionOver(Exception):
    """The session ended while a request was under way, or before."""


class Session:
    """See the module. Thread-safe. Belongs to the process that made it: a forked child makes its
    own (`Client` sees to that).
    """

    def __init__(
        self,
        options: Options,
        secret: bytes,
        open_socket: OpenSocket | None = None,
        former: Session | None = None,
    ) -> None:
        """Begin a session without a connection. `former`: the one that was lost before."""
        self.address = options.address
        self.id = os.urandom(SESSION_BYTES)
        self.end: SessionEnd | None = None
        self.foreign = False  # it is the parent's, and this a forked child
        self.timeout = options.timeout
        self.ttl = options.ttl
        self.orphan = options.orphan
        self.signs = options.signs
        self.limits: Limits | None = None
        self.reconnects = 0
        self.number = 1
        self.news = deferred_log.News()
        self._before: tuple[list[int], int, int] = [0] * (max(TAGS.values()) + 1), 0, 0  # totals
        self._server = b""  # one that is started again is another one, and empty
        self._server_ended = ""
        if former is not None:
            self.limits, self.reconnects, self.news = former.limits, former.reconnects, former.news
            self.number = former.number + 1
            self._before = former.totals()
            self._server = former._server
            self._server_ended = former._over().again
        self._options = options
        self._secret = secret
        self._server_pid = 0  # if it can be seen: on this host
        self._clock = Clock()
        self._now = self._clock.monotonic
        self._welcomed = False
        self._disconnected = False  # a connection broke, and none has been made since
        self._lost_at = 0.0  # monotonic time of that
        self._alone = inf  # monotonic time since when the server keeps it without a connection
        self._mutex = threading.RLock()  # for `end`, and which connections it has to interrupt
        self.slots = Slots(self._on_loss)
        # The server had a sign of life that was sent at this time.
        self.confirmed = self._now()
        self.leases = Leases(self, self._now, lambda: self.confirmed)
        self.keep_alive = KeepAlive(self)
        self._set_ttl(options.ttl)
        self._reach = Reach(
            (options.address, *options.others),
            same_host=options.same_host,
            patience=options.timeout,
            clock=self._clock,
            open_socket=open_socket,
        )

    # --- asking ---

    def request(
        self,
        requests: Sequence[Asked],
        wait: float | None = None,
        into: ReplyKeeper | None = None,
    ) -> list[Answer]:
        """Send requests, as many of them as go together, and return their replies in the same order,
        each with the bytes of a large value beside it. Several, which wait for nobody, are not
        waited for in between; after an exception those before it in the order have happened, of
        the others some may have.

        `wait`: the seconds that the server may let it wait, as in its `timeout` field (math.inf:
        for ever); None or 0: it is answered at once. `into`: gets the reply as well, before
        anything else happens: after an exception it is there, or else the server takes back what
        it gave. Raises StoreTimeout, SessionLost, StoreClosed, StoreUnreachable.
        """
        answers: list[Answer] = []
        began = self._now()
        deadline = began + (wait + GRACE if wait else self.timeout)
        ticket = self.slots.take()
        slot = ticket.slot
        slot.into = into
        calls = slot.begin(requests, began, deadline, 0.0 if wait else self.timeout)
        try:
            self._exchange(slot, calls, answers)
        except BaseException as error:
            self._give_up(ticket, calls)
            if isinstance(error, (TooLate, SessionOver)):
                raise self._error(calls[len(answers)]) from None
            raise
        self.slots.put_back(ticket)
        if self.news.lines:
            self.news.tell()
        return answers

    def _exchange(self, slot: Slot, calls: Sequence[Call], answers: list[Answer]) -> None:
        """Send the requests, on as many connections as it takes, until all replies are there. A
        request that has an answer is not sent again.
        """
        left = calls
        while True:
            try:
                deadline = left[0].deadline
                connection = slot.connection or self._connect(slot, deadline)
                connection.send(slot.owed, left)
                for call in left:
                    answer = connection.receive(
                        call, deadline, self.keep_alive.interval, self._silence
                    )
                    if slot.into is not None:
                        slot.into.session, slot.into.reply = self, answer[0]
                    answers.append(answer)
                    deadline = connection.heard + self.timeout  # the next one is on its way
            except ConnectionBroken as broken:
                self._lost_connection(slot, str(broken))
            except ServerCloses as closes:
                self._server_closes(str(closes))
                raise SessionOver from None
            else:
                slot.owed = b""
                self._confirm(left[0].began)
                return
            left = calls[len(answers) :]

    # --- what a call leaves ---

    def _on_loss(self, _: object) -> None:
        self.keep_alive.ring()

    def _give_up(self, ticket: Ticket, calls: Sequence[Call]) -> None:
        """Leave the slot to the keep-alive if the server may have had a request: nobody will look
        at the reply any more, and the server is to take back what it gave.
        """
        slot = ticket.slot
        slot.disconnect()  # also if nothing was sent: `_opened` may have been broken off
        if calls[0].tried and self.end is None:
            slot.given_up = True
            self.keep_alive.ring()
        else:
            self.slots.put_back(ticket)

    def _error(self, call: Call) -> RallypointError:
        """Make the error for a request that has no answer."""
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
        why = [told_of(call, outcome)]
        problem = self._reach.problem(look=False) if self._reach.failing else None
        if problem is not None:
            why.append(str(problem))
        elif not call.sent:
            why.append("the server did not take what was sent to it")
        standing, help = self._stopped(problem)
        return StoreTimeout(
            "store-timeout",
            f"{asked_of(call)} got no answer from the store at {self.address} within {took:.1f} s",
            outcome=outcome,
            why=(*why, *standing),
            help=help,
        )

    def _stopped(self, problem: StoreUnreachable | None) -> tuple[tuple[str, ...], Advice]:
        """Return why and help when the server's process is seen to stand still. `problem`: why it
        was not reached, if it was not.
        """
        refused = problem is not None and problem.code == "port-refused"
        return stopped(0 if refused else self._server_pid)

    # --- connecting ---

    def connect(self) -> None:
        """Open the first connection, trying again while nobody listens there, until `timeout`.
        Raises StoreUnreachable.
        """
        ticket = self.slots.take()
        try:
            self._connect(ticket.slot, self._now() + self.timeout, first=True)
        except TooLate:
            raise self._reach.problem() from None
        except SessionOver:
            raise self._over().error(None) from None
        except BaseException:
            ticket.slot.disconnect()
            raise
        self.slots.put_back(ticket)

    def _connect(self, slot: Slot, deadline: float, *, first: bool = False) -> Connection:
        """Open a connection for this slot. Raises TooLate, SessionOver; StoreUnreachable for what
        another attempt would only repeat.
        """
        noticed = not first
        quiet = self._now() + QUIET_SECONDS
        while True:
            now = self._now()
            if self.end is not None:
                raise SessionOver
            if now >= deadline:
                raise TooLate
            if not noticed and now >= quiet and self._reach.failing:
                noticed = True
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
            self._secret,
            self._options.job,
            __version__,
            session=self.id,
            nonce=os.urandom(NONCE_BYTES),
            identity=self._options.identity,
            ttl=self.ttl,
            resume=resume,
            acked=0,
            orphan=self.orphan,
        )

    def _opened(self, slot: Slot, opened: Opened, began: float) -> Connection:
        """Take a connection into use. Its greeting was sent after `began`."""
        welcome = opened.welcome
        self.address = self._reach.address
        connection = Connection(
            opened,
            self._clock,
            slot.traffic,
            shared_memory=self._reach.local_allowed,
            on_sign=self._confirm,
        )
        if self._server not in (b"", welcome.server):
            # after an outage of more than a ttl: nobody was told that the data is gone
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
        self._server, self._server_ended = welcome.server, ""
        self._server_pid = listener_of(opened.sock)
        self.limits = welcome.limits
        self._set_ttl(welcome.ttl)  # there is a shortest and a longest one
        self._welcomed = True
        self._alone = inf
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
        self._silence = min(ttl * GIVEN_UP, LONGEST_POLL)
        self.keep_alive.set_interval()

    def _failed(self, failed: DialFailed, first: bool) -> None:
        """Look at an attempt that failed. Raises when there is no use in another one."""
        told = failed.told
        kept = max(self.leases.longest(self.ttl), self.timeout)  # seconds, by the server
        if told.reason == "session-lost" and told.refusal is not None:
            self._lose(told.refusal)
        elif told.reason == "store-closed" and not first:
            self._server_closes("")
        elif all(map(_is_final, failed.failures if self._options.others else [told])):
            raise self._reach.problem()
        elif self._server_ended and not first:
            self._finish(SessionEnd(self._server_ended, again=self._server_ended))
        elif not first and self._now() - self.confirmed > kept:
            unreached = self._reach.problem()  # it looks for the reason, which takes time
            if self._now() - self.confirmed > kept:
                self._lose(Refusal("session-lost", "", known=False), unreached)

    def _lost_connection(self, slot: Slot, why: str, *, by_us: bool = False) -> None:
        slot.disconnect()
        if not by_us and self._alone == inf and self.slots.connection is None:
            self._alone = self._now()
        # A connection from before the last loss was lost with that one: it is not told again.
        if self.end is None and not self._disconnected and slot.connected_at >= self._lost_at:
            self._disconnected = True
            self._lost_at = self._now()
            self._reach.forget()
            self.news.add("warning", f"lost the connection to the store at {self.address}: {why}")

    # --- the end ---

    def _finish(self, end: SessionEnd, last: Slot | None = None) -> None:
        """End the session: calls that wait are woken, and told. `last`: the caller's own slot, on
        which something is still said. What a signal handler broke off is done by a second call.
        """
        with self._mutex:
            self.end = end = self.end or end
            self.slots.is_over = True
            connections = [slot.connection for slot in self.slots if slot is not last]
        self.leases.end(end.headline)
        for connection in connections:
            if connection is not None:
                connection.interrupt()
        self.keep_alive.ring()

    def _lose(self, refusal: Refusal, unreached: StoreUnreachable | None = None) -> None:
        """End a session that the server has ended. Calls that wait are told, or else the next one.
        `unreached`: why no server was reached, if it was only for too long.
        """
        end = lost_session(
            str(self.address),
            self.ttl,
            self._now() - self.confirmed,
            refusal,
            unreached,
            self._stopped(unreached) if unreached is not None else ((), ()),
        )
        if unreached is None and not refusal.known:
            self._server = b""  # it is told now that this is another one
        self.news.add("error", end.headline)
        self._finish(end)

    def _server_closes(self, text: str) -> None:
        """End the session since the server stops in good order. Calls after that are told so again
        if one attempt to connect finds no server, and are served by one that was started again."""
        headline = f"the store at {self.address} " + (
            f"was closed: {text}" if text else "is closing"
        )
        self._server = b""  # another one is expected
        self._finish(SessionEnd(headline, undone=bool(text), again=headline))

    def close(self, wait: float = BYE_SECONDS) -> None:
        """End the session: the server releases what it held. Threads that wait get StoreClosed. May
        be called again. `wait`: seconds for the server's answer. In a forked child it does nothing:
        the session is the parent's."""
        if self.foreign or self.end is not None:
            return
        wait = min(wait, self.left)  # a server that is gone, or has ended it, is owed no goodbye
        ticket = self.slots.take()
        slot = ticket.slot
        began = self._now()
        (call,) = slot.begin([(Bye, ())], began, began + wait)
        end = SessionEnd(CLOSED)
        try:
            if slot.connection is None and wait > 0.0 and self._welcomed:
                self._connect(slot, call.deadline)
            self._finish(end, slot)
            if slot.connection is not None:
                slot.connection.send(slot.owed, [call])
                if wait > 0.0:
                    slot.connection.receive(call, call.deadline, LONGEST_POLL, LONGEST_POLL)
        except (ConnectionBroken, ServerCloses, TooLate, SessionOver, StoreUnreachable):
            pass
        finally:
            self._finish(end, slot)
            if slot.connection is not None and not call.tried:  # a signal handler raised
                with contextlib.suppress(ConnectionBroken, TooLate):
                    slot.connection.send(slot.owed, [call])
            slot.disconnect()
            self.slots.drop_idle()

    def abandon(self) -> None:
        """Leave the session to the parent, in a forked child, which closes its descriptors of the
        connections.
        """
        self.foreign = True
        self._mutex = threading.RLock()
        self.leases.end("the parent process has it, not this forked child")
        self.end = self.end or SessionEnd(
            "the call was begun in the parent process, before the fork"
        )
        self.slots.is_over = True
        for slot in self.slots:
            if slot.connection is not None:
                slot.connection.after_fork()

    # --- for the keep-alive ---

    def _confirm(self, sent: float) -> None:
        """Note that the server had a sign of life that was sent at this time. A lease that was over
        before does not come back by it.
        """
        if self.leases.held:
            self.leases.look()
        if sent > self.confirmed:
            self.confirmed = sent

    def cancel_abandoned(self, seconds: float) -> None:
        """Tell the server which requests nobody waits for any more: calls that an exception ended,
        or a timeout.
        """
        for slot in self.slots:
            if slot.is_abandoned:
                ticket = slot.ticket()
                slot.cancel()
                if not self._tell(ticket, Ping, (), seconds):
                    return  # the server does not answer now

    def tell(self, kind: type[Request], fields: tuple[Any, ...], seconds: float) -> bool:
        """Ask for something of which only matters that it was answered; return whether it was."""
        return self._tell(self.slots.take(cold=True), kind, fields, seconds)

    def _tell(
        self, ticket: Ticket, kind: type[Request], fields: tuple[Any, ...], seconds: float
    ) -> bool:
        slot = ticket.slot
        began = self._now()
        answers: list[Answer] = []
        try:
            self._exchange(slot, slot.begin([(kind, fields)], began, began + seconds), answers)
        except TooLate:
            silence = f"no sign of life from the server for {seconds:.1f} s"
            self._lost_connection(slot, silence, by_us=True)
        except SessionOver:
            pass
        finally:
            if not answers:
                slot.disconnect()
            if slot.owed:
                slot.given_up = True  # once more in the next round
            else:
                self.slots.put_back(ticket, cold=True)
        return bool(answers)

    def look(self) -> None:
        """Take in what has arrived on idle connections, and close those that were not used for a
        lease's length; one of them stays.
        """
        unused = self._now() - self.ttl
        for _ in range(self.slots.idle):
            ticket = self.slots.take(cold=True)
            slot = ticket.slot
            try:
                if slot.connection is not None:
                    slot.connection.look()
                    slot.connection.trim()
                    if slot.connection.heard < unused and self.slots.idle:
                        slot.disconnect()
            except ConnectionBroken as broken:
                self._lost_connection(slot, str(broken))
            except ServerCloses as closes:
                self._server_closes(str(closes))
                slot.disconnect()
            self.slots.put_back(ticket)

    # --- about ---

    def _over(self) -> SessionEnd:
        assert self.end is not None
        return self.end

    @property
    def was_closed(self) -> bool:
        """True if this process has closed it, or its parent had before the fork."""
        return self.end is not None and self.end.headline == CLOSED

    @property
    def left(self) -> float:
        """Seconds after which the server may have ended it: see `member.py`."""
        until = min(self.confirmed + self.ttl * SURE, self._alone + self.orphan)
        return max(0.0, until - self._now()) if self.end is None else 0.0

    @property
    def how_lost(self) -> Literal["goodbye", "connection ended", "lease over"]:
        """Why `left` is 0: the server said that it leaves, its last connection ended and no other
        came in time, or nothing was heard of it for `ttl * SURE` seconds.
        """
        if self.end is not None and self.end.refusal is None:
            return "goodbye"
        ended = self._alone + self.orphan < self.confirmed + self.ttl * SURE
        return "connection ended" if ended else "lease over"

    def totals(self) -> tuple[list[int], int, int]:
        """Return requests by kind, and bytes sent and received beside what went by shared memory,
        of all sessions of this store object.
        """
        counts, sent, received = self._before
        for slot in self.slots:
            counts = [one + more for one, more in zip(counts, slot.counts, strict=True)]
            sent += slot.traffic[0]
            received += slot.traffic[1]
        return counts, sent, received


def _is_final(failure: Failure) -> bool:
    """Tell whether another attempt would only repeat this."""
    return failure.reason in FINAL and not (failure.refusal is not None and failure.refusal.passing)


_leaving = False


def leave() -> None:
    """Note that the interpreter is about to end, and closes its stores."""
    global _leaving
    _leaving = True


def stay_when_leaving() -> None:
    """Keep a daemon thread where it is at the end of the interpreter: the program has not closed
    the store that it uses.
    """
    if _leaving and threading.current_thread().daemon:
        threads.stay()
