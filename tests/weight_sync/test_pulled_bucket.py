"""Both sides hold a slice in parts of their own; each byte is read from the one place it has."""

from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.weight_sync.pulled_bucket import HeldRows, Sources, join_rows

SIZE = 48


@st.composite
def draw_parts(draw: st.DrawFn) -> list[HeldRows]:
    """Parts of a slice of SIZE bytes: whole, cut into stretches, or two columns of equal rows."""
    kind = draw(st.sampled_from(("whole", "stretches", "columns")))
    if kind == "whole":
        return [HeldRows(draw(st.integers(0, 1)), 1000, SIZE, 0, SIZE, 1, SIZE)]
    if kind == "stretches":
        cuts = sorted(draw(st.sets(st.integers(1, SIZE - 1), max_size=3)))
        ends = zip([0, *cuts], [*cuts, SIZE], strict=True)
        return [
            HeldRows(i % 2, 1000 * (i + 1), stop - at, at, stop - at, 1, stop - at)
            for i, (at, stop) in enumerate(ends)
        ]
    width = draw(st.sampled_from([width for width in range(2, SIZE + 1) if SIZE % width == 0]))
    cut = draw(st.integers(1, width - 1))
    gap = draw(st.integers(0, 3))
    num_rows = SIZE // width
    return [
        HeldRows(0, 1000, cut + gap, 0, width, num_rows, cut),
        HeldRows(1, 3000, width - cut + gap, cut, width, num_rows, width - cut),
    ]


def list_bytes(parts: list[HeldRows]) -> dict[int, tuple[int, int]]:
    """Byte of the slice -> (storage, offset)."""
    return {
        part.at + row * part.stride + i: (part.storage, part.first + row * part.own_stride + i)
        for part in parts
        for row in range(part.num_rows)
        for i in range(part.row_bytes)
    }


@given(theirs=draw_parts(), own=draw_parts())
def test_every_byte_is_copied_once_from_its_place_to_its_place(
    theirs: list[HeldRows], own: list[HeldRows]
) -> None:
    sources, targets = list_bytes(theirs), list_bytes(own)
    assert len(sources) == len(targets) == SIZE
    copied = {}
    for rows in join_rows([[], theirs], [[], own]):
        assert rows.number == 1
        for row in range(rows.num_rows):
            for i in range(rows.row_bytes):
                at = rows.at + row * rows.stride + i
                assert at not in copied
                source = rows.storage, rows.source + row * rows.source_stride + i
                copied[at] = source, rows.target + row * rows.target_stride + i
    assert copied == {at: (sources[at], targets[at][1]) for at in sources}


@given(st.lists(draw_parts(), max_size=4))
def test_a_table_of_sources_is_read_as_it_was_written(slices: list[list[HeldRows]]) -> None:
    assert [*Sources.join(slices).split()] == slices
