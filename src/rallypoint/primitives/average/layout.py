"""Layout of a tree of tensors as one run of bytes: the place of each leaf, and the parts of the
work.

Leaves of one dtype lie together, in the order of their paths, without gaps: a state dict of a
thousand tensors is reduced like one of a few. All callers of an average come to the same layout, or
to another digest.
"""

from __future__ import annotations

import hashlib
import itertools
import shlex
import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rallypoint.errors import EnvironmentProblem, UsageError
from rallypoint.store.client.arguments import described

if TYPE_CHECKING:
    from torch import Tensor, dtype

ALIGNMENT = 64
"""Bytes of a cache line, a multiple of every element. No line is written to by two ranks."""

PAGE = 4096
"""Bytes. Parts of values larger than `WHOLE_PAGES` begin with a page, which no two ranks touch."""

WHOLE_PAGES = 1024 * 1024

MAX_DEPTH = 100
"""Maximum containers inside containers."""


class Leaf(NamedTuple):
    """One tensor of a tree, without its gradient.

    The tensor of an array is a view of it (`viewed`), or a copy if torch cannot have a view.
    """

    path: str
    tensor: Tensor
    kind: str  # "tensor", "array", "scalar" (numpy's), "number" (Python's)
    original: Any
    viewed: bool = True


class TypedRun(NamedTuple):
    """Elements of one dtype that lie one behind the other: `length` of them from byte `start`
    on."""

    dtype: dtype
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length * self.dtype.itemsize


