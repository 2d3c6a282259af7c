"""This host's name and addresses, what the resolver says of them both ways, and IPv6."""

from __future__ import annotations

import os

import msgspec

from rallypoint.diagnosis.checks.finding import Finding, fault, note, ok, unknown
from rallypoint.host.addresses import LOOK_TIMEOUT, Host, Problem, chosen, look

NAMES = ("addresses", "names", "ipv6")
"""One look, three lines."""

# Whose line a problem is; any other is that of the addresses. The loopback has a check of its own, which does more than look.
_LINE = {"address-one-way": "names", "ipv6-half-configured": "ipv6", "loopback-down": ""}


def check() -> tuple[Finding, ...]:
    host = look(LOOK_TIMEOUT)
    return judge(host, (*host.problems(), *chosen(os.environ, [interface.name for interface in host.interfaces])))


def judge(host: Host, problems: tuple[Problem, ...]) -> tuple[Finding, ...]:
    """The facts and what is wrong with them (`host.problems()` and `chosen`) as lines, at least one for each of `NAMES`."""
    found: list[Finding] = []
    for name, fact in zip(NAMES, (_addresses(host), _names(host), _ipv6(host)), strict=True):
        wrong = sorted((one for one in problems if _LINE.get(one.code, "addresses") == name), key=lambda one: not one.grave)
        found += [_finding(problem, name) for problem in wrong] or [(unknown if host.unread and name != "names" else ok)(fact, name)]
    return tuple(found)


def _finding(problem: Problem, name: str) -> Finding:
    make = fault if problem.grave else note
    return msgspec.structs.replace(make(problem.code, problem.sentence, *problem.help, why=problem.why), check=name)


def _addresses(host: Host) -> str:
    if host.unread:
        return f"{host.name}; its interfaces cannot be listed here: {host.unread}"
    return "; ".join(host.lines())


def _names(host: Host) -> str:
    """Both ways: the name to addresses, an address to its name."""
    backwards = [
        str(answer) if answer.found else f"{ip} has no name ({answer.error})"
        for ip in host.source.values()
        if (answer := host.answers.get(ip)) is not None
    ]
    if not backwards:
        return "no address that a name server could be asked about"
    slowest = max((answer.took for answer in host.answers.values()), default=0.0)
    return f"{'; '.join(backwards)}; the resolver answered within {max(slowest, 0.001):.3f} s"


def _ipv6(host: Host) -> str:
    if host.unread:
        return f"not looked at: {host.unread}"
    if 6 in host.source:
        return f"reaches other machines from {host.source[6]}"
    six = [address for interface in host.interfaces for address in interface.addresses if address.version == 6]
    if any(address.scope == "global" for address in six):
        return "there are addresses, and no way to other networks: IPv4 is used"
    return "on this machine and its links only: IPv4 is used" if six else "switched off: IPv4 is used"
