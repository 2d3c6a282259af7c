"""The way to a server: by which address, after which pause, and what went wrong since the last
connection.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence

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

DOUBLINGS = 3
"""Times that the limit of an attempt that has connected is doubled, once for each failure before. A
server that a thousand clients reach at once is late; a connection that is given up and made again
has its handshake done twice, and with TLS that is most of the server's work."""

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
"""Paths by which this process has reached servers before."""


class Reach:
    """Ways to one server. Threads, and a signal handler in the middle of an attempt, may connect at
    the same time.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        same_host: bool,
        patience: float,
        clock: Clock,
        open_socket: OpenSocket | None,
    ) -> None:
        """Begin with nothing known. `addresses`: of one server; others may listen at some of them.
        `same_host`: move to the server's Unix socket when its path
        exists here and leads to it. `patience`: the seconds that a request waits for its answer; no
        pause is longer than a quarter of that, so that every request has its attempts."""
        self._addresses = tuple(addresses)
        self.local_allowed = same_host
        self._most = patience / 4
        self._clock = clock
        self._open_socket = open_socket
        self._mutex = threading.RLock()  # for what follows
        self._due = 0.0  # no attempt before this time
        self._failures: list[Failure] = []
        self._since = 0.0  # when the first of them came
        self._attempts = 0

    def forget(self) -> None:
        """Forget what went wrong before: the connection was lost, or made, and the next attempt is
        due at once.
        """
        with self._mutex:
            self._failures = []
            self._attempts = 0
            self._due = 0.0

    def pause(self, now: float, deadline: float, *, first: bool) -> float:
        """Return the seconds to wait before the next attempt, not beyond `deadline`; `first`:
        nothing but the attempts themselves waits for it.
        """
        with self._mutex:
            if first and self._failures and deadline - max(now, self._due) < LAST_SECONDS:
                return max(0.001, deadline - now)
            return min(self._due, deadline) - now

    def open(self, greet: Greet, resume: bool, deadline: float) -> Opened:
        """Try once, until `deadline` or for ATTEMPT_SECONDS, longer if it has connected. Raises
        DialFailed, and sets when the next attempt is due.
        """
        now = self._clock.monotonic()
        try:
            opened = self._dial(greet, resume, now, deadline)
        except DialFailed as failed:
            with self._mutex:
                if not self._failures:
                    self._since = now
                self._failures = (self._failures + failed.failures)[-FAILURES:]
                pause = backoff.pause(self._attempts, random.random(), self._most)
                self._due = self._clock.monotonic() + pause
                self._attempts += 1
            raise
        self.forget()
        return opened

    def problem(self, *, look: bool = True) -> StoreUnreachable:
        """Make one error of what went wrong since `forget`. `look`: also see who has the port, if
        it is this machine's, which takes a moment."""
        with self._mutex:
            now = self._clock.monotonic()
            failures, since = self._failures, self._since if self._failures else now
        return unreachable(self._addresses, failures, since, now, look=look)

    @property
    def address(self) -> Address:
        """Address at which the server was reached last, or the first one."""
        return self._addresses[0]

    @property
    def failing(self) -> bool:
        """True if an attempt has failed since `forget`."""
        return bool(self._failures)

    def _dial(self, greet: Greet, resume: bool, now: float, deadline: float) -> Opened:
        latest = min(deadline, now + ATTEMPT_SECONDS * 2.0 ** min(self._attempts, DOUBLINGS))
        deadline = min(deadline, now + ATTEMPT_SECONDS)
        if self.local_allowed and (known := _known.get(self.address)):
            try:
                return self._dial_local(known, greet, resume, deadline)
            except DialFailed as failed:
                _known.pop(self.address, None)
                if failed.told.refusal is not None or self._clock.monotonic() >= deadline:
                    raise
        opened = dial(
            self._addresses,
            lambda: greet(resume),
            deadline,
            self._clock,
            self._open_socket,
            connected_until=latest,
        )
        others = [address for address in self._addresses if address != opened.address]
        self._addresses = (opened.address, *others)
        path = opened.welcome.local
        if not path or self.address.path or not self.local_allowed or not os.path.exists(path):
            return opened
        try:
            closer = self._dial_local(path, greet, True, latest)
        except DialFailed as failed:
            # A server that is only busy may be asked again after the next reconnect. Otherwise the
            # path is another's: a container with the same /tmp and another network.
            if failed.told.reason != "silent":
                self.local_allowed = False
            return opened
        except BaseException:
            opened.sock.close()
            raise
        opened.sock.close()
        _known[self.address] = path
        return closer

    def _dial_local(self, path: str, greet: Greet, resume: bool, deadline: float) -> Opened:
        deadline = min(deadline, self._clock.monotonic() + LOCAL_SECONDS)
        return dial(
            [Address(path=path)], lambda: greet(resume), deadline, self._clock, self._open_socket
        )
