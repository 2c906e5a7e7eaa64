"""Packs a bucket from a rank's tensors, verifies it, and places it in a rank's tensors.

    own tensors --copy, sum--> bucket        bucket --sum, copy--> own tensors

A slice is cast to the target's dtype while it is packed; FP8 values and the scales of their blocks
are computed then, too. Each end knows only the place of a slice in its own memory, possibly in
several parts. Slices that keep their bytes are copied and summed in one pass over memory if
possible: on the host by compiled code (one_pass.py), on a GPU by a kernel (`GpuPass`). Torch moves
all other slices in as few calls as possible (`Copies`).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcore_rl.device.gpu_kernels import WORD_BYTES, ChunkTable, Run, has_kernel
from mcore_rl.types import Array
from mcore_rl.weight_sync.buckets import HEADER_WORDS, Bucket, BucketPiece
from mcore_rl.weight_sync.transports.host.one_pass import OnePass, Part, find_moves
from mcore_rl.weight_sync.verify import ROW_WORDS, ROWS, XXH3, make_row_multipliers, make_sums
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weights.box import Shard
from mcore_rl.weights.hf.fp8 import FP8, make_scale_box
from mcore_rl.weights.hf.quantize import quantize_into


class GpuPass:
    """The slices of one bucket, bound to memory, for the kernel.

    rest  parts that torch moves
    """

    def __init__(
        self, words_W: Tensor, pieces: Sequence[BucketPiece], parts: Sequence[Part]
    ) -> None:
        runs_of: list[list[Run] | None] = [[] for _ in pieces]
        for number, own, in_bucket in parts:
            runs = _find_runs(number, own, in_bucket, words_W.data_ptr())
            so_far = runs_of[number]
            runs_of[number] = None if runs is None or so_far is None else so_far + runs
        self.rest = [part for part in parts if not runs_of[part[0]]]
        self._own = [part[1] for part in parts]
        """Keeps the memory to which the runs' addresses lead."""
        multipliers_W = make_row_multipliers(words_W.device)
        moved = [run for runs in runs_of for run in runs or ()]
        summed = [
            _make_whole_run(number, piece)
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
        """Return a GpuPass, or None if the kernel does not run here."""
        return GpuPass(words_W, pieces, parts) if has_kernel(words_W) else None

    def pack(self) -> None:
        """Fill the bucket and write checksums into it; `rest` and padding must be in it already."""
        self._sums_P.zero_()
        self._moved.pack(self._sums_P)
        self._summed.pack(self._sums_P)

    def place(self, version: int, index: int) -> Tensor:
        """Fill tensors except `rest`; return checksums of the received bytes, int64 [pieces].

        If the bucket has another version or index, copy nothing and return zeros.
        """
        self._received_P.zero_()
        self._moved.place(self._received_P, version, index)
        self._summed.place(self._received_P, version, index)
        return self._received_P


def _find_runs(
    number: int, own: Tensor, in_bucket: Tensor, bucket_address: int
) -> list[Run] | None:
    """Return the runs of a part of slice `number`, or None if torch moves the part."""
    moves = find_moves(own, in_bucket, bucket_address)
    if moves is None or any(
        size % WORD_BYTES
        for address, own_stride, at, stride, _, row_bytes in moves
        for size in (address, own_stride, at, stride, row_bytes)
    ):
        return None
    return [(*move, number) for move in moves]


def _make_whole_run(number: int, piece: BucketPiece) -> Run:
    """Return the run of all words of a piece, padding included."""
    num_bytes = piece.num_rows * ROW_WORDS * WORD_BYTES
    return 0, 0, piece.first_word * WORD_BYTES, 0, 1, num_bytes, number


_copy_all: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]

_LARGE_BYTES = 256 * 2**10
"""From this size on, memcpy copies a pair of equal dtypes on the host, faster than torch's loop
over elements. Smaller pairs share one call of torch: each call releases the interpreter's lock,
which an engine that decodes may then hold for long.
"""

