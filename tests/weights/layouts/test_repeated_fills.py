"""Padding is merged into few parts and copied from the example."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.weights.box import Padding
from mcore_rl.weights.layouts.engine_trace import list_repeated_fills, merge_padding


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 3))
def test_merged_padding_has_the_same_elements(offsets, size):
    padding = [Padding("p", offset, (size,), (2,)) for offset in offsets]
    marked = {"p": torch.zeros(40)}
    merged = {"p": torch.zeros(40)}
    for part in padding:
        part.view(marked).fill_(1)
    for part in merge_padding(padding):
        part.view(merged).fill_(1)
    assert torch.equal(marked["p"], merged["p"])


def test_padding_at_equal_distances_becomes_one_part():
    padding = [Padding("p", offset, (2, 1), (4, 1)) for offset in (3, 11, 19)]
    assert list(merge_padding(padding)) == [Padding("p", 3, (3, 2, 1), (8, 4, 1))]


def test_other_layers_get_the_padding_of_the_example():
    tensors = {f"layers.{i}.w": torch.full((4, 4), float(i)) for i in range(3)}
    tensors["layers.0.w"][:, 3] = 9
    padding = [Padding("layers.0.w", 4 * row + 3, (1,), (1,)) for row in range(4)]
    padding.append(Padding("layers.2.w", 0, (4,), (1,)))
    for fill in list_repeated_fills({1: 0}, padding, tensors):
        fill()
    assert tensors["layers.1.w"].tolist() == [[1, 1, 1, 9]] * 4
    assert tensors["layers.2.w"].eq(2).all()
