"""Faults by name: what can be done to connections, to which of them, and when.

`Faults` has a method for each fault and hands a `Fault` to the engine that carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, TypeAlias

from rallypoint.errors import UsageError

Way: TypeAlias = Literal["server", "client"]
To: TypeAlias = Literal["server", "client", "both"]
"""A direction, named by the receiver: what the client sends goes `to="server"`."""

BOTH: tuple[Way, ...] = ("server", "client")


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One fault with its arguments. A reset happens once; each other fault lasts until it ends."""

    name: Literal["latency", "black hole", "frozen", "refusing connections", "reset"]
    seconds: float = 0.0  # latency
    jitter: float = 0.0
    accept: bool = True  # black hole
    count: int | None = None  # reset

    def __str__(self) -> str:
        if self.name == "latency":
            return f"latency {self.seconds:g} s" + (f" ± {self.jitter:g} s" if self.jitter else "")
        if self.count is not None:
            return f"reset of {self.count} at random"
        return self.name + ("" if self.accept else " that accepts nobody")


@dataclass(frozen=True, slots=True)
class FaultTime:
    """The begin and length of a fault in seconds, or in `size` bytes on each connection."""

    after: float = 0.0
    every: float | None = None
    jitter: float = 0.0
    lasting: float | None = None
    size: int | None = None
    of: tuple[Way, ...] = BOTH
    again: bool = False

    def __str__(self) -> str:
        if self.size is not None:
            text = f" {'every' if self.again else 'after'} {self.size} B{_towards(self.of)}"
        elif self.every is not None:
            text = f" every {self.every:g} s" + (f" ± {self.jitter:g} s" if self.jitter else "")
        else:
            text = f" after {self.after:g} s" if self.after else ""
        return text + (f" for {self.lasting:g} s" if self.lasting is not None else "")


class FaultEngine(Protocol):
    """The part that carries faults out."""

    def begin(self, fault: Fault) -> None: ...

    def end(self, fault: Fault) -> None: ...


class Fault:
    """A fault that was begun or planned. As a context manager it is healed at the end of the block.

    `times`: how often it happened or began so far, counted per connection where it comes after
    some bytes.
    """

    def __init__(
        self,
        engine: FaultEngine,
        kind: FaultKind,
        ways: tuple[Way, ...],
        when: FaultTime,
        only: object | None,
    ) -> None:
        self._engine = engine
        self.kind = kind
        self.ways = ways
        self.when = when
        self.only = only
        self.planned = False  # may still begin
        self.on = 0  # in effect in so many places: everywhere, or connection by connection
        self.times = 0

    def __repr__(self) -> str:
        state = "on" if self.on else "planned" if self.planned else "over"
        times = f"{self.times} {'time' if self.times == 1 else 'times'} so far"
        return f"<Fault {self.words()}: {state}, {times}>"

    def words(self) -> str:
        """Describe it for people: `black hole to server after 3 s for 30 s`."""
        where = "" if self.only is None else f" on {self.only}"
        return f"{self.kind}{_towards(self.ways)}{self.when}{where}"

    @property
    def active(self) -> bool:
        """True while it is on, or may still come."""
        return self.on > 0 or self.planned

    def heal(self) -> None:
        """End it on every connection, and drop what of it is planned; other faults stay.

        It has ended when this returns. May be called twice, and after the proxy was closed.
        A reset that happened stays as it is.
        """
        self._engine.end(self)

    def __enter__(self) -> Fault:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.heal()


