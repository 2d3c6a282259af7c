"""What the way between two machines is like: what was seen of it, as lines. Pure."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rallypoint.diagnosis.checks.finding import Finding, fault, note, ok, size
from rallypoint.diagnosis.report import Help
from rallypoint.errors import RallypointError
from rallypoint.host.resolver import Answer

NAME = "peer"
"""The name of all these lines."""

CLOCKS_APART = 1.0
"""Seconds: with more, the logs of two nodes cannot be read side by side."""

_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.EADDRNOTAVAIL, errno.EACCES, errno.EPERM, errno.ENETDOWN}


class Side(msgspec.Struct, frozen=True):
    """Who a machine is, in its own words."""

    host: str
    rallypoint: str
    python: str
    torch: str = ""  # "": not installed


@dataclass(slots=True)
class Met:
    """What one side knows of the way to the other and back. None: it did not come to that. Of a problem "" stands for none."""

    us: Side
    other: Side
    address: str  # the other's, as it was connected to, or came from
    mine: str  # ours, as this machine has it
    seen: str = ""  # ours, as the other sees it
    interface: str = "eth0"  # of ours, over which they talk
    packet: int = 0  # bytes of data in the largest packet; 0: not known
    round_trip: float | None = None  # seconds
    ahead: float = 0.0  # seconds by which the other's clock is ahead, give or take half the round trip
    there_port: int = 0
    there: str | None = None  # why no connection to another port of the other came about
    back_port: int = 0
    back: str | None = None  # why none from the other to a port of ours did
    bulk_bytes: int = 0
    bulk: str | None = None  # why many bytes did not get there and back
    bulk_seconds: float = 0.0
    name_here: tuple[str, ...] | None = None  # what the other's name resolves to on this machine
    broken: str = ""  # why the conversation ended early


def judge(asked: str, met: Met) -> tuple[Finding, ...]:
    """`asked`: how the other was named, for a person to find it again. The first line says whether both ways are well."""
    other = met.other.host
    closed = []
    if met.there:
        fact = f"{asked}: {met.us.host} does not reach {other} at {_at(met.address, met.there_port)}: {met.there}"
        closed.append(_closed(fact, other, met.seen or met.mine, met))
    if met.back:
        fact = f"{asked}: {other} does not reach {met.us.host} at {_at(met.seen or met.mine, met.back_port)}: {met.back}"
        closed.append(_closed(fact, met.us.host, met.address, met))
    if closed:
        return tuple(closed)
    if met.bulk:
        return (
            _named(
                fault(
                    "large-packets-lost",
                    f"{asked}: single words come through, and {size(met.bulk_bytes)} at a time do not: {met.bulk}",
                    (
                        "find the largest packet that gets there: lower the number until it does",
                        f"ping -M do -s {max(met.packet, 1400)} {met.address}",
                    ),
                    ("and set the interface to it, as root", f"ip link set dev {met.interface} mtu 1400"),
                    why=(f"TCP was told packets of up to {met.packet} bytes, and something on the way drops those without a word",)
                    if met.packet
                    else (),
                )
            ),
        )
    if met.broken or met.back is None or met.there is None or met.bulk is None:
        return (_named(fault("peer-foreign", f"{asked}: {other} ended the conversation early: {met.broken or 'it is not complete'}")),)
    trip = "" if met.round_trip is None else f"round trip {_time(met.round_trip)}, "
    speed = (
        f"{size(met.bulk_bytes)} there and back in {_time(met.bulk_seconds)}"
        if met.bulk_seconds
        else f"{size(met.bulk_bytes)} there and back"
    )
    packets = f" in packets of up to {met.packet} bytes" if met.packet else ""
    who = "" if other in asked else f" ({other})"
    return (_named(ok(f"{asked}{who}: ok both ways; {trip}{speed}{packets}, clocks {_time(abs(met.ahead))} apart")), *_notes(met))


def _closed(fact: str, where: str, source: str, met: Met) -> Finding:
    """Two machines that talk already, and no connection from `source` comes in at another port of the machine `where`."""
    translated = met.seen and met.seen != met.mine
    why = (
        [f"{met.other.host} sees this machine as {met.seen}, which has {met.mine}: addresses are translated on the way"]
        if translated
        else []
    )
    why.append("gloo and NCCL listen on ports that the kernel chooses, and every rank must reach every other one at them")
    return _named(
        fault(
            "peer-one-way",
            fact,
            (f"on {where}, see whether its firewall lets {source} in at the ports of", "sysctl net.ipv4.ip_local_port_range"),
            ("and if firewalld is its firewall, let it in at all", f"sudo firewall-cmd --zone=trusted --add-source={source}"),
            why=tuple(why),
        )
    )


def _notes(met: Met) -> list[Finding]:
    found = []
    other = met.other
    if abs(met.ahead) > CLOCKS_APART:
        found.append(
            note(
                "clock-wrong",
                f"the clock of {other.host} is {abs(met.ahead):.1f} s {'ahead of' if met.ahead > 0 else 'behind'} that of this machine",
                ("let a time service set both, as root", "timedatectl set-ntp true"),
            )
        )
    differ = [
        f"{name} {ours or 'none'} here and {theirs or 'none'} there"
        for name, ours, theirs in (
            ("rallypoint", met.us.rallypoint, other.rallypoint),
            ("Python", met.us.python, other.python),
            ("torch", met.us.torch, other.torch),
        )
        if ours != theirs
    ]
    if differ:
        found.append(
            note(
                "versions-differ",
                f"{other.host} has other versions: {', '.join(differ)}",
                (
                    "install the same on both",
                    f"python -m pip install torch=={met.us.torch}" if met.us.torch and met.us.torch != other.torch else "",
                ),
            )
        )
    if met.name_here is not None and met.address not in met.name_here and met.address != met.mine:
        stands = f"stands for {', '.join(met.name_here)} here, and it was met at {met.address}" if met.name_here else "has no address here"
        found.append(
            note(
                "address-unresolved",
                f"the name {other.host}, by which that machine knows itself, {stands}",
                ("give its address instead of its name, or say it in /etc/hosts", f"{met.address}  {other.host}"),
            )
        )
    return [_named(one) for one in found]


# --- when there was no conversation ----------------------------------------------------------------------------------


def unresolved(host: str, answer: Answer) -> Finding:
    said = f"the resolver gave no answer within {answer.took:.1f} s" if answer.silent else answer.error
    return _named(
        fault(
            "address-unresolved",
            f"the name {host} has no address here: {said}",
            ("ask this machine's resolver", f"getent hosts {host}"),
            ("or give the address instead of the name", ""),
        )
    )


def unconnected(asked: str, port: int, failures: Sequence[tuple[str, OSError]]) -> Finding:
    """No address of the other's was connected to. `failures`: each address with its error, in the order they were tried."""
    why = tuple(f"{address}: {_said(error)}" for address, error in failures)
    here = next((address for address, _ in failures if address == "::1" or address.startswith("127.")), "")
    if here:
        why += (f"{here} is this machine itself, and no other",)
    if any(error.errno == errno.ECONNREFUSED for _, error in failures):
        return _named(
            fault(
                "port-refused",
                f"{asked}: nothing listens there",
                ("start it on that machine, and then this one again", f"rallypoint doctor --listen {port}"),
                why=why,
            )
        )
    address, last = failures[-1]
    said = _said(last) if last.errno in _UNREACHABLE else "no answer at all: packets to it are dropped, or it is off"
    return _named(
        fault(
            "address-unreachable",
            f"{asked}: {said}",
            ("see which way packets to it go", f"ip route get {address}"),
            (f"and on that machine, whether its firewall lets port {port} in", "sudo nft list ruleset"),
            why=why,
        )
    )


