"""The norm over a whole projection, and the gradient of a sum over ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state as ps
from torch import Tensor

from mcore_rl.config import ParallelConfig
from mcore_rl.train.model import ProjectionNorm
from mcore_rl.train.runtime import init_distributed
from tests.support.distributed import run_ranks

EPS = 0.01


def normalize(rank: int, world_size: int, port: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's output, its gradient by the input and by its weight."""
    parallel = ParallelConfig(tp=world_size)
    init_distributed(rank, world_size, "127.0.0.1", port, parallel, seed=0, timeout_s=60)
    x_THd, weight = inputs()
    config: Any = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False)
    norm = ProjectionNorm(num_heads=4, hidden_size=3, config=config, eps=EPS)
    with torch.no_grad():
        norm.weight.copy_(weight)
    own = x_THd.detach().chunk(world_size, dim=1)[ps.get_tensor_model_parallel_rank()].clone()
    out = norm(own.requires_grad_())
    (out * out.detach().cos()).sum().backward()
    assert own.grad is not None and norm.weight.grad is not None
    return out.detach(), own.grad, norm.weight.grad


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 4, 3, generator=generator), torch.randn(12, generator=generator)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.gloo)])
def test_ranks_normalize_as_one(world_size: int) -> None:
    outs, gradients, weight_gradients = zip(*run_ranks(normalize, world_size), strict=True)
    x_THd, weight = inputs()
    x = x_THd.flatten(1).requires_grad_()
    weight.requires_grad_()
    wanted = torch.nn.functional.rms_norm(x, (12,), weight, EPS)
    (wanted * wanted.detach().cos()).sum().backward()
    torch.testing.assert_close(torch.cat(outs, 1).flatten(1), wanted.detach())
    torch.testing.assert_close(torch.cat(gradients, 1).flatten(1), x.grad)
    torch.testing.assert_close(torch.stack(weight_gradients).sum(0), weight.grad)
