"""Weighted sums of pieces of memory, block by block, so that each byte is loaded once.

Sums are kept in float64 for float64 and in float32 for all smaller floats (complex numbers likewise). With equal weights it is the
sum divided by the count, as `torch.mean` has it, and not a sum of products: the mean of small whole numbers is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from rallypoint.primitives.flat import accumulator

if TYPE_CHECKING:
    from torch import Tensor, dtype

BLOCK_BYTES = 512 * 1024
"""Of the accumulator: it stays in a core's second cache (1 MiB and more) while the contributions pass by. Below 256 KiB the calls cost
more than the memory does."""

EXACT_MOST = 2.0**64
"""Up to here the inverse of a power of two is an ordinary number in every dtype that sums are kept in."""

TELL_BLOCKS = 64
"""Blocks between two looks at how far it is: 32 MiB, some 10 ms."""


PLAIN = 64
"""Powers of two from 1 up to which the largest weight is taken as it is: every dtype that sums are kept in has room for far more."""


class Weights:
    """What each contribution counts. Those of weight 0 are not read: a NaN in them is nobody's.

    Only their ratios matter. Where all are tiny or huge, as likelihoods are, they are multiplied by a power of two, which changes no
    bit of a ratio: 1e-50 is 0 in float32, in which sums are kept, and the mean would be 0 / 0.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.counted = [index for index, weight in enumerate(weights) if weight > 0.0]
        given = [weights[index] for index in self.counted]
        self.equal = len(set(given)) <= 1
        self.each = [1.0] * len(given) if self.equal else _plain(given)
        self.total = total(self.each)  # by which a sum is divided


def _plain(weights: list[float]) -> list[float]:
    exponent = math.frexp(max(weights))[1]
    return weights if abs(exponent) <= PLAIN else [math.ldexp(weight, -exponent) for weight in weights]


def total(weights: Iterable[float]) -> float:
    """Their sum; infinity when that is beyond all floats."""
    try:
        return math.fsum(weights)
    except OverflowError:
        return math.inf


def combine(
    into: Tensor,
    parts: Sequence[Tensor],
    weights: Sequence[float] | None,
    divisor: float | None,
    tell: Callable[[int], None] | None = None,
) -> bool:
    """Write the sum of `parts`, times `weights` if there are any, divided by `divisor` if there is one, to `into`; whether all of it is
    finite. All are flat and of one length; `into` must not share memory with a part. `tell(n)`: n more elements are done."""
    import torch

    sums = accumulator(parts[0].dtype)
    block = BLOCK_BYTES // sums.itemsize
    own = into.dtype == sums
    scratch = torch.empty(0 if own else min(block, into.numel()), dtype=sums, device="cpu")
    again = torch.empty(0 if all(part.dtype == sums for part in parts) else min(block, into.numel()), dtype=sums, device="cpu")
    factor = _exact_inverse(divisor)
    finite, done = True, 0
    for count, (target, *blocks) in enumerate(zip(_blocks(into, block), *(_blocks(part, block) for part in parts), strict=True), 1):
        held = target if own else scratch[: target.numel()]
        _sum(held, blocks, weights, again[: target.numel()])
        finite = finite and _finite(held)
        if factor is not None:
            held.mul_(factor)
        elif divisor is not None and divisor != 1.0:
            held.div_(divisor)
        if not own:
            target.copy_(held)
        done += target.numel()
        if tell is not None and count % TELL_BLOCKS == 0:
            tell(done)
            done = 0
    if tell is not None and done:
        tell(done)
    return finite


def _exact_inverse(divisor: float | None) -> float | None:
    """What to multiply by, when that is the same to the last bit: a power of two, as the number of ranks mostly is. A division takes a
    processor several times as long as all else that is done with an element."""
    if divisor is None or divisor == 1.0 or not 1.0 <= divisor <= EXACT_MOST or math.frexp(divisor)[0] != 0.5:
        return None
    return 1.0 / divisor


def _blocks(tensor: Tensor, length: int) -> tuple[Tensor, ...]:
    blocks: tuple[Tensor, ...] = tensor.split(length)  # type: ignore[no-untyped-call]
    return blocks


def _sum(held: Tensor, blocks: Sequence[Tensor], weights: Sequence[float] | None, scratch: Tensor) -> None:
    import torch

    first = blocks[0]
    if weights is None:
        if len(blocks) > 1 and first.dtype == blocks[1].dtype == held.dtype:
            torch.add(first, blocks[1], out=held)
            rest = blocks[2:]
        else:
            held.copy_(first)
            rest = blocks[1:]
        for block in rest:
            held.add_(_as(block, held.dtype, scratch))
        return
    torch.mul(_as(first, held.dtype, scratch), weights[0], out=held)
    for block, weight in zip(blocks[1:], weights[1:], strict=True):
        held.add_(_as(block, held.dtype, scratch), alpha=weight)


def _as(block: Tensor, kind: dtype, scratch: Tensor) -> Tensor:
    return block if block.dtype == kind else scratch.copy_(block)


def _finite(held: Tensor) -> bool:
    """Whether all elements are: their sum is not, if one of them is not. (If only the sum is not, look at each.)"""
    import torch

    if held.is_complex():
        held = torch.view_as_real(held)
    return math.isfinite(held.sum().item()) or bool(torch.isfinite(held).all())


def not_finite(tensor: Tensor) -> bool:
    """Whether a NaN or an infinity is among the elements."""
    import torch

    if tensor.dtype.itemsize == 1:  # float8 has no isfinite
        tensor = tensor.float()
    return not bool(torch.isfinite(tensor).all())
