"""A lease: kept alive, lost visibly, releasing what it held.

A session is what the server knows a client by. It outlives connections: every request has a number, and after a reconnect the
session repeats, on the new connection, whatever has no answer yet; the server answers a number it has seen with its first answer.

**Who reads the socket.** There is no reader thread: handing a reply from thread to thread would double the time of a small
request. The thread that waits for a reply *drives* the connection: it polls, reads, delivers everybody's replies, and opens a new
connection when there is none. Other waiting threads sleep on a lock of their own; when the driver has its reply, or its deadline
has passed, it wakes one of them to drive on. When no thread waits, the keeper's thread (`store/keeper.py`) looks in.

**One step.** There is no lock around all this. In CPython threads change, and signal handlers run, only where something is called, a
loop begins again, or a wait is interrupted: what must be one step is written without a call in it, and says so. That is faster, and
it is the only way that holds for signal handlers: one that uses the store would wait for ever for a lock that the frame below it
holds, and one that raises would leave it locked. It stands on one line, too: a trace function (a debugger's, coverage's) is a call
between any two lines. All this needs the GIL, and `Client` refuses to work without it.

**What an exception leaves.** What comes in two steps has the second one made up for by the keeper, if an exception struck after the
first. A request stays in `_pending` until its own thread has the answer in hand, and `acked` stays below it: an answer that nobody
got can always be cancelled. A link on which bytes were on their way is thrown away, which costs a reconnect and nothing else; and a
handler that finds the link in use in the frames below it takes another one.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import select
import threading
from collections import deque
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import msgspec

from rallypoint import __version__
from rallypoint.clock import Clock
from rallypoint.errors import Outcome, SessionLost, StoreClosed, StoreTimeout, StoreUnreachable
from rallypoint.host.sockets import listener_of
from rallypoint.store import news, reach
from rallypoint.store.address import Address
from rallypoint.store.dial import DialFailed, Opened, OpenSocket
from rallypoint.store.dues import Dues
from rallypoint.store.failures import Loss, of_a_handler, refused
from rallypoint.store.lease import Leases
from rallypoint.store.link import Link, LinkBroken, TooLate, Unread
from rallypoint.store.pending import GRACE, LONG, YES, Pending, asked_of, grace, outcome_of, told_of
from rallypoint.store.reach import Reach
from rallypoint.store.unreachable import is_stopped, stopped_server
from rallypoint.wire.connection import NONCE_BYTES, SESSION_BYTES, Joining
from rallypoint.wire.frames import HEADER, HEADS
from rallypoint.wire.messages import (
    LENDS,
    TAGS,
    AnyReply,
    Bye,
    Closing,
    Done,
    Failed,
    Identity,
    Limits,
    Refusal,
    Request,
    encode,
)
from rallypoint.wire.values import Parts

BYE_SECONDS = 1.0
"""For the server's answer to the end of a session. Without it everything is released when the lease is over."""

AHEAD = 256
"""Replies that the server keeps although they have arrived, before it is told so."""

PIPELINE = 64
"""Requests of `ask_many` that are under way at once. More gain nothing, and their replies must fit in the socket's buffers: the
server stops reading from a client that does not read."""

TURN = 0.02
"""Seconds between two looks whether the link is free for another large value: a hundredth of what one takes that is worth waiting
for."""

LONGEST_POLL = 86_400.0
"""Seconds. The kernel counts the milliseconds of a poll in 31 bits."""

LOOKS = 64
"""Reads of one look-in by the keeper, which has other sessions to keep: 4 MB."""

PAY_SECONDS = 0.05
"""For small messages that others have queued behind one of ours that needs no answer. A server without room for them is stuck."""

QUIET_SECONDS = 2.0
"""Of trying to connect for the first time, before a line says so: a server that is being started is there by then."""

UNANSWERED = 0.3
"""The share of a lease after which a sign of life without an answer is a reason to connect anew: one comes every third of a lease, so a
third is left for that."""

BUSY_SECONDS = 1.0
"""But for so long a server, or this process, may be busy. A lease that is not much longer is lost with its connection."""

STUCK = 0.3
"""The share of the ttl after which a link that takes nothing at all is given up: with the keeper's next visit there is time for another."""

FINAL = frozenset({"foreign", "wrong-secret", "version-skew", "wrong-job", "store-relayed", "store-full"})
"""Failures that another attempt would only repeat."""

_SMALL = len(HEADS)

_pack = HEADER.pack


