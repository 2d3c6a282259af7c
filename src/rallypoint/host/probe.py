"""Probe of an address: which addresses a name has, whether each of them answers, and with what.

The kernel and the resolver know why a connection does not come about, and most programs keep that
to themselves ("timed out"). Here every address is tried, each with its own error, and an answer is
heard. `look` is for a diagnosis; the store's client uses `connecting`, `arrived` and `told`, too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from typing import TYPE_CHECKING, Literal

import msgspec

from rallypoint.clock import Clock
from rallypoint.host import process_status
from rallypoint.host.socket_addresses import Place, address_of, described, is_own, numeric
from rallypoint.host.threads import OwnThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from rallypoint.host.firewall import Firewall
    from rallypoint.host.port_holder import PortHolder

FIRST_BYTES = 128
"""Bytes of an answer that are kept: a greeting or a status line, which says what it is."""

ADDRESSES_MOST = 16
"""Addresses of one name that are tried: a cloud's name has more, and any of them will do."""

RESOLVER_SHARE = 0.75
"""Share of the time for a look that the resolver may take; the rest is enough to connect."""

FIREWALL_TIMEOUT = 0.2
"""Seconds for this machine's firewall rules, which are read when packets to this very machine are
dropped, or refused though somebody listens. As a rule they take a tenth of that."""

LISTENING_SHARE = 0.5
"""Share of the time for a look that is for an answer to the greeting alone. A web server wants a
whole line before it answers, or the end of what is said: then it gets that."""

THIN_LINEAR_TIMEOUTS = 16
"""TCP_THIN_LINEAR_TIMEOUTS of tcp(7), which Python does not name: connections with less than four
packets on their way send a lost one up to six times in equal intervals."""

SEGMENT_BYTES = 1200
"""Maximum bytes of a packet's content between launchers: with its headers (60 with IPv6) it is less
than 1280, which every network with IPv6 and every usual tunnel carries."""

Outcome = Literal["answered", "closed", "silent", "refused", "unreachable", "dropped"]

UNREACHABLE = {
    errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.EADDRNOTAVAIL,
    errno.EACCES, errno.EPERM, errno.ENETDOWN,
}  # fmt: skip
"""Errors of the kernel when a packet finds no way, or may not be sent: nobody has answered."""


class Tried(msgspec.Struct, frozen=True):
    """One address, and what came of it."""

    where: str  # "127.0.0.1:29500", "[::1]:29500"
    outcome: Outcome
    errno: int = 0
    first: bytes = b""  # what it answered

    def __str__(self) -> str:
        why = f" ({os.strerror(self.errno)}, errno {self.errno})" if self.errno else ""
        return f"{self.where}: {_OUTCOMES[self.outcome]}{why}"


_OUTCOMES: dict[Outcome, str] = {
    "answered": "somebody answered",
    "closed": "it accepted the connection and closed it",
    "silent": "it accepted the connection and said nothing",
    "refused": "nothing listens there",
    "unreachable": "there is no way to it",
    "dropped": "no answer at all",
}


class Blocked(msgspec.Struct, frozen=True):
    """Verdict of a firewall (`host/firewall.py`) on a connection that does not come through."""

    does: str  # "drop" (the caller waits) or "reject" (the caller is told)
    where: str  # "nft: inet filter input"
    rule: str  # the rule as it is listed
    certain: bool  # False: a rule before it, or it itself, has a condition that is not evaluated

    def __str__(self) -> str:
        said = f"{self.where}: {self.rule}"
        if not self.certain:
            return f"the firewall may {self.does} it ({said})"
        return f"the firewall {'drops' if self.does == 'drop' else 'rejects'} it ({said})"


class Reached(msgspec.Struct, frozen=True):
    """Result of `look`."""

    host: str
    port: int
    tried: tuple[Tried, ...] = ()
    unresolved: str = ""  # the resolver's words, or that it gave no answer; then nothing was tried
    unanswered: bool = False  # the latter
    here: bool = False  # one of the addresses is this machine's
    # processes that listen on the port, a line each, when it is this machine's
    holders: tuple[str, ...] = ()
    stopped: int = 0  # the pid of one of them that stands still (state T)
    # what this machine's firewall has to do with it, when packets to itself are dropped
    rules: tuple[str, ...] = ()
    # the rule of this machine's firewall that refuses, or may refuse, what somebody listens for
    rejected: Blocked | None = None
    seconds: float = 0.0  # that the look took

    @property
    def address(self) -> str:
        """`node07:29500`."""
        return address_of(self.host, self.port)

    @property
    def outcome(self) -> Outcome | Literal["unresolved"]:
        """Return the most telling outcome of all addresses: an answer rather than none."""
        if self.unresolved or not self.tried:
            return "unresolved"
        return min((one.outcome for one in self.tried), key=list(_OUTCOMES).index)

    @property
    def first(self) -> bytes:
        """Return what was answered, if anything was."""
        return next((one.first for one in self.tried if one.first), b"")


