"""The chaos proxy's engine: its connections, the faults in effect, its thread, and counts.

Callers change the state themselves, under the lock; the thread then moves what may move.
"""

from __future__ import annotations

import math
import os
import random
import select
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from rallypoint.clock import Clock
from rallypoint.errors import InternalError, UsageError
from rallypoint.testing.faults import BOTH, Fault, FaultName, Way
from rallypoint.testing.proxy_listener import ListenerState, ProxyAddress, ProxyListener, resolve
from rallypoint.testing.proxy_relay import ByteTrigger, Relay


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts of one direction.

    `bytes` that were passed on; `held` bytes are in the proxy now, `swallowed` ones will not be
    passed on.
    """

    bytes: int
    held: int
    swallowed: int


@dataclass(frozen=True, slots=True)
class ProxyStatistics:
    """Counts of a proxy so far.

    `connections` accepted in all, of these `open` now and `unreached` (reset, because the server
    did not take them); `resets` that faults did, counted per connection.
    """

    connections: int
    open: int
    unreached: int
    resets: int
    to_server: Traffic
    to_client: Traffic


class ProxyEngine:
    """The state of a proxy. Callers come in by `held`; a `Relay` is called with the lock held."""

    def __init__(self, target: ProxyAddress, listen: ProxyAddress, seed: int) -> None:
        self.seed = seed
        self.now = Clock().monotonic
        self.target, self.places = resolve(target)
        self.listener = ProxyListener(listen)
        self.passed: Counter[Way] = Counter()  # bytes
        self.swallowed: Counter[Way] = Counter()
        self.relays: dict[Relay, None] = {}  # in the order of accepting
        self.faults: list[Fault] = []  # that are on or may still come, the oldest first
        self.unreached = 0
        self.is_closed = False
        self.changed = threading.Condition(threading.RLock())
        self._accepted = self._resets = self._rounds = 0
        self._random = random.Random(f"{seed} proxy")
        self._crash: BaseException | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # A daemon: a test that forgets close() must not keep its interpreter from ending.
        self.thread = threading.Thread(target=self._run, name="the chaos proxy", daemon=True)
        self.thread.start()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the proxy for a look or a change, after accepting every client that has connected.

        A change is in effect at the end of the block. `UsageError` when it is closed,
        `InternalError` when its thread has failed.
        """
        if not self.is_closed:  # else this may be a forked child, where nobody releases the lock
            with self.changed:
                if not self.is_over:
                    self._accept_all()
                    yield
                    # A descriptor that was closed is closed once the thread does not wait for it.
                    rounds = self._rounds
                    os.eventfd_write(self._wake, 1)
                    self.changed.wait_for(lambda: self._rounds > rounds or self.is_over)
                    if not self.is_over:
                        return
        self._refuse()

    @property
    def is_over(self) -> bool:
        """True when nothing moves any more."""
        return self.is_closed or self._crash is not None

    def begin(self, fault: Fault) -> None:
        """Begin or plan a fault."""
        with self.held():
            if fault.every is None and fault.size is None:
                self._happen(fault, fault.only)
                return
            fault.planned = True
            self.faults.append(fault)
            if fault.every is not None:
                self._plan(fault, self.now())
            for relay in self.relays:
                self._arm(fault, relay)

    def end(self, fault: Fault) -> None:
        """End a fault and what of it is planned."""
        if fault.active:
            with self.held():
                self._end([fault])

    def heal(self) -> None:
        """End all faults, and with them the connections that cannot go on."""
        with self.held():
            self._end(self.faults)
            for relay in list(self.relays):
                if relay.is_severed:
                    self.cut(relay, BOTH)

    def statistics(self) -> ProxyStatistics:
        """Count what was done until now."""
        to_server, to_client = (
            Traffic(
                self.passed[way],
                sum(relay.streams[way].queued for relay in self.relays),
                self.swallowed[way],
            )
            for way in BOTH
        )
        return ProxyStatistics(
            self._accepted, len(self.relays), self.unreached, self._resets, to_server, to_client
        )

    def wait_for(
        self, condition: Callable[[ProxyStatistics], object], timeout: float
    ) -> ProxyStatistics:
        """Wait until the condition is true, and return the statistics of which it is."""
        seen = self.statistics()

        def is_true() -> object:
            nonlocal seen
            seen = self.statistics()
            return self.is_over or condition(seen)

        with self.held():
            pass  # the thread goes round, and so takes care of clients that were accepted here
        with self.changed:
            if not self.changed.wait_for(is_true, timeout):
                raise TimeoutError(f"this did not come true within {timeout:g} s: {seen}")
        if self.is_over:
            self._refuse()
        return seen

    def close(self) -> None:
        """Close everything and end the thread. May be called twice."""
        if not self.is_closed:
            with self.changed:
                if not self.is_over:
                    os.eventfd_write(self._wake, 1)
                self.is_closed = True
            self.thread.join()
        self._raise_crash()

    def forget(self) -> None:
        """Close this process's copies of the descriptors, in a forked child."""
        self.is_closed = True
        for relay in self.relays:
            for end in (relay.client_end, relay.server_end):
                if end.socket is not None:
                    end.socket.close()
        self.listener.forget()
        os.close(self._wake)

    # For connections.

    def faults_of(self, relay: Relay, way: Way) -> dict[FaultName, Fault]:
        """Return the faults in effect in one direction, by name; of one name that begun last."""
        return {
            fault.name: fault
            for fault in self.faults
            if way in fault.ways and (None in fault.places or relay in fault.places)
        }

    def fire(self, trigger: ByteTrigger, relay: Relay) -> None:
        """Let a fault happen on a connection on which so many bytes have passed."""
        for way in trigger.fault.of:
            relay.streams[way].triggers.remove(trigger)
        self._happen(trigger.fault, relay)

    def cut(self, relay: Relay, ways: tuple[Way, ...]) -> None:
        """Reset a connection because of a fault."""
        if not relay.is_closed:
            self._resets += 1
            relay.reset(ways)

    def closed(self, relay: Relay) -> None:
        """Forget a connection that is over, and the faults of it alone."""
        self.relays.pop(relay, None)
        for fault in self.faults:
            if relay in fault.places:
                fault.places.remove(relay)
        self._tidy()

    # Faults.

    def _accept_all(self) -> None:
        while self.listener.state == "accepting" and (found := self.listener.accept()):
            sock, name = found
            relay = Relay(self, self._accepted, name, sock)
            self._accepted += 1
            self.relays[relay] = None
            for fault in self.faults:
                self._arm(fault, relay)

    def _arm(self, fault: Fault, relay: Relay) -> None:
        if fault.size is not None and fault.planned:
            trigger = ByteTrigger(fault, fault.size)
            for way in fault.of:
                relay.streams[way].triggers.append(trigger)

    def _plan(self, fault: Fault, last: float) -> None:
        jitter = self._random.uniform(-fault.jitter, fault.jitter)
        fault.due = last + (fault.every or 0.0) + jitter

    def _happen(self, fault: Fault, only: Relay | None) -> None:
        if only is not None and only.is_closed:
            return
        fault.times += 1
        if fault.name == "reset":
            for relay in list(self.relays) if only is None else [only]:
                self.cut(relay, fault.ways)
            return
        fault.places.append(only)
        if fault not in self.faults:
            self.faults.append(fault)
        self._tidy()

    def _end(self, faults: list[Fault]) -> None:
        for fault in faults:
            fault.planned, fault.places = False, []
        for relay in self.relays:
            for stream in relay.streams.values():
                stream.triggers = [one for one in stream.triggers if one.fault not in faults]
        self._tidy()

    def _tidy(self) -> None:
        """Forget faults that are over, and let the listener be as the others want it."""
        self.faults = [fault for fault in self.faults if fault.active]
        everywhere = [fault for fault in self.faults if None in fault.places]
        state: ListenerState = "accepting"
        if any(fault.name == "refusing connections" for fault in everywhere):
            state = "refusing"
        elif not all(fault.accept for fault in everywhere):
            state = "full"
        elif any(fault.name == "frozen" and fault.ways == BOTH for fault in everywhere):
            state = "silent"
        if state != self.listener.state:
            self.listener.become(state)

    # The thread.

    def _run(self) -> None:
        try:
            while True:
                with self.changed:
                    if self.is_closed:
                        break
                    self._step()
                    poll, patience = self._poll()
                    self._rounds += 1
                    self.changed.notify_all()
                if (self._wake, select.POLLIN) in poll.poll(patience):
                    os.eventfd_read(self._wake)
        except BaseException as error:  # raised in the next caller, and by close()
            self._crash = error
        with self.changed:
            self._end(self.faults)
            for relay in list(self.relays):
                relay.close()
            self.listener.close()
            os.close(self._wake)
            self.changed.notify_all()

    def _step(self) -> None:
        self._accept_all()
        for fault in list(self.faults):
            if fault.due <= self.now():
                self._plan(fault, fault.due)
                self._happen(fault, None)
        for relay in list(self.relays):
            relay.step()

    def _poll(self) -> tuple[select.poll, float | None]:
        """Return what to wait for, and at most how many milliseconds."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self.listener.state == "accepting":
            poll.register(self.listener.fileno(), select.POLLIN)
        due = min((fault.due for fault in self.faults), default=math.inf)
        for relay in self.relays:
            for fd, mask in relay.watched():
                poll.register(fd, mask)
            due = min(due, *(stream.due for stream in relay.streams.values()))
        return poll, None if due == math.inf else max(0.0, (due - self.now()) * 1000)

    def _refuse(self) -> NoReturn:
        self._raise_crash()
        raise UsageError("usage", "the chaos proxy is closed")

    def _raise_crash(self) -> None:
        if self._crash is not None:
            text = f"the chaos proxy failed: {self._crash!r}"
            raise InternalError("internal-error", text) from self._crash
