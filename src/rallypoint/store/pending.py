"""A request whose answer its thread has not got yet, and what is known about it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from rallypoint.errors import Outcome
from rallypoint.wire import messages as wire
from rallypoint.wire.messages import AnyReply, Request
from rallypoint.wire.values import Parts, shown

NO, YES = (False,), (True,)

_ASKED: dict[type[Request], str] = {
    wire.Get: "reading {}",
    wire.Set: "writing {}",
    wire.CompareAndSet: "comparing and setting {}",
    wire.Delete: "removing {}",
    wire.Keys: "listing the keys that begin with {}",
    wire.Exists: "looking for {}",
    wire.Add: "adding to {}",
    wire.Append: "appending to {}",
    wire.Push: "putting into the queue {}",
    wire.Pop: "taking from the queue {}",
    wire.Settle: "settling an item of the queue {}",
    wire.Length: "counting the queue {}",
    wire.Watch: "watching the keys that begin with {}",
    wire.Claim: "claiming {}",
    wire.Resolve: "giving the outcome of {}",
    wire.Lock: "acquiring the lock {}",
    wire.Unlock: "giving back the lock {}",
    wire.Arrive: "arriving at {}",
    wire.Status: "the status",
}
"""What a request is to whoever called a method, with its key or name: the names of messages mean nothing to users."""


class Pending(msgspec.Struct, eq=False):
    """One request, from when it has a number until its own thread has the answer in hand."""

    began: float
    deadline: float
    patient: bool  # the deadline is for a standstill: it moves on while bytes of a large value do
    seq: int  # 0: none yet
    kind: type[Request]
    message: bytes  # as it is sent
    parts: Parts | None = None  # its value, when that is large
    on: int = 0  # the link that all of it was given to, or may have been; 0: none
    repeated: bool = False  # an earlier one was, too
    reply: AnyReply | None = None
    body: memoryview | None = None
    error: Exception | None = None
    waiter: threading.Lock | None = None  # what its thread sleeps on while another one drives
    given_up: Sequence[bool] = NO  # nobody will look at the answer, and the server is to be told; in a list that several may share
    told: tuple[int, int] = (0, 0)  # so that was done: on which link, and before which of its pings

    @property
    def request(self) -> Request:
        """What was asked, decoded from the message."""
        request: Request = wire.decode_request(self.message)
        return request

    @property
    def fields(self) -> list[Any]:
        """Those after `seq` and `acked`; decoded from the message, for they are looked at only when something is wrong. As they are: one
        that the server cannot understand is among what may be wrong."""
        return list(msgspec.msgpack.decode(self.message)[3:])


LONG = 12.5
"""Seconds of waiting from which on `grace` is the same."""

GRACE = 1.0
"""Seconds: that much."""

LEAST_GRACE = 0.15
"""Seconds: `grace` of a short wait."""


def grace(wait: float) -> float:
    """How much longer than the server a client waits for an answer that is due after `wait` seconds: the server's is better, for it
    says what is known, but a frozen one must not hold anybody up by more than a tenth (or what a busy machine needs anyway: a server
    that shares two processors with a test suite comes to its timers tens of milliseconds late)."""
    return LEAST_GRACE if wait < LEAST_GRACE / 0.08 else 0.08 * wait if wait < LONG else GRACE


def outcome_of(pending: Pending, happened: frozenset[int] | None = None) -> Outcome:
    """What is known about a request without an answer. `happened`: the numbers that the server carried out, when it knows."""
    if not (pending.on or pending.repeated) or not pending.kind.changes:
        return "did not happen"
    if happened is None:
        return "unknown"
    return "happened" if pending.seq in happened else "did not happen"


def asked_of(pending: Pending) -> str:
    """What was asked, in a user's words: 'reading "w"'."""
    kind, fields = pending.kind, pending.fields
    words = _ASKED.get(kind, kind.__name__)
    if "{}" not in words:
        return words
    name = fields[0]
    if kind in (wire.Keys, wire.Watch) and not name:
        return words.removesuffix(" that begin with {}")
    what = shown(name) if isinstance(name, str) else shown(name[0]) if len(name) == 1 else f"{len(name)} keys"
    if kind in (wire.Get, wire.Exists) and fields[1:] and fields[1]:
        return f"waiting for {what}"
    return words.format(what)


def told_of(pending: Pending, outcome: Outcome) -> str:
    """`outcome` in words; the request is named, for the headline may speak of something else."""
    asked = asked_of(pending)
    if not pending.kind.changes:
        return f"{asked} changes nothing: it can be asked again"
    if outcome == "unknown":
        return f"{asked} was sent, and whether it was carried out is not known"
    return f"{asked} {'was carried out; its answer is lost' if outcome == 'happened' else 'was not carried out'}"
