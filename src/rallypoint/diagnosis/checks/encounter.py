"""Two machines check the way between them: one listens, the other calls, and each also lets the other come to a port of its own.

What is said is framed as the store's protocol is (`wire/frames.py`), in JSON, and bounded in bytes and time on both sides: there is no
secret, so whoever comes to the port may talk, and all that he gets is the host's name, its versions, and connections to the very
address that he comes from. The caller asks, and the listener answers:

    Hello, Hello · Ping, Pong (8 times) · Knocking, Knocked (the caller comes to the listener's other port)
    · CallMe, Called (the listener comes to the caller's port) · Bulk, Bulk (there and back) · Bye
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import secrets
import socket
from collections.abc import Iterator
from typing import Annotated, TypeVar

import msgspec

from rallypoint import __version__
from rallypoint.clock import Clock
from rallypoint.diagnosis.checks import peer
from rallypoint.diagnosis.checks.finding import Finding
from rallypoint.diagnosis.checks.peer import Met, Side
from rallypoint.errors import EnvironmentProblem, RallypointError
from rallypoint.host import devices, resolver
from rallypoint.host.interfaces import interfaces
from rallypoint.host.ports import HeldPort, hold_port
from rallypoint.wire.frames import Cutter, FrameError, header

NAME_TIMEOUT = 3.0
"""Seconds for the resolver: a healthy one answers in milliseconds, and one that is asked again after the usual 5 s is a finding."""

CONNECT_TIMEOUT = 5.0
"""Seconds for a connection: TCP repeats a lost packet after 1 s and again after 2 more, so that two may be lost."""

WORD_TIMEOUT = 5.0
"""Seconds for an answer over an open connection, for the same reason; the other side is a process that waits for nothing else."""

CONVERSATION = 40.0
"""Seconds for all of it: each step has its own deadline, and half a dozen of them may be used up."""

THINKING = 15.0
"""Seconds that the caller may take between two of its words: it tries a connection, lets one in, asks its resolver."""

FIRST_WAIT, LINGER = 600.0, 10.0
"""Seconds that the listener waits for the first caller, which a person has yet to start, and after each for another one."""

PINGS = 8
"""The quickest counts: of eight on a busy network one meets no queue."""

BULK_BYTES = 256 * 1024
"""More than the buffers of both sides' first window, so that full packets must come through, and some hundred of them."""

MESSAGE_BYTES = 4096
"""The longest message: a host's name and three versions have some hundred bytes."""

CLOSED = "it closed the connection"

ECHO = b"rallypoint"
"""What whoever is let in hears."""

ADDRESSES = 4
"""Of a name, that are tried: a machine has one or two, of each kind, and each may take CONNECT_TIMEOUT."""

STRANGERS = 20
"""Lines about those who came and were no doctor; more would be somebody who fills the screen."""

PROTOCOL = 1
"""The version of what is said here; other versions are refused."""

_READ_BYTES = 1 << 16


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First of all, from both. The listener's says how it sees the caller."""

    side: Side
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]  # that this side holds for the other to come to
    token: str  # which the other says there
    seen: str = ""  # the caller's address
    protocol: int = PROTOCOL


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Is answered at once."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """`wall`: seconds since 1970 on the listener's clock."""

    wall: float


class Knocking(msgspec.Struct, frozen=True, tag=True):
    """The caller comes to the listener's other port now. In seconds, for the listener's screen: what it has measured."""

    round_trip: float
    ahead: float


class Knocked(msgspec.Struct, frozen=True, tag=True):
    """Whether it came; `problem` is "" when it did."""

    problem: str = ""


class CallMe(msgspec.Struct, frozen=True, tag=True):
    """The listener shall come to the caller's port now."""


class Called(msgspec.Struct, frozen=True, tag=True):
    """What came of that: `problem` "" when it got through."""

    problem: str = ""


class Bulk(msgspec.Struct, frozen=True, tag=True):
    """With BULK_BYTES bytes behind it."""


class Bye(msgspec.Struct, frozen=True, tag=True):
    """The caller has what it came for."""


