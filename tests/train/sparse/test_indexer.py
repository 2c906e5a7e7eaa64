"""The indexer's own parts, without a model."""

import torch
from torch import Tensor

from mcore_rl.train.sparse.attention import with_float32_output


class Linear(torch.nn.Linear):
    """As Megatron's: returns its output and a bias to add."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def test_heads_are_weighed_in_float32() -> None:
    linear = with_float32_output(Linear)
    assert with_float32_output(linear) is linear
    torch.manual_seed(0)
    made = linear(256, 4, bias=False).bfloat16()
    x = torch.randn(8, 256).bfloat16()
    weights, bias = made(x)
    exact = x.double() @ made.weight.double().T
    assert bias is None and weights.dtype == torch.float32
    assert (weights - exact).abs().max() < 1e-6
    rounded, _ = Linear.forward(made, x)
    assert (rounded - exact).abs().max() > 1e-4
