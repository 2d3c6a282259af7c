"""Firewall rules of nftables that drop or reject a connection to a port of this machine.

They are read with `nft --json`, which only root may use, within a deadline. nft lists what was
loaded by `iptables-nft`, too; rules of the older iptables are not seen. A condition on anything but
ports, interfaces, protocols and connection states (a named set, a mark, a rate, a source) is not
evaluated, and makes the verdict uncertain.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rallypoint.host.probe import Blocked

LOOK_TIMEOUT = 3.0
"""Seconds for nft. The rules of a cluster node are listed in a tenth of one."""

_HOOKS = ("prerouting", "input", "output")
"""Hooks at which a packet to this machine may be dropped; `output` only where it comes from here,
too."""

# where root's tools are; a shell that became root by `su` has them not in PATH
_SBIN = ("/usr/sbin", "/sbin")

_DEEPEST = 16  # chains below each other; nft refuses more

_VERDICTS = ("accept", "drop", "reject", "return")

_OTHER_PROTOCOLS = ("udp", "icmp", "icmpv6", "sctp", "dccp", "esp", "ah", "arp")


class Condition(NamedTuple):
    """One condition of a rule, with nft's word for the field ("dport", "iifname", "state")."""

    field: str
    values: tuple[str, ...]  # `22`, `20000-20100`, `lo`, `@name`
    negated: bool = False
    protocol: str = (
        ""  # the header that has the field: "tcp", "ip", "ip6"; packets of others do not match
    )


class Rule(NamedTuple):
    """One rule of a chain. `does`: "accept", "drop", "reject", "return", "jump NAME", "goto NAME"
    (no way leads back), or "" for a rule that only counts or logs."""

    text: str
    conditions: tuple[Condition, ...]
    does: str


@dataclass(frozen=True, slots=True)
class Chain:
    """Rules in their order. `policy` applies at the end; "" for a chain that only others jump
    to."""

    name: str  # "inet filter input"
    rules: tuple[Rule, ...]
    policy: str = ""
    hook: str = ""  # one of `_HOOKS` where there is a policy


@dataclass(frozen=True, slots=True)
class Firewall:
    """Rules that were read, or a sentence for why they were not."""

    chains: tuple[Chain, ...] = ()
    unread: str = ""

    def blocked(self, port: int, interface: str = "lo", version: int = 4) -> Blocked | None:
        """Return the rule that keeps out a new TCP connection to `port` that comes in over
        `interface`; None when no rule that was read does.

        Over `lo` it comes from this machine and must get out, too. `version`: of IP.
        """
        chains = {chain.name: chain for chain in self.chains}
        families = ("inet", "ip" if version == 4 else "ip6")
        found = [
            blocked
            for chain in self.chains
            if chain.policy
            and chain.name.split()[0] in families
            and (chain.hook != "output" or interface == "lo")
            and (blocked := _blocks(chain, _Packet(port, interface, version), chains))
        ]
        return min(found, key=lambda one: not one.certain, default=None)


