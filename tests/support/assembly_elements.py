"""Takes a piece of an assembly apart, element by element."""

from collections.abc import Iterator

from checkpoint_tools.assembly import Piece


def element_pairs(piece: Piece) -> Iterator[tuple[int, int]]:
    """Yield (element of the tensor, element of the chunk) of everything that the piece copies."""
    for row in range(piece.rows):
        for step in range(piece.run):
            source = row * piece.run + step
            if piece.transposed:
                source = step * piece.rows + row
            yield piece.target + row * piece.stride + step, piece.source + source
