"""Which firewall rule drops or rejects a connection to a port of this machine, as far as the rules can be read.

They are read with the tools `nft` and `iptables-save`, which only root may use, each with a deadline. What was not read is said to be
unread, and a rule that asks for more than is known here (a source, a mark, a rate) makes the verdict uncertain: never a guess.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Literal, NamedTuple

from rallypoint.clock import Clock
from rallypoint.host.ports import ephemeral_range

LOOK_TIMEOUT = 3.0
"""Seconds for all tools together. A rule set of a cluster node is listed in a tenth of one; a tool waits longer only for a lock that
another one holds (iptables' xtables.lock), and that may be for ever."""

# No `-t filter`: that would load the table's kernel module where nobody uses it, and leave out what drops in other tables.
_TOOLS = (("nft", "list", "ruleset"), ("iptables-save",), ("ip6tables-save",))

_HOOKS = ("prerouting", "input", "output")
"""Where a packet between processes of this machine, or from outside to one of them, may be dropped; `output` for the former alone. The
rest is for what passes through, or (postrouting, nat) drops nothing by custom."""

_SBIN = ("/usr/sbin", "/sbin")  # where root's tools are; a shell that became root by `su` has them not in PATH

_MOST_STEPS, _DEEPEST = 10_000, 64
"""Rules that one question goes through, and chains below each other. The kernel refuses circles of chains, and nft more than 16 below
each other; a listing that says otherwise is not what the kernel has."""

Matches = Literal["yes", "no", "unknown"]


class Rule(NamedTuple):
    """One rule, or the policy at the end of a chain."""

    text: str  # as its tool lists it
    matches: Mapping[str, str]  # by what it asks for (see `_matches`); "other" is what is not understood here
    does: str  # "accept", "drop", "reject", "return", "jump NAME", "goto NAME" (no way leads back), or "" for what only counts or logs


@dataclass(frozen=True, slots=True)
class Chain:
    """Rules in their order. `policy` is what happens at the end; "" for a chain that only others jump to."""

    tool: str
    name: str  # "ip filter INPUT"
    rules: tuple[Rule, ...]
    policy: str = ""
    hook: str = ""  # one of `_HOOKS` where there is a policy

    @property
    def versions(self) -> tuple[int, ...]:
        """Of IP, whose packets come here."""
        if self.tool == "nft":
            return {"ip": (4,), "ip6": (6,), "inet": (4, 6)}.get(self.name.partition(" ")[0], ())
        return (6,) if self.tool == "ip6tables-save" else (4,)


class Blocked(NamedTuple):
    """The verdict on a connection that does not come through."""

    does: str  # "drop" (the caller waits) or "reject" (the caller is told)
    where: str  # "nft: inet filter input"
    rule: str  # the rule as it is listed
    certain: bool  # False: a rule before it, or it itself, asks for something that is not known here

    def __str__(self) -> str:
        said = f"{self.where}: {self.rule}"
        verb = "drops" if self.does == "drop" else "rejects"
        return f"the firewall {verb} it ({said})" if self.certain else f"the firewall may {self.does} it ({said})"


@dataclass(frozen=True, slots=True)
class Firewall:
    """What was read, and what was not."""

    chains: tuple[Chain, ...] = ()
    read: tuple[str, ...] = ()  # the tools whose answer was read
    unread: tuple[str, ...] = field(default=())  # a sentence for each tool that gave none; empty: all rules were read

    def blocked(self, port: int, interface: str = "lo", version: int = 4) -> Blocked | None:
        """What keeps a new TCP connection over IPv4 (`version` 6: IPv6) that comes in over `interface` from `port`; None when no rule
        that was read does.

        Over `lo` it is one from 127.0.0.1 (::1) to itself, which must get out, too, and so must the answer to it; over any other its
        source is not known, and a rule that asks for it is doubtful.
        """
        packets = [_Packet((port, port), interface, version, "new")]
        if interface == "lo":
            packets.append(_Packet(ephemeral_range(), interface, version, "established"))
        doubtful: Blocked | None = None
        for packet in packets:
            for chain in self.chains:
                if not chain.policy or version not in chain.versions or (chain.hook == "output" and interface != "lo"):
                    continue
                found = _walk(self, chain, packet)
                if found is not None and found.certain:
                    return found
                doubtful = doubtful or found
        return doubtful


def look(timeout: float = LOOK_TIMEOUT) -> Firewall:
    """Read the rules of this network namespace, within `timeout` seconds; raises nothing."""
    if os.geteuid() != 0:
        return Firewall(unread=("only root may read the firewall's rules",))
    clock = Clock()
    chains: list[Chain] = []
    read, unread = [], []
    for tool, *arguments in _TOOLS:
        path = shutil.which(tool, path=os.pathsep.join((os.environ.get("PATH", os.defpath), *_SBIN)))
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
        except subprocess.TimeoutExpired:
            unread.append(f"{tool} gave no answer within {timeout:g} s")
            continue
        except OSError as error:
            unread.append(f"{tool} cannot be run: {error.strerror}")
            continue
        # Who ignores SIGCHLD, or reaps whatever child of his has ended (a launcher), takes the exit status: then it is told as 0.
        if done.returncode or (done.stderr and not done.stdout):
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            unread.append(f"{tool} refused: {said[0] if said else f'exit status {done.returncode}'}")
            continue
        text = done.stdout.decode("utf-8", "replace")
        chains += nft_chains(text) if tool == "nft" else iptables_chains(text, tool)
        read.append(tool)
    if "nft" in read or {"iptables-save", "ip6tables-save"} <= set(read):
        # Either tool alone may be all that a machine has: it has no rules of the other kind then.
        unread = [line for line in unread if not line.endswith("is not installed")]
    return Firewall(tuple(chains), tuple(read), tuple(unread))


# --- listings to rules ---------------------------------------------------------------------------------------------------


def iptables_chains(text: str, tool: str = "iptables-save") -> list[Chain]:
    """The chains of `iptables-save`, those of the table filter by their bare names. Only those that hook in where `_HOOKS` says have a
    policy here."""
    found: list[Chain] = []
    table = "filter"
    policies: dict[str, str] = {}
    rules: dict[str, list[Rule]] = {}
    for line in [*text.splitlines(), "COMMIT"]:
        if line.startswith("*"):
            table = line[1:].strip()
        elif line.startswith(":"):
            name, policy, *_ = line[1:].split()
            policies[name] = policy.lower() if name.lower() in _HOOKS and policy != "-" and table != "nat" else ""
            rules.setdefault(name, [])
        elif line.startswith("-A "):
            words = shlex.split(line)
            rules.setdefault(words[1], []).append(_iptables_rule(line, words[2:]))
        elif line == "COMMIT":
            for name, those in rules.items():
                policy = policies.get(name, "")
                whole = name if table == "filter" else f"{table} {name}"
                found.append(Chain(tool, whole, tuple(those), policy, name.lower() if policy else ""))
            policies, rules = {}, {}
    return found


_WITHOUT_MEANING = {"-m", "--match", "--comment", "--reject-with", "--log-prefix", "--log-level"}


def _iptables_rule(line: str, words: Sequence[str]) -> Rule:
    asks: dict[str, str] = {}
    does = ""
    names = {
        "-p": "protocol",
        "--dport": "port",
        "--dports": "port",
        "-i": "interface",
        "-o": "out",
        "--ctstate": "state",
        "--state": "state",
        "-s": "source",
        "-d": "destination",
    }
    i, negated = 0, False
    while i < len(words):
        word, value = words[i], words[i + 1] if i + 1 < len(words) else ""
        if word == "!":
            negated, i = True, i + 1
            continue
        if word in ("-g", "--goto"):
            does = f"goto {value}"
        elif word in ("-j", "--jump"):
            does = value.lower() if value in ("ACCEPT", "DROP", "REJECT", "RETURN") else "" if value == "LOG" else f"jump {value}"
        elif word in names:
            asks[names[word]] = ("!" if negated else "") + value
        elif word not in _WITHOUT_MEANING:
            asks["other"] = word
        i, negated = i + 2, False
    return Rule(line, asks, does)


_NFT_CHAIN = re.compile(r"^\s*chain (\S+) \{")
_NFT_TABLE = re.compile(r"^table (\S+) (\S+) \{")
_NFT_HOOK = re.compile(r"type (\w+) hook (\w+)(?: device \S+)? priority [^;]+;(?: policy (\w+);)?")
_NFT_NAMED = re.compile(r"^\t(?:set|map) (\S+) \{\n(.*?)^\t\}", re.MULTILINE | re.DOTALL)
_NFT_TYPE = re.compile(r"^\s*type (inet_service|ipv4_addr|ipv6_addr|ifname|inet_proto)(?: : verdict)?$", re.MULTILINE)
_NFT_ELEMENTS = re.compile(r"elements = \{(.*?)\}", re.DOTALL)


def nft_chains(text: str) -> list[Chain]:
    """The chains of `nft list ruleset`. Only those that hook in where `_HOOKS` says have a policy here."""
    found: list[Chain] = []
    table = name = policy = hook = ""
    sets: Mapping[str, str] = {}
    rules: list[Rule] = []
    tables = {" ".join(opened.groups()): part for part in re.split(r"(?m)^(?=table )", text) if (opened := _NFT_TABLE.match(part))}
    for line in text.splitlines():
        if opened := _NFT_TABLE.match(line):
            table = " ".join(opened.groups())
            sets = _nft_sets(tables[table])
        elif opened := _NFT_CHAIN.match(line):
            name, policy, hook, rules = opened[1], "", "", []
        elif name and line.strip() == "}":
            found.append(Chain("nft", f"{table} {name}", tuple(rules), policy, hook))
            name = ""
        elif name and line.strip():
            if hooked := _NFT_HOOK.search(line):
                if hooked[1] != "nat" and hooked[2] in _HOOKS:
                    policy, hook = hooked[3] or "accept", hooked[2]
            elif not line.lstrip().startswith("type "):
                rules += _nft_rules(line.strip(), sets)
    return found


def _nft_sets(table: str) -> dict[str, str]:
    """The named sets and maps of a table by name, written as a rule has them: `{ 22, 29500-29600 }`. Those that rules fill, and those of
    several things at once, are left out: what is in them is not known."""
    found = {}
    for name, body in _NFT_NAMED.findall(table):
        if not _NFT_TYPE.search(body) or re.search(r"^\s*flags [^\n]*(dynamic|timeout)", body, re.MULTILINE):
            continue
        elements = _NFT_ELEMENTS.search(body)
        listed = [" ".join(one.split()) for one in elements[1].split(",")] if elements else []
        plain = [re.sub(r" (?:counter packets \d+ bytes \d+|comment \"[^\"]*\")", "", one) for one in listed]
        found[name] = "{ " + ", ".join(plain) + " }"
    return found


_NFT_VERDICT = re.compile(r"(?:^|\s)(accept|drop|reject|return|jump \S+|goto \S+)(?:\s.*)?$")
_NFT_SET = r"(!=\s*)?(\{[^}]*\}|\S+)"
_NFT_ASKS = (
    ("port", re.compile(rf"(?:tcp|th) dport {_NFT_SET}")),
    ("interface", re.compile(rf"iif(?:name)? {_NFT_SET}")),
    ("out", re.compile(rf"oif(?:name)? {_NFT_SET}")),
    ("state", re.compile(rf"ct state {_NFT_SET}")),
    ("source4", re.compile(rf"\bip saddr {_NFT_SET}")),
    ("source6", re.compile(rf"\bip6 saddr {_NFT_SET}")),
    ("destination4", re.compile(rf"\bip daddr {_NFT_SET}")),
    ("destination6", re.compile(rf"\bip6 daddr {_NFT_SET}")),
    ("version", re.compile(rf"meta (?:nfproto|protocol) {_NFT_SET}")),
    ("protocol", re.compile(rf"meta l4proto {_NFT_SET}")),
    ("protocol4", re.compile(rf"\bip protocol {_NFT_SET}")),  # a field of that version's header: in a table for both, packets of the other
    ("protocol6", re.compile(rf"\bip6 nexthdr {_NFT_SET}")),  # have none, and do not match (nft(8), implicit dependencies)
)
_NFT_NOTHING = re.compile(
    r'counter(?: packets \d+ bytes \d+)?|comment "[^"]*"|log(?: (?:prefix "[^"]*"|level \w+|flags \w+))*|# handle \d+'
)
_NFT_VMAP = re.compile(
    r"(?P<before>.*?)(?P<what>(?:tcp|th) dport|iif(?:name)?|oif(?:name)?|ct state|ip6? [sd]addr|meta (?:l4proto|nfproto|protocol)"
    r"|ip protocol|ip6 nexthdr)"
    r" vmap (?P<entries>\{[^}]*\}|@\S+)"
)
_OTHER_PROTOCOL = re.compile(r"^(?:udp|icmp|icmpv6|sctp|dccp|esp|ah|arp) ")


def _nft_rules(line: str, sets: Mapping[str, str]) -> list[Rule]:
    """A line as rules: one, or one for each entry of its verdict map."""
    plain = re.sub(r"@(\S+)", lambda named: sets.get(named[1], named[0]), line)
    if " . " in plain:  # several things at once: not understood here
        blocks = re.search(r"\b(drop|reject)\b", plain)
        return [Rule(line, {"other": line}, blocks[1] if blocks else "")]
    by_key = _NFT_VMAP.match(plain)
    if by_key is None:
        return [_nft_rule(line, plain)]
    if by_key["entries"].startswith("@"):
        return [Rule(line, {"other": line}, "drop")]  # what is in it is not known: it may drop
    entries = [entry.rpartition(" : ") for entry in by_key["entries"].strip("{} ").split(",") if " : " in entry]
    return [_nft_rule(line, f"{by_key['before']}{by_key['what']} {key.strip()} {verdict.strip()}") for key, _, verdict in entries]


def _nft_rule(line: str, plain: str) -> Rule:
    """`plain`: the line with the sets that it names written out."""
    rest = _NFT_NOTHING.sub(" ", plain).strip()
    does = ""
    if verdict := _NFT_VERDICT.search(rest):
        does = verdict[1]
        rest = rest[: verdict.start()].strip()
    asks: dict[str, str] = {}
    if _OTHER_PROTOCOL.match(rest):
        return Rule(line, {"protocol": rest.split()[0]}, does)
    for name, pattern in _NFT_ASKS:
        if asked := pattern.search(rest):
            value = asked[2].strip("{} ").replace('"', "").replace(" ", "")
            asks[name] = ("!" if asked[1] else "") + value
            rest = (rest[: asked.start()] + rest[asked.end() :]).strip()
    if rest:
        asks["other"] = rest
    return Rule(line, asks, does)


# --- rules to a verdict --------------------------------------------------------------------------------------------------


class _Packet(NamedTuple):
    """The first packet of a connection, or the answer to it."""

    ports: tuple[int, int]  # the one that it goes to, or both ends of the range of which it is
    interface: str  # over which it comes in; "lo": over which it goes out, too
    version: int
    state: str  # conntrack's


def _walk(firewall: Firewall, chain: Chain, packet: _Packet) -> Blocked | None:
    """A packet's way through a chain and those that it jumps to."""
    others = {one.name: one for one in firewall.chains if one.tool == chain.tool}
    steps, passed = 0, False  # `passed`: it may have been accepted by a rule that asks for something unknown
    doubtful: Blocked | None = None  # the first rule that may block it

    def through(here: Chain, sure: bool, depth: int) -> Blocked | str | None:
        """Blocked, "accept", or None when the end was reached. `sure`: it certainly comes here."""
        nonlocal steps, passed, doubtful
        for rule in here.rules:
            steps += 1
            matches = _matches(rule, packet, chain.hook)
            certain = sure and matches == "yes"
            if matches == "no" or not rule.does:
                continue
            if rule.does.startswith(("jump ", "goto ")):
                there = others.get(_sibling(here, rule.does[5:]))
                if there is None or depth == _DEEPEST or steps > _MOST_STEPS:  # no chain: a module that may do anything
                    passed = True
                else:
                    end = through(there, certain, depth + 1)
                    if certain and (end is not None or rule.does.startswith("goto ")):
                        return end
                    passed = passed or rule.does.startswith("goto ")  # if it went there it is past what follows here
            elif rule.does in ("drop", "reject"):
                found = Blocked(rule.does, f"{here.tool}: {here.name}", rule.text, certain and not passed)
                if certain:
                    return found
                doubtful = doubtful or found
            elif certain:
                return rule.does if rule.does == "accept" else None
            else:  # it may be accepted here, or go back
                passed = True
        return None

    end = through(chain, True, 0)
    if isinstance(end, Blocked):
        return end
    if end is None and chain.policy in ("drop", "reject"):
        return Blocked(chain.policy, f"{chain.tool}: {chain.name}", f"policy {chain.policy}", not passed)
    return doubtful if end is None else None


def _sibling(chain: Chain, name: str) -> str:
    """The name of another chain as this one's rules mean it: of nft's, one of the same table."""
    table, _, _ = chain.name.rpartition(" ")
    return f"{table} {name}" if table else name


def _matches(rule: Rule, packet: _Packet, hook: str) -> Matches:
    answers: list[Matches] = []
    for name, value in rule.matches.items():
        negated, value = value.startswith("!"), value.removeprefix("!")
        asked = value.lower().split(",")
        what, of_version = (name[:-1], int(name[-1])) if name[-1] in "46" else (name, packet.version)
        hit: bool | None
        if of_version != packet.version:
            answers.append("no")
            continue
        if name == "port":
            hit = _among(packet.ports, asked)
        elif name == "interface":
            hit = hook != "output" and _named(packet.interface, asked)
        elif name == "out":
            hit = hook == "output" and _named(packet.interface, asked)
        elif name == "state":
            hit = packet.state in asked
        elif what == "protocol":
            hit = bool({"tcp", "all", "6", "0"} & set(asked))
        elif name == "version":
            hit = bool({"ipv4", "ip"} & set(asked) if packet.version == 4 else {"ipv6", "ip6"} & set(asked))
        elif what in ("source", "destination") and packet.interface == "lo":
            hit = _from_here(asked, packet.version)
        else:
            hit = None
        answers.append("unknown" if hit is None else "yes" if hit != negated else "no")
    return "no" if "no" in answers else "unknown" if "unknown" in answers else "yes"


def _named(interface: str, asked: Sequence[str]) -> bool | None:
    """Whether an interface is one of these; None where a set is named whose content is not known."""
    if any(part.startswith("@") for part in asked):
        return None
    return any(interface == part or (part[-1:] in "+*" and interface.startswith(part[:-1])) for part in asked if part)


def _from_here(networks: Sequence[str], version: int) -> bool | None:
    """Whether 127.0.0.1 (::1) is in one of these networks; None when that cannot be said."""
    loopback = ip_address("127.0.0.1" if version == 4 else "::1")
    try:
        return any(loopback in ip_network(network, strict=False) for network in networks)
    except ValueError:  # a set's name, a range
        return None


def _among(ports: tuple[int, int], asked: Sequence[str]) -> bool | None:
    """Whether the port is one of these; None when that cannot be said."""
    hits = [_within(ports, part) for part in asked if part]
    return True if True in hits else None if None in hits else False


def _within(ports: tuple[int, int], part: str) -> bool | None:
    """`22`, `20000:20100` (iptables), `20000-20100` (nft); None for a set's name, or a service's, which is not looked up, and where it
    depends on which port of the range it is."""
    ends = re.fullmatch(r"(\d+)(?:[:-](\d+))?", part)
    if not ends:
        return None
    low, high = int(ends[1]), int(ends[2] or ends[1])
    if low <= ports[0] and ports[1] <= high:
        return True
    return False if ports[1] < low or high < ports[0] else None
