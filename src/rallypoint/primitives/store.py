"""The store that users hold: its client, and what is built on that.

Each method is a door to the file that has the thing; nothing is decided here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from rallypoint.errors import RallypointError
from rallypoint.primitives.barrier import (
    barrier,
)  # here: to look it up at every call costs as much as the rest of it, where it is cold
from rallypoint.store.client.client import Client, resolve

if TYPE_CHECKING:
    from rallypoint.primitives.lock import Lock
    from rallypoint.primitives.queue import Queue

T = TypeVar("T")


class Store(Client):
    """A coordination store, made by `rallypoint.connect`.

    Works from any thread, in a forked child (which gets a session of its own), and as an argument
    of `multiprocessing.Process`. Every method may raise `StoreTimeout`, `SessionLost`,
    `StoreClosed`, `StoreUnreachable` (all three latter are ConnectionErrors) and `LimitExceeded`;
    what a call leaves behind after each is in `docs/reference/store.md`. `timeout` of the store
    bounds every answer that waits for nobody; a large value may take longer for as long as its
    bytes move.
    """

    def close(self) -> None:
        """End the session: what it holds is released at once. Threads that wait here get
        StoreClosed. May be called again.
        """
        super().close()
        segments = sys.modules.get("rallypoint.primitives.average.segments")
        if segments is not None:  # it has averaged
            segments.forget(self)

    def lock(
        self, name: str, *, ttl: float | timedelta = 10.0, timeout: float | timedelta | None = None
    ) -> Lock:
        """Make a lock that all clients of the store share under this name: first come, first
        served, leased, fenced. See `Lock`.

        `ttl`: seconds without a sign of life from this process after which it is passed on.
        `timeout`: seconds to wait for it; None: for as long as the server lives.
        """
        from rallypoint.primitives.lock import Lock

        return Lock(self, name, ttl=ttl, timeout=timeout)

    # not through a method of this class: where 64 processes wake up on two processors, a call less
    # is measured
    barrier = barrier

    def queue(self, name: str) -> Queue:
        """Make a queue that all clients of the store share under this name. See `Queue`."""
        from rallypoint.primitives.queue import Queue

        return Queue(self, name)

    def once(
        self,
        name: str,
        fn: Callable[[], T],
        *,
        timeout: float | timedelta | None = None,
        retry: bool = False,
    ) -> T:
        """Return the value of `fn()`, called in one process of all that ask under this name; the
        others wait for its value. See `primitives/once.py` for what becomes of exceptions."""
        from rallypoint.primitives.once import once

        return once(self, name, fn, timeout=timeout, retry=retry)

    def average(
        self,
        name: str,
        value: Any,
        size: int,
        *,
        weight: float = 1.0,
        quorum: int | None = None,
        timeout: float | timedelta | None = 30.0,
        out: Any = None,
        details: bool = False,
    ) -> Any:
        """Return the mean of a tensor, or of a dict of tensors, over `size` callers. See
        `primitives/average/average.py`."""
        from rallypoint.primitives.average.average import average

        return average(
            self,
            name,
            value,
            size,
            weight=weight,
            quorum=quorum,
            timeout=timeout,
            out=out,
            details=details,
        )


for _name, _method in vars(Client).items():
    if not _name.startswith("_") and callable(_method):
        # Python's own errors name the class that users know: "Store.update() missing 1 ..."
        _method.__qualname__ = f"Store.{_name}"


def connect(
    address: str | None = None,
    *,
    secret: bytes | str | None = None,
    secret_file: str | os.PathLike[str] | None = None,
    job: str = "",
    timeout: float | timedelta = 10.0,
    ttl: float | timedelta = 10.0,
    allow_pickle: bool = False,
    strict: bool = False,
    same_host: bool = True,
) -> Store:
    """Connect to a store. Without an address: to the job's own, or to the one that RALLYPOINT_STORE
    and RALLYPOINT_SECRET_FILE name.

    `timeout`: seconds, a number or a timedelta, and not None: it has an end. Within it a connection
    must come about (it is tried again while nobody listens there or the name does not resolve,
    since the server may be starting), and the server must answer whatever waits for nobody. `ttl`:
    seconds without a sign of life from this process after which the server ends its session and
    releases what it holds. 10 s is soon enough for those that wait for a lock of a dead process,
    and longer than a process is usually kept from running. A thread gives the sign of life: code
    that holds the GIL for longer loses the session (`SessionLost`); give such a process a longer
    `ttl`. `allow_pickle`: also take and return values that have to be pickled. Only with a store
    whose every client you would let run code here. `strict`: a lost update is an error, not a
    warning. `same_host=False`: stay on this address and use no shared memory.

    Raises StoreUnreachable (see there for its codes), UsageError (`no-store`, `address-malformed`,
    `secret-missing`, `secret-too-short`), EnvironmentProblem (`secret-unreadable`).
    """
    try:
        return Store(
            *resolve(
                address,
                secret=secret,
                secret_file=secret_file,
                job=job,
                timeout=timeout,
                ttl=ttl,
                allow_pickle=allow_pickle,
                strict=strict,
                same_host=same_host,
            )
        )
    except RallypointError as error:
        raise error from None  # one error, which says it all
