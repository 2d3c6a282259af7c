"""Faults by name: what can be done to connections, to which of them, and when.

The vocabulary only. `Faults` has a method for each fault and hands a `Fault` to its engine, which is whatever stands between
client and server (`ChaosProxy`).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, TypeAlias

from rallypoint.errors import UsageError

Way: TypeAlias = Literal["server", "client"]
To: TypeAlias = Literal["server", "client", "both"]
"""A direction, named by who receives: what the client says goes `to="server"`."""

BOTH: tuple[Way, ...] = ("server", "client")


# Conditions: they begin, and last until they end.


@dataclass(frozen=True, slots=True)
class Latency:
    seconds: float
    jitter: float

    def __str__(self) -> str:
        return f"latency {self.seconds:g} s" + (f" ± {self.jitter:g} s" if self.jitter else "")


@dataclass(frozen=True, slots=True)
class Bandwidth:
    rate: float

    def __str__(self) -> str:
        return f"bandwidth {self.rate:g} B/s"


@dataclass(frozen=True, slots=True)
class Slices:
    largest: int
    smallest: int
    pause: float

    def __str__(self) -> str:
        size = f"{self.smallest} to {self.largest}" if self.smallest < self.largest else str(self.largest)
        return f"slices of {size} B" + (f", {self.pause:g} s apart" if self.pause else "")


@dataclass(frozen=True, slots=True)
class BlackHole:
    accept: bool

    def __str__(self) -> str:
        return "black hole" if self.accept else "black hole that accepts nobody"


@dataclass(frozen=True, slots=True)
class Freeze:
    def __str__(self) -> str:
        return "frozen"


@dataclass(frozen=True, slots=True)
class Refuse:
    def __str__(self) -> str:
        return "refusing connections"


# Deeds: they happen to the connections that are open at that moment.


@dataclass(frozen=True, slots=True)
class Reset:
    count: int | None

    def __str__(self) -> str:
        return "reset" if self.count is None else f"reset of {self.count} at random"


@dataclass(frozen=True, slots=True)
class HalfClose:
    def __str__(self) -> str:
        return "half-close"


@dataclass(frozen=True, slots=True)
class Corrupt:
    def __str__(self) -> str:
        return "corrupt byte"


@dataclass(frozen=True, slots=True)
class Duplicate:
    def __str__(self) -> str:
        return "duplicate chunk"


Condition: TypeAlias = Latency | Bandwidth | Slices | BlackHole | Freeze | Refuse
Deed: TypeAlias = Reset | HalfClose | Corrupt | Duplicate


@dataclass(frozen=True, slots=True)
class When:
    """When a fault begins, and for how long. Seconds; `size` bytes in the direction `of`, counted on each connection."""

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


NOW = When()


class Engine(Protocol):
    """Who carries faults out."""

    def begin(self, fault: Fault) -> None: ...

    def end(self, fault: Fault) -> None: ...


class Fault:
    """A fault that was begun or planned. As a context manager it is healed at the end of the block.

    `times`: how often it happened or began so far, counted per connection where it comes after so many bytes.
    """

    def __init__(self, engine: Engine, kind: Condition | Deed, ways: tuple[Way, ...], when: When, only: object | None) -> None:
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
        return f"<Fault {self.words()}: {state}, {self.times} {'time' if self.times == 1 else 'times'} so far>"

    def words(self) -> str:
        """What it is, for people: `black hole to server after 3 s for 30 s`."""
        where = "" if self.only is None else f" on {self.only}"
        return f"{self.kind}{_towards(self.ways)}{self.when}{where}"

    @property
    def active(self) -> bool:
        """Whether it is on, or may still come."""
        return self.on > 0 or self.planned

    def heal(self) -> None:
        """End it, on every connection, and whatever of it is still planned; other faults stay. Returns when it has ended. May be
        called twice, and after the proxy was closed. What has happened (a reset) stays as it is."""
        self._engine.end(self)

    def __enter__(self) -> Fault:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.heal()


class Faults:
    """The faults of connections, one method each.

    Where the method is called decides when and on what: on the proxy itself it begins now, on `proxy.after(...)`,
    `proxy.every(...)` and `proxy.after_bytes(...)` then, and on one of `proxy.connections` it is about that connection alone.
    Every method returns at once with a `Fault`; a fault that begins now is in effect when the method returns, for every
    connection whose `connect()` had returned. `to` is the direction, named by who receives.

    Of several faults of one kind (two latencies) the one begun last counts, per direction and connection; when it is healed the
    earlier one counts again. Faults of different kinds come together. Wrong arguments raise `UsageError`, and nothing begins.
    """

    def __init__(self, engine: Engine, when: When = NOW, only: object | None = None) -> None:
        self._engine = engine
        self._when = when
        self._only = only

    def latency(self, seconds: float, jitter: float = 0.0, *, to: To = "both") -> Fault:
        """What arrives is passed on `seconds` later, give or take up to `jitter` (evenly distributed, from the seed). Order is
        kept. With `to="both"` a round trip takes 2 x `seconds` longer. Kept to about a millisecond. At most 4 MiB of a
        direction are under way; then the sender waits. When the latency ends, what is under way arrives at once."""
        _positive("seconds", seconds, zero=True)
        _positive("jitter", jitter, zero=True)
        if jitter > seconds:
            raise UsageError("usage", f"a jitter of {jitter!r} s is larger than the latency of {seconds!r} s")
        return self._new(Latency(seconds, jitter), to)

    def bandwidth(self, bytes_per_second: float, *, to: To = "both") -> Fault:
        """No more than `bytes_per_second` pass in each direction, over all connections together, as on one cable (on one of
        `proxy.connections`: that one has a cable of its own). They share it in turn, 10 ms each."""
        _positive("bytes_per_second", bytes_per_second)
        return self._new(Bandwidth(bytes_per_second), to)

    def slices(self, largest: int, smallest: int = 1, *, pause: float = 0.0, to: To = "both") -> Fault:
        """The stream is cut into pieces of `smallest` to `largest` bytes, each sent by itself, `pause` seconds apart. Where the
        cuts are depends on the seed, the connection's number and the position in the stream alone, not on how fast things go;
        what arrived in pieces is not put together again. Without a pause the receiver's kernel may join pieces."""
        _positive("smallest", smallest)
        _positive("pause", pause, zero=True)
        if largest < smallest:
            raise UsageError("usage", f"slices of {smallest!r} to {largest!r} bytes: the first is the smaller one")
        return self._new(Slices(largest, smallest, pause), to)

    def black_hole(self, *, to: To = "both") -> Fault:
        """What goes in that direction vanishes: bytes, and also the news that a side has closed or reset. No error comes of it.

        A connection that lost something is reset when the hole ends, because TCP delivers all of a stream or nothing more of it;
        one that lost nothing goes on. What was sent before the call and had not passed yet vanishes as well. (For a partition that
        heals before anything is lost, as TCP's retransmission makes it look, see `freeze`.)

        The sender's kernel believes that its bytes arrived: TCP_USER_TIMEOUT and keep-alive do not notice this hole. Only the
        sender's own patience does."""
        return self._new(BlackHole(accept=True), to)

    def freeze(self, *, to: To = "both") -> Fault:
        """Nothing moves in that direction and nothing is lost, as when the peer is stopped (SIGSTOP) or the network is away for a
        while: a sender waits when the kernel's buffers are full, and after the fault all goes on where it stood."""
        return self._new(Freeze(), to)

    def reset(self, *, to: To = "both") -> Fault:
        """Cut connections with RST (SO_LINGER 0): both sides get `ConnectionResetError`, what was under way is lost.

        With `to="client"` only the client learns of it, and the server is left with a half-open connection, as after a crash of
        the client's machine: what it sends vanishes; `heal()` of the proxy resets it. `to="server"` likewise.

        Unix sockets have no RST: the peer finds the end of the stream, or `ConnectionResetError` if it had sent what was not
        read."""
        return self._new(Reset(None), to)

    def half_close(self, *, to: To = "both") -> Fault:
        """Send the end of the stream (FIN) in that direction, after what is under way, as if the sender had called
        `shutdown(SHUT_WR)`. What the sender sends later vanishes. The other direction goes on."""
        return self._new(HalfClose(), to)

    def corrupt(self, *, to: To = "both") -> Fault:
        """Change the next byte that passes in that direction, on each connection; to another value, from the seed."""
        return self._new(Corrupt(), to)

    def duplicate(self, *, to: To = "both") -> Fault:
        """Send the next chunk that passes in that direction twice, on each connection. TCP never does that; it is for testing that
        a protocol notices. A chunk is what the proxy read at once: all of a small message."""
        return self._new(Duplicate(), to)

    def _new(self, kind: Condition | Deed, to: To) -> Fault:
        if self._when.lasting is not None and isinstance(kind, Deed):
            raise UsageError("usage", f"a {kind} happens and is over: it cannot be lasting {self._when.lasting!r} s")
        fault = Fault(self._engine, kind, ways(to), self._when, self._only)
        self._engine.begin(fault)
        return fault


