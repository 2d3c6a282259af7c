"""A check of the way between two machines, both ways: one is the server, the other the client.

A message is a line of JSON; messages are bounded in bytes and time on both sides. There is no
secret: any client may talk, and gets the host's name, its versions, and connections to the address
that it comes from. The client asks, and the server answers:

    Hello, Hello · ping, pong (8 times) · coming, came (the client comes to the server's other port)
    · call me, called (the server comes to the client's port) · bulk, bulk (there and back)
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import secrets
import socket
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from rallypoint import __version__
from rallypoint.clock import Clock
from rallypoint.diagnosis.doctor import peer_findings
from rallypoint.diagnosis.doctor.finding import Finding
from rallypoint.diagnosis.doctor.peer_findings import BULK_BYTES, PeerContact, Side
from rallypoint.errors import EnvironmentProblem, RallypointError
from rallypoint.host import devices, probe, resolver
from rallypoint.host.ports import HeldPort, hold_port

NAME_TIMEOUT = 3.0
"""Seconds for the resolver: a healthy one answers in milliseconds; a repeat after 5 s is a
finding."""

CONNECT_TIMEOUT = 5.0
"""Seconds for a connection: TCP repeats a lost packet after 1 s and after 2 more: two may be
lost."""

ANSWER_TIMEOUT = 5.0
"""Seconds for an answer over an open connection; the other side waits for nothing else."""

CONVERSATION = 40.0
"""Seconds for the whole conversation: each step has its own deadline, and half a dozen may be used
up."""

CLIENT_PAUSE = 15.0
"""Seconds between two messages of the client: it tries a connection, lets one in, asks its
resolver."""

FIRST_WAIT, LINGER = 600.0, 10.0
"""Seconds that the server waits for the first client, which a person has yet to start, and after
each for another one."""

PINGS = 8
"""Number of pings. The quickest counts: of eight on a busy network one meets no queue."""

MESSAGE_BYTES = 4096
"""Longest message: a host's name and three versions have some hundred bytes."""

CLOSED = "it closed the connection"

ADDRESSES = 4
"""Addresses of a name that are tried: a machine has one or two of each kind, and each may take
CONNECT_TIMEOUT."""

STRANGERS = 20
"""Lines about clients that are no doctor; more would fill the screen."""

PROTOCOL = 2
"""Version of these messages; other versions are refused."""


class PeerHello(msgspec.Struct, frozen=True, tag="Hello"):
    """First message of both sides. The server's says how it sees the client."""

    side: Side
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]  # held for the other to come to
    token: str  # which the other says there
    seen: str = ""  # the client's address
    protocol: int = PROTOCOL


Step = Literal["ping", "pong", "coming", "came", "call me", "called", "bulk"]


class PeerStep(msgspec.Struct, frozen=True, tag="Step"):
    """Message after the first ones. Behind "bulk" come BULK_BYTES bytes."""

    name: Step
    problem: str = ""  # of "came" and "called": why the connection did not come about
    wall: float = 0.0  # of "pong": seconds since 1970 on the server's clock
    round_trip: float = 0.0  # of "coming": what the client has measured, in seconds
    ahead: float = 0.0


_decoder = msgspec.json.Decoder(PeerHello | PeerStep)


class Broken(Exception):
    """End of a conversation that cannot go on: the text says how. `first`: what a foreign service
    said."""

    def __init__(self, text: str, first: bytes = b"") -> None:
        super().__init__(text)
        self.first = first


