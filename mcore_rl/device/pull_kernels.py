"""Copies slices from other GPU memory straight into tensors, and sums them, by one kernel.

    source's storages --read, sum, write--> own tensors     (a trainer rank only sums)

A source is an offset into one of several storages, whose addresses are given at each run: so a
table of rows stays valid while storages move.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mcore_rl.device.gpu_kernels import (
    BLOCK,
    CHUNK_WORDS,
    DENSE_WORDS,
    LANES,
    PARTS,
    STEPS,
    WORD_BYTES,
)

_PAIR_BYTES = 16
"""The widest access of a GPU."""
_FIELDS = 10


class PullRows(NamedTuple):
    """Equally long rows of a slice; all sizes and distances in bytes.

    storage, source   number of the storage, and offset in it
    target            address of the first row's place; 0 where rows are only summed
    at, stride        where rows lie in the slice, which lies end to end
    number            of the slice, among those of all sums
    """

    storage: int
    source: int
    source_stride: int
    target: int
    target_stride: int
    at: int
    stride: int
    num_rows: int
    row_bytes: int
    number: int


class PullTable:
    """Rows cut into chunks of similar size, on the device of the targets."""

    def __init__(
        self,
        rows: Iterable[PullRows],
        num_slices: int,
        multipliers_W: Tensor,
        *,
        copying: bool,
    ) -> None:
        """Cut `rows`.

        multipliers_W  int64: word i of a slice counts multipliers_W[i % len] times
        copying        write rows to their targets; otherwise they are only summed
        """
        assert LANES * PARTS % len(multipliers_W) == 0
        device = multipliers_W.device
        self._num_slices = num_slices
        self._multipliers_W = multipliers_W
        self._copying = copying
        self._bytes_CF, self._words_CF, self._dense_CF = (
            torch.tensor(chunks, dtype=torch.int64).view(-1, _FIELDS).to(device)
            for chunks in cut_rows(rows)
        )

    def run(self, bases: Sequence[int]) -> Tensor:
        """Copy and sum all rows; return int64 [slices], checksums of kind `rows` (verify.py).

        bases  the address of each storage
        """
        from mcore_rl.device import triton_kernels

        device = self._multipliers_W.device
        bases_S = torch.tensor(bases, dtype=torch.int64).to(device)
        sums_P = torch.zeros(self._num_slices, dtype=torch.int64, device=device)
        several: Any = triton_kernels.pull_rows
        dense: Any = triton_kernels.pull_dense
        units = {"MOST_UNITS": CHUNK_WORDS, "BLOCK": BLOCK}
        for kernel, chunks_CF, sizes in (
            (dense, self._dense_CF, {"STEPS": STEPS, "LANES": LANES, "PARTS": PARTS}),
            (several, self._words_CF, {**units, "UNIT_BYTES": WORD_BYTES}),
            (several, self._bytes_CF, {**units, "UNIT_BYTES": 1}),
        ):
            if not len(chunks_CF):
                continue
            kernel[len(chunks_CF),](
                chunks_CF,
                bases_S,
                sums_P,
                self._multipliers_W,
                COPYING=self._copying,
                ROW_WORDS=len(self._multipliers_W),
                FIELDS=_FIELDS,
                **sizes,
            )
        return sums_P


Chunks = list[PullRows]
"""Chunks for one program each. Sizes are in units of the kernel (`source`, `target` stay in bytes),
and `num_rows`, `row_bytes` are the units of a row and of the chunk."""


def cut_rows(rows: Iterable[PullRows]) -> tuple[Chunks, Chunks, Chunks]:
    """Return chunks of single bytes, chunks of words, and chunks of dense pairs of words."""
    single: Chunks = []
    words: Chunks = []
    dense: Chunks = []
    for each in map(_join_rows, rows):
        if not _has_whole_words(each):
            single += _cut(each, 1)
        elif each.num_rows > 1 and each.row_bytes <= CHUNK_WORDS // 2 * WORD_BYTES:
            words += _cut(each, WORD_BYTES)
        else:
            for row in range(each.num_rows):
                _cut_row(_take_row(each, row), words, dense)
    return single, words, dense


def _join_rows(rows: PullRows) -> PullRows:
    """Return rows that lie end to end everywhere as one row."""
    written = rows.target_stride if rows.target else rows.row_bytes
    if rows.source_stride == written == rows.stride == rows.row_bytes:
        return rows._replace(num_rows=1, row_bytes=rows.num_rows * rows.row_bytes)
    return rows


def _has_whole_words(rows: PullRows) -> bool:
    sizes = (rows.source, rows.target, rows.at, rows.row_bytes)
    steps = (rows.source_stride, rows.target_stride, rows.stride) if rows.num_rows > 1 else ()
    return not any(size % WORD_BYTES for size in (*sizes, *steps))


def _take_row(rows: PullRows, row: int) -> PullRows:
    """Return one of the rows."""
    return rows._replace(
        source=rows.source + row * rows.source_stride,
        target=rows.target and rows.target + row * rows.target_stride,
        at=rows.at + row * rows.stride,
        num_rows=1,
    )


def _cut_row(row: PullRows, words: Chunks, dense: Chunks) -> None:
    """Cut one row into dense chunks; a word that has no other beside it in 16 bytes goes alone."""
    is_odd = row.source % _PAIR_BYTES // WORD_BYTES
    if row.target and (row.target - row.source) % _PAIR_BYTES:
        words += _cut(row, WORD_BYTES)
        return
    num_words = row.row_bytes // WORD_BYTES
    stop = num_words - (num_words - is_odd) % 2
    for i in [0] * is_odd + list(range(stop, num_words)):
        words += _cut(_take_words(row, i, 1), WORD_BYTES)
    for i in range(is_odd, stop, DENSE_WORDS):
        dense += _cut(_take_words(row, i, min(DENSE_WORDS, stop - i)), WORD_BYTES, DENSE_WORDS)


def _take_words(row: PullRows, first: int, num_words: int) -> PullRows:
    """Return `num_words` words of a row, from its word `first` on."""
    skipped = first * WORD_BYTES
    return row._replace(
        source=row.source + skipped,
        target=row.target and row.target + skipped,
        at=row.at + skipped,
        row_bytes=num_words * WORD_BYTES,
    )


def _cut(rows: PullRows, unit_bytes: int, most: int = CHUNK_WORDS) -> Chunks:
    """Cut rows into chunks of whole rows, or a single row into parts of at most `most` units."""
    row_units = rows.row_bytes // unit_bytes
    per_chunk = max(1, most // row_units)
    chunks = []
    for row in range(0, rows.num_rows, per_chunk):
        first = _take_row(rows, row)
        num_units = min(per_chunk, rows.num_rows - row) * row_units
        for begin in range(0, num_units, most if per_chunk == 1 else num_units):
            units = min(most, num_units - begin) if per_chunk == 1 else num_units
            skipped = begin * unit_bytes
            chunk = PullRows(
                storage=rows.storage,
                source=first.source + skipped,
                source_stride=rows.source_stride // unit_bytes,
                target=first.target and first.target + skipped,
                target_stride=rows.target_stride // unit_bytes,
                at=(first.at + skipped) // unit_bytes,
                stride=rows.stride // unit_bytes,
                num_rows=row_units if per_chunk > 1 else units,
                row_bytes=units,
                number=rows.number,
            )
            chunks.append(chunk)
    return chunks
