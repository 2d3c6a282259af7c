"""Who does what in a turn of an average: the same answer for all, and whether everybody has brought what it needs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from rallypoint.primitives import flat
from rallypoint.primitives.division import Division
from rallypoint.primitives.flat import Layout, Tree
from rallypoint.primitives.offers import Offer, Participant, Place
from rallypoint.wire.messages import Identity

HERE, THERE = b"here", b"there"
ROOMY = 1 << 30


def layout(count: int = 1_000_000) -> Layout:
    return Layout(Tree(torch.empty(count, device="cpu")))


def participants(
    scopes: Sequence[bytes], weights: Sequence[float] = (), capacity: int = ROOMY, skips: Sequence[tuple[int, int]] = ()
) -> list[Participant]:
    return [
        Participant(
            Identity("node", 100 + index, index),
            Offer(
                1, b"", weights[index] if weights else 1.0, 0, 0, scope=scope, result=Place(3, 4, capacity),
                skip=skips[index] if skips else (0, 0),
            ),
        )
        for index, scope in enumerate(scopes)
    ]  # fmt: skip


def test_one_host_shares_the_bytes_among_its_ranks() -> None:
    value, all_of_them = layout(), participants([HERE] * 3)
    found = [Division(value, all_of_them, me, range(3), ()) for me in range(3)]
    for me, one in enumerate(found):
        assert (one.hosts, one.host, one.first, one.leads, one.several_hosts) == ([[0, 1, 2]], [0, 1, 2], 0, me == 0, False)
        assert one.others == [index for index in range(3) if index != me]
        assert one.parts == found[0].parts == dict(enumerate(flat.cuts(value.size, 3)))
        assert one.room(me) == one.head + one.parts[me][1] - one.parts[me][0]
    assert found[0].is_as_foreseen(all_of_them)


def test_whose_memory_cannot_be_opened_is_a_host_of_his_own() -> None:
    all_of_them = participants([HERE, HERE, THERE, HERE])
    assert Division(layout(), all_of_them, 0, range(4), ()).hosts == [[0, 1, 3], [2]]
    found = Division(layout(), all_of_them, 3, range(4), {1})
    assert (found.hosts, found.first, found.several_hosts) == ([[0, 3], [1], [2]], 0, True)
    assert not found.is_as_foreseen(all_of_them)


def test_the_dead_have_no_part() -> None:
    value, all_of_them = layout(), participants([HERE] * 3, weights=[1.0, 2.0, 5.0])
    found = Division(value, all_of_them, 2, [0, 2], ())
    assert found.parts == dict(zip([0, 2], flat.cuts(value.size, 2), strict=True))
    assert (found.weight(0), found.weight(2), found.weights.total) == (1.0, 5.0, 6.0)


def test_weights_that_are_equal_are_counted_and_those_of_zero_are_not_read() -> None:
    found = Division(layout(), participants([HERE] * 3, weights=[7.0, 0.0, 7.0]), 0, range(3), ())
    assert [found.weight(index) for index in range(3)] == [1.0, 0.0, 1.0]
    assert found.weights.total == 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_for_other_hosts_have_room_in_their_own_dtype(dtype: torch.dtype) -> None:
    value = Layout(Tree(torch.empty(1_000_000, dtype=dtype, device="cpu")))
    found = Division(value, participants([HERE, HERE, THERE]), 0, range(3), ())
    start, stop = found.parts[0]
    assert found.room(0) == found.head + (stop - start) * 4 // dtype.itemsize


def test_it_is_as_foreseen_when_everybody_has_brought_what_his_part_needs() -> None:
    value = layout()
    parts = flat.cuts(value.size, 2)
    for skips, capacity, expected in (
        (parts, ROOMY, True),  # each has left out the part that is his
        (parts[::-1], ROOMY, False),  # each has left out the other's
        ([(0, 0), parts[1]], ROOMY, True),
        (parts, value.size // 2, False),  # no room for the head
    ):
        all_of_them = participants([HERE] * 2, skips=skips, capacity=capacity)
        for me in range(2):
            assert Division(value, all_of_them, me, range(2), ()).is_as_foreseen(all_of_them) is expected