class ListenerFaults(Faults):
    """The faults of connections, and those of the place where new ones arrive."""

    def refuse(self) -> Fault:
        """New connections are refused (`ConnectionRefusedError`), as when no server runs. The port stays reserved. Connections
        that are open go on: `reset` them as well for a server that was killed."""
        return self._new(Refuse(), "both")

    def black_hole(self, *, to: To = "both", accept: bool = True) -> Fault:
        """As on a connection. New connections are accepted by the proxy, and the server hears of them when nothing vanishes in
        its direction (any more).

        With `accept=False` new connections are not accepted at all: `connect()` waits and gets no answer, until its own timeout
        or, after the hole, the kernel's next try (1 s after the first, then 2 s, 4 s, ...). The one connection per hole that the
        kernel's queue has room for is the proxy's own."""
        return self._new(BlackHole(accept), to)

    def reset(self, *, to: To = "both", count: int | None = None) -> Fault:
        """As on a connection; of all that are open, or of `count` of them, chosen by the seed."""
        if count is not None:
            _positive("count", count)
        return self._new(Reset(count), to)


def ways(to: To) -> tuple[Way, ...]:
    """The directions that `to` names. `UsageError` for another word."""
    if to == "both":
        return BOTH
    if to not in BOTH:
        raise UsageError("usage", f"to={to!r} is no direction: server, client or both")
    return (to,)


