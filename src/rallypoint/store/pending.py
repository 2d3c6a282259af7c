"""A request whose answer its thread has not got yet, and what is known about it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rallypoint.errors import Outcome
from rallypoint.wire.messages import AnyReply, Request
from rallypoint.wire.values import Parts

NO, YES = (False,), (True,)


class Pending:
    """One request, from when it has a number until its own thread has the answer in hand."""

    # In the class, for most stay as they are in the life of a small request.
    seq = 0
    request: Request = None  # type: ignore[assignment]  # for the moment in which only its number is known
    parts: Parts | None = None  # its value, when that is large
    on = 0  # the link that all of it was given to, or may have been; 0: none
    repeated = False  # an earlier one was, too
    reply: AnyReply | None = None
    body: memoryview | None = None
    error: Exception | None = None
    waiter: threading.Lock | None = None  # what its thread sleeps on while another one drives
    given_up: Sequence[bool] = NO  # nobody will look at the answer, and the server is to be told; in a list that several may share
    told = (0, 0)  # so that was done: on which link, and before which of its pings

    def __init__(self, began: float, deadline: float, patient: bool) -> None:
        self.began = began
        self.deadline = deadline
        self.patient = patient  # the deadline is for a standstill: it moves on while bytes of a large value do


def grace(wait: float) -> float:
    """How much longer than the server a client waits for an answer that is due after `wait` seconds: the server's is better, for it
    says what is known, but a frozen one must not hold anybody up by more than a tenth (or what a busy machine needs anyway)."""
    return min(1.0, max(0.05, 0.08 * wait))


def outcome_of(pending: Pending, happened: frozenset[int] | None = None) -> Outcome:
    """What is known about a request without an answer. `happened`: the numbers that the server carried out, when it knows."""
    if not (pending.on or pending.repeated) or not pending.request.changes:
        return "did not happen"
    if happened is None:
        return "unknown"
    return "happened" if pending.seq in happened else "did not happen"


def told_of(pending: Pending, outcome: Outcome) -> str:
    """The same in words."""
    name = type(pending.request).__name__
    if outcome == "unknown":
        return f"{name} was sent, and whether it was carried out is not known"
    return f"{name} {'was carried out; its answer is lost' if outcome == 'happened' else 'was not carried out'}"
