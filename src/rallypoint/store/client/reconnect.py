"""How a server is reached: by which address, after which pause, and what went wrong since it was
reached last.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

from rallypoint.clock import Clock
from rallypoint.errors import StoreUnreachable
from rallypoint.store.address import Address
from rallypoint.store.client import backoff
from rallypoint.store.client.connect import DialFailed, Failure, Opened, OpenSocket, dial
from rallypoint.store.client.connect_errors import unreachable
from rallypoint.wire.handshake import Joining

ATTEMPT_SECONDS = 3.0
"""For one attempt to connect. The kernel repeats a lost SYN after 1, 3 and 7 s: a new attempt beats
its patience.
"""

LAST_SECONDS = 0.25
"""A first connection is not tried again with less time than this: a round trip round the world. Cut
short, the attempt would look as if packets were dropped, and hide what the others have found."""

LOCAL_SECONDS = 1.0
"""For moving to the server's Unix socket, which answers in a millisecond, unless the server is busy
or it belongs to another host's file system."""

FAILURES = 1000
"""Remembered failures. An error counts them by kind; more than these would not change what it says.
"""

Greet = Callable[[bool], Joining]
"""Makes the client's side of a handshake; whether the session is to be resumed."""


_known: dict[Address, str] = {}
"""By which path this process has reached a server before."""


class Reach:
    """One thread connects at a time, and `Session` sees to that; a signal handler in the middle of
    it may connect as well.
    """

    def __init__(
        self,
        address: Address,
        *,
        same_host: bool,
        patience: float,
        clock: Clock,
        open_socket: OpenSocket | None,
    ) -> None:
        """`same_host`: move to the server's Unix socket when its path exists here and leads to it.
        `patience`: the seconds that a request waits for its answer; no pause is longer than a
        quarter of that, so that every request has its attempts."""
        self.address = address
        self.local_allowed = same_host
        self._due = 0.0  # no attempt before this time
        self._most = patience / 4
        self._clock = clock
        self._open_socket = open_socket
        self._local = ""  # the path by which it was reached
        self._failures: list[Failure] = []
        self._since = 0.0  # when the first of them came
        self._attempts = 0

    def forget(self) -> None:
        """The connection was lost, or made: what went wrong before that is over, and the next
        attempt is due at once.
        """
        self._failures = []
        self._attempts = 0
        self._due = 0.0

    def pause(self, now: float, deadline: float, *, first: bool) -> float:
        """Seconds to wait before the next attempt, not beyond `deadline`; `first`: nothing but the
        attempts themselves waits for it.
        """
        if first and self._failures and deadline - max(now, self._due) < LAST_SECONDS:
            return max(0.001, deadline - now)
        return min(self._due, deadline) - now

    def open(self, greet: Greet, resume: bool, deadline: float) -> Opened:
        """One attempt, which ends at `deadline` or after ATTEMPT_SECONDS. Raises DialFailed, and
        sets when the next one is due.
        """
        now = self._clock.monotonic()
        try:
            opened = self._dial(greet, resume, min(deadline, now + ATTEMPT_SECONDS))
        except DialFailed as failed:
            if not self._failures:
                self._since = now
            self._failures = (self._failures + failed.failures)[-FAILURES:]
            self._due = self._clock.monotonic() + backoff.pause(
                self._attempts, random.random(), self._most
            )
            self._attempts += 1
            raise
        self.forget()
        return opened

    def problem(self, *, look: bool = True) -> StoreUnreachable:
        """What went wrong since `forget`, folded into one error. `look`: also see who has the port,
        if it is this machine's, which takes a moment."""
        now = self._clock.monotonic()
        return unreachable(
            self.address, self._failures, self._since if self._failures else now, now, look=look
        )

    @property
    def failing(self) -> bool:
        """Whether an attempt has failed since `forget`."""
        return bool(self._failures)

    def _dial(self, greet: Greet, resume: bool, deadline: float) -> Opened:
        if self._local:
            try:
                return self._dial_local(self._local, greet, resume, deadline)
            except DialFailed as failed:
                if failed.told.refusal is not None:
                    raise
                self._local = ""
        if not self._local and self.local_allowed and (known := _known.get(self.address)):
            try:
                opened = self._dial_local(known, greet, resume, deadline)
                self._local = known
                return opened
            except DialFailed as failed:
                _known.pop(self.address, None)
                if failed.told.refusal is not None or self._clock.monotonic() >= deadline:
                    raise
        opened = dial(self.address, lambda: greet(resume), deadline, self._clock, self._open_socket)
        path = opened.welcome.local
        if not path or self.address.path or not self.local_allowed or not os.path.exists(path):
            return opened
        try:
            closer = self._dial_local(path, greet, True, deadline)
        except DialFailed as failed:
            if (
                failed.told.reason != "silent"
            ):  # a server that is only busy may be asked again after the next reconnect
                # the path is another's: a container with the same /tmp and another network
                self.local_allowed = False
            return opened
        except BaseException:
            opened.sock.close()
            raise
        opened.sock.close()
        self._local = _known[self.address] = path
        return closer

    def _dial_local(self, path: str, greet: Greet, resume: bool, deadline: float) -> Opened:
        deadline = min(deadline, self._clock.monotonic() + LOCAL_SECONDS)
        return dial(
            Address(path=path), lambda: greet(resume), deadline, self._clock, self._open_socket
        )
