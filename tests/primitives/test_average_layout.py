"""What is averaged as one run of bytes: every element in one place, parts without overlap, sums as
a reference has them.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.errors import UsageError
from rallypoint.primitives.average import layout as layouts
from rallypoint.primitives.average.layout import ALIGNMENT, Layout, MeanWriter, Tree, not_finite
from rallypoint.primitives.average.participants import Offer, Participant
from rallypoint.primitives.average.work_split import Split, Weights, combine
from rallypoint.wire.messages import Identity

from ..search import tries

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.float8_e4m3fn,
]
LARGE = 16_387


@st.composite
def trees(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Dicts of a few tensors, empty and 0-d ones, large and transposed ones among them, each of
    whose elements tells where it is.
    """
    found = {}
    for index in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(
            st.sampled_from([(), (0,), (1,), (7,), (3, 5), (2, 0, 4), (LARGE,), (129, 200)])
        )
        count = int(numpy.prod(shape))
        tensor = ((torch.arange(count) + index) % 64 / 4).reshape(shape).to(dtype)
        if len(shape) == 2 and draw(st.booleans()):
            tensor = tensor.t()
        found[f"k{index}"] = tensor
    return found


@given(trees(), st.integers(1, 9))
@tries(60)
def test_what_is_put_and_written_part_by_part_is_the_value(
    value: dict[str, torch.Tensor], parts: int
) -> None:
    """Every element has one place, in one part, also in tensors that have no flat view."""
    tree = Tree(value)
    layout = Layout(tree)
    memory = bytearray(b"\xff" * (layout.size + 64))  # NaN
    layout.put(memory, 64)
    for run in layout.runs:
        assert [*layout.runs_in(run.start, run.stop)] == ([run] if run.length else [])
    assert sum(run.length for run in layout.runs) == sum(
        tensor.numel() for tensor in value.values()
    )
    targets = layouts.empty(tree)
    writer = MeanWriter(layout, targets)
    for start, stop in layouts.cuts(layout.size, parts):
        writer.write(memory, 64, start, stop)
    writer.finish()
    for leaf in tree.leaves:
        assert (
            targets[leaf.path].float().equal(leaf.tensor.float())
            if not leaf.tensor.is_complex()
            else targets[leaf.path].equal(leaf.tensor)
        )
    assert layout.paths_not_finite(memory, 64) == []


@given(st.integers(0, 5_000_000), st.integers(1, 64))
def test_parts_cover_all_and_begin_with_a_line(size: int, count: int) -> None:
    cut = layouts.cuts(size, count)
    assert len(cut) == count
    assert cut[0][0] == 0
    assert cut[-1][1] == size
    assert all(before[1] == after[0] for before, after in itertools.pairwise(cut))
    assert all(start % ALIGNMENT == 0 or start == size for start, _ in cut)
    assert max(stop - start for start, stop in cut) <= size // count + 2 * (
        layouts.PAGE if size >= layouts.WHOLE_PAGES else ALIGNMENT
    )


@given(
    st.sampled_from(DTYPES),
    st.integers(1, 5),
    st.integers(0, 300_000),
    st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=5, max_size=5),
    st.booleans(),
)
@tries(60)
def test_a_mean_is_that_of_float64_up_to_the_rounding_of_its_sums(
    dtype: torch.dtype, count: int, length: int, given: list[float], weighted: bool
) -> None:
    generator = torch.Generator().manual_seed(length)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    parts = [torch.randn(length, generator=generator, dtype=wide).to(dtype) for _ in range(count)]
    weights = Weights(given[:count] if weighted else [1.0] * count)
    if not weights.each:
        return
    into = torch.full((length,), 9.0).to(dtype)
    assert combine(into, [parts[i] for i in weights.each], [*weights.each.values()], weights.total)
    exact = sum(
        (parts[i].to(wide) * weight for i, weight in weights.each.items()),
        torch.zeros(length, dtype=wide),
    )
    exact /= weights.total
    close = {torch.float64: 1e-15, torch.float32: 1e-6, torch.complex64: 1e-6}.get(dtype)
    if close is not None:
        assert torch.allclose(into.to(wide), exact, rtol=close, atol=close)
    else:
        # summed in float32, and rounded once: as if the exact mean were rounded, up to one that
        # lies next to a half
        differs = (into.float() - exact.to(dtype).float()).abs() > 0
        assert differs.float().mean().nan_to_num() <= 0.01


