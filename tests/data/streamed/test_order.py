"""Windows of chunks: each chunk once an epoch, in an order of seed and epoch alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.data.streamed.windows import CHUNKS_PER_WINDOW, permutation, plan_epoch


@given(st.lists(st.integers(1, 9), min_size=1, max_size=400), st.integers(0, 9), st.booleans())
def test_every_chunk_is_in_one_window_and_every_position_in_that_of_its_row(
    rows: list[int], epoch: int, shuffle: bool
) -> None:
    order = plan_epoch(np.array(rows), 3, epoch, shuffle)
    chunks = [order.chunks_of(window).tolist() for window in range(order.num_windows)]
    assert all(0 < len(window) <= CHUNKS_PER_WINDOW for window in chunks)
    assert sorted(chunk for window in chunks for chunk in window) == list(range(len(rows)))
    window_of = [
        number
        for number, window in enumerate(chunks)
        for _ in range(sum(rows[chunk] for chunk in window))
    ]
    assert [order.window_of(place) for place in range(sum(rows))] == window_of


def test_the_order_depends_on_seed_and_epoch() -> None:
    rows = np.ones(300, dtype=np.int64)
    orders = {
        tuple(plan_epoch(rows, seed, epoch, True).order_C) for seed in (0, 1) for epoch in range(3)
    }
    assert len(orders) == 6
    assert plan_epoch(rows, 0, 5, False).order_C.tolist() == list(range(300))


def test_a_permutation_is_the_same_in_every_version() -> None:
    """Checkpoints of earlier versions depend on it."""
    assert permutation(8, 0, 0).tolist() == EXPECTED
    assert permutation(8, 0, 0, 1).tolist() != EXPECTED
    assert sorted(permutation(1000, 1, 2)) == list(range(1000))


EXPECTED = [3, 2, 1, 6, 0, 7, 4, 5]