_Kind = tuple[torch.dtype, torch.dtype, bool]


class Copies:
    """Copies between tensors of equal shape, cast where dtypes differ.

    A GPU copies a list of pairs in one kernel if each side has one dtype and every pair is dense
    with equal strides. A single pair that differs makes it copy the whole list one by one, so pairs
    are grouped by these properties (torch 2.13, ForeachBinaryOpList.cu).
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        groups: dict[_Kind, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._large: list[tuple[Array, Array]] = []
        for left, right in pairs:
            is_dense = left.is_contiguous() and right.is_contiguous()
            if is_dense and _is_large_on_host(left, right):
                self._large.append((_view_bytes(left), _view_bytes(right)))
                continue
            groups[left.dtype, right.dtype, is_dense].append((left, right))
        self._groups = [tuple(map(list, zip(*group, strict=True))) for group in groups.values()]

    def copy_right(self) -> None:
        for left, right in self._groups:
            _copy_all(right, left)
        for left_B, right_B in self._large:
            np.copyto(right_B, left_B)

    def copy_left(self) -> None:
        for left, right in self._groups:
            _copy_all(left, right)
        for left_B, right_B in self._large:
            np.copyto(left_B, right_B)


def _is_large_on_host(left: Tensor, right: Tensor) -> bool:
    return (
        left.nbytes >= _LARGE_BYTES
        and left.dtype == right.dtype
        and left.device.type == right.device.type == "cpu"
    )


def _view_bytes(tensor: Tensor) -> Array:
    """Return a dense host tensor's memory as uint8."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()


_UNSIGNED = 2**64 - 1


@dataclass(frozen=True)
class Holding:
    """A part of a bucket's piece number `piece` that lies in one of this rank's tensors."""

    piece: int
    within: tuple[slice, ...]
    """The part, counted from the piece's own start."""
    shard: Shard


@dataclass(frozen=True)
class RankBucket:
    """A bucket as one of its two ranks sees it.

    peer  the rank at the other end, numbered over the link
    held  places of the bucket in this rank's tensors
    """

    bucket: Bucket
    peer: int
    held: Sequence[Holding]


def find_holdings(bucket: Bucket, shards: Mapping[str, Sequence[Shard]]) -> list[Holding]:
    """Return all places of the bucket in a rank's `shards` (by HF name).

    Scales that this rank computes while packing have no place yet and are left out.
    """
    computed = {make_scale_box(piece.box) for piece in bucket.pieces if piece.dtype == FP8}
    held = []
    for i, piece in enumerate(bucket.pieces):
        box = piece.box
        candidates = shards.get(box.name, ())
        if len(candidates) == 1 and candidates[0].box == box:
            held.append(Holding(i, _cover_whole(box.start, box.stop), candidates[0]))
            continue
        if not candidates and box in computed:
            continue
        num_held = 0
        for shard in candidates:
            common = box.intersect(shard.box)
            if common is None:
                continue
            bounds = zip(common.start, common.stop, box.start, strict=True)
            within = tuple(slice(start - first, stop - first) for start, stop, first in bounds)
            held.append(Holding(i, within, shard.within(common)))
            num_held += common.numel
        assert num_held >= box.numel, (
            f"{box} is planned, but only {num_held} elements of it are here"
        )
    return held


@lru_cache(maxsize=1024)
def _cover_whole(start: tuple[int, ...], stop: tuple[int, ...]) -> tuple[slice, ...]:
    """Return slices that cover a box from `start` to `stop`, counted from the box's start."""
    return tuple(slice(0, last - first) for first, last in zip(start, stop, strict=True))