def test_equal_numbers_have_themselves_as_their_mean() -> None:
    for count in range(1, 20):
        part = torch.tensor([1.0, 3.0, 1e-3, 65504.0])
        into = torch.empty(4)
        combine(into, [part] * count, [1.0] * count, float(count))
        assert torch.allclose(into, part, rtol=1.2e-7 * (count > 2), atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float64])
def test_one_element_that_is_not_finite_is_seen(bad: float, dtype: torch.dtype) -> None:
    part = torch.zeros(500_000, dtype=dtype)
    other = torch.ones(500_000, dtype=dtype)
    into = torch.empty(500_000, dtype=dtype)
    assert combine(into, [part, other], [1.0, 1.0], 2.0)
    part[499_999] = bad
    assert not combine(into, [part, other], [1.0, 1.0], 2.0)
    assert not_finite(part)
    assert not not_finite(other)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("divisor", [2.0, 8.0, 64.0, 3.0, 1.5])
def test_a_mean_is_the_sum_divided_to_the_last_bit(kind: torch.dtype, divisor: float) -> None:
    """Also the smallest numbers there are, and the largest: for powers of two it is a
    multiplication.
    """
    limits = torch.finfo(kind)
    edges = torch.tensor(
        [
            limits.smallest_normal,
            limits.smallest_normal / 2,
            limits.tiny * 3,
            limits.max,
            -limits.max,
            0.0,
            -0.0,
        ],
        dtype=torch.float64,
    )
    part = torch.cat([edges.to(kind), torch.randn(1000, dtype=kind)])
    into = torch.empty_like(part)
    assert combine(into, [part], [1.0], divisor)
    assert into.equal(part / divisor)
    assert (
        torch.view_as_real(into + 0j)
        .signbit()
        .equal(torch.view_as_real(part / divisor + 0j).signbit())
    )


def test_a_sum_too_large_for_its_check_is_still_finite() -> None:
    """The check adds elements up; 3e38 four times is no float32, and each of them is."""
    into = torch.empty(4)
    assert combine(into, [torch.full((4,), 3e38)], [1.0])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 2.0, 1.0], [3.0, 1.0, 0.0]])
def test_a_mean_may_be_written_over_the_first_of_its_parts(
    kind: torch.dtype, weights: list[float]
) -> None:
    parts = [torch.full((300_000,), float(number), dtype=kind) for number in range(3)]
    assert combine(parts[0], parts, weights, 4.0)
    assert parts[0].equal(torch.full((300_000,), (weights[1] + 2 * weights[2]) / 4, dtype=kind))


def test_weights_of_zero_are_not_read_and_equal_ones_are_no_weights() -> None:
    assert (Weights([2.0, 2.0, 0.0]).each, Weights([2.0, 2.0, 0.0]).total) == (
        {0: 1.0, 1: 1.0},
        2.0,
    )
    assert (Weights([1.0, 3.0]).each, Weights([1.0, 3.0]).total) == ({0: 0.25, 1: 0.75}, 1.0)
    assert Weights([0.0]).each == {}


# --- the split of the work ---


def split(
    scopes: str,
    me: int,
    living: Sequence[int],
    weights: Sequence[float] = (),
) -> Split:
    all_of_them = [
        Participant(
            Identity("node", 100 + index, index),
            Offer(2, b"", weights[index] if weights else 1.0, 0, scope=scope.encode()),
        )
        for index, scope in enumerate(scopes)
    ]
    return Split(1_000_000, all_of_them, me, living)


def test_one_host_shares_the_bytes_among_its_ranks() -> None:
    for me in range(3):
        found = split("aaa", me, range(3))
        assert (found.hosts, found.host, found.leads) == ([[0, 1, 2]], [0, 1, 2], me == 0)
        assert found.parts == dict(enumerate(layouts.cuts(1_000_000, 3)))


def test_the_first_of_a_host_has_the_whole_mean() -> None:
    found = split("aaba", 3, range(4))
    assert (found.hosts, found.host, found.leads) == ([[0, 1, 3], [2]], [0, 1, 3], False)
    assert found.parts == {0: (0, 1_000_000)}