class Faults:
    """The faults of connections, one method each.

    On the proxy itself a fault begins now; on `proxy.after(...)`, `proxy.every(...)` and
    `proxy.after_bytes(...)` then; on one of `proxy.connections` it concerns that connection alone.
    Every method returns at once with a `Fault`; a fault that begins now is in effect when the
    method returns, for every connection whose `connect()` had returned. `to` is the direction,
    named by the receiver.

    Of two latencies the one begun last counts, per direction and connection; when it is healed the
    earlier one counts again. Faults of different kinds come together. Wrong arguments raise
    `UsageError`, and nothing begins.
    """

    def __init__(
        self, engine: FaultEngine, when: FaultTime = FaultTime(), only: object | None = None
    ) -> None:
        self._engine = engine
        self._when = when
        self._only = only

    def latency(self, seconds: float, jitter: float = 0.0, *, to: To = "both") -> Fault:
        """Pass on what arrives `seconds` later, give or take up to `jitter` (from the seed).

        The order is kept. With `to="both"` a round trip takes 2 x `seconds` longer. Kept to about
        a millisecond. At most 4 MiB of a direction are under way; then the sender waits. When the
        latency ends, what is under way arrives at once.
        """
        check_positive("seconds", seconds, zero=True)
        check_positive("jitter", jitter, zero=True)
        if jitter > seconds:
            text = f"a jitter of {jitter!r} s is larger than the latency of {seconds!r} s"
            raise UsageError("usage", text)
        return self._begin(FaultKind("latency", seconds=seconds, jitter=jitter), to)

    def black_hole(self, *, to: To = "both") -> Fault:
        """Let vanish what goes in that direction: bytes, and the news that a side closed or reset.

        A connection that lost something is reset when the hole ends, because TCP delivers all of a
        stream or nothing more of it; one that lost nothing goes on. What was sent before the call
        and had not passed yet vanishes as well. For a partition that heals before anything is
        lost, as TCP's retransmission makes it look, see `freeze`.

        The sender's kernel believes that its bytes arrived: TCP_USER_TIMEOUT and keep-alive do not
        notice this hole.
        """
        return self._begin(FaultKind("black hole"), to)

    def freeze(self, *, to: To = "both") -> Fault:
        """Move nothing in that direction and lose nothing, as when the peer is stopped (SIGSTOP).

        A sender waits when the kernel's buffers are full; after the fault all goes on.
        """
        return self._begin(FaultKind("frozen"), to)

    def reset(self, *, to: To = "both") -> Fault:
        """Cut connections with RST: both sides get `ConnectionResetError`, bytes under way are
        lost.

        With `to="client"` only the client learns of it, and the server is left with a half-open
        connection: what it sends vanishes; `heal()` of the proxy resets it. `to="server"` likewise.

        Unix sockets have no RST: the peer finds the end of the stream, or `ConnectionResetError` if
        it had sent what was not read.
        """
        return self._begin(FaultKind("reset"), to)

    def _begin(self, kind: FaultKind, to: To) -> Fault:
        if self._when.lasting is not None and kind.name == "reset":
            lasting = self._when.lasting
            text = f"a {kind} happens and is over: it cannot be lasting {lasting!r} s"
            raise UsageError("usage", text)
        fault = Fault(self._engine, kind, directions(to), self._when, self._only)
        self._engine.begin(fault)
        return fault


class ListenerFaults(Faults):
    """The faults of connections, and those of the place where new ones arrive."""

    def refuse(self) -> Fault:
        """Refuse new connections (`ConnectionRefusedError`), as when no server runs.

        The port stays reserved. Connections that are open go on: `reset` them as well for a server
        that was killed.
        """
        return self._begin(FaultKind("refusing connections"), "both")

    def black_hole(self, *, to: To = "both", accept: bool = True) -> Fault:
        """Let vanish what goes in that direction, as on one connection.

        New connections are accepted by the proxy, and the server hears of them when nothing
        vanishes in its direction any more. With `accept=False` new connections are not accepted:
        `connect()` waits, until its own timeout or, after the hole, the kernel's next try (1 s
        after the first, then 2 s, 4 s, ...).
        """
        return self._begin(FaultKind("black hole", accept=accept), to)

    def reset(self, *, to: To = "both", count: int | None = None) -> Fault:
        """Reset all connections that are open, or `count` of them, chosen by the seed."""
        if count is not None:
            check_positive("count", count)
        return self._begin(FaultKind("reset", count=count), to)


def directions(to: To) -> tuple[Way, ...]:
    """Return the directions that `to` names. `UsageError` for another word."""
    if to == "both":
        return BOTH
    if to not in BOTH:
        raise UsageError("usage", f"to={to!r} is no direction: server, client or both")
    return (to,)


def check_positive(name: str, value: float, *, zero: bool = False) -> None:
    """Raise `UsageError` unless `value` is more than 0, or 0 where that is allowed."""
    if not (value > 0 or (zero and value == 0)):
        least = "0 or more" if zero else "more than 0"
        raise UsageError("usage", f"{name} is {value!r}, and must be {least}")


def _towards(ways: tuple[Way, ...]) -> str:
    return "" if ways == BOTH else f" to {ways[0]}"