class Tree:
    """The leaves of a value, and how to build the value again from other leaves.

    `name`: how errors call the value. Raises UsageError (`average-unsupported`) for parts that have
    no mean.
    """

    def __init__(self, value: Any, name: str = "value") -> None:
        self.leaves: list[Leaf] = []
        self._build = self._taken(value, name, 0)
        self.leaves.sort(key=lambda leaf: leaf.path)

    def rebuilt(self, tensors: dict[str, Tensor]) -> Any:
        """Build the same structure of other tensors, by path; arrays and numbers as such."""
        return self._build(tensors)

    def described(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return (path, dtype, shape) of each leaf."""
        return [
            (leaf.path, _bare(leaf.tensor.dtype), tuple(leaf.tensor.shape)) for leaf in self.leaves
        ]

    def _taken(self, value: Any, path: str, depth: int) -> Callable[[dict[str, Tensor]], Any]:
        if depth > MAX_DEPTH:
            raise unsupported(path, f"containers nested more than {MAX_DEPTH} deep")
        if isinstance(value, dict):
            return self._taken_dict(value, path, depth)
        if isinstance(value, list | tuple):
            items = enumerate(value)
            parts = [self._taken(part, f"{path}[{index}]", depth + 1) for index, part in items]
            if isinstance(value, list):
                return lambda tensors: [part(tensors) for part in parts]
            if hasattr(value, "_fields"):
                kind = type(value)
                return lambda tensors: kind(*(part(tensors) for part in parts))
            return lambda tensors: tuple(part(tensors) for part in parts)
        leaf = _leaf(value, path)
        self.leaves.append(leaf)
        return _back(leaf)

    def _taken_dict(
        self, value: dict[Any, Any], path: str, depth: int
    ) -> Callable[[dict[str, Tensor]], Any]:
        kind: type[dict[Any, Any]] = OrderedDict if isinstance(value, OrderedDict) else dict
        parts = {}
        for key, part in value.items():
            if not isinstance(key, str | int):
                raise unsupported(path, f"the key {key!r}, which is neither a str nor an int,")
            parts[key] = self._taken(part, f"{path}[{key!r}]", depth + 1)
        return lambda tensors: kind((key, part(tensors)) for key, part in parts.items())


class Layout:
    """Places of the leaves of a tree in `size` bytes."""

    def __init__(self, tree: Tree) -> None:
        self.leaves: list[Leaf] = []
        self.offsets: list[int] = []
        self.runs: list[TypedRun] = []
        by_dtype: dict[dtype, list[Leaf]] = {}
        for leaf in tree.leaves:
            by_dtype.setdefault(leaf.tensor.dtype, []).append(leaf)
        at = 0
        for kind in sorted(by_dtype, key=lambda kind: (-kind.itemsize, str(kind))):
            at = -(-at // ALIGNMENT) * ALIGNMENT
            leaves = by_dtype[kind]
            self.runs.append(TypedRun(kind, at, sum(leaf.tensor.numel() for leaf in leaves)))
            for leaf in leaves:
                self.leaves.append(leaf)
                self.offsets.append(at)
                at += leaf.tensor.nbytes
        self.size = at
        self.digest = hashlib.blake2b(repr(tree.described()).encode(), digest_size=16).digest()

    def runs_in(self, start: int, stop: int) -> Iterator[TypedRun]:
        """Yield the elements of these bytes, in order: one run for each dtype."""
        for run in self.runs:
            begin, end = max(start, run.start), min(stop, run.stop)
            if begin < end:
                yield TypedRun(run.dtype, begin, (end - begin) // run.dtype.itemsize)

    def leaves_in(self, start: int, stop: int) -> Iterator[tuple[Leaf, int, int, int]]:
        """Yield (leaf, its first element there, how many, their place) for these bytes."""
        index = max(0, bisect_right(self.offsets, start) - 1)
        while index < len(self.leaves) and self.offsets[index] < stop:
            leaf, offset = self.leaves[index], self.offsets[index]
            first, last = max(start, offset), min(stop, offset + leaf.tensor.nbytes)
            if first < last:
                item = leaf.tensor.element_size()
                yield leaf, (first - offset) // item, (last - first) // item, first
            index += 1

    def put(self, memory: Any, at: int) -> None:
        """Copy all leaves into `memory`, from byte `at` on."""
        for leaf, _, count, offset in self.leaves_in(0, self.size):
            there = typed(memory, leaf.tensor.dtype, at + offset, count)
            there.view(leaf.tensor.shape).copy_(leaf.tensor)

    def paths_not_finite(self, memory: Any, at: int) -> list[str]:
        """Return the paths of leaves in `memory`, from byte `at` on, with a NaN or an infinity."""
        return [
            leaf.path
            for leaf, _, count, offset in self.leaves_in(0, self.size)
            if not_finite(typed(memory, leaf.tensor.dtype, at + offset, count))
        ]


class MeanWriter:
    """Copies parts of a layout to the tensors of a result, by path."""

    def __init__(self, layout: Layout, targets: dict[str, Tensor]) -> None:
        self._layout = layout
        self._targets = targets
        self._whole: dict[str, Tensor] = {}  # of tensors that have no flat view

    def write(self, memory: Any, at: int, start: int, stop: int) -> None:
        """Copy these bytes of the layout, whose byte 0 is at `at` in `memory`."""
        for leaf, first, count, offset in self._layout.leaves_in(start, stop):
            source = typed(memory, leaf.tensor.dtype, at + offset, count)
            target = self._targets[leaf.path]
            if target.is_contiguous():
                target.view(-1)[first : first + count].copy_(source)
            elif count == target.numel():
                target.copy_(source.view(target.shape))
            else:
                whole = self._whole.setdefault(leaf.path, _empty(target))
                whole.view(-1)[first : first + count].copy_(source)

    def finish(self) -> None:
        """Copy the tensors whose parts came one by one."""
        for path, whole in self._whole.items():
            self._targets[path].copy_(whole)


def _empty(like: Tensor) -> Tensor:
    import torch

    return torch.empty(like.shape, dtype=like.dtype, device="cpu")


def typed(memory: Any, kind: dtype, at: int, count: int) -> Tensor:
    """Return `count` elements of a writable buffer, from byte `at` on, as a tensor."""
    import torch

    if count == 0:
        return torch.empty(0, dtype=kind, device="cpu")
    return torch.frombuffer(memory, dtype=kind, count=count, offset=at)


def not_finite(tensor: Tensor) -> bool:
    """Tell whether a NaN or an infinity is among the elements."""
    import torch

    if tensor.dtype.itemsize == 1:  # float8 has no isfinite
        tensor = tensor.float()
    return not bool(torch.isfinite(tensor).all())


def cuts(size: int, count: int) -> list[tuple[int, int]]:
    """Cut `size` bytes into `count` parts of about the same length, which may be empty.

    No part shares a cache line with another.
    """
    unit = PAGE if size >= WHOLE_PAGES else ALIGNMENT
    units = -(-size // unit)
    edges = [min(size, units * index // count * unit) for index in range(count + 1)]
    return list(itertools.pairwise(edges))


def unsupported(path: str, what: str, *help: tuple[str, str]) -> UsageError:
    """Make the error for a part of a value that cannot be averaged."""
    return UsageError("average-unsupported", f"{path}: {what} cannot be averaged", help=help)


def _bare(kind: dtype) -> str:
    return str(kind).removeprefix("torch.")


def _leaf(value: Any, path: str) -> Leaf:
    try:
        import torch
    except ImportError as error:
        raise EnvironmentProblem(
            "torch-missing",
            "an average is computed by torch, which is not installed here",
            help=(("install it", f"{shlex.quote(sys.executable)} -m pip install torch"),),
        ) from error
    if isinstance(value, torch.Tensor):
        return Leaf(path, _tensor(value, path), "tensor", value)
    if type(value) is float or type(value) is complex:
        kind = torch.float64 if type(value) is float else torch.complex128
        return Leaf(path, torch.tensor(value, dtype=kind, device="cpu"), "number", value)
    if type(value).__module__ == "numpy":
        return _array(value, path)
    if isinstance(value, int):
        raise unsupported(path, described(value), ("give the float that it stands for", "float(x)"))
    forms = "give tensors, numpy arrays and floats, and dicts, lists and tuples of them"
    raise unsupported(path, described(value), (forms, ""))


_FLOATS = (
    (
        "average only what has a mean",
        "{key: tensor for key, tensor in state.items() if tensor.is_floating_point()}",
    ),
    ("or the floats that they stand for", "tensor.double()"),
)

_DTYPES = ("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32")


def _tensor(value: Tensor, path: str) -> Tensor:
    import torch

    kind = value.dtype
    if not (kind.is_floating_point or kind.is_complex):
        raise unsupported(path, f"a tensor of {_bare(kind)}", *_FLOATS)
    if type(value) is not torch.Tensor and not isinstance(value, torch.nn.Parameter):
        plain = ("give the plain tensor that it consists of here", "tensor.to_local()")
        raise unsupported(path, described(value), plain)
    if value.layout != torch.strided or value.device.type == "meta" or value.is_quantized:
        what = f"a tensor of layout {value.layout} on {value.device}"
        raise unsupported(path, what, ("make it a dense one", "tensor.to_dense()"))
    if _bare(kind) not in _DTYPES and not _bare(kind).startswith(("float8_e4m3", "float8_e5m2")):
        raise unsupported(path, f"a tensor of {_bare(kind)}", ("convert it", "tensor.float()"))
    return value.detach()


def _array(value: Any, path: str) -> Leaf:
    import numpy
    import torch

    if type(value) is numpy.ndarray:
        kind = "array"
    elif isinstance(value, numpy.generic):
        kind = "scalar"
    else:
        raise unsupported(path, described(value))
    array = numpy.asarray(value)
    if array.dtype.kind not in "fc" or array.dtype.itemsize > (
        8 if array.dtype.kind == "f" else 16
    ):
        what = f"a numpy array of {array.dtype}"
        raise unsupported(path, what, ("convert it", 'array.astype("float64")'))
    viewed = array.dtype.isnative and array.flags.c_contiguous and array.flags.writeable
    if not viewed:
        array = array.astype(array.dtype.newbyteorder("="), order="C", copy=True)
    return Leaf(path, torch.from_numpy(array), kind, value, viewed=viewed)


def _back(leaf: Leaf) -> Callable[[dict[str, Tensor]], Any]:
    path, kind = leaf.path, leaf.kind
    if kind == "tensor":
        return lambda tensors: tensors[path]
    if kind == "number":
        return lambda tensors: tensors[path].item()
    if kind == "scalar":
        return lambda tensors: tensors[path].numpy()[()]
    return lambda tensors: tensors[path].numpy()


def empty(tree: Tree) -> dict[str, Tensor]:
    """Make new tensors like the leaves of a tree, by path."""
    import torch

    return {leaf.path: torch.empty_like(leaf.tensor) for leaf in tree.leaves}


def target_of(out: Any, tree: Tree) -> Tree:
    """Return the tree of `out`, to which a mean of `tree` is to be written.

    Raises UsageError when it is built otherwise, or cannot be written to.
    """
    there = Tree(out)
    want, have = tree.described(), there.described()
    if want != have:
        other = next((pair for pair in zip(want, have, strict=False) if pair[0] != pair[1]), None)
        if other:
            what = f"{_leaf_text(other[1])}, and the value {_leaf_text(other[0])}"
        else:
            what = f"{len(have)} tensors, and the value {len(want)}"
        raise UsageError("usage", f"out= must be built like the value: it has {what}")
    for leaf in there.leaves:
        fixed = leaf.kind in ("number", "scalar")
        fixed = fixed or (leaf.kind == "array" and not leaf.original.flags.writeable)
        dimensions = zip(leaf.tensor.stride(), leaf.tensor.shape, strict=True)
        expanded = any(stride == 0 and length > 1 for stride, length in dimensions)
        if expanded:
            why = "an expanded tensor, whose elements share memory"
        elif fixed:
            why = f"{described(leaf.original)} that cannot change"
        else:
            continue
        path = leaf.path.replace("value", "out", 1)
        raise UsageError("usage", f"out= cannot be written to: {path} is {why}")
    return there


def deliver(out: Tree) -> None:
    """Copy the tensors of `out` to those arrays of which torch has no view."""
    for leaf in out.leaves:
        if leaf.kind == "array" and not leaf.viewed:
            leaf.original[...] = leaf.tensor.numpy()


def _leaf_text(leaf: tuple[str, str, Sequence[int]]) -> str:
    return f"{leaf[0]}: {leaf[1]} {list(leaf[2])}"
