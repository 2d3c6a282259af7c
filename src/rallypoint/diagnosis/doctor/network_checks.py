"""Checks of the network on this machine: loopback, ports, addresses and names, firewall."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from typing import NamedTuple

from rallypoint.diagnosis.doctor.finding import Finding, fault, note, ok, unknown
from rallypoint.host.addresses import LOOK_TIMEOUT, Host, Problem, chosen, look
from rallypoint.host.firewall import Firewall, read_firewall
from rallypoint.host.kernel_files import text_of
from rallypoint.host.ports import ephemeral_range, holders
from rallypoint.host.probe import Blocked
from rallypoint.host.tcp_table import TIME_WAIT, tcp_sockets

LOOPBACK_TIMEOUT = 1.0
"""Seconds for a packet from this machine to itself, which takes microseconds."""

USUAL_PORT = 29500
"""Port of torchrun, and of most tutorials."""

FEW_PORTS = 2000
"""Free ports: 64 ranks that each talk with every other one need 4032 at once, one such job and a
half less."""


# --- loopback
# --------------------------------------------------------------------------------------


def loopback() -> list[Finding]:
    """Connect to 127.0.0.1 and talk: ranks of one machine meet there."""
    failed = "nobody can listen on 127.0.0.1"
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(LOOPBACK_TIMEOUT)
            failed = "nobody can connect to 127.0.0.1"
            with (
                socket.create_connection(listener.getsockname(), LOOPBACK_TIMEOUT) as near,
                listener.accept()[0] as far,
            ):
                failed = "what is sent to 127.0.0.1 is lost"
                far.settimeout(LOOPBACK_TIMEOUT)
                near.sendall(b"rallypoint doctor")
                far.recv(1)
    except OSError as error:
        late = f"no answer within {LOOPBACK_TIMEOUT:g} s"
        said = os.strerror(error.errno) if error.errno else late
        return [judge_loopback(f"{failed}: {said}", _is_loopback_up())]
    return [ok("127.0.0.1 can be bound and connected to")]


def _is_loopback_up() -> bool | None:
    """Tell whether the interface is switched on; None when the kernel may not be asked."""
    from rallypoint.host.interfaces import interfaces

    try:
        return any(one.up for one in interfaces() if one.kind == "loopback")
    except OSError:
        return None


def judge_loopback(problem: str, up: bool | None) -> Finding:
    if up is False:
        help = ("switch it on, as root", "ip link set lo up")
        return fault("loopback-down", f"{problem}; the interface lo is switched off", help)
    help = (
        "see the interface, and what the firewall does with it",
        "ip address show dev lo && sudo nft list ruleset",
    )
    return fault(
        "loopback-down", problem, help, why=("the interface lo is switched on",) if up else ()
    )


# --- ports
# -----------------------------------------------------------------------------------------


class PortCounts(NamedTuple):
    """Counts of TCP ports of this network namespace."""

    low: int  # from here to `high` the kernel chooses, both included (ip_local_port_range, ip(7))
    high: int
    reserved: int = 0  # of these, never chosen (ip_local_reserved_ports)
    used: int | None = 0  # of these, by sockets not in TIME_WAIT; None: not known
    waiting: int = 0  # sockets in TIME_WAIT


def ports() -> list[Finding]:
    """Check how many ports the kernel can give out, and which process has the usual port."""
    return judge_ports(
        count_ports(),
        tuple(holder.line() for holder in holders(USUAL_PORT) if holder.state == "listening"),
    )


def count_ports(root: str = "/") -> PortCounts:
    settings = os.path.join(root, "proc/sys/net/ipv4")
    low, high = ephemeral_range(root)
    reserved = 0
    # 8080,9000-9100
    for first, last in re.findall(
        r"(\d+)(?:-(\d+))?", text_of(settings, "ip_local_reserved_ports")
    ):
        reserved += max(0, min(int(last or first), high) - max(int(first), low) + 1)
    sockets = list(tcp_sockets(root=root))
    waiting = sum(one.state == TIME_WAIT for one in sockets)
    used = {one.port for one in sockets if one.state != TIME_WAIT and low <= one.port <= high}
    readable = os.access(os.path.join(root, "proc/self/net/tcp"), os.R_OK)
    return PortCounts(low, high, reserved, len(used) if readable else None, waiting)


def judge_ports(counts: PortCounts, holders: tuple[str, ...] = ()) -> list[Finding]:
    """`holders`: of the usual port, a sentence each."""
    given = f"the kernel gives out {counts.low}-{counts.high}"
    if counts.used is None:
        return [unknown(f"{given}; who has which is not known: /proc/net/tcp cannot be read")]
    free = max(0, counts.high - counts.low + 1 - counts.reserved - counts.used)
    shown = f"{given}: {counts.used} in use, {counts.waiting} connection{'s' * (counts.waiting != 1)} in TIME_WAIT"
    found = []
    if free < FEW_PORTS:
        found.append(
            note(
                "ports-exhausted",
                f"{free} ports are free: {shown}",
                (
                    "widen the range, as root",
                    "sysctl -w net.ipv4.ip_local_port_range='15000 60999'",
                ),
                (
                    "or see who has them",
                    "ss -tanp | awk '{print $6}' | sort | uniq -c | sort -rn | head",
                ),
                why=(
                    "--port-range is for what rallypoint binds; gloo and NCCL take theirs from the kernel's range",
                ),
            )
        )
    if holders:
        found.append(
            note(
                "port-in-use",
                f"port {USUAL_PORT} is taken: {holders[0]}",
                (
                    "leave --master-port out, and a script's own MASTER_PORT: rallypoint holds a free port from the start",
                    "",
                ),
                why=holders[1:],
            )
        )
    if counts.low <= USUAL_PORT <= counts.high:
        shown += (
            f"; {USUAL_PORT}, torchrun's port, is one of them, so that any connection may have it"
        )
    return found or [ok(f"{shown}; nobody listens on {USUAL_PORT}")]


# --- addresses
# -------------------------------------------------------------------------------------

# Check to which a problem belongs; any other belongs to the addresses. The loopback has its own.
_CHECK_OF = {"address-one-way": "names", "ipv6-half-configured": "ipv6", "loopback-down": ""}


def addresses() -> list[Finding]:
    """Check this host's name and addresses, what the resolver says of them both ways, and IPv6."""
    host = look(LOOK_TIMEOUT)
    return judge_addresses(
        host,
        (*host.problems(), *chosen(os.environ, [interface.name for interface in host.interfaces])),
    )


