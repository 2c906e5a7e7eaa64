"""Compiled ways of rows to experts and back are torch's, forward and backward."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.cpu.kernels.matmul import add_rows, grouped_linear, take_rows

INDEX = torch.tensor([2, 0, 2, 5, 1])


def check(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *inputs: Tensor) -> None:
    results = []
    for function in (ours, theirs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = function(*leaves)
        dy = torch.linspace(-1, 1, y.numel()).view_as(y)
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected)


def test_rows_are_taken_and_added() -> None:
    torch.manual_seed(0)
    check(lambda x: take_rows(x, INDEX), lambda x: x[INDEX], torch.randn(6, 9))
    check(
        lambda x: add_rows(x, INDEX, 6),
        lambda x: x.new_zeros(6, 9).index_add(0, INDEX, x),
        torch.randn(5, 9),
    )


def test_each_expert_computes_its_own_rows() -> None:
    torch.manual_seed(0)
    counts = [3, 0, 4]

    def separately(x: Tensor, *weights: Tensor) -> Tensor:
        parts: Sequence[Tensor] = x.split(counts)
        return torch.cat([F.linear(*pair) for pair in zip(parts, weights, strict=True)])

    def grouped(x: Tensor, *weights: Tensor) -> Tensor:
        return grouped_linear(x, weights, counts)

    check(grouped, separately, torch.randn(7, 5), *torch.randn(3, 4, 5))