class PeerConversation:
    """One connection. Every message has a deadline, and all of them have one together. All methods
    raise Broken."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._data = b""  # received, and not read yet
        self._clock = Clock()

    def send(self, message: PeerHello | PeerStep) -> None:
        is_bulk = isinstance(message, PeerStep) and message.name == "bulk"
        self.sock.settimeout(ANSWER_TIMEOUT)
        try:
            body = bytes(BULK_BYTES) if is_bulk else b""
            self.sock.sendall(msgspec.json.encode(message) + b"\n" + body)
        except TimeoutError:
            raise Broken(f"it took no more bytes within {ANSWER_TIMEOUT:g} s") from None
        except OSError as error:
            raise Broken(_words_of(error)) from None

    def expect(self, name: Step, timeout: float = ANSWER_TIMEOUT) -> PeerStep:
        """Receive the next message, which must be this step."""
        message = self.receive(timeout)
        if isinstance(message, PeerHello) or message.name != name:
            raise Broken(f"another step came than {name}")
        return message

    def receive(self, timeout: float = ANSWER_TIMEOUT) -> PeerHello | PeerStep:
        """Receive the next message; the bytes behind "bulk" are read and dropped."""
        until = min(self._clock.elapsed() + timeout, CONVERSATION)
        while b"\n" not in self._data and len(self._data) <= MESSAGE_BYTES:
            self._read(until)
        line, _, rest = self._data.partition(b"\n")
        try:
            message: PeerHello | PeerStep = _decoder.decode(line)
        except msgspec.MsgspecError:
            raise Broken("it speaks another protocol", self._data) from None
        self._data = rest
        if isinstance(message, PeerStep) and message.name == "bulk":
            while len(self._data) < BULK_BYTES:
                self._read(until)
            self._data = self._data[BULK_BYTES:]
        return message

    def _read(self, until: float) -> None:
        try:
            self.sock.settimeout(max(1e-6, until - self._clock.elapsed()))
            data = self.sock.recv(1 << 16)
        except TimeoutError:
            raise Broken("no answer came in time", self._data) from None
        except OSError as error:
            raise Broken(_words_of(error), self._data) from None
        if not data:
            raise Broken(CLOSED, self._data)
        self._data += data


def _words_of(error: OSError) -> str:
    return (
        CLOSED if error.errno in (errno.EPIPE, errno.ECONNRESET) else os.strerror(error.errno or 0)
    )


def this_side() -> Side:
    """Describe this machine."""
    build = devices.torch_build()
    torch = build.version if build is not None else ""
    return Side(socket.gethostname(), __version__, platform.python_version(), torch)


def _greeting(conversation: PeerConversation) -> PeerHello:
    """Receive the other's first message."""
    hello = conversation.receive()
    if isinstance(hello, PeerStep):
        raise Broken(f"{hello.name} came before Hello")
    if hello.protocol != PROTOCOL:
        there = hello.side.rallypoint
        raise Broken(
            f"rallypoint {there} there and {__version__} here do not understand each other: install the same on both"
        )
    return hello


def _converse(
    sock: socket.socket, address: str, port_range: tuple[int, int] | None, *, is_client: bool
) -> PeerContact:
    """Say Hello, take the steps of one side, and return what was seen. Raises Broken only before
    the other side has said Hello."""
    conversation = PeerConversation(sock)
    mine = _plain(sock.getsockname()[0])
    hello = None if is_client else _greeting(conversation)
    with hold_port(0, mine, port_range) as held:
        token = secrets.token_hex(8)
        conversation.send(PeerHello(this_side(), held.port, token, address if hello else ""))
        hello = hello or _greeting(conversation)
        met = PeerContact(
            this_side(),
            hello.side,
            address,
            mine,
            hello.seen,
            packet=sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG),
            there_port=hello.port,
            back_port=held.port,
        )
        try:
            (_ask if is_client else _answer)(conversation, met, hello, held, token)
        except Broken as broken:
            met.broken = str(broken)
            if (
                met.there == met.back == "" and met.name_here is not None
            ):  # only the bulk is missing
                met.bulk = met.broken
        return met


# --- client
# ------------------------------------------------------------------------------------------


def run_client(host: str, port: int, port_range: tuple[int, int] | None = None) -> list[Finding]:
    """Check the way to a machine that listens, and back. Takes little more than a minute, whatever
    happens.

    `port_range`: of the port to which the other comes, both ends included.
    """
    asked = peer_findings.joined(host, port)
    addresses: tuple[str, ...] = (host,)
    if not probe.numeric(host, port):
        answer = resolver.ask({host}, timeout=NAME_TIMEOUT)[host]
        if not answer.found:
            return [peer_findings.unresolved(host, answer)]
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
                met = _converse(sock, address, port_range, is_client=True)
                return peer_findings.judge_peer(asked, met)
            except Broken as broken:
                return [peer_findings.no_doctor(asked, str(broken), broken.first)]
            except RallypointError as problem:  # no port of our own can be held
                return [peer_findings.refused(problem)]
    return [peer_findings.unconnected(asked, port, failures)]


def _ask(
    conversation: PeerConversation, met: PeerContact, hello: PeerHello, held: HeldPort, token: str
) -> None:
    met.round_trip, met.ahead = _ping(conversation)
    conversation.send(PeerStep("coming", round_trip=met.round_trip, ahead=met.ahead))
    met.there = come_to(met.address, hello.port, hello.token)
    came = conversation.expect("came", CONNECT_TIMEOUT + ANSWER_TIMEOUT)
    met.there = met.there or came.problem
    conversation.send(PeerStep("call me"))
    met.back = _let_in(held, token)
    called = conversation.expect("called", CONNECT_TIMEOUT + NAME_TIMEOUT + ANSWER_TIMEOUT)
    met.back = called.problem or met.back
    met.name_here = _addresses_of(hello.side.host)
    clock = Clock()
    conversation.send(PeerStep("bulk"))
    conversation.expect("bulk")
    met.bulk, met.bulk_seconds = "", clock.elapsed()


def _ping(conversation: PeerConversation) -> tuple[float, float]:
    """Measure the quickest round trip, and by how much the other's clock, read in the middle of it,
    is ahead (as NTP does)."""
    found = []
    for _ in range(PINGS):
        clock = Clock()
        conversation.send(PeerStep("ping"))
        pong = conversation.expect("pong")
        took = clock.elapsed()
        found.append((took, pong.wall - (clock.started + took / 2)))
    return min(found)