@dataclass(frozen=True)
class _Matrix:
    """A matrix to be quantized while packing.

    parts_NK   the matrix's parts: (position in the matrix, tensor)
    values_NK  output: FP8 values
    scales_nk  output: scales of the blocks
    """

    parts_NK: Sequence[tuple[tuple[slice, ...], Tensor]]
    values_NK: Tensor
    scales_nk: Tensor

    def quantize(self) -> None:
        """Fill values and scales; first join the parts, because a block may span several."""
        weights_NK = self.parts_NK[0][1]
        if len(self.parts_NK) > 1:
            weights_NK = torch.empty_like(self.values_NK, dtype=weights_NK.dtype)
            for within, part in self.parts_NK:
                weights_NK[within] = part
        quantize_into(weights_NK, self.values_NK, self.scales_nk)


class BucketEnd:
    """One rank's end of a bucket: its message, and its parts in this rank's tensors."""

    def __init__(self, bucket: Bucket, held: Sequence[Holding], message_W: Tensor) -> None:
        """Hold what both kinds of ends check.

        held       all places of the bucket in this rank's tensors
        message_W  int64 words of the message: header, a checksum per piece, perhaps the slices
        """
        self.bucket = bucket
        self._held = held
        self._message_W = message_W
        self._sums_at = slice(HEADER_WORDS, HEADER_WORDS + len(bucket.pieces))

    @property
    def message_u8(self) -> Tensor:
        return self._message_W.view(torch.uint8)

    @property
    def sums_P(self) -> Tensor:
        """A copy of the sender's checksums, int64 [pieces]."""
        return self._message_W[self._sums_at].clone()

    def pack(self, version: int, sums_P: Tensor | None = None) -> None:
        """Write the message of `version`; a relay passes the first sender's checksums `sums_P`."""
        raise NotImplementedError

    def place(self, version: int) -> None:
        """Have this rank's tensors hold `version`, whose message is here.

        Raises TransferError, which names the slice, if a checksum differs from the sender's: the
        tensors may have the wrong slice by then. Raises TransferError, and copies nothing, if the
        message has another bucket or version.
        """
        raise NotImplementedError

    def _check_header(self, version: int, header: list[int]) -> None:
        bucket = self.bucket
        if header != [version, bucket.index]:
            raise TransferError(
                f"trainer rank {bucket.source_rank} sent version {header[0]} bucket {header[1]}"
                f" where engine rank {bucket.target_rank} expected version {version}"
                f" bucket {bucket.index}"
            )

    def _check_sums(self, sent_P: Tensor, received_P: Tensor) -> None:
        if torch.equal(sent_P, received_P):
            return
        bucket = self.bucket
        first = int((sent_P != received_P).nonzero()[0])
        box = bucket.pieces[first].box
        tensor = next(part.shard.tensor for part in self._held if part.piece == first)
        raise TransferError(
            f"{box.name} {box.start} to {box.stop}, bound for {tensor}, has checksum"
            f" {int(received_P[first]) & _UNSIGNED:#x} on engine rank {bucket.target_rank},"
            f" {int(sent_P[first]) & _UNSIGNED:#x} on trainer rank {bucket.source_rank}"
        )


