"""Leases of a session, which last for as long as it gives signs of life: the holder's side.

The server passes a lock on when it has heard nothing from the session for the lock's `ttl`. The
holder cannot ask whether that is so: the answer is old when it arrives. It counts by itself, from
when the last sign of life that the server confirmed was *sent*, and stops earlier than the server
can (as Chubby's and etcd's clients do). A lease that was once over is over for good, whatever is
confirmed later: in between somebody else may have had the lock.

No lock is taken here, so that signal handlers may come between any two calls. "One step" is
explained in `session.py`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from rallypoint.clock import Clock
from rallypoint.wire.messages import AnyReply, Granted

if TYPE_CHECKING:
    from rallypoint.store.client.session import Session

SURE = 0.99
"""The share of a lease that the holder counts on: two machines' clocks, and a virtual machine's,
differ by far less than a hundredth.
"""

State = Literal["asked for", "held", "unwanted", "on its way", "done"]
"""State of a lease. `unwanted`: a signal handler's exception, or a server that does not answer, has
kept its holder from giving it back; the keeper sees to it, and to nothing else of it: then it is
`on its way`, and counts until the server has it. `done`: there is nothing to give back; the keeper
forgets it, if nobody else has."""


class Figures(msgspec.Struct):
    """Figures about the locks of one name, by one store object."""

    acquisitions: int = 0
    timeouts: int = 0
    losses: int = 0
    wait_seconds: float = 0.0
    hold_seconds: float = 0.0


class Lost(threading.Event):
    """An event that is set when its lease is over: by the keeper's thread, or else by whoever looks
    first. A process that was stopped for a minute finds it set, also before the keeper has run. A
    thread that waits for it sleeps on a lock of its own, not on the one that an Event has: a signal
    handler may set it while the frame below it does anything with it."""

    def __init__(self, lease: Lease) -> None:
        super().__init__()
        self._lease = weakref.ref(lease)  # a circle would be garbage for each lock that is taken
        self._over = False
        self._sleepers: list[threading.Lock] = []

    def __repr__(self) -> str:
        lease = self._lease()
        return f"<lost: {'set' if self.is_set() else 'not set'}{f', of {lease.what}' if lease is not None else ''}>"

    def is_set(self) -> bool:
        """Tell whether the lease is over. Costs a look at the clock."""
        lease = self._lease()
        return self._over or (lease is not None and lease.over)

    def set(self) -> None:
        """Wake all threads that wait."""
        self._over = True
        lease = self._lease()
        if lease is not None:
            lease.because = lease.because or "somebody set `lost`"
        while self._sleepers:
            try:
                sleeper = self._sleepers.pop()
            except IndexError:  # another thread, or a handler, does the same
                return
            sleeper.release()

    def clear(self) -> None:
        """Does nothing: what is lost stays lost."""

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until the lease is over, or for `timeout` seconds; return whether it is over."""
        clock = Clock()
        while not self.is_set():
            left = math.inf if timeout is None else timeout - clock.elapsed()
            if left <= 0.0:
                return False
            self._sleep(left)
        return True

    def _sleep(self, seconds: float) -> None:
        """Until it is set, or the lease may be over, for so many seconds at most."""
        lease = self._lease()
        if lease is not None and lease.state != "done":
            seconds = min(seconds, lease.left)
        lease = None
        sleeper = threading.Lock()
        sleeper.acquire()
        self._sleepers.append(sleeper)
        if not self._over:  # `set` empties the list after it has said so
            sleeper.acquire(timeout=min(max(0.0, seconds), threading.TIMEOUT_MAX))
        with contextlib.suppress(ValueError):
            self._sleepers.remove(sleeper)


