"""A lock that all clients of a store share: first come, first served, leased, fenced.

Held by a thread of a process, for as long as that process gives signs of life: a lock of a process
that died is passed on. What this cannot give is what no lock over a network can: a holder that was
stopped, and goes on without knowing, is a second holder for a moment. `grant.lost` tells it so as
early as it can be known; the token of the grant, given to whatever is written to (`store.set(...,
fence=grant.token)`), makes a late write harmless. (Chubby's sequencers, etcd's `concurrency`
package, and the debate about Redlock, have come to this.)
"""

from __future__ import annotations

import math
import os
import select
import threading
from datetime import timedelta
from threading import get_ident
from types import EllipsisType, TracebackType
from typing import Any

from rallypoint.clock import Clock
from rallypoint.errors import (
    LeaseLost,
    LockTimeout,
    RallypointError,
    SessionLost,
    StoreClosed,
    UsageError,
    WouldDeadlock,
)
from rallypoint.store import limits
from rallypoint.store.client.arguments import key_of, positive, seconds_of
from rallypoint.store.client.client import Client
from rallypoint.store.client.keepalive import LONG_WAIT
from rallypoint.store.client.lease import Lease, Lost, names_held
from rallypoint.wire import messages as wire
from rallypoint.wire.values import shown

THREAD_NAME = 64
"""Characters of a thread's name that the server is told, to name it to others."""

QUEUE_SHOWN = 4
"""Maximum callers in front that a headline names; `LockTimeout.queue` has more."""

STALE_SECONDS = 0.01
"""Between two questions whether the server has been told by now what an interrupted thread gave up:
some round trips.
"""

STALE_TRIES = 500
"""Then, after at least 5 s, what the server says stands."""

_clock = Clock()
_process = (0, "")  # its pid, and a name that no other process of any machine has


class Grant:
    """A lock that was had, from then until it was given back or lost. `token`: the revision of the
    store at the grant; tokens grow, over all locks. `lost`: a `threading.Event` that is set when
    somebody else may have the lock."""

    __slots__ = ("__weakref__", "_lease", "_since", "_store", "lost", "name", "pid")

    def __init__(self, store: Client, name: str, lease: Lease) -> None:
        self.name = name
        self.lost: Lost = lease.lost
        self.pid = os.getpid()
        self._store = store
        self._lease = lease
        self._since = 0.0

    @property
    def token(self) -> int:
        return self._lease.token

    @property
    def left(self) -> float:
        """Seconds for which the lock is surely held if no further sign of life gets through; 0 when
        it is lost.
        """
        return self._lease.left

    @property
    def held_for(self) -> float:
        """Seconds since the grant."""
        return _clock.monotonic() - self._since

    def check(self) -> None:
        """Raise LeaseLost if the lock is lost. Costs a look at the clock and asks nobody."""
        if self.pid != os.getpid():
            raise LeaseLost(
                "lock-lost",
                _of_parent(self.name, self.pid),
                why=("what a process holds its forked children do not",),
            )
        if self._lease.over:
            raise _lost(
                self,
                "the server passes a lock on when its holder was silent for that long: somebody else may have it",
            )

    def __repr__(self) -> str:
        left = self._lease.left  # which looks at the clock
        state = f"lost: {self._lease.because}" if self._lease.because else f"{left:.1f} s left"
        return f"<Grant of {shown(self.name)}: token {self.token}, {state}>"


