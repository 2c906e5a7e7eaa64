"""Runs of rows are cut into chunks that hold every word once, in its place, and none too many."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.device import gpu_kernels
from mcore_rl.device.gpu_kernels import CHUNK_WORDS, WORD_BYTES, ChunkTable, has_kernel

SHORT = st.tuples(st.integers(1, 40), st.integers(1, 300))
LONG = st.tuples(st.integers(1, 3), st.integers(CHUNK_WORDS - 2, 2 * CHUNK_WORDS + 2))
ROWS = st.one_of(SHORT, LONG)
GAPS = st.tuples(st.integers(0, 5), st.integers(0, 5))


@settings(max_examples=50)
@given(rows=ROWS, gaps=GAPS)
def test_chunks_hold_each_word_once(rows: tuple[int, int], gaps: tuple[int, int]) -> None:
    num_rows, row_words = rows
    own_stride, stride = row_words + gaps[0], row_words + gaps[1]
    run = 8000, 8 * own_stride, 160, 8 * stride, num_rows, 8 * row_words, 7
    moved = {}
    for own, own_step, at, step, width, num_words, number in gpu_kernels._chunks(run):
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
