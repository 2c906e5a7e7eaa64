"""Computes a 64-bit checksum of each slice in flight, in one of two kinds.

xxh3   XXH3 of the slice's bytes, taken by compiled code while it copies them (one_pass.py), or by
       the xxhash library without a compiler. Bytes that were just copied lie in the processor's
       cache, from where XXH3 reads them several times as fast as the copy wrote them.
rows   plain torch operations, for links with a GPU; many equal slices take one call. A slice is
       rows of ROW_WORDS 8-byte words, and its checksum is the sum over j of
       multiplier[j] * (sum over rows of word[row, j]) mod 2**64, with odd pseudo-random multipliers

With `rows`, a change within one word always changes the checksum, because an odd number has an
inverse mod 2**64. Several changed words, or stale bytes, go unnoticed with odds of about 2**-63.
Exchanged words are noticed unless they lie a multiple of 576 bytes apart. With `xxh3`, any change
goes unnoticed with odds of about 2**-64. Checksums protect against faults of memory, transport and
bookkeeping, not against adversaries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

XXH3 = "xxh3-1"
ROWS = "rows72-1"
"""The names of the kinds that ranks publish. A changed algorithm gets a new name."""

WORD_BYTES = 8
ROW_WORDS = 72
ROW_BYTES = ROW_WORDS * WORD_BYTES
"""576 bytes: whole cache lines, but no divisor of a page, so that exchanged pages are noticed."""

_HOST = torch.device("cpu")

SumSlices = Callable[[Tensor], Tensor]
"""int64 words of a bucket -> int64 [slices]"""


def list_sum_kinds(device: torch.device) -> tuple[str, ...]:
    """Return the kinds that a rank with tensors on `device` computes, the preferred one first."""
    return (XXH3, ROWS) if device.type == "cpu" else (ROWS,)


def make_sums(
    kind: str, first_word: int, num_rows: Sequence[int], device: torch.device = _HOST
) -> SumSlices:
    """Return a function that sums slices, which lie end to end and are padded to whole rows.

    num_rows  each slice's rows, in order
    """
    if kind == ROWS:
        return RowSums(first_word, num_rows, device)
    assert kind == XXH3 and device.type == "cpu", f"no checksums of kind {kind} on {device}"
    return XxhSums(first_word, num_rows)


class XxhSums:
    """Kind xxh3: checksums of slices in host memory, padding included."""

    def __init__(self, first_word: int, num_rows: Sequence[int]) -> None:
        self._bounds: list[tuple[int, int]] = []
        start = first_word * WORD_BYTES
        for rows in num_rows:
            stop = start + rows * ROW_WORDS * WORD_BYTES
            self._bounds.append((start, stop))
            start = stop

    def __call__(self, words_W: Tensor) -> Tensor:
        """Return int64 [slices]: the checksum of each slice in int64 `words_W`."""
        data = words_W.numpy().data.cast("B")
        sums = [xxh3_64_intdigest(data[start:stop]) for start, stop in self._bounds]
        return torch.from_numpy(np.array(sums, dtype=np.uint64).view(np.int64))


@cache
def make_row_multipliers(device: torch.device) -> Tensor:
    """Return int64 [ROW_WORDS], with the same values on every device."""
    seeded = torch.Generator().manual_seed(0x5EED)
    return (torch.randint(-(2**63), 2**63 - 1, (ROW_WORDS,), generator=seeded) | 1).to(device)


@dataclass(frozen=True)
class _Run:
    """`count` slices of `num_rows` rows each, end to end."""

    first_word: int
    count: int
    num_rows: int


class RowSums:
    """Kind rows: checksums of slices on any device."""

    def __init__(
        self, first_word: int, num_rows: Sequence[int], device: torch.device = _HOST
    ) -> None:
        """`num_rows` lists each slice's rows, in order; equal neighbors are summed in one pass."""
        self._multipliers_W = make_row_multipliers(device)
        self._runs = []
        for rows, equal_slices in groupby(num_rows):
            count = len(list(equal_slices))
            self._runs.append(_Run(first_word, count, rows))
            first_word += count * rows * ROW_WORDS

    def __call__(self, words_W: Tensor) -> Tensor:
        """Return int64 [slices]: the checksum of each slice in int64 `words_W`."""
        return torch.cat([self._sum_run(words_W, run) for run in self._runs])

    def _sum_run(self, words_W: Tensor, run: _Run) -> Tensor:
        num_words = run.count * run.num_rows * ROW_WORDS
        block = words_W[run.first_word : run.first_word + num_words].view(
            run.count, run.num_rows, ROW_WORDS
        )
        return (block.sum(1) * self._multipliers_W).sum(1)