def judge_addresses(host: Host, problems: Sequence[Problem]) -> list[Finding]:
    """Return the facts and what is wrong with them (`host.problems()` and `chosen`), at least one
    line for each check."""
    unread = f"{host.name}; its interfaces cannot be listed here: {host.unread}"
    facts = {
        "addresses": unread if host.unread else "; ".join(host.lines()),
        "names": _names(host),
        "ipv6": _ipv6(host),
    }
    found: list[Finding] = []
    for check, fact in facts.items():
        wrong = sorted(
            (one for one in problems if _CHECK_OF.get(one.code, "addresses") == check),
            key=lambda one: not one.grave,
        )
        for one in wrong:
            make = fault if one.grave else note
            found.append(make(one.code, one.sentence, *one.help, why=one.why, check=check))
        if not wrong:
            found.append(
                unknown(fact, check) if host.unread and check != "names" else ok(fact, check)
            )
    return found


def _names(host: Host) -> str:
    """Describe the way from the name to addresses, and from an address to its name."""
    answers = [(ip, host.answers[ip]) for ip in host.source.values() if ip in host.answers]
    if not answers:
        return "no address that a name server could be asked about"
    backwards = "; ".join(
        str(answer) if answer.found else f"{ip} has no name ({answer.error})"
        for ip, answer in answers
    )
    slowest = max(0.001, *(answer.took for answer in host.answers.values()))
    return f"{backwards}; the resolver answered within {slowest:.3f} s"


def _ipv6(host: Host) -> str:
    if host.unread:
        return f"not looked at: {host.unread}"
    if 6 in host.source:
        return f"reaches other machines from {host.source[6]}"
    own = (address for interface in host.interfaces for address in interface.addresses)
    scopes = {address.scope for address in own if address.version == 6}
    if "global" in scopes:
        return "there are addresses, and no way to other networks: IPv4 is used"
    where = "on this machine and its links only" if scopes else "switched off"
    return f"{where}: IPv4 is used"


# --- firewall
# --------------------------------------------------------------------------------------


def firewall() -> list[Finding]:
    """Check firewall rules that would drop or refuse what a job's processes say to each other, as
    far as they can be read."""
    low, high, *_ = count_ports()
    asked = sorted(
        {USUAL_PORT, low, (low + high) // 2, high}
    )  # some of those that gloo and NCCL may get
    return judge_firewall(
        read_firewall(), asked, [interface.name for interface, _ in look(0.0).reachable()]
    )


def judge_firewall(
    rules: Firewall, asked: Sequence[int], interfaces: Sequence[str] = ()
) -> list[Finding]:
    """`asked`: ports in ascending order; `interfaces`: by which others reach this machine."""
    inside = _first_blocked(rules, asked, ("lo",))
    outside = _first_blocked(rules, asked, interfaces)
    found = []
    if inside is not None:
        port, _, version, blocked = inside
        make = fault if blocked.certain and version == 4 else note
        address = "127.0.0.1" if version == 4 else "::1"
        why = "the ranks of one machine meet at 127.0.0.1"
        found.append(
            make(
                "firewall-blocks",
                f"between processes of this machine, a connection to {address} port {port}: {blocked}",
                ("let everything through on the loopback, as root", _let_in(blocked)),
                why=(why if version == 4 else "only programs that choose IPv6 meet there",),
            )
        )
    if outside is not None:
        port, interface, _, blocked = outside
        help = (
            "before a job on several machines, try the way",
            "rallypoint doctor --listen 29500 --secret-file F",
        )
        found.append(
            note(
                "firewall-blocks",
                f"from another machine, a connection to port {port} over {interface}: {blocked}",
                help,
                why=("on one machine this does no harm",),
            )
        )
    if rules.unread:
        tried = (
            "the check loopback tries the way on this machine, --listen and --peer that between two"
        )
        return [unknown(f"not read: {rules.unread}; {tried}")]
    return found or [
        ok(f"no rule of nft keeps connections from ports {', '.join(map(str, asked))}")
    ]


def _let_in(blocked: Blocked) -> str:
    """Return the command that puts a rule for the loopback before the one that blocks it."""
    chain = blocked.where.removeprefix("nft: ")
    # ufw-before-output, filter_OUTPUT: a chain to which another tool's OUTPUT jumps
    way = "oif" if "output" in chain.rpartition(" ")[2].lower() else "iif"
    return f"nft insert rule {chain} {way} lo accept"


def _first_blocked(
    rules: Firewall, asked: Sequence[int], interfaces: Sequence[str]
) -> tuple[int, str, int, Blocked] | None:
    """Return the first of these connections that is blocked, with IPv4 before IPv6, and one that
    certainly is before one that may be: its port, interface, version of IP, and rule."""
    for version in (4, 6):
        hits = [
            (port, name, version, blocked)
            for name in interfaces
            for port in asked
            if (blocked := rules.blocked(port, name, version))
        ]
        if hits:
            return min(hits, key=lambda hit: not hit[3].certain)
    return None
