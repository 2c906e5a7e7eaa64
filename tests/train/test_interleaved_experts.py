"""A linear layer with alternating gate and up rows gives the gate first."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.train.model import with_halves


class Linear:
    """A layer that returns its input, and a bias if it was given one."""

    def __init__(self, bias: Tensor | None = None) -> None:
        self.bias = bias

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        return x, self.bias


def test_the_gate_comes_first() -> None:
    rows = torch.tensor([[0, 10, 1, 11, 2, 12], [3, 13, 4, 14, 5, 15]])
    out, bias = with_halves(Linear)().forward(rows)
    assert out.tolist() == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]
    assert bias is None


def test_layers_that_share_a_spec_share_one_class() -> None:
    made = with_halves(Linear)
    assert issubclass(made, Linear)
    assert with_halves(Linear) is made and with_halves(made) is made


def test_a_bias_that_is_still_to_be_added_is_refused() -> None:
    with pytest.raises(AssertionError, match="must add its bias itself"):
        with_halves(Linear)(torch.ones(2)).forward(torch.zeros(1, 2))
