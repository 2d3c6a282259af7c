"""The thread of a session that says that it lives, ends leases when they are over, and brings back
what interrupted calls have left.

Its sign of life is a request like any other, on a connection of the session's pool: it connects
again when that is lost, and finds out that a server is gone or frozen by its deadline. A process
that asks for something all the time needs none.
"""

from __future__ import annotations

import threading
import traceback
from typing import TYPE_CHECKING, Any

from rallypoint.errors import RallypointError
from rallypoint.host import threads
from rallypoint.wire.messages import Ping, Request, Unlock

if TYPE_CHECKING:
    from rallypoint.store.client.session import Session

BUSY_SECONDS = 1.0
"""Least seconds for the answer to a sign of life: so long a server, or this process, may be busy. A
lease that is not much longer is lost with its connection."""

BEHIND_A_CALL = 1.25
"""Intervals between two signs of life of the thread while a call waits: a quarter of one is enough
for the answer to the call's own. A server of 500 nodes has half the work."""

LOOKS_PER_ORPHAN = 4
"""Looks for connections that the server has closed, or the network has reset, in the time within
which a session must have another one."""

LONG_WAIT = 1.0
"""Seconds. A wait for a lock that is longer is told in the log: somebody may look for the reason.
"""


class _Bell:
    """Wakes the thread. A signal handler may ring in the middle of a ring, which with an Event
    would be the end of both.
    """

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


class KeepAlive:
    """See the module. `ring` and `ask_later` may be called in signal handlers and destructors."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._bell = _Bell()
        self._later: list[tuple[type[Request], tuple[Any, ...]]] = []
        self._started = False
        self._only = threading.Lock()  # of the thread that runs: a second one has nothing to do
        self.interval = 0.0  # seconds between two signs of life

    def start(self) -> None:
        """Start the thread, if it does not run. Raises RuntimeError when the machine has no more
        threads.
        """
        if not self._started:
            self._started = True
            try:
                threads.start(self._run, "keep-alive")
            except BaseException:
                self._started = False
                raise

    def ring(self) -> None:
        """Let the thread look around now."""
        self._bell.ring()

    def set_interval(self) -> None:
        """Give signs of life often enough for the shortest lease, which has changed."""
        session = self._session
        former, self.interval = (
            self.interval,
            session.leases.shortest(session.ttl) / session.signs,
        )
        if self.interval < former:
            self._bell.ring()

    def ask_later(self, kind: type[Request], fields: tuple[Any, ...]) -> None:
        """Ask for this until there is an answer, whatever it is."""
        self._later.append((kind, fields))
        self._bell.ring()

    def _run(self) -> None:
        if not self._only.acquire(blocking=False):
            return  # a signal handler raised in `start`, when the thread had begun
        session = self._session
        while session.end is None:
            try:
                pause = self._round(session)
            except RallypointError:  # the server refuses this client: whoever asks next is told so
                pause = self.interval
            except Exception:
                trouble = traceback.format_exc().rstrip()
                session.news.add(
                    "error",
                    f"a sign of life to the store at {session.address} was not given\n{trouble}",
                )
                pause = self.interval
            session.news.tell()
            self._bell.wait(pause)
        session.slots.drop_idle()
        session.news.tell()

    def _round(self, session: Session) -> float:
        """Do what is due, and return for how many seconds there is nothing more to do."""
        now = session.leases.now
        patience = max(self.interval, BUSY_SECONDS)
        session.leases.look()
        session.look()
        session.cancel_abandoned(patience)
        for lease in session.leases.tidy():
            if session.tell(Unlock, (lease.name, lease.token), patience):
                lease.state = "done"
                lease.drop()
        while self._later and session.end is None and session.tell(*self._later[0], patience):
            del self._later[0]
        _tell_who_waits(session, now())
        if now() >= self._due() or session.slots.connection is None:
            session.tell(Ping, (), patience)
        self.set_interval()
        due = min(self._due(), session.leases.look())
        return min(due - now(), session.orphan / LOOKS_PER_ORPHAN)

    def _due(self) -> float:
        """Return when the thread has to give a sign of life. A call that waits gives its own, so
        that this is needed only when that one is late."""
        shares = BEHIND_A_CALL if self._session.slots.has_calls else 1.0
        return self._session.confirmed + self.interval * shares


def _tell_who_waits(session: Session, now: float) -> None:
    for lease in list(session.leases.held):
        if not lease.token and not lease.logged and now - lease.began > LONG_WAIT:
            lease.logged = True
            session.news.add(
                "info",
                f"waiting for {lease.what} at {session.address} for {now - lease.began:.1f} s",
            )
