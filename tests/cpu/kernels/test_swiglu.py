"""Compiled SwiGLU is torch's, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_rl.cpu.kernels.layers import swiglu


def by_torch(x: Tensor, weights: Tensor | None) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up * (1.0 if weights is None else weights)


@pytest.mark.parametrize("is_weighted", [True, False])
def test_values_and_gradients_are_those_of_torch(is_weighted: bool) -> None:
    torch.manual_seed(0)
    x, weights, dy = 3 * torch.randn(9, 26), torch.rand(9, 1), torch.randn(9, 13)
    x[0, 0], x[1, 1] = -200.0, 200.0
    results = []
    for function in (swiglu, by_torch):
        leaves = [x.clone().requires_grad_()]
        if is_weighted:
            leaves.append(weights.clone().requires_grad_())
        y = function(leaves[0], leaves[1] if is_weighted else None)
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