Message = Hello | Ping | Pong | Knocking | Knocked | CallMe | Called | Bulk | Bye
_decoder = msgspec.json.Decoder(Message)
_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class Broken(Exception):
    """The conversation cannot go on: the text says how it ended. `first`: what a foreign service said."""

    def __init__(self, text: str, first: bytes = b"") -> None:
        super().__init__(text)
        self.first = first


class Line:
    """One connection, whose every word has a deadline, and all of them one together."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._cutter = Cutter(MESSAGE_BYTES, BULK_BYTES)
        self._clock = Clock()

    def say(self, message: Message, body: bytes = b"") -> None:
        """Raises Broken."""
        text = msgspec.json.encode(message)
        self.sock.settimeout(WORD_TIMEOUT)
        try:
            self.sock.sendall(header(len(text), len(body)) + text + body)
        except TimeoutError:
            raise Broken(f"{len(body) or len(text)} bytes could not be sent within {WORD_TIMEOUT:g} s") from None
        except OSError as error:
            raise Broken(_said(error)) from None

    def hear(self, kind: type[_Kind], timeout: float = WORD_TIMEOUT) -> _Kind:
        """The next message, which must be of this kind. Raises Broken."""
        message = self.next(timeout)
        if not isinstance(message, kind):
            raise Broken(f"{type(message).__name__} came instead of {kind.__name__}")
        return message

    def next(self, timeout: float) -> Message:
        """The next message; a body behind it is read and dropped. Raises Broken."""
        until = min(self._clock.elapsed() + timeout, CONVERSATION)
        first = b""
        try:
            while (frame := self._cutter.next()) is None:
                data = self._read(until, first, _READ_BYTES)
                first = first or data
                self._cutter.feed(data)
            missing = frame.missing
            while missing:
                missing -= len(self._read(until, b"", min(missing, _READ_BYTES)))
            message: Message = _decoder.decode(frame.message)
            return message
        except FrameError as error:
            raise Broken("it speaks another protocol", error.first) from None
        except msgspec.MsgspecError:
            raise Broken("it speaks another protocol", first) from None

    def _read(self, until: float, first: bytes, most: int) -> bytes:
        """Some bytes. `first`: what has come of a message that is not whole yet."""
        began = self._clock.elapsed()
        try:
            if began >= until:
                raise TimeoutError
            self.sock.settimeout(until - began)
            data = self.sock.recv(most)
        except TimeoutError:
            raise Broken("no answer came in time", first) from None
        except OSError as error:
            raise Broken(_said(error), first) from None
        if not data:
            raise Broken(CLOSED, first)
        return data


def _said(error: OSError) -> str:
    return CLOSED if error.errno in (errno.EPIPE, errno.ECONNRESET) else os.strerror(error.errno or 0)


def this_side() -> Side:
    """Who this machine is."""
    build = devices.torch_build()
    return Side(socket.gethostname(), __version__, platform.python_version(), build.version if build is not None else "")


# --- the caller ------------------------------------------------------------------------------------------------------


def visit(host: str, port: int, port_range: tuple[int, int] | None = None) -> tuple[Finding, ...]:
    """Check the way to a machine that listens, and back. Takes little more than a minute, whatever happens.

    `port_range`: of the port to which the other comes, both ends included.
    """
    asked = _address(host, port)
    addresses: tuple[str, ...] = (host,)
    if not _is_number(host):
        answer = resolver.ask({host}, timeout=NAME_TIMEOUT)[host]
        if not answer.found:
            return (peer.unresolved(host, answer),)
        addresses = answer.found[:ADDRESSES]
    failures: list[tuple[str, OSError]] = []
    for address in addresses:
        try:
            sock = socket.create_connection((address, port), CONNECT_TIMEOUT)
        except OSError as error:
            failures.append((address, error))
            continue
        with sock:
            try:
                return peer.judge(asked, _call(Line(sock), address, port_range))
            except Broken as broken:
                return (peer.foreign(asked, str(broken), broken.first),)
            except RallypointError as problem:  # no port of our own can be held
                return (peer.trouble(problem),)
    return (peer.unconnected(asked, port, failures),)


def _call(line: Line, address: str, port_range: tuple[int, int] | None) -> Met:
    """Everything over one connection. Raises Broken only before the other side has said who it is."""
    mine = _plain(line.sock.getsockname()[0])
    with hold_port(0, mine, port_range) as held:
        token = secrets.token_hex(8)
        line.say(Hello(this_side(), held.port, token))
        hello = _greeted(line)
        packet = line.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        met = Met(this_side(), hello.side, address, mine, hello.seen, packet=packet, there_port=hello.port, back_port=held.port)
        try:
            met.round_trip, met.ahead = _ping(line)
            line.say(Knocking(met.round_trip, met.ahead))
            met.there = come_to(address, hello.port, hello.token)
            knocked = line.hear(Knocked, CONNECT_TIMEOUT + WORD_TIMEOUT)
            met.there = met.there or knocked.problem
            line.say(CallMe())
            met.back = _let_in(held, token)
            called = line.hear(Called, CONNECT_TIMEOUT + NAME_TIMEOUT + WORD_TIMEOUT)
            met.back = called.problem or met.back
            met.name_here = resolver.ask({hello.side.host}, timeout=NAME_TIMEOUT)[hello.side.host].found
            met.bulk, met.bulk_seconds = _bulk(line)
            if not met.bulk:
                line.say(Bye())
        except Broken as broken:
            met.broken = str(broken)
        met.bulk_bytes = BULK_BYTES
        met.interface = _interface_of(mine) or met.interface
        return met


def _greeted(line: Line) -> Hello:
    """The other's first words. Raises Broken."""
    hello = line.hear(Hello)
    if hello.protocol != PROTOCOL:
        raise Broken(
            f"rallypoint {hello.side.rallypoint} there and {__version__} here do not understand each other: install the same on both"
        )
    return hello


