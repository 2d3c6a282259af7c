"""What is averaged as one run of bytes: every element in one place, parts without overlap, sums as a reference has them."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.errors import UsageError
from rallypoint.primitives import flat, mean
from rallypoint.primitives.flat import ALIGNMENT, DIRECT_BYTES, Layout, Tree
from rallypoint.primitives.hosts import Wide
from rallypoint.primitives.mean import Weights

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn]
LARGE = DIRECT_BYTES // 4 + 3  # elements of float32 that are read where they are


@st.composite
def trees(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Dicts of a few tensors, empty and 0-d ones, large and transposed ones among them, each of whose elements tells where it is."""
    found = {}
    for index in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.sampled_from([(), (0,), (1,), (7,), (3, 5), (2, 0, 4), (LARGE,), (129, 200)]))
        count = int(numpy.prod(shape))
        tensor = ((torch.arange(count) + index) % 64 / 4).reshape(shape).to(dtype)
        if len(shape) == 2 and draw(st.booleans()):
            tensor = tensor.t()
        found[f"k{index}"] = tensor
    return found


@given(trees(), st.integers(1, 9), st.data())
@settings(max_examples=60)
def test_whoever_puts_and_skips_and_reads_has_every_element_once(value: dict[str, torch.Tensor], parts: int, data: st.DataObject) -> None:
    """A part is read in the leaves where that can be, and elsewhere in what was put, which leaves that part out."""
    tree = Tree(value)
    layout = Layout(tree)
    cut = flat.cuts(layout.size, parts)
    skip = cut[data.draw(st.integers(0, parts - 1))]
    memory = bytearray(b"\xff" * layout.size)  # NaN
    flat.put(layout, memory, 0, 0, layout.size, skip)
    whole = bytearray(layout.size)
    flat.put(layout, whole, 0, 0, layout.size)

    last = 0
    for span in layout.spans(*skip, direct=True):
        assert span.start >= last  # in order, none twice
        last = span.start + span.length * span.run.dtype.itemsize
        if span.leaf is not None:
            there = span.leaf.tensor.view(-1)[span.at : span.at + span.length]
        else:
            there = flat.typed(memory, span.run.dtype, span.start, span.length)
        flat.typed(memory, span.run.dtype, span.start, span.length).copy_(there.clone())
    for run in layout.runs:
        begin, end = run.start, run.stop
        assert memory[begin:end] == whole[begin:end]
    assert sum(run.length for run in layout.runs) == sum(tensor.numel() for tensor in value.values())
    for leaf, first, count, offset in layout.within(0, layout.size):
        assert (first, count) == (0, leaf.tensor.numel())
        found = flat.typed(whole, leaf.tensor.dtype, offset, count).view(leaf.tensor.shape)
        assert found.contiguous().view(torch.uint8).equal(leaf.tensor.contiguous().view(torch.uint8)) if found.dim() else True


@given(st.integers(0, 5_000_000), st.integers(1, 64))
def test_parts_cover_all_and_begin_with_a_line(size: int, count: int) -> None:
    cut = flat.cuts(size, count)
    assert len(cut) == count
    assert cut[0][0] == 0
    assert cut[-1][1] == size
    assert all(before[1] == after[0] for before, after in itertools.pairwise(cut))
    assert all(start % ALIGNMENT == 0 or start == size for start, _ in cut)
    assert max(stop - start for start, stop in cut) <= size // count + 2 * (flat.PAGE if size >= flat.WHOLE_PAGES else ALIGNMENT)


@given(trees(), st.integers(1, 5))
@settings(max_examples=40)
def test_the_parts_of_a_layout_have_room_for_their_sums(value: dict[str, torch.Tensor], parts: int) -> None:
    layout = Layout(Tree(value))
    wide = Wide(layout)
    assert wide.at(0) == 0
    assert wide.at(layout.size) == wide.size
    for start, stop in flat.cuts(layout.size, parts):
        room = wide.at(stop) - wide.at(start)
        for span in layout.spans(start, stop):
            sums = flat.accumulator(span.run.dtype)
            at = wide.at(span.start) - wide.at(start)
            assert at >= 0
            assert at % sums.itemsize == 0
            assert at + span.length * sums.itemsize <= room


