"""Exceptions for requests that the server refused, and for those lost with a session."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from rallypoint.errors import (
    Advice,
    BarrierBroken,
    BarrierMismatch,
    Compacted,
    FenceStale,
    InternalError,
    LimitExceeded,
    OnceFailed,
    Outcome,
    RallypointError,
    SessionLost,
    StoreClosed,
    StoreUnreachable,
    UsageError,
    WouldDeadlock,
    WrongType,
)
from rallypoint.store.client.call import Call, outcome_of, told_of
from rallypoint.wire import messages as wire
from rallypoint.wire import values
from rallypoint.wire.messages import Failed, Refusal, Request

_LIMITS = {"value-too-large", "store-full", "key-too-long", "too-many-keys", "too-many-waiting"}
_TYPES = {"wrong-type", "integer-overflow"}

_ROOM = frozenset({"value-too-large", "store-full", "too-many-keys"})
"""Refusals whose text does not say for what there was no room."""

_FOR: dict[type[Request], str] = {
    **dict.fromkeys((wire.Set, wire.CompareAndSet, wire.Add, wire.Append), "store[{}]"),
    wire.Push: "the queue {}",
    wire.Claim: "once({})",
    wire.Resolve: "once({})",
    wire.Lock: "the lock {}",
    wire.Arrive: "{}",  # a barrier, or an average
}
"""Words for the thing that a request would have made the store keep, with its key or name."""


def of_a_handler(error: OSError) -> bool:
    """Tell whether a signal handler raised it, and not the call of ours in the middle of which that
    ran. Handlers that raise TimeoutError, which is an OSError, are common; taken for the socket's
    it would be lost."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    module = trace.tb_frame.f_globals.get("__name__", "")
    return isinstance(error, RallypointError) or module.partition(".")[0] not in (
        "rallypoint",
        "socket",
        "ssl",
    )


def refused(kind: type[Request], fields: tuple[Any, ...], reply: Failed) -> RallypointError:
    """Make the exception for a Failed reply, which names the key, the queue, ... where the reply
    does not."""
    if reply.code in _ROOM and kind in _FOR:
        reply = msgspec.structs.replace(
            reply, text=f"{_FOR[kind].format(values.shown(fields[0]))}: {reply.text}"
        )
    return failure(reply)


def failure(reply: Failed) -> RallypointError:
    """Make the exception for a Failed reply; a new code of the protocol gets its class here."""
    code, text = reply.code, reply.text
    if code in _LIMITS:
        return LimitExceeded(code, text)
    if code in _TYPES:
        return WrongType(code, text)
    if code == "fence-stale":
        return FenceStale(
            code,
            text,
            why=(
                "a lock was lost, or given back, before this write: somebody else may hold it now",
            ),
        )
    if code == "compacted":
        return Compacted(
            code,
            text,
            help=(("read the keys again and watch from that revision", "store.watch(prefix)"),),
        )
    if code == "store-closed":
        return StoreClosed(code, text, outcome="did not happen")
    if code in ("lock-twice", "lock-cycle"):
        return WouldDeadlock(code, text)
    if code in ("barrier-broken", "barrier-missed"):
        return BarrierBroken(
            code, text, present=tuple(map(str, reply.present)), absent=tuple(map(str, reply.absent))
        )
    if code == "barrier-size":
        return BarrierMismatch(code, text)
    if code == "once-failed":
        return _once_failed(reply)
    if code == "bad-request":
        return InternalError(
            "internal-error", f"the server refused a request of this client as malformed: {text}"
        )
    return UsageError(code, text)


def _once_failed(reply: Failed) -> OnceFailed:
    """Make the exception for what `once` has told of another: its class, message and traceback."""
    account: Any = values.decode(reply.value)
    kind, message, told = account
    first, _, more = message.strip().partition("\n")
    headline = f"{reply.text}: {kind}" + (f": {first}" if first else "") + (" ..." if more else "")
    error = OnceFailed(
        reply.code,
        headline,
        remote_type=kind,
        remote_traceback=told,
        why=("a failure is not remembered: whoever asks now tries again",),
    )
    who = str(reply.present[0]) if reply.present else "it"
    error.__notes__.insert(
        0, "\n".join((f"  {who} said:", *(f"    | {line}" for line in told.splitlines())))
    )
    return error


class SessionEnd(msgspec.Struct, eq=False):
    """End of a session, with its reason. `undone`: what was sent once and has no answer was not
    carried out. `again`: said once more if the next session finds no server. `refusal`: the session
    was lost, and not closed. `told`: somebody has been told.
    """

    headline: str
    undone: bool = False
    again: str = ""
    refusal: Refusal | None = None
    why: tuple[str, ...] = ()
    help: Advice = ()
    told: bool = False

    def error(self, call: Call | None) -> RallypointError:
        """Make the error for the caller of a request that has no answer, or, without one, for the
        next caller.
        """
        refusal = self.refusal
        happened = frozenset(refusal.happened) if refusal is not None and refusal.known else None
        if call is None or (self.undone and call.tried < 2):
            outcome: Outcome = "did not happen"
        else:
            outcome = outcome_of(call, happened)
        if refusal is None:
            return StoreClosed("store-closed", self.headline, outcome=outcome)
        return SessionLost(
            "session-lost",
            self.headline,
            outcome=outcome,
            same_server=refusal.known,
            why=self.why if call is None else (*self.why, told_of(call, outcome)),
            help=self.help,
        )


def lost_session(
    address: str,
    ttl: float,
    silent: float,
    refusal: Refusal,
    unreached: StoreUnreachable | None,
    stopped: tuple[tuple[str, ...], Advice],
) -> SessionEnd:
    """Make the end of a session that was lost.

    `silent`: seconds since the last sign of life that the server confirmed. `unreached`: no server
    has said anything: what became of the attempts to reach it; `stopped`: why and help, when its
    process is seen to stand still.
    """
    help: Advice = ()
    why: tuple[str, ...]
    if unreached is not None:
        headline = f"the store at {address} has not been reached for {silent:.1f} s, longer than the session's ttl of {ttl:g} s"
        released = "if it still runs, it has released what this session held; if it was ended, its data went with it"
        why = (str(unreached), *unreached.why, released)
        if stopped[0]:
            why = (*stopped[0], "when it goes on, what this session held is released")
        help = stopped[1] or unreached.help
    elif refusal.known and silent < ttl:
        headline, why = f"the store at {address} says: {refusal.text}", ()
    elif refusal.known:
        headline = f"the session at {address} is over: the server had no sign of life from this client for {silent:.1f} s (ttl {ttl:g} s)"
        why = (
            "a process that is stopped, has lost its network, or holds the GIL (a long call into C) cannot say that it lives",
            "what the session held is released: locks, barrier seats, ephemeral keys, taken items",
        )
        longer = f"rallypoint.connect(..., ttl={max(60, 3 * math.ceil(silent))})"
        help = (("give it a longer lease", longer),)
    else:
        headline = f"the store at {address} does not know this session: it is another server than before, with none of its data"
        why = ("the server was restarted, or its address was given to another one",)
    return SessionEnd(headline, refusal=refusal, why=why, help=help)
