"""Which of megatron-core's and SGLang's own options need a GPU, by upstream's names.

A rehearsal leaves them out, and a run without CUDA refuses them.
"""

from collections.abc import Mapping
from typing import Any

from mcore_rl.device import has_cuda
from mcore_rl.device.deep_ep import find_deep_ep_fault

_MEGATRON = frozenset(
    {
        *("moe_flex_dispatcher_backend", "moe_deepep_num_sms", "moe_flex_dispatcher_num_sms"),
        *("moe_permute_fusion", "apply_rope_fusion", "fused_single_qkv_rope"),
        *("bias_dropout_fusion", "masked_softmax_fusion"),
        *("persist_layer_norm", "memory_efficient_layer_norm", "gradient_accumulation_fusion"),
        *("use_fused_weighted_squared_relu", "use_te_activation_func", "use_te_rng_tracker"),
        *("attention_backend", "cp_comm_type", "batch_invariant_mode"),
        *("moe_shared_expert_overlap", "batch_p2p_sync", "deallocate_pipeline_outputs"),
        *("cpu_offloading", "cpu_offloading_num_layers", "cpu_offloading_activations"),
        *("cpu_offloading_double_buffering", "fine_grained_activation_offloading"),
        *("offload_modules", "min_offloaded_tensor_size", "disable_parameter_transpose_cache"),
        *("activation_offload_fraction", "delta_offload_bytes_across_pp_ranks"),
        *("fine_grained_offloading_max_inflight_offloads", "fused_residual_rmsnorm"),
        *("cpu_offloading_retain_pinned_cpu_buffers", "flash_attention_version"),
        *("activation_func_fp8_input_store", "tp_only_amax_red", "first_last_layers_bf16"),
        *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
        *("disable_bf16_reduced_precision_matmul", "dsa_kernel_backend"),
    }
)
_MEGATRON_PREFIXES = ("fp8", "fp4", "moe_hybridep_", "moe_ncclep_")
_MEGATRON_VALUES: Mapping[str, Any] = {"moe_token_dispatcher_type": "flex"}
_SERVER = frozenset(
    {
        *("attention_backend", "decode_attention_backend", "prefill_attention_backend"),
        *("sampling_backend", "grammar_backend", "mem_fraction_static", "kv_cache_dtype"),
        *("moe_a2a_backend", "moe_runner_backend", "enable_hierarchical_cache"),
        *("page_size", "enable_two_batch_overlap", "enable_single_batch_overlap"),
        *("enable_nccl_nvls", "enable_symm_mem", "disable_custom_all_reduce", "enable_mscclpp"),
        *("enable_flashinfer_allreduce_fusion", "enable_fp32_lm_head", "enable_tf32_matmul"),
        *("bf16_gemm_backend", "quantization", "enable_torch_symm_mem", "pre_warm_nccl"),
    }
)
_SERVER_PREFIXES = (
    *("cuda_graph_", "disable_cuda_graph", "disable_decode_cuda_graph"),
    *("disable_prefill_cuda_graph", "enable_torch_compile", "torch_compile_", "deepep_"),
    *("hicache_", "speculative_", "flashinfer_", "triton_", "fp8_", "fp4_", "dsa_"),
)


def megatron_needs_gpu(name: str, value: object) -> bool:
    """Return whether a field of TransformerConfig has this value for GPUs only."""
    if name in _MEGATRON_VALUES:
        return value == _MEGATRON_VALUES[name]
    return name in _MEGATRON or name.startswith(_MEGATRON_PREFIXES)


def server_needs_gpu(name: str, value: object) -> bool:
    """Return whether a field of ServerArgs is for GPUs only."""
    return name in _SERVER or name.startswith(_SERVER_PREFIXES)


def refuse_unavailable(options: Mapping[str, Any], cp_of_sinks: int = 1) -> None:
    """Raise ValueError naming the first field that needs a GPU, or a package, that is not here.

    cp_of_sinks   context-parallel ranks of a model whose attention has sinks. Transformer Engine
                  exchanges heads between them (a2a), not keys and values in a ring; the torch
                  modules of a CPU take any number.
    """
    for name, value in options.items():
        if megatron_needs_gpu(name, value) and value and not has_cuda():
            raise ValueError(
                f"train.megatron.{name}={value}: there is no GPU here, and only its kernels have"
                " it; leave it out, or run the recipe with rehearse=true, which does"
            )
    is_flex = options.get("moe_token_dispatcher_type") == "flex"
    if is_flex and (fault := find_deep_ep_fault()):
        raise ValueError(
            "train.megatron.moe_token_dispatcher_type=flex: its kernels come from DeepEP, and"
            f" {fault}; mend that, or set train.megatron.moe_token_dispatcher_type=alltoall and"
            " train.megatron.moe_flex_dispatcher_backend=null"
        )
    if cp_of_sinks > 1 and has_cuda() and options.get("cp_comm_type") != "a2a":
        raise ValueError(
            f"parallel.cp={cp_of_sinks} with a model whose attention has sinks (gpt-oss):"
            " Transformer Engine computes it with train.megatron.cp_comm_type=a2a alone; set that,"
            " or parallel.cp=1"
        )
