"""Boxes that the same source ranks hold and the same target ranks need, laid end to end and cut.

    KiB     0               4               8               12
    spans   | k_proj 0-3    | k_proj 8-11   | v_proj 0-3    |       rows of HF tensors
    cuts    ^ cut(0, 2)             ^ cut(1, 2)             ^ cut(2, 2)
    slices  | k_proj 0-3    | 8-9   | 10-11 | v_proj 0-3    |
            |----- first half ------|----- second half -----|       6 KiB each

A cut falls between two rows of a box, so every part of a region is again a list of boxes: its
slices.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import lcm, prod
from operator import sub

import numpy as np
from numpy.typing import NDArray

from mcore_rl.weights.box import Box, Shape, itemsize
from mcore_rl.weights.hf.fp8 import (
    BLOCK,
    FP8,
    SCALE_BYTES,
    SCALE_DTYPE,
    count_blocks,
    make_scale_box,
)
from mcore_rl.weights.layouts.layout import Ranks

BoxSpan = tuple[str, Shape, Shape]
"""(HF name, start, stop): a box of the region, as a plain tuple because there are so many."""

Cut = tuple[int, int]
"""(index of a span, rows of it before the cut)"""


@dataclass(frozen=True)
class SplitGranularity:
    """How finely boxes are cut to even out the load.

    min_bytes   smaller boxes are not cut
    rows        cuts lie at multiples of so many rows of the HF tensor; FP8 blocks always stay whole
    """

    min_bytes: int = 1 << 16
    rows: int = 1


@dataclass(frozen=True)
class Slice:
    """A box that travels in `dtype`, its elements in row-major order.

    FP8 values travel with the scales of their blocks.
    """

    box: Box
    dtype: str

    @property
    def scales(self) -> "Slice | None":
        """The scales that travel with the values; None unless the dtype is FP8."""
        return Slice(make_scale_box(self.box), SCALE_DTYPE) if self.dtype == FP8 else None

    @property
    def num_bytes(self) -> int:
        """Bytes of the values and of their scales."""
        scales = self.scales
        return self.box.numel * itemsize(self.dtype) + (0 if scales is None else scales.num_bytes)


_PAST_INT64 = 2**63


@dataclass(frozen=True)
class _SpanSize:
    """Rows of a span, and what they take.

    scale_row_bytes  bytes of the scales of one row of blocks
    """

    num_rows: int
    row_bytes: int
    scale_row_bytes: int

    @staticmethod
    def from_span(start: Shape, stop: Shape, dtype: str) -> "_SpanSize":
        row_shape = tuple(map(sub, stop[1:], start[1:]))
        scale_bytes = SCALE_BYTES * count_blocks(*row_shape) if dtype == FP8 else 0
        num_rows = stop[0] - start[0] if start else 1
        return _SpanSize(num_rows, itemsize(dtype) * prod(row_shape), scale_bytes)

    def bytes_of(self, rows: int) -> int:
        """Return the bytes of the first `rows` rows."""
        return rows * self.row_bytes + count_blocks(rows) * self.scale_row_bytes

    @cached_property
    def num_bytes(self) -> int:
        return self.bytes_of(self.num_rows)


class SharedRegion:
    """The spans of one set of sources and one set of targets, in the order of name and start.

    Bytes are those of the targets' dtype, scales included.
    """

    def __init__(
        self,
        sources: Ranks,
        targets: Ranks,
        dtype: str,
        spans: Sequence[BoxSpan],
        granularity: SplitGranularity,
    ) -> None:
        self.sources = sources
        self.targets = targets
        self.dtype = dtype
        self._spans = sorted(spans)
        self._granularity = granularity
        self._multiple = lcm(granularity.rows, BLOCK) if dtype == FP8 else granularity.rows
        sizes: dict[tuple[Shape, Shape], _SpanSize] = {}
        """Computed once for all tensors that are cut alike."""
        self._sizes: list[_SpanSize] = []
        for _, start, stop in self._spans:
            size = sizes.get((start, stop))
            if size is None:
                size = sizes[start, stop] = _SpanSize.from_span(start, stop, dtype)
            self._sizes.append(size)
        self._ends = list(accumulate((size.num_bytes for size in self._sizes), initial=0))
        """Bytes before each span, and last the bytes of all."""

    @property
    def sort_key(self) -> tuple[BoxSpan, str]:
        """Orders regions alike on all ranks: no two regions share their first span and dtype."""
        return self._spans[0], self.dtype

    @property
    def num_bytes(self) -> int:
        return self._ends[-1]

    def cut(self, part: int, parts: int) -> Cut:
        """Return a cut at or before `part` / `parts` of the bytes, as near as rows allow.

        The cut never moves back as `part` grows; it is exact for part 0 and for part `parts`.
        """
        position = self.num_bytes * part // parts
        span = bisect_right(self._ends, position) - 1
        if span >= len(self._spans):
            return len(self._spans), 0
        span_bytes = self._ends[span + 1] - self._ends[span]
        start = self._spans[span][1]
        if span_bytes < self._granularity.min_bytes or not start:
            return span, 0
        first = start[0]
        row = first + (position - self._ends[span]) * self._sizes[span].num_rows // span_bytes
        return span, max(0, row - row % self._multiple - first)

    def cut_all(self, first_parts: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
        """Return `cut` of each of `first_parts`, int64 [cuts]: int64 [cuts, (span, row)]."""
        if max(size.num_bytes * size.num_rows for size in self._sizes) >= _PAST_INT64:
            return np.array([self.cut(part, parts) for part in first_parts.tolist()])
        whole, rest = divmod(self.num_bytes, parts)  # so that no product overflows
        positions = first_parts * whole + first_parts * rest // parts
        ends = np.array(self._ends)
        spans = np.searchsorted(ends, positions, side="right") - 1
        at = np.minimum(spans, len(self._spans) - 1)
        first_rows = np.array([start[0] if start else 0 for _, start, _ in self._spans])[at]
        num_rows = np.array([size.num_rows for size in self._sizes])[at]
        span_bytes = ends[at + 1] - ends[at]
        rows = first_rows + (positions - ends[at]) * num_rows // span_bytes
        rows = np.maximum(0, rows - rows % self._multiple - first_rows)
        is_whole = (span_bytes < self._granularity.min_bytes) | (spans > at)
        return np.stack([spans, np.where(is_whole, 0, rows)], axis=1)

    def bytes_before(self, cut: Cut) -> int:
        """Return the bytes of the region before a cut."""
        span, row = cut
        return self._ends[span] + (self._sizes[span].bytes_of(row) if row else 0)

    def slices(self, begin: Cut, end: Cut) -> tuple[Slice, ...]:
        """Return the boxes between two cuts."""
        last, last_row = end
        between = []
        span, row = begin
        while (span, row) < end:
            stop_row = last_row if span == last else 0
            between.append(Slice(self._rows(span, row, stop_row), self.dtype))
            span += 1
            row = 0
        return tuple(between)

    def _rows(self, span: int, first: int, past: int) -> Box:
        """Return rows [first, past) of a span as a box; `past` 0 means to its end."""
        name, start, stop = self._spans[span]
        if not first and not past:
            return Box(name, start, stop)
        stop_row = start[0] + past if past else stop[0]
        return Box(name, (start[0] + first, *start[1:]), (stop_row, *stop[1:]))