class Lease:
    """One lock that is held, or asked for: then `token` is 0. `because`: why it is over, "" while
    it is not. `gone`: its session is over, so that there is nothing to give back. `state` is set in
    one step by whoever holds it. `block`: what must be alive while a `with` statement holds it.
    `asker`: what is alive while a call asks for it."""

    __slots__ = (
        "__weakref__", "asker", "because", "began", "block", "figures", "gone", "leases", "logged",
        "lost", "name", "reply", "session", "state", "thread",
        "token", "ttl", "what",
    )  # fmt: skip

    def __init__(self, leases: Leases, name: str, what: str, ttl: float, figures: Figures) -> None:
        """Make a lease that is not asked for yet. `what`: 'the lock "w"'."""
        self.state: State = "asked for"
        self.thread = get_ident()
        self.block: weakref.ref[Any] | None = None
        self.asker: weakref.ref[Any] | None = None
        self.name = name
        self.what = what
        self.ttl = ttl
        self.figures = figures
        self.token = 0
        self.reply: AnyReply | None = None  # see `Session.request`
        self.session: Session | None = None
        self.because = ""
        self.gone = False
        self.logged = False  # that it has been waited for
        self.leases = leases
        self.lost = Lost(self)
        self.began = leases.now()

    def __repr__(self) -> str:
        state = self.because or (f"token {self.token}" if self.token else "asked for")
        return f"<Lease of {self.what}: {state}>"

    @property
    def is_abandoned(self) -> bool:
        """True if its call ended and did not say so: a second signal struck while the first one's
        exception was handled."""
        return self.state == "asked for" and self.asker is not None and self.asker() is None

    @property
    def nested(self) -> bool:
        """True if this thread waits for the same lock already, in a frame below the signal handler
        that it runs."""
        others = list(self.leases.held)
        return any(
            one.thread == self.thread
            and one.name == self.name
            and one.state == "asked for"
            and one is not self
            and not one.is_abandoned
            for one in others
        )

    def begin(self) -> None:
        """Watch over it, which is about to be asked for, until `drop`."""
        self.began = self.leases.now()
        self.leases.held[self] = None
        self.leases.session.keep_alive.set_interval()

    @property
    def until(self) -> float:
        """Until when it is surely held, by the clock that `now` shows."""
        confirmed = self.leases.confirmed()
        return max(confirmed, self.began) + self.ttl * SURE

    @property
    def left(self) -> float:
        """Seconds for which it is surely held; 0 when it is over."""
        return 0.0 if self.over else max(0.0, self.until - self.leases.now())

    @property
    def over(self) -> bool:
        """True if it may be somebody else's by now."""
        if not self.because and self.state != "done":
            now = self.leases.now()
            if now >= self.until:
                self.end(
                    f"no sign of life of this process was confirmed for {now - self.until + self.ttl * SURE:.1f} s"
                )
        return self.because != ""

    def end(self, because: str) -> None:
        """Note that it is over, if it was not before."""
        self.because = self.because or because
        self.lost.set()

    def hold(self) -> None:
        """Note that the reply grants it."""
        assert isinstance(self.reply, Granted)
        self.token = self.reply.token
        self.state = "held"

    def give_up(self) -> None:
        """Leave it to the keep-alive to give it back, if it was granted: an exception ends its
        call."""
        if isinstance(self.reply, Granted) and self.state != "done":
            self.token = self.reply.token
            self.state = "unwanted"
        else:
            self.state = "done"
        self.leave()

    def asked_by(self, asker: object) -> None:
        """Note what is alive while a call asks for it."""
        self.asker = weakref.ref(asker)

    def drop(self) -> None:
        """Stop watching it: it is done."""
        self.block = None
        self.leases.held.pop(self, None)

    def leave(self) -> None:
        """Ring the keep-alive: it is unwanted, or its block is gone."""
        self.leases.session.keep_alive.ring()

    def end_with(self, block: object) -> None:
        """Make it unwanted when this object goes."""
        self.block = weakref.ref(block, lambda _: self.leave())


_all: dict[weakref.ref[Leases], None] = {}
"""Leases of this process; also those that a forked child has inherited, which are over. (A WeakSet
cannot be gone through while another thread makes a session.)"""


def _forget(ref: weakref.ref[Leases], known: dict[weakref.ref[Leases], None] = _all) -> None:
    known.pop(ref, None)


def names_held(thread: int) -> set[str]:
    """Return the names of the locks that a thread of this process has, by whatever session, as far
    as is known here."""
    return {
        lease.name
        for ref in list(_all)
        if (leases := ref()) is not None
        for lease in list(leases.held)
        if lease.thread == thread and lease.state == "held" and not lease.gone
    }


class Leases:
    """All of one session."""

    def __init__(
        self, session: Session, now: Callable[[], float], confirmed: Callable[[], float]
    ) -> None:
        """Begin without any. `confirmed`: when the last sign of life was sent that the server is
        known to have had."""
        self.session = session
        self.now = now
        self.confirmed = confirmed
        self.held: dict[Lease, None] = {}
        _all[weakref.ref(self, _forget)] = None

    def __len__(self) -> int:
        return len(self.held)

    def look(self) -> float:
        """End those that are over; when the next one will be, infinity without one. To be called
        before a sign of life counts as confirmed: it does not bring back what was over."""
        following = float("inf")
        for lease in list(self.held):
            if not lease.over:
                following = min(following, lease.until)
        return following

    def shortest(self, ttl: float) -> float:
        """Return the ttl of the shortest of them, or `ttl` if that is shorter."""
        return min([ttl, *[lease.ttl for lease in list(self.held) if not lease.gone]])

    def longest(self, ttl: float) -> float:
        """Return for how long the server keeps a session with this ttl, as far as is known here: as
        long as the longest that it has granted."""
        return max(
            [ttl, *[lease.ttl for lease in list(self.held) if lease.token and not lease.gone]]
        )

    def tidy(self) -> list[Lease]:
        """Forget what is done, and return what is to be given back because nobody else will: also
        what a `with` statement had that is over. (A signal that strikes before the first
        instruction of `__exit__` leaves such.)"""
        left = []
        for lease in list(self.held):
            if lease.state == "held" and lease.block is not None and lease.block() is None:
                lease.state = "unwanted"
            if lease.is_abandoned:
                lease.give_up()
            if lease.state == "done" or (lease.state in ("unwanted", "on its way") and lease.gone):
                lease.drop()
            elif lease.state == "unwanted":
                left.append(lease)
        return left

    def end(self, because: str) -> None:
        """End all of them with the session."""
        for lease in list(self.held):
            lease.gone = True
            lease.end(because)
