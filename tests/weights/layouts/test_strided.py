"""Views of an HF tensor become shards; copying by the shards equals copying the view."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mcore_rl.weights.layouts.copy_recorder import cut_view


def copy_by_shards(whole: Tensor, view: Tensor) -> tuple[Tensor, int]:
    """A copy of the view made with its shards, and how many shards there are."""
    local = torch.full(view.shape, -1, dtype=whole.dtype)
    shards = cut_view("w", whole.shape, view, "local", 0, local.stride(), "int64")
    for shard in shards:
        box = tuple(map(slice, shard.box.start, shard.box.stop))
        shard.view({"local": local}).copy_(whole[box])
    return local, len(shards)


WHOLE = torch.arange(6 * 8).view(6, 8)


@pytest.mark.parametrize(
    ("view", "num_shards"),
    [
        (WHOLE, 1),
        (WHOLE[2:5], 1),
        (WHOLE[:, 3:], 1),
        (WHOLE.t(), 1),
        (WHOLE[::2], 3),
        (WHOLE[1], 1),
        (WHOLE.view(2, 3, 8), 1),
        (WHOLE.view(2, 3, 8).transpose(0, 1), 2),
        (WHOLE.view(48), 1),
        (WHOLE[:0], 0),
    ],
)
def test_views_become_as_few_boxes_as_they_are(view: Tensor, num_shards: int) -> None:
    copied, found = copy_by_shards(WHOLE, view)
    assert torch.equal(copied, view)
    assert found == num_shards


def test_a_step_over_rows_gives_a_box_per_row() -> None:
    shards = cut_view("w", (4, 2), torch.arange(8).view(4, 2)[::2], "t", 5, (2, 1), "int8")
    assert [(shard.box.start, shard.box.stop, shard.offset) for shard in shards] == [
        ((0, 0), (1, 2), 5),
        ((2, 0), (3, 2), 7),
    ]
    assert {(shard.tensor, shard.dtype, shard.strides) for shard in shards} == {
        ("t", "int8", (2, 1))
    }


def test_a_view_across_the_edge_of_a_row_is_refused() -> None:
    view = torch.arange(12).view(3, 4).view(12)[2:7]
    with pytest.raises(ValueError, match="HF tensor 'w' wraps around axis 1"):
        cut_view("w", (3, 4), view, "t", 0, (1,), "int64")


@given(st.data())
def test_any_slicing_and_permutation_is_copied_exactly(data: st.DataObject) -> None:
    shape = [data.draw(st.integers(1, 4)) for _ in range(3)]
    whole = torch.arange(shape[0] * shape[1] * shape[2]).view(shape)
    index = []
    for size in shape:
        start = data.draw(st.integers(0, size - 1))
        stop = data.draw(st.integers(start + 1, size))
        index.append(slice(start, stop, data.draw(st.integers(1, 2))))
    view = whole[tuple(index)].permute(data.draw(st.permutations(range(3))))
    copied, _ = copy_by_shards(whole, view)
    assert torch.equal(copied, view)
