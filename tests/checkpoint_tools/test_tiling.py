"""Boxes are accepted only if they cover each element of their tensor exactly once."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_tools.tiling import check_boxes


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (1, 3))], ""),
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], "which is not inside it"),
        ([((0, 0), (2, 3))], "its parts hold 6 of 9 elements"),
        ([((0, 0), (2, 3)), ((0, 0), (1, 3))], r"its parts overlap at \(0, 0\)"),
    ],
)
def test_parts_must_make_up_the_tensor(boxes: list, message: str) -> None:
    if not message:
        check_boxes("t", (3, 3), boxes, "file")
        return
    with pytest.raises(ValueError, match=rf"file: tensor 't' .*{message}"):
        check_boxes("t", (3, 3), boxes, "file")


@given(
    boxes=st.lists(
        st.tuples(
            st.tuples(st.integers(0, 2), st.integers(0, 2)),
            st.tuples(st.integers(1, 3), st.integers(1, 3)),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_the_verdict_is_that_of_counting_elements(boxes: list) -> None:
    counts = dict.fromkeys(product(range(3), range(3)), 0)
    is_inside = True
    for (row, column), (rows, columns) in boxes:
        for cell in product(range(row, row + rows), range(column, column + columns)):
            is_inside = is_inside and cell in counts
            counts[cell] = counts.get(cell, 0) + 1
    if is_inside and set(counts.values()) == {1}:
        check_boxes("t", (3, 3), boxes, "file")
    else:
        with pytest.raises(ValueError, match="file: tensor 't'"):
            check_boxes("t", (3, 3), boxes, "file")
