"""Lists the copies that assemble tensors from stored chunks, given the boxes of both. Pure.

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
from mcore_rl.weights.box import contiguous_strides
from mcore_rl.weights.models.table import Shape


@dataclass(frozen=True)
class Piece:
    """A copy of `rows` runs of `run` elements each, from a chunk to a tensor. All numbers are in
    elements.

    The runs lie end to end in the chunk from `source` on. In the tensor the first begins at
    `target`, and each next one `stride` further on. A run lies within one row of the tensor unless
    it is the only one.

    transposed   the elements of a run lie `rows` apart in the chunk: a row of the tensor is a
                 column there
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
        """Size as stored in the chunk."""
        return self.rows * self.run * DTYPE_BYTES[self.chunk.dtype]


@dataclass(frozen=True)
class Stretch:
    """Elements of a chunk that no tensor takes (vocabulary padding); read for their checksum."""

    chunk: Chunk
    source: int
    count: int


@dataclass(frozen=True)
class Assembly:
    """A contiguous tensor made of pieces. Elements that no piece covers are 0.

    skipped   elements of the pieces' chunks that no tensor takes
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
        """Return where its elements come from, as JSON-like values for a digest."""
        return [
            (p.chunk.path, p.chunk.start, p.source, p.target, p.rows, p.run, p.stride, p.transposed)
            for p in self.pieces
        ]

    @property
    def held_bytes(self) -> int:
        """Bytes that a reader holds at once: a transposed piece as stored."""
        return max((piece.num_bytes for piece in self.pieces if piece.transposed), default=0)

    @property
    def row(self) -> int:
        """Number of elements in a row; a tensor is read and written in whole rows."""
        return find_row(self.shape)


def whole(chunk: Chunk, dtype: str | None = None, name: str | None = None) -> Assembly:
    """Return the assembly of a tensor that is stored as one chunk."""
    count = prod(chunk.shape)
    pieces = (Piece(chunk, 0, 0, 1, count, count),) if count else ()
    return Assembly(name or chunk.key, dtype or chunk.dtype, chunk.shape, pieces)


def join_pieces(key: str, dtype: str, shape: Shape, chunks: Iterable[Chunk]) -> Assembly:
    """Return the assembly of a tensor from the chunks it is stored as."""
    strides = contiguous_strides(shape)
    pieces: list[Piece] = []
    for chunk in chunks:
        target = sum(at * stride for at, stride in zip(chunk.offset, strides, strict=True))
        source_strides = contiguous_strides(chunk.shape)
        pieces += make_pieces(
            chunk, chunk.shape, (0, source_strides), (target, strides), find_row(shape)
        )
    return Assembly(key, dtype, shape, order_pieces(pieces))


def check_pieces(
    name: str,
    dtype: str,
    shape: Shape,
    boxes: Sequence[tuple[Shape, Shape]],
    pieces: Iterable[Piece],
    skipped: Sequence[Stretch] = (),
    where: object = "",
) -> Assembly:
    """Return an assembly after checking that its `boxes`, (offset, shape), cover each element once.

    Raises ValueError with `where` and the tensor if they don't.
    """
    check_boxes(name, shape, boxes, where)
    return Assembly(name, dtype, shape, order_pieces(pieces), tuple(skipped))


def order_pieces(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Sort pieces by target, the order in which they are read."""
    return tuple(sorted(pieces, key=lambda piece: piece.target))


def make_pieces(
    chunk: Chunk,
    shape: Shape,
    source: tuple[int, Shape],
    target: tuple[int, Shape],
    row: int,
) -> Iterator[Piece]:
    """Yield the pieces that copy a box of `shape`.

    source, target   (offset, strides) of the box in the chunk and in the tensor
    row              number of elements in a row of the tensor
    Raises ValueError if the box does not occupy consecutive elements of the chunk.
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
    rows = 1
    stride = run
    if dims and run < row:
        rows = dims[-1][0]
        stride = dims[-1][2]
    outer = dims[:-1] if rows > 1 else dims
    for steps in product(*(range(size) for size, _, _ in outer)):
        first_source = source[0]
        first_target = target[0]
        for step, (_, source_stride, target_stride) in zip(steps, outer, strict=True):
            first_source += step * source_stride
            first_target += step * target_stride
        yield Piece(chunk, first_source, first_target, rows, run, stride)


def find_row(shape: Shape) -> int:
    """Return the number of elements of the last axis."""
    return shape[-1] if len(shape) > 1 else 1


def cut(piece: Piece, start: int, stop: int) -> tuple[int, int, int, int] | None:
    """Return the part of a piece that goes to elements [start, stop), whole rows of the tensor.

    As (first element in the chunk, rows, run, first element in the tensor); None if there is no
    such part.
    """
    if piece.rows == 1:
        first = max(start, piece.target)
        last = min(stop, piece.target + piece.run)
        if first >= last:
            return None
        return piece.source + first - piece.target, 1, last - first, first
    first_row = max(0, _ceil_div(start - piece.target, piece.stride))
    stop_row = min(piece.rows, _ceil_div(stop - piece.target, piece.stride))
    if first_row >= stop_row:
        return None
    source_step = 1 if piece.transposed else piece.run
    source = piece.source + first_row * source_step
    target = piece.target + first_row * piece.stride
    return source, stop_row - first_row, piece.run, target


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
