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

LOOK_TIMEOUT = 3.0
"""Seconds for all tools together. A rule set of a cluster node is listed in a tenth of one; a tool waits longer only for a lock that
another one holds (iptables' xtables.lock), and that may be for ever."""

_TOOLS = (("nft", "list", "ruleset"), ("iptables-save", "-t", "filter"), ("ip6tables-save", "-t", "filter"))

_SBIN = ("/usr/sbin", "/sbin")  # where root's tools are; a shell that became root by `su` has them not in PATH

_MOST_STEPS, _DEEPEST = 10_000, 64
"""Rules that one question goes through, and chains below each other. The kernel refuses circles of chains, and nft more than 16 below
each other; a listing that says otherwise is not what the kernel has."""

Matches = Literal["yes", "no", "unknown"]


class Rule(NamedTuple):
    """One rule, or the policy at the end of a chain."""

    text: str  # as its tool lists it
    matches: Mapping[str, str]  # what it asks for: "port", "interface", "state", "protocol"; "other" for what is not understood here
    does: str  # "accept", "drop", "reject", "return", "jump NAME", or "" for what only counts or logs


@dataclass(frozen=True, slots=True)
class Chain:
    """Rules in their order. `policy` is what happens at the end; "" for a chain that only others jump to."""

    tool: str
    name: str  # "ip filter INPUT"
    rules: tuple[Rule, ...]
    policy: str = ""


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

    def blocked(self, port: int, interface: str = "lo") -> Blocked | None:
        """What keeps a new TCP connection that comes in over `interface` from `port`; None when no rule that was read does.

        Over `lo` it is one from 127.0.0.1 or ::1; over any other its source is not known, and a rule that asks for it is doubtful.
        """
        doubtful: Blocked | None = None
        for chain in self.chains:
            if not chain.policy:
                continue
            found = _walk(self, chain, port, interface)
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
    """The chains of `iptables-save -t filter`. Only INPUT has a policy here: what passes through is none of ours."""
    policies: dict[str, str] = {}
    rules: dict[str, list[Rule]] = {}
    for line in text.splitlines():
        if line.startswith(":"):
            name, policy, *_ = line[1:].split()
            policies[name] = policy.lower() if name == "INPUT" and policy != "-" else ""
            rules.setdefault(name, [])
        elif line.startswith("-A "):
            words = shlex.split(line)
            rules.setdefault(words[1], []).append(_iptables_rule(line, words[2:]))
    return [Chain(tool, name, tuple(found), policies.get(name, "")) for name, found in rules.items()]


_WITHOUT_MEANING = {"-m", "--match", "--comment", "--reject-with", "--log-prefix", "--log-level"}


def _iptables_rule(line: str, words: Sequence[str]) -> Rule:
    asks: dict[str, str] = {}
    does = ""
    names = {
        "-p": "protocol",
        "--dport": "port",
        "--dports": "port",
        "-i": "interface",
        "--ctstate": "state",
        "--state": "state",
        "-s": "source",
    }
    i, negated = 0, False
    while i < len(words):
        word, value = words[i], words[i + 1] if i + 1 < len(words) else ""
        if word == "!":
            negated, i = True, i + 1
            continue
        if word in ("-j", "--jump", "-g", "--goto"):
            does = value.lower() if value in ("ACCEPT", "DROP", "REJECT", "RETURN") else "" if value == "LOG" else f"jump {value}"
        elif word in names:
            asks[names[word]] = ("!" if negated else "") + value
        elif word not in _WITHOUT_MEANING:
            asks["other"] = word
        i, negated = i + 2, False
    return Rule(line, asks, does)


_NFT_CHAIN = re.compile(r"^\s*chain (\S+) \{")
_NFT_TABLE = re.compile(r"^table (\S+) (\S+) \{")
_NFT_HOOK = re.compile(r"type filter hook (\w+) priority [^;]+;(?: policy (\w+);)?")


def nft_chains(text: str) -> list[Chain]:
    """The chains of `nft list ruleset`. Only those that hook into input have a policy here."""
    found: list[Chain] = []
    table = name = policy = ""
    rules: list[Rule] = []
    for line in text.splitlines():
        if opened := _NFT_TABLE.match(line):
            table = " ".join(opened.groups())
        elif opened := _NFT_CHAIN.match(line):
            name, policy, rules = opened[1], "", []
        elif name and line.strip() == "}":
            found.append(Chain("nft", f"{table} {name}", tuple(rules), policy))
            name = ""
        elif name and line.strip():
            if hook := _NFT_HOOK.search(line):
                policy = (hook[2] or "accept") if hook[1] == "input" else ""
            elif not line.lstrip().startswith("type "):
                rules.append(_nft_rule(line.strip()))
    return found