@given(
    st.sampled_from(DTYPES),
    st.integers(1, 5),
    st.integers(0, 300_000),
    st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=5, max_size=5),
    st.booleans(),
)
@settings(max_examples=60)
def test_a_mean_is_that_of_float64_up_to_the_rounding_of_its_sums(
    dtype: torch.dtype, count: int, length: int, given: list[float], weighted: bool
) -> None:
    generator = torch.Generator().manual_seed(length)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    parts = [torch.randn(length, generator=generator, dtype=wide).to(dtype) for _ in range(count)]
    weights = Weights(given[:count] if weighted else [1.0] * count)
    if not weights.counted:
        return
    into = torch.full((length,), 9.0).to(dtype)
    assert mean.combine(into, [parts[i] for i in weights.counted], None if weights.equal else weights.each, weights.total)
    exact = sum((parts[i].to(wide) * w for i, w in zip(weights.counted, weights.each, strict=True)), torch.zeros(length, dtype=wide))
    exact /= weights.total
    close = {torch.float64: 1e-15, torch.float32: 1e-6, torch.complex64: 1e-6}.get(dtype)
    if close is not None:
        assert torch.allclose(into.to(wide), exact, rtol=close, atol=close)
    else:  # summed in float32, and rounded once: as if the exact mean were rounded, up to one that lies next to a half
        differs = (into.float() - exact.to(dtype).float()).abs() > 0
        assert differs.float().mean().nan_to_num() <= 0.01


def test_equal_numbers_have_themselves_as_their_mean() -> None:
    for count in range(1, 20):
        part = torch.tensor([1.0, 3.0, 1e-3, 65504.0])
        into = torch.empty(4)
        mean.combine(into, [part] * count, None, float(count))
        assert torch.allclose(into, part, rtol=1.2e-7 * (count > 2), atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float64])
def test_one_element_that_is_not_finite_is_seen(bad: float, dtype: torch.dtype) -> None:
    part = torch.zeros(500_000, dtype=dtype)
    other = torch.ones(500_000, dtype=dtype)
    into = torch.empty(500_000, dtype=dtype)
    assert mean.combine(into, [part, other], None, 2.0)
    part[499_999] = bad
    assert not mean.combine(into, [part, other], None, 2.0)
    assert mean.not_finite(part)
    assert not mean.not_finite(other)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("divisor", [2.0, 8.0, 64.0, 3.0, 1.5])
def test_a_mean_is_the_sum_divided_to_the_last_bit(kind: torch.dtype, divisor: float) -> None:
    """Also the smallest numbers there are, and the largest: for powers of two it is a multiplication."""
    limits = torch.finfo(kind)
    edges = torch.tensor(
        [limits.smallest_normal, limits.smallest_normal / 2, limits.tiny * 3, limits.max, -limits.max, 0.0, -0.0], dtype=torch.float64
    )
    part = torch.cat([edges.to(kind), torch.randn(1000, dtype=kind)])
    into = torch.empty_like(part)
    assert mean.combine(into, [part], None, divisor)
    assert into.equal(part / divisor)
    assert torch.view_as_real(into + 0j).signbit().equal(torch.view_as_real(part / divisor + 0j).signbit())


def test_a_sum_too_large_for_its_check_is_still_finite() -> None:
    """The check adds elements up; 3e38 four times is no float32, and each of them is."""
    into = torch.empty(4)
    assert mean.combine(into, [torch.full((4,), 3e38)], None, 1.0)


def test_weights_of_zero_are_not_read_and_equal_ones_are_no_weights() -> None:
    assert (Weights([2.0, 2.0, 0.0]).counted, Weights([2.0, 2.0, 0.0]).total) == ([0, 1], 2.0)
    assert Weights([2.0, 2.0]).equal
    assert not Weights([1.0, 3.0]).equal
    assert Weights([1.0, 3.0]).total == 4.0
    assert Weights([0.0]).counted == []


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
    assert Layout(Tree({"a": torch.ones(2), "b": torch.ones(3, dtype=torch.float64)})).digest != one.digest
    assert Layout(Tree({"a": torch.ones(2), "c": torch.ones(3)})).digest != one.digest


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (torch.arange(3), r"^value: a tensor of int64 cannot be averaged"),
        ({"n": {"tracked": torch.tensor(3)}}, r"^value\['n'\]\['tracked'\]: a tensor of int64 cannot"),
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
    with pytest.raises(UsageError, match=r"it has value\['a'\]: float32 \[4\], and the value value\['a'\]: float32 \[2, 2\]"):
        flat.target({"a": torch.ones(4)}, tree)
    with pytest.raises(UsageError, match=r"out\['a'\] is an expanded tensor"):
        flat.target({"a": torch.ones(1, 2).expand(2, 2)}, tree)
    with pytest.raises(UsageError, match="out is a float that cannot change"):
        flat.target(1.0, Tree(2.0))
