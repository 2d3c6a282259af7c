"""Carries faults out: who is connected, what is in effect for whom, what is planned, and what was done."""

from __future__ import annotations

import errno
import random
import select
import socket
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import TypeAlias

from rallypoint.clock import Clock
from rallypoint.errors import UsageError
from rallypoint.testing.faults import (
    BOTH,
    Bandwidth,
    BlackHole,
    Corrupt,
    Deed,
    Duplicate,
    Fault,
    Freeze,
    HalfClose,
    Latency,
    Refuse,
    Reset,
    Slices,
    Way,
)
from rallypoint.testing.lanes import BULK, Conditions, Connection, Line, Tally, Trigger
from rallypoint.testing.listener import Address, Listener, Place, State, resolved
from rallypoint.testing.loop import Loop

TRY_AGAIN = 0.005
"""Seconds until a Unix socket whose queue is full is tried again: the kernel has no event for it."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What happened in one direction: `bytes` that were passed on, in so many `pieces` (writes), `duplicated` and `corrupted` ones
    included; `held` bytes are in the proxy now, `swallowed` ones will not be passed on."""

    bytes: int
    pieces: int
    held: int
    swallowed: int
    corrupted: int
    duplicated: int


@dataclass(frozen=True, slots=True)
class ProxyStatistics:
    """What a proxy has done so far: `connections` accepted in all, of these `open` now and `unreached` (reset, because the
    server did not take them); `resets` and `half_closes` that faults did, counted per connection."""

    connections: int
    open: int
    unreached: int
    resets: int
    half_closes: int
    to_server: Traffic
    to_client: Traffic


@dataclass(slots=True, eq=False)
class Effect:
    """A condition that is in effect: everywhere, or on one connection."""

    fault: Fault
    only: Connection | None
    lines: dict[Way, Line]


Waiter: TypeAlias = tuple[Callable[[ProxyStatistics], object], "Future[ProxyStatistics]"]


