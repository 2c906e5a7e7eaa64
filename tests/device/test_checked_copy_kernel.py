"""Runs of rows are cut into chunks that hold every word once, in its place, and none too many."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.device.gpu_kernels import (
    CHUNK_WORDS,
    DENSE_WORDS,
    WORD_BYTES,
    ChunkTable,
    cut_runs,
    has_kernel,
)

SHORT = st.tuples(st.integers(1, 40), st.integers(1, 300))
LONG = st.tuples(st.integers(1, 3), st.integers(CHUNK_WORDS // 2 - 2, 2 * DENSE_WORDS + 2))
ROWS = st.one_of(SHORT, LONG)
GAPS = st.one_of(st.just((0, 0)), st.tuples(st.integers(0, 5), st.integers(0, 5)))
BEGINS = st.tuples(st.integers(1000, 1001), st.integers(20, 21))


@settings(max_examples=50)
@given(rows=ROWS, gaps=GAPS, begins=BEGINS)
def test_chunks_hold_each_word_once(
    rows: tuple[int, int], gaps: tuple[int, int], begins: tuple[int, int]
) -> None:
    num_rows, row_words = rows
    own_stride, stride = row_words + gaps[0], row_words + gaps[1]
    run = 8 * begins[0], 8 * own_stride, 8 * begins[1], 8 * stride, num_rows, 8 * row_words, 7
    several, dense = cut_runs([run])
    moved = {}
    for own, own_step, at, step, width, num_words, number in several + dense:
        assert num_words > 0 and number == 7
        for i in range(num_words):
            row, column = divmod(i, width)
            address = own + WORD_BYTES * (row * own_step + column)
            assert address not in moved
            moved[address] = at + row * step + column
    assert moved == {
        8 * (begins[0] + row * own_stride + column): begins[1] + row * stride + column
        for row in range(num_rows)
        for column in range(row_words)
    }
    assert all(chunk[5] <= CHUNK_WORDS for chunk in several)
    for own, _, at, _, width, num_words, _ in dense:
        assert num_words == width <= DENSE_WORDS
        assert own % 16 == at % 2 == num_words % 2 == 0, "the kernel moves 16 bytes at once"


def test_whole_slices_are_dense_and_a_word_alone_is_not() -> None:
    """A slice of 3 rows that lie end to end, once from 16 bytes on and once from 8 bytes further.

    Two slices that differ by 8 bytes have no pairs of words in common.
    """
    assert cut_runs([(1600, 800, 160, 800, 3, 800, 0)]) == ([], [(1600, 0, 20, 0, 300, 300, 0)])
    several, dense = cut_runs([(1608, 800, 168, 800, 3, 800, 0)])
    assert dense == [(1616, 0, 22, 0, 298, 298, 0)]
    assert several == [(1608, 0, 21, 0, 1, 1, 0), (4000, 0, 320, 0, 1, 1, 0)]
    several, dense = cut_runs([(1608, 800, 160, 800, 3, 800, 0)])
    assert not dense and [chunk[5] for chunk in several] == [300]


def test_a_bucket_without_rows_to_move_runs_no_kernel() -> None:
    words_W = torch.zeros(144, dtype=torch.int64)
    assert not has_kernel(words_W), "host memory has compiled code of its own"
    table = ChunkTable(words_W, [], torch.ones(72, dtype=torch.int64), copying=True)
    sums_P = torch.zeros(1, dtype=torch.int64)
    table.pack(sums_P)
    table.place(sums_P, version=0, index=0)
    assert not sums_P.any()