def _ping(line: Line) -> tuple[float, float]:
    """The quickest round trip, and by how much the other's clock is ahead, as NTP reckons: it was read in the middle of it."""
    best, ahead = float("inf"), 0.0
    for _ in range(PINGS):
        clock = Clock()
        line.say(Ping())
        pong = line.hear(Pong)
        took = clock.elapsed()
        if took < best:
            best, ahead = took, pong.wall - (clock.started + took / 2)
    return best, ahead


def _bulk(line: Line) -> tuple[str, float]:
    """Many bytes there and back: why not, and the seconds."""
    clock = Clock()
    try:
        line.say(Bulk(), bytes(BULK_BYTES))
        line.hear(Bulk)
    except Broken as broken:
        return str(broken), 0.0
    return "", clock.elapsed()


# --- the listener ----------------------------------------------------------------------------------------------------


def receive(
    port: int, port_range: tuple[int, int] | None = None, first_wait: float = FIRST_WAIT, linger: float = LINGER
) -> Iterator[Finding]:
    """Let others check the way to here and back; ends `linger` seconds after the last one, or `first_wait` after the start when nobody
    came. Both ports on which it listens are of `port_range`. `EnvironmentProblem` and `UsageError` when the port cannot be had."""
    from rallypoint.host import addresses

    with _held_everywhere(port, port_range) as held:
        host = addresses.look(0.0)
        yield peer.waiting(host.name, [address.ip for _, address in host.reachable()], held.port, first_wait)
        clock, until, strangers, came = Clock(), first_wait, 0, False
        listener = socket.socket(fileno=os.dup(held.fileno()))
        with listener:
            while (left := until - clock.elapsed()) > 0:
                listener.settimeout(left)
                try:
                    sock, where = listener.accept()
                except TimeoutError:
                    break
                except OSError:  # it was gone before we had it
                    continue
                with sock:
                    address = _plain(where[0])
                    try:
                        yield from peer.judge(address, _answer(Line(sock), address, port_range))
                    except Broken as broken:
                        strangers += 1
                        if strangers <= STRANGERS:
                            yield peer.stranger(address, str(broken), broken.first)
                        continue
                    except RallypointError as problem:
                        yield peer.trouble(problem)
                came, until = True, clock.elapsed() + linger
        if not came:
            yield peer.nobody(held.port, first_wait)


def _held_everywhere(port: int, port_range: tuple[int, int] | None) -> HeldPort:
    """On all addresses of this machine, of both kinds where there are both."""
    try:
        return hold_port(port, "::", port_range)
    except EnvironmentProblem as problem:
        if problem.code != "address-unavailable":  # IPv6 is switched off
            raise
    return hold_port(port, "0.0.0.0", port_range)


