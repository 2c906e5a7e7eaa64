"""The mixture-of-experts layer by torch, in grouped products, and the record of chosen experts."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear, relu, silu

_ALIGNMENT = 16
"""Bytes; torch's grouped product takes rows of whole multiples of it."""
ACTIVATIONS = ("silu", "relu2")
"""The gated one of most families, and the one of Nemotron-H, which has no gate."""


def group_experts() -> None:
    """Compute all experts of a layer in two grouped products, and leave other ranks' experts out.

    SGLang's native forward calls five functions for each expert, and cannot run with --ep-size > 1:
    its dispatcher marks other ranks' experts with id -1, which the forward uses as an index. For
    Nemotron-H SGLang chooses kernels that take the ids of all ranks' experts, which there are none
    of here.
    """
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.moe.token_dispatcher import standard

    forward_all = fused_moe_native.moe_forward_native

    def moe_forward_native(layer: Any, x: Tensor, topk_output: Any, config: Any) -> Tensor:
        if config.activation not in ACTIVATIONS or config.apply_router_weight_on_input:
            return forward_all(layer, x, topk_output, config)
        weights_TK, ids_TK, _ = topk_output
        ids_N = ids_TK.flatten()
        order_N = ids_N.argsort(stable=True)
        num_local = len(layer.w13_weight)  # layer.num_experts counts those of all ranks
        counts = torch.bincount(ids_N + 1, minlength=num_local + 1).tolist()
        order_N = order_N[counts[0] :]  # those before it are other ranks' experts
        rows_N = order_N // ids_TK.shape[1]
        hidden = _product(x[rows_N], layer, "w13_weight", counts[1:])
        hidden = _product(_activate(hidden, config), layer, "w2_weight", counts[1:])
        out = torch.zeros(x.shape, dtype=torch.float32)
        out.index_add_(0, rows_N, hidden.float() * weights_TK.flatten()[order_N, None])
        return out.to(x.dtype)

    fused_moe_native.moe_forward_native = moe_forward_native
    standard._keeps_global_expert_ids = lambda backend: False


def _product(x_NH: Tensor, layer: Any, name: str, counts: list[int]) -> Tensor:
    """Return the products of rows sorted by expert; expert e has counts[e] rows."""
    weight_EOH = getattr(layer, name)
    counts_E = torch.tensor(counts)
    sizes = (size * x_NH.element_size() for size in weight_EOH.shape[1:])
    if any(size % _ALIGNMENT for size in sizes):
        parts = x_NH.split(counts)
        out_NO = torch.cat([linear(x, w) for x, w in zip(parts, weight_EOH, strict=True)])
    else:
        stops_E = counts_E.cumsum(0).to(torch.int32)
        out_NO = grouped_mm(x_NH, weight_EOH.transpose(1, 2), offs=stops_E)
    bias_EO = getattr(layer, f"{name}_bias", None)
    if bias_EO is None:
        return out_NO
    return (out_NO.float() + bias_EO.repeat_interleave(counts_E, 0)).to(x_NH.dtype)


def _activate(gate_up: Tensor, config: Any) -> Tensor:
    if config.activation == "relu2":
        return relu(gate_up).square()
    if config.gemm1_alpha is None:
        gate, up = gate_up.chunk(2, -1)
        return silu(gate) * up
    from sglang.srt.layers.moe.fused_moe_native import swiglu_gpt_oss_sigmoid_alpha

    return swiglu_gpt_oss_sigmoid_alpha(gate_up, config.gemm1_alpha, config.gemm1_clamp_limit)


def unpack_experts() -> None:
    """Compute experts in INT4 from their dequantized weights; SGLang has a triton kernel for them.

    Each weight is (value - 8) * scale of its group, a product that is rounded once, as in it.
    """
    schemes: Any = import_module(
        "sglang.srt.layers.quantization.compressed_tensors.compressed_tensors"
    )
    native: Any = import_module("sglang.srt.layers.moe.fused_moe_native")
    dispatchers: Any = import_module("sglang.srt.layers.moe.token_dispatcher")
    scheme = schemes.CompressedTensorsWNA16TritonMoE

    def create_moe_runner(self: Any, layer: Any, moe_runner_config: Any) -> None:
        self.moe_runner_config = moe_runner_config

    def apply_weights(self: Any, layer: Any, dispatch_output: Any) -> Any:
        packed = self.get_triton_quant_info(layer)
        unpacked = SimpleNamespace(
            w13_weight=_unpack(packed.w13_weight, packed.w13_scale),
            w2_weight=_unpack(packed.w2_weight, packed.w2_scale),
        )
        routed = dispatch_output.hidden_states, dispatch_output.topk_output
        out = native.moe_forward_native(unpacked, *routed, self.moe_runner_config)
        return dispatchers.StandardCombineInput(hidden_states=out)

    scheme.create_moe_runner = create_moe_runner
    scheme.apply_weights = apply_weights


def _unpack(bytes_ENB: Tensor, scales_ENG: Tensor) -> Tensor:
    """Return weights [E, N, K] of bytes with two values each, the first in the lower half."""
    values_ENBV = torch.stack([bytes_ENB & 15, bytes_ENB >> 4], -1).to(scales_ENG.dtype) - 8
    values_ENGV = values_ENBV.flatten(-2).unflatten(-1, (scales_ENG.shape[-1], -1))
    return (values_ENGV * scales_ENG[..., None]).flatten(-2)


def keep_routed_experts_in_plain_memory() -> None:
    """Give --enable-return-routed-experts a plain host buffer.

    SGLang registers its buffer with the CUDA driver.
    """
    from sglang.srt.mem_cache.pool_host import common

    def allocate(dims: tuple[int, ...], dtype: torch.dtype, **options: Any) -> Tensor:
        return torch.empty(dims, dtype=dtype)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def gate_shared_expert() -> None:
    """Gate Qwen2-MoE's shared expert in torch.

    SGLang multiplies its output by a sigmoid, and adds it to the routed experts', in a triton
    kernel.
    """
    from sglang.kernels.ops.elementwise import elementwise

    def launch(
        hidden_states: Tensor,
        gate_weight: Tensor,
        shared_output: Tensor,
        output: Tensor,
        *,
        do_add: bool,
    ) -> None:
        gate_T1 = (hidden_states.float() @ gate_weight.float()).sigmoid()[:, None]
        gated = gate_T1 * shared_output.float()
        output.copy_(output.float() + gated if do_add else gated)

    elementwise._launch_fused_gate_sigmoid_mul = launch
