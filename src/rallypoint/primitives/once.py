"""`store.once(name, fn)`: one process computes, the others get the value.

Which process computes, and which comes after it
when it dies, is decided by the server (`store/state/once.py`).
Like Go's `sync.Once` over processes, but that a failure is not remembered: whoever waits for it is
told, and whoever asks later tries again.
"""

from __future__ import annotations

import math
import os
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from rallypoint.errors import LimitExceeded, SessionLost, StoreTimeout, WouldDeadlock
from rallypoint.primitives.release import Back, Loan
from rallypoint.store.client.arguments import described, key_of, seconds_of
from rallypoint.store.client.client import Client
from rallypoint.wire import values
from rallypoint.wire.messages import AnyReply, Claim, Done, Granted, Resolve, TimedOut, Value
from rallypoint.wire.values import Parts, shown

T = TypeVar("T")

MESSAGE_CHARACTERS = 2_000
"""Characters of an exception's message that are passed on. Together with the traceback they must
fit into a message (`INLINE_BYTES`), at up to four bytes each; people read less."""

TRACEBACK_CHARACTERS = 10_000
"""Characters of its traceback likewise: some hundred lines. The middle is left out when there are
more."""

_computing: set[tuple[int, int, str, str]] = set()
"""Computations of the threads of this process: process (a forked child computes nothing), thread,
store and name."""


def once(
    client: Client,
    name: str,
    fn: Callable[[], T],
    *,
    timeout: float | timedelta | None = None,
    retry: bool = False,
) -> T:
    """Return the value of `fn()`, which is called in one of all the processes and threads that ask
    under this name; the others wait for it.

    The value is one that the store can hold, None and large tensors among them, and remembered for
    good: whoever asks later gets it at once, in this process, too. The one that computed gets what
    `fn` returned, the others each a copy of their own.

    When `fn` raises an Exception, that is raised here; everybody that waits gets OnceFailed with
    its class, message and traceback, and whoever asks after that tries again. With `retry` (that of
    the caller that computes is what counts) nobody is told, and the one that has waited longest
    computes. So does it when the process that computes dies, or loses its session, and when `fn`
    ends by KeyboardInterrupt or SystemExit: these are for one process, not for all. A value that
    cannot be stored (ValueUnsupported, LimitExceeded) is a failure of `fn`.

    `timeout`: seconds to wait for somebody else's value, None: for ever. StoreTimeout
    (`wait-timeout`) names who computes, and for how long; nothing is left behind. A call from
    inside `fn`, in the same thread, of the same name raises WouldDeadlock; a circle over several
    names or threads is not noticed: give a timeout.

    A process whose session is lost while it computes (it was stopped, or held the GIL, for longer
    than `ttl`) does not know that another one computes, too: `fn` may run twice then. There is
    still one value, which all get.
    """
    name = key_of(name)
    if not callable(fn):
        raise TypeError(
            f"once() takes a function that is called without arguments, not {described(fn)}"
        )
    seconds = seconds_of(timeout)
    me = (os.getpid(), threading.get_ident(), client.address, name)
    if me in _computing:
        raise WouldDeadlock(
            "usage",
            f"once({shown(name)}) was called by the function that computes {shown(name)}: it would wait for itself, for ever",
        )
    value: Any = None
    data: bytes | Parts | None = None
    loan = Loan(client, partial(_back, name))
    try:
        while True:
            loan = Loan(client, partial(_back, name))
            reply, body = client.ask(
                Claim, name, None if seconds == math.inf else seconds, wait=seconds, into=loan
            )
            if isinstance(reply, TimedOut):
                raise _timed_out(client, name, seconds, reply)
            if isinstance(reply, Value):
                return client.decoded(reply, body)  # type: ignore[no-any-return]
            assert isinstance(reply, Granted)
            if data is None:
                try:
                    _computing.add(me)
                    value = fn()
                    data = client.encoded(value, called=f"once({shown(name)})")
                except Exception as error:
                    if not retry:
                        loan.back_by(
                            Resolve, (name, _account(error), 0, True, False, 0, reply.token)
                        )
                    raise
                finally:
                    _computing.discard(me)
            if _told(client, name, data, loan, reply.token, retry):
                return value  # type: ignore[no-any-return]
            # This process was taken for dead: somebody else computes, or has, or nobody does.
    except BaseException:
        loan.give_back()
        raise


def _back(name: str, reply: AnyReply) -> Back | None:
    """Make the request that lets the next in line compute."""
    return (
        (Resolve, (name, b"", 0, False, True, 0, reply.token))
        if isinstance(reply, Granted)
        else None
    )


def _told(
    client: Client, name: str, data: bytes | Parts, loan: Loan, token: int, retry: bool
) -> bool:
    """Give the value to all; False when the claim was somebody else's by then."""
    try:
        answer, _ = client.ask(Resolve, name, data, 0, False, False, 0, token)
        loan.settle()
        return isinstance(answer, Done)
    except SessionLost as lost:
        loan.settle()
        return lost.outcome == "happened"
    except StoreTimeout:
        loan.give_back_later()  # to wait once more would take as long again
        raise
    except LimitExceeded as error:
        if not retry:
            loan.back_by(Resolve, (name, _account(error), 0, True, False, 0, token))
        raise


def _account(error: Exception) -> bytes:
    """Describe an exception for others: name of its class, message and traceback, from `fn` on.
    `failure` reads it."""
    kind = type(error)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    below = (
        error.__traceback__.tb_next if error.__traceback__ is not None else None
    )  # the first frame is that of `once`
    try:
        message = str(error)
    except Exception as another:
        message = f"(its message cannot be had: str() of it raised {type(another).__name__})"
    try:
        told = "".join(traceback.format_exception(kind, error, below))
    except Exception as another:
        told = f"(its traceback cannot be had: {type(another).__name__} while it was written)"
    account = values.encode(
        (
            name[:200],
            _shortened(message, MESSAGE_CHARACTERS),
            _shortened(told, TRACEBACK_CHARACTERS),
        )
    )
    assert isinstance(account, bytes)
    return account


def _shortened(text: str, most: int) -> str:
    """Return the beginning and, three times as long, the end of a text that is longer. Characters
    that UTF-8 cannot write are written out."""
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) > most:
        head, tail = text[: most // 4], text[-(most - most // 4) :]
        text = f"{head}\n... {len(text) - len(head) - len(tail)} characters left out ...\n{tail}"
    return text


def _timed_out(client: Client, name: str, seconds: float, reply: TimedOut) -> StoreTimeout:
    return StoreTimeout(
        "wait-timeout",
        f"once({shown(name)}) has no value yet after {seconds:g} s: {reply.holder} computes it, since {reply.held_for:.1f} s",
        why=(f"the store is at {client.address}",),
    )
