"""Boxes that the same ranks hold and want, laid end to end, in; any stretch of them out, again as boxes."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm, prod

from mcore_rl.slices.box import Box, itemsize
from mcore_rl.slices.hf.fp8 import BLOCK, FP8, SCALE_BYTES, SCALE_DTYPE, num_blocks, scale_box
from mcore_rl.slices.layouts.ranks import Ranks

BoxSpan = tuple[str, tuple[int, ...], tuple[int, ...]]
"""HF name, start, stop"""

Cut = tuple[int, int]
"""(span, row of it) at which a region is cut"""


@dataclass(frozen=True)
class SplitGranularity:
    """How finely boxes are cut to even out the load.

    min_bytes   no box of fewer bytes is cut
    rows        cuts lie at multiples of so many rows of the HF tensor; FP8 blocks stay whole in any case
    """

    min_bytes: int = 1 << 16
    rows: int = 1


@dataclass(frozen=True)
class Slice:
    """A box that travels in `dtype`, its elements in row-major order; FP8 values with the scales of their
    blocks.
    """

    box: Box
    dtype: str

    @property
    def scales(self) -> "Slice | None":
        return Slice(scale_box(self.box), SCALE_DTYPE) if self.dtype == FP8 else None

    @property
    def num_bytes(self) -> int:
        """Those of its scales included."""
        scales = self.scales
        return self.box.numel * itemsize(self.dtype) + (0 if scales is None else scales.num_bytes)


class SharedRegion:
    """Cells in the order of name and start; bytes are those of the targets' dtype."""

    def __init__(
        self,
        sources: Ranks,
        targets: Ranks,
        dtype: str,
        spans: Sequence[BoxSpan],
        granularity: SplitGranularity,
    ) -> None:
        self.sources, self.targets, self.dtype = sources, targets, dtype
        self._spans, self._granularity = sorted(spans), granularity
        self._multiple = lcm(granularity.rows, BLOCK) if dtype == FP8 else granularity.rows
        size = itemsize(dtype)
        columns = [
            tuple(b - a for a, b in zip(start[1:], stop[1:], strict=True))
            for _, start, stop in self._spans
        ]
        self._row_bytes = [size * prod(shape) for shape in columns]
        self._scale_bytes = [
            SCALE_BYTES * num_blocks(*shape) if dtype == FP8 else 0 for shape in columns
        ]
        self._num_rows = [stop[0] - start[0] if start else 1 for _, start, stop in self._spans]
        self._ends = list(
            accumulate(map(self._num_bytes, range(len(columns)), self._num_rows), initial=0)
        )

    @property
    def sort_key(self) -> tuple[BoxSpan, str]:
        return self._spans[0], self.dtype

    @property
    def num_bytes(self) -> int:
        return self._ends[-1]

    def cut(self, part: int, parts: int) -> Cut:
        """Where to cut, at or before `part` / `parts` of the bytes; rises with it, exact at 0 and 1."""
        position = self.num_bytes * part // parts
        span = bisect_right(self._ends, position) - 1
        if span >= len(self._spans):
            return len(self._spans), 0
        if (
            self._ends[span + 1] - self._ends[span] < self._granularity.min_bytes
            or not self._spans[span][1]
        ):
            return span, 0
        first = self._spans[span][1][0]
        span_bytes = self._ends[span + 1] - self._ends[span]
        row = first + (position - self._ends[span]) * self._num_rows[span] // span_bytes
        return span, max(0, row - row % self._multiple - first)

    def bytes_before(self, cut: Cut) -> int:
        span, row = cut
        return self._ends[span] + (self._num_bytes(span, row) if row else 0)

    def _num_bytes(self, span: int, rows: int) -> int:
        """Of the first `rows` rows of a span."""
        return rows * self._row_bytes[span] + num_blocks(rows) * self._scale_bytes[span]

    def slices(self, begin: Cut, end: Cut) -> tuple[Slice, ...]:
        """The boxes between two cuts."""
        last, last_row = end
        found = []
        span, row = begin
        while (span, row) < end:
            name, start, stop = self._spans[span]
            first, past = (row, last_row) if span == last else (row, 0)
            if first or past:
                rows = (start[0] + first, start[0] + past if past else stop[0])
                start, stop = (rows[0], *start[1:]), (rows[1], *stop[1:])
            found.append(Slice(Box(name, start, stop), self.dtype))
            span, row = span + 1, 0
        return tuple(found)
