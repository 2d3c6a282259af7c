"""Names and addresses by which other machines can reach this host.

`look` gathers the facts, within a deadline; `problems` judges them, and is pure. What is judged is
the ways in which a machine that seems well makes jobs hang: a host name that stands for 127.0.1.1,
one that the resolver does not know, DNS that says one thing forwards and another backwards, IPv6
that is half there, a loopback interface that is down.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rallypoint.clock import Clock
from rallypoint.errors import Advice
from rallypoint.host import resolver
from rallypoint.host.interfaces import Interface, InterfaceAddress, interfaces, scope
from rallypoint.host.resolver import Answer

LOOK_TIMEOUT = 3.0
"""Seconds for all questions to the resolver together: a healthy one answers in milliseconds, and
one that is repeated after the usual 5 s has already cost every connection of a job as much."""

_SILENT = Answer("")

# Addresses that are set aside for documentation (RFC 5737, RFC 3849): the way to them is the
# default route, and nobody is there.
_FAR: dict[int, tuple[socket.AddressFamily, str]] = {
    4: (socket.AF_INET, "198.51.100.1"),
    6: (socket.AF_INET6, "2001:db8::1"),
}

# How likely it is that other machines come in here, the likeliest first; below all of them, bridges
# lead to containers of this machine.
_ORDER = ("infiniband", "ethernet", "wireless", "virtual", "container", "tunnel")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something about names or addresses that is not as it should be."""

    code: str  # of the catalogue
    # True: jobs on this machine alone fail; False: they run, and jobs on several machines may not
    grave: bool
    sentence: str  # what is wrong: subject first, no full stop
    why: tuple[str, ...] = ()  # facts anyone could check
    help: Advice = ()  # (sentence, command or "")


@dataclass(frozen=True, slots=True)
class Host:
    """The facts. `problems()` is what is wrong with them."""

    name: str  # as the kernel has it
    interfaces: tuple[Interface, ...]
    unread: str = ""  # why the interfaces could not be listed; then `interfaces` is empty
    source: Mapping[int, str] = field(
        default_factory=dict
    )  # by IP version: the address from which this host reaches far ones; absent: no way
    answers: Mapping[str, Answer] = field(
        default_factory=dict
    )  # of the resolver, by what was asked

    @property
    def own(self) -> Answer:
        """Return what this host's own name resolves to."""
        return self.answers.get(self.name, _SILENT)

    def interface_of(self, ip: str) -> Interface | None:
        """Return the interface that has this address; None when it is not one of this host's."""
        for interface in self.interfaces:
            if any(address.ip == ip for address in interface.addresses):
                return interface
        if ip.startswith(
            "127."
        ):  # the whole network is this machine, and only its first address is listed
            return next(
                (interface for interface in self.interfaces if interface.kind == "loopback"), None
            )
        return None

    def reachable(self) -> tuple[tuple[Interface, InterfaceAddress], ...]:
        """Return the addresses at which other machines may reach this one, the likeliest first: the
        default route's, then cards before tunnels.

        An address of a bridge (docker0) is not among them unless it is the default route's. Whether
        a firewall, or the host of a container, lets them through cannot be known from here.
        """
        found = [
            (interface, address)
            for interface in self.interfaces
            for address in interface.addresses
            if interface.up
            and interface.running
            and address.scope == "global"
            and (interface.kind in _ORDER or address.ip in self.source.values())
        ]

        def place(entry: tuple[Interface, InterfaceAddress]) -> tuple[bool, int, int]:
            interface, address = entry
            return (
                address.ip not in self.source.values(),
                _ORDER.index(interface.kind) if interface.kind in _ORDER else -1,
                address.version,
            )

        return tuple(sorted(found, key=place))

    def lines(self) -> tuple[str, ...]:
        """Return the facts for people, a line each: the name, where others may reach this host, and
        what to know about that."""
        parts = [str(self.own) if self.own.asked else self.name]
        reachable = self.reachable()
        listed = ", ".join(
            f"{address.ip} ({interface.name}, {interface.kind})" for interface, address in reachable
        )
        parts.append(
            f"others may reach it at {listed}"
            if listed
            else "no address that another machine could reach"
        )
        if reachable:
            first, address = reachable[0]
            if first.kind == "container":
                parts.append(
                    f"{first.name} leads out of a container: who reaches {address.ip} is decided outside of it"
                )
            elif first.kind == "tunnel":
                parts.append(
                    f"{first.name} is a tunnel (VPN): only its other members reach {address.ip}"
                )
        return tuple(parts)

    def problems(self) -> tuple[Problem, ...]:
        """Return what is wrong, the gravest first. Pure."""
        return tuple(
            sorted(
                [*_loopback(self), *_own_name(self), *_backwards(self), *_ipv6(self)],
                key=lambda problem: not problem.grave,
            )
        )


