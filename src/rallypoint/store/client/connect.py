"""One attempt to open a conversation: find the addresses, connect, prove; and if not, say which of
them failed and how.

All addresses of a name are tried within one deadline, IPv6 and IPv4 by turns. The next one starts
`STAGGER` seconds after the one before, or as soon as that has failed, and the first conversation
that opens is taken (RFC 8305, "Happy Eyeballs", without its memory of past results). The resolver
is asked in a thread of its own: getaddrinfo cannot be interrupted, by a signal or a deadline.
"""

from __future__ import annotations

import functools
import math
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from rallypoint.clock import Clock
from rallypoint.host import probe, socket_addresses, threads
from rallypoint.host.socket_addresses import Place
from rallypoint.host.unix_sockets import listener_of, uid_of, way_of
from rallypoint.store.address import Address, is_forwarded
from rallypoint.store.client.failures import of_a_handler
from rallypoint.store.tls_socket import binding_of
from rallypoint.wire.frames import HEADER, HEADER_BYTES, Cutter, FrameError, header
from rallypoint.wire.handshake import HandshakeFailed, Joining
from rallypoint.wire.messages import HELLO_BYTES, Refusal, Welcome

STAGGER = 0.25
"""Seconds after which the next address is tried beside the one that has not answered: RFC 8305's
recommendation. Less when there is not time enough: all are tried in the first half of it. And for
the resolver to say anew what is known from its last answer."""

AGAIN = 3
"""Times that every address is tried once more while none has connected: TCP repeats a lost SYN only
after a second."""

Reason = Literal[
    "refused", "unresolved", "unreachable", "foreign", "silent", "closed", "wrong-secret", "version-skew", "wrong-job", "store-relayed",
    "tls-mismatch", "tls-intercepted", "session-lost", "store-full", "store-closed",
]  # fmt: skip

TELLING: tuple[Reason, ...] = (
    "session-lost", "tls-intercepted", "wrong-secret", "version-skew", "wrong-job", "store-relayed", "tls-mismatch", "store-full",
    "store-closed", "foreign", "silent", "closed", "refused", "unreachable", "unresolved",
)  # fmt: skip
"""Order in which failures are reported when several addresses failed differently: the one that got
furthest first."""

OpenSocket = Callable[[socket.AddressFamily, tuple[object, ...]], socket.socket]


class Failure(NamedTuple):
    """Reason why one address did not work."""

    reason: Reason
    # "127.0.0.1:29500", "[::1]:29500", "/run/.../store.sock", or the name that was not resolved
    where: str
    text: str  # "Connection refused", "no answer within 3.0 s", ...
    first: bytes = b""  # what a foreign service said first
    refusal: Refusal | None = None
    listener: int = 0  # pid of who listens there, when it can be seen


class DialFailed(Exception):
    """No address worked. `failures` is never empty; `told` is the most telling of them."""

    def __init__(self, failures: list[Failure]) -> None:
        self.failures = failures
        self.told = min(failures, key=lambda failure: TELLING.index(failure.reason))
        super().__init__("; ".join(f"{failure.where}: {failure.text}" for failure in failures))


class Opened(NamedTuple):
    """A conversation that is open. `cutter` may hold what the server sent right behind its
    Welcome.
    """

    sock: socket.socket
    cutter: Cutter
    welcome: Welcome
    where: str
    address: Address  # of those that were to be tried


