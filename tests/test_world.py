"""Numbers of nodes and ranks."""

from __future__ import annotations

import pytest

from rallypoint.world import Seat, World


def test_nodes_may_have_different_numbers_of_ranks() -> None:
    world = World.of([2, 2, 4])
    assert world == World(runs=((2, 2), (1, 4)))
    assert (world.size, world.nodes) == (8, 3)
    assert [world.ranks(node) for node in range(3)] == [range(2), range(2, 4), range(4, 8)]
    assert [world.first(node) for node in range(3)] == [0, 2, 4]
    assert [world.local_size(node) for node in range(3)] == [2, 2, 4]
    assert [world.node_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 2, 2]


def test_equal_nodes_are_one_run_however_many_they_are() -> None:
    world = World.of([8] * 10_000)
    assert world.runs == ((10_000, 8),)
    assert world.ranks(9_999) == range(79_992, 80_000)
    assert world.node_of(79_999) == 9_999


@pytest.mark.parametrize("node", [-1, 3])
def test_a_node_that_the_world_has_not_is_refused(node: int) -> None:
    with pytest.raises(IndexError, match=f"node {node} of 3"):
        World.of([2, 2, 4]).ranks(node)


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_that_the_world_has_not_is_refused(rank: int) -> None:
    with pytest.raises(IndexError, match=f"rank {rank} of 8"):
        World.of([2, 2, 4]).node_of(rank)


def test_a_seat_knows_the_ranks_of_its_node() -> None:
    seat = Seat(0, 1, World.of([2, 2, 4]), "10.0.0.1", 29500)
    assert seat.ranks == range(2, 4)
