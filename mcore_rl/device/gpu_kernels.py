"""Runs our Triton kernels. Each kernel reads every byte once.

    own tensors --copy, sum--> bucket        bucket --copy, sum--> own tensors
    matrix --quantize--> 8-bit values and a scale per block

For a bucket torch takes some forty kernels, and reads the bucket again for its checksums. To
quantize a matrix, torch takes six passes over a band of blocks, each a kernel of its own;
mcore_rl/weights/hf/fp8.py describes the format.
"""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

WORD_BYTES = 8
CHUNK_WORDS = 8192
"""The most words that one program moves of rows with gaps between them."""
BLOCK = 1024
STEPS, LANES, PARTS = 8, 128, 9
DENSE_WORDS = STEPS * LANES * PARTS
"""The most words that one program moves of rows that lie end to end."""
_PAIR = 2
"""Words of 16 bytes, the widest access of a GPU."""
_FIELDS = 7
Run = tuple[int, int, int, int, int, int, int]
"""Rows to move: (address of the first, bytes between rows there, byte in the bucket of the first,
bytes between rows there, rows, bytes of a row, number of the slice). Bytes are multiples of 8."""
Chunk = tuple[int, int, int, int, int, int, int]
"""Work of one program: (address, stride there, word in the bucket, stride there, words of a row,
words in all, number of the slice), strides in words."""


class ChunkTable:
    """Runs of a bucket, cut into chunks of similar size, on the device of its words.

    Words that lie side by side at both ends, from multiples of 16 bytes on, have a kernel of their
    own, which accesses 16 bytes at once and does not divide to find a word's row.
    """

    def __init__(
        self, words_W: Tensor, runs: Sequence[Run], multipliers_W: Tensor, *, copying: bool
    ) -> None:
        """Bind `runs` to memory.

        words_W         int64 words of the bucket; its first two are version and index
        multipliers_W   int64: word i of the bucket counts multipliers_W[i % len] times, where len
                        divides the words of a step of the kernel for dense rows
        copying         move the rows; otherwise they are summed where they lie in the bucket
        """
        assert LANES * PARTS % len(multipliers_W) == 0
        self._chunks_CF, self._dense_CF = (
            torch.tensor(rows, dtype=torch.int64).view(-1, _FIELDS).to(words_W.device)
            for rows in cut_runs(runs)
        )
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
        if not len(self._chunks_CF) and not len(self._dense_CF):
            return
        from mcore_rl.device import triton_kernels

        several: Any = triton_kernels.copy_and_sum
        dense: Any = triton_kernels.copy_and_sum_dense
        for kernel, chunks_CF, sizes in (
            (dense, self._dense_CF, {"STEPS": STEPS, "LANES": LANES, "PARTS": PARTS}),
            (several, self._chunks_CF, {"MOST_WORDS": CHUNK_WORDS, "BLOCK": BLOCK}),
        ):
            if not len(chunks_CF):
                continue
            kernel[len(chunks_CF),](
                chunks_CF,
                self._words_W,
                sums_P,
                self._multipliers_W,
                version,
                index,
                PLACING=placing,
                COPYING=self._copying,
                ROW_WORDS=len(self._multipliers_W),
                FIELDS=_FIELDS,
                **sizes,
            )


def has_kernel(tensor: Tensor) -> bool:
    """Return whether the kernels can run where the tensor lies."""
    return tensor.is_cuda and find_spec("triton") is not None


def cut_runs(runs: Iterable[Run]) -> tuple[list[Chunk], list[Chunk]]:
    """Return the chunks of runs: those for the kernel of several rows, and those of dense rows."""
    several: list[Chunk] = []
    dense: list[Chunk] = []
    for run in runs:
        address, own_stride, at, stride, num_rows, row_bytes, number = run
        if own_stride == stride == row_bytes:
            num_rows, row_bytes = 1, num_rows * row_bytes
        row_words = row_bytes // WORD_BYTES
        if num_rows > 1 and row_words <= CHUNK_WORDS // 2:
            several += _cut_rows(run)
            continue
        for row in range(num_rows):
            own, first = address + row * own_stride, (at + row * stride) // WORD_BYTES
            _cut_row(own, first, row_words, number, several, dense)
    return several, dense


def _cut_row(
    address: int, at: int, num_words: int, number: int, several: list[Chunk], dense: list[Chunk]
) -> None:
    """Cut one row into dense chunks; a word that has no other beside it in 16 bytes goes alone."""
    is_odd = at % _PAIR
    if (address // WORD_BYTES - at) % _PAIR:
        several += _cut_rows((address, 0, at * WORD_BYTES, 0, 1, num_words * WORD_BYTES, number))
        return
    stop = num_words - (num_words - is_odd) % _PAIR
    alone = [0] * is_odd + list(range(stop, num_words))
    several += [(address + i * WORD_BYTES, 0, at + i, 0, 1, 1, number) for i in alone]
    for i in range(is_odd, stop, DENSE_WORDS):
        words = min(DENSE_WORDS, stop - i)
        dense.append((address + i * WORD_BYTES, 0, at + i, 0, words, words, number))


def _cut_rows(run: Run) -> list[Chunk]:
    """Cut a run into chunks of whole rows, or a single row into parts."""
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


_TILE = (32, 128)
"""Rows and columns of a matrix that a block of `add_low_rank` computes."""


def add_low_rank(weight_RC: Tensor, a_rC: Tensor, b_Rr: Tensor, scale: float) -> None:
    """Add s B A to W in place: products in the order of r, each operation rounded to float32.

    All three may be strided views. Bit for bit what weights/lora/product.py computes with torch.
    """
    from mcore_rl.device import triton_kernels

    num_rows, num_columns = weight_RC.shape
    kernel: Any = triton_kernels.add_low_rank
    kernel[-(-num_rows // _TILE[0]), -(-num_columns // _TILE[1])](
        weight_RC,
        a_rC,
        b_Rr,
        num_rows,
        num_columns,
        len(a_rC),
        *weight_RC.stride(),
        *a_rC.stride(),
        *b_Rr.stride(),
        scale,
        ROWS=_TILE[0],
        COLUMNS=_TILE[1],
        enable_fp_fusion=False,
    )