def look(host: str, port: int, greeting: bytes, timeout: float) -> Reached:
    """Try every address of `host`, all at once, and hear what is answered to `greeting`; `timeout`
    is for all of it, in seconds.

    Raises nothing. Takes a tenth of a second when somebody answers or refuses, and the whole time
    when packets are dropped.
    """
    from rallypoint.host import resolver  # here: a client that connects needs no subprocess

    clock = Clock()
    places, unresolved, unanswered = numeric(host, port), "", False
    if not places:
        answer = resolver.ask([host], timeout=timeout * RESOLVER_SHARE)[host]
        places = [place for ip in answer.found[:ADDRESSES_MOST] for place in numeric(ip, port)]
        unanswered = answer.silent
        if not places:
            silent = f"the resolver gave no answer within {answer.took:.1f} s"
            unresolved = answer.error or silent
    tried = _try_all(places, greeting, timeout, clock)
    ips = {described(family, sockaddr): str(sockaddr[0]) for family, sockaddr in places}
    here = is_own(places)
    listening = _listeners(port) if here and port else ()
    rules: tuple[str, ...] = ()
    rejected: Blocked | None = None
    refused = [ips.get(one.where, "") for one in tried if one.outcome == "refused"]
    refusing = [ip for ip in refused if any(holder.accepts_at(ip) for holder in listening)]
    if refusing:
        # If no rule that was read refuses it, the process has begun to listen a moment ago.
        blocked = _read_firewall().blocked(port, version=6 if ":" in refusing[0] else 4)
        rejected = blocked if blocked is not None and blocked.does == "reject" else None
    elif here and any(one.outcome in ("dropped", "unreachable") for one in tried):
        read = _read_firewall()
        said = read.blocked(port) or read.unread or "no rule of this machine's firewall drops it"
        rules = (str(said),)
    holders, stopped = tuple(holder.line() for holder in listening), _stopped(listening)
    return Reached(
        host, port, tried, unresolved, unanswered, here, holders, stopped, rules, rejected,
        clock.elapsed(),
    )  # fmt: skip


class Looking:
    """A `look` in a thread of its own, for a loop that must not wait. `result` is None until it is
    done, and stays so where no thread can be started."""

    def __init__(self, host: str, port: int, greeting: bytes, timeout: float) -> None:
        self.result: Reached | None = None
        self.address = (host, port)
        self._asked = (host, port, greeting, timeout)
        self._thread = OwnThread(self._look, f"look at {host}")
        with contextlib.suppress(RuntimeError):  # this user has all threads that it may have
            self._thread.start()

    def wait(self, timeout: float) -> Reached | None:
        """Return the result, for which this waits up to `timeout` seconds."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return self.result

    def _look(self) -> None:
        self.result = look(*self._asked)


def set_for_small_messages(sock: socket.socket) -> None:
    """Have TCP send a small message at once, and again every 0.2 s while it is lost: where a fifth
    of all packets is lost, twice the time after each loss would soon be longer than a lease."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # no Linux
        sock.setsockopt(socket.IPPROTO_TCP, THIN_LINEAR_TIMEOUTS, 1)


def set_for_signs_of_life(sock: socket.socket) -> None:
    """Have TCP repeat a lost small message every 0.2 s also on a machine that is set to BBR: the
    kernel never takes a connection with BBR for a thin one. Let every packet pass a network that
    drops large ones without a word. What a listener accepts inherits both."""
    set_for_small_messages(sock)
    with contextlib.suppress(OSError):  # no Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def connecting(
    family: socket.AddressFamily,
    sockaddr: tuple[object, ...],
    source: str = "",
    set_options: Callable[[socket.socket], None] = set_for_small_messages,
) -> socket.socket:
    """Return a non-blocking stream socket that is on its way. `source`: from this address of this
    machine. `set_options`: called with a socket of TCP before it connects. OSError when the kernel
    refuses at once."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if source:
            sock.bind((source, 0))
        if family != socket.AF_UNIX:
            set_options(sock)
        error = sock.connect_ex(sockaddr if family != socket.AF_UNIX else str(sockaddr[0]))
        if error not in (0, errno.EINPROGRESS):
            raise OSError(error, os.strerror(error))
    except BaseException:
        sock.close()
        raise
    return sock


def arrived(sock: socket.socket) -> None:
    """Check a socket that was connecting and became writable: OSError when it is not connected all
    the same."""
    error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))
    if sock.family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
        # The kernel gave this very port to us: TCP then connects a socket with itself. One attempt
        # in 28,000, and there are jobs that make as many.
        raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))


_REFUSED = {
    errno.ECONNREFUSED: "nothing listens there",
    errno.ENOENT: "there is no such socket",
    errno.EAGAIN: "its queue of connections is full",
}


def told(error: OSError) -> tuple[Literal["refused", "unreachable"], str]:
    """Classify an error of `connect`: refused by the machine, or no way to it; and name it in
    words."""
    if text := _REFUSED.get(error.errno or 0):
        return "refused", text
    return "unreachable" if error.errno in UNREACHABLE else "refused", error.strerror or str(error)


def elsewhere(host: str, timeout: float) -> tuple[str, str] | None:
    """Return why `host` is not this machine: a code and a sentence; None when it is, or when the
    resolver gives no answer in `timeout` seconds."""
    from rallypoint.host import resolver

    places = numeric(host, 0)
    if not places:
        answer = resolver.ask([host], timeout=timeout)[host]
        if answer.silent:
            return None
        if not answer.found:
            return "address-unresolved", f"{host} has no address here ({answer.error})"
        places = [place for ip in answer.found for place in numeric(ip, 0)]
    if is_own(places):
        return None
    text = f"{host} is not this machine: {places[0][1][0]} is none of its addresses"
    return "address-unavailable", text


def listener(host: str, port: int) -> PortHolder | None:
    """Return the process that listens on a port of this machine's, when it can be seen; None for
    another machine's. Names are not resolved."""
    if host != "localhost" and not is_own(numeric(host, port)):
        return None
    return next(iter(_listeners(port)), None)


