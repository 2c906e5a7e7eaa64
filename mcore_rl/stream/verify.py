"""Computes a 64-bit checksum of each slice in flight, of many equal slices in one call.

A slice is rows of ROW_WORDS 8-byte words. Its checksum is the sum over j of
multiplier[j] * (sum over rows of word[row, j]) mod 2**64, with odd pseudo-random multipliers.

A change confined to one word always changes the checksum, because an odd number has an inverse mod
2**64. Several changes, or stale bytes, escape with odds of about 2**-63. Exchanged words show
unless they lie a multiple of 576 bytes apart. Checksums guard against faults of memory, transport
and bookkeeping, not against adversaries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby

import torch
from torch import Tensor

WORD_BYTES = 8
ROW_WORDS = 72
"""576 bytes: whole cache lines, but no divisor of a page, so that exchanged pages show."""

_HOST = torch.device("cpu")


@cache
def _multipliers(device: torch.device) -> Tensor:
    """Return int64 [ROW_WORDS], with the same values on every device."""
    seeded = torch.Generator().manual_seed(0x5EED)
    return (torch.randint(-(2**63), 2**63 - 1, (ROW_WORDS,), generator=seeded) | 1).to(device)


@dataclass(frozen=True)
class _Run:
    """`count` slices of `num_rows` rows each, end to end."""

    first_word: int
    count: int
    num_rows: int


class Checksums:
    """Checksums of slices that lie end to end, each padded to whole rows."""

    def __init__(
        self, first_word: int, num_rows: Sequence[int], device: torch.device = _HOST
    ) -> None:
        """`num_rows` lists each slice's rows, in order; equal neighbors are summed in one pass."""
        self._multipliers_W = _multipliers(device)
        self._runs = []
        for rows, equal_slices in groupby(num_rows):
            count = len(list(equal_slices))
            self._runs.append(_Run(first_word, count, rows))
            first_word += count * rows * ROW_WORDS

    def __call__(self, words_W: Tensor) -> Tensor:
        """Return int64 [slices]: the checksum of each slice in int64 `words_W`."""
        return torch.cat([self._sums(words_W, run) for run in self._runs])

    def _sums(self, words_W: Tensor, run: _Run) -> Tensor:
        num_words = run.count * run.num_rows * ROW_WORDS
        block = words_W[run.first_word : run.first_word + num_words].view(
            run.count, run.num_rows, ROW_WORDS
        )
        return (block.sum(1) * self._multipliers_W).sum(1)