def timed(after: float, lasting: float | None) -> When:
    """A schedule by seconds, once."""
    _positive("after", after, zero=True)
    if lasting is not None:
        _positive("lasting", lasting)
    return When(after=after, lasting=lasting)


def repeated(interval: float, jitter: float, lasting: float | None) -> When:
    """A schedule by seconds, again and again."""
    _positive("interval", interval)
    _positive("jitter", jitter, zero=True)
    if jitter >= interval:
        raise UsageError("usage", f"a jitter of {jitter!r} s leaves nothing of an interval of {interval!r} s")
    if lasting is not None:
        _positive("lasting", lasting)
        if lasting > interval - jitter:
            raise UsageError("usage", f"lasting {lasting!r} s every {interval!r} s: it would begin again before it has ended")
    return When(every=interval, jitter=jitter, lasting=lasting)


def counted(size: int, of: To, again: bool, lasting: float | None) -> When:
    """A schedule by bytes."""
    _positive("size", size, zero=not again)
    if lasting is not None:
        _positive("lasting", lasting)
    return When(size=size, of=ways(of), again=again, lasting=lasting)


def _positive(name: str, value: float, *, zero: bool = False) -> None:
    if not (value > 0 or (zero and value == 0)):
        raise UsageError("usage", f"{name} is {value!r}, and must be {'0 or more' if zero else 'more than 0'}")


def _towards(ways: tuple[Way, ...]) -> str:
    return "" if ways == BOTH else f" to {ways[0]}"
