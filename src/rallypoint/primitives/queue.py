"""Queues whose items survive their takers.

The server keeps the order, and the line for the next item (`store/state/queues.py`). An item that
was taken belongs to the taker's session until it is acknowledged; when the session ends, it stands
in the queue again where it stood.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

from rallypoint.clock import Clock
from rallypoint.errors import QueueEmpty, SessionLost, UsageError
from rallypoint.primitives.release import Back, Loan
from rallypoint.store.client.arguments import key_of, seconds_of
from rallypoint.store.client.client import Client
from rallypoint.wire.messages import (
    Absent,
    AnyReply,
    Done,
    Integer,
    Length,
    Pop,
    Push,
    Settle,
    TimedOut,
    Value,
)
from rallypoint.wire.values import Parts, join, shown


class Queue:
    """A queue that all clients of a store share under one name. `store.queue(name)` makes one; that
    asks the store nothing.

    First in, first out, in the order in which the server got them; the one that has waited longest
    gets the next one. Values are those of the store, tensors of any size among them, and what comes
    out is a copy. A queue has no end of its own: it holds what the store has room for, and a `put`
    over that raises LimitExceeded.

    Works from any thread. In a forked child, too; what was taken before the fork belongs to the
    parent.
    """

    __slots__ = ("_client", "name")

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self.name = key_of(name)

    def put(self, value: object) -> None:
        """Put a value at the end; returns when the server has it.

        When it raises, the value is not in the queue, except that StoreTimeout, SessionLost and
        StoreClosed say in `outcome` what is known about that, and that after an exception of a
        signal handler it is not known.
        """
        client = self._client
        client.ask(Push, self.name, client.encoded(value, called=f"the queue {shown(self.name)}"))

    def get(self, timeout: float | timedelta | None = None) -> Any:
        """Take the first value and acknowledge it: it is gone from the queue when this returns.

        Waits `timeout` seconds for one, None: for as long as the server lives. Raises QueueEmpty
        then, which is a TimeoutError and a `queue.Empty`. After any exception, also a signal
        handler's, the item is where it was; a process that dies in here has not taken it. What a
        process does with a value after `get` is lost with the process: see `take`.
        """
        taken = Taken(self._client, self.name, seconds_of(timeout))
        value = taken.__enter__()
        try:
            taken.__exit__(None, None, None)
        except BaseException:
            taken._put_again(value)
            raise
        return value

    def get_nowait(self) -> Any:
        """Take the first value like `get`, without waiting for one."""
        return self.get(0.0)

    def take(self, timeout: float | timedelta | None = None) -> Taken:
        """Take an item for a `with` block that works on one item: `with q.take() as value: ...`.
        Waits like `get`.

        The item is acknowledged when the block ends, and then it is gone. When the block ends by an
        exception, when the process dies, or when its session is lost, the item goes back to where
        it stood, and the next one that asks gets it. So an item is worked on at least once: a
        process that was taken for dead may still be at it.

        Then the end of the block raises SessionLost: the item went back, and somebody else may have
        it. It also comes back when the server does not answer at the end of the block
        (StoreTimeout), as soon as it does.
        """
        return Taken(self._client, self.name, seconds_of(timeout))

    def __len__(self) -> int:
        """Count the values in the queue now, without those that somebody has taken and not
        acknowledged."""
        reply, _ = self._client.ask(Length, self.name)
        assert isinstance(reply, Integer)
        return reply.number

    def __repr__(self) -> str:
        return f"<Queue {shown(self.name)} in the store at {self._client.address}>"


class Taken:
    """One item, for the time of a `with` block. See `Queue.take`."""

    def __init__(self, client: Client, name: str, seconds: float) -> None:
        self._client = client
        self._name = name
        self._seconds = seconds
        self._loan = Loan(client, partial(_back, name))
        self._accepted = Loan(client, lambda _: None)
        self._number = self._pop = 0  # of the item, and of the request that it came with
        self._clock = Clock()
        self._state = "not taken"

    def __enter__(self) -> Any:
        loan, client, name, seconds = self._loan, self._client, self._name, self._seconds
        if loan.owed is not None:
            raise UsageError(
                "usage",
                f"one take() of the queue {shown(name)} is one item, and this one is in use",
                help=(("take another one", "with q.take() as item, q.take() as next_item: ..."),),
            )
        self._loan = loan = Loan(client, partial(_back, name))
        try:
            reply, body = client.ask(Pop, name, seconds, True, wait=seconds, into=loan)
            if isinstance(reply, TimedOut):
                raise self._empty()
            assert isinstance(reply, Value)
            self._number, self._pop = reply.modified, reply.seq
            self._clock = Clock()
            self._state = "taken"
            return client.decoded(reply, body)
        except BaseException:
            if loan.owed is not None:
                self._state = "given back"
            loan.give_back()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        loan = self._loan
        try:
            if not loan.mine:
                return  # a forked child runs out of the block: the item is its parent's
            if kind is None:
                self._acknowledge()
            else:
                self._state = "given back"
                loan.give_back()
        except BaseException:
            self._state = "given back"
            loan.give_back_later()
            raise

    def _acknowledge(self) -> None:
        loan = self._loan
        try:
            reply, _ = self._client.ask(
                Settle, self._name, self._number, True, self._pop, into=self._accepted
            )
            loan.settle()
        except SessionLost as lost:
            loan.settle()
            if lost.outcome != "happened":
                lost.add_note(
                    f"  asked  acknowledging {self._called()}: it went back, and somebody else may have it"
                )
                raise
        except ConnectionError:
            loan.settle()
            raise
        else:
            if isinstance(reply, Absent):
                what = "the session that held it ended, and somebody else may have it"
                raise SessionLost(
                    "session-lost",
                    f"{self._called()} went back before it was acknowledged: {what}",
                    outcome="did not happen",
                    same_server=True,
                )
        self._state = "acknowledged"

    def _put_again(self, value: object) -> None:
        """Put the item at the end: an exception of a signal handler struck when the item was gone
        and not yet returned."""
        session = self._accepted.session
        if session is not None and isinstance(self._accepted.reply, Done):
            data = self._client.encoded(value)
            session.keep_alive.ask_later(
                Push, (self._name, join(data) if isinstance(data, Parts) else data)
            )

    def _called(self) -> str:
        return f"the item of the queue {shown(self._name)} that was taken {self._clock.elapsed():.1f} s ago"

    def _empty(self) -> QueueEmpty:
        where = f"the queue {shown(self._name)} in the store at {self._client.address}"
        if not self._seconds:
            return QueueEmpty("wait-timeout", f"{where} is empty")
        return QueueEmpty("wait-timeout", f"nothing came into {where} within {self._seconds:g} s")

    def __repr__(self) -> str:
        since = f" since {self._clock.elapsed():.1f} s" if self._state == "taken" else ""
        return f"<Taken from queue {shown(self._name)}: {self._state}{since}>"


def _back(name: str, reply: AnyReply) -> Back | None:
    """Make the request that puts the item of a reply back into the queue."""
    return (Settle, (name, reply.modified, False, reply.seq)) if isinstance(reply, Value) else None
