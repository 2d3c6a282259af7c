"""Firewall rules that drop or reject a connection to a port of this machine, as far as they can be
read.

They are read with `nft --json` and `iptables-save`, which only root may use, each with a deadline.
What was not read is said to be unread. A rule that asks for more than is known here (a named set, a
mark, a rate, a source) makes the verdict uncertain.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple

from rallypoint.clock import Clock
from rallypoint.host.ports import ephemeral_range

LOOK_TIMEOUT = 3.0
"""Seconds for all tools together. The rules of a cluster node are listed in a tenth of one; a tool
waits longer only for a lock that another one holds (iptables' xtables.lock), and that may be for
ever."""

# No `-t filter`: that would load the table's kernel module where nobody uses it, and leave out what
# drops in other tables.
_TOOLS = (("nft", "-j", "list", "ruleset"), ("iptables-save",), ("ip6tables-save",))

_HOOKS = ("prerouting", "input", "output")
"""Hooks at which a packet to this machine may be dropped; `output` only where it comes from here,
too."""

_SBIN = (
    "/usr/sbin",
    "/sbin",
)  # where root's tools are; a shell that became root by `su` has them not in PATH

_DEEPEST = 16  # chains below each other; nft refuses more

_VERDICTS = ("accept", "drop", "reject", "return")


class Ask(NamedTuple):
    """One condition of a rule."""

    # "port", "interface", "out", "state", "version", "protocol", "source", "destination"; "" for
    # any other
    what: str
    values: tuple[str, ...]
    negated: bool = False
    version: int = 0  # of IP, whose packets alone have that field; 0: both


class Rule(NamedTuple):
    """One rule of a chain."""

    text: str
    asks: tuple[Ask, ...]
    # "accept", "drop", "reject", "return", "jump NAME", "goto NAME" (no way leads back), or "" for
    # what only counts or logs
    does: str


@dataclass(frozen=True, slots=True)
class Chain:
    """Rules in their order. `policy` is what happens at the end; "" for a chain that only others
    jump to."""

    tool: str
    name: str  # "ip filter INPUT"
    rules: tuple[Rule, ...]
    policy: str = ""
    hook: str = ""  # one of `_HOOKS` where there is a policy

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions of IP whose packets come here."""
        if self.tool == "nft":
            return {"ip": (4,), "ip6": (6,), "inet": (4, 6)}.get(self.name.partition(" ")[0], ())
        return (6,) if self.tool == "ip6tables-save" else (4,)

    def sibling(self, name: str) -> tuple[str, str]:
        """Return tool and full name of another chain as a rule of this one means it: one of the
        same table."""
        table, space, _ = self.name.rpartition(" ")
        return self.tool, f"{table}{space}{name}"


class Blocked(NamedTuple):
    """Verdict on a connection that does not come through."""

    does: str  # "drop" (the caller waits) or "reject" (the caller is told)
    where: str  # "nft: inet filter input"
    rule: str  # the rule as it is listed
    certain: (
        bool  # False: a rule before it, or it itself, asks for something that is not known here
    )

    def __str__(self) -> str:
        said = f"{self.where}: {self.rule}"
        verb = "drops" if self.does == "drop" else "rejects"
        return (
            f"the firewall {verb} it ({said})"
            if self.certain
            else f"the firewall may {self.does} it ({said})"
        )


@dataclass(frozen=True, slots=True)
class Firewall:
    """Rules that were read, and what was not."""

    chains: tuple[Chain, ...] = ()
    read: tuple[str, ...] = ()  # the tools whose answer was read
    unread: tuple[
        str, ...
    ] = ()  # a sentence for each tool that gave none; empty: all rules were read

    def blocked(self, port: int, interface: str = "lo", version: int = 4) -> Blocked | None:
        """Return what keeps a new TCP connection to `port` that comes in over `interface`; None
        when no rule that was read does.

        Over `lo` it is one from 127.0.0.1 (::1) to itself, which must get out, too, and so must the
        answer to it; over any other its source is not known. `version`: of IP.
        """
        packets = [_Packet((port, port), interface, version, "new")]
        if interface == "lo":
            packets.append(_Packet(ephemeral_range(), interface, version, "established"))
        chains = {(chain.tool, chain.name): chain for chain in self.chains}
        found = [
            blocked
            for packet in packets
            for chain in self.chains
            if chain.policy
            and version in chain.versions
            and (chain.hook != "output" or interface == "lo")
            for blocked in _blocks(chain, packet, chains)
        ]
        return min(found, key=lambda one: not one.certain, default=None)


def read_firewall(timeout: float = LOOK_TIMEOUT) -> Firewall:
    """Read the rules of this network namespace, within `timeout` seconds; raises nothing."""
    if os.geteuid() != 0:
        return Firewall(unread=("only root may read the firewall's rules",))
    clock = Clock()
    chains: list[Chain] = []
    read, unread = [], []
    for tool, *arguments in _TOOLS:
        path = shutil.which(
            tool, path=os.pathsep.join((os.environ.get("PATH", os.defpath), *_SBIN))
        )
        if path is None:
            unread.append(f"{tool} is not installed")
            continue
        try:
            done = subprocess.run(
                [path, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=max(0.0, timeout - clock.elapsed()),
                check=False,
                env={**os.environ, "LC_ALL": "C"},
            )
            # A launcher that reaps every child takes the exit status, which is 0 then: what was
            # said counts, too.
            if done.returncode or (done.stderr and not done.stdout):
                said = done.stderr.decode("utf-8", "replace").strip().splitlines()
                unread.append(
                    f"{tool} refused: {said[0] if said else f'exit status {done.returncode}'}"
                )
                continue
            text = done.stdout.decode("utf-8", "replace")
            chains += nft_chains(text) if tool == "nft" else iptables_chains(text, tool)
            read.append(tool)
        except subprocess.TimeoutExpired:
            unread.append(f"{tool} gave no answer within {timeout:g} s")
        except OSError as error:
            unread.append(f"{tool} cannot be run: {error.strerror}")
        except (ValueError, LookupError, TypeError):
            unread.append(f"what {tool} lists is not understood")
    if "nft" in read or {"iptables-save", "ip6tables-save"} <= set(read):
        # Either tool alone may be all that a machine has: it has no rules of the other kind then.
        unread = [line for line in unread if not line.endswith("is not installed")]
    return Firewall(tuple(chains), tuple(read), tuple(unread))


# --- iptables-save
# -----------------------------------------------------------------------------------

_IPTABLES_ASKS = {
    "-p": "protocol", "--dport": "port", "--dports": "port", "-i": "interface", "-o": "out", "--ctstate": "state",
    "--state": "state", "-s": "source", "-d": "destination",
}  # fmt: skip
_WITHOUT_MEANING = {"-m", "--match", "--comment", "--reject-with", "--log-prefix", "--log-level"}


def iptables_chains(text: str, tool: str = "iptables-save") -> list[Chain]:
    """Return the chains of `iptables-save`, those of the table filter by their bare names."""
    found: list[Chain] = []
    table = ""
    policies: dict[str, str] = {}
    rules: dict[str, list[Rule]] = {}
    for line in text.splitlines():
        if line.startswith("*"):
            table, policies, rules = line[1:].strip(), {}, {}
        elif line.startswith(":"):
            name, policies[name], *_ = line[1:].split()
            rules[name] = []
        elif line.startswith("-A "):
            _, name, *words = shlex.split(line)
            rules.setdefault(name, []).append(_iptables_rule(line, words))
        elif line == "COMMIT":
            for name, of_chain in rules.items():
                hooked = name.lower() in _HOOKS and table != "nat"
                policy, hook = (policies[name].lower(), name.lower()) if hooked else ("", "")
                found.append(
                    Chain(
                        tool,
                        name if table == "filter" else f"{table} {name}",
                        tuple(of_chain),
                        policy,
                        hook,
                    )
                )
    return found


def _iptables_rule(line: str, words: Sequence[str]) -> Rule:
    asks, does, negated = [], "", False
    following = iter(words)
    for word in following:
        if word == "!":
            negated = True
            continue
        value = next(following, "")
        if word in ("-g", "--goto"):
            does = f"goto {value}"
        elif word in ("-j", "--jump"):
            does = (
                value.lower()
                if value.lower() in _VERDICTS
                else ""
                if value == "LOG"
                else f"jump {value}"
            )
        elif word not in _WITHOUT_MEANING:
            asks.append(
                Ask(
                    _IPTABLES_ASKS.get(word, ""),
                    tuple(
                        value.replace(":", "-").split(",") if "port" in word else value.split(",")
                    ),
                    negated,
                )
            )
        negated = False
    return Rule(line, tuple(asks), does)


# --- nft
# ---------------------------------------------------------------------------------------------

_NFT_ASKS = {
    "tcp dport": ("port", 0), "th dport": ("port", 0), "iif": ("interface", 0), "iifname": ("interface", 0), "oif": ("out", 0),
    "oifname": ("out", 0), "ct state": ("state", 0), "ip saddr": ("source", 4), "ip6 saddr": ("source", 6),
    "ip daddr": ("destination", 4), "ip6 daddr": ("destination", 6), "nfproto": ("version", 0), "protocol": ("version", 0),
    "l4proto": ("protocol", 0), "ip protocol": ("protocol", 4), "ip6 nexthdr": ("protocol", 6),
}  # fmt: skip
"""Conditions by the words for them, with the version of IP whose header has the field: packets of
the other have none, and do not match (nft(8), implicit dependencies)."""

_OTHER_PROTOCOLS = ("udp", "icmp", "icmpv6", "sctp", "dccp", "esp", "ah", "arp")


def nft_chains(text: str) -> list[Chain]:
    """Return the chains of `nft -j list ruleset` (libnftables-json(5))."""
    listed = json.loads(text)["nftables"] if text.strip() else []
    rules: dict[str, list[Rule]] = {}
    chains = {}
    for entry in listed:
        for kind, told in entry.items():
            if kind == "chain":
                chains[f"{told['family']} {told['table']} {told['name']}"] = told
            elif kind == "rule":
                rules.setdefault(f"{told['family']} {told['table']} {told['chain']}", []).extend(
                    _nft_rules(told["expr"])
                )
    found = []
    for name, told in chains.items():
        hook = told.get("hook", "") if told.get("type") != "nat" else ""
        policy, hook = (told.get("policy", "accept"), hook) if hook in _HOOKS else ("", "")
        found.append(Chain("nft", name, tuple(rules.get(name, ())), policy, hook))
    return found


def _nft_rules(expressions: Sequence[dict[str, Any]]) -> Iterator[Rule]:
    """Yield one rule, or one for each entry of its verdict map."""
    words: list[str] = []
    asks: list[Ask] = []
    for expression in expressions:
        for kind, told in expression.items():
            if kind == "match":
                label, ask = _nft_ask(told["left"], told["right"], told["op"] == "!=")
                words.append(label)
                asks.append(ask)
            elif kind == "vmap" and isinstance(told["data"], dict):
                for key, verdict in told["data"]["set"]:
                    label, ask = _nft_ask(told["key"], key)
                    does = _nft_verdict(verdict)
                    yield Rule(" ".join((*words, label, does)), (*asks, ask), does)
            elif kind == "vmap":  # a named map may drop
                yield Rule(" ".join((*words, "vmap", told["data"])), (*asks, Ask("", ())), "drop")
            elif does := _nft_verdict(expression):
                yield Rule(" ".join((*words, does)), tuple(asks), does)
            elif kind not in ("counter", "log"):
                asks.append(Ask("", ()))


def _nft_verdict(expression: dict[str, Any]) -> str:
    for kind, told in expression.items():
        if kind in ("jump", "goto"):
            return f"{kind} {told['target']}"
        if kind in _VERDICTS:
            return kind
    return ""


def _nft_ask(left: dict[str, Any], right: Any, negated: bool = False) -> tuple[str, Ask]:
    """Return a condition in words, and as it is asked here."""
    ((kind, told),) = left.items()
    field = told.get("field") or told.get("key") if isinstance(told, dict) else None
    name = (
        f"{told['protocol']} {field}"
        if kind == "payload" and "protocol" in told
        else f"ct {field}"
        if kind == "ct"
        else str(field or kind)
    )
    listed = (
        right["set"]
        if isinstance(right, dict) and "set" in right
        else right
        if isinstance(right, list)
        else [right]
    )
    values = tuple(map(_nft_value, listed))
    text = f"{name} {'!= ' * negated}{'{ ' + ', '.join(values) + ' }' if len(values) > 1 else values[0]}"
    if name.startswith(tuple(f"{protocol} " for protocol in _OTHER_PROTOCOLS)):
        return text, Ask("protocol", (name.split()[0],))
    what, version = _NFT_ASKS.get(name, ("", 0))
    return text, Ask(what, values, negated, version)


def _nft_value(value: Any) -> str:
    """Write a value as `nft` does in its own language: `22`, `20000-20100`, `10.0.0.0/8`,
    `@name`."""
    if isinstance(value, dict):
        ((kind, told),) = value.items()
        if kind == "elem":
            return _nft_value(told["val"])
        if kind == "range":
            return f"{told[0]}-{told[1]}"
        return f"{told['addr']}/{told['len']}" if kind == "prefix" else f"@{kind}"
    return str(value)


# --- rules to a verdict
# ------------------------------------------------------------------------------


class _Packet(NamedTuple):
    """First packet of a connection, or the answer to it."""

    ports: tuple[int, int]  # the one that it goes to, or both ends of the range of which it is
    interface: str  # over which it comes in; "lo": over which it goes out, too
    version: int
    state: str  # conntrack's


def _blocks(hooked: Chain, packet: _Packet, chains: dict[tuple[str, str], Chain]) -> list[Blocked]:
    """Return what blocks a packet in a chain and those that it jumps to; what only may block it
    counts if no rule accepts it."""
    doubtful: list[Blocked] = []
    passed = False  # it may have been accepted by a rule that asks for something unknown

    def through(chain: Chain, sure: bool, depth: int) -> Blocked | str:
        """Return what blocks it, "accept", or "" when the end was reached. `sure`: it certainly
        comes here."""
        nonlocal passed
        for rule in chain.rules:
            matches = _matches(rule, packet, hooked.hook)
            if matches is False or not rule.does:
                continue
            certain = sure and matches is True
            verb, _, target = rule.does.partition(" ")
            if target:
                there = chains.get(chain.sibling(target))
                end = (
                    through(there, certain, depth + 1)
                    if there is not None and depth < _DEEPEST
                    else ""
                )
                if there is None or depth == _DEEPEST or (verb == "goto" and not certain):
                    passed = True  # no chain: a module that may do anything
                elif certain and (end or verb == "goto"):
                    return end
            elif verb in ("drop", "reject"):
                found = Blocked(
                    verb, f"{chain.tool}: {chain.name}", rule.text, certain and not passed
                )
                if certain:
                    return found
                doubtful.append(found)
            elif certain:
                return "accept" if verb == "accept" else ""
            else:  # it may be accepted here, or go back
                passed = True
        return ""

    end = through(hooked, True, 0)
    if not end and hooked.policy in ("drop", "reject"):
        end = Blocked(
            hooked.policy, f"{hooked.tool}: {hooked.name}", f"policy {hooked.policy}", not passed
        )
    return [end] if isinstance(end, Blocked) else [] if end else doubtful[:1]


def _matches(rule: Rule, packet: _Packet, hook: str) -> bool | None:
    """Tell whether a rule is for this packet; None when that is not known."""
    hits = [_hits(ask, packet, hook) for ask in rule.asks]
    return False if False in hits else None if None in hits else True


def _hits(ask: Ask, packet: _Packet, hook: str) -> bool | None:
    if ask.version not in (0, packet.version):
        return False
    hit: bool | None = None
    values = {value.lower() for value in ask.values}
    if ask.what in ("interface", "out"):
        comes = (ask.what == "out") == (hook == "output")
        named = any(
            value[-1] in "+*" and packet.interface.startswith(value[:-1]) for value in ask.values
        )
        hit = comes and (named or packet.interface in ask.values)
    elif any(value.startswith("@") for value in values):
        hit = None
    elif ask.what == "port":
        hit = _among(packet.ports, values)
    elif ask.what == "state":
        hit = packet.state in values
    elif ask.what == "protocol":
        hit = not values.isdisjoint(("tcp", "all", "6", "0"))
    elif ask.what == "version":
        hit = not values.isdisjoint(("ipv4", "ip") if packet.version == 4 else ("ipv6", "ip6"))
    elif ask.what in ("source", "destination") and packet.interface == "lo":
        hit = _from_here(ask.values, packet.version)
    return None if hit is None else hit != ask.negated


def _from_here(networks: Sequence[str], version: int) -> bool | None:
    """Tell whether 127.0.0.1 (::1) is in one of these networks; None when that cannot be said."""
    loopback = ip_address("127.0.0.1" if version == 4 else "::1")
    try:
        return any(loopback in ip_network(network, strict=False) for network in networks)
    except ValueError:  # a range
        return None


def _among(ports: tuple[int, int], values: set[str]) -> bool | None:
    """Tell whether a port is one of `22`, `20000-20100`; None for a service's name, and where it
    depends on the port of a range."""
    hit: bool | None = False
    for value in values:
        low, _, high = value.partition("-")
        if not low.isdigit() or not (high or low).isdigit():
            hit = None
        elif int(low) <= ports[0] and ports[1] <= int(high or low):
            return True
        elif int(low) <= ports[1] and ports[0] <= int(high or low):
            hit = None
    return hit
