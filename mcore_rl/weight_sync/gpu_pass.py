"""Moves a bucket's slices between GPU memories and takes their checksums in one pass.

    own tensors --copy, sum--> bucket        bucket --copy, sum--> own tensors

It is for checksums of kind rows, and slices that keep their bytes and consist of rows of whole
words. Others are moved by torch, and are summed here where they lie in the bucket.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mcore_rl.device.checked_copy_kernel import WORD_BYTES, ChunkTable, Run, has_kernel
from mcore_rl.weight_sync.buckets import HEADER_WORDS, BucketPiece
from mcore_rl.weight_sync.transports.host.one_pass import Part, find_moves
from mcore_rl.weight_sync.verify import ROW_WORDS, row_multipliers


class GpuPass:
    """The slices of one bucket, bound to memory.

    rest  the parts that others move
    """

    def __init__(
        self, words_W: Tensor, pieces: Sequence[BucketPiece], parts: Sequence[Part]
    ) -> None:
        runs_of: list[list[Run] | None] = [[] for _ in pieces]
        for number, own, in_bucket in parts:
            runs = _runs(number, own, in_bucket, words_W.data_ptr())
            so_far = runs_of[number]
            runs_of[number] = None if runs is None or so_far is None else so_far + runs
        self.rest = [part for part in parts if not runs_of[part[0]]]
        self._own = [part[1] for part in parts]
        """Keeps the memory to which the runs' addresses lead."""
        multipliers_W = row_multipliers(words_W.device)
        moved = [run for runs in runs_of for run in runs or ()]
        summed = [
            _whole(number, piece)
            for number, (piece, runs) in enumerate(zip(pieces, runs_of, strict=True))
            if not runs
        ]
        self._moved = ChunkTable(words_W, moved, multipliers_W, copying=True)
        self._summed = ChunkTable(words_W, summed, multipliers_W, copying=False)
        self._sums_P = words_W[HEADER_WORDS : HEADER_WORDS + len(pieces)]
        self._received_P = torch.zeros_like(self._sums_P)

    @staticmethod
    def maybe_make(
        words_W: Tensor, pieces: Sequence[BucketPiece], parts: Sequence[Part]
    ) -> "GpuPass | None":
        """Return None where the kernel does not run."""
        return GpuPass(words_W, pieces, parts) if has_kernel(words_W) else None

    def pack(self) -> None:
        """Fill the bucket and write checksums into it. `rest` and the padding must be there."""
        self._sums_P.zero_()
        self._moved.pack(self._sums_P)
        self._summed.pack(self._sums_P)

    def place(self, version: int, index: int) -> Tensor:
        """Fill this rank's tensors, but for `rest`; return the checksums of the received bytes,
        int64 [pieces].

        Nothing is copied and all checksums are 0 if the bucket has another version or index.
        """
        self._received_P.zero_()
        self._moved.place(self._received_P, version, index)
        self._summed.place(self._received_P, version, index)
        return self._received_P


def _runs(number: int, own: Tensor, in_bucket: Tensor, bucket_address: int) -> list[Run] | None:
    """Return the runs of a part of slice `number`, or None if others move it."""
    moves = find_moves(own, in_bucket, bucket_address)
    if moves is None or any(
        size % WORD_BYTES
        for address, own_stride, at, stride, _, row_bytes in moves
        for size in (address, own_stride, at, stride, row_bytes)
    ):
        return None
    return [(*move, number) for move in moves]


def _whole(number: int, piece: BucketPiece) -> Run:
    """Return the run of all words of a piece, padding included."""
    num_bytes = piece.num_rows * ROW_WORDS * WORD_BYTES
    return 0, 0, piece.first_word * WORD_BYTES, 0, 1, num_bytes, number
