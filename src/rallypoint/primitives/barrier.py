"""Barriers: all arrive, or all learn which caller did not.

The decisions are the server's (`store/state/barriers.py`): one request, which is answered when all
are there, or when it is certain that they will not be. What is here is one call, and the words for
a timeout.
"""

from __future__ import annotations

import math
from datetime import timedelta

from rallypoint.errors import BarrierTimeout
from rallypoint.store.client.arguments import LARGEST_SIZE, key_of, seconds_of, size_of
from rallypoint.store.client.client import Client
from rallypoint.wire.messages import AnyReply, Arrive, Integer, TimedOut


def barrier(store: Client, name: str, size: int, timeout: float | timedelta | None = 30.0) -> int:
    """Wait until `size` have arrived at this name, and return which round it was: a number that
    grows from round to round of a name, and is the same for all of them. One request, from each.

    A name may be used again: each call is the caller's next round. Threads of one process take a
    seat each. `timeout`: seconds; None: for as long as the server lives; 0: fail unless all others
    are there already.

    Raises BarrierTimeout (`barrier-timeout`) when not everybody came in time. BarrierBroken
    (`barrier-broken`) at once in every caller that waits when one of them gives up (its timeout,
    Ctrl-C, an exception of a signal handler) or its session ends; and once in each that comes to
    such a round too late. BarrierMismatch (`barrier-size`) in all when two give another size. All
    three name the callers that came and, as far as that can be told, the others. After any of them
    the caller is at no barrier, and the next call is the next round; after a StoreTimeout or
    SessionLost it may be that the others have passed."""
    if name.__class__ is not str or not name.isascii():
        name = key_of(name)
    if size.__class__ is not int or not 0 < size < LARGEST_SIZE:
        size = size_of(size, "a barrier")
    seconds = timeout if timeout.__class__ is float and timeout >= 0.0 else seconds_of(timeout)
    reply, _ = store.ask(Arrive, name, size, seconds, wait=seconds)
    if type(reply) is Integer:
        return reply.number
    raise _timed_out(name, size, seconds, reply)


def _timed_out(name: str, size: int, seconds: float, reply: AnyReply) -> BarrierTimeout:
    from rallypoint.store.state.attendance import attendance

    assert isinstance(reply, TimedOut), reply
    came = attendance(size, reply.arrived, reply.present, reply.absent)
    after = (
        f"timed out after {seconds:.1f} s"
        if math.isfinite(seconds) and seconds
        else "was not complete"
    )
    return BarrierTimeout(
        "barrier-timeout",
        f'the barrier "{name}" of {size} {after}: {came}',
        present=tuple(map(str, reply.present)),
        absent=tuple(map(str, reply.absent)),
        help=_HELP,
    )


_HELP = (
    ("if the others need longer, give it more time", "store.barrier(name, size, timeout=...)"),
)