# --- server
# ------------------------------------------------------------------------------------------


def run_server(
    port: int,
    port_range: tuple[int, int] | None = None,
    first_wait: float = FIRST_WAIT,
    linger: float = LINGER,
) -> Iterator[Finding]:
    """Let others check the way to here and back.

    Ends `linger` seconds after the last client, or `first_wait` after the start when none came.
    Both ports on which it listens are of `port_range`. `EnvironmentProblem` and `UsageError` when
    the port cannot be had.
    """
    from rallypoint.host import addresses

    with (
        _hold_everywhere(port, port_range) as held,
        socket.socket(fileno=os.dup(held.fileno())) as listener,
    ):
        host = addresses.look(0.0)
        own = [address.ip for _, address in host.reachable()]
        yield peer_findings.waiting(host.name, own, held.port, first_wait)
        clock, until, strangers, came = Clock(), first_wait, 0, False
        while accepted := _accept(listener, until - clock.elapsed()):
            sock, address = accepted
            with sock:
                try:
                    met = _converse(sock, address, port_range, is_client=False)
                    yield from peer_findings.judge_peer(address, met)
                except Broken as broken:
                    strangers += 1
                    if strangers <= STRANGERS:
                        yield peer_findings.stranger(address, str(broken), broken.first)
                    continue
                except RallypointError as problem:
                    yield peer_findings.refused(problem)
            came, until = True, clock.elapsed() + linger
        if not came:
            yield peer_findings.nobody(held.port, first_wait)


def _hold_everywhere(port: int, port_range: tuple[int, int] | None) -> HeldPort:
    """Hold a port on all addresses of this machine, of both kinds where there are both."""
    try:
        return hold_port(port, "::", port_range)
    except EnvironmentProblem as problem:
        if problem.code != "address-unavailable":  # IPv6 is switched off
            raise
    return hold_port(port, "0.0.0.0", port_range)


def _answer(
    conversation: PeerConversation, met: PeerContact, hello: PeerHello, held: HeldPort, token: str
) -> None:
    for _ in range(PINGS):
        conversation.expect("ping", CLIENT_PAUSE)
        conversation.send(PeerStep("pong", wall=Clock().started))
    coming = conversation.expect("coming", CLIENT_PAUSE)
    met.round_trip, met.ahead = coming.round_trip, -coming.ahead
    met.back = _let_in(held, token)
    conversation.send(PeerStep("came", met.back))
    conversation.expect("call me", CLIENT_PAUSE)
    met.there = come_to(met.address, hello.port, hello.token)
    met.name_here = _addresses_of(hello.side.host)
    conversation.send(PeerStep("called", met.there))
    conversation.expect("bulk", CLIENT_PAUSE)
    conversation.send(PeerStep("bulk"))
    met.bulk = ""


# --- connection to the held port
# ---------------------------------------------------------------------


def come_to(address: str, port: int, token: str) -> str:
    """Connect to the port that the other holds, and say its token. Return why that failed, "" when
    it did not. The other tells whether the token came."""
    try:
        with socket.create_connection((address, port), CONNECT_TIMEOUT) as sock:
            sock.sendall(token.encode())
        return ""
    except TimeoutError:
        return f"no answer within {CONNECT_TIMEOUT:g} s: packets to it are dropped"
    except ConnectionRefusedError:
        return "nothing listens there"
    except OSError as error:
        return os.strerror(error.errno or 0)


def _let_in(held: HeldPort, token: str) -> str:
    """Wait for the other at the port that is held here. Return why it did not come, "" when it
    did."""
    clock = Clock()
    with socket.socket(fileno=os.dup(held.fileno())) as listener:
        while accepted := _accept(listener, CONNECT_TIMEOUT - clock.elapsed()):
            with accepted[0] as sock, contextlib.suppress(OSError):  # a stranger
                sock.settimeout(max(1e-6, CONNECT_TIMEOUT - clock.elapsed()))
                with sock.makefile("rb") as file:
                    if file.read(len(token)) == token.encode():
                        return ""
    return f"it did not come within {CONNECT_TIMEOUT:g} s"


def _accept(listener: socket.socket, timeout: float) -> tuple[socket.socket, str] | None:
    """Accept a connection and tell the other's address; None when none came in time."""
    clock = Clock()
    while (left := timeout - clock.elapsed()) > 0:
        listener.settimeout(left)
        try:
            sock, where = listener.accept()
            return sock, _plain(where[0])
        except TimeoutError:
            break
        except OSError:  # it was gone before it was accepted
            continue
    return None


def _addresses_of(name: str) -> tuple[str, ...]:
    return resolver.ask({name}, timeout=NAME_TIMEOUT)[name].found


def _plain(address: str) -> str:
    """Return an IPv4 address as such, also where a socket for both kinds shows it as
    `::ffff:10.0.0.5`."""
    return address.removeprefix("::ffff:") if "." in address else address
