"""Findings about the way between two machines, from what was seen of it. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from rallypoint.diagnosis.doctor import finding
from rallypoint.diagnosis.doctor.finding import Finding
from rallypoint.diagnosis.report import Help
from rallypoint.errors import RallypointError, StoreTimeout
from rallypoint.host.socket_addresses import address_of
from rallypoint.units import duration, size

PEER = "peer"
"""Check name of all these findings."""

fault, note = partial(finding.fault, check=PEER), partial(finding.note, check=PEER)

BULK_BYTES = 256 * 1024
"""Bytes sent each way: more than the first windows of both sides, so that some hundred full packets
must come through."""

LISTEN, SECRET = "rallypoint doctor --listen", "--secret-file F"

NO_DOCTOR = dict.fromkeys(
    ("store-foreign", "store-silent", "store-closed", "session-lost", "wrong-job", "wait-timeout"),
    "peer-foreign",
)
"""Codes of the store for what does not behave as a doctor's does."""

TORCH_IS_OPEN = (
    "torch's own sockets (its store at MASTER_PORT, gloo, NCCL) ask for no secret: "
    "whoever reaches them can read and change what goes over them"
)

CLOCKS_APART = 1.0
"""Seconds: with more, the logs of two nodes cannot be read side by side."""


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
    packet: int = 0  # bytes of data in the largest packet; 0: not known
    round_trip: float | None = None  # seconds
    ahead: float = 0.0  # seconds of the other's clock before ours, within half the round trip
    there_port: int = 0
    there: str | None = None  # why no connection to another port of the other came about
    back_port: int = 0
    back: str | None = None  # why none from the other to a port of ours did
    bulk: str | None = None  # why BULK_BYTES did not get there and back
    bulk_seconds: float = 0.0
    name_here: tuple[str, ...] | None = None  # what the other's name resolves to on this machine
    broken: str = ""  # why the conversation ended early


def judge_peer(asked: str, met: PeerContact) -> list[Finding]:
    """Judge the way. `asked`: how the other was named, for a person to find it again. The first
    line says whether both ways are well."""
    us, other, ours = met.us.host, met.other.host, met.seen or met.mine
    closed = []
    if met.there:
        fact = f"{asked}: {us} does not reach {other} at {address_of(met.address, met.there_port)}: {met.there}"
        closed.append(_closed(fact, other, ours, met))
    if met.back:
        fact = (
            f"{asked}: {other} does not reach {us} at {address_of(ours, met.back_port)}: {met.back}"
        )
        closed.append(_closed(fact, us, met.address, met))
    if closed:
        return closed
    if met.bulk:
        told = f"TCP was told packets of up to {met.packet} bytes, and something on the way drops those without a word"
        return [
            fault(
                "large-packets-lost",
                f"{asked}: single words come through, and {size(BULK_BYTES)} at a time do not: {met.bulk}",
                (
                    "find the largest packet that gets there: lower the number until it does",
                    f"ping -M do -s {max(met.packet, 1400)} {met.address}",
                ),
                ("and set the interface to it, as root", "ip link set dev INTERFACE mtu 1400"),
                why=(told,) if met.packet else (),
            )
        ]
    if met.broken or None in (met.back, met.there, met.bulk):
        early = met.broken or "it is not complete"
        return [fault("peer-foreign", f"{asked}: {other} ended the conversation early: {early}")]
    trip = "" if met.round_trip is None else f"round trip {duration(met.round_trip)}, "
    speed = f" in {duration(met.bulk_seconds)}" if met.bulk_seconds else ""
    packets = f" in packets of up to {met.packet} bytes" if met.packet else ""
    who = "" if other in asked else f" ({other})"
    well = f"{trip}{size(BULK_BYTES)} there and back{speed}{packets}, clocks {duration(abs(met.ahead))} apart"
    fact = f"{asked}{who}: ok both ways; {well}"
    return [Finding("ok", fact, why=(TORCH_IS_OPEN,), check=PEER), *_notes(met)]


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
    )


