"""RMSNorm of queries or keys over all heads of a token, which are spread over several ranks."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class _SumOverRanks(torch.autograd.Function):
    """All-reduce in both directions.

    Every tensor-parallel rank continues with the total, so the gradient of a rank's part is the sum
    of all ranks' gradients.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ps.get_tensor_model_parallel_group())
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _SumOverRanks.forward(ctx, grads[0])


class ProjectionNorm(torch.nn.Module):
    """RMSNorm over the whole projection, as in OLMoE (arXiv:2409.02060, section 2) and MiniMax-M2.

    megatron-core normalizes each head separately. Every tensor-parallel rank holds the whole weight
    and uses its heads' part; Megatron sums the gradients of such norms over these ranks. Forward
    and backward each all-reduce 4 bytes per token.
    """

    def __init__(
        self, num_heads: int, hidden_size: int, config: TransformerConfig, eps: float
    ) -> None:
        """num_heads     query heads or key-value heads of the whole layer
        hidden_size   size of one head
        """
        super().__init__()
        self._num_heads = num_heads
        self._eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(num_heads * hidden_size, dtype=config.params_dtype)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x_THd: Tensor) -> Tensor:
        """Normalize this rank's H heads [..., H, d]; several ranks may hold the same KV head."""
        num_local, head_dim = x_THd.shape[-2:]
        rank = ps.get_tensor_model_parallel_rank()
        size = ps.get_tensor_model_parallel_world_size()
        squares_T = x_THd.float().square().sum((-2, -1), keepdim=True)
        if size > 1:
            squares_T = _SumOverRanks.apply(squares_T)
        scale_T = torch.rsqrt(squares_T / (num_local * size * head_dim) + self._eps)
        first = rank * self._num_heads // size
        weight_Hd = self.weight.view(self._num_heads, head_dim)[first : first + num_local]
        return (x_THd.float() * scale_T * weight_Hd.float()).to(x_THd.dtype)
