"""Firewall rules that would drop or refuse what a job's processes say to each other, as far as they can be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rallypoint.diagnosis.checks.finding import Finding, fault, note, ok, unknown
from rallypoint.diagnosis.checks.ports import USUAL, kernels_range
from rallypoint.host.addresses import look as look_at_addresses
from rallypoint.host.firewall import LOOK_TIMEOUT, Blocked, Firewall
from rallypoint.host.firewall import look as look_at_firewall

LOOPBACK = "lo"


class Facts(NamedTuple):
    """The rules, and which connections to ask them about."""

    firewall: Firewall
    ports: tuple[int, ...]  # in ascending order; some of those that gloo and NCCL may be given, and the usual one
    interfaces: tuple[str, ...] = ()  # by which others reach this machine


def check() -> tuple[Finding, ...]:
    low, high = kernels_range()
    host = look_at_addresses(0.0)
    names = dict.fromkeys(interface.name for interface, _ in host.reachable())
    return judge(Facts(look_at_firewall(LOOK_TIMEOUT), tuple(sorted({USUAL, low, (low + high) // 2, high})), tuple(names)))


def judge(facts: Facts) -> tuple[Finding, ...]:
    firewall, found = facts.firewall, []
    for version, address in ((4, "127.0.0.1"), (6, "::1")):
        inside = _first(firewall, facts.ports, (LOOPBACK,), version)
        if inside is None:
            continue
        port, _, blocked = inside
        make = fault if blocked.certain and version == 4 else note
        found.append(
            make(
                "firewall-blocks",
                f"between processes of this machine, a connection to {address} port {port}: {blocked}",
                ("let everything through on the loopback, as root", _let_in(blocked)),
                why=("the ranks of one machine meet at 127.0.0.1",) if version == 4 else ("only programs that choose IPv6 meet there",),
            )
        )
        break  # whoever lets the loopback through lets it through for both
    for version in (4, 6):
        outside = _first(firewall, facts.ports, facts.interfaces, version)
        if outside is not None:
            port, interface, blocked = outside
            found.append(
                note(
                    "firewall-blocks",
                    f"from another machine, a connection to port {port} over {interface}: {blocked}",
                    ("before a job on several machines, try the way", "rallypoint doctor --listen 29500"),
                    why=("on one machine this does no harm",),
                )
            )
            break
    if found:
        return tuple(found)
    if not firewall.read:
        tried = "the check loopback tries the way on this machine, --listen and --peer that between two"
        return (unknown(f"not read: {'; '.join(firewall.unread)}; {tried}"),)
    ports = f"ports {', '.join(map(str, facts.ports))}"
    part = f" (unread: {'; '.join(firewall.unread)})" if firewall.unread else ""
    return (ok(f"no rule of {', '.join(firewall.read)} keeps connections from {ports}{part}"),)


def _let_in(blocked: Blocked) -> str:
    """The command that puts a rule for the loopback before the one that blocks it."""
    tool, _, chain = blocked.where.partition(": ")
    table, _, name = chain.rpartition(" ")
    out = "output" in name.lower()  # ufw-before-output, filter_OUTPUT: a chain to which another tool's OUTPUT jumps
    if tool == "nft":
        return f"nft insert rule {chain} {'oif' if out else 'iif'} {LOOPBACK} accept"
    return f"{tool.removesuffix('-save')}{f' -t {table}' if table else ''} -I {name} {'-o' if out else '-i'} {LOOPBACK} -j ACCEPT"


def _first(firewall: Firewall, ports: Sequence[int], interfaces: Sequence[str], version: int) -> tuple[int, str, Blocked] | None:
    """The first of these connections that is blocked, one that certainly is before one that may be."""
    hits = [
        (port, name, blocked) for name in interfaces for port in ports if (blocked := firewall.blocked(port, name, version)) is not None
    ]
    return min(hits, key=lambda hit: not hit[2].certain, default=None)