def test_the_dead_have_no_part_and_no_weight() -> None:
    found = split("aaa", 2, [0, 2], weights=[1.0, 2.0, 5.0])
    assert found.parts == dict(zip([0, 2], layouts.cuts(1_000_000, 2), strict=True))
    assert (found.weights, found.total) == ({0: 0.125, 2: 0.625}, 0.75)


# --- trees ---


def test_a_tree_is_built_again_with_its_types() -> None:
    value: dict[Any, Any] = {
        "b": OrderedDict(x=torch.ones(2), y=[torch.zeros(1), (1.5, 2j)]),
        3: {"array": numpy.ones((2, 2), numpy.float32), "scalar": numpy.float64(4.0)},
    }
    tree = Tree(value)
    rebuilt = tree.rebuilt({leaf.path: leaf.tensor + 1 for leaf in tree.leaves})
    assert list(rebuilt) == ["b", 3]
    assert type(rebuilt["b"]) is OrderedDict
    assert rebuilt["b"]["y"][0].item() == 1.0
    assert rebuilt["b"]["y"][1] == (2.5, 1 + 2j)
    assert type(rebuilt["b"]["y"][1]) is tuple
    assert type(rebuilt[3]["array"]) is numpy.ndarray
    assert (type(rebuilt[3]["scalar"]), rebuilt[3]["scalar"]) == (numpy.float64, 5.0)


def test_the_order_of_keys_does_not_matter_and_their_shapes_do() -> None:
    one = Layout(Tree({"a": torch.ones(2), "b": torch.ones(3)}))
    assert Layout(Tree({"b": torch.ones(3), "a": torch.ones(2)})).digest == one.digest
    assert Layout(Tree({"a": torch.ones(3), "b": torch.ones(2)})).digest != one.digest
    assert (
        Layout(Tree({"a": torch.ones(2), "b": torch.ones(3, dtype=torch.float64)})).digest
        != one.digest
    )
    assert Layout(Tree({"a": torch.ones(2), "c": torch.ones(3)})).digest != one.digest


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (torch.arange(3), r"^value: a tensor of int64 cannot be averaged"),
        (
            {"n": {"tracked": torch.tensor(3)}},
            r"^value\['n'\]\['tracked'\]: a tensor of int64 cannot",
        ),
        ([torch.tensor([True])], r"^value\[0\]: a tensor of bool cannot"),
        ({"step": 3}, r"^value\['step'\]: an int cannot"),
        ({"on": True}, r"^value\['on'\]: a bool cannot"),
        ({"x": "text"}, r"^value\['x'\]: a str cannot"),
        ({"x": None}, r"^value\['x'\]: None cannot"),
        ({1.5: torch.ones(1)}, r"^value: the key 1.5, which is neither"),
        (numpy.arange(3), r"^value: a numpy array of int64 cannot"),
        (torch.ones(2).to_sparse(), r"^value: a tensor of layout torch.sparse_coo on cpu cannot"),
        (torch.ones(2, device="meta"), r"^value: a tensor of layout torch.strided on meta cannot"),
    ],
)
def test_what_has_no_mean_is_refused_with_its_place(value: Any, where: str) -> None:
    with pytest.raises(UsageError, match=where) as caught:
        Tree(value)
    assert caught.value.code == "average-unsupported"


def test_a_container_inside_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UsageError, match="nested more than 100 deep"):
        Tree(value)


def test_a_parameter_is_its_values() -> None:
    leaf = Tree(torch.nn.Parameter(torch.ones(2))).leaves[0]
    assert not leaf.tensor.requires_grad


def test_out_has_to_be_built_alike_and_writable() -> None:
    tree = Tree({"a": torch.ones(2, 2)})
    with pytest.raises(
        UsageError,
        match=r"it has value\['a'\]: float32 \[4\], and the value value\['a'\]: float32 \[2, 2\]",
    ):
        layouts.target_of({"a": torch.ones(4)}, tree)
    with pytest.raises(UsageError, match=r"out\['a'\] is an expanded tensor"):
        layouts.target_of({"a": torch.ones(1, 2).expand(2, 2)}, tree)
    with pytest.raises(UsageError, match="out is a float that cannot change"):
        layouts.target_of(1.0, Tree(2.0))