def _notes(met: PeerContact) -> list[Finding]:
    found, us, other = [], met.us, met.other
    if abs(met.ahead) > CLOCKS_APART:
        apart = f"{abs(met.ahead):.1f} s {'ahead of' if met.ahead > 0 else 'behind'} that of this machine"
        help = ("let a time service set both, as root", "timedatectl set-ntp true")
        found.append(note("clock-wrong", f"the clock of {other.host} is {apart}", help))
    differ = [
        f"{name} {getattr(us, key) or 'none'} here and {getattr(other, key) or 'none'} there"
        for name, key in (("rallypoint", "rallypoint"), ("Python", "python"), ("torch", "torch"))
        if getattr(us, key) != getattr(other, key)
    ]
    if differ:
        lacks_torch = us.torch and us.torch != other.torch
        install = f"python -m pip install torch=={us.torch}" if lacks_torch else ""
        fact = f"{other.host} has other versions: {', '.join(differ)}"
        found.append(note("versions-differ", fact, ("install the same on both", install)))
    names = met.name_here
    if names is not None and met.address not in (*names, met.mine):
        stands = "has no address here"
        if names:
            stands = f"stands for {', '.join(names)} here, and it was met at {met.address}"
        help = (
            "give its address instead of its name, or say it in /etc/hosts",
            f"{met.address}  {other.host}",
        )
        fact = f"the name {other.host}, by which that machine knows itself, {stands}"
        found.append(note("address-unresolved", fact, help))
    return found


# --- without a conversation
# --------------------------------------------------------------------------


def unconnected(asked: str, problem: RallypointError) -> Finding:
    """Report that the machine did not let this one in, or gave no answer. `problem`: of the store's
    client."""
    why, help, fact = list(problem.why), problem.help, said(problem)
    port = asked.rpartition(":")[2]
    if problem.code in NO_DOCTOR:
        fact = f"what answers there is no rallypoint doctor: {fact}"
        help = (
            ("see on that machine who has the port", f"ss -ltnp 'sport = :{port}'"),
            ("or let doctor listen on another one there", f"{LISTEN} 0 {SECRET}"),
        )
    elif problem.code == "port-refused":
        line = f"{LISTEN} {port} {SECRET}"
        help = (("start it on that machine, and then this one again", line),)
        if own := re.search(r"127\.[\d.]*\d|\[::1\]", f"{asked} {fact}"):
            why.append(f"{own[0]} is this machine itself, and no other")
    elif problem.code == "address-unreachable":
        allow = f"and on that machine, whether its firewall lets port {port} in"
        help = (*problem.help, (allow, "sudo nft list ruleset"))
    elif problem.code == "wrong-secret":
        fact = "it has another secret than this machine"
        help = (("compare the files on both machines", "sha256sum F"),)
    code = NO_DOCTOR.get(problem.code, problem.code)
    return fault(code, f"{asked}: {fact}", *help, why=tuple(why))


def said(problem: Exception) -> str:
    """Return an error of the store's client without the store, which is no word of a doctor's."""
    if isinstance(problem, StoreTimeout):
        return "no answer came in time"
    head, _, rest = str(problem).partition("\n")[0].partition(": ")
    return rest if head.startswith("no store at ") else f"{head}: {rest}" if rest else head


def refused(problem: RallypointError) -> Finding:
    return fault(problem.code, problem.headline, *problem.help, why=problem.why)


# --- server
# ------------------------------------------------------------------------------------------


def waiting(
    host: str, addresses: Sequence[str], port: int, seconds: float, to_type: str = ""
) -> Finding:
    """Say what to type on the other machine: the first line. `to_type`: further options."""
    help = tuple(
        Help(
            "or" if i else "on the other machine",
            f"rallypoint doctor --peer {shlex.quote(address_of(address, port))}{to_type}",
        )
        for i, address in enumerate(addresses or (host,))
    )
    fact = f"{host} listens on port {port} for {seconds:.0f} s"
    return Finding("ok", fact, help=help, check=PEER)


def nobody(port: int, seconds: float) -> Finding:
    return fault(
        "address-unreachable",
        f"nobody came to port {port} within {seconds:.0f} s",
        ("see whether a firewall of this machine lets it in", "sudo nft list ruleset"),
        why=("packets are dropped on the way, or no rallypoint doctor --peer was started",),
    )