def read_firewall(timeout: float = LOOK_TIMEOUT) -> Firewall:
    """Read the rules of this network namespace, within `timeout` seconds; raises nothing."""
    if os.geteuid() != 0:
        return Firewall(unread="only root may read the firewall's rules")
    places = os.pathsep.join((os.environ.get("PATH", os.defpath), *_SBIN))
    tool = shutil.which("nft", path=places)
    if tool is None:
        return Firewall(unread="nft is not installed")
    try:
        done = subprocess.run(
            [tool, "-j", "list", "ruleset"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
        # A launcher that reaps every child takes the exit status, which is 0 then: an error message
        # without output counts, too.
        if done.returncode or (done.stderr and not done.stdout):
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            return Firewall(unread=f"nft refused: {said[0] if said else done.returncode}")
        return Firewall(nft_chains(done.stdout.decode("utf-8", "replace")))
    except subprocess.TimeoutExpired:
        return Firewall(unread=f"nft gave no answer within {timeout:g} s")
    except OSError as error:
        return Firewall(unread=f"nft cannot be run: {error.strerror}")
    except (ValueError, LookupError, TypeError):
        return Firewall(unread="what nft lists is not understood")


# --- nft's JSON


def nft_chains(text: str) -> tuple[Chain, ...]:
    """Return the chains of `nft -j list ruleset` (libnftables-json(5))."""
    listed = json.loads(text)["nftables"] if text.strip() else []
    rules: dict[str, list[Rule]] = {}
    for entry in listed:
        if rule := entry.get("rule"):
            name = f"{rule['family']} {rule['table']} {rule['chain']}"
            rules.setdefault(name, []).extend(_rules_of(rule["expr"]))
    found = []
    for entry in listed:
        if chain := entry.get("chain"):
            name = f"{chain['family']} {chain['table']} {chain['name']}"
            hooked = chain.get("hook") in _HOOKS and chain.get("type") != "nat"
            policy, hook = (chain.get("policy", "accept"), chain["hook"]) if hooked else ("", "")
            found.append(Chain(name, tuple(rules.get(name, ())), policy, hook))
    return tuple(found)


def _rules_of(expressions: Sequence[dict[str, Any]]) -> Iterator[Rule]:
    """Yield one rule, or one for each entry of its verdict map."""
    words: list[str] = []
    conditions: list[Condition] = []
    for expression in expressions:
        ((kind, told),) = expression.items()
        if kind == "match":
            text, condition = _condition(told["left"], told["right"], told["op"] == "!=")
            words.append(text)
            conditions.append(condition)
        elif kind == "vmap" and isinstance(told["data"], dict):
            for key, verdict in told["data"]["set"]:
                text, condition = _condition(told["key"], key)
                does = _verdict(verdict)
                yield Rule(" ".join((*words, text, does)), (*conditions, condition), does)
        elif kind == "vmap":  # a named map may drop
            text, condition = f"vmap {told['data']}", Condition("vmap", ())
            yield Rule(" ".join((*words, text)), (*conditions, condition), "drop")
        elif does := _verdict(expression):
            yield Rule(" ".join((*words, does)), tuple(conditions), does)
        elif kind not in ("counter", "log"):
            conditions.append(Condition(kind, ()))


def _verdict(expression: Mapping[str, Any]) -> str:
    ((kind, told),) = expression.items()
    if kind in ("jump", "goto"):
        return f"{kind} {told['target']}"
    return kind if kind in _VERDICTS else ""


def _condition(left: Any, right: Any, negated: bool = False) -> tuple[str, Condition]:
    """Return a condition as text and as data."""
    ((kind, told),) = left.items()
    told = told if isinstance(told, dict) else {}
    field = str(told.get("field") or told.get("key") or kind)
    protocol = str(told.get("protocol", ""))
    listed = right["set"] if isinstance(right, dict) and "set" in right else right
    values = tuple(map(_value, listed if isinstance(listed, list) else [listed]))
    name = " ".join(filter(None, (protocol or (kind if kind == "ct" else ""), field)))
    text = f"{{ {', '.join(values)} }}" if len(values) > 1 else values[0]
    condition = Condition(field, values, negated, protocol)
    return f"{name} {'!= ' * negated}{text}", condition


def _value(value: Any) -> str:
    """Write a value as nft's own language does: `22`, `20000-20100`, `10.0.0.0/8`, `@name`."""
    if not isinstance(value, dict):
        return str(value)
    ((kind, told),) = value.items()
    if kind == "elem":
        return _value(told["val"])
    if kind == "range":
        return f"{told[0]}-{told[1]}"
    return f"{told['addr']}/{told['len']}" if kind == "prefix" else f"@{kind}"


# --- rules to a verdict


class _Packet(NamedTuple):
    """First packet of a connection."""

    port: int
    interface: str  # over which it comes in; "lo": over which it goes out, too
    version: int


def _blocks(hooked: Chain, packet: _Packet, chains: Mapping[str, Chain]) -> Blocked | None:
    """Return what blocks a packet in a chain and those that it jumps to; a rule that only may block
    it counts if no rule accepts it."""
    table = hooked.name.rpartition(" ")[0]
    doubtful: list[Blocked] = []
    passed = False  # it may have been accepted by a rule with a condition that is not evaluated

    def through(chain: Chain, sure: bool, depth: int) -> Blocked | str:
        """Return what blocks it, "accept", or "" when the end was reached. `sure`: it certainly
        comes here."""
        nonlocal passed
        for rule in chain.rules:
            hits = [_hits(condition, packet, hooked.hook) for condition in rule.conditions]
            if False in hits or not rule.does:
                continue
            certain = sure and None not in hits
            verb, _, target = rule.does.partition(" ")
            if target:
                deep = depth == _DEEPEST
                end = "" if deep else through(chains[f"{table} {target}"], certain, depth + 1)
                if deep or (verb == "goto" and not certain):
                    passed = True
                elif certain and (end or verb == "goto"):
                    return end
            elif verb in ("drop", "reject"):
                found = Blocked(verb, f"nft: {chain.name}", rule.text, certain and not passed)
                if certain:
                    return found
                doubtful.append(found)
            elif certain:
                return "accept" if verb == "accept" else ""
            else:  # it may be accepted here, or go back
                passed = True
        return ""

    end = through(hooked, True, 0)
    if not end and hooked.policy == "drop":
        return Blocked("drop", f"nft: {hooked.name}", "policy drop", not passed)
    if isinstance(end, Blocked):
        return end
    return None if end else next(iter(doubtful), None)


def _hits(condition: Condition, packet: _Packet, hook: str) -> bool | None:
    """Tell whether a packet meets a condition; None when that is not known."""
    field, values, negated, protocol = condition
    if protocol in _OTHER_PROTOCOLS or protocol == ("ip6" if packet.version == 4 else "ip"):
        return False
    ours = {"new", "tcp", "6", "ip", "ipv4"}
    if packet.version == 6:
        ours = {"new", "tcp", "6", "ip6", "ipv6"}
    if any(value.startswith("@") for value in values):
        return None
    if field in ("iif", "iifname", "oif", "oifname"):
        comes = field.startswith("o") == (hook == "output")
        hit = comes and any(
            packet.interface.startswith(value[:-1])
            if value.endswith("*")
            else packet.interface == value
            for value in values
        )
    elif field == "dport":
        ends = [value.partition("-") for value in values]
        hit = any(int(low) <= packet.port <= int(high or low) for low, _, high in ends)
    elif field in ("state", "protocol", "l4proto", "nexthdr", "nfproto"):
        hit = not ours.isdisjoint(values)
    else:
        return None
    return hit != negated