class PlacedBucket(BucketEnd):
    """A bucket, the memory of its message, and its parts in this rank's tensors."""

    def __init__(
        self,
        bucket: Bucket,
        words_W: Tensor,
        held: Sequence[Holding],
        tensors: Mapping[str, Tensor],
        message_W: Tensor | None = None,
        sums: str = ROWS,
    ) -> None:
        """Bind `bucket` to memory.

        words_W    int64 [bucket.num_words] on the device of `tensors`: packed and verified there
        held       all places of the bucket in `tensors`
        message_W  memory of the message; by default `words_W`, otherwise with one more copy
        sums       kind of the checksums (verify.py), the same at both ends
        """
        super().__init__(bucket, held, words_W if message_W is None else message_W)
        self._words_W = words_W
        self._one_pass: OnePass | None = None
        self._gpu_pass: GpuPass | None = None
        self._bind(tensors, sums)
        last_rows = [piece.first_word // ROW_WORDS + piece.num_rows - 1 for piece in bucket.pieces]
        self._last_rows_P = torch.tensor(last_rows, device=words_W.device)
        self._checksums = make_sums(
            sums,
            bucket.pieces[0].first_word,
            [piece.num_rows for piece in bucket.pieces],
            words_W.device,
        )

    def _bind(self, tensors: Mapping[str, Tensor], sums: str) -> None:
        """Pair views of `tensors` with views of the bucket, for copies or quantization."""
        pieces = self.bucket.pieces
        values = [piece.values(self._words_W) for piece in pieces]
        index_of = {piece.box: i for i, piece in enumerate(pieces)}
        matrices: dict[int, list[Holding]] = defaultdict(list)
        parts: list[Part] = []
        for held in self._held:
            if pieces[held.piece].dtype == FP8 and held.shard.dtype != FP8:
                matrices[held.piece].append(held)
            else:
                own = held.shard.view(tensors)
                parts.append((held.piece, own, values[held.piece][held.within]))
        if sums == XXH3:
            self._one_pass = OnePass.maybe_make(self._words_W, pieces, parts)
        else:
            self._gpu_pass = GpuPass.maybe_make(self._words_W, pieces, parts)
        one_pass = self._one_pass or self._gpu_pass
        if one_pass is not None:
            parts = one_pass.rest
        self._copies = Copies((own, in_bucket) for _, own, in_bucket in parts)
        self._matrices = []
        for i, held_parts in matrices.items():
            scales = values[index_of[make_scale_box(pieces[i].box)]]
            views = [(held.within, held.shard.view(tensors)) for held in held_parts]
            self._matrices.append(_Matrix(views, values[i], scales))

    @property
    def sums_P(self) -> Tensor:
        """A copy of the sender's checksums, int64 [pieces]."""
        return self._words_W[self._sums_at].clone()

    def pack(self, version: int, sums_P: Tensor | None = None) -> None:
        """Fill the bucket from this rank's slices, and take checksums while the bytes are in cache.

        A relay passes `sums_P`, the first sender's checksums, so that the relay's own faults show.
        """
        if self._one_pass is None:
            self._words_W.view(-1, ROW_WORDS).index_fill_(0, self._last_rows_P, 0)
        self._fill_words()
        if self._one_pass is not None:
            self._one_pass.pack(with_sums=sums_P is None)
        elif self._gpu_pass is not None:
            self._gpu_pass.pack()
        elif sums_P is None:
            sums_P = self._checksums(self._words_W)
        if sums_P is not None:
            self._words_W[self._sums_at] = sums_P
        self._words_W[0] = version
        self._words_W[1] = self.bucket.index
        if self._message_W is not self._words_W:
            self._message_W.copy_(self._words_W)

    def _fill_words(self) -> None:
        """Put parts into the bucket that compiled code does not move, such as cast values."""
        self._copies.copy_right()
        for matrix in self._matrices:
            matrix.quantize()

    def place(self, version: int) -> None:
        """Copy the received slices into this rank's own tensors. Waits for the device once.

        Raises TransferError as BucketEnd.place does.
        """
        if self._message_W is not self._words_W:
            self._words_W.copy_(self._message_W)
        header_and_sums_W = self._words_W[: self._sums_at.stop]
        if self._one_pass is None:
            if self._gpu_pass is not None:
                received_P = self._gpu_pass.place(version, self.bucket.index)
            else:
                received_P = self._checksums(self._words_W)
            on_host_W = torch.cat((header_and_sums_W, received_P)).cpu()
            self._check_header(version, on_host_W[:HEADER_WORDS].tolist())
            received_P = on_host_W[self._sums_at.stop :]
        else:
            on_host_W = header_and_sums_W
            self._check_header(version, on_host_W[:HEADER_WORDS].tolist())
            received_P = self._one_pass.place()
        self._check_sums(on_host_W[self._sums_at], received_P)
        self._copies.copy_left()