class Lock:
    """A lock, by its name: `with store.lock("checkpoint") as grant: ...`. Made by `Store.lock`,
    which asks nobody.

    - **First come, first served.** A thread that asks waits behind all that asked before, of
      whatever process.
    - **Leased.** The lock is passed on when its holder's session ends (at once when the process
      ends; when it is killed, see `docs/concepts/coordination.md`), and when the holder gave no
      sign of life for `ttl` seconds: it was stopped, its network is gone, something holds the
      interpreter lock. Signs of life are given by themselves, at least three per `ttl`, for as long
      as it is held.
    - **Lost** is told: `grant.lost` is set, `grant.check()` raises, and the `with` block ends in
      LeaseLost. When another exception is on its way it gets a note instead.
    - **Fenced.** `store.set(key, value, fence=grant.token)` is refused once the grant is over; so
      with `delete`, `compare_and_set`, `update`.
    - **Held by a thread.** Waiting for it in the thread that has it, by whatever object, is
      WouldDeadlock (`lock-twice`), and so is waiting for what is held by somebody that waits, over
      others perhaps, for what this thread has (`lock-cycle`). Both are told at once. Threads of one
      process queue up like others. A forked child holds nothing of its parent's.
    - **Signals.** Handlers run while it waits. One that raises (Ctrl-C) takes the caller out of the
      queue at once, and gives the lock back if it was granted in that moment. Between `acquire()`
      and a `try` of your own there is a gap in which it could be had and not given back; `with` has
      none there. It has one between the end of its block and the first instructions of `__exit__`:
      the lock is then given back when the Lock object goes, which is at once if it was made in the
      `with` statement.

    `ttl`: seconds, from 0.05 to a week. One that is longer than the store's own (`connect(ttl=)`)
    keeps the session for as long while it is held. `timeout`: seconds to wait; None: for as long as
    the server lives.
    """

    def __init__(
        self,
        store: Client,
        name: str,
        *,
        ttl: float | timedelta = 10.0,
        timeout: float | timedelta | None = None,
    ) -> None:
        self.name = key_of(name)
        self.ttl = limits.lease(positive("ttl", ttl))
        self.timeout = seconds_of(timeout)
        self._store = store
        self._grants: dict[
            int, list[Grant]
        ] = {}  # by thread: the newest last; of those before it the lease was lost

    # --- having it ---

    def acquire(self, *, timeout: float | timedelta | EllipsisType | None = ...) -> Grant:
        """Wait for the lock, for `timeout` seconds (as given to `lock()`, if not here; None: for as
        long as the server lives).

        Raises LockTimeout, which names the holder and those in front; then this caller does not
        stand in the queue any more. WouldDeadlock at once. What the store raises (`StoreTimeout`,
        `SessionLost`, ...) leaves nobody in the queue and no lock held.
        """
        seconds = self.timeout if isinstance(timeout, EllipsisType) else seconds_of(timeout)
        reply = self._ask(seconds)
        if (
            reply.__class__ is Grant
        ):  # without a call, in which a signal could strike: nobody would have the lock in hand
            return reply
        raise self._timed_out(reply, seconds)  # type: ignore[arg-type]  # which mypy does not see

    def acquire_nowait(self) -> Grant | None:
        """Return the lock, if it is free now, else None; also when it is this thread that has
        it."""
        reply = self._ask(0.0)
        return reply if reply.__class__ is Grant else None

    def release(self) -> None:
        """Give the lock back that this thread has; the one that waits longest has it then, before
        this returns.

        Raises LeaseLost when it was lost before; UsageError when this thread does not have it, a
        forked child included. When the store gives no answer (StoreTimeout), or a signal handler
        raises, it is given back as soon as the store answers again.
        """
        mine = self._mine()
        if not mine:
            raise self._not_held()
        grant = mine[-1]
        if grant.pid != os.getpid():
            del self._grants[get_ident()]
            raise UsageError(
                "usage",
                _of_parent(self.name, grant.pid),
                help=(("ask for it here, if it is needed here", ""),),
            )
        self._give_back(grant)

    def __enter__(self) -> Grant:
        reply = self._ask(self.timeout, block=True)
        if reply.__class__ is Grant:  # as in `acquire`
            return reply
        raise self._timed_out(reply, self.timeout)  # type: ignore[arg-type]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        grant = None
        try:
            grant = self._newest()
            self.release()
        except RallypointError as trouble:
            if error is None:
                raise
            error.add_note(f"  then   {trouble}")
        except BaseException:
            if grant is not None and grant._lease.state == "held":
                grant._lease.state = "unwanted"
                grant._lease.leave()
            raise

    # --- about it ---

    @property
    def held(self) -> bool:
        """True if this thread has it now, by this object, and it is not lost. Asks nobody."""
        grant = self._newest()
        return grant is not None and not grant.lost.is_set()

    def locked(self) -> bool:
        """Tell whether anybody has it. One request; the answer may be old when it arrives."""
        reply, _ = self._store.ask(wire.Lock, self.name, _owner(), -1.0)
        return reply.__class__ is not wire.Absent

    def __repr__(self) -> str:
        grant = self._newest()
        if grant is not None and grant._lease.over:
            state = f"lost by this thread: {grant._lease.because}"
        elif grant is not None:
            state = f"held by this thread for {grant.held_for:.1f} s, token {grant.token}"
        elif any(other[-1].pid == os.getpid() for other in list(self._grants.values()) if other):
            state = "held by another thread"
        else:
            state = "not held through this object"
        return f"<Lock {shown(self.name)}: {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (
            type(self),
            self._store,
            self.name,
            self.ttl,
            None if self.timeout == math.inf else self.timeout,
        )

    # --- within ---

    def _newest(self) -> Grant | None:
        """Return the last grant of this thread that was not given back."""
        mine = self._mine()
        return mine[-1] if mine and mine[-1].pid == os.getpid() else None

    def _mine(self) -> list[Grant]:
        """Return the grants of this thread, or of its parent where it was forked; without what an
        exception has kept in the list."""
        mine = self._grants.get(get_ident(), [])
        while mine and mine[-1]._lease.state != "held":
            mine.pop()
        return mine

    def _ask(self, seconds: float, *, block: bool = False) -> Grant | wire.TimedOut:
        """Wait for so many seconds. An exception of a signal handler in here leaves nothing behind.
        `block`: for a `with` statement.
        """
        began = now = _clock.monotonic()
        tries = 0
        while True:
            lease = self._store.lease(self.name, self.ttl)
            grant = Grant(self._store, self.name, lease)
            lease.asked_by(grant)
            if block:
                lease.end_with(self)
            try:
                reply = self._ask_once(grant, max(0.0, began + seconds - now), began)
                if reply is not None:
                    return reply
            except WouldDeadlock as error:
                lease.state = "done"
                self._forget(grant)
                held = names_held(get_ident())
                tries += 1
                if (
                    lease.nested
                    or (self.name in held if error.code == "lock-twice" else held)
                    or tries > STALE_TRIES
                ):
                    raise _explained(error) from None
                # The server means a lock that this thread has given up after an exception; the
                # keep-alive is about to tell it.
                lease.leave()
                select.poll().poll(STALE_SECONDS * 1000.0)
            except BaseException:
                lease.give_up()
                self._forget(grant)
                raise
            now = _clock.monotonic()

    def _ask_once(self, grant: Grant, seconds: float, began: float) -> Grant | wire.TimedOut | None:
        """Wait for so many seconds; return None when it is to be asked for again."""
        name, lease = self.name, grant._lease
        lease.begin()
        if seconds and lease.nested:
            headline = f"this thread waits for the lock {shown(name)} already, and a signal handler in it asks for it again"
            raise WouldDeadlock("lock-twice", headline)
        session = lease.leases.session
        fields = (name, _owner(), None if seconds == math.inf else seconds, self.ttl)
        reply, _ = self._store.ask(wire.Lock, *fields, wait=seconds, into=lease, session=session)
        grant._since = _clock.monotonic()
        if isinstance(reply, wire.TimedOut):
            lease.state = "done"
            self._count_wait(lease, grant._since - began)
            lease.figures.timeouts += 1
            self._forget(grant)
            return reply
        lease.hold()
        mine = self._grants.setdefault(get_ident(), [])
        mine.append(grant)
        # A signal handler that used this object may have thrown the list away while it was empty.
        self._grants[get_ident()] = mine
        if not lease.over:
            self._count_wait(lease, grant._since - began)
            lease.figures.acquisitions += 1
            return grant
        # This process was silent while it waited: it may have had the lock, and lost it. It goes to
        # the end of the queue.
        if not lease.gone:
            self._store.ask(wire.Unlock, name, lease.token, session=session)
        lease.state = "done"
        self._forget(grant)
        return None

    def _forget(self, grant: Grant) -> None:
        """Forget a grant that is not this thread's any more, or never was."""
        lease = grant._lease
        if lease.state == "done":
            lease.drop()
        else:
            lease.leave()
        me = get_ident()
        mine = self._grants.get(me)
        if mine is not None:
            if grant in mine:
                mine.remove(grant)
            if not mine:
                self._grants.pop(me, None)

    def _give_back(self, grant: Grant) -> None:
        lease = grant._lease
        still = False
        try:
            lost = lease.over
            if lease.gone:
                lease.state = "done"
            else:
                session = lease.leases.session
                reply, _ = self._store.ask(wire.Unlock, self.name, grant.token, session=session)
                lease.state = "done"
                still = reply.__class__ is wire.Done
            self._forget(grant)
        except (SessionLost, StoreClosed) as error:
            lease.state = "done"
            self._forget(grant)
            lease.end(error.headline)
            lease.figures.losses += 1
            raise _lost(
                grant, "it was released with the session, and somebody else may have had it since"
            ) from error
        except BaseException:
            if lease.state == "held":
                lease.state = "unwanted"
            self._forget(grant)
            raise
        finally:
            held = grant.held_for
            lease.figures.hold_seconds += held
        if lost or not still:
            lease.end("the server had passed it on")
            lease.figures.losses += 1
            why = "the server still had it for this process: nobody else has had it meanwhile"
            raise _lost(
                grant, why if still else "the server had passed it on when it was to be given back"
            )

    def _count_wait(self, lease: Lease, waited: float) -> None:
        lease.figures.wait_seconds += waited
        if waited > LONG_WAIT:
            from rallypoint.store.logger import logger  # here: it takes 8 ms to load

            logger().info("waited %.1f s for %s at %s", waited, lease.what, self._store.address)

    def _timed_out(self, reply: wire.TimedOut, seconds: float) -> LockTimeout:
        queue = tuple(map(str, reply.queue))
        holder = str(reply.holder)
        text = f"the lock {shown(self.name)} was not had {f'within {seconds:g} s' if seconds else 'at once'}: {holder} has had it for "
        text += f"{reply.held_for:.1f} s"
        if queue:
            more = f" and {len(queue) - QUEUE_SHOWN} more" if len(queue) > QUEUE_SHOWN else ""
            text += f"; in front of this caller waited {', '.join(queue[:QUEUE_SHOWN])}{more}"
        return LockTimeout(
            "lock-timeout", text, holder=holder, held_for=reply.held_for, queue=queue
        )

    def _not_held(self) -> UsageError:
        others = [
            thread
            for thread, grants in list(self._grants.items())
            if grants and grants[-1].pid == os.getpid()
        ]
        whose = (
            "another thread of this process has it"
            if others
            else "it was not acquired here, or was given back before"
        )
        return UsageError(
            "usage", f"this thread does not hold the lock {shown(self.name)}: {whose}"
        )


