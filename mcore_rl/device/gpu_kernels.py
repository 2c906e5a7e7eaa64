"""Runs our Triton kernels. Each kernel reads every byte once.

    own tensors --copy, sum--> bucket        bucket --copy, sum--> own tensors
    matrix --quantize--> 8-bit values and a scale per block

For a bucket torch takes some forty kernels, and reads the bucket again for its checksums. To
quantize a matrix, torch takes six passes over a band of blocks, each a kernel of its own;
mcore_rl/weights/hf/fp8.py describes the format.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

WORD_BYTES = 8
CHUNK_WORDS = 8192
"""The most words that one program of the kernel moves."""
_FIELDS = 7
_BLOCK = 1024
Run = tuple[int, int, int, int, int, int, int]
"""Rows to move: (address of the first, bytes between rows there, byte in the bucket of the first,
bytes between rows there, rows, bytes of a row, number of the slice). Bytes are multiples of 8."""


class ChunkTable:
    """Runs of a bucket, cut into chunks of similar size, on the device of its words."""

    def __init__(
        self, words_W: Tensor, runs: Sequence[Run], multipliers_W: Tensor, *, copying: bool
    ) -> None:
        """Bind `runs` to memory.

        words_W         int64 words of the bucket; its first two are version and index
        multipliers_W   int64: word i of the bucket counts multipliers_W[i % len] times
        copying         move the rows; otherwise they are summed where they lie in the bucket
        """
        rows = [chunk for run in runs for chunk in _chunks(run)]
        self._chunks_CF = torch.tensor(rows, dtype=torch.int64).view(-1, _FIELDS)
        self._chunks_CF = self._chunks_CF.to(words_W.device)
        self._words_W = words_W
        self._multipliers_W = multipliers_W
        self._copying = copying

    def pack(self, sums_P: Tensor) -> None:
        """Fill the bucket from the rows' own memory; add to each slice's checksum in `sums_P`."""
        self._run(sums_P, version=0, index=0, placing=False)

    def place(self, sums_P: Tensor, version: int, index: int) -> None:
        """Copy the bucket to the rows' own memory; add to each slice's checksum in `sums_P`.

        Nothing is copied and added if the bucket has another version or index.
        """
        self._run(sums_P, version=version, index=index, placing=True)

    def _run(self, sums_P: Tensor, *, version: int, index: int, placing: bool) -> None:
        num_chunks = len(self._chunks_CF)
        if not num_chunks:
            return
        from mcore_rl.device import triton_kernels

        kernel: Any = triton_kernels.copy_and_sum
        kernel[num_chunks,](
            self._chunks_CF,
            self._words_W,
            sums_P,
            self._multipliers_W,
            version,
            index,
            PLACING=placing,
            COPYING=self._copying,
            ROW_WORDS=len(self._multipliers_W),
            FIELDS=_FIELDS,
            MOST_WORDS=CHUNK_WORDS,
            BLOCK=_BLOCK,
        )


def has_kernel(tensor: Tensor) -> bool:
    """Return whether the kernels can run where the tensor lies."""
    return tensor.is_cuda and find_spec("triton") is not None


def _chunks(run: Run) -> list[tuple[int, ...]]:
    """Cut a run: (address, stride there, word in the bucket, stride there, words of a row, words in
    all, slice), strides in words."""
    address, own_stride, at, stride, num_rows, row_bytes, number = run
    strides = own_stride // WORD_BYTES, stride // WORD_BYTES
    row_words = row_bytes // WORD_BYTES
    chunks = []
    rows_per_chunk = max(1, CHUNK_WORDS // row_words)
    for row in range(0, num_rows, rows_per_chunk):
        num_words = min(rows_per_chunk, num_rows - row) * row_words
        own = address + row * own_stride
        first = (at + row * stride) // WORD_BYTES
        step = CHUNK_WORDS if rows_per_chunk == 1 else num_words
        for begin in range(0, num_words, step):
            words = min(step, num_words - begin)
            width = row_words if rows_per_chunk > 1 else words
            place = own + begin * WORD_BYTES
            chunks.append((place, strides[0], first + begin, strides[1], width, words, number))
    return chunks


def quantize_blocks(
    weights_NK: Tensor,
    values_NK: Tensor,
    scales_nk: Tensor,
    block: int,
    fp8_max: float,
    min_amax: float,
) -> None:
    """Fill `values_NK` (float8_e4m3fn) and `scales_nk` (float32) from `weights_NK`, block by block.

    A scale is max(largest magnitude, min_amax) / fp8_max, and NaN for a block with a NaN. All three
    may be strided views. Bit for bit what weights/hf/fp8.py computes with torch.
    """
    num_rows, num_columns = weights_NK.shape
    from mcore_rl.device import triton_kernels

    kernel: Any = triton_kernels.quantize
    kernel[tuple(scales_nk.shape)](
        weights_NK,
        values_NK,
        scales_nk,
        num_rows,
        num_columns,
        *weights_NK.stride(),
        *values_NK.stride(),
        *scales_nk.stride(),
        fp8_max,
        min_amax,
        BLOCK=block,
    )
