"""The layout of sequences that share beginnings names every key, and every token's twin."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.batches.shared_prefixes import Sharing, find_sharing
from mcore_rl.train.packing import lay_out_shared


def test_the_layout_of_the_docstring() -> None:
    sharing = Sharing(parents=(-1, 0), starts=(0, 2), order=(0, 1))
    rows = lay_out_shared((6, 6), (6, 4), sharing)
    assert rows.keys_K.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 6, 7, 8, 9]
    assert rows.cu_keys_N1.tolist() == [0, 6, 12] and rows.max_keys == 6
    assert rows.twins_T.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 9, 10, 11]


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=20), min_size=1, max_size=8),
    st.integers(0, 3),
)
def test_the_keys_of_a_sequence_are_its_tokens(rows: list[list[int]], num_padding: int) -> None:
    ids = [torch.tensor(row) for row in rows]
    sharing = find_sharing([row.numpy() for row in ids], [len(row) - 1 for row in rows])
    lens_N = [len(row) for row in rows]
    computed = [row[start:] for row, start in zip(ids, sharing.starts, strict=True)]
    computed[-1] = torch.cat([computed[-1], torch.full((num_padding,), -1)])
    local_T = torch.cat(computed)
    laid_out = lay_out_shared(lens_N, [len(part) for part in computed], sharing)
    keys = local_T[laid_out.keys_K].split(laid_out.cu_keys_N1.diff().tolist())
    for row, own in zip(ids, keys, strict=True):
        assert torch.equal(own[: len(row)], row)
        assert (own[len(row) :] == -1).all()
    whole_T = torch.cat(ids)
    assert torch.equal(whole_T[laid_out.twins_T], whole_T)