class Session:
    """See the module. Thread-safe. Belongs to the process that made it: a forked child makes its own (`Store` sees to that)."""

    # Slots: all of it in one piece of memory, and no dict in two others. See `ask`.
    __slots__ = (
        "__weakref__", "_bytes", "_clock", "_closed", "_confirmed", "_driver", "_driving", "_dues", "_ended", "_job", "_link", "_links",
        "_lost", "_now", "_pending", "_pinged", "_reach", "_refusing", "_secret", "_seq", "_server",
        "_server_pid", "_silence", "_stuck", "_stuck_since", "_waiting", "_welcomed", "address", "closed_before_fork", "counts",
        "foreign", "id", "identity", "keep_at", "leases", "limits", "news", "reconnects", "sessions", "soon_at", "timeout", "ttl",
    )  # fmt: skip

    def __init__(
        self,
        address: Address,
        secret: bytes,
        identity: Identity,
        *,
        timeout: float,
        ttl: float,
        job: str = "",
        same_host: bool = True,
        clock: Clock | None = None,
        open_socket: OpenSocket | None = None,
    ) -> None:
        """`timeout`: seconds, for connecting and for every answer that waits for nobody. `ttl`: seconds. `same_host=False`: stay on
        the given address and use no shared memory."""
        self.address = address
        self.identity = identity
        self.timeout = timeout
        self.ttl = ttl
        self._silence = min(ttl, LONGEST_POLL)
        self.foreign = False  # it is the parent's, and this a forked child
        self.closed_before_fork = ""  # why nothing could be asked in the parent any more
        self.reconnects = 0
        self.sessions = 0
        self.counts = [0] * (max(TAGS.values()) + 1)  # what was asked, by kind: at its place in `TAGS`
        self.limits: Limits | None = None
        self._secret = secret
        self._job = job
        self._clock = clock or Clock()
        self._now = self._clock.monotonic
        self._reach = Reach(address, same_host=same_host, patience=timeout, clock=self._clock, open_socket=open_socket)
        self.news = news.News()
        self._seq = 0  # never begins anew: threads may still hold requests of a session that was lost
        self._pending: dict[int, Pending] = {}  # in the order of their numbers; each is removed by its own thread
        self._waiting: dict[int, Pending] = {}  # those whose threads sleep until they have an answer or are to drive
        self._dues = Dues(self._pending, self._acked, self._now)
        self._stuck = (0, 0)  # the link on which the last sign of life could not be sent, and how much had been sent on it
        self._stuck_since = 0.0
        self._driver = 0  # the thread that reads, 0: none
        self._driving: Pending | None = None  # and for which request, if it is for one
        self._link: Link | None = None
        self._links = 0
        self._closed = ""  # why nothing can be asked any more
        self._lost: SessionLost | StoreClosed | None = None  # for the next one who asks
        self._refusing = False  # one of the two
        self._ended = ""  # why, when the server stopped in good order and none has been reached since
        self._bytes = [0, 0]  # sent and received by links that are gone
        self._server = b""  # which server it was: one that is started again is another one, and empty
        self._server_pid = 0  # if it can be seen: on this host
        self.leases = Leases(self._now, lambda: self._confirmed)
        self.keep_at = self.soon_at = math.inf  # when the keeper comes by as always, and when next, as far as is known
        self._pinged = 0.0  # when the keeper sent the first sign of life since something was last heard
        self._begin()

    def _begin(self) -> None:
        """A new session, on the server as well once connected."""
        self.id = os.urandom(SESSION_BYTES)
        self.sessions += 1
        self._welcomed = False
        self._confirmed = self._now()  # the server had a sign of life that was sent at this time

    # --- asking ---

    def ask(
        self, kind: type[Request], fields: tuple[Any, ...], wait: float | None, parts: Parts | None = None
    ) -> tuple[AnyReply, memoryview | None]:
        """Send a request and return its reply, with the bytes of a large value beside it.

        `fields` are those after `seq` and `acked`. `parts`: a large value; at its place among the fields stands b"". `wait`: the seconds
        that the server may let it wait, as in its `timeout` field (math.inf: for ever); None or 0: it is answered at once. Raises
        StoreTimeout, SessionLost, StoreClosed, StoreUnreachable, and what the server refused with. After any exception, also a signal
        handler's, the server is told to take back what only the reply would have handed over.

        One piece, with few calls and few objects: between two requests of a process others run, and each function that is called, each
        object that is looked at then is some cache misses more. Sixty-four processes at a barrier on two processors took twice as long
        when this was told in six functions.
        """
        now = self._now  # a call in the words `self._now()` would look it up by its name
        began = now()
        me = get_ident()
        if not wait:
            deadline = began + self.timeout
        else:
            deadline = began + wait + (GRACE if wait >= LONG else grace(wait))
        tag = TAGS[kind]
        pending: Pending | None = None
        reply: AnyReply | None = None
        driver = -1
        try:
            try:
                while True:
                    while self._refusing:
                        self._refuse()
                    link = self._link
                    seq = self._seq + 1
                    message = encode((tag, seq, self._acked() if self._pending else seq - 1) + fields)  # noqa: RUF005  (half the work)
                    size = len(message)
                    frame = HEADS[size] + message if size < _SMALL else _pack(size, 0) + message
                    if link is None or parts is not None:
                        pending = Pending(began, deadline, not wait, seq, kind, message, parts)
                    else:
                        pending = Pending(began, deadline, not wait, seq, kind, message, None, link.number)
                    # One step: whoever takes a number, opens a link or refuses meanwhile asks these questions, too.
                    if self._seq < seq and self._link is link and not self._refusing: self._pending[seq] = pending; self._seq = seq; break  # fmt: skip
                    pending = None  # it was not asked
                self.counts[tag] += 1
                if link is not None and parts is None:
                    if LENDS[tag]:
                        link.lends = True
                    if (driver := self._driver) == 0: self._driver = me; self._driving = pending  # one step  # fmt: skip
                    try:
                        if driver == 0:
                            left = deadline - began
                            reply = link.exchange(frame, pending, me, left if left < self._silence else self._silence)
                            if reply is not None:
                                if reply.seq == seq:  # nearly always; `_deliver`, without the call
                                    pending.reply = reply  # whoever connects anew asks again for what has none
                                    if began > self._confirmed:
                                        if self.leases.held:
                                            self.leases.look()
                                        self._confirmed = began
                                else:
                                    others, reply = reply, None
                                    self._deliver(link, others, None)
                                link.receiving = False
                            elif link.receiving:
                                self._receive(link, backlog=True)
                        else:
                            driver = -1
                            link.post(frame, pending, me)
                        if link.writer == me:
                            self._pump(link, deadline, self.timeout if pending.patient else 0.0, me)
                    except LinkBroken as broken:
                        if driver == 0 and link.receiving:
                            self._broken(link, str(broken))
                        else:
                            _not_on(pending, link)
                            self._unsendable(link, broken)
                    except BaseException:
                        if driver == 0 and link.receiving:
                            self._broken(link, "interrupted")
                        raise
                if driver == 0 and reply is None and pending.reply is None:
                    self._drive(pending, now())
            finally:
                if driver == 0:
                    self._driver = 0
                    if self._waiting:
                        self._hand_over()
            if reply is None:
                if pending.reply is None:
                    self._await(pending, me)
                    if pending.reply is None:
                        raise self._error(pending)
                reply = pending.reply
            if len(self._pending) > 1 or pending.body is not None:
                self._took(pending)
        except BaseException:
            link = None  # the traceback keeps this frame, and should not keep the link
            if pending is not None:
                pending.given_up = YES
                self._give_up((pending,), me)
                pending.error = None  # which has the traceback
            raise
        # From here on nothing is called: the reply is in hand, or it can be cancelled.
        del self._pending[seq]
        if link is not None and link.lends and not self._pending:
            link.lends = False  # one step with the questions: who asks for more is in `_pending` before he says so
        if reply.__class__ is Failed:
            raise refused(kind, fields, reply)
        return reply, pending.body

    def ask_many(self, requests: Sequence[tuple[type[Request], tuple[Any, ...]]]) -> list[tuple[AnyReply, memoryview | None]]:
        """Send several requests that wait for nobody without waiting in between, and return their replies in the same order.

        After an exception those before it in the order have happened, of the others some may have.
        """
        me = get_ident()
        replies: list[tuple[AnyReply, memoryview | None]] = []
        under_way: deque[Pending] = deque()
        given_up = [False]  # of all together, in one step
        left = iter(requests)
        try:
            while True:
                self._send_many(list(itertools.islice(left, PIPELINE - len(under_way))), under_way, given_up, me)
                if not under_way:
                    return replies
                for _ in range(max(1, len(under_way) - PIPELINE // 2)):
                    pending = under_way[0]
                    pending.deadline = max(pending.deadline, self._now() + self.timeout)
                    self._await(pending, me)
                    if pending.reply is None:
                        raise self._error(pending)
                    if pending.body is not None or len(self._pending) > len(under_way):
                        self._took(pending)
                    replies.append((pending.reply, pending.body))
                    del self._pending[pending.seq]
                    under_way.popleft()
        except BaseException:
            given_up[0] = True
            self._give_up(tuple(under_way), me)
            raise

    def _send_many(
        self, batch: Sequence[tuple[type[Request], tuple[Any, ...]]], under_way: deque[Pending], given_up: Sequence[bool], me: int
    ) -> None:
        """Send a batch, small requests in one piece. Each is in `under_way` before it can have reached the server."""
        small: list[Pending] = []
        for kind, fields in batch:
            parts = None
            if len(fields) > 1 and type(fields[1]) is Parts:
                self._post_many(small, me)
                small = []
                parts = fields[1]
                fields = (fields[0], b"", *fields[2:])
            while True:
                while self._refusing:
                    self._refuse()
                began = self._now()
                seq = self._seq + 1
                message = encode((TAGS[kind], seq, self._acked(), *fields))
                pending = Pending(began, began + self.timeout, True, 0, kind, message, parts)
                pending.given_up = given_up
                under_way.append(pending)
                # One step, as in `ask`.
                if self._seq < seq and not self._refusing: pending.seq = seq; self._pending[seq] = pending; self._seq = seq; break  # fmt: skip
                under_way.pop()
            self.counts[TAGS[kind]] += 1
            if pending.parts is None:
                small.append(pending)
            else:
                self._transmit(pending, me)
        self._post_many(small, me)

    def _post_many(self, small: Sequence[Pending], me: int) -> None:
        """Send small requests that are pending already, in one piece."""
        if not small:
            return
        link = self._link
        if link is None:
            return
        mine = []
        for pending in small:
            mine_now = False
            # One step: whoever opens a link or fails them asks these questions, too.
            if pending.on != link.number and self._link is link and pending.error is None: pending.on = link.number; mine_now = True  # fmt: skip
            if mine_now:
                mine.append(pending)
        if not mine:
            return
        link.lends = True  # simply: to be read as many replies are
        try:
            if not link.post(_frames(mine), mine[-1], me) and link.writer == me:
                self._pump(link, mine[-1].deadline, self.timeout, me)
        except LinkBroken as broken:
            for pending in mine:
                _not_on(pending, link)
            self._unsendable(link, broken)

    def _acked(self) -> int:
        """Up to which number all replies have arrived."""
        for first in self._pending:  # one step, without a call: other threads remove theirs at any time
            return first - 1
        return self._seq

    def _error(self, pending: Pending) -> Exception:
        """Why it has no reply."""
        if self._closed:
            _stay_when_leaving()
        return pending.error or self._timed_out(pending)

    def _refuse(self) -> None:
        if self._closed:
            _stay_when_leaving()
            raise StoreClosed("store-closed", self._closed, outcome="did not happen")
        lost, self._lost = self._lost, None
        self._refusing = self._closed != ""
        if lost is not None:
            raise lost

    def _took(self, pending: Pending) -> None:
        """The reply is about to be handed over: soon the server need not keep it, and now not the memory that came with it."""
        dues = self._dues
        if getattr(pending.reply, "shared", 0):
            dues.read.append(pending.seq)
        if dues.read or len(dues.arrived) >= AHEAD:
            self._pay()
        if pending.kind.changes and self._acked() < pending.seq - 1:
            dues.arrived.append(pending.seq)  # last: when the server has been told, nothing can be cancelled any more

    # --- sending ---

    def _transmit(self, pending: Pending, me: int) -> None:
        """Send a request that is pending already, unless that was done on this link. If the link breaks it stays pending."""
        link = self._link
        if link is None or pending.on == link.number or pending.error is not None:
            return
        if pending.parts is None:
            self._post_many((pending,), me)
            return
        try:
            if not (link.shared and self._transmit_lent(link, pending, pending.parts, me)):
                self._transmit_with(link, pending, pending.parts, me)
        except LinkBroken as broken:
            _not_on(pending, link)
            self._unsendable(link, broken)

    def _transmit_lent(self, link: Link, pending: Pending, value: Parts, me: int) -> bool:
        """By shared memory; False when there is none."""
        link.lends = True
        try:
            number, segment = link.fill(value)
        except OSError as error:
            if of_a_handler(error):
                raise
            return False  # no memory, or no descriptor: the socket will do
        message = encode(msgspec.structs.replace(pending.request, shared=value.size, segment=number))
        pending.on = link.number
        link.post_lent(message, number, segment, pending, me)
        self._sent(link, pending, me)
        return True

    def _transmit_with(self, link: Link, pending: Pending, value: Parts, me: int) -> None:
        """By the socket, when no other large value is on its way there."""
        link.lends = True
        while link.writer not in (0, me) and not link.closed:
            if self._now() >= max(pending.deadline, link.moved + self.timeout):
                return
            select.poll().poll(TURN * 1000.0)
        pending.on = link.number
        link.post_with(pending.message, value, pending, me)
        self._sent(link, pending, me)

    def _sent(self, link: Link, pending: Pending, me: int) -> None:
        """A large value was given to this link: see it out, and then wait for the answer as if it had been asked for now."""
        if link.writer == me:
            self._pump(link, pending.deadline, self.timeout, me)
        moved = self._now() if pending.on == link.number else link.moved
        pending.deadline = max(pending.deadline, moved + self.timeout)

    def _pump(self, link: Link, deadline: float, patience: float, me: int) -> None:
        """Send what is queued on a link whose writer this thread is."""
        try:
            link.pump(deadline, patience, self.look_in)
        except (LinkBroken, TooLate) as error:
            for owner in link.unsent():
                if isinstance(owner, Pending):
                    _not_on(owner, link)  # a frame that is not complete does nothing
            if isinstance(error, LinkBroken):
                self._unsendable(link, error)
            else:
                self._broken(link, "the server did not take what was sent to it")
        except BaseException:
            self._broken(link, "interrupted")
            raise
        finally:
            if link.writer == me:
                link.writer = 0
            if link.closed:
                link.dispose()

    # --- waiting ---

    def _await(self, pending: Pending, me: int) -> None:
        """Return when there is a reply or an error, or the deadline has passed."""
        while pending.reply is None and pending.error is None:
            self._transmit(pending, me)
            driver = -1
            below: Pending | None = None
            waiter: threading.Lock | None = None
            try:
                # One step.
                if (driver := self._driver) == 0 or driver == me: below = self._driving; self._driver = me; self._driving = pending  # fmt: skip
                if driver == 0 or driver == me:
                    if driver == me:
                        self._nest()
                    self._drive(pending, self._now())
                else:
                    waiter = self._line_up(pending)
            finally:
                if driver == 0:
                    self._driver = 0
                    if self._waiting:
                        self._hand_over()
                elif driver == me:
                    self._driving = below
                    self._unnest(below)
            if waiter is not None:
                self._sleep(pending, waiter)
            if self._now() >= self._limit(pending):
                return

    def _limit(self, pending: Pending) -> float:
        """Until when to wait for the reply: a large value may take longer for as long as its bytes move."""
        link = self._link
        if pending.patient and link is not None:
            if link.filling == pending.seq:
                pending.deadline = max(pending.deadline, link.heard + self.timeout)
            elif pending.parts is not None and pending in link.unsent():
                pending.deadline = max(pending.deadline, link.moved + self.timeout)
        return pending.deadline

    def _line_up(self, pending: Pending) -> threading.Lock:
        """Another thread drives: what to sleep on."""
        waiter = threading.Lock()
        waiter.acquire()
        pending.waiter = waiter
        self._waiting[pending.seq] = pending
        # The driver brings a reply, or leaves, and only then looks at `waiter` and `_waiting`.
        if self._driver == 0 or pending.reply is not None or pending.error is not None:
            _wake(pending)
        return waiter

    def _sleep(self, pending: Pending, waiter: threading.Lock) -> None:
        try:
            waiter.acquire(timeout=min(max(0.0, pending.deadline - self._now()), threading.TIMEOUT_MAX))
        finally:
            pending.waiter = None
            self._waiting.pop(pending.seq, None)
            if self._driver == 0 and self._waiting:
                self._hand_over()

    def _hand_over(self) -> None:
        """Let one of those who wait drive on: who came last, for in a thread whose signal handler waits only that one can."""
        for pending in reversed(list(self._waiting.values())):
            if _wake(pending):
                return

    def _nest(self) -> None:
        """This thread drives already, and is in a signal handler in the middle of that."""
        link = self._link
        if link is not None and link.receiving:
            self._broken(link, "a signal handler used the store")

    def _unnest(self, below: Pending | None) -> None:
        """Back to the driver below. If what it waits for was received here, its poll must not go on: an answer ends it."""
        if below is not None and (below.reply is not None or below.error is not None) and not self._pay(ping=True):
            link = self._link
            if link is not None:
                self._broken(link, "a signal handler used the store")

    # --- driving ---

    def _drive(self, pending: Pending, now: float) -> None:
        """Read until this request has its reply or an error, or its deadline passes; or until it has to be sent anew."""
        while pending.reply is None and pending.error is None:
            link = self._link
            if link is None:
                if now >= pending.deadline:
                    return
                self._connect(pending.deadline)
                now = self._now()
                continue
            if pending.on != link.number:
                return
            heard = link.heard
            silent = (heard if heard > pending.began else pending.began) + self._silence
            until = pending.deadline if pending.deadline < silent else silent
            link.driven += 1  # before looking whether it is closed: `close` looks in the other order
            try:
                if link.closed:
                    self._broken(link, "closed")
                    continue
                ready: object
                try:  # `link.wait`, without a call on the way of everybody who waits
                    ready = link.poll((until - now) * 1000.0 if now < until else 0.0)
                except RuntimeError as error:
                    ready = link.wait_again(until - now if now < until else 0.0, error)
                if ready:
                    self._receive(link)
            finally:
                link.driven -= 1
                if link.closed:
                    link.dispose()
            if pending.reply is not None:
                return
            now = self._now()
            if now >= pending.deadline and now >= self._limit(pending):
                return  # also when something was ready: a stream that never ends must not hold it here
            if not ready and now >= silent:
                self._broken(link, f"no sign of life from the server for {now - link.heard:.1f} s")

    def _receive(self, link: Link, *, backlog: bool = False) -> None:
        """Take in what has arrived. By the driver."""
        try:
            for reply, body in link.backlog() if backlog else link.receive():
                self._deliver(link, reply, body)
        except LinkBroken as broken:
            self._broken(link, str(broken))
        except BaseException:
            self._broken(link, "interrupted")
            raise

    def _deliver(self, link: Link, reply: AnyReply, body: memoryview | Unread | None) -> None:
        """Give a reply to whoever asked."""
        pending = self._pending.get(reply.seq)
        if pending is None or pending.given_up[0]:
            self._unclaimed(link, reply)
            return
        if pending.began > self._confirmed:
            if self.leases.held:
                self.leases.look()
            self._confirmed = pending.began
        if type(body) is Unread:
            self._unclaimed(link, reply)
            pending.error = body.error
        else:
            pending.body = body  # type: ignore[assignment]
            pending.reply = reply
        if pending.waiter is not None:
            _wake(pending)

    def _unclaimed(self, link: Link, reply: AnyReply) -> None:
        """A notice; or a reply that nobody gets: that the server knows, or will."""
        if reply.seq:
            if getattr(reply, "shared", 0):
                self._dues.read.append(reply.seq)
        elif isinstance(reply, Closing):
            self._store_closed(f"the store at {self.address} was closed: {reply.text}", nothing_more=True)
            self._broken(link, "closed")
        elif isinstance(reply, Done):
            if link is self._link:
                self.leases.look()
                self._confirmed = max(self._confirmed, self._dues.answered(link))
        elif isinstance(reply, Failed):
            raise LinkBroken(f"the server ended the conversation: {reply.text}")

    def _broken(self, link: Link, why: str) -> None:
        """Throw a link away; the next driver opens another one."""
        link.close()
        if self._link is link:
            self._link = None  # one step with the question above
            if (value := self._pending.get(link.filling)) is not None:
                value.deadline = max(value.deadline, link.heard + self.timeout)
            self._bytes[0] += link.sent_bytes
            self._bytes[1] += link.received_bytes
            self._reach.forget()
            if not self._closed:
                self.news.add("warning", f"lost the connection to the store at {self.address}: {why}")

    def _unsendable(self, link: Link, broken: LinkBroken) -> None:
        """Nothing can be sent on it. If the server has closed it, what it said last may still be there."""
        if not broken.gone or self.look_in():
            self._broken(link, str(broken))  # otherwise another thread reads, and finds out

    # --- giving up ---

    def _give_up(self, pendings: Sequence[Pending], me: int) -> None:
        """Nobody will look at the replies to these requests any more: let the server take back what they gave."""
        link = self._link
        if link is not None and link.writer == me:
            self._broken(link, "interrupted")
            link.writer = 0  # nothing more is sent on it: its descriptor need not wait until the traceback is gone
            link.dispose()
        for pending in pendings:
            if not pending.seq:
                continue  # it was not asked yet
            pending.parts = pending.body = pending.waiter = None
            self._waiting.pop(pending.seq, None)
            if pending.seq in self._dues.arrived:
                self._dues.arrived.remove(pending.seq)
            if not (pending.on or pending.repeated) or isinstance(pending.error, SessionLost | StoreClosed):
                self._pending.pop(pending.seq, None)
        self._pay()
        if self._driver == 0 and self._waiting:
            self._hand_over()
        self.news.tell()

    def _pay(self, *, ping: bool = False) -> bool:
        """Tell the server what it is to be told, as far as that goes now. `ping`: and that we live; whether that went."""
        link = self._link
        if link is None:
            return False
        me = get_ident()
        try:
            pinged = self._dues.pay(link, me, ping=ping)
        except LinkBroken as broken:
            self._unsendable(link, broken)
            return False
        if link.writer == me:
            self._pump(link, self._now() + PAY_SECONDS, 0.0, me)
        return pinged

    def _fail(self, pending: Pending, error: Exception) -> None:
        if pending.reply is None and pending.error is None:
            pending.error = error
            _wake(pending)

    def _finish(self, why: str) -> None:
        """Nothing can be asked any more; who waits is told."""
        self._closed = self._closed or why
        self._refusing = True
        self.leases.end(self._closed)
        for pending in list(self._pending.values()):
            self._fail(pending, StoreClosed("store-closed", self._closed, outcome=outcome_of(pending)))

    def _store_closed(self, why: str, *, nothing_more: bool = False) -> None:
        """The server stops in good order. Everybody who waits is told, or else the next one who asks. Whoever asks after that is told so
        again if one attempt to connect finds no server, and is served by one that was started again. `nothing_more`: what it has not answered on this link it did not carry out."""
        if self._closed:
            self._finish(self._closed)
            return
        self._ended = why
        self._server = b""  # another one is expected
        self.leases.end(why, self._seq)
        self._begin()
        told = False
        for pending in list(self._pending.values()):
            if pending.given_up[0]:
                self._pending.pop(pending.seq, None)
            elif pending.reply is None and pending.error is None:
                outcome: Outcome = "did not happen" if nothing_more and not pending.repeated else outcome_of(pending)
                self._fail(pending, StoreClosed("store-closed", why, outcome=outcome))
                told = True
        if not told:
            self._lost, self._refusing = StoreClosed("store-closed", why, outcome="did not happen"), True

    # --- connecting ---

    def connect(self) -> None:
        """Open the first connection, trying again while nobody listens there, until `timeout`. Raises StoreUnreachable."""
        began = self._now()
        deadline = began + self.timeout
        told = self.timeout < 2 * QUIET_SECONDS  # soon enough, by the error
        try:
            self._driver = get_ident()
            while self._link is None and not self._closed:
                self._connect(deadline, first=True)
                now = self._now()
                if self._link is None and now >= deadline:
                    raise self._reach.problem()
                if self._link is None and not told and now - began >= QUIET_SECONDS and self._reach.failing:
                    told = True
                    news.notice(f"{self._reach.problem(look=False)}; still trying, for {deadline - now:.0f} s more")
        finally:
            self._driver = 0
        if self._closed:
            self._refuse()

    def _connect(self, deadline: float, *, first: bool = False) -> None:
        """One attempt, or the pause that is due before it; returns whether or not it succeeded, at the latest at `deadline`.

        Raises StoreUnreachable, if `first`, for what another attempt would only repeat; otherwise all pending requests fail with it.
        """
        self.news.tell()
        if self._closed:
            self._finish(self._closed)
            return
        if self._link is not None:
            return  # a handler of the log uses the store, and has connected it
        began = self._now()
        wait = self._reach.pause(began, deadline, first=first)
        if wait > 0.0:
            select.poll().poll(wait * 1000.0)
            return
        try:
            opened = self._reach.open(self._greeting, self._welcomed, deadline)
        except DialFailed as failed:
            self._failed(failed, first)
        else:
            self._opened(opened, began, deadline)
        self.news.tell()

    def _greeting(self, resume: bool) -> Joining:
        return Joining(
            self._secret,
            self._job,
            __version__,
            session=self.id,
            nonce=os.urandom(NONCE_BYTES),
            identity=self.identity,
            ttl=self.ttl,
            resume=resume,
            acked=self._acked(),
        )

    def _opened(self, opened: Opened, began: float, deadline: float) -> None:
        """Take the new link into use, whose greeting was sent after `began`: first what was given up, then all that has no answer, except
        large values: those are sent by their own threads."""
        me = get_ident()
        link = Link(opened, self._clock, self._links + 1, shared_memory=self._reach.local_allowed)
        self._links = link.number
        self._server_pid = listener_of(opened.sock)
        former_server, self._server = self._server, opened.welcome.server
        if former_server not in (b"", self._server):  # after an outage of more than a ttl: nobody was told that the data is gone
            link.close()
            link.dispose()
            self._session_lost(Refusal("session-lost", "", known=False))
            return
        again, self._welcomed, self._ended = self._welcomed, True, ""
        self.limits = opened.welcome.limits
        self.ttl = opened.welcome.ttl  # there is a shortest and a longest one
        self._silence = min(self.ttl, LONGEST_POLL)
        self.leases.look()
        self._confirmed = max(self._confirmed, began)
        self._dues.begin()
        link.lends = True  # what was asked before, or given up, may be answered on it
        former, self._link = self._link, link
        if former is not None:  # of a signal handler in the middle of connecting, who was quicker
            former.close()
        if self._closed:  # meanwhile
            link.try_post(encode(Bye(self._seq + 1, self._acked())), me)
            self._broken(link, "closed")
            return
        if again:
            self.reconnects += 1
            self.news.add("warning", f"connected to the store at {self.address} again, by {link.where}")
        small = self._again(link)
        self._pay()
        try:
            if small and not link.post(_frames(small), None, me) and link.writer == me:
                self._pump(link, deadline, 0.0, me)
        except LinkBroken as broken:
            self._unsendable(link, broken)
        self._receive(link, backlog=True)

    def _again(self, link: Link) -> list[Pending]:
        """The small requests that have no answer yet, as given to this link now. The threads of the large ones are woken."""
        small = []
        for pending in list(self._pending.values()):
            if pending.on == link.number:
                continue
            pending.repeated = pending.repeated or pending.on != 0
            pending.on = 0
            if pending.reply is not None or pending.error is not None or pending.given_up[0]:
                continue
            if pending.parts is not None:
                _wake(pending)
            else:
                taken = False
                if pending.on == 0: pending.on = link.number; taken = True  # one step: its own thread asks it too  # fmt: skip
                if taken:
                    small.append(pending)
        return small

    def _failed(self, failed: DialFailed, first: bool) -> None:
        told = failed.told
        if told.reason == "session-lost" and told.refusal is not None:
            self._session_lost(told.refusal)
        elif told.reason == "store-closed" and not first:
            self._store_closed(f"the store at {self.address} is closing")
        elif told.reason in FINAL and not (told.refusal is not None and told.refusal.passing):
            problem = self._reach.problem()
            if first:
                raise problem
            for pending in list(self._pending.values()):
                self._fail(pending, copy.copy(problem))  # each thread raises its own
        elif self._ended and not first:
            for pending in list(self._pending.values()):
                self._fail(pending, StoreClosed("store-closed", self._ended, outcome=outcome_of(pending)))
        elif not first and self._now() - self._confirmed > max(self.leases.longest(self.ttl), self.timeout):
            self._session_lost(Refusal("session-lost", "", known=False), self._reach.problem())

    def _session_lost(self, refusal: Refusal, unreached: StoreUnreachable | None = None) -> None:
        """All that this session held is released; everybody who waits is told, or else the next one who asks."""
        silent = self._now() - self._confirmed
        happened = frozenset(refusal.happened) if refusal.known else None
        stopped = self._stopped(unreached) if unreached is not None else ((), ())
        loss = Loss(str(self.address), self.ttl, silent, known=refusal.known, unreached=unreached, stopped=stopped)
        if unreached is None and not refusal.known:
            self._server = b""  # it is told now that this is another one
        self.leases.end(loss.headline, self._seq)
        self._begin()
        told = False
        for pending in list(self._pending.values()):
            if pending.given_up[0]:
                self._pending.pop(pending.seq, None)
            elif pending.reply is None and pending.error is None:
                outcome = outcome_of(pending, happened)
                self._fail(pending, loss.error(outcome, told_of(pending, outcome)))
                told = True
        if not told:
            self._lost, self._refusing = loss.error("did not happen"), True
        self.news.add("error", loss.headline)

    def _timed_out(self, pending: Pending) -> StoreTimeout:
        outcome = outcome_of(pending)
        took = self._now() - pending.began
        headline = f"{asked_of(pending)} got no answer from the store at {self.address} within {took:.1f} s"
        why = [told_of(pending, outcome)]
        problem = self._reach.problem(look=False) if self._link is None and self._reach.failing else None
        if problem is not None:
            why.append(str(problem))
        elif not (pending.on or pending.repeated):
            why.append("the server did not take what was sent to it")
        stopped, help = self._stopped(problem)
        return StoreTimeout("store-timeout", headline, outcome=outcome, why=(*why, *stopped), help=help)

    def _stopped(self, problem: StoreUnreachable | None) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        """Why and help when the server's process is seen to stand still. `problem`: with reaching it, if it was not reached."""
        pid = self._server_pid
        if not pid or (problem is not None and problem.code == "port-refused") or not is_stopped(pid):
            return (), ()
        why, help = stopped_server(pid)
        return (why,), help

    # --- keeping ---

    @property
    def lease_left(self) -> float:
        """Seconds for which the server surely keeps this session, counted from when the last confirmed sign of life was *sent*."""
        return self._confirmed + self.ttl - self._now()

    def keep(self) -> bool:
        """Called by the keeper: say that we live, and do what others were kept from doing. Returns whether a connection is there."""
        link = self._link
        if link is not None and not self._closed:
            link.trim()
            if self._unanswered(link):
                self._broken(link, f"no sign of life from the server for {self._now() - link.heard:.1f} s, and a lock's lease must be kept")
            elif self._pay(ping=True):
                self._stuck = (0, 0)
                if self._pinged <= link.heard:
                    self._pinged = self._now()
            elif self._stuck != (link.number, link.sent_bytes):
                self._stuck, self._stuck_since = (link.number, link.sent_bytes), self._now()
            elif self._now() - self._stuck_since > self.ttl * STUCK:
                # Large values hold it up that do not move, or a signal handler that ran in the middle of sending and has not returned.
                self._broken(link, "nothing could be sent, and the lease must be kept")
        if self._driver == 0 and self._waiting:
            self._hand_over()
        self.news.tell()
        return self._link is not None

    def _unanswered(self, link: Link) -> bool:
        """Whether the last sign of life has had no answer for so long that another connection should be tried while there are leases
        to be kept. (Without one, a link may be silent for the whole ttl.) Not while something is being sent: that may take its time."""
        if not self.leases.held or link.writer or not self._pinged > link.heard:
            return False
        if self._now() - self._pinged <= max(self.leases.shortest(self.ttl) * UNANSWERED, BUSY_SECONDS):
            return False
        link.driven += 1  # as in `look_in`
        try:
            arrived = select.poll()  # perhaps nobody has read it yet: this process was stopped
            if not link.closed:
                arrived.register(link.sock, select.POLLIN)
            return not link.closed and not arrived.poll(0)
        finally:
            link.driven -= 1
            if link.closed:
                link.dispose()

    def look_in(self) -> bool:
        """Read what has arrived, unless another thread is about to; then False. Called by the keeper, and by who waits for room to send."""
        me = get_ident()
        driver = -1
        try:
            link = self._link
            if (driver := self._driver) == 0: self._driver = me; self._driving = None  # one step  # fmt: skip
            if link is None:
                return True
            if driver not in (0, me) or link.receiving:
                return False
            link.driven += 1
            try:
                for _ in range(LOOKS):
                    if link.closed or not link.wait(0.0):
                        break
                    self._receive(link)
            finally:
                link.driven -= 1
                if link.closed:
                    link.dispose()
            now = self._now()
            if now - link.heard > self.ttl:
                self._broken(link, f"no sign of life from the server for {now - link.heard:.1f} s")
            return True
        finally:
            if driver == 0:
                self._driver = 0
                if self._waiting:
                    self._hand_over()

    def revive(self) -> None:
        """Called in a thread of its own, for a session whose connection broke while nobody asked: connect again, for as long as the
        lease may last."""
        until = self._now() + max(self.leases.longest(self.ttl), self.timeout) + reach.ATTEMPT_SECONDS
        while self._now() < until and self._revive_once(until):
            pass

    def _revive_once(self, until: float) -> bool:
        driver = -1
        try:
            me = get_ident()
            # One step.
            if self._link is None and not self._refusing and self._driver == 0: driver = 0; self._driver = me; self._driving = None  # fmt: skip
            if driver != 0:
                return False
            self._connect(until)
            return True
        finally:
            if driver == 0:
                self._driver = 0
                if self._waiting:
                    self._hand_over()

    @property
    def worth_reviving(self) -> bool:
        """Whether the connection is gone and nobody is making another one."""
        return self._link is None and self._driver == 0 and not self._refusing and not self._ended

    @property
    def usable(self) -> bool:
        """Whether there is something to keep."""
        return not self._closed

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._link is not None

    @property
    def local(self) -> bool:
        """Whether the connection is a Unix socket."""
        link = self._link
        return link is not None and link.local

    def bytes(self) -> tuple[int, int]:
        """Sent and received, beside what went by shared memory."""
        link = self._link
        return (self._bytes[0] + (link.sent_bytes if link else 0), self._bytes[1] + (link.received_bytes if link else 0))

    # --- closing ---

    def close(self, wait: float = BYE_SECONDS) -> None:
        """End the session: the server releases what it held. Threads that wait get StoreClosed. May be called again. `wait`: seconds for
        the server's answer. In a forked child it does nothing: the session is the parent's."""
        if self.foreign:
            return
        me = get_ident()
        now = self._now()
        bye: Pending | None = None
        link = self._link
        try:
            already, self._closed = self._closed, self._closed or "this store object was closed"  # one step
            self._finish(self._closed)
            if link is not None and not already:
                while True:
                    seq = self._seq + 1
                    bye = Pending(now, now + wait, False, seq, Bye, encode(Bye(seq, self._acked())), None, link.number)
                    if self._seq < seq: self._pending[seq] = bye; self._seq = seq; break  # one step  # fmt: skip
                if not link.post(_frames((bye,)), bye, me) and link.writer == me:  # behind what others send: they have just been woken
                    self._pump(link, bye.deadline, 0.0, me)
                if wait > 0:
                    self._await(bye, me)
        except LinkBroken:
            return
        finally:
            if bye is not None and self._pending.get(bye.seq) is bye:
                self._pending.pop(bye.seq, None)
            if link is not None:
                self._broken(link, "closed")

    def abandon(self) -> None:
        """In a forked child: the session is the parent's, and so is the connection, of which the child closes its descriptors."""
        self.foreign = True
        self.closed_before_fork = self._closed
        link, self._link = self._link, None
        if link is not None:
            link.abandon()
        self.leases.end("the parent process has it, not this forked child")
        self._finish("the call was begun in the parent process, before the fork")


_leaving = False


def leave() -> None:
    """The interpreter is about to end, and closes its stores."""
    global _leaving
    _leaving = True


def _stay_when_leaving() -> None:
    """At the end of the interpreter a daemon thread stays where it is, as in every other wait: the program has not closed the store, and
    a traceback at the end of a healthy job is a false alarm."""
    if _leaving and threading.current_thread().daemon:
        never = threading.Lock()
        never.acquire()
        never.acquire()


def _frames(pendings: Sequence[Pending]) -> bytes:
    """Their requests, as they are sent."""
    return b"".join([part for pending in pendings for part in (_pack(len(pending.message), 0), pending.message)])


def _not_on(pending: Pending, link: Link) -> None:
    """This link did not take all of its request."""
    if pending.on == link.number: pending.on = 0  # one step: it may be on another one by now  # fmt: skip


def _wake(pending: Pending) -> bool:
    """Wake its thread, if that sleeps."""
    waiter, pending.waiter = pending.waiter, None  # one step: two threads may want to
    if waiter is None:
        return False
    waiter.release()
    return True
