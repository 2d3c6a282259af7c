"""The chaos proxy's engine: its connections, the faults in effect, what is planned, and counts."""

from __future__ import annotations

import random
import select
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import TypeAlias

from rallypoint.clock import Clock
from rallypoint.errors import UsageError
from rallypoint.testing.faults import BOTH, Fault, Way
from rallypoint.testing.proxy_listener import ListenerState, ProxyAddress, ProxyListener, resolve
from rallypoint.testing.proxy_loop import ProxyLoop
from rallypoint.testing.proxy_relay import ByteTrigger, Relay, StreamFaults, StreamTotals


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts of one direction.

    `bytes` that were passed on, in so many `pieces` (writes); `held` bytes are in the proxy now,
    `swallowed` ones will not be passed on.
    """

    bytes: int
    pieces: int
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


Condition: TypeAlias = Callable[[ProxyStatistics], object]


class ProxyEngine:
    """Everything but `begin` and `end` runs in the loop's thread."""

    def __init__(self, target: ProxyAddress, listen: ProxyAddress, seed: int, clock: Clock) -> None:
        self.seed = seed
        self.target, self.places = resolve(target)
        self.listener = ProxyListener(listen)
        self.totals: dict[Way, StreamTotals] = {way: StreamTotals() for way in BOTH}
        self.relays: dict[Relay, None] = {}  # in the order of accepting
        self.faults: list[Fault] = []  # that are on or may still come, the oldest first
        self.waiters: list[tuple[Condition, Future[ProxyStatistics]]] = []
        self.unreached = 0
        self._effects: list[tuple[Fault, Relay | None]] = []  # in effect everywhere, or on one
        self._accepted = self._resets = 0
        self._random = random.Random(f"{seed} proxy")
        self.loop = ProxyLoop(clock, step=self._step, at_end=self._at_end)
        self.loop.watch(self.listener.fileno(), select.EPOLLIN)

    def begin(self, fault: Fault) -> None:
        """Begin or plan a fault, and return when that is done."""
        self.loop.call(lambda: self._begin(fault))

    def end(self, fault: Fault) -> None:
        """End a fault and what of it is planned, and return when that is done."""
        if not self.loop.is_over:
            try:
                self.loop.call(lambda: self._end([fault]))
            except UsageError:
                pass  # closed in this moment, by another thread

    def heal(self) -> None:
        """End all faults, and with them the connections that cannot go on."""
        self._end(self.faults)
        for relay in list(self.relays):
            if relay.is_severed:
                self.cut(relay, BOTH)

    def statistics(self) -> ProxyStatistics:
        """Count what was done until now."""
        to_server, to_client = (
            Traffic(
                self.totals[way].passed,
                self.totals[way].pieces,
                sum(relay.stream(way).queued for relay in list(self.relays)),
                self.totals[way].swallowed,
            )
            for way in BOTH
        )
        return ProxyStatistics(
            self._accepted, len(self.relays), self.unreached, self._resets, to_server, to_client
        )

    def accept_all(self) -> None:
        """Accept every client that has connected: before a fault begins, and before a look."""
        while self.listener.state == "accepting" and (found := self.listener.accept()):
            sock, name = found
            relay = Relay(self, self._accepted, name, sock)
            self._accepted += 1
            self.relays[relay] = None
            for fault in self.faults:
                if fault.when.size is not None and fault.planned:
                    self._arm(fault, relay)

    def forget(self) -> None:
        """Close this process's copies of the descriptors, in a forked child."""
        for relay in list(self.relays):
            for end in (relay.client_end, relay.server_end):
                if end.socket is not None:
                    end.socket.close()
        self.listener.forget()
        self.loop.forget()

    # For connections.

    def faults_of(self, relay: Relay, way: Way) -> StreamFaults:
        """Return the faults in effect in one direction; of latencies the one begun last."""
        found = StreamFaults()
        for fault, only in self._effects:
            if only in (None, relay) and way in fault.ways:
                found.hole |= fault.kind.name == "black hole"
                found.frozen |= fault.kind.name == "frozen"
                if fault.kind.name == "latency":
                    found.latency = fault.kind
        return found

    def fire(self, trigger: ByteTrigger, relay: Relay) -> None:
        """Let a fault happen on a connection on which so many bytes have passed."""
        fault = trigger.fault
        if fault.when.again:
            trigger.left = fault.when.size or 0
        else:
            for way in fault.when.of:
                relay.stream(way).triggers.remove(trigger)
        self._happen(fault, relay)

    def cut(self, relay: Relay, ways: tuple[Way, ...]) -> None:
        """Reset a connection because of a fault."""
        if not relay.is_closed:
            self._resets += 1
            relay.reset(ways)

    def closed(self, relay: Relay) -> None:
        """Forget a connection that is over, and the faults of it alone."""
        self.relays.pop(relay, None)
        for effect in [effect for effect in self._effects if effect[1] is relay]:
            self._effect_over(effect)

    # Faults.

    def _begin(self, fault: Fault) -> None:
        self.accept_all()
        when = fault.when
        if when.size is None and when.every is None and not when.after:
            self._happen(fault, fault.only if isinstance(fault.only, Relay) else None)
            return
        fault.planned = True
        self.faults.append(fault)
        if when.size is not None:
            for relay in self.relays:
                self._arm(fault, relay)
        else:
            self._plan(fault, self.loop.now(), 1)

    def _plan(self, fault: Fault, began: float, number: int) -> None:
        """Let a fault happen for the `number`th time when its time has come."""
        when = fault.when

        def happen() -> None:
            if fault.planned:
                self._happen(fault, None)
                fault.planned = when.every is not None
                self._tidy()
                if when.every is not None:
                    self._plan(fault, began, number + 1)

        # Counted from the beginning: a busy machine does not stretch the interval.
        delay = when.after if when.every is None else when.every * number
        self.loop.at(began + delay + self._random.uniform(-when.jitter, when.jitter), happen)

    def _arm(self, fault: Fault, relay: Relay) -> None:
        trigger = ByteTrigger(fault, fault.when.size or 0)
        for way in fault.when.of:
            relay.stream(way).triggers.append(trigger)

    def _happen(self, fault: Fault, only: Relay | None) -> None:
        self.accept_all()
        if only is not None and only.is_closed:
            return
        fault.times += 1
        if fault.kind.name != "reset":
            self._take_effect(fault, only)
            return
        targets = list(self.relays) if only is None else [only]
        if fault.kind.count is not None and fault.kind.count < len(targets):
            targets = self._random.sample(targets, fault.kind.count)
        for relay in targets:
            self.cut(relay, fault.ways)

    def _take_effect(self, fault: Fault, only: Relay | None) -> None:
        effect = (fault, only)
        if effect in self._effects:
            return  # planned again and again without an end: it is on already
        self._effects.append(effect)
        fault.on += 1
        if fault not in self.faults:
            self.faults.append(fault)
        if fault.when.lasting is not None:
            self.loop.at(self.loop.now() + fault.when.lasting, lambda: self._effect_over(effect))
        self._watch_listener()

    def _effect_over(self, effect: tuple[Fault, Relay | None]) -> None:
        if effect in self._effects:
            self._effects.remove(effect)
            effect[0].on -= 1
            self._tidy()
            self._watch_listener()

    def _end(self, faults: list[Fault]) -> None:
        for fault in faults:
            fault.planned, fault.on = False, 0
        self._effects = [effect for effect in self._effects if effect[0] not in faults]
        for relay in self.relays:
            for stream in relay.streams:
                stream.triggers = [one for one in stream.triggers if one.fault not in faults]
        self._tidy()
        self._watch_listener()

    def _tidy(self) -> None:
        self.faults = [fault for fault in self.faults if fault.active]

    def _watch_listener(self) -> None:
        everywhere = [fault for fault, only in self._effects if only is None]
        state: ListenerState = "accepting"
        if any(fault.kind.name == "refusing connections" for fault in everywhere):
            state = "refusing"
        elif any(not fault.kind.accept for fault in everywhere):
            state = "full"
        elif any(fault.kind.name == "frozen" and fault.ways == BOTH for fault in everywhere):
            state = "silent"
        if state == self.listener.state:
            return
        if self.listener.state == "accepting":
            self.loop.watch(self.listener.fileno(), None)
        self.listener.become(state)
        if state == "accepting":
            self.loop.watch(self.listener.fileno(), select.EPOLLIN)

    # For the loop.

    def _step(self) -> float | None:
        self.accept_all()
        for relay in list(self.relays):
            relay.step()
        self._tell_waiters()
        due = (stream.due() for relay in self.relays for stream in relay.streams)
        return min((moment for moment in due if moment is not None), default=None)

    def _tell_waiters(self) -> None:
        if not self.waiters:
            return
        seen = self.statistics()
        for condition, answer in self.waiters:
            try:
                if not answer.done() and condition(seen):
                    answer.set_result(seen)
            except InvalidStateError:
                pass  # its caller gave up in this moment
            except Exception as error:  # of the caller's own function
                answer.set_exception(error)
        self.waiters = [waiter for waiter in self.waiters if not waiter[1].done()]

    def _at_end(self) -> None:
        for relay in list(self.relays):
            relay.close()
        self.listener.close()
        for fault in self.faults:
            fault.planned, fault.on = False, 0
        self.faults = []
        for _, answer in self.waiters:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(UsageError("usage", "the chaos proxy was closed"))
