"""Faults by name: what can be done to connections, and to which of them.

`Faults` has a method for each fault and hands a `Fault` to the proxy, which carries it out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rallypoint.errors import UsageError

if TYPE_CHECKING:
    from rallypoint.testing.proxied_connection import ProxiedConnection
    from rallypoint.testing.proxy import ChaosProxy

Way: TypeAlias = Literal["server", "client"]
To: TypeAlias = Literal["server", "client", "both"]
"""A direction, named by the receiver: what the client sends goes `to="server"`."""

BOTH: tuple[Way, ...] = ("server", "client")

FaultName: TypeAlias = Literal["latency", "black_hole", "freeze", "refuse", "reset"]


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Fault:
    """A fault that was begun or planned. As a context manager it is healed at the end of the block.

    `times`: how often it happened or began so far, counted per connection where it comes after
    some bytes.
    """

    proxy: ChaosProxy
    name: FaultName
    given: str  # its arguments, as text
    ways: tuple[Way, ...]
    seconds: float = 0.0  # of a latency
    jitter: float = 0.0  # of a latency, or of `every`
    accept: bool = True  # of a black hole
    every: float | None = None  # seconds
    size: int | None = None  # bytes after which it begins, on each connection
    of: To = "both"  # the direction in which they are counted
    only: ProxiedConnection | None = None  # None: all connections
    due: float = math.inf  # when it happens next
    times: int = 0

    def __repr__(self) -> str:
        state = "active" if self.active else "over"
        return f"<Fault {self.name}({self.given}): {state}, times={self.times}>"

    @property
    def active(self) -> bool:
        """True while it is on, or may still come."""
        return self in self.proxy.faults

    def heal(self) -> None:
        """End it on every connection, and drop what of it is planned; other faults stay.

        It has ended when this returns. May be called twice, and after the proxy was closed.
        A reset that happened stays as it is.
        """
        if self.active:
            self.proxy._end(self)

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

    Of two latencies the one begun last counts, and when it is healed the earlier one again. Faults
    of different kinds come together. Wrong arguments raise `UsageError`, and nothing begins.
    """

    def __init__(self, proxy: ChaosProxy, **where: Any) -> None:
        """`where`: fields of each `Fault`: `size` and `of`, or `only`."""
        self._proxy = proxy
        self._where = where

    def latency(self, seconds: float, jitter: float = 0.0, *, to: To = "both") -> Fault:
        """Pass on what arrives `seconds` later, give or take up to `jitter` (from the seed).

        The order is kept. With `to="both"` a round trip takes 2 x `seconds` longer. At most 4 MiB
        of a direction are under way. When the latency ends, what is under way arrives at once.
        """
        require(seconds >= 0, f"seconds={seconds!r} is less than 0")
        require(0 <= jitter <= seconds, f"jitter={jitter!r} is not within {seconds!r}")
        return self._begin("latency", to, seconds=seconds, jitter=jitter)

    def black_hole(self, *, to: To = "both") -> Fault:
        """Let vanish what goes in that direction: bytes, and the news that a side closed or reset.

        A connection that lost something is reset when the hole ends, because TCP delivers all of a
        stream or nothing more of it; one that lost nothing goes on. For a partition that heals
        before anything is lost, as TCP's retransmission makes it look, see `freeze`.
        """
        return self._begin("black_hole", to)

    def freeze(self, *, to: To = "both") -> Fault:
        """Move nothing in that direction and lose nothing, as when the peer is stopped (SIGSTOP).

        A sender waits when the kernel's buffers are full; after the fault all goes on.
        """
        return self._begin("freeze", to)

    def reset(self, *, to: To = "both") -> Fault:
        """Cut connections with RST: both sides get `ConnectionResetError`, bytes under way are
        lost.

        With `to="client"` only the client learns of it, and the server is left with a half-open
        connection: what it sends vanishes; `heal()` of the proxy resets it. `to="server"` likewise.
        """
        return self._begin("reset", to)

    def _begin(self, name: FaultName, to: To = "both", **more: Any) -> Fault:
        fields = {**self._where, **more}
        given = ", ".join(f"{key}={value!r}" for key, value in {"to": to, **fields}.items())
        fault = Fault(proxy=self._proxy, name=name, given=given, ways=directions(to), **fields)
        self._proxy._add(fault)
        return fault


def directions(to: To) -> tuple[Way, ...]:
    """Return the directions that `to` names. `UsageError` for another word."""
    require(to in ("both", *BOTH), f"{to!r} is no direction: server, client or both")
    return tuple(way for way in BOTH if to in (way, "both"))


def require(true: bool, text: str) -> None:
    """Raise `UsageError` with this text unless something is true."""
    if not true:
        raise UsageError("usage", text)
