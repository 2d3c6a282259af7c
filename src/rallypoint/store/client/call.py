"""A request of a caller, what is known about it, and the words for that."""

from __future__ import annotations

from typing import Any

import msgspec

from rallypoint.errors import Outcome
from rallypoint.wire import messages as wire
from rallypoint.wire.messages import Request
from rallypoint.wire.values import Parts, shown

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
"""Words for each kind of request, with its key or name: the names of messages mean nothing to
users."""


class Call(msgspec.Struct, eq=False, gc=False):
    """One request of a caller, and what is known about it."""

    kind: type[Request]
    fields: tuple[Any, ...]
    seq: int
    message: bytes  # as it is sent
    began: float
    deadline: float
    patience: float  # seconds for which the deadline moves on while bytes of a large value do
    value: Parts | None = None  # beside the message
    tried: int = 0  # on how many connections it was begun
    sent: bool = False  # all of it was given to a connection, or may have been


GRACE = 1.0
"""Seconds for which a client waits longer than the server for the answer to a wait. The server's is
better, for it says what is known, and on a busy machine it comes some tenths of a second late; but
a frozen server must not hold anybody up for long.
"""


def outcome_of(call: Call, happened: frozenset[int] | None = None) -> Outcome:
    """Return what is known about a request without an answer. `happened`: the numbers that the
    server carried out, when it knows."""
    if not call.sent or not call.kind.changes:
        return "did not happen"
    if happened is None:
        return "unknown"
    return "happened" if call.seq in happened else "did not happen"


def asked_of(call: Call) -> str:
    """Describe what was asked, in a user's words: 'reading "w"'."""
    kind, fields = call.kind, call.fields
    words = _ASKED.get(kind, kind.__name__)
    if "{}" not in words:
        return words
    name = fields[0]
    if kind in (wire.Keys, wire.Watch) and not name:
        return words.removesuffix(" that begin with {}")
    what = (
        shown(name)
        if isinstance(name, str)
        else shown(name[0])
        if len(name) == 1
        else f"{len(name)} keys"
    )
    if kind in (wire.Get, wire.Exists) and fields[1:] and fields[1]:
        return f"waiting for {what}"
    return words.format(what)


def told_of(call: Call, outcome: Outcome) -> str:
    """Put `outcome` into words; the request is named, for the headline may speak of something
    else."""
    asked = asked_of(call)
    if not call.kind.changes:
        return f"{asked} changes nothing: it can be asked again"
    if outcome == "unknown":
        return f"{asked} was sent, and whether it was carried out is not known"
    return f"{asked} {'was carried out; its answer is lost' if outcome == 'happened' else 'was not carried out'}"