def look(timeout: float = LOOK_TIMEOUT) -> Host:
    """Return the facts about this host, within `timeout` seconds and a tenth; raises nothing. No
    packet is sent but the resolver's own.

    Starts one process, which has ended when this returns, and no thread.
    """
    clock = Clock()
    name = socket.gethostname()
    source = {version: ip for version in _FAR if (ip := source_address(version))}
    try:
        found, unread = interfaces(), ""
    except OSError as error:
        found, unread = (), os.strerror(error.errno) if error.errno else str(error)
    answers = resolver.ask({name, "localhost"}, set(source.values()), timeout=timeout)
    others = {
        other for ip in source.values() if (answer := answers.get(ip)) for other in answer.found[:1]
    } - answers.keys()
    if others and (left := timeout - clock.elapsed()) > 0:
        answers |= resolver.ask(others, timeout=left)
    return Host(name, found, unread, source, answers)


def source_address(version: int) -> str:
    """Return the address that the kernel would send from to a far one, "" without a way. Nothing is
    sent: UDP's connect only asks the routes."""
    family, far = _FAR[version]
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((far, 9))
        ip = str(probe.getsockname()[0]).partition("%")[0]
        return ip if scope(ip) == "global" else ""
    return ""


def chosen(environ: Mapping[str, str], found: Sequence[str]) -> tuple[Problem, ...]:
    """Variables that name an interface for gloo or NCCL which is not among `found`, the names of
    this machine's. Pure.

    Gloo takes names with commas between. NCCL's are prefixes, exact after `=`, and `^` excludes;
    that one is never wrong.
    """
    wrong = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environ.get(variable, "")
        exact = variable.startswith("GLOO") or value.startswith("=")
        asked = [part for part in value.lstrip("=").split(",") if part]
        if not asked or value.startswith("^") or not found:
            continue
        missing = [
            part
            for part in asked
            if not (part in found if exact else any(name.startswith(part) for name in found))
        ]
        if not missing or (
            variable.startswith("NCCL") and len(missing) < len(asked)
        ):  # NCCL is content with one of them
            continue
        wrong.append(
            Problem(
                "interface-missing",
                True,
                f"{variable}={value} names no interface of this machine"
                if len(missing) == len(asked)
                else f"{variable}={value} names {', '.join(missing)}, which is no interface of this machine",
                why=(f"this machine has {', '.join(found)}",),
                help=(("on one node no interface has to be named", f"unset {variable}"),),
            )
        )
    return tuple(wrong)


# --- what is wrong


def _loopback(host: Host) -> list[Problem]:
    if not host.interfaces:
        return []
    lo = next((interface for interface in host.interfaces if interface.kind == "loopback"), None)
    if lo is None:
        said = "there is no loopback interface"
        help = ("ask whoever made this container or sandbox for one", "")
    elif not lo.up:
        said = f"the loopback interface {lo.name} is down"
        help = ("switch it on, as root", f"ip link set {lo.name} up")
    elif all(address.ip != "127.0.0.1" for address in lo.addresses):
        said = f"the loopback interface {lo.name} has no 127.0.0.1"
        help = ("add it, as root", f"ip address add 127.0.0.1/8 dev {lo.name}")
    else:
        return []
    return [
        Problem("loopback-down", True, said, ("ranks on one machine meet at 127.0.0.1",), (help,))
    ]


