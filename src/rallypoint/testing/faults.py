"""Faults by name: what can be done to connections, and to which of them.

`Faults` has a method for each fault and hands a `Fault` to the engine that carries it out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rallypoint.errors import UsageError

if TYPE_CHECKING:
    from rallypoint.testing.fault_engine import ProxyEngine
    from rallypoint.testing.proxy_relay import Relay

Way: TypeAlias = Literal["server", "client"]
To: TypeAlias = Literal["server", "client", "both"]
"""A direction, named by the receiver: what the client sends goes `to="server"`."""

BOTH: tuple[Way, ...] = ("server", "client")

FaultName: TypeAlias = Literal["latency", "black hole", "frozen", "refusing connections", "reset"]


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Fault:
    """A fault that was begun or planned. As a context manager it is healed at the end of the block.

    `times`: how often it happened or began so far, counted per connection where it comes after
    some bytes.
    """

    engine: ProxyEngine
    name: FaultName
    ways: tuple[Way, ...]
    seconds: float = 0.0  # of a latency
    jitter: float = 0.0  # of a latency, or of `every`
    accept: bool = True  # of a black hole
    every: float | None = None  # seconds
    size: int | None = None  # bytes after which it begins, on each connection
    of: tuple[Way, ...] = BOTH  # the direction in which they are counted
    only: Relay | None = None
    planned: bool = False  # may still begin
    due: float = math.inf  # when it happens next
    places: list[Relay | None] = field(default_factory=list)  # where it is on; None: everywhere
    times: int = 0

    def __str__(self) -> str:
        jitter = f" ± {self.jitter:g} s" if self.jitter else ""
        return "".join(
            (
                self.name,
                f" {self.seconds:g} s{jitter}" if self.name == "latency" else "",
                "" if self.accept else " that accepts nobody",
                _towards(self.ways),
                "" if self.every is None else f" every {self.every:g} s{jitter}",
                "" if self.size is None else f" after {self.size} B{_towards(self.of)}",
                "" if self.only is None else f" on connection {self.only.number}",
            )
        )

    def __repr__(self) -> str:
        state = "on" if self.places else "planned" if self.planned else "over"
        times = f"{self.times} {'time' if self.times == 1 else 'times'} so far"
        return f"<Fault {self}: {state}, {times}>"

    @property
    def active(self) -> bool:
        """True while it is on, or may still come."""
        return bool(self.places) or self.planned

    def heal(self) -> None:
        """End it on every connection, and drop what of it is planned; other faults stay.

        It has ended when this returns. May be called twice, and after the proxy was closed.
        A reset that happened stays as it is.
        """
        self.engine.end(self)

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

    On the proxy itself a fault begins now; on `proxy.after_bytes(...)` then; on one of
    `proxy.connections` it concerns that connection alone. Every method returns at once with a
    `Fault`; a fault that begins now is in effect when the method returns, for every connection
    whose `connect()` had returned. `to` is the direction, named by the receiver.

    Of two latencies the one begun last counts, per direction and connection; when it is healed the
    earlier one counts again. Faults of different kinds come together. Wrong arguments raise
    `UsageError`, and nothing begins.
    """

    def __init__(self, engine: ProxyEngine, **where: Any) -> None:
        """`where`: fields of each `Fault`: `size` and `of`, or `only`."""
        self._engine = engine
        self._where = where

    def latency(self, seconds: float, jitter: float = 0.0, *, to: To = "both") -> Fault:
        """Pass on what arrives `seconds` later, give or take up to `jitter` (from the seed).

        The order is kept. With `to="both"` a round trip takes 2 x `seconds` longer. Kept to about
        a millisecond. At most 4 MiB of a direction are under way; then the sender waits. When the
        latency ends, what is under way arrives at once.
        """
        check_at_least("seconds", seconds, 0)
        check_jitter(jitter, seconds)
        return self._begin("latency", to, seconds=seconds, jitter=jitter)

    def black_hole(self, *, to: To = "both") -> Fault:
        """Let vanish what goes in that direction: bytes, and the news that a side closed or reset.

        A connection that lost something is reset when the hole ends, because TCP delivers all of a
        stream or nothing more of it; one that lost nothing goes on. What was sent before the call
        and had not passed yet vanishes as well. For a partition that heals before anything is
        lost, as TCP's retransmission makes it look, see `freeze`.

        The sender's kernel believes that its bytes arrived: TCP_USER_TIMEOUT and keep-alive do not
        notice this hole.
        """
        return self._begin("black hole", to)

    def freeze(self, *, to: To = "both") -> Fault:
        """Move nothing in that direction and lose nothing, as when the peer is stopped (SIGSTOP).

        A sender waits when the kernel's buffers are full; after the fault all goes on.
        """
        return self._begin("frozen", to)

    def reset(self, *, to: To = "both") -> Fault:
        """Cut connections with RST: both sides get `ConnectionResetError`, bytes under way are
        lost.

        With `to="client"` only the client learns of it, and the server is left with a half-open
        connection: what it sends vanishes; `heal()` of the proxy resets it. `to="server"` likewise.

        Unix sockets have no RST: the peer finds the end of the stream, or `ConnectionResetError` if
        it had sent what was not read.
        """
        return self._begin("reset", to)

    def _begin(self, name: FaultName, to: To = "both", **more: Any) -> Fault:
        fault = Fault(engine=self._engine, name=name, ways=directions(to), **self._where, **more)
        self._engine.begin(fault)
        return fault


def directions(to: To) -> tuple[Way, ...]:
    """Return the directions that `to` names. `UsageError` for another word."""
    if to == "both":
        return BOTH
    if to not in BOTH:
        raise UsageError("usage", f"to={to!r} is no direction: server, client or both")
    return (to,)


def check_at_least(name: str, value: float, least: float) -> None:
    """Raise `UsageError` unless `value` is a number of at least so much."""
    if not value >= least:
        raise UsageError("usage", f"{name} is {value!r}, and must be {least:g} or more")


def check_jitter(jitter: float, seconds: float) -> None:
    """Raise `UsageError` for a jitter that is larger than what it is added to."""
    if not 0 <= jitter <= seconds:
        raise UsageError("usage", f"a jitter of {jitter!r} s does not fit into {seconds!r} s")


def _towards(ways: tuple[Way, ...]) -> str:
    return "" if ways == BOTH else f" to {ways[0]}"
