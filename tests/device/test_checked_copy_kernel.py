"""Runs of rows are cut into chunks that hold every word once, in its place, and none too many."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.device import checked_copy_kernel
from mcore_rl.device.checked_copy_kernel import CHUNK_WORDS, WORD_BYTES, ChunkTable, has_kernel

ROWS = st.tuples(
    st.integers(1, 40),
    st.one_of(st.integers(1, 300), st.integers(CHUNK_WORDS - 2, 3 * CHUNK_WORDS)),
    st.integers(0, 5),
    st.integers(0, 5),
)


@settings(deadline=None, max_examples=100)
@given(shape=ROWS)
def test_chunks_hold_each_word_once(shape: tuple[int, int, int, int]) -> None:
    num_rows, row_words, own_gap, gap = shape
    own_stride, stride = row_words + own_gap, row_words + gap
    run = 8000, 8 * own_stride, 160, 8 * stride, num_rows, 8 * row_words, 7
    moved = {}
    for own, own_step, at, step, width, num_words, number in checked_copy_kernel._chunks(run):
        assert 0 < num_words <= CHUNK_WORDS and number == 7
        for i in range(num_words):
            row, column = divmod(i, width)
            address = own + WORD_BYTES * (row * own_step + column)
            assert address not in moved
            moved[address] = at + row * step + column
    assert moved == {
        8000 + 8 * (row * own_stride + column): 20 + row * stride + column
        for row in range(num_rows)
        for column in range(row_words)
    }


def test_a_bucket_without_rows_to_move_runs_no_kernel() -> None:
    words_W = torch.zeros(144, dtype=torch.int64)
    assert not has_kernel(words_W), "host memory has compiled code of its own"
    table = ChunkTable(words_W, [], torch.ones(72, dtype=torch.int64), copying=True)
    sums_P = torch.zeros(1, dtype=torch.int64)
    table.pack(sums_P)
    table.place(sums_P, version=0, index=0)
    assert not sums_P.any()
