"""The thread that says, for every session of this process, that it lives, and that ends leases when they are over.

One thread per process, made with the first session and ended with the last: a thread per session would cost a process with a
thousand of them its memory. A session whose connection broke while nobody asked is connected again in a thread of its own, so
that one server which does not answer holds up no other session's sign of life.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import threading
import traceback
import weakref
from collections import deque
from functools import partial
from typing import Literal

from rallypoint.clock import Clock
from rallypoint.errors import RallypointError, StoreTimeout
from rallypoint.store import background
from rallypoint.store.lease import Lease
from rallypoint.store.session import Session
from rallypoint.wire.messages import Unlock

SIGNS_PER_LEASE = 3
"""Signs of life per ttl, of the session or of the shortest lease in it: two may be lost or late."""

LOOK_IN_SECONDS = 0.1
"""After a sign of life its answer is read, so that the lease is known to have been renewed."""

LONG_WAIT = 1.0
"""Seconds. Who waits for a lock for longer is told in the log, by the next visit: somebody may look for the reason."""

Work = Literal["keep", "sooner", "look in"]
"""A visit of a session. Of "keep" each has always one ahead, which nothing but its end takes away. "sooner" is a visit between two of
these; it leads to another one only while the next regular one is too late for a lease."""


class _Bell:
    """Wakes the keeper. A signal handler may ring in the middle of a ring, which with an Event would be the end of both."""

    def __init__(self) -> None:
        self._rung = threading.Lock()
        self._rung.acquire()

    def ring(self) -> None:
        try:
            self._rung.release()
        except RuntimeError:  # it has been rung, and nobody has come yet
            pass

    def wait(self, seconds: float) -> None:
        self._rung.acquire(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX))


class _Keeper:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.bell = _Bell()
        self._clock = Clock()
        self._mutex = threading.Lock()
        # A heap, earliest first; the count keeps equal times apart. With a scan of all for each, a thousand sessions cost half a processor.
        self._due: list[tuple[float, int, weakref.ref[Session], Work]] = []
        self._sooner: deque[tuple[float, weakref.ref[Session]]] = deque()  # visits that somebody wants, not in the heap yet
        self._count = itertools.count()
        self._runs = False

    def add(self, session: Session) -> None:
        at = session.keep_at = session.soon_at = self._clock.monotonic() + session.ttl / SIGNS_PER_LEASE
        with self._mutex:
            earliest = not self._due or at < self._due[0][0]
            heapq.heappush(self._due, (at, next(self._count), weakref.ref(session), "keep"))
            if not self._runs:
                self._runs = True
                try:
                    background.start(self._run, "keeper")
                except RuntimeError:  # no more threads: the next session tries again
                    self._runs = False
                    raise
        if earliest:
            self.bell.ring()

    def hurry(self, session: Session, ttl: float) -> None:
        """Come by early enough for a lease of `ttl` seconds. Called for every lock, also in signal handlers, hence without a mutex; and an
        exception between any two calls, or another thread, leads to a visit too many at worst."""
        at = self._clock.monotonic() + ttl / SIGNS_PER_LEASE
        if at < session.soon_at:
            self._sooner.append((at, weakref.ref(session)))
            session.soon_at = at
            self.bell.ring()

    def _run(self) -> None:
        while True:
            now = self._clock.monotonic()
            due = []
            with self._mutex:
                self._take_in()
                while self._due and (self._due[0][0] <= now or not _usable(self._due[0][2])):
                    due.append(heapq.heappop(self._due))
            for _, _, ref, work in due:
                self._visit(ref, work)
            with self._mutex:
                self._take_in()
                if not self._due:
                    self._runs = False
                    return
                earliest = self._due[0][0]
            self.bell.wait(earliest - self._clock.monotonic())

    def _visit(self, ref: weakref.ref[Session], work: Work) -> None:
        session = ref()
        if session is None or not session.usable:
            return
        leases = session.leases
        if work != "look in":
            session.soon_at = math.inf  # what is asked for from now on may not be seen by this visit
        try:
            leases.look()
            for lease in leases.tidy():
                lease.state = "on its way"
                try:
                    background.start(partial(_give_back, session, lease), "unlock")
                except BaseException:  # no thread: the next visit tries again
                    lease.state = "unwanted"
                    raise
            if work == "look in":
                session.look_in()
            else:
                _tell_who_waits(session, self._clock.monotonic())
                if session.keep():
                    soon = min(LOOK_IN_SECONDS, leases.shortest(session.ttl) / SIGNS_PER_LEASE / 2)
                    self._push(self._clock.monotonic() + soon, ref, "look in")
                elif session.worth_reviving:
                    background.start(session.revive, "reconnect")
        except Exception:
            # One session's trouble (no memory, no thread) must not end the signs of life of the others.
            session.news.add("error", f"a sign of life to the store at {session.address} was not given\n{traceback.format_exc().rstrip()}")
            session.news.tell()
        if work == "look in":
            return
        now = self._clock.monotonic()
        # When a lease is over, who waits for that is to be told then, not at the next sign of life.
        at = min(now + leases.shortest(session.ttl) / SIGNS_PER_LEASE, max(leases.look(), now))
        if work == "keep":
            session.keep_at = at
            self._push(at, ref, "keep")
        elif at < session.keep_at:
            self._push(at, ref, "sooner")
        session.soon_at = min(at, session.keep_at)

    def _take_in(self) -> None:
        while self._sooner:
            at, ref = self._sooner.popleft()
            heapq.heappush(self._due, (at, next(self._count), ref, "sooner"))

    def _push(self, at: float, ref: weakref.ref[Session], work: Work) -> None:
        with self._mutex:
            heapq.heappush(self._due, (at, next(self._count), ref, work))


def _tell_who_waits(session: Session, now: float) -> None:
    for lease in list(session.leases.held):
        if not lease.token and not lease.logged and now - lease.began > LONG_WAIT:
            lease.logged = True
            session.news.add("info", f"waiting for {lease.what} at {session.address} for {now - lease.began:.1f} s")
            session.news.tell()


def _usable(ref: weakref.ref[Session]) -> bool:
    session = ref()
    return session is not None and session.usable


def _give_back(session: Session, lease: Lease) -> None:
    """Ask until there is an answer: a server that is frozen still has it. When the session is over there is nothing to give back. Until
    then the lease counts: a session that is given up earlier than the server does would keep the lock from everybody."""
    try:
        while not lease.gone:
            try:
                session.ask(Unlock, (lease.name, lease.token), None)
                return
            except StoreTimeout:
                continue
            except RallypointError:
                return
    finally:
        lease.state = "done"
        lease.drop()


_keeper: _Keeper | None = None
_making = threading.Lock()


def keep(session: Session) -> None:
    """Keep this session alive until it is closed or nobody refers to it any more."""
    global _keeper
    with _making:
        if _keeper is None or _keeper.pid != os.getpid():  # threads are not forked
            _keeper = _Keeper()
        keeper = _keeper
    keeper.add(session)


def hurry(session: Session, ttl: float) -> None:
    """This session, which is kept, is about to have a lease of `ttl` seconds: give signs of life often enough for it."""
    keeper = _keeper
    if keeper is not None:
        keeper.hurry(session, ttl)


def wake() -> None:
    """A session was closed: if it was the last, the thread ends now."""
    if _keeper is not None:
        _keeper.bell.ring()


def _after_fork() -> None:
    global _keeper, _making
    _keeper, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