def _again(kind: type[Lock], store: Client, name: str, ttl: float, timeout: float | None) -> Lock:
    """Make a lock that travelled to another process, with its store; its grants did not."""
    return kind(store, name, ttl=ttl, timeout=timeout)


def _of_parent(name: str, pid: int) -> str:
    return f"the lock {shown(name)} is held by the parent process (pid {pid}), not by this forked child"


def _owner() -> str:
    """Name this thread: its name for people, and behind "#" what no other thread has."""
    global _process
    if _process[0] != os.getpid():
        mine = (os.getpid(), os.urandom(6).hex())
        if _process[0] != mine[0]:  # one step: another thread may be here, too
            _process = mine
    name = (
        threading.current_thread()
        .name.replace("#", "")[:THREAD_NAME]
        .encode("utf-8", "backslashreplace")
        .decode()
    )
    return f"{name}#{_process[1]}.{threading.get_native_id()}"


def _lost(grant: Grant, why: str) -> LeaseLost:
    lease = grant._lease
    ttl = f" (its ttl is {lease.ttl:g} s)" if not lease.gone else ""
    headline = f"{grant._store.identity} lost the lock {shown(grant.name)}, which it had for {grant.held_for:.1f} s: {lease.because}{ttl}"
    end = lease.leases.session.end
    if lease.gone and end is not None and not (end.refusal is not None and end.refusal.known):
        return LeaseLost("lock-lost", headline, why=(_WITH_THE_STORE,))
    return LeaseLost(
        "lock-lost",
        headline,
        why=(
            why,
            f"what was written with fence={grant.token} before that stands, and is refused after it; what was written without may have "
            "met somebody else's",
        ),
        help=(
            (
                "if silence of that length is normal here, give it a longer lease",
                f"store.lock({shown(grant.name)}, ttl=60)",
            ),
        ),
    )


_WITH_THE_STORE = (
    "it went with its session: a store that has ended keeps nothing, and one that still runs has "
    "released it"
)


def _explained(error: WouldDeadlock) -> WouldDeadlock:
    if error.code == "lock-twice":
        why = (
            "it is the thread that holds a lock, whatever object it has asked with, and two tasks of an event loop are one thread: "
            "it would wait for itself"
        )
        help = (
            "do all that needs the lock in one `with` block, or give the inner one another name",
            "",
        )
    else:
        why = (
            "nobody in the circle would ever go on; who asked last is told, and holds what it held"
        )
        help = (
            "take several locks in the same order everywhere",
            "for name in sorted(names): stack.enter_context(store.lock(name))",
        )
    return WouldDeadlock(error.code, error.headline, why=(why,), help=(help,))