def foreign(asked: str, said: str, first: bytes = b"") -> Finding:
    """Somebody answers there, and it is no doctor."""
    words = (f"it said first: {first[:60].decode('ascii', 'backslashreplace')!r}",) if first else ()
    port = asked.rpartition(":")[2]
    return _named(
        fault(
            "peer-foreign",
            f"{asked}: what answers there is no rallypoint doctor: {said}",
            ("see on that machine who has the port", f"ss -ltnp 'sport = :{port}'"),
            ("or let doctor listen on another one there", "rallypoint doctor --listen 0"),
            why=words,
        )
    )


def trouble(problem: RallypointError) -> Finding:
    return _named(fault(problem.code, problem.headline, *problem.help, why=problem.why))


# --- the listener's own lines ----------------------------------------------------------------------------------------


def waiting(host: str, addresses: Sequence[str], port: int, seconds: float) -> Finding:
    """The first line: what to type on the other machine."""
    help = [
        ("or" if i else "on the other machine", f"rallypoint doctor --peer {shlex.quote(_at(address, port))}")
        for i, address in enumerate(addresses or (host,))
    ]
    listens = ok(f"{host} listens on port {port} for {seconds:.0f} s")
    return _named(msgspec.structs.replace(listens, help=tuple(Help(*one) for one in help)))


def stranger(address: str, said: str, first: bytes) -> Finding:
    words = (f"it said first: {first[:60].decode('ascii', 'backslashreplace')!r}",) if first else ()
    return _named(note("peer-foreign", f"{address} connected, and is no rallypoint doctor: {said}", why=words))


def nobody(port: int, seconds: float) -> Finding:
    return _named(
        fault(
            "address-unreachable",
            f"nobody came to port {port} within {seconds:.0f} s",
            ("see whether a firewall of this machine lets it in", "sudo nft list ruleset"),
            why=("packets are dropped on the way, or no rallypoint doctor --peer was started",),
        )
    )


def _named(finding: Finding) -> Finding:
    return msgspec.structs.replace(finding, check=NAME)


def _at(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _said(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else "no answer at all"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms" if seconds < 1.0 else f"{seconds:.1f} s"
