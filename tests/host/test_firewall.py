"""Firewall rules: listings as the tools print them, and the tools themselves as programs that
answer, refuse or hang.
"""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

import pytest

from rallypoint.host import firewall
from rallypoint.host.firewall import Chain, Condition, Firewall, Rule, nft_chains
from rallypoint.host.probe import Blocked

NFT = Path(__file__).parent / "nft"
"""Rules as they are written, and as `nft -j list ruleset` of 1.0.6 lists them."""


def listed(name: str) -> tuple[firewall.Chain, ...]:
    return nft_chains((NFT / f"{name}.json").read_text())


def test_what_comes_over_loopback_is_let_in() -> None:
    rules = Firewall(listed("filter"))
    assert [rules.blocked(port) for port in (22, 29500, 29501, 40000)] == [None] * 4


def test_nft_over_a_card() -> None:
    rules = Firewall(listed("filter"))
    assert (
        rules.blocked(22, "eth0")
        is rules.blocked(20100, "eth0")
        is rules.blocked(29504, "eth0")
        is None
    )
    assert rules.blocked(29500, "eth0") == Blocked(
        "drop", "nft: inet filter input", "tcp dport 29500 drop", True
    )
    assert rules.blocked(29501, "eth0") == Blocked(
        "drop", "nft: inet filter input", "policy drop", False
    )
    jumped = rules.blocked(29503, "eth0")
    assert jumped is not None
    assert (jumped.does, jumped.where, jumped.certain) == ("reject", "nft: inet filter late", True)
    assert rules.blocked(5353, "eth0") == Blocked(
        "drop", "nft: inet filter input", "policy drop", True
    ), "that rule is for UDP"


def test_what_one_table_lets_in_another_may_drop() -> None:
    rules = Firewall(listed("filter") + listed("guard"))
    dropped = rules.blocked(22, "eth0")
    assert dropped == Blocked(
        "drop", "nft: ip guard early", "iifname != lo tcp dport 22 drop", True
    )
    assert rules.blocked(22, "lo") is None


def filtering(*rules: Rule, late: tuple[Rule, ...] = ()) -> Firewall:
    """A chain that drops what none of its rules accepts, and one beside it."""
    return Firewall(
        (
            Chain("inet filter input", rules, "drop", "input"),
            Chain("inet filter late", late),
        )
    )


def test_a_policy_that_forgets_loopback() -> None:
    rules = filtering(Rule("tcp dport 22 accept", (Condition("dport", ("22",)),), "accept"))
    assert rules.blocked(29500) == Blocked("drop", "nft: inet filter input", "policy drop", True)
    rules = filtering(Rule("ip saddr accept", (Condition("saddr", ("127.0.0.0/8",)),), "accept"))
    assert rules.blocked(29500) == Blocked("drop", "nft: inet filter input", "policy drop", False)
    assert str(rules.blocked(29500)) == (
        "the firewall may drop it (nft: inet filter input: policy drop)"
    )


def test_chains_in_a_circle_end() -> None:
    circle = filtering(Rule("", (), "jump late"), late=(Rule("", (), "jump input"),))
    assert circle.blocked(29500) == Blocked("drop", "nft: inet filter input", "policy drop", False)


def test_named_sets_and_maps_of_nft_are_not_looked_up() -> None:
    rules = Firewall(listed("sets"))
    assert rules.blocked(29500) == Blocked(
        "drop", "nft: inet filter input", "tcp dport @bad drop", False
    )
    assert rules.blocked(29700) == Blocked(
        "drop", "nft: inet filter input", "tcp dport @bad drop", False
    )
    assert rules.blocked(80, "eth1") is not None


def test_rules_of_what_goes_out_and_of_what_has_not_come_in() -> None:
    rules = Firewall(listed("hooks"))
    assert rules.blocked(29500) == Blocked(
        "drop", "nft: inet filter early", "tcp dport 29500 drop", True
    )
    assert rules.blocked(29501) == Blocked(
        "reject", "nft: inet filter output", "oif lo tcp dport 29501 reject", True
    )
    assert rules.blocked(29502) is None, "what goes out has not come in over anything"
    assert rules.blocked(29503) is not None
    assert rules.blocked(29504) is rules.blocked(29505) is None
    assert rules.blocked(29501, "eth0") is rules.blocked(29503, "eth0") is None, (
        "what goes out is not what others send"
    )
    assert rules.blocked(40000, version=6) == Blocked(
        "drop", "nft: ip6 six input", "policy drop", True
    )
    assert rules.blocked(40000) is None


