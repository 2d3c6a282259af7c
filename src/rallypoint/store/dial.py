"""One attempt to open a conversation: find the addresses, connect, prove; and if not, say which of them failed and how.

All addresses of a name are tried within one deadline, IPv6 and IPv4 by turns. The next one starts `STAGGER` seconds after the one
before, or as soon as that has failed, and the first conversation that opens is taken (RFC 8305, "Happy Eyeballs", without its
memory of past results). The resolver is asked in a thread of its own: getaddrinfo cannot be interrupted, by a signal or a deadline.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from rallypoint.clock import Clock
from rallypoint.host.sockets import listener_of
from rallypoint.store.address import Address
from rallypoint.wire.connection import HandshakeFailed, Joining
from rallypoint.wire.frames import HEADER, HEADER_BYTES, Cutter, FrameError, header
from rallypoint.wire.messages import HELLO_BYTES, Refusal, Welcome

STAGGER = 0.25
"""Seconds after which the next address is tried beside the one that has not answered: RFC 8305's recommendation. Less when there is
not time enough: all are tried in the first half of it."""

Reason = Literal[
    "refused", "unresolved", "unreachable", "foreign", "silent", "closed", "wrong-secret", "version-skew", "wrong-job", "session-lost",
    "store-full", "store-closed",
]  # fmt: skip

TELLING: tuple[Reason, ...] = (
    "session-lost", "wrong-secret", "version-skew", "wrong-job", "store-full", "store-closed", "foreign", "silent", "closed", "refused",
    "unreachable", "unresolved",
)  # fmt: skip
"""Which failure is reported when several addresses failed differently: the one that got furthest first."""

OpenSocket = Callable[[socket.AddressFamily, tuple[object, ...]], socket.socket]


class Failure(NamedTuple):
    """Why one address did not work."""

    reason: Reason
    where: str  # "127.0.0.1:29500", "[::1]:29500", "/run/.../store.sock", or the name that was not resolved
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
    """A conversation that is open. `cutter` may hold what the server sent right behind its Welcome."""

    sock: socket.socket
    cutter: Cutter
    welcome: Welcome
    where: str


def dial(address: Address, greet: Callable[[], Joining], deadline: float, clock: Clock, open_socket: OpenSocket | None = None) -> Opened:
    """Open a conversation before `deadline` (of `clock.monotonic`). `greet` makes the client's side, anew for each connection.

    Raises DialFailed. Everything that was opened and is not returned is closed, also when a signal handler raises.
    """
    open_socket = open_socket or _socket
    failures: list[Failure] = []
    if address.path:
        waiting: list[Found] = [(socket.AF_UNIX, (address.path,))]
    else:
        waiting = _by_turns(_resolve(address.host, address.port, deadline, clock))
    racing: dict[int, _Runner] = {}
    poll = select.poll()
    next_start = clock.monotonic()
    stagger = min(STAGGER, max(0.0, deadline - next_start) / (2 * len(waiting)))
    try:
        while waiting or racing:
            now = clock.monotonic()
            if now >= deadline:
                break
            if waiting and (now >= next_start or not racing):
                family, sockaddr = waiting.pop(0)
                next_start = now + stagger
                try:
                    runner = _Runner(open_socket, family, sockaddr, greet)
                except OSError as error:
                    failures.append(_failure(error, _where(family, sockaddr)))
                else:
                    racing[runner.sock.fileno()] = runner
                    poll.register(runner.sock, runner.events)
                continue
            until = min(deadline, next_start) if waiting else deadline
            for fd, _ in poll.poll(max(0.0, until - now) * 1000):
                runner = racing[fd]
                try:
                    opened = runner.step()
                except _Lost as lost:
                    failures.append(lost.failure)
                    poll.unregister(fd)
                    racing.pop(fd).sock.close()
                    next_start = now
                    continue
                if opened is not None:
                    del racing[fd]
                    return opened
                poll.modify(fd, runner.events)
        failures.extend(runner.too_late() for runner in racing.values())
        if not failures:
            failures.extend(Failure("unreachable", _where(*where), "not tried: the time was up") for where in waiting)
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
        self, open_socket: OpenSocket, family: socket.AddressFamily, sockaddr: tuple[object, ...], greet: Callable[[], Joining]
    ) -> None:
        self.where = _where(family, sockaddr)
        self._joining = greet()
        self._cutter = Cutter(HELLO_BYTES, 0)
        self._out = b""
        self._first = b""  # what was said, as long as that is no frame
        self._connected = False
        self._local = family == socket.AF_UNIX
        self.events = select.POLLOUT
        self.sock = open_socket(family, sockaddr)

    def step(self) -> Opened | None:
        """Go on as far as it goes without waiting. Raises _Lost."""
        try:
            if not self._connected:
                error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, os.strerror(error))
                if self.sock.family != socket.AF_UNIX and self.sock.getsockname() == self.sock.getpeername():
                    # The port is one of those that the kernel gives to clients, and it gave this very one to us: TCP then connects a
                    # socket with itself. One attempt in 28,000, and there are jobs that make as many.
                    raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
                self._connected = True
                self._send(self._joining.start())
            elif self._out:
                self._flush()
            else:
                return self._receive()
        except OSError as error:
            raise _Lost(self._foreign() or _failure(error, self.where, connected=self._connected)) from error
        return None

    def too_late(self) -> Failure:
        """What is known when the deadline has passed."""
        if self._connected:
            return self._foreign() or Failure(
                "silent", self.where, "it accepted the connection and said nothing", listener=listener_of(self.sock)
            )
        return Failure("unreachable", self.where, "no answer at all: packets to it are dropped, or it is off")

    def _foreign(self) -> Failure | None:
        """No more will come: was there something with which no frame begins? A frame of ours may be cut off anywhere by the network."""
        length, body = HEADER.unpack(self._first[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))
        if len(self._first) < HEADER_BYTES and (length > HELLO_BYTES or body):
            return Failure("foreign", self.where, "it does not speak rallypoint's protocol", self._first)
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
            raise _Lost(self._foreign() or Failure("closed", self.where, "it closed the connection without an answer"))
        if len(self._first) < HEADER_BYTES:
            self._first += data
        self._cutter.feed(data)
        try:
            while (frame := self._cutter.next()) is not None:
                answer = self._joining.receive(frame.message)
                if isinstance(answer, Welcome):
                    return Opened(self.sock, self._cutter, answer, self.where)
                self._send(answer)
        except FrameError as error:
            raise _Lost(Failure("foreign", self.where, "it does not speak rallypoint's protocol", error.first)) from error
        except HandshakeFailed as error:
            raise _Lost(Failure(error.reason, self.where, str(error), data if error.reason == "foreign" else b"", error.refusal)) from error
        return None


def _socket(family: socket.AddressFamily, sockaddr: tuple[object, ...]) -> socket.socket:
    """A non-blocking socket that is connecting."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        error = sock.connect_ex(sockaddr if family != socket.AF_UNIX else str(sockaddr[0]))
        if error not in (0, errno.EINPROGRESS):
            raise OSError(error, os.strerror(error))
    except BaseException:
        sock.close()
        raise
    return sock


UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM, errno.ENETDOWN}


def _failure(error: OSError, where: str, *, connected: bool = False) -> Failure:
    if connected:
        return Failure("closed", where, f"it closed the connection without an answer ({error.strerror})")
    if error.errno in (errno.ECONNREFUSED, errno.ENOENT, errno.EAGAIN):
        text = {errno.ENOENT: "there is no such socket", errno.EAGAIN: "its queue of connections is full"}
        return Failure("refused", where, text.get(error.errno, "nothing listens there"))
    return Failure("unreachable" if error.errno in UNREACHABLE else "refused", where, error.strerror or str(error))


def _where(family: socket.AddressFamily, sockaddr: tuple[object, ...]) -> str:
    if family == socket.AF_UNIX:
        return str(sockaddr[0])
    return f"[{sockaddr[0]}]:{sockaddr[1]}" if family == socket.AF_INET6 else f"{sockaddr[0]}:{sockaddr[1]}"


Found = tuple[socket.AddressFamily, tuple[object, ...]]


def _by_turns(found: list[Found]) -> list[Found]:
    """IPv6 and IPv4 by turns, the resolver's first choice first."""
    first = [entry for entry in found if entry[0] == found[0][0]]
    others = [entry for entry in found if entry[0] != found[0][0]]

    def turns() -> Iterator[Found]:
        for index in range(max(len(first), len(others))):
            yield from first[index : index + 1]
            yield from others[index : index + 1]

    return list(turns())


class _Question:
    """A name that the resolver was asked for, in a thread of its own that may outlive whoever asked."""

    def __init__(self, host: str, port: int) -> None:
        self.answered = threading.Event()
        self.found: list[Found] = []
        self.error = ""
        threading.Thread(target=self._ask, args=(host, port), name=f"rallypoint: resolve {host}", daemon=True).start()

    def _ask(self, host: str, port: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's, which they must wake
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self.found = [(entry[0], entry[4]) for entry in entries]
        except (OSError, UnicodeError) as error:
            self.error = str(getattr(error, "strerror", None) or error)
        self.answered.set()


_asked: dict[tuple[int, str, int], _Question] = {}
"""Questions without an answer yet, by process too (a thread is not forked): a hanging resolver is not asked again by every attempt."""


def _resolve(host: str, port: int, deadline: float, clock: Clock) -> list[Found]:
    """Raises DialFailed ("unresolved")."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return [(family, (host, port) if family == socket.AF_INET else (host, port, 0, 0))]
    key = (os.getpid(), host, port)
    question = _asked.setdefault(key, _Question(host, port)) if key not in _asked else _asked[key]
    answered = question.answered.wait(max(0.0, deadline - clock.monotonic()))
    if not answered:
        raise DialFailed([Failure("unresolved", host, "the resolver gave no answer")])
    _asked.pop(key, None)
    if not question.found:
        raise DialFailed([Failure("unresolved", host, question.error or "it has no address")])
    return question.found