def _answer(line: Line, address: str, port_range: tuple[int, int] | None) -> Met:
    """The other side of `_call`. Raises Broken only before the caller has said who it is."""
    mine = _plain(line.sock.getsockname()[0])
    hello = _greeted(line)
    with hold_port(0, mine, port_range) as held:
        token = secrets.token_hex(8)
        line.say(Hello(this_side(), held.port, token, address))
        packet = line.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        met = Met(this_side(), hello.side, address, mine, packet=packet, there_port=hello.port, back_port=held.port)
        left: dict[type[Message], int] = {Ping: PINGS, Knocking: 1, CallMe: 1, Bulk: 1}
        try:
            while not isinstance(message := line.next(THINKING), Bye):
                left[type(message)] = left.get(type(message), 0) - 1
                if left[type(message)] < 0:
                    raise Broken(f"{type(message).__name__} came out of turn")
                if isinstance(message, Ping):
                    line.say(Pong(Clock().started))
                elif isinstance(message, Knocking):
                    met.round_trip, met.ahead = message.round_trip, -message.ahead
                    met.back = _let_in(held, token)
                    line.say(Knocked(met.back))
                elif isinstance(message, CallMe):
                    met.there = come_to(address, hello.port, hello.token)
                    met.name_here = resolver.ask({hello.side.host}, timeout=NAME_TIMEOUT)[hello.side.host].found
                    line.say(Called(met.there))
                else:
                    line.say(Bulk(), bytes(BULK_BYTES))
            met.bulk = ""
        except Broken as broken:
            met.broken = str(broken)
            if met.there == "" and met.back == "":  # there was only the bulk left
                met.bulk = met.broken
        met.bulk_bytes = BULK_BYTES
        met.interface = _interface_of(mine) or met.interface
        return met


# --- a connection of its own -----------------------------------------------------------------------------------------


def come_to(address: str, port: int, token: str) -> str:
    """Connect to the port that the other holds, and say its token; why that failed, "" when it did not."""
    try:
        with socket.create_connection((address, port), CONNECT_TIMEOUT) as sock:
            sock.settimeout(WORD_TIMEOUT)
            sock.sendall(token.encode())
            return "" if _all_of(sock, len(ECHO)) == ECHO else "somebody else answers there"
    except TimeoutError:
        return f"no answer within {CONNECT_TIMEOUT:g} s: packets to it are dropped"
    except OSError as error:
        return "nothing listens there" if error.errno == errno.ECONNREFUSED else os.strerror(error.errno or 0)


def _all_of(sock: socket.socket, number: int) -> bytes:
    """So many bytes, fewer when the connection is closed before. (MSG_WAITALL does not hold for a socket with a timeout.)"""
    data = b""
    while len(data) < number and (more := sock.recv(number - len(data))):
        data += more
    return data


def _let_in(held: HeldPort, token: str) -> str:
    """Wait for the other at the port that we hold; why it did not come, "" when it did."""
    clock = Clock()
    with socket.socket(fileno=os.dup(held.fileno())) as listener:
        while (left := CONNECT_TIMEOUT - clock.elapsed()) > 0:
            listener.settimeout(left)
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                break
            except OSError:  # it was gone before we had it
                continue
            with sock:
                try:
                    sock.settimeout(min(left, WORD_TIMEOUT))
                    if _all_of(sock, len(token)) == token.encode():
                        sock.sendall(ECHO)
                        return ""
                except OSError:  # a stranger
                    continue
    return f"it did not come within {CONNECT_TIMEOUT:g} s"


def _interface_of(ip: str) -> str:
    """The interface that has this address of ours, "" when that cannot be known."""
    try:
        return next((one.name for one in interfaces() if any(address.ip == ip for address in one.addresses)), "")
    except OSError:
        return ""


def _plain(address: str) -> str:
    """An IPv4 address as such, also where a socket for both kinds shows it as `::ffff:10.0.0.5`."""
    return address.removeprefix("::ffff:") if "." in address else address


def _is_number(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, host)
            return True
    return False


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
