"""Split of the work among the ranks of a round, and the weighted sums that each computes.

The split follows from what all of them know, so all come to the same.

Sums are kept in float64 for float64 and in float32 for smaller floats; for complex numbers
likewise. With equal weights a mean is the sum divided by the count, as `torch.mean` has it, and no
sum of products: the mean of small whole numbers is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rallypoint.primitives.average.layout import cuts
from rallypoint.primitives.average.participants import Participant

if TYPE_CHECKING:
    from torch import Tensor, dtype

BLOCK_BYTES = 512 * 1024
"""Bytes of sums at a time: they stay in a core's second cache (1 MiB and more) while the values
pass by. Below 256 KiB the calls cost more than the memory."""

EXACT_MOST = 2.0**64
"""Largest power of two whose inverse is an ordinary number in every dtype of sums."""


class Split:
    """Hosts and parts of the work in one turn of a round. Numbers are places among the
    participants.

    `living`: those still in the round. `parts`: which bytes of the mean are in the memory of which
    rank of this host when the work is done."""

    def __init__(
        self,
        size: int,
        participants: Sequence[Participant],
        me: int,
        living: Sequence[int],
    ) -> None:
        by_scope: dict[bytes, list[int]] = {}
        for index in living:
            by_scope.setdefault(participants[index].offer.scope, []).append(index)
        self.hosts = list(by_scope.values())
        self.host = next(host for host in self.hosts if me in host)
        self.leads = self.host[0] == me
        if len(self.hosts) == 1:
            self.parts = dict(zip(self.host, cuts(size, len(self.host)), strict=True))
        else:
            self.parts = {self.host[0]: (0, size)}
        weights = Weights([participants[index].offer.weight for index in living])
        self.weights = {living[at]: weight for at, weight in weights.each.items()}
        self.total = weights.total


class Weights:
    """Factors of the contributions (`each`, by index), and their sum (`total`).

    Contributions of weight 0 are not in it: they are not read, and a NaN in them does not matter.
    Only ratios matter. Weights are multiplied by a power of two, which changes no bit of a ratio,
    so that the largest is below 1: all may be tiny or huge, as likelihoods are, and 1e-50 is 0 in
    float32, in which sums are kept.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.each = {index: weight for index, weight in enumerate(weights) if weight > 0.0}
        if len(set(self.each.values())) == 1:
            self.each = dict.fromkeys(self.each, 1.0)
        elif self.each:
            exponent = math.frexp(max(self.each.values()))[1]
            self.each = {at: math.ldexp(one, -exponent) for at, one in self.each.items()}
        self.total = sum_of(self.each.values())


def sum_of(weights: Iterable[float]) -> float:
    """Add up weights; infinity when the sum is beyond all floats."""
    try:
        return math.fsum(weights)
    except OverflowError:
        return math.inf


def accumulator(kind: dtype) -> dtype:
    """Return the dtype in which sums of `kind` are kept."""
    import torch

    if kind.is_complex:
        return torch.complex128 if kind == torch.complex128 else torch.complex64
    return torch.float64 if kind == torch.float64 else torch.float32


def combine(
    into: Tensor,
    parts: Sequence[Tensor],
    weights: Sequence[float],
    divisor: float = 1.0,
) -> bool:
    """Write the weighted sum of `parts`, divided by `divisor`, to `into`; tell whether it is
    finite.

    All are flat and of one length; `into` may be the first of the parts. It goes block by block, so
    that each byte is loaded once.
    """
    import torch

    if not parts:
        into.zero_()
        return True
    sums = accumulator(parts[0].dtype)
    block = BLOCK_BYTES // sums.itemsize
    own = into.dtype == sums  # then the sum is made in its place
    held_block = torch.empty(0 if own else min(block, into.numel()), dtype=sums, device="cpu")
    converted = torch.empty(min(block, into.numel()), dtype=sums, device="cpu")
    factor = _exact_inverse(divisor)
    finite = True
    for start in range(0, into.numel(), block):
        stop = min(start + block, into.numel())
        held = into[start:stop] if own else held_block[: stop - start]
        _sum(held, [part[start:stop] for part in parts], weights, converted[: stop - start])
        finite = finite and _is_finite(held)
        if factor is not None:
            held.mul_(factor)
        elif divisor != 1.0:
            held.div_(divisor)
        if not own:
            into[start:stop].copy_(held)
    return finite


def _exact_inverse(divisor: float) -> float | None:
    """Return the factor that is the same as the divisor to the last bit, if there is one.

    That is so for powers of two, as the number of ranks mostly is. A division takes several times
    as long as all other work on an element.
    """
    if not 1.0 < divisor <= EXACT_MOST or math.frexp(divisor)[0] != 0.5:
        return None
    return 1.0 / divisor


def _sum(held: Tensor, blocks: Sequence[Tensor], weights: Sequence[float], scratch: Tensor) -> None:
    import torch

    def wide(block: Tensor) -> Tensor:
        return block if block.dtype == held.dtype else scratch.copy_(block)

    if len(blocks) > 1 and weights[0] == weights[1] == 1.0 and blocks[0].dtype == held.dtype:
        torch.add(blocks[0], blocks[1], out=held)
        done = 2
    else:
        torch.mul(wide(blocks[0]), weights[0], out=held)
        done = 1
    for block, weight in zip(blocks[done:], weights[done:], strict=True):
        held.add_(wide(block), alpha=weight)


def _is_finite(held: Tensor) -> bool:
    """Tell whether all elements are finite. If their sum is finite, they are."""
    import torch

    if held.is_complex():
        held = torch.view_as_real(held)
    return math.isfinite(held.sum().item()) or bool(torch.isfinite(held).all())