def shown(first: bytes) -> str:
    """Return the first line of what somebody answered, as text if it is text."""
    line = first[:64].splitlines()[0] if first.strip() else first[:64]
    if all(32 <= byte < 127 or byte == 9 for byte in line):
        return repr(line.decode("ascii"))
    return line[:16].hex(" ")


def _try_all(
    places: list[Place], greeting: bytes, timeout: float, clock: Clock
) -> tuple[Tried, ...]:
    found: dict[str, Tried] = {}
    ways: dict[int, _Way] = {}
    poll = select.poll()
    for family, sockaddr in places:
        where = described(family, sockaddr)
        try:
            way = _Way(where, connecting(family, sockaddr), greeting)
        except OSError as error:
            found[where] = Tried(where, told(error)[0], error.errno or 0)
            continue
        except OverflowError:  # no port has this number: it was read in what a program said
            found[where] = Tried(where, "unreachable")
            continue
        ways[way.sock.fileno()] = way
        poll.register(way.sock, select.POLLOUT)
    more = timeout * LISTENING_SHARE
    try:
        while ways and (now := clock.elapsed()) < timeout:
            if now >= more:
                more = timeout
                for way in ways.values():
                    way.say_no_more()
            for fd, _ in poll.poll((more - now) * 1000.0):
                way = ways[fd]
                result = way.step()
                if result is None:
                    poll.modify(fd, select.POLLIN)
                    continue
                found[way.where] = result
                poll.unregister(fd)
                ways.pop(fd).sock.close()
        found.update({way.where: way.too_late() for way in ways.values()})
    finally:
        for way in ways.values():
            way.sock.close()
    return tuple(found[where] for where in dict.fromkeys(described(*place) for place in places))


class _Way:
    """One address: connecting → greeted → heard."""

    def __init__(self, where: str, sock: socket.socket, greeting: bytes) -> None:
        self.where = where
        self.sock = sock
        self._greeting = greeting
        self._connected = False

    def step(self) -> Tried | None:
        """Go on as far as it goes without waiting; None while there is no result."""
        try:
            if not self._connected:
                arrived(self.sock)
                self._connected = True
                # a few bytes into an empty buffer: all of them at once
                self.sock.send(self._greeting, socket.MSG_NOSIGNAL)
                return None
            first = self.sock.recv(FIRST_BYTES)
        except BlockingIOError:
            return None
        except OSError as error:
            outcome: Outcome = "closed" if self._connected else told(error)[0]
            return Tried(self.where, outcome, error.errno or 0)
        return Tried(self.where, "answered" if first else "closed", first=first)

    def say_no_more(self) -> None:
        """End what is said: a service that waits for the rest of a line answers when there is
        none."""
        if self._connected:
            with contextlib.suppress(OSError):  # it is closed by now, which the next step sees
                self.sock.shutdown(socket.SHUT_WR)

    def too_late(self) -> Tried:
        return Tried(self.where, "silent" if self._connected else "dropped")


def _read_firewall() -> Firewall:
    from rallypoint.host import firewall

    return firewall.read_firewall(FIREWALL_TIMEOUT)


def _listeners(port: int) -> tuple[PortHolder, ...]:
    from rallypoint.host import ports

    return tuple(holder for holder in ports.holders(port) if holder.state == "listening")


def _stopped(listening: tuple[PortHolder, ...]) -> int:
    pids = (holder.pid for holder in listening if holder.pid)
    return next(filter(process_status.is_stopped, pids), 0)