def dial(
    addresses: Sequence[Address],
    greet: Callable[[], Joining],
    deadline: float,
    clock: Clock,
    open_socket: OpenSocket | None = None,
    *,
    connected_until: float = 0.0,
) -> Opened:
    """Open a conversation before `deadline` (of `clock.monotonic`) at one of the addresses, or
    before `connected_until` where a connection has been made. `greet` makes the client's side, anew
    for each connection.

    Raises DialFailed. Everything that was opened and is not returned is closed, also when a signal
    handler raises: by Python, where that happens between the making of a socket and its name.
    """
    open_socket = open_socket or probe.connecting
    places, failures = _places(addresses, deadline, clock)
    waiting, again = list(places), AGAIN
    racing: dict[int, _Runner] = {}
    poll = select.poll()
    next_start = clock.monotonic()
    stagger = min(STAGGER, max(0.0, deadline - next_start) / (2 * len(waiting)))
    try:
        while waiting or racing:
            now = clock.monotonic()
            connected = any(runner.connected for runner in racing.values())
            end = max(deadline, connected_until) if connected else deadline
            if now >= end:
                break
            if waiting and (now >= next_start or not racing):
                address, (family, sockaddr) = waiting.pop(0)
                next_start = now + stagger
                try:
                    runner = _Runner(open_socket, family, sockaddr, greet, address)
                except OSError as error:
                    if of_a_handler(error):
                        raise
                    failures.append(_failure(error, socket_addresses.described(family, sockaddr)))
                else:
                    racing[runner.sock.fileno()] = runner
                    poll.register(runner.sock, runner.events)
                continue
            lost_syn = again > 0 and not connected
            if lost_syn and now >= next_start:
                again -= 1
                waiting = list(places)
                continue
            until = min(end, next_start) if waiting or lost_syn else end
            for fd, _ in poll.poll(max(0.0, until - now) * 1000):
                runner = racing[fd]
                try:
                    opened = runner.step()
                except _Lost as lost:
                    failures.append(lost.failure)
                    poll.unregister(fd)
                    racing.pop(fd).sock.close()
                    if waiting:
                        next_start = now
                    continue
                if opened is not None:
                    del racing[fd]
                    return opened
                poll.modify(fd, runner.events)
        late = {
            runner.where: runner
            for runner in sorted(racing.values(), key=lambda one: one.connected)
        }
        failures.extend(runner.too_late() for runner in late.values())
        if not failures:
            failures.extend(
                Failure(
                    "unreachable", socket_addresses.described(*where), "not tried: the time was up"
                )
                for _, where in waiting
            )
    finally:
        for runner in racing.values():
            runner.sock.close()
    raise DialFailed(failures)


class _Lost(Exception):
    def __init__(self, failure: Failure) -> None:
        self.failure = failure


class _Runner:
    """One address on its way: connecting → greeting → open."""

    def __init__(
        self,
        open_socket: OpenSocket,
        family: socket.AddressFamily,
        sockaddr: tuple[object, ...],
        greet: Callable[[], Joining],
        address: Address,
    ) -> None:
        self.where = socket_addresses.described(family, sockaddr)
        self._address = address
        self._joining = greet()
        self._cutter = Cutter(HELLO_BYTES, 0)
        self._out = b""
        self._first = b""  # what was said, as long as that is no frame
        self.connected = False
        self._forwarded = is_forwarded(address) or (
            family != socket.AF_UNIX
            and is_forwarded(Address(str(sockaddr[0]), int(str(sockaddr[1])), tls=address.tls))
        )
        self.events = select.POLLOUT
        self.sock = open_socket(family, sockaddr)

    def step(self) -> Opened | None:
        """Go on as far as it goes without waiting. Raises _Lost."""
        try:
            if not self.connected:
                probe.arrived(self.sock)
                self.connected = True
                if self._address.tls and self.sock.family != socket.AF_UNIX:
                    # here: OpenSSL is slow to load
                    from rallypoint.store.client.encrypted_socket import EncryptedSocket

                    self.sock = EncryptedSocket(self.sock)
                self._send(self._joining.start(self._way()))
            elif self._out:
                self._flush()
            else:
                return self._receive()
        except OSError as error:
            if of_a_handler(error):
                raise
            raise _Lost(
                self._foreign() or _failure(error, self.where, connected=self.connected)
            ) from error
        return None

    def _way(self) -> str:
        """Return what this connection leads to, for the server to compare. Raises _Lost for a Unix
        socket of another user: the server of a store would not have us there, so it is somebody
        that waits at a path that a store has, or had."""
        family = self.sock.family
        if family == socket.AF_UNIX and (uid := uid_of(self.sock)) != os.geteuid():
            raise _Lost(Failure("foreign", self.where, f"the socket is another user's (uid {uid})"))
        way = way_of(family, self.sock.getpeername())
        return way.partition(" ")[0] if self._forwarded else way

    def too_late(self) -> Failure:
        """Return what is known when the deadline has passed."""
        if self.connected:
            return self._foreign() or Failure(
                "silent",
                self.where,
                "it accepted the connection and said nothing",
                listener=listener_of(self.sock),
            )
        if error := self.sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_ERROR
        ):  # it came while this process had no turn
            return _failure(OSError(error, os.strerror(error)), self.where)
        return Failure(
            "unreachable", self.where, "no answer at all: packets to it are dropped, or it is off"
        )

    def _foreign(self) -> Failure | None:
        """Return a failure if there was, when no more will come, something with which no frame
        begins? A frame of ours may be cut off anywhere by the network."""
        length, body = HEADER.unpack(self._first[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))
        if len(self._first) < HEADER_BYTES and (length > HELLO_BYTES or body):
            return Failure(
                "foreign", self.where, "it does not speak rallypoint's protocol", self._first
            )
        return None

    def _send(self, message: bytes) -> None:
        self._out = header(len(message)) + message
        self._flush()

    def _flush(self) -> None:
        try:
            sent = self.sock.send(self._out, socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError):
            self._receive()  # it has closed the connection, and may have said why
            raise
        self._out = self._out[sent:]
        self.events = select.POLLOUT if self._out else select.POLLIN

    def _receive(self) -> Opened | None:
        try:
            data = self.sock.recv(HELLO_BYTES)
        except BlockingIOError:
            return None
        if not data:
            raise _Lost(
                self._foreign()
                or Failure("closed", self.where, "it closed the connection without an answer")
            )
        if len(self._first) < HEADER_BYTES:
            self._first += data
        self._cutter.data += data
        try:
            while (frame := self._cutter.next()) is not None:
                answer = self._joining.receive(frame[0], binding_of(self.sock))
                if isinstance(answer, Welcome):
                    return Opened(self.sock, self._cutter, answer, self.where, self._address)
                self._send(answer)
        except FrameError as error:
            raise _Lost(
                Failure(
                    "foreign", self.where, "it does not speak rallypoint's protocol", error.first
                )
            ) from error
        except HandshakeFailed as error:
            raise _Lost(
                Failure(
                    error.reason,
                    self.where,
                    str(error),
                    data if error.reason == "foreign" else b"",
                    error.refusal,
                )
            ) from error
        return None


