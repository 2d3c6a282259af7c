"""Members of a job on real nodes: when a fault of one is known to the lead, and to itself.

The leases are those of a job's agents: two seconds.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ..python_path import WITHOUT_TORCH, python_path
from .netns import Cluster, Node, Process

TTL = 2.0

ORPHAN = 0.5
"""Seconds after which a member whose connections have ended is taken for dead."""

LATE = 20.0
"""Seconds that something may be later on a busy machine."""

LONG = 90.0
"""Lease where the end of a connection is to be noticed, and not that of the lease."""

MEMBER = Path(__file__).parent / "scripts" / "member.py"


class Members:
    """A member on each node; node 0 has the lead as well."""

    def __init__(self, cluster: Cluster, ttl: float = TTL) -> None:
        self.cluster = cluster
        secret = secrets.token_hex(32)
        path = {"PYTHONPATH": python_path(WITHOUT_TORCH)}
        self.each: list[Process] = []
        for node in cluster.nodes:
            role = [] if self.each else ["lead"]
            command = [sys.executable, str(MEMBER), cluster[0].address, "29500", secret, str(ttl)]
            self.each.append(node.start([*command, *role], env=path, warm=True))
        for node in cluster.nodes:
            self.each[0].wait_for(f"^here {node.name} ")

    def gone(self, node: Node) -> float:
        """Wait until the lead knows that a node is gone; return the moment."""
        return float(self.each[0].wait_for(rf"^gone {node.name} (\S+)$")[1])

    def alone(self, node: Node) -> float:
        """Wait until a node knows that others may take it for dead; return the moment."""
        return float(self.each[node.number].wait_for(r"^alone \S+ (\S+)$")[1])

    def sure_until(self, node: Node) -> float:
        """Wait for the same; return until when it knew that they do not."""
        return float(self.each[node.number].wait_for(r"^alone (\S+) \S+$")[1])

    def end(self) -> None:
        for node in self.cluster.nodes:
            node.kill()


@pytest.fixture
def members(cluster: Cluster) -> Members:
    return Members(cluster)


CUTS: dict[str, Callable[[Node], None]] = {
    "link down": lambda node: node.unplug(),
    "dropped both ways": lambda node: node.drop(),
    "sent packets dropped": lambda node: node.drop(received=False),
    "received packets dropped": lambda node: node.drop(sent=False),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_node_that_is_cut_off_and_its_lead_both_know(members: Members, cut: str) -> None:
    node = members.cluster[1]
    at = time.monotonic()
    CUTS[cut](node)
    gone, alone = members.gone(node), members.alone(node)
    assert TTL / 3 < gone - at < TTL + LATE
    assert alone - at < TTL + LATE
    assert members.sure_until(node) <= gone  # not longer than the others
    members.end()


def test_a_node_that_is_killed_is_known_by_the_end_of_its_connections(cluster: Cluster) -> None:
    members = Members(cluster, LONG)
    node = members.cluster[2]
    at = time.monotonic()
    node.kill()
    assert ORPHAN - 0.1 < members.gone(node) - at < ORPHAN + LATE
    members.end()


def test_a_node_that_stands_still_is_gone_and_learns_it_when_it_goes_on(members: Members) -> None:
    node = members.cluster[3]
    at = time.monotonic()
    node.freeze()
    gone = members.gone(node)
    assert TTL / 3 < gone - at < TTL + LATE
    node.thaw()
    assert members.alone(node) > gone
    members.end()


def test_every_node_knows_that_the_lead_is_dead(cluster: Cluster) -> None:
    members = Members(cluster, LONG)
    at = time.monotonic()
    members.cluster[0].kill()
    for node in members.cluster.nodes[1:]:
        assert members.alone(node) - at < 2 * ORPHAN + LATE
    members.end()


@pytest.mark.parametrize("cut", CUTS)
def test_every_node_knows_that_the_lead_is_cut_off(members: Members, cut: str) -> None:
    at = time.monotonic()
    CUTS[cut](members.cluster[0])
    for node in members.cluster.nodes[1:]:
        assert members.alone(node) - at < TTL + LATE
        assert members.gone(node) - at < TTL + LATE
    members.end()


def test_a_lead_that_stood_still_has_lost_nobody(cluster: Cluster) -> None:
    members = Members(cluster, 2 * TTL)
    members.cluster[0].freeze()
    time.sleep(1.5 * TTL)  # shorter than a lease, also when freezing and thawing take half a second
    members.cluster[0].thaw()
    with pytest.raises(TimeoutError):
        members.each[0].wait_for("^gone", timeout=TTL + 0.5)
    assert not any("alone" in one.output() for one in members.each)
    members.end()


def test_short_gaps_lose_nobody(members: Members) -> None:
    node = members.cluster[1]
    for _ in range(3):
        node.unplug()
        time.sleep(0.3)  # less than between two signs of life
        node.plug()
        time.sleep(1.0)
    assert not any("gone" in one.output() or "alone" in one.output() for one in members.each)
    members.end()
