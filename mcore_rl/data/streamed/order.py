r"""Draws the order of a streamed data set from seed and epoch: windows of chunks, both shuffled.

    files      |chunk|chunk|chunk|chunk|chunk|chunk|chunk|chunk|      contiguous rows each
                   \  chunks in a random order, cut into windows  /
    windows    [chunk 6  chunk 1  chunk 4] [chunk 0  chunk 7 ...] ...
                   \  rows of a window in a random order  /
    positions  row, row, row, ...

Any position of any epoch is found without drawing those before it. Axes: C chunks, W windows.
"""

from dataclasses import dataclass

import numpy as np

from mcore_rl.types import Array

CHUNKS_PER_WINDOW = 64
"""Places of the files that a window's rows come from."""


@dataclass(frozen=True)
class EpochOrder:
    """Order of one epoch. order_C: chunks as they are drawn.

    first_chunk_W1    place in order_C of each window's first chunk, and the number of chunks
    first_row_W1      position of each window's first row in the epoch, and the number of rows
    """

    order_C: Array
    first_chunk_W1: Array
    first_row_W1: Array

    @property
    def num_windows(self) -> int:
        return len(self.first_row_W1) - 1

    def window_of(self, place: int) -> int:
        """Return the window that holds a position of this epoch."""
        return int(np.searchsorted(self.first_row_W1, place, side="right")) - 1

    def chunks_of(self, window: int) -> Array:
        """Return the chunks of a window."""
        return self.order_C[self.first_chunk_W1[window] : self.first_chunk_W1[window + 1]]


def plan_epoch(rows_C: Array, seed: int, epoch: int, shuffle: bool) -> EpochOrder:
    """Return the order of an epoch over chunks of `rows_C` rows each."""
    num_chunks = len(rows_C)
    num_windows = -(-num_chunks // CHUNKS_PER_WINDOW)
    order_C = permutation(num_chunks, seed, epoch) if shuffle else np.arange(num_chunks)
    first_chunk_W1 = np.arange(num_windows + 1) * num_chunks // num_windows
    rows_before = np.concatenate([[0], np.cumsum(rows_C[order_C])])
    return EpochOrder(order_C, first_chunk_W1, rows_before[first_chunk_W1])


def permutation(size: int, *key: int) -> Array:
    """Return the numbers below `size` in an order drawn from `key` alone.

    It sorts raw bits of PCG64, whose stream is the same in every version of numpy; that of
    Generator.permutation need not be.
    """
    bits = np.random.PCG64(np.random.SeedSequence(key)).random_raw(size)
    return np.argsort(bits, kind="stable")
