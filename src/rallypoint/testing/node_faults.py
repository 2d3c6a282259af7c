"""Things that go wrong in a simulated cluster, each for one node."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from rallypoint.testing.cluster import SimulatedCluster
    from rallypoint.testing.simulated_node import SimulatedNode

TTL = 2.0
"""Seconds without a sign of life after which a node's session is over."""

SIGN_EVERY = TTL / 3

ORPHAN = 0.5
"""Seconds after the end of its connections in which a session is over."""

Fault = Callable[["SimulatedCluster", "SimulatedNode"], None]


def kill(cluster: SimulatedCluster, node: SimulatedNode) -> None:
    """Kill an agent; the lead's takes the lead with it. A scheduler may start a node again that has
    no place yet.
    """
    if node.state in ("away", "absent", "left"):
        return
    was, chance = node.state, cluster.chance
    node.die()
    if node is cluster.nodes[0]:
        cluster.lead_is_dead = True
        for one in cluster.present():
            one.later(chance.uniform(ORPHAN, TTL), one.isolate, always=True)
        return
    if was in ("running", "judging", "stopping"):
        cluster.trouble(node, "it was killed")
    cluster.lose(node, cluster.now + chance.choice((ORPHAN, TTL)))
    if was == "joining" and chance.random() < 0.7:
        again = cluster.add(replace(node.applicant, id=f"{node.applicant.id}+"))
        cluster.at(cluster.now + chance.uniform(0.1, 3.0), again.come)


def freeze(cluster: SimulatedCluster, node: SimulatedNode) -> None:
    """Stop all of a node's processes for a while."""
    until = _hold_up(cluster, node)
    node.frozen_until = max(node.frozen_until, until)


def cut(cluster: SimulatedCluster, node: SimulatedNode) -> None:
    """Let no packet through for a while, to or from a node; the lead's own has no network between
    it and the lead.
    """
    if node is not cluster.nodes[0]:
        until = _hold_up(cluster, node)
        node.cut_until = max(node.cut_until, until)


def _hold_up(cluster: SimulatedCluster, node: SimulatedNode) -> float:
    """Return until when a node is held up: longer than its lease, or not."""
    chance, now = cluster.chance, cluster.now
    seconds = chance.choice((0.3, 1.0, 1.5, 3.0, 8.0))
    last_sign = now - chance.uniform(0.0, SIGN_EVERY)
    cluster.held_up += seconds
    if now + seconds <= last_sign + TTL:
        return now + seconds
    lease = max(0.0, last_sign + 0.99 * TTL - now)
    if node is cluster.nodes[0]:  # the lead's own clock stands still: it finds nobody lost by that
        for one in cluster.present():
            if one is not node:
                one.later(lease, one.isolate, always=True)
    elif node.state not in ("away", "absent", "left"):
        # Once it runs again, a frozen node finds that its lease is over.
        node.later(lease, node.isolate, always=True)
        cluster.lose(node, last_sign + TTL)
    return now + seconds


def fail(cluster: SimulatedCluster, node: SimulatedNode) -> None:
    """Have a rank raise once it trains."""
    node.fails = True


def leave_early(cluster: SimulatedCluster, node: SimulatedNode) -> None:
    """Have the ranks of a node exit with 0 before they have met the others."""
    node.leaves_early = True


def interrupt(cluster: SimulatedCluster, node: SimulatedNode) -> None:
    """Press Ctrl-C on a node, perhaps twice."""
    node.fail("the launcher got SIGINT", signal="SIGINT")
    if cluster.chance.random() < 0.5:
        because = "the launcher got SIGINT a second time"
        later = cluster.chance.uniform(0.5, 3.0)
        node.later(later, lambda _: node.fail(because, signal="SIGINT"))


def terminate_all(cluster: SimulatedCluster, node: SimulatedNode) -> None:
    """Stop the job as a batch system does: by a signal to every node."""
    for one in cluster.present():
        one.later(cluster.chance.uniform(0.0, 0.3), one.terminate)


def one_more(cluster: SimulatedCluster, node: SimulatedNode) -> None:
    """Have another node come, perhaps for a place that is taken."""
    rank = cluster.chance.choice((None, node.applicant.node_rank))
    cluster.intrude(replace(node.applicant, node_rank=rank))


def another_job(cluster: SimulatedCluster, node: SimulatedNode) -> None:
    """Have a node come that was started for another job."""
    if cluster.chance.random() < 0.5:
        cluster.intrude(replace(node.applicant, nnodes=99))
    else:
        cluster.intrude(replace(node.applicant, digest="another"))


def another_way(cluster: SimulatedCluster, node: SimulatedNode) -> None:
    """Have a node come to the lead by another address than the others."""
    node.applicant = replace(node.applicant, reached="192.168.0.1")


def absence(cluster: SimulatedCluster, node: SimulatedNode) -> None:
    """Let a node never come."""
    if node.state == "away" and node is not cluster.nodes[0]:
        node.stay_away()


FAULTS: tuple[Fault, ...] = (
    kill, freeze, freeze, cut, cut, fail, fail, fail, leave_early, interrupt, terminate_all,
    one_more, another_job, another_way, absence,
)  # fmt: skip
"""The faults that a seed chooses from."""
