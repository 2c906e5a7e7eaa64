"""The mixture-of-experts layer with expert parallelism, and the record of chosen experts."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


def run_local_experts() -> None:
    """Skip the experts of other ranks, for --ep-size > 1.

    SGLang's dispatcher marks other ranks' experts with id -1; its native forward uses that as an
    index.
    """
    from sglang.srt.layers.moe import fused_moe_native

    forward_all = fused_moe_native.moe_forward_native

    def moe_forward_native(layer: Any, x: Tensor, topk_output: Any, config: Any) -> Tensor:
        weights_TK, ids_TK, _ = topk_output
        if config.activation != "silu" or not bool((ids_TK < 0).any()):
            return forward_all(layer, x, topk_output, config)
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in ids_TK[ids_TK >= 0].unique().tolist():
            tokens, choices = (ids_TK == expert).nonzero(as_tuple=True)
            gate, up = linear(x[tokens], layer.w13_weight[expert]).chunk(2, -1)
            result = linear(silu(gate) * up, layer.w2_weight[expert])
            out.index_add_(0, tokens, result.float() * weights_TK[tokens, choices, None])
        return out.to(x.dtype)

    fused_moe_native.moe_forward_native = moe_forward_native


def keep_routed_experts_in_plain_memory() -> None:
    """Give --enable-return-routed-experts a plain host buffer.

    SGLang registers its buffer with the CUDA driver.
    """
    from sglang.srt.mem_cache.pool_host import common

    def allocate(dims: tuple[int, ...], dtype: torch.dtype, **options: Any) -> Tensor:
        return torch.empty(dims, dtype=dtype)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
