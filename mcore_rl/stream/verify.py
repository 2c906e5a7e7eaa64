"""Checksums of bytes in flight: 64 bits per slice, one multiply-add per 8 bytes.

checksum = sum over i of word[i] * multiplier[i] mod 2**64, with odd pseudo-random multipliers. A change
confined to one word always changes it (an odd number has an inverse mod 2**64); words that trade places or
several changes at once escape with probability about 2**-63. It guards against faults, not adversaries.
"""

from functools import cache

import torch
from torch import Tensor

WORD_BYTES = 8


@cache
def _multipliers(num_words: int) -> Tensor:
    """int64 [num_words], the same on every rank; the generator's stream is fixed by its seed."""
    generator = torch.Generator().manual_seed(0x5EED)
    return torch.randint(-(2**63), 2**63 - 1, (num_words,), generator=generator, dtype=torch.int64) | 1


class Checksum:
    """Checksums of slices of buffers up to `max_bytes` long; holds a table of that size."""

    def __init__(self, max_bytes: int) -> None:
        self._multipliers_W = _multipliers(-(-max_bytes // WORD_BYTES))

    def __call__(self, words_W: Tensor, first_word: int) -> int:
        """Signed 64-bit sum over int64 `words_W`, which start at word `first_word` of their buffer."""
        factors_W = self._multipliers_W[first_word : first_word + words_W.numel()]
        return int(torch.dot(words_W, factors_W))
