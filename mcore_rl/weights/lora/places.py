"""Says which parts of W0, A and B belong to the part of an adapted matrix that a rank holds.

    rows R and columns C of W [out, in]       A [r, in]  columns C        B [out, r]  rows R

The axis of the rank r is never cut. So the part of W is computed from its part of W0 and these two,
by add_product, to the bits that it has in the whole matrix.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mcore_rl.weights.box import Box, Shape, Shard, contiguous_strides

if TYPE_CHECKING:
    from torch import Tensor

Content = Literal["weights", "base", "factors"]
"""Kinds of tensors that travel to engines: weights; weights below factors, once; or factors."""
Held = tuple[Sequence[Shard], Mapping[str, "Tensor"]]
"""(shards of HF tensors, the local tensors that hold them)"""
FIRST, SECOND = ".A", ".B"
"""End the names of a matrix's factors."""
STAMP = "lora.stamp"
"""The tensor that each version of factors brings along; see AdapterStamp."""
STAMP_DTYPE = "int64"
_STAMP = struct.Struct("<qdq32s")
_NUM_WORDS = _STAMP.size // 8


@dataclass(frozen=True)
class AdapterStamp:
    """The facts without which factors are worth nothing; they travel with every version.

    scale          the number that the product B A is multiplied by
    num_matrices   adapted matrices of the model
    base           checksum of the weights that the product is added to, as in AdapterFacts
    """

    rank: int
    scale: float
    num_matrices: int
    base: str

    def encode(self) -> list[int]:
        """Return the stamp as int64 numbers."""
        base = bytes.fromhex(self.base)
        data = _STAMP.pack(self.rank, self.scale, self.num_matrices, base)
        return list(struct.unpack(f"<{_NUM_WORDS}q", data))

    @staticmethod
    def decode(words: Iterable[int]) -> "AdapterStamp":
        rank, scale, num_matrices, base = _STAMP.unpack(struct.pack(f"<{_NUM_WORDS}q", *words))
        return AdapterStamp(rank, scale, num_matrices, base.hex())

    def refuse_other(self, found: "AdapterStamp", where: str) -> None:
        """Raise ValueError, naming `where` and what differs, unless factors have this stamp."""
        if found.base != self.base:
            raise ValueError(
                f"{where} has factors of another base: their weights have checksum"
                f" {found.base[:16]}, and this engine keeps {self.base[:16]}; start the engine and"
                " the trainer from one model.path"
            )
        for name in ("rank", "scale", "num_matrices"):
            own, other = getattr(self, name), getattr(found, name)
            if own != other:
                raise ValueError(
                    f"{where} has factors of {name} {other:g}, and this engine was linked for"
                    f" {own:g}: trainer and controller read other train.lora options"
                )


def make_stamp_shard(tensor: str) -> Shard:
    """Return the shard of the stamp in the local tensor `tensor`, int64 [numbers]."""
    return Shard(Box(STAMP, (0,), (_NUM_WORDS,)), tensor, 0, (1,), STAMP_DTYPE)


@dataclass(frozen=True)
class AdaptedPart:
    """A part of an adapted matrix on a rank, and local tensors of its own for W0, A and B.

    number   of the part, in the names of these tensors
    place    where the rank holds the part of W
    dtype    torch name of the dtype of W0 and the factors
    """

    number: int
    place: Shard
    rank: int
    dtype: str

    @property
    def base(self) -> Shard:
        return self._make(self.place.box, "W0")

    @property
    def first(self) -> Shard:
        (_, start), (_, stop) = self.place.box.start, self.place.box.stop
        return self._make(Box(self.place.box.name + FIRST, (0, start), (self.rank, stop)), "A")

    @property
    def second(self) -> Shard:
        (start, _), (stop, _) = self.place.box.start, self.place.box.stop
        return self._make(Box(self.place.box.name + SECOND, (start, 0), (stop, self.rank)), "B")

    def _make(self, box: Box, kind: str) -> Shard:
        name = f"{self.number}.{kind}"
        return Shard(box, name, 0, contiguous_strides(box.shape), self.dtype)


def list_parts(
    shards: Iterable[Shard], names: Mapping[str, object], rank: int, dtype: str
) -> list[AdaptedPart]:
    """Return the parts of matrices `names` among a rank's shards."""
    own = [shard for shard in shards if shard.box.name in names]
    return [AdaptedPart(number, shard, rank, dtype) for number, shard in enumerate(own)]


def make_whole_factors(
    name: str, shape: Shape, rank: int, tensors: tuple[str, str], dtype: str
) -> Iterator[Shard]:
    """Yield the shards of whole factors A and B of a matrix of `shape`, in these two tensors."""
    factors = list_factor_shapes({name: shape}, rank)
    for tensor, (factor, own) in zip(tensors, factors.items(), strict=True):
        yield Shard(Box(factor, (0, 0), own), tensor, 0, contiguous_strides(own), dtype)


def list_factor_shapes(matrices: Mapping[str, Shape], rank: int) -> dict[str, Shape]:
    """Return the shape of each factor, by "<HF tensor>.A" and "<HF tensor>.B"."""
    shapes: dict[str, Shape] = {}
    for name, (num_rows, num_columns) in matrices.items():
        shapes[name + FIRST] = (rank, num_columns)
        shapes[name + SECOND] = (num_rows, rank)
    return shapes