_NFT_VERDICT = re.compile(r"(?:^|\s)(accept|drop|reject|return|jump \S+|goto \S+)(?:\s.*)?$")
_NFT_SET = r"(!=\s*)?(\{[^}]*\}|\S+)"
_NFT_ASKS = (
    ("port", re.compile(rf"(?:tcp|th) dport {_NFT_SET}")),
    ("interface", re.compile(rf"iif(?:name)? {_NFT_SET}")),
    ("state", re.compile(rf"ct state (?!vmap){_NFT_SET}")),
    ("source", re.compile(rf"ip6? saddr {_NFT_SET}")),
    ("protocol", re.compile(rf"(?:meta l4proto|ip protocol|ip6 nexthdr) {_NFT_SET}")),
)
_NFT_NOTHING = re.compile(
    r'counter(?: packets \d+ bytes \d+)?|comment "[^"]*"|log(?: (?:prefix "[^"]*"|level \w+|flags \w+))*|# handle \d+'
)
_NFT_VMAP = re.compile(r"^ct state vmap \{([^}]*)\}$")
_OTHER_PROTOCOL = re.compile(r"^(?:udp|icmp|icmpv6|sctp|dccp|esp|ah|arp) ")


def _nft_rule(line: str) -> Rule:
    if by_state := _NFT_VMAP.match(line):
        entries = dict(entry.split(":", 1) for entry in by_state[1].replace(" ", "").split(",") if ":" in entry)
        return Rule(line, {"state": "new"} if "new" in entries else {"state": "established"}, entries.get("new", ""))
    rest = _NFT_NOTHING.sub(" ", line).strip()
    does = ""
    if verdict := _NFT_VERDICT.search(rest):
        does = verdict[1].replace("goto ", "jump ")
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


def _walk(firewall: Firewall, chain: Chain, port: int, interface: str) -> Blocked | None:
    """A new connection's way through a chain and those that it jumps to."""
    others = {one.name: one for one in firewall.chains if one.tool == chain.tool}
    steps, passed = 0, False  # `passed`: it may have been accepted by a rule that asks for something unknown
    doubtful: Blocked | None = None  # the first rule that may block it

    def through(here: Chain, sure: bool, depth: int) -> Blocked | str | None:
        """Blocked, "accept", or None when the end was reached. `sure`: it certainly comes here."""
        nonlocal steps, passed, doubtful
        for rule in here.rules:
            steps += 1
            matches = _matches(rule, port, interface)
            certain = sure and matches == "yes"
            if matches == "no" or not rule.does:
                continue
            if rule.does.startswith("jump "):
                there = others.get(_sibling(here, rule.does[5:]))
                if there is None or depth == _DEEPEST or steps > _MOST_STEPS:  # no chain: a module that may do anything
                    passed = True
                elif (end := through(there, certain, depth + 1)) is not None and certain:
                    return end
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


def _matches(rule: Rule, port: int, interface: str) -> Matches:
    answers: list[Matches] = []
    for name, value in rule.matches.items():
        negated, value = value.startswith("!"), value.removeprefix("!")
        asked = value.lower().split(",")
        hit: bool | None
        if name == "port":
            hit = any(_within(port, part) for part in asked)
        elif name == "interface":
            hit = any(interface == part or (part[-1:] in "+*" and interface.startswith(part[:-1])) for part in asked)
        elif name == "state":
            hit = "new" in asked
        elif name == "protocol":
            hit = bool({"tcp", "all", "6", "0"} & set(asked))
        else:
            hit = _from_here(asked) if name == "source" and interface == "lo" else None
        answers.append("unknown" if hit is None else "yes" if hit != negated else "no")
    return "no" if "no" in answers else "unknown" if "unknown" in answers else "yes"


def _from_here(networks: Sequence[str]) -> bool | None:
    """Whether a connection from 127.0.0.1 or ::1 comes from one of these networks; None when that cannot be said."""
    loopback = [ip_address("127.0.0.1"), ip_address("::1")]
    try:
        hits = [one in ip_network(network, strict=False) for network in networks for one in loopback]
    except ValueError:  # a set's name
        return None
    return any(hits)


def _within(port: int, part: str) -> bool:
    """`22`, `20000:20100` (iptables), `20000-20100` (nft); a service's name is no number and is not looked up."""
    ends = re.fullmatch(r"(\d+)(?:[:-](\d+))?", part)
    return bool(ends) and int(ends[1]) <= port <= int(ends[2] or ends[1])  # type: ignore[index]
