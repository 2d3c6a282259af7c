"""Check of the way between two machines, both ways: one serves a store, the other is its client.

Whatever one says to the other goes through that store, which lets nobody in without the secret that
both have. A caller puts its Hello into the queue `calls`, and the listener takes one after the
other. All else is a key, which begins with a name that the caller chose and ends with the side that
wrote it: hello, clock (the listener's, between two readings of the caller's), dialled (why the
other's second port was not reached), came (who came to the own one), and what the caller measured.
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from rallypoint import __version__
from rallypoint.clock import Clock
from rallypoint.diagnosis.doctor import peer_findings
from rallypoint.diagnosis.doctor.finding import Finding
from rallypoint.diagnosis.doctor.peer_findings import BULK_BYTES, PeerContact, Side
from rallypoint.errors import (
    EnvironmentProblem,
    QueueEmpty,
    RallypointError,
    StoreClosed,
    StoreTimeout,
)
from rallypoint.host import addresses, devices, resolver
from rallypoint.host.ports import HeldPort, hold_port
from rallypoint.host.socket_addresses import address_of
from rallypoint.primitives.queue import Queue
from rallypoint.store.client.member import Member
from rallypoint.store.discovery import derived
from rallypoint.store.logger import logger
from rallypoint.store.server.server import Server

NAME_TIMEOUT = 3.0
"""Seconds for the resolver: a healthy one answers in milliseconds; a repeat after 5 s is a
finding."""

CONNECT_TIMEOUT = 5.0
"""Seconds for a connection to the second port: TCP repeats a lost packet after 1 s and after 2
more: two may be lost."""

JOIN_TIMEOUT = 1.9
"""Seconds to get into the store, and for each answer of it: one packet may be lost. After 2 s its
client would say on stderr that it is still trying."""

ANSWER_TIMEOUT = 5.0
"""Seconds for what the other side says when it waits for nothing else."""

NOBODY = f"it did not come within {CONNECT_TIMEOUT:g} s"

TURN = 40.0
"""Seconds that a caller waits for its turn: half a dozen timeouts of the one before it."""

FIRST_WAIT, LINGER = 600.0, 10.0
"""Seconds that the listener waits for the first caller, which a person has yet to start, and after
each for another one."""

PINGS = 8
"""Number of round trips. The quickest counts: of eight on a busy network one meets no queue."""

JOB = "doctor 1"
"""Job that the store belongs to. The number is that of the keys and values: a doctor with another
one is refused as `wrong-job`."""

_CALLS = "calls"

_T = TypeVar("_T")


class PeerHello(msgspec.Struct, frozen=True):
    """First words of both sides."""

    name: str  # of the conversation
    side: Side
    mine: str  # the address of the side that says it
    other: str  # that of the other side, as this one knows it
    port: int  # held for the other to come to


class _PeerTalk:
    """Conversation of a caller with the listener by keys of the store. All methods raise
    StoreTimeout and ConnectionError."""

    def __init__(self, member: Member, name: str, mine: str, other: str) -> None:
        self.member = member
        self.name = name
        self._mine, self._other = mine, other

    def say(self, topic: str, value: object) -> None:
        self.member.set(f"{self.name}/{topic}/{self._mine}", msgspec.msgpack.encode(value))

    def hear(self, topic: str, kind: type[_T], timeout: float = ANSWER_TIMEOUT) -> _T:
        """Wait for what the other side says of this topic."""
        said = self.member.wait(f"{self.name}/{topic}/{self._other}", timeout)
        return msgspec.msgpack.decode(said, type=kind)


# --- both sides
# ---------------------------------------------------------------------------------------


def this_side() -> Side:
    """Describe this machine."""
    build = devices.torch_build()
    torch = build.version if build is not None else ""
    return Side(socket.gethostname(), __version__, platform.python_version(), torch)


def _hold_everywhere(port: int, port_range: tuple[int, int] | None) -> HeldPort:
    """Hold a port on all addresses of this machine, of both kinds where there are both."""
    try:
        return hold_port(port, "::", port_range)
    except EnvironmentProblem as problem:
        if problem.code != "address-unavailable":  # IPv6 is switched off
            raise
    return hold_port(port, "0.0.0.0", port_range)


def _come_to_each_other(talk: _PeerTalk, met: PeerContact, held: HeldPort) -> None:
    """Connect to the second port of the other, and let it connect to ours, as ranks do."""
    problem, met.packet = come_to(met.address, met.there_port)
    met.name_here = resolver.ask({met.other.host}, timeout=NAME_TIMEOUT)[met.other.host].found
    talk.say("dialled", problem)
    met.back = talk.hear("dialled", str, CONNECT_TIMEOUT + NAME_TIMEOUT + ANSWER_TIMEOUT)
    came = "" if met.back else _came(held)
    talk.say("came", came)
    met.seen = talk.hear("came", str, CONNECT_TIMEOUT + ANSWER_TIMEOUT)
    met.back = met.back or ("" if came else NOBODY)
    met.there = problem or ("" if met.seen else NOBODY)


def come_to(address: str, port: int) -> tuple[str, int]:
    """Connect to a port. Return why that failed, "" when it did not, and how many bytes a packet
    may have. The other tells whether it was its port."""
    try:
        with socket.create_connection((address, port), CONNECT_TIMEOUT) as sock:
            return "", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    except TimeoutError:
        return f"no answer within {CONNECT_TIMEOUT:g} s: packets to it are dropped", 0
    except ConnectionRefusedError:
        return "nothing listens there", 0
    except OSError as error:
        return os.strerror(error.errno or 0), 0


def _came(held: HeldPort) -> str:
    """Return the address from which the other has connected to the port that is held here; "" when
    it has not."""
    with socket.socket(fileno=os.dup(held.fileno())) as listener:
        listener.settimeout(CONNECT_TIMEOUT)
        try:
            sock, where = listener.accept()
        except OSError:
            return ""
        sock.close()
        return _plain(where[0])


def _plain(address: str) -> str:
    """Return an IPv4 address as such, also where a socket for both kinds shows it as
    `::ffff:10.0.0.5`."""
    return address.removeprefix("::ffff:") if "." in address else address


# --- caller
# -------------------------------------------------------------------------------------------


def run_client(
    host: str, port: int, secret: bytes, port_range: tuple[int, int] | None = None
) -> list[Finding]:
    """Check the way to a machine that listens, and back. Takes little more than a minute, whatever
    happens.

    `port_range`: of the port to which the other comes, both ends included.
    """
    asked = address_of(host, port)
    try:
        with _join(host, port, secret) as member:
            return peer_findings.judge_peer(asked, _call(member, port_range))
    except RallypointError as problem:
        return [peer_findings.unconnected(asked, problem)]


def _join(host: str, port: int, secret: bytes) -> Member:
    return Member.join(
        [(host, port)],
        derived(secret, "doctor"),
        job=JOB,
        ttl=ANSWER_TIMEOUT,
        timeout=JOIN_TIMEOUT,
    )


def _call(member: Member, port_range: tuple[int, int] | None) -> PeerContact:
    """Take the steps of the caller. Raises StoreTimeout and ConnectionError only before the
    listener has said hello."""
    talk = _PeerTalk(member, secrets.token_hex(8), "caller", "listener")
    mine, there = _plain(member.local_address), _plain(member.lead_address[0])
    with _hold_everywhere(0, port_range) as held:
        us = this_side()
        hello = PeerHello(talk.name, us, mine, there, held.port)
        Queue(member, _CALLS).put(msgspec.msgpack.encode(hello))
        other = talk.hear("hello", PeerHello, TURN)
        met = PeerContact(us, other.side, there, mine, there_port=other.port, back_port=held.port)
        try:
            met.round_trip, met.ahead = _ping(talk)
            _come_to_each_other(talk, met, held)
            _send_much(talk, met)
            talk.say("figures", (met.round_trip, met.ahead, met.bulk, met.bulk_seconds))
        except (StoreTimeout, ConnectionError) as problem:
            met.broken = peer_findings.said(problem)
        return met


def _ping(talk: _PeerTalk) -> tuple[float, float]:
    """Measure the quickest round trip, and by how much the other's clock, read in the middle of a
    question to it, is ahead (as NTP does)."""
    trips = []
    for _ in range(PINGS):
        clock = Clock()
        talk.member.get(talk.name)
        trips.append(clock.elapsed())
    clock = Clock()
    talk.say("clock", clock.started)
    wall = talk.hear("clock", float)
    return min(trips), wall - (clock.started + clock.elapsed() / 2)


def _send_much(talk: _PeerTalk, met: PeerContact) -> None:
    """Write many bytes and read them again. That they do not come through is no end of the
    conversation."""
    key = f"{talk.name}/bulk"
    clock = Clock()
    try:
        talk.member.set(key, bytes(BULK_BYTES))
        talk.member.pop(key)
        met.bulk, met.bulk_seconds = "", clock.elapsed()
    except StoreClosed:
        raise
    except (StoreTimeout, ConnectionError) as problem:
        met.bulk = peer_findings.said(problem)


# --- listener
# -----------------------------------------------------------------------------------------


def run_server(
    port: int,
    secret: bytes,
    port_range: tuple[int, int] | None = None,
    *,
    to_type: str = "",
    first_wait: float = FIRST_WAIT,
    linger: float = LINGER,
) -> Iterator[Finding]:
    """Let others check the way to here and back.

    Ends `linger` seconds after the last caller, or `first_wait` after the start when none came.
    Both ports on which it listens are of `port_range`. `to_type`: further options of the line for
    the other machine. `EnvironmentProblem` and `UsageError` when the port cannot be had.
    """
    logger(loud=True)  # it names those that are turned away
    held = _hold_everywhere(port, port_range)
    number = held.port
    listener = socket.socket(fileno=held.detach())
    with (
        Server(listeners=[listener], secret=derived(secret, "doctor"), job=JOB, local=False),
        _join("127.0.0.1", number, secret) as member,
    ):
        host = addresses.look(0.0)
        own = [address.ip for _, address in host.reachable()]
        yield peer_findings.waiting(host.name, own, number, first_wait, to_type)
        calls, clock, until, came = Queue(member, _CALLS), Clock(), first_wait, False
        while True:
            try:
                call = calls.get(timeout=max(0.0, until - clock.elapsed()))
            except QueueEmpty:
                break
            try:
                hello = msgspec.msgpack.decode(call, type=PeerHello)
                yield from _answer(member, hello, port_range)
            except RallypointError as problem:
                yield peer_findings.refused(problem)
            came, until = True, clock.elapsed() + linger
        if not came:
            yield peer_findings.nobody(number, first_wait)


def _answer(member: Member, other: PeerHello, port_range: tuple[int, int] | None) -> list[Finding]:
    """Take the steps of the listener."""
    talk = _PeerTalk(member, other.name, "listener", "caller")
    with _hold_everywhere(0, port_range) as held:
        us = this_side()
        talk.say("hello", PeerHello(other.name, us, other.other, other.mine, held.port))
        met = PeerContact(
            us, other.side, other.mine, other.other, there_port=other.port, back_port=held.port
        )
        try:
            talk.hear("clock", float)
            talk.say("clock", Clock().started)
            _come_to_each_other(talk, met, held)
            met.round_trip, ahead, met.bulk, met.bulk_seconds = talk.hear(
                "figures", tuple[float, float, str, float], 3 * ANSWER_TIMEOUT
            )
            met.ahead = -ahead
        except (StoreTimeout, ConnectionError) as problem:
            met.broken = peer_findings.said(problem)
        return peer_findings.judge_peer(met.address, met)
