"""The thread that says, for every session of this process, that it lives.

One thread per process, made with the first session and ended with the last: a thread per session would cost a process with a
thousand of them its memory. A session whose connection broke while nobody asked is connected again in a thread of its own, so
that one server which does not answer holds up no other session's sign of life.
"""

from __future__ import annotations

import heapq
import itertools
import os
import signal
import threading
import weakref
from typing import Literal

from rallypoint.clock import Clock
from rallypoint.store.session import Session

SIGNS_PER_LEASE = 3
"""Signs of life per ttl: two may be lost or late."""

LOOK_IN_SECONDS = 0.1
"""After a sign of life its answer is read, so that the lease is known to have been renewed."""

Work = Literal["keep", "look in"]


class _Keeper:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.kick = threading.Event()
        self._clock = Clock()
        self._mutex = threading.Lock()
        # A heap, earliest first; the count keeps equal times apart. With a scan of all for each, a thousand sessions cost half a processor.
        self._due: list[tuple[float, int, weakref.ref[Session], Work]] = []
        self._count = itertools.count()
        self._thread: threading.Thread | None = None

    def add(self, session: Session) -> None:
        at = self._clock.monotonic() + session.ttl / SIGNS_PER_LEASE
        with self._mutex:
            earliest = not self._due or at < self._due[0][0]
            heapq.heappush(self._due, (at, next(self._count), weakref.ref(session), "keep"))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rallypoint: keeper", daemon=True)
                self._thread.start()
        if earliest:
            self.kick.set()

    def _run(self) -> None:
        _leave_signals_to_the_main_thread()
        while True:
            self.kick.clear()
            now = self._clock.monotonic()
            due = []
            with self._mutex:
                while self._due and (self._due[0][0] <= now or not _usable(self._due[0][2])):
                    due.append(heapq.heappop(self._due)[2:])
            for ref, work in due:
                self._visit(ref, work)
            with self._mutex:
                if not self._due:
                    self._thread = None
                    return
                earliest = self._due[0][0]
            self.kick.wait(min(max(0.0, earliest - self._clock.monotonic()), threading.TIMEOUT_MAX))

    def _visit(self, ref: weakref.ref[Session], work: Work) -> None:
        session = ref()
        if session is None or not session.usable:
            return
        following: tuple[float, Work] = (self._clock.monotonic() + session.ttl / SIGNS_PER_LEASE, "keep")
        try:
            if work == "look in":
                session.look_in()
            elif session.keep():
                following = (self._clock.monotonic() + min(LOOK_IN_SECONDS, session.ttl / SIGNS_PER_LEASE / 2), "look in")
            elif session.worth_reviving:
                threading.Thread(target=_revive, args=(session,), name="rallypoint: reconnect", daemon=True).start()
        except Exception:
            # One session's trouble (a logging handler that raises, no memory, no thread) must not end the signs of life of the others.
            import logging

            logging.getLogger("rallypoint").exception("a sign of life to the store at %s was not given", session.address)
        with self._mutex:
            heapq.heappush(self._due, (following[0], next(self._count), ref, following[1]))


def _usable(ref: weakref.ref[Session]) -> bool:
    session = ref()
    return session is not None and session.usable


def _revive(session: Session) -> None:
    _leave_signals_to_the_main_thread()
    session.revive()


def _leave_signals_to_the_main_thread() -> None:
    """A signal that the kernel gave to this thread would not wake the main thread, which has to handle it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


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


def wake() -> None:
    """A session was closed: if it was the last, the thread ends now."""
    if _keeper is not None:
        _keeper.kick.set()


def _after_fork() -> None:
    global _keeper, _making
    _keeper, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