class Engine:
    """Everything but `begin`, `end` and `start` runs in the loop's thread."""

    def __init__(self, target: Address, listen: Address, seed: int, clock: Clock) -> None:
        self.seed = seed
        self.target, self._places = resolved(target)
        self.listener = Listener(listen)
        self.buffer = memoryview(bytearray(BULK))
        self.tallies: dict[Way, Tally] = {"server": Tally(), "client": Tally()}
        self.connections: dict[Connection, None] = {}  # in the order of accepting
        self.faults: list[Fault] = []  # that are on or may still come, in the order of their beginning
        self.waiters: list[Waiter] = []
        self._accepted = self._unreached = self._resets = self._half_closes = 0
        self._effects: list[Effect] = []
        self._random = random.Random(f"{seed} proxy")
        self.loop = Loop("the chaos proxy", clock, at_end=self._at_end, each_round=self._tell_waiters)
        self.loop.watch(self.listener.fileno(), select.EPOLLIN, self._arrived)

    def begin(self, fault: Fault) -> None:
        """Begin or plan it. Returns when that is done."""
        self.loop.call(lambda: self._begin(fault))

    def end(self, fault: Fault) -> None:
        """End it, and what of it is planned. Returns when that is done; does nothing when the engine has ended."""
        if not self.loop.is_over:
            try:
                self.loop.call(lambda: self._end([fault]))
            except UsageError:
                pass  # closed in this moment, by another thread

    def retarget(self, target: str, places: list[Place]) -> None:
        self.target, self._places = target, places

    def heal(self) -> None:
        """End all faults, and with them the connections that cannot go on."""
        self._end(list(self.faults))
        for connection in list(self.connections):
            for lane in (connection.to_server, connection.to_client):
                lane.corrupt = lane.duplicate = False
                lane.refresh()
            if connection.is_severed:
                self.cut(connection, BOTH)

    def statistics(self) -> ProxyStatistics:
        return ProxyStatistics(
            connections=self._accepted,
            open=len(self.connections),
            unreached=self._unreached,
            resets=self._resets,
            half_closes=self._half_closes,
            to_server=self._traffic("server"),
            to_client=self._traffic("client"),
        )

    def _traffic(self, way: Way) -> Traffic:
        tally = self.tallies[way]
        held = sum(connection.lane(way).queued for connection in list(self.connections))
        return Traffic(tally.passed, tally.pieces, held, tally.swallowed, tally.corrupted, tally.duplicated)

    def accept_all(self) -> None:
        """Whoever has connected before a fault began, or before somebody asks, is one of the connections."""
        while self.listener.state == "accepting" and (found := self.listener.accept()):
            sock, name = found
            connection = Connection(self, self._accepted, name)
            self._accepted += 1
            connection.client_end.take(sock)
            connection.client_end.ready = True
            self.connections[connection] = None
            for fault in self.faults:
                if fault.when.size is not None and fault.planned:
                    self._arm(fault, connection)
            connection.refresh()
            self._reach(connection)

    # What lanes and connections ask of us.

    def conditions(self, connection: Connection, way: Way) -> Conditions:
        """What is in effect for one connection in one direction: of each kind the one begun last."""
        found = Conditions()
        for effect in self._effects:
            if (effect.only is not None and effect.only is not connection) or way not in effect.fault.ways:
                continue
            match effect.fault.kind:
                case BlackHole():
                    found.hole = True
                case Freeze():
                    found.frozen = True
                case Latency() as latency:
                    found.latency = latency
                case Bandwidth():
                    found.line = effect.lines[way]
                case Slices() as slices:
                    found.slices = slices
        return found

    def fire(self, trigger: Trigger, connection: Connection) -> None:
        """So many bytes have passed on this connection."""
        fault = trigger.fault
        if fault.when.again:
            trigger.left = fault.when.size or 0
        else:
            for way in fault.when.of:
                connection.lane(way).triggers.remove(trigger)
        self._happen(fault, connection)

    def cut(self, connection: Connection, ways: tuple[Way, ...]) -> None:
        """Reset it because of a fault."""
        if not connection.is_closed:
            self._resets += 1
            connection.reset(ways)

    def closed(self, connection: Connection) -> None:
        """It is over, and with it the faults of this connection alone."""
        self.connections.pop(connection, None)
        for effect in [effect for effect in self._effects if effect.only is connection]:
            self._effects.remove(effect)
            effect.fault.on -= 1
        self._tidy()

    # Faults

    def _begin(self, fault: Fault) -> None:
        self.accept_all()
        when = fault.when
        if when.size is None and when.every is None and not when.after:
            self._happen(fault, fault.only if isinstance(fault.only, Connection) else None)
            return
        fault.planned = True
        self.faults.append(fault)
        if when.size is not None:
            for connection in self.connections:
                self._arm(fault, connection)
        elif when.every is not None:
            self._every(fault, when.every, self.loop.now(), 1)
        else:
            self.loop.at(self.loop.now() + when.after, lambda: self._once(fault))

    def _once(self, fault: Fault) -> None:
        if fault.planned:
            self._happen(fault, None)
            fault.planned = False
            self._tidy()

    def _every(self, fault: Fault, interval: float, began: float, number: int) -> None:
        def tick() -> None:
            if fault.planned:
                self._happen(fault, None)
                self._every(fault, interval, began, number + 1)

        jitter = fault.when.jitter
        # Counted from the beginning: a busy machine does not stretch the interval.
        self.loop.at(began + interval * number + (self._random.uniform(-jitter, jitter) if jitter else 0.0), tick)

    def _arm(self, fault: Fault, connection: Connection) -> None:
        trigger = Trigger(fault, fault.when.size or 0)
        for way in fault.when.of:
            connection.lane(way).triggers.append(trigger)
            connection.lane(way).refresh()

    def _happen(self, fault: Fault, only: Connection | None) -> None:
        self.accept_all()
        if only is not None and only.is_closed:
            return
        fault.times += 1
        targets = list(self.connections) if only is None else [only]
        match fault.kind:
            case Reset(count):
                if count is not None and count < len(targets):
                    targets = self._random.sample(targets, count)
                for connection in targets:
                    self.cut(connection, fault.ways)
            case HalfClose() | Corrupt() | Duplicate():
                for connection in targets:
                    self._do(fault.kind, connection, fault.ways)
            case _:
                self._take_effect(fault, only)

    def _do(self, deed: Deed, connection: Connection, ways: tuple[Way, ...]) -> None:
        self._half_closes += isinstance(deed, HalfClose)
        for way in ways:
            lane = connection.lane(way)
            if isinstance(deed, HalfClose):
                lane.close_after_queue()
            elif isinstance(deed, Corrupt):
                lane.corrupt = True
            elif isinstance(deed, Duplicate):
                lane.duplicate = True
            lane.refresh()

    def _take_effect(self, fault: Fault, only: Connection | None) -> None:
        if any(effect.fault is fault and effect.only is only for effect in self._effects):
            return  # planned again and again without an end: it is on already
        rate = fault.kind.rate if isinstance(fault.kind, Bandwidth) else 0.0
        effect = Effect(fault, only, {way: Line(rate) for way in BOTH})
        self._effects.append(effect)
        fault.on += 1
        if fault not in self.faults:
            self.faults.append(fault)
        if fault.when.lasting is not None:
            self.loop.at(self.loop.now() + fault.when.lasting, lambda: self._effect_over(effect))
        self._refresh(only)

    def _effect_over(self, effect: Effect) -> None:
        if effect in self._effects:
            self._effects.remove(effect)
            effect.fault.on -= 1
            self._tidy()
            self._refresh(effect.only)

    def _end(self, faults: list[Fault]) -> None:
        for fault in faults:
            fault.planned, fault.on = False, 0
        self._effects = [effect for effect in self._effects if effect.fault not in faults]
        for connection in self.connections:
            for lane in (connection.to_server, connection.to_client):
                lane.triggers = [trigger for trigger in lane.triggers if trigger.fault not in faults]
        self._tidy()
        self._refresh(None)

    def _tidy(self) -> None:
        self.faults = [fault for fault in self.faults if fault.active]

    def _refresh(self, only: Connection | None) -> None:
        if only is None:
            self._watch_listener()
        for connection in [only] if only else list(self.connections):
            connection.refresh()
            self._reach(connection)

    # Where clients arrive

    def _watch_listener(self) -> None:
        everywhere = [effect.fault for effect in self._effects if effect.only is None]
        kinds = [fault.kind for fault in everywhere]
        state: State = "accepting"
        if Refuse() in kinds:
            state = "refusing"
        elif BlackHole(accept=False) in kinds:
            state = "full"
        elif any(fault.kind == Freeze() and fault.ways == BOTH for fault in everywhere):
            state = "silent"
        if state == self.listener.state:
            return
        if self.listener.state == "accepting":
            self.loop.watch(self.listener.fileno(), None, self._arrived)
        self.listener.become(state)
        if state == "accepting":
            self.loop.watch(self.listener.fileno(), select.EPOLLIN, self._arrived)

    def _arrived(self, _: int) -> None:
        self.accept_all()

    # The way to the server

    def _reach(self, connection: Connection) -> None:
        """Connect to the server, unless that was begun, or the server must not hear of it."""
        if not (connection.is_reaching or connection.is_closed or connection.is_severed or connection.to_server.is_now.hole):
            connection.is_reaching = True
            self._try(connection, self._places)

    def _try(self, connection: Connection, places: list[Place]) -> None:
        if connection.is_closed or connection.is_severed:
            return
        if not places:
            self._unreached += 1
            connection.reset(BOTH)
            return
        family, where = places[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        error = sock.connect_ex(where)
        if error in (0, errno.EINPROGRESS):
            connection.server_end.take(sock)
            self.loop.watch(sock.fileno(), select.EPOLLOUT, lambda _: self._tried(connection, sock, places))
            return
        sock.close()
        if error == errno.EAGAIN and family == socket.AF_UNIX:
            self.loop.at(self.loop.now() + TRY_AGAIN, lambda: self._try(connection, places))
        else:
            self._try(connection, places[1:])

    def _tried(self, connection: Connection, sock: socket.socket, places: list[Place]) -> None:
        end = connection.server_end
        if end.socket is not sock:
            return  # reset meanwhile
        self.loop.watch(end.fd, None, self._arrived)
        error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error in (0, errno.ECONNRESET, errno.EPIPE):
            # These two come after the connection was there (while it is made, a reset is ECONNREFUSED): read what was said.
            end.ready, end.broken = True, error != 0
            connection.refresh()
        else:
            end.socket = None
            sock.close()
            self._try(connection, places[1:])

    # The loop's

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
            except Exception as error:  # of the caller's own function: theirs
                answer.set_exception(error)
        self.waiters = [waiter for waiter in self.waiters if not waiter[1].done()]

    def _at_end(self) -> None:
        for connection in list(self.connections):
            connection.close()
        self.listener.close()
        for fault in self.faults:
            fault.planned, fault.on = False, 0
        self.faults = []
        for _, answer in self.waiters:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(UsageError("usage", "the chaos proxy was closed"))

    def forget(self) -> None:
        """In a forked child: close our copies of the descriptors. The sockets themselves are the parent's and stay as they are."""
        for connection in list(self.connections):
            for end in (connection.client_end, connection.server_end):
                if end.socket is not None:
                    end.socket.close()
        self.listener.forget()
        self.loop.forget()
