"""A tree of tensors as one run of bytes: which leaf lies where, and who works on which part.

Leaves of one dtype lie together, in the order of their paths, without gaps: a state dict of a thousand tensors is reduced like one
of a few. Everybody who averages comes to the same layout, or to another digest.
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
from rallypoint.store.arguments import described

if TYPE_CHECKING:
    from torch import Tensor, dtype

ALIGNMENT = 64
"""Bytes: a cache line, and a multiple of every element. Nobody writes to a line that somebody else works on."""

PAGE = 4096
"""Bytes. Parts of what is larger than `WHOLE_PAGES` begin with a page, so that no page is touched by two."""

WHOLE_PAGES = 1024 * 1024

DIRECT_BYTES = 64 * 1024
"""A tensor from this size on is read where it is, in the part its owner works on. Copying a smaller one costs less than the bookkeeping."""

MAX_DEPTH = 100
"""Containers inside containers."""


class Leaf:
    """One tensor of a tree, and `size`, its bytes. `direct`: they can be read where they are, in order.

    `tensor` has no gradient; of an array it is a view (`viewed`), or a copy when torch cannot have a view of it.
    """

    __slots__ = ("direct", "kind", "original", "path", "size", "tensor", "viewed")

    def __init__(self, path: str, tensor: Tensor, kind: str, original: Any, *, viewed: bool = True) -> None:
        self.path = path
        self.tensor = tensor
        self.kind = kind  # "tensor", "array", "scalar" (numpy's), "number" (Python's)
        self.original = original
        self.viewed = viewed
        self.size = tensor.numel() * tensor.element_size()
        self.direct = (
            self.size >= DIRECT_BYTES
            and tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and not tensor.is_conj()
            and not tensor.is_neg()
        )


class Run(NamedTuple):
    """Leaves of one dtype that lie one behind the other: `length` elements from byte `start` on."""

    dtype: dtype
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length * self.dtype.itemsize


class Span(NamedTuple):
    """Elements of one run. `leaf` and `at`: they are elements `at` and following of this leaf, and nothing else."""

    run: Run
    start: int  # bytes
    length: int  # elements
    leaf: Leaf | None = None
    at: int = 0


class Tree:
    """The leaves of a value, and how to build the value from other leaves.

    `name`: what an error calls the value. Raises UsageError (`average-unsupported`) for what has no mean.
    """

    def __init__(self, value: Any, name: str = "value") -> None:
        self.leaves: list[Leaf] = []
        self._build = self._taken(value, name, 0)
        self.leaves.sort(key=lambda leaf: leaf.path)

    def rebuilt(self, tensors: dict[str, Tensor]) -> Any:
        """The same structure of other tensors, by path; arrays and numbers as such."""
        return self._build(tensors)

    def described(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """(path, dtype, shape) of each leaf."""
        return [(leaf.path, str(leaf.tensor.dtype).removeprefix("torch."), tuple(leaf.tensor.shape)) for leaf in self.leaves]

    def _taken(self, value: Any, path: str, depth: int) -> Callable[[dict[str, Tensor]], Any]:
        if depth > MAX_DEPTH:
            raise unsupported(path, f"containers nested more than {MAX_DEPTH} deep")
        if isinstance(value, dict):
            return self._taken_dict(value, path, depth)
        if isinstance(value, list | tuple):
            parts = [self._taken(part, f"{path}[{index}]", depth + 1) for index, part in enumerate(value)]
            if isinstance(value, list):
                return lambda tensors: [part(tensors) for part in parts]
            if hasattr(value, "_fields"):
                kind = type(value)
                return lambda tensors: kind(*(part(tensors) for part in parts))
            return lambda tensors: tuple(part(tensors) for part in parts)
        leaf = _leaf(value, path)
        self.leaves.append(leaf)
        return _back(leaf)

    def _taken_dict(self, value: dict[Any, Any], path: str, depth: int) -> Callable[[dict[str, Tensor]], Any]:
        kind: type[dict[Any, Any]] = OrderedDict if isinstance(value, OrderedDict) else dict
        parts = {}
        for key, part in value.items():
            if not isinstance(key, str | int):
                raise unsupported(path, f"the key {key!r}, which is neither a str nor an int,")
            parts[key] = self._taken(part, f"{path}[{key!r}]", depth + 1)
        return lambda tensors: kind((key, part(tensors)) for key, part in parts.items())


class Layout:
    """Where each leaf of a tree lies in `size` bytes."""

    def __init__(self, tree: Tree) -> None:
        self.leaves: list[Leaf] = []
        self.offsets: list[int] = []
        self._run_of: list[Run] = []
        self.runs: list[Run] = []
        by_dtype: dict[dtype, list[Leaf]] = {}
        for leaf in tree.leaves:
            by_dtype.setdefault(leaf.tensor.dtype, []).append(leaf)
        at = 0
        for kind in sorted(by_dtype, key=lambda kind: (-kind.itemsize, str(kind))):
            at = _up(at, ALIGNMENT)
            leaves = by_dtype[kind]
            run = Run(kind, at, sum(leaf.tensor.numel() for leaf in leaves))
            self.runs.append(run)
            for leaf in leaves:
                self.leaves.append(leaf)
                self.offsets.append(at)
                self._run_of.append(run)
                at += leaf.size
        self.size = at
        self.digest = hashlib.blake2b(repr(tree.described()).encode(), digest_size=16).digest()

    def spans(self, start: int, stop: int, *, direct: bool = False) -> Iterator[Span]:
        """The elements of these bytes, in order, in as few pieces as can be; with `direct`, what can be read in a leaf itself apart."""
        for run in self.runs:
            begin, end = max(start, run.start), min(stop, run.stop)
            if begin >= end:
                continue
            if direct:
                yield from self._split(run, begin, end)
            else:
                yield Span(run, begin, (end - begin) // run.dtype.itemsize)

    def _split(self, run: Run, begin: int, end: int) -> Iterator[Span]:
        item = run.dtype.itemsize
        pending = begin
        index = max(0, bisect_right(self.offsets, begin) - 1)
        while index < len(self.leaves) and self.offsets[index] < end:
            leaf, offset = self.leaves[index], self.offsets[index]
            index += 1
            first, last = max(begin, offset), min(end, offset + leaf.size)
            if self._run_of[index - 1] is not run or first >= last or not leaf.direct:
                continue
            if pending < first:
                yield Span(run, pending, (first - pending) // item)
            yield Span(run, first, (last - first) // item, leaf, (first - offset) // item)
            pending = last
        if pending < end:
            yield Span(run, pending, (end - pending) // item)

    def within(self, start: int, stop: int) -> Iterator[tuple[Leaf, int, int, int]]:
        """(leaf, its first element there, how many, at which byte) for all leaves that have elements in these bytes."""
        index = max(0, bisect_right(self.offsets, start) - 1)
        while index < len(self.leaves) and self.offsets[index] < stop:
            leaf, offset = self.leaves[index], self.offsets[index]
            first, last = max(start, offset), min(stop, offset + leaf.size)
            if first < last:
                item = leaf.tensor.element_size()
                yield leaf, (first - offset) // item, (last - first) // item, first
            index += 1


def typed(memory: Any, kind: dtype, at: int, count: int) -> Tensor:
    """A view of `count` elements of shared memory (or any writable buffer), from byte `at` on."""
    import torch

    if count == 0:
        return torch.empty(0, dtype=kind, device="cpu")
    return torch.frombuffer(memory, dtype=kind, count=count, offset=at)


def put(layout: Layout, memory: Any, at: int, start: int, stop: int, skip: tuple[int, int] = (0, 0)) -> None:
    """Copy these bytes of the layout from its leaves into `memory`, where byte 0 of the layout is at `at`; of leaves that can be read
    where they are, not what lies in `skip`."""
    for leaf, first, count, offset in layout.within(start, stop):
        tensor = leaf.tensor
        if not leaf.direct:
            if first == 0 and count == tensor.numel():
                typed(memory, tensor.dtype, at + offset, count).view(tensor.shape).copy_(tensor)
            else:
                typed(memory, tensor.dtype, at + offset, count).copy_(tensor.reshape(-1)[first : first + count])
            continue
        flat, item = tensor.view(-1), tensor.element_size()
        end = offset + count * item
        for begin, until in ((offset, min(end, skip[0])), (max(offset, skip[1]), end)) if skip[0] < skip[1] else ((offset, end),):
            if begin < until:
                element, number = first + (begin - offset) // item, (until - begin) // item
                typed(memory, tensor.dtype, at + begin, number).copy_(flat[element : element + number])


def cuts(size: int, count: int) -> list[tuple[int, int]]:
    """`size` bytes in `count` parts of about the same length, none of which shares a line with another; parts may be empty."""
    unit = PAGE if size >= WHOLE_PAGES else ALIGNMENT
    units = -(-size // unit)
    edges = [min(size, units * index // count * unit) for index in range(count + 1)]
    return list(itertools.pairwise(edges))


def accumulator(kind: dtype) -> dtype:
    """In which dtype sums of `kind` are kept."""
    import torch

    if kind.is_complex:
        return torch.complex128 if kind == torch.complex128 else torch.complex64
    return torch.float64 if kind == torch.float64 else torch.float32


def unsupported(path: str, what: str, *help: tuple[str, str]) -> UsageError:
    """The error for a part of a value that cannot be averaged."""
    return UsageError("average-unsupported", f"{path}: {what} cannot be averaged", help=help)


def _up(at: int, unit: int) -> int:
    return -(-at // unit) * unit


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
    raise unsupported(path, described(value), ("give tensors, numpy arrays and floats, and dicts, lists and tuples of them", ""))


_FLOATS = (
    ("average only what has a mean", "{key: tensor for key, tensor in state.items() if tensor.is_floating_point()}"),
    ("or the floats that they stand for", "tensor.double()"),
)


def _tensor(value: Tensor, path: str) -> Tensor:
    import torch

    kind = value.dtype
    if not (kind.is_floating_point or kind.is_complex):
        raise unsupported(path, f"a tensor of {str(kind).removeprefix('torch.')}", *_FLOATS)
    if type(value) is not torch.Tensor and not isinstance(value, torch.nn.Parameter):
        raise unsupported(path, described(value), ("give the plain tensor that it consists of here", "tensor.to_local()"))
    if value.layout != torch.strided or value.device.type == "meta" or value.is_quantized:
        raise unsupported(path, f"a tensor of layout {value.layout} on {value.device}", ("make it a dense one", "tensor.to_dense()"))
    if kind not in _known():
        raise unsupported(path, f"a tensor of {str(kind).removeprefix('torch.')}", ("convert it", "tensor.float()"))
    return value.detach()


_dtypes: set[Any] = set()


def _known() -> set[Any]:
    import torch

    if not _dtypes:
        names = (
            "float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32",
            "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
        )  # fmt: skip
        _dtypes.update(getattr(torch, name) for name in names if hasattr(torch, name))
    return _dtypes


def _array(value: Any, path: str) -> Leaf:
    import numpy
    import torch

    kind = "array" if type(value) is numpy.ndarray else "scalar" if isinstance(value, numpy.generic) else ""
    if not kind:
        raise unsupported(path, described(value))
    array = numpy.asarray(value)
    if array.dtype.kind not in "fc" or array.dtype.itemsize > (16 if array.dtype.kind == "c" else 8):
        raise unsupported(path, f"a numpy array of {array.dtype}", ("convert it", 'array.astype("float64")'))
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
    """New tensors like the leaves of a tree, by path."""
    import torch

    return {leaf.path: torch.empty_like(leaf.tensor) for leaf in tree.leaves}


def target(out: Any, tree: Tree) -> Tree:
    """`out`, into whose tensors a mean of `tree` is to be written. UsageError when it is built otherwise."""
    there = Tree(out)
    want, have = tree.described(), there.described()
    if want != have:
        other = next((pair for pair in zip(want, have, strict=False) if pair[0] != pair[1]), None)
        what = f"{_words(other[1])}, and the value {_words(other[0])}" if other else f"{len(have)} tensors, and the value {len(want)}"
        raise UsageError("usage", f"out= must be built like the value: it has {what}")
    for leaf in there.leaves:
        fixed = leaf.kind in ("number", "scalar") or (leaf.kind == "array" and not leaf.original.flags.writeable)
        folded = any(stride == 0 and length > 1 for stride, length in zip(leaf.tensor.stride(), leaf.tensor.shape, strict=True))
        if fixed or folded:
            raise UsageError("usage", f"out= cannot be written to: {leaf.path.replace('value', 'out', 1)} is {_unwritable(leaf, folded)}")
    return there


def deliver(out: Tree) -> None:
    """Bring what was written to the tensors of an `out` home, where those are copies of arrays that torch can have no view of."""
    for leaf in out.leaves:
        if leaf.kind == "array" and not leaf.viewed:
            leaf.original[...] = leaf.tensor.numpy()


def _unwritable(leaf: Leaf, folded: bool) -> str:
    return "an expanded tensor, whose elements share memory" if folded else f"{described(leaf.original)} that cannot change"


def _words(leaf: tuple[str, str, Sequence[int]]) -> str:
    return f"{leaf[0]}: {leaf[1]} {list(leaf[2])}"