def _failure(error: OSError, where: str, *, connected: bool = False) -> Failure:
    if connected:
        return Failure(
            "closed", where, f"it closed the connection without an answer ({error.strerror})"
        )
    reason, text = probe.told(error)
    return Failure(reason, where, text)


class _Question:
    """A name that the resolver was asked for, in a thread of its own that may outlive whoever
    asked.
    """

    def __init__(self, host: str, port: int) -> None:
        self.answered = threading.Event()
        self.found: list[Place] = []
        self.error = ""
        threads.start(functools.partial(self._ask, host, port), f"resolve {host}")

    def _ask(self, host: str, port: int) -> None:
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self.found = [(entry[0], entry[4]) for entry in entries]
        except (OSError, UnicodeError) as error:
            self.error = str(getattr(error, "strerror", None) or error)
        self.answered.set()


_asked: dict[tuple[int, str, int], _Question] = {}
"""Questions without an answer yet, by process too (a thread is not forked): a hanging resolver is
not asked again by every attempt.
"""


_known: dict[tuple[int, str, int], list[Place]] = {}
"""Addresses that the resolver has named at last. Where a name server is off, or knows nothing for a
while, a session of 2 s must not depend on it at each of its connections."""


def _places(
    addresses: Sequence[Address], deadline: float, clock: Clock
) -> tuple[list[tuple[Address, Place]], list[Failure]]:
    """Return where a server at these addresses may listen, and the names that have no address.
    Raises DialFailed when nothing is left."""
    places: list[tuple[Address, Place]] = []
    failures: list[Failure] = []
    if len({address.host for address in addresses}) > 1:  # leave time for the others
        deadline = (clock.monotonic() + deadline) / 2
    for address in addresses:
        if address.path:
            places.append((address, (socket.AF_UNIX, (address.path,))))
        elif all(failure.where != address.host for failure in failures):
            try:
                found = socket_addresses.by_turns(
                    _resolve(address.host, address.port, deadline, clock)
                )
            except DialFailed as failed:
                failures += failed.failures
            else:
                places += [(address, place) for place in found]
    if not places:
        raise DialFailed(failures)
    return places, failures


def _resolve(host: str, port: int, deadline: float, clock: Clock) -> list[Place]:
    """Return the addresses of a name. Raises DialFailed ("unresolved")."""
    if place := socket_addresses.numeric(host, port):
        return place
    key = (os.getpid(), host, port)
    question = _asked.get(key) or _asked.setdefault(key, _Question(host, port))
    found = _known.get(key, [])
    wait = STAGGER if found else math.inf
    said = "the resolver gave no answer"
    if question.answered.wait(max(0.0, min(wait, deadline - clock.monotonic()))):
        _asked.pop(key, None)
        _known[key] = found = question.found or found
        said = question.error or "it has no address"
    if not found:
        raise DialFailed([Failure("unresolved", host, said)])
    return found
