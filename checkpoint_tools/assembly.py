"""Tensors to be, as pieces of stored chunks. Pure: boxes in, what to copy from where to where out.

chunk (contiguous)  | 0 1 2 3 4 5 |  --->  tensor   . . 0 1     Piece: 3 rows of a run of 2,
                                                    . . 2 3     target 2, stride 4
                                                    . . 4 5
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from checkpoint_tools.stored import DTYPE_BYTES, Chunk
from checkpoint_tools.tiling import check_boxes
from mcore_rl.slices.families.table import Shape
from mcore_rl.slices.plan.coverage import contiguous_strides


@dataclass(frozen=True)
class Piece:
    """`rows` times `run` elements of `chunk`, end to end from `source` on, go to `target`, `stride` apart.

    All in elements. A run lies in one row of the tensor unless there is only one. `transposed`: the elements
    of a run lie `rows` apart in the chunk, so that what goes to a row is a column there.
    """

    chunk: Chunk
    source: int
    target: int
    rows: int
    run: int
    stride: int
    transposed: bool = False

    @property
    def num_bytes(self) -> int:
        """As stored."""
        return self.rows * self.run * DTYPE_BYTES[self.chunk.dtype]


@dataclass(frozen=True)
class Stretch:
    """Elements of a chunk that go nowhere (padding of the vocabulary); read for their checksum alone."""

    chunk: Chunk
    source: int
    count: int


@dataclass(frozen=True)
class Assembly:
    """A contiguous tensor made of pieces; elements in none of them are 0.

    skipped   stretches of the pieces' chunks that no tensor takes
    """

    name: str
    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]
    skipped: tuple[Stretch, ...] = ()

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def places(self) -> list[object]:
        """What its elements come from, as numbers and names."""
        return [
            (p.chunk.path, p.chunk.start, p.source, p.target, p.rows, p.run, p.stride, p.transposed)
            for p in self.pieces
        ]

    @property
    def held_bytes(self) -> int:
        """What a reader holds of chunks while it goes through the tensor: a transposed piece as stored."""
        return max((piece.num_bytes for piece in self.pieces if piece.transposed), default=0)

    @property
    def row(self) -> int:
        """Elements of the last axis: a tensor is read and written in whole rows."""
        return row_of(self.shape)


def whole(chunk: Chunk, dtype: str | None = None, name: str | None = None) -> Assembly:
    """A tensor that is one chunk."""
    count = prod(chunk.shape)
    pieces = (Piece(chunk, 0, 0, 1, count, count),) if count else ()
    return Assembly(name or chunk.key, dtype or chunk.dtype, chunk.shape, pieces)


def joined(key: str, dtype: str, shape: Shape, chunks: Iterable[Chunk]) -> Assembly:
    """A tensor in its own coordinates out of its chunks."""
    strides = contiguous_strides(shape)
    pieces: list[Piece] = []
    for chunk in chunks:
        target = sum(at * stride for at, stride in zip(chunk.offset, strides, strict=True))
        source_strides = contiguous_strides(chunk.shape)
        pieces += make_pieces(
            chunk, chunk.shape, (0, source_strides), (target, strides), row_of(shape)
        )
    return Assembly(key, dtype, shape, ordered(pieces))


def checked(
    name: str,
    dtype: str,
    shape: Shape,
    boxes: Sequence[tuple[Shape, Shape]],
    pieces: Iterable[Piece],
    skipped: Sequence[Stretch] = (),
    where: object = "",
) -> Assembly:
    """An assembly whose `boxes`, (offset, shape), hold each element once; ValueError names `where` and the
    tensor.
    """
    check_boxes(name, shape, boxes, where)
    return Assembly(name, dtype, shape, ordered(pieces), tuple(skipped))


def ordered(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """By where they go, which is the order of reading."""
    return tuple(sorted(pieces, key=lambda piece: piece.target))


def make_pieces(
    chunk: Chunk,
    shape: Shape,
    source: tuple[int, Shape],
    target: tuple[int, Shape],
    row: int,
) -> Iterator[Piece]:
    """The pieces of a box of `shape`; `source` and `target` are its (offset, strides) in chunk and tensor.

    row   elements of the tensor's last axis
    ValueError where the box is not one stretch of the chunk.
    """
    dims = [dim for dim in zip(shape, source[1], target[1], strict=True) if dim[0] > 1]
    inner = 1
    for size, stride, _ in sorted(dims, key=lambda dim: dim[1]):
        if stride != inner:
            raise ValueError(
                f"{chunk.where}: a part of shape {shape} is scattered over it: cannot be copied"
            )
        inner *= size
    dims.sort(key=lambda dim: -dim[1])
    if len(dims) == 2 and dims[0][2] == 1 and dims[1][2] > 1:
        (run, _, _), (rows, _, stride) = dims
        yield Piece(chunk, source[0], target[0], rows, run, stride, transposed=True)
        return
    run = 1
    while dims and dims[-1][2] == run:
        run *= dims.pop()[0]
    rows, stride = (dims[-1][0], dims[-1][2]) if dims and run < row else (1, run)
    outer = dims[:-1] if rows > 1 else dims
    for steps in product(*(range(size) for size, _, _ in outer)):
        at_source = sum(n * dim[1] for n, dim in zip(steps, outer, strict=True))
        at_target = sum(n * dim[2] for n, dim in zip(steps, outer, strict=True))
        yield Piece(chunk, source[0] + at_source, target[0] + at_target, rows, run, stride)


def row_of(shape: Shape) -> int:
    """Elements of the last axis."""
    return shape[-1] if len(shape) > 1 else 1


def cut(piece: Piece, start: int, stop: int) -> tuple[int, int, int, int] | None:
    """(first element in the chunk, rows, run, first element in the tensor) of the part of `piece` that goes
    to elements [start, stop), whole rows of the tensor; None if there is none.
    """
    if piece.rows == 1:
        first, last = max(start, piece.target), min(stop, piece.target + piece.run)
        return (
            (piece.source + first - piece.target, 1, last - first, first) if first < last else None
        )
    first_row = max(0, -(-(start - piece.target) // piece.stride))
    stop_row = min(piece.rows, -(-(stop - piece.target) // piece.stride))
    if first_row >= stop_row:
        return None
    return (
        piece.source + first_row * (1 if piece.transposed else piece.run),
        stop_row - first_row,
        piece.run,
        piece.target + first_row * piece.stride,
    )
