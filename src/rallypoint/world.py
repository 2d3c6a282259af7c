"""Nodes, ranks and local ranks; arithmetic only."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec


class World(msgspec.Struct, frozen=True):
    """The shape of a job: how many nodes there are, and how many ranks are on each.

    `runs` are pairs `(nodes, ranks on each of them)`, in the order of the nodes: 10,000 equal nodes
    are one pair. All numbers count from 0, and ranks are numbered node after node.
    """

    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, sizes: Iterable[int]) -> World:
        """Return the world of nodes with so many ranks: `World.of([2, 2, 4])`."""
        return cls(tuple((len(list(same)), ranks) for ranks, same in itertools.groupby(sizes)))

    @property
    def size(self) -> int:
        """Number of ranks in the whole job (torch's WORLD_SIZE)."""
        return sum(nodes * ranks for nodes, ranks in self.runs)

    @property
    def nodes(self) -> int:
        """Number of nodes (torchrun's GROUP_WORLD_SIZE)."""
        return sum(nodes for nodes, _ in self.runs)

    def ranks(self, node: int) -> range:
        """Return the ranks on a node, in the order of their local ranks."""
        first, left = 0, node
        for nodes, ranks in self.runs:
            if 0 <= left < nodes:
                first += left * ranks
                return range(first, first + ranks)
            first += nodes * ranks
            left -= nodes
        raise IndexError(f"node {node} of {self.nodes}")

    def first(self, node: int) -> int:
        """Return the rank that is local rank 0 on a node."""
        return self.ranks(node).start

    def local_size(self, node: int) -> int:
        """Return the number of ranks on a node (torch's LOCAL_WORLD_SIZE)."""
        return len(self.ranks(node))

    def node_of(self, rank: int) -> int:
        """Return the node on which a rank is."""
        node, left = 0, rank
        for nodes, ranks in self.runs:
            if 0 <= left < nodes * ranks:
                return node + left // ranks
            node += nodes
            left -= nodes * ranks
        raise IndexError(f"rank {rank} of {self.size}")


class Seat(msgspec.Struct, frozen=True):
    """One node's place in one attempt of a job: all that its agent learns from outside."""

    attempt: int
    node: int
    world: World
    # numeric: an address of node 0 by which this node reaches it
    master_addr: str
    master_port: int
    store: str = (
        ""  # tcp:// or tls://address:port of the job's store; "": the node has one of its own
    )
    interface: str = ""  # of the address by which this node reaches node 0; "": not known
    buddies: tuple[str, ...] = ()  # addresses of other nodes, to be looked at when node 0 is lost

    @property
    def ranks(self) -> range:
        """The ranks on this node, in the order of their local ranks."""
        return self.world.ranks(self.node)


def ranges(ranks: Iterable[int]) -> str:
    """Ranks as people write them: `ranges([0, 1, 3, 4, 5]) == "0-1, 3-5"`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def ranks_phrase(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0-1 and 3`: the subject of a sentence."""
    listed = sorted(set(ranks))
    text = ranges(listed)
    if len(listed) == 1:
        return f"rank {text}"
    head, comma, tail = text.rpartition(", ")
    return f"ranks {head} and {tail}" if comma else f"ranks {text}"
