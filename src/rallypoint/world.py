"""Nodes, ranks and local ranks; arithmetic only."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Seat(msgspec.Struct, frozen=True):
    """One rank's place in the job. All numbers count from 0."""

    rank: int
    local_rank: int
    node: int = 0


class World(msgspec.Struct, frozen=True):
    """The shape of a job: how many nodes, and how many ranks on each (equal on all nodes
    for now).
    """

    local_size: int
    nodes: int = 1

    @property
    def size(self) -> int:
        """Number of ranks in the whole job (torch's WORLD_SIZE)."""
        return self.local_size * self.nodes

    def seats(self, node: int = 0) -> tuple[Seat, ...]:
        """The seats of one node, by local rank."""
        first = node * self.local_size
        return tuple(Seat(rank=first + i, local_rank=i, node=node) for i in range(self.local_size))


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