def _own_name(host: Host) -> list[Problem]:
    """Return the host's own name, which gloo resolves in every rank, and by which other machines
    look for this one."""
    own, name, first = host.own, host.name, host.own.found[0] if host.own.found else ""
    reachable = [address.ip for _, address in host.reachable()]
    listed = ", ".join(reachable)
    if not own.asked:
        return []
    interface = host.interface_of(first)
    entry = f"echo '{reachable[0] if reachable else '127.0.1.1'}  {name}' >> /etc/hosts"
    help = ("say it in /etc/hosts, as root", entry)
    if not first:
        said = (
            f"gave no answer for this machine's own name {name} within {own.took:.1f} s"
            if own.silent
            else f"has no address for this machine's own name {name} ({own.error})"
        )
        code, said = "address-unresolved", f"the resolver {said}"
        why: tuple[str, ...] = (
            "gloo asks for it in every rank; without an address it takes the loopback interface, which is enough for one machine",
        )
        if not reachable:
            help = ("add the name to /etc/hosts", entry)
    elif interface is None and host.interfaces:
        code = "address-unavailable"
        said = (
            f"this machine's own name {name} stands for {first}, which is not one of its addresses"
        )
        why = (
            f"it has {listed or 'none but loopback'}",
            "gloo cannot bind it, and takes the loopback interface, which is enough for one machine",
        )
    elif not reachable or first in reachable or interface is None:
        return []
    else:
        code = "address-loopback"
        said = (
            f"this machine's own name {name} stands for {first}, where no other machine reaches it"
        )
        bridge = ", a bridge to containers" if interface.kind == "bridge" else ""
        why = (
            f"{first} is an address of {interface.name}{bridge}",
            f"others may reach it at {listed}",
            "on one machine this does no harm",
        )
        help = (
            f"before a job on several machines, let {name} stand for {reachable[0]} in /etc/hosts",
            f"{reachable[0]}  {name}",
        )
    needed = code != "address-unavailable" or bool(reachable)
    return [Problem(code, False, said, why, (help,) if needed else ())]


def _backwards(host: Host) -> list[Problem]:
    """Address to name, and that name to the address again."""
    wrong = []
    for ip in host.source.values():
        answer = host.answers.get(ip)
        if answer is None:
            continue
        if answer.silent:
            said = f"the resolver gave no answer within {answer.took:.1f} s when it was asked for the name of {ip}"
            why = (
                "torch asks for the name of its peer at every connection, and waits for the answer"
            )
            help = (
                "let it wait a second instead of five, if names that you need come in time",
                "export RES_OPTIONS='timeout:1 attempts:1'",
            )
        else:
            name = answer.found[0] if answer.found else ""
            back = host.answers.get(name)
            if back is None or not (sentence := _leads_elsewhere(host, ip, name, back)):
                continue
            said = f"{ip} is called {name}, and {sentence}"
            why = f"whoever connects by that name reaches {'another address' if back.found else 'nobody'}"
            help = ("ask the resolver both ways", f"getent hosts {ip} {name}")
        wrong.append(Problem("address-one-way", False, said, (why,), (help,)))
    return wrong


def _leads_elsewhere(host: Host, ip: str, name: str, back: Answer) -> str:
    """Return what the resolver says of the name that it gave for an address, "" when that is the
    same address."""
    if name == host.name and (
        not back.found or scope(back.found[0]) == "host"
    ):  # of its own name more is said elsewhere
        return ""
    if back.silent:
        return f"the resolver gave no answer for that name within {back.took:.1f} s"
    if not back.found:
        return f"that name has no address ({back.error})"
    return f"{name} stands for {', '.join(back.found)}" if ip not in back.found else ""


def _ipv6(host: Host) -> list[Problem]:
    wrong = []
    has_six = any(
        address.ip == "::1" for interface in host.interfaces for address in interface.addresses
    )
    for asked in dict.fromkeys(("localhost", host.name)):
        found = host.answers[asked].found if asked in host.answers else ()
        six = next((ip for ip in found if ":" in ip), "")
        if not six or has_six or not host.interfaces:
            continue
        order = ", before any other address" if found[0] == six else ", too"
        wrong.append(
            Problem(
                "ipv6-half-configured",
                False,
                f"{asked} stands for {six}{order}, and this machine has no ::1: IPv6 is switched off",
                why=(
                    "a program that tries only the first address fails; torch tries the next one, with a warning",
                ),
                help=(
                    ("remove the name from the line with the IPv6 address", "sudoedit /etc/hosts"),
                ),
            )
        )
    return wrong
