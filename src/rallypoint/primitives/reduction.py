"""The work of one rank in a round: add up its part of what all ranks of its host have, and copy the mean out of where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rallypoint.primitives import flat, mean
from rallypoint.primitives import pages as shared
from rallypoint.primitives.division import Division
from rallypoint.primitives.flat import Layout, Span
from rallypoint.primitives.progress import Progress
from rallypoint.primitives.segments import Segments

if TYPE_CHECKING:
    from torch import Tensor


class Reduction:
    """For one division of the work."""

    def __init__(self, layout: Layout, number: int, division: Division, segments: Segments, progress: Progress) -> None:
        self._layout = layout
        self._number = number
        self._division = division
        self._segments = segments
        self._progress = progress

    def add_up(self) -> bool:
        """My part of my host's sum, or of the mean if there is no other host, into my result; whether it is finite."""
        division, own = self._division, self._segments.result
        start, stop = division.parts[division.me]
        into = own.mapped.memory
        finite = True
        self._progress.begin("adding up", stop - start)
        own.lend(self._number, division.others)
        for span in self._layout.spans(start, stop, direct=True):
            if division.wide is None:
                target = flat.typed(into, span.run.dtype, division.head + span.start - start, span.length)
                finite = self._combine(target, span, division.weights.total) and finite
            else:
                sums = flat.accumulator(span.run.dtype)
                at = division.head + division.wide.at(span.start) - division.wide.at(start)
                finite = self._combine(flat.typed(into, sums, at, span.length), span, None) and finite
        return finite

    def _combine(self, target: Tensor, span: Span, divisor: float | None) -> bool:
        parts, weights = [], []
        for index in self._division.host:
            weight = self._division.weight(index)
            if weight > 0.0:
                parts.append(self._source(index, span))
                weights.append(weight)
        if not parts:
            target.zero_()
            return True
        item = span.run.dtype.itemsize
        tell = lambda count: self._progress.more(count * item)  # noqa: E731
        return mean.combine(target, parts, None if self._division.weights.equal else weights, divisor, tell)

    def _source(self, index: int, span: Span) -> Tensor:
        """What this rank contributes there: mine is read in my own tensors where that can be."""
        if index == self._division.me and span.leaf is not None:
            return span.leaf.tensor.view(-1)[span.at : span.at + span.length]
        return flat.typed(self._segments.contribution_of(index), span.run.dtype, shared.PAGE + span.start, span.length)

    def sum_of_my_host(self, start: int, stop: int) -> list[tuple[Span, list[Tensor]]]:
        """The sums of my host for these bytes, as they lie in the results of its ranks: for each span one tensor after the other."""
        division, wide = self._division, self._division.wide
        assert wide is not None
        found = []
        for span in self._layout.spans(start, stop):
            item, pieces = span.run.dtype.itemsize, []
            for index, (first, last) in division.parts.items():
                begin, end = max(first, span.start), min(last, span.start + span.length * item)
                if begin < end:
                    at = division.head + wide.at(begin) - wide.at(first)
                    sums = flat.accumulator(span.run.dtype)
                    pieces.append(flat.typed(self._segments.result_of(index), sums, at, (end - begin) // item))
            found.append((span, pieces))
        return found

    def copy(self, targets: dict[str, Tensor]) -> None:
        """Write the mean to these tensors, by path."""
        division, segments = self._division, self._segments
        self._progress.begin("copying", self._layout.size)
        split: dict[str, Tensor] = {}
        for index, start, stop, there in self._means():
            self._copy_part(targets, split, start, stop, there)
            segments.read(index, there)
        for path, whole in split.items():
            targets[path].copy_(whole)
        if division.several_hosts:
            for index in division.others:  # the sums have been read by the first of us, and by nobody else
                segments.read(index, segments.result_of(index))

    def _means(self) -> Sequence[tuple[int, int, int, memoryview]]:
        """(who has it, from which byte, to which byte, the memory) of each part of the mean."""
        division, segments = self._division, self._segments
        if division.several_hosts:
            return [(division.first, 0, self._layout.size, segments.final_of(division.first))]
        return [(index, start, stop, segments.result_of(index)) for index, (start, stop) in division.parts.items()]

    def _copy_part(self, targets: dict[str, Tensor], split: dict[str, Tensor], start: int, stop: int, there: memoryview) -> None:
        import torch

        for leaf, first, count, offset in self._layout.within(start, stop):
            source = flat.typed(there, leaf.tensor.dtype, self._division.head + offset - start, count)
            target = targets[leaf.path]
            if target.is_contiguous():
                target.view(-1)[first : first + count].copy_(source)
            elif count == target.numel():
                target.copy_(source.view(target.shape))
            else:
                if leaf.path not in split:
                    split[leaf.path] = torch.empty(target.shape, dtype=target.dtype, device="cpu")
                split[leaf.path].view(-1)[first : first + count].copy_(source)
            self._progress.more(source.numel() * source.element_size())
