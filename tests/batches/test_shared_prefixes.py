"""Common beginnings of sequences are found, up to the first token that a sequence trains."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.batches.shared_prefixes import (
    MIN_SHARED,
    find_batch_sharing,
    find_sharing,
    first_of,
    parents_first,
)
from mcore_rl.types import Array, TrainBatch

PROMPT = list(range(10, 30))


def rows_of(*rows: list[int]) -> list[Array]:
    return [np.array(row, np.int32) for row in rows]


def test_the_responses_of_a_prompt_share_its_tokens() -> None:
    rows = rows_of([*PROMPT, 1, 2], [*PROMPT, 1, 3, 4], [5, *PROMPT], [*PROMPT, 1, 2])
    sharing = find_sharing(rows, [20, 20, 21, 20])
    assert sharing.parents == (-1, 0, -1, 1)
    assert sharing.starts == (0, 19, 0, 19)


def test_a_fork_takes_over_what_another_row_trains() -> None:
    """Row 1 goes on behind the first answer of row 0, which only row 0 trains."""
    first = [*PROMPT, 1, 2, 3, 50, 51, 4, 5]
    fork = [*PROMPT, 1, 2, 3, 60, 61, 6]
    sharing = find_sharing(rows_of(first, fork), [20, 25])
    assert sharing.parents == (-1, 0) and sharing.starts == (0, 22)
    # If row 1 trained the answer as well, it would compute it.
    assert find_sharing(rows_of(first, fork), [20, 20]).starts == (0, 19)
    # The order in which the rows are given does not matter.
    assert find_sharing(rows_of(fork, first), [25, 20]).parents == (1, -1)


def test_a_row_that_trains_nothing_and_short_rows() -> None:
    rows = rows_of(PROMPT, PROMPT[: MIN_SHARED - 1], [*PROMPT, 1])
    sharing = find_sharing(rows, [20, 3, 20])
    assert sharing.parents == (-1, -1, 0) and sharing.starts == (0, 0, 19)
    assert first_of(np.zeros(3, bool)) == 3 and first_of(np.array([False, True])) == 1


def test_of_a_batch() -> None:
    ids = torch.tensor([*PROMPT, 1, *PROMPT, 2, 3])
    mask = torch.tensor([*[False] * 20, True, *[False] * 20, True, True])
    sharing = find_batch_sharing(TrainBatch(ids, mask, (21, 22)))
    assert sharing.parents == (-1, 0) and sharing.starts == (0, 19)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=24), min_size=1, max_size=8))
def test_what_is_taken_over_is_the_same_and_not_trained(rows: list[list[int]]) -> None:
    trained = [len(row) // 2 for row in rows]
    sharing = find_sharing(rows_of(*rows), trained)
    assert sorted(sharing.order) == list(range(len(rows)))
    assert sorted(parents_first(sharing.parents)) == list(range(len(rows)))
    for order in (sharing.order, parents_first(sharing.parents)):
        for n, parent in enumerate(sharing.parents):
            assert parent < 0 or order.index(parent) < order.index(n)
    for n, (parent, start) in enumerate(zip(sharing.parents, sharing.starts, strict=True)):
        if parent < 0:
            assert start == 0
            continue
        assert rows[n][: start + 1] == rows[parent][: start + 1]
        assert MIN_SHARED <= start + 1 <= trained[n]
