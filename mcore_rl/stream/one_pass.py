"""Moves a bucket's slices and takes their checksums in one pass over memory, by compiled code.

    own tensors --copy--> bucket --sum-->        bucket --sum--> --copy--> own tensors

It is for host memory, checksums of kind xxh3, and slices that keep their bytes. Slices that are
cast or quantized are moved by others, and are summed here after they were packed.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcore_rl.device.native import load
from mcore_rl.stream.buckets import HEADER_WORDS, BucketPiece
from mcore_rl.stream.verify import ROW_WORDS, WORD_BYTES

_ROW_BYTES = ROW_WORDS * WORD_BYTES

Part = tuple[int, Tensor, Tensor]
"""Index of a piece, and a part of it: a view of an own tensor and the view of the bucket."""
_Move = tuple[int, int, int, int, int, int]
"""move_t of native/checked_copy.c"""


@cache
def find_library() -> Any:
    """Return the compiled code, or None if there is no compiler."""
    return load("checked_copy")


class OnePass:
    """The slices of one bucket, bound to memory.

    rest  the parts that others move
    """

    def __init__(
        self, library: Any, words_W: Tensor, pieces: Sequence[BucketPiece], parts: Sequence[Part]
    ) -> None:
        self._call = library.move_slices
        self._call.restype = None
        self._words_W = words_W
        moves: list[list[_Move]] = [[] for _ in pieces]
        self.rest: list[Part] = []
        self._own: list[Tensor] = []
        """Keeps the memory to which the moves' addresses lead."""
        for part in parts:
            index, own, in_bucket = part
            move = _move(own, in_bucket, words_W.data_ptr())
            if move is None:
                self.rest.append(part)
            else:
                moves[index].append(move)
                self._own.append(own)
        slices = [
            (piece.first_word * WORD_BYTES, piece.num_bytes, piece.num_rows * _ROW_BYTES, len(own))
            for piece, own in zip(pieces, moves, strict=True)
        ]
        self._slices = np.array(slices, np.int64)
        self._moves = np.array([move for own in moves for move in own], np.int64)
        self._received_P = np.empty(len(pieces), np.int64)

    @staticmethod
    def maybe_make(
        words_W: Tensor, pieces: Sequence[BucketPiece], parts: Sequence[Part]
    ) -> "OnePass | None":
        """Return None if this machine has no compiler."""
        library = find_library()
        return None if library is None else OnePass(library, words_W, pieces, parts)

    def pack(self, *, with_sums: bool) -> None:
        """Fill the bucket, padding included, and write checksums into it if `with_sums`.

        The slices in `rest` must be there.
        """
        sums = self._words_W.data_ptr() + HEADER_WORDS * WORD_BYTES
        self._run(placing=False, sums=sums if with_sums else None)

    def place(self) -> Tensor:
        """Fill this rank's tensors; return the checksums of the received bytes, int64 [pieces]."""
        self._run(placing=True, sums=self._received_P.ctypes.data)
        return torch.from_numpy(self._received_P)

    def _run(self, *, placing: bool, sums: int | None) -> None:
        self._call(
            ctypes.c_void_p(self._words_W.data_ptr()),
            ctypes.c_int64(len(self._slices)),
            ctypes.c_void_p(self._slices.ctypes.data),
            ctypes.c_void_p(self._moves.ctypes.data),
            ctypes.c_int(placing),
            ctypes.c_void_p(sums),
        )


def _move(own: Tensor, in_bucket: Tensor, bucket_address: int) -> _Move | None:
    """Return the move between two views of equal shape, or None if it is not rows of bytes."""
    if own.dtype != in_bucket.dtype:
        return None
    size = own.element_size()
    axes: list[tuple[int, int, int]] = []
    for num, own_stride, stride in zip(
        reversed(own.shape), reversed(own.stride()), reversed(in_bucket.stride()), strict=True
    ):
        if num == 1:
            continue
        if axes:
            inner, inner_own, inner_stride = axes[-1]
            if (own_stride, stride) == (inner * inner_own, inner * inner_stride):
                axes[-1] = (num * inner, inner_own, inner_stride)
                continue
        axes.append((num, own_stride, stride))
    if axes and axes[0][1:] != (1, 1):
        axes.insert(0, (1, 1, 1))
    if len(axes) > 2:
        return None
    row = axes[0][0] if axes else 1
    rows, own_stride, stride = axes[1] if len(axes) > 1 else (1, 0, 0)
    at = in_bucket.data_ptr() - bucket_address
    return own.data_ptr(), own_stride * size, at, stride * size, rows, row * size
