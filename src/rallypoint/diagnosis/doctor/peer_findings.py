"""Findings about the way between two machines, from what was seen of it. Pure."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rallypoint.diagnosis.doctor.finding import Finding, duration, fault, note, ok, size
from rallypoint.diagnosis.report import Help
from rallypoint.errors import RallypointError
from rallypoint.host.resolver import Answer

PEER = "peer"
"""Check name of all these findings."""

CLOCKS_APART = 1.0
"""Seconds: with more, the logs of two nodes cannot be read side by side."""

_UNREACHABLE = {
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ETIMEDOUT,
    errno.EADDRNOTAVAIL,
    errno.EACCES,
    errno.EPERM,
    errno.ENETDOWN,
}


class Side(msgspec.Struct, frozen=True):
    """Name and versions of one machine, as it says itself."""

    host: str
    rallypoint: str
    python: str
    torch: str = ""  # "": not installed


@dataclass(slots=True)
class PeerContact:
    """Knowledge of one side about the way to the other and back. A problem is None while it was not
    tried, "" for none."""

    us: Side
    other: Side
    address: str  # the other's, as it was connected to, or came from
    mine: str  # ours, as this machine has it
    seen: str = ""  # ours, as the other sees it
    interface: str = "eth0"  # of ours, over which they talk
    packet: int = 0  # bytes of data in the largest packet; 0: not known
    round_trip: float | None = None  # seconds
    ahead: float = (
        0.0  # seconds by which the other's clock is ahead, give or take half the round trip
    )
    there_port: int = 0
    there: str | None = None  # why no connection to another port of the other came about
    back_port: int = 0
    back: str | None = None  # why none from the other to a port of ours did
    bulk_bytes: int = 0
    bulk: str | None = None  # why many bytes did not get there and back
    bulk_seconds: float = 0.0
    name_here: tuple[str, ...] | None = None  # what the other's name resolves to on this machine
    broken: str = ""  # why the conversation ended early


def judge_peer(asked: str, met: PeerContact) -> list[Finding]:
    """Judge the way. `asked`: how the other was named, for a person to find it again. The first
    line says whether both ways are well."""
    us, other, ours = met.us.host, met.other.host, met.seen or met.mine
    closed = []
    if met.there:
        fact = f"{asked}: {us} does not reach {other} at {_joined(met.address, met.there_port)}: {met.there}"
        closed.append(_closed(fact, other, ours, met))
    if met.back:
        fact = f"{asked}: {other} does not reach {us} at {_joined(ours, met.back_port)}: {met.back}"
        closed.append(_closed(fact, us, met.address, met))
    if closed:
        return closed
    if met.bulk:
        told = f"TCP was told packets of up to {met.packet} bytes, and something on the way drops those without a word"
        return [
            fault(
                "large-packets-lost",
                f"{asked}: single words come through, and {size(met.bulk_bytes)} at a time do not: {met.bulk}",
                (
                    "find the largest packet that gets there: lower the number until it does",
                    f"ping -M do -s {max(met.packet, 1400)} {met.address}",
                ),
                (
                    "and set the interface to it, as root",
                    f"ip link set dev {met.interface} mtu 1400",
                ),
                why=(told,) if met.packet else (),
                check=PEER,
            )
        ]
    if met.broken or None in (met.back, met.there, met.bulk):
        early = (
            f"{asked}: {other} ended the conversation early: {met.broken or 'it is not complete'}"
        )
        return [fault("peer-foreign", early, check=PEER)]
    trip = "" if met.round_trip is None else f"round trip {duration(met.round_trip)}, "
    speed = f" in {duration(met.bulk_seconds)}" if met.bulk_seconds else ""
    packets = f" in packets of up to {met.packet} bytes" if met.packet else ""
    who = "" if other in asked else f" ({other})"
    well = f"{trip}{size(met.bulk_bytes)} there and back{speed}{packets}, clocks {duration(abs(met.ahead))} apart"
    return [ok(f"{asked}{who}: ok both ways; {well}", PEER), *_notes(met)]


def _closed(fact: str, where: str, source: str, met: PeerContact) -> Finding:
    """Report that two machines talk, and no connection from `source` comes in at another port of
    the machine `where`."""
    why = [
        "gloo and NCCL listen on ports that the kernel chooses, and every rank must reach every other one at them"
    ]
    if met.seen not in ("", met.mine):
        why.insert(
            0,
            f"{met.other.host} sees this machine as {met.seen}, which has {met.mine}: addresses are translated on the way",
        )
    return fault(
        "peer-one-way",
        fact,
        (
            f"on {where}, see whether its firewall lets {source} in at the ports of",
            "sysctl net.ipv4.ip_local_port_range",
        ),
        (
            "and if firewalld is its firewall, let it in at all",
            f"sudo firewall-cmd --zone=trusted --add-source={source}",
        ),
        why=tuple(why),
        check=PEER,
    )


def _notes(met: PeerContact) -> list[Finding]:
    found, us, other = [], met.us, met.other
    if abs(met.ahead) > CLOCKS_APART:
        apart = f"{abs(met.ahead):.1f} s {'ahead of' if met.ahead > 0 else 'behind'} that of this machine"
        help = ("let a time service set both, as root", "timedatectl set-ntp true")
        found.append(note("clock-wrong", f"the clock of {other.host} is {apart}", help, check=PEER))
    pairs = (
        ("rallypoint", us.rallypoint, other.rallypoint),
        ("Python", us.python, other.python),
        ("torch", us.torch, other.torch),
    )
    if differ := [
        f"{name} {here or 'none'} here and {there or 'none'} there"
        for name, here, there in pairs
        if here != there
    ]:
        install = (
            f"python -m pip install torch=={us.torch}"
            if us.torch and us.torch != other.torch
            else ""
        )
        help = ("install the same on both", install)
        found.append(
            note(
                "versions-differ",
                f"{other.host} has other versions: {', '.join(differ)}",
                help,
                check=PEER,
            )
        )
    if met.name_here is not None and met.address not in (*met.name_here, met.mine):
        stands = (
            f"stands for {', '.join(met.name_here)} here, and it was met at {met.address}"
            if met.name_here
            else "has no address here"
        )
        help = (
            "give its address instead of its name, or say it in /etc/hosts",
            f"{met.address}  {other.host}",
        )
        found.append(
            note(
                "address-unresolved",
                f"the name {other.host}, by which that machine knows itself, {stands}",
                help,
                check=PEER,
            )
        )
    return found


# --- without a conversation
# --------------------------------------------------------------------------


def unresolved(host: str, answer: Answer) -> Finding:
    said = (
        f"the resolver gave no answer within {answer.took:.1f} s" if answer.silent else answer.error
    )
    return fault(
        "address-unresolved",
        f"the name {host} has no address here: {said}",
        ("ask this machine's resolver", f"getent hosts {host}"),
        ("or give the address instead of the name", ""),
        check=PEER,
    )


def unconnected(asked: str, port: int, failures: Sequence[tuple[str, OSError]]) -> Finding:
    """Report that no address of the other was connected to. `failures`: each with its error, in the
    order they were tried."""
    said = {
        address: os.strerror(error.errno) if error.errno else "no answer at all"
        for address, error in failures
    }
    why = [f"{address}: {words}" for address, words in said.items()]
    why += [
        f"{here} is this machine itself, and no other"
        for here in said
        if here == "::1" or here.startswith("127.")
    ][:1]
    if any(error.errno == errno.ECONNREFUSED for _, error in failures):
        return fault(
            "port-refused",
            f"{asked}: nothing listens there",
            (
                "start it on that machine, and then this one again",
                f"rallypoint doctor --listen {port}",
            ),
            why=tuple(why),
            check=PEER,
        )
    address, last = failures[-1]
    words = (
        said[address]
        if last.errno in _UNREACHABLE
        else "no answer at all: packets to it are dropped, or it is off"
    )
    return fault(
        "address-unreachable",
        f"{asked}: {words}",
        ("see which way packets to it go", f"ip route get {address}"),
        (f"and on that machine, whether its firewall lets port {port} in", "sudo nft list ruleset"),
        why=tuple(why),
        check=PEER,
    )


def no_doctor(asked: str, said: str, first: bytes = b"") -> Finding:
    """Report that a server answers there, and that it is no doctor."""
    return fault(
        "peer-foreign",
        f"{asked}: what answers there is no rallypoint doctor: {said}",
        ("see on that machine who has the port", f"ss -ltnp 'sport = :{asked.rpartition(':')[2]}'"),
        ("or let doctor listen on another one there", "rallypoint doctor --listen 0"),
        why=_quoted(first),
        check=PEER,
    )


def refused(problem: RallypointError) -> Finding:
    return fault(problem.code, problem.headline, *problem.help, why=problem.why, check=PEER)


# --- server
# ------------------------------------------------------------------------------------------


def waiting(host: str, addresses: Sequence[str], port: int, seconds: float) -> Finding:
    """Say what to type on the other machine: the first line."""
    commands = [
        f"rallypoint doctor --peer {shlex.quote(_joined(address, port))}"
        for address in addresses or (host,)
    ]
    help = tuple(
        Help("or" if i else "on the other machine", command) for i, command in enumerate(commands)
    )
    return Finding(
        "ok", f"{host} listens on port {port} for {seconds:.0f} s", help=help, check=PEER
    )


def stranger(address: str, said: str, first: bytes) -> Finding:
    return note(
        "peer-foreign",
        f"{address} connected, and is no rallypoint doctor: {said}",
        why=_quoted(first),
        check=PEER,
    )


def nobody(port: int, seconds: float) -> Finding:
    return fault(
        "address-unreachable",
        f"nobody came to port {port} within {seconds:.0f} s",
        ("see whether a firewall of this machine lets it in", "sudo nft list ruleset"),
        why=("packets are dropped on the way, or no rallypoint doctor --peer was started",),
        check=PEER,
    )


def _quoted(first: bytes) -> tuple[str, ...]:
    return (f"it said first: {first[:60].decode('ascii', 'backslashreplace')!r}",) if first else ()


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
