"""Torch versions of the sgl_kernel functions that SGLang calls on CPU.

Any other name can be imported and raises NotImplementedError when called. The wheels of
sglang-kernel hold CUDA binaries only. Without Intel AMX, SGLang takes its own forward_native paths
and calls little of sgl_kernel. torch.ops.sgl_kernel.convert_weight_packed must stay undefined:
SGLang takes its presence as a sign of the AMX build.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from import_standin import missing
from torch import Tensor

from sgl_kernel import mamba, qwen3_5, speculative
from sgl_kernel.slots import list_places

__version__ = "0.0.0+cpu"


def assign_req_to_token_pool_cpu(
    req_pool_indices_N: Tensor,
    req_to_token: Tensor,
    starts_N: Tensor,
    stops_N: Tensor,
    out_cache_loc_T: Tensor,
    pool_len: int,
) -> None:
    """Fill req_to_token[request, start:stop] of each request with the next of out_cache_loc_T."""
    places = list_places(req_pool_indices_N, starts_N, stops_N)
    req_to_token.numpy()[places] = out_cache_loc_T.numpy()[: len(places[0])]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, target_rows: Tensor, source_rows: Tensor
) -> None:
    """Copy rows within each layer's buffer; every source row is read before any row is written."""
    sources, targets = source_rows.tolist(), target_rows.tolist()
    for base, row_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + source * row_bytes, row_bytes) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(base + target * row_bytes, row, row_bytes)


def _mix(hash_: Any, key: Any) -> Any:
    key = key * np.uint32(0xCC9E2D51)
    key = ((key << 15) | (key >> 17)) * np.uint32(0x1B873593)
    hash_ = hash_ ^ key
    return ((hash_ << 13) | (hash_ >> 19)) * np.uint32(5) + np.uint32(0xE6546B64)


def murmur_hash32_cpu(seed_N: Tensor, positions_N: Tensor, columns_V: Tensor) -> Tensor:
    """Return MurmurHash3 of (64-bit seed, position, column), uint32 [N, V].

    It equals SGLang's triton kernel, sglang.kernels.ops.sampling.murmur_hash. It uses numpy because
    torch has no arithmetic on uint32.
    """
    seed = seed_N.view(torch.int64).numpy()
    keys = (seed, seed >> 32, positions_N.numpy())
    hash_ = np.zeros((len(seed), 1), dtype=np.uint32)
    for key in keys:
        hash_ = _mix(hash_, key.astype(np.uint32)[:, None])
    hash_ = _mix(hash_, columns_V.numpy().astype(np.uint32)) ^ np.uint32(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hash_ = (hash_ ^ (hash_ >> shift)) * np.uint32(factor)
    return torch.from_numpy(hash_ ^ (hash_ >> 16))


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32_cpu, "CPU")
_library.define(
    "fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)"
)
_library.define(
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k,"
    " Tensor v, Tensor a, Tensor b, Tensor(a!) initial_state_source, Tensor initial_state_indices,"
    " Tensor cu_seqlens, bool use_qk_l2norm_in_kernel, float softplus_beta,"
    " float softplus_threshold, bool is_kda=False, bool disable_state_update=False,"
    " Tensor(b!)? intermediate_states_buffer=None, Tensor? intermediate_state_indices=None,"
    " int cache_steps=1, Tensor? retrieve_parent_token=None) -> Tensor"
)
_library.define("fused_sigmoid_mul_cpu(Tensor(a!) x, Tensor gate) -> ()")
_library.define(
    "fused_qk_gemma_rmsnorm_with_gate_cpu(Tensor q_gate, Tensor k, Tensor q_weight,"
    " Tensor k_weight, float eps, int head_dim, int num_heads) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "fused_qkvzba_split_reshape_cat_contiguous_cpu(Tensor qkvz, Tensor ba, int key_heads,"
    " int heads, int head_k, int head_v) -> (Tensor, Tensor, Tensor, Tensor)"
)
for _module, *_names in (
    (mamba, "fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu"),
    (
        *(qwen3_5, "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu"),
        "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    ),
):
    for _name in _names:
        _library.impl(_name, getattr(_module, _name), "CPU")
for _name in (
    *("assign_extend_cache_locs_cpu", "assign_draft_cache_locs_contiguous_cpu"),
    *("fill_accept_out_cache_loc_cpu", "fill_bonus_tokens_cpu"),
    *("build_tree_kernel_efficient_cpu", "verify_tree_greedy_cpu"),
):
    globals()[_name] = getattr(speculative, _name)
# SGLang looks it up where it serves Qwen3.5; only attention without a gate calls it.
_library.define("fused_qk_gemma_rmsnorm_cpu(Tensor x) -> Tensor")


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    globals()[name] = function = missing(f"sgl_kernel.{name}")
    return function