@pytest.mark.parametrize(("verb", "does"), [("jump", None), ("goto", "drop")])
def test_from_the_end_of_a_goto_no_way_leads_back(verb: str, does: str | None) -> None:
    rules = filtering(Rule("", (), f"{verb} late"), Rule("", (), "accept"))
    found = rules.blocked(29500)
    assert (found and found.does) == does


def test_no_rules() -> None:
    assert Firewall().blocked(29500) is None
    assert nft_chains("") == ()


# --- the tools
# --------------------------------------------------------------------------------------------------


def tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose programs alone are found, and this user taken for root."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(firewall, "_SBIN", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_tools_that_answer(tools: Path) -> None:
    tool(
        tools,
        "nft",
        f'[ "$*" = "-j list ruleset" ] && exec /bin/cat {shlex.quote(str(NFT))}/filter.json',
    )
    found = firewall.read_firewall()
    assert found.unread == ""
    assert found.blocked(29500, "eth0") is not None
    tool(tools, "nft", "echo nonsense")
    assert firewall.read_firewall().unread == "what nft lists is not understood"


def test_a_tool_that_is_not_there_that_refuses_and_that_hangs(tools: Path) -> None:
    assert firewall.read_firewall().unread == "nft is not installed"
    tool(tools, "nft", "echo 'Operation not permitted (you must be root)' >&2; exit 1")
    refused = "nft refused: Operation not permitted (you must be root)"
    assert firewall.read_firewall().unread == refused
    tool(tools, "nft", "exec /bin/sleep 60")
    assert firewall.read_firewall(0.3).unread == "nft gave no answer within 0.3 s"


def test_a_tool_whose_exit_status_another_has_taken(tools: Path) -> None:
    """The launcher looks in a thread, and its loop reaps every child that ends: a refusal read as
    "no rule drops it".
    """
    tool(tools, "nft", "echo 'Operation not permitted (you must be root)' >&2; exit 1")
    former = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # then the kernel reaps them, every time
    try:
        found = firewall.read_firewall()
    finally:
        signal.signal(signal.SIGCHLD, former)
    assert found.unread == "nft refused: Operation not permitted (you must be root)"


def test_without_root_the_rules_are_said_to_be_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert firewall.read_firewall() == Firewall(unread="only root may read the firewall's rules")


@pytest.mark.parametrize(
    ("rule", "four", "six"),
    [
        ("ip protocol tcp drop", "drop", None),
        ("ip protocol { icmp, udp } drop", None, None),
        ("ip protocol != tcp drop", None, None),
        ("ip protocol vmap { udp : accept, tcp : drop }", "drop", None),
        ("ip6 nexthdr tcp reject", None, "reject"),
        ("ip6 nexthdr vmap { tcp : drop, udp : accept }", None, "drop"),
        ("meta l4proto tcp drop", "drop", "drop"),
        ("meta l4proto { tcp, udp } th dport 29000-30000 drop", "drop", "drop"),
        ("meta l4proto != tcp drop", None, None),
        ("meta l4proto 6 drop", "drop", "drop"),
        ("meta nfproto ipv6 tcp dport 29500 drop", None, "drop"),
        ("meta protocol ip tcp dport 29500 drop", "drop", None),
        ("meta protocol vmap { ip : accept, ip6 : drop }", None, "drop"),
    ],
)
def test_protocols_in_a_table_for_both_versions(
    rule: str, four: str | None, six: str | None
) -> None:
    """`ip protocol` asks for a field of IPv4's header: an `inet` table sees IPv6 packets, too, and
    these do not match (nft(8)).
    """
    written = [line.strip() for line in (NFT / "protocols.nft").read_text().splitlines()]
    name = written[written.index(rule) - 2].split()[1]
    rules = Firewall(
        tuple(chain for chain in listed("protocols") if chain.name.endswith(f" {name}"))
    )
    for version, does in ((4, four), (6, six)):
        found = rules.blocked(29500, "eth0", version)
        assert (found and (found.does, found.where, found.certain)) == (
            does and (does, f"nft: inet filter {name}", True)
        ), version
