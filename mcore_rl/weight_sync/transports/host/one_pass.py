"""Moves a bucket's slices and takes their checksums in one pass over memory, by compiled code.

    own tensors --copy--> bucket --sum-->        bucket --sum--> --copy--> own tensors

This module is for host memory, checksums of kind xxh3, and slices that keep their bytes. Torch
moves slices that are cast or quantized; this module sums them once they are packed.

Slices may also be written straight to Targets, places in another rank's tensors, and summed there.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcore_rl.device.native import load
from mcore_rl.types import Array
from mcore_rl.weight_sync.buckets import HEADER_WORDS, BucketPiece
from mcore_rl.weight_sync.verify import ROW_BYTES, WORD_BYTES

_LEAST_ROW_BYTES = 64
"""The shortest row that compiled code moves if rows lie at more than one distance."""

Part = tuple[int, Tensor, Tensor]
"""Index of a piece, and a part of it: a view of an own tensor and the view of the bucket."""
Move = tuple[int, int, int, int, int, int]
"""move_t of native/checked_copy.c"""


@dataclass(frozen=True)
class Targets:
    """Places in host memory for the slices of one or more buckets.

    counts   int64 [slices], number of moves of each slice
    moves    int64 [moves, 6], move_t of native/checked_copy.c
    """

    counts: Array
    moves: Array


@cache
def find_library() -> Any:
    """Return the compiled code, or None if there is no compiler."""
    return load("checked_copy")


class OnePass:
    """The slices of one bucket, bound to memory, for compiled code.

    rest  parts that torch moves
    """

    def __init__(
        self, library: Any, words_W: Tensor, pieces: Sequence[BucketPiece], parts: Sequence[Part]
    ) -> None:
        self._call = library.move_slices
        self._call.restype = None
        self._write = library.write_slices
        self._write.restype = None
        self._words_W = words_W
        moves: list[list[Move]] = [[] for _ in pieces]
        self.rest: list[Part] = []
        self._own: list[Tensor] = []
        """Keeps the memory to which the moves' addresses lead."""
        for part in parts:
            index, own, in_bucket = part
            found = find_moves(own, in_bucket, words_W.data_ptr())
            if found is None:
                self.rest.append(part)
            else:
                moves[index] += found
                self._own.append(own)
        slices = [
            (piece.first_word * WORD_BYTES, piece.num_bytes, piece.num_rows * ROW_BYTES, len(own))
            for piece, own in zip(pieces, moves, strict=True)
        ]
        self._slices = np.array(slices, np.int64)
        self._moves = np.array([move for own in moves for move in own], np.int64).reshape(-1, 6)
        self._received_P = np.empty(len(pieces), np.int64)

    @staticmethod
    def maybe_make(
        words_W: Tensor, pieces: Sequence[BucketPiece], parts: Sequence[Part]
    ) -> "OnePass | None":
        """Return a OnePass, or None if this machine has no compiler."""
        library = find_library()
        return None if library is None else OnePass(library, words_W, pieces, parts)

    def pack(self, *, with_sums: bool) -> None:
        """Fill the bucket, padding included, and write checksums into it if `with_sums`.

        The slices in `rest` must be in the bucket already.
        """
        sums = self._words_W.data_ptr() + HEADER_WORDS * WORD_BYTES
        self._run(placing=False, sums=sums if with_sums else None)

    def place(self) -> Tensor:
        """Fill this rank's tensors; return the checksums of the received bytes, int64 [pieces]."""
        self._run(placing=True, sums=self._received_P.ctypes.data)
        return torch.from_numpy(self._received_P)

    @property
    def targets(self) -> Targets:
        """Places of the slices in own tensors."""
        return Targets(self._slices[:, 3].copy(), self._moves)

    def write(self, targets: Targets) -> Tensor:
        """Copy the slices to `targets`; return their checksums, int64 [pieces].

        The slices in `rest` must be in the bucket, which also serves slices in parts as scratch.
        """
        return self._sum(targets)

    def sum_own(self) -> Tensor:
        """Return the checksums of the slices in own tensors, int64 [pieces]."""
        assert not self.rest, f"{len(self.rest)} parts are not rows of bytes"
        return self._sum(None)

    def _sum(self, targets: Targets | None) -> Tensor:
        self._write(
            ctypes.c_void_p(self._words_W.data_ptr()),
            ctypes.c_int64(len(self._slices)),
            ctypes.c_void_p(self._slices.ctypes.data),
            ctypes.c_void_p(self._moves.ctypes.data),
            ctypes.c_void_p(None if targets is None else targets.counts.ctypes.data),
            ctypes.c_void_p(None if targets is None else targets.moves.ctypes.data),
            ctypes.c_void_p(self._received_P.ctypes.data),
        )
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


def are_rows(
    shape: Sequence[int], own_strides: Sequence[int], strides: Sequence[int], itemsize: int
) -> bool:
    """Return whether compiled code moves a part between memories with these strides.

    It leaves parts of many short rows to torch, which moves them in one call.
    """
    axes = _find_axes(shape, own_strides, strides)
    return len(axes) <= 2 or axes[0][0] * itemsize >= _LEAST_ROW_BYTES


def _find_axes(
    shape: Sequence[int], own_strides: Sequence[int], strides: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Return (length, own stride, other stride) of as few axes as possible, innermost first.

    The innermost axis is dense.
    """
    axes: list[tuple[int, int, int]] = []
    for num, own_stride, stride in zip(
        reversed(shape), reversed(own_strides), reversed(strides), strict=True
    ):
        if num == 1:
            continue
        if axes:
            inner, inner_own, inner_stride = axes[-1]
            if (own_stride, stride) == (inner * inner_own, inner * inner_stride):
                axes[-1] = (num * inner, inner_own, inner_stride)
                continue
        axes.append((num, own_stride, stride))
    if not axes or axes[0][1:] != (1, 1):
        axes.insert(0, (1, 1, 1))
    return axes


def find_moves(own: Tensor, in_bucket: Tensor, bucket_address: int) -> list[Move] | None:
    """Return the moves between two views of equal shape, or None if torch copies the views."""
    size = own.element_size()
    layout = own.shape, own.stride(), in_bucket.stride()
    if own.dtype != in_bucket.dtype or not are_rows(*layout, size):
        return None
    at = in_bucket.data_ptr() - bucket_address
    return [
        (own.data_ptr() + from_own, own_stride, at + from_at, stride, rows, row_bytes)
        for from_own, own_stride, from_at, stride, rows, row_bytes in list_rows(*layout, size)
    ]


def list_rows(
    shape: Sequence[int], own_strides: Sequence[int], strides: Sequence[int], itemsize: int
) -> list[Move]:
    """Return the moves between two views, counted in bytes from the starts of both."""
    (row, _, _), *others = _find_axes(shape, own_strides, strides)
    rows, own_stride, stride = others[0] if others else (1, 0, 0)
    outer = others[1:]
    moves = []
    for index in product(*(range(num) for num, _, _ in outer)):
        own_steps = sum(i * step for i, (_, step, _) in zip(index, outer, strict=True))
        steps = sum(i * step for i, (_, _, step) in zip(index, outer, strict=True))
        from_own, from_other = own_steps * itemsize, steps * itemsize
        strides = own_stride * itemsize, stride * itemsize
        moves.append((from_own, strides[0], from_other, strides[1], rows, row * itemsize))
    return moves
