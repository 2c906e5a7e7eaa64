"""Patches of megatron-core and torch that training ranks without CUDA need, in their order."""

from mcore_rl.device.replaced.entry import Patch

_CORE = "megatron.core"
_CPU = "mcore_rl.cpu.megatron_patches"
_KERNELS = "mcore_rl.cpu.kernel_patches"
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn")
_TEST = "tests/cpu/test_megatron_patches.py"
_FAILS = f"{_TEST}::test_training_fails_without_the_patch"
_COMPILER = "CC=none"

PATCHES: tuple[Patch, ...] = (
    Patch(
        f"{_CPU}:alias_streams",
        tuple(
            f"torch.cuda.{name}"
            for name in (
                *("current_device", "set_device", "device_count", "synchronize"),
                *("current_stream", "default_stream", "stream", "Stream", "Event"),
            )
        ),
        by="`torch.cuda` streams, events and devices by `torch.cpu`'s no-ops",
        reason="megatron-core calls `torch.cuda` without asking whether it is there",
        on_gpu="real streams: overlap and its races exist only there",
        test=_FAILS,
    ),
    Patch(
        f"{_CPU}:alias_rng",
        (
            *("torch.cuda.manual_seed", "torch.cuda.manual_seed_all"),
            *("torch.cuda.get_rng_state", "torch.cuda.random.get_rng_state"),
            *("torch.cuda.set_rng_state", "torch.cuda.random.set_rng_state"),
            f"{_CORE}.tensor_parallel.random._set_cuda_rng_state",
        ),
        by="CUDA's random generator by the default one",
        reason="torch defers calls on the CUDA generator until an initialization that never comes",
        on_gpu="other random numbers, of which no weights are drawn; checkpoints hold both"
        " generators of a rank (`device/__init__.py`)",
        test=_FAILS,
    ),
    Patch(
        f"{_CPU}:alias_factories",
        (
            *(f"torch.{name}" for name in (*_FACTORIES, "empty_like", "zeros_like")),
            *("torch.Tensor.cuda", "torch.nn.Module.cuda"),
        ),
        by='`device="cuda"` in tensor factories by the CPU; `.cuda()` does nothing',
        reason="megatron-core names the device by hand",
        on_gpu="tensors on the GPU",
        test=_FAILS,
    ),
    Patch(
        f"{_CPU}:alias_tensor_type",
        ("torch.Tensor.type",),
        by="the name of `tensor.type()` by `torch.cuda.*`",
        reason="the optimizers accept only parameters of such types",
        on_gpu="no difference",
        test=_FAILS,
    ),
    Patch(
        f"{_CPU}:recompute_by_copy",
        (f"{_CORE}.tensor_parallel.random._get_share_storage",),
        by="sharing of memory between a recomputation and the outputs it gives back by a copy",
        reason="the code that shares is compiled first, behind a lock that a killed rank leaves",
        on_gpu="megatron-core's own, compiled once in a run in a folder of its own",
        test=f"{_TEST}::test_recompute_by_copy",
    ),
    Patch(
        f"{_CPU}:convert_alltoall_splits",
        (f"{_CORE}.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",),
        by="the expert dispatcher's split sizes by numpy arrays",
        reason="they are converted only on the way from a GPU to the host",
        on_gpu="converted by megatron-core",
        test=_FAILS,
    ),
    Patch(
        f"{_CPU}:uneven_collectives",
        (
            f"{_CORE}.tensor_parallel.mappings._gather_along_first_dim",
            f"{_CORE}.tensor_parallel.mappings._reduce_scatter_along_first_dim",
        ),
        by="all-gather and reduce-scatter of uneven parts by all-to-all",
        reason="gloo only takes even parts; expert tensor parallelism has uneven ones",
        on_gpu="NCCL's own collectives",
        test=_FAILS,
    ),
    Patch(
        f"{_CPU}:contiguous_collectives",
        ("torch.distributed.scatter", "torch.distributed.broadcast"),
        by="strided tensors in scatter and broadcast by contiguous copies",
        reason="gloo silently ignores strides",
        on_gpu="NCCL takes contiguous tensors only, and says so",
        test="tests/cpu/test_gloo_patches.py::test_contiguous_collectives",
    ),
    Patch(
        f"{_CPU}:buckets_in_place",
        tuple(
            f"{_CORE}.distributed.param_and_grad_buffer.{name}"
            for name in ("_coalescing_manager", "dist_all_gather_func", "dist_reduce_scatter_func")
        ),
        by="all-gather and reduce-scatter of a distributed optimizer's buckets by broadcasts and"
        " sums in place",
        reason="gloo copies all of them to fresh memory and back, even for a single rank",
        on_gpu="NCCL works in place",
        test="tests/cpu/test_gloo_patches.py::test_buckets_in_place",
    ),
    Patch(
        f"{_CPU}:know_linear_in_latent_attention",
        (
            f"{_CORE}.transformer.multi_latent_attention.Linear",
            f"{_CORE}.transformer.experimental_attention_variant.absorbed_mla.Linear",
        ),
        by="`Linear` in both, None without Transformer Engine, by the class",
        reason="it refuses any other module for its projections down",
        on_gpu="Transformer Engine's TELinear",
        test=f"{_TEST}::test_know_linear_in_latent_attention",
    ),
    Patch(
        f"{_CPU}:recompute_without_fp8",
        (f"{_CORE}.tensor_parallel.random.CheckpointWithoutOutput.__init__",),
        by="the default `fp8=False` of `CheckpointWithoutOutput` by None",
        reason="it tests `fp8 is not None` and would enter Transformer Engine's fp8 context",
        on_gpu="no difference without fp8",
        test=f"{_TEST}::test_recompute_without_fp8",
    ),
    Patch(
        f"{_CPU}:use_fused_adam",
        (
            *(f"{_CORE}.optimizer.Adam", f"{_CORE}.optimizer.distrib_optimizer.Adam"),
            f"{_CORE}.optimizer.USING_PYTORCH_OPTIMIZER",
            f"{_CORE}.optimizer.distrib_optimizer.HAVE_APEX_OR_TE",
            f"{_CORE}.optimizer.distrib_optimizer.USING_APEX_OPTIMIZER",
        ),
        by="Adam by `cpu/te_workalike.py`",
        reason="the distributed optimizer expects Transformer Engine's state layout",
        on_gpu="Transformer Engine's FusedAdam, same checkpoint layout",
        test=_FAILS,
    ),
    Patch(
        f"{_CPU}:allow_precision_aware_adam",
        (f"{_CORE}.optimizer.OptimizerConfig.__post_init__",),
        by="the check of the optimizer's options by one that does without Transformer Engine",
        reason="it looks for Transformer Engine's FusedAdam",
        on_gpu="Transformer Engine's FusedAdam holds the moments",
        test=f"{_TEST}::test_allow_precision_aware_adam",
    ),
    Patch(
        f"{_CPU}:use_te_workalike",
        (
            f"{_CORE}.extensions.transformer_engine_spec_provider.TESpecProvider",
            f"{_CORE}.models.gpt.gpt_layer_specs.TESpecProvider",
            f"{_CORE}.models.gpt.moe_module_specs.TESpecProvider",
            f"{_CORE}.models.gpt.gpt_layer_specs.TENorm",
            f"{_CORE}.transformer.transformer_block.LayerNormImpl",
        ),
        by="Transformer Engine's modules by `cpu/te_workalike.py` and `device/attention.py`",
        reason="Transformer Engine needs CUDA",
        on_gpu="fused kernels: other rounding, same module tree and parameter names",
        test=_FAILS,
    ),
    Patch(
        f"{_CPU}:use_torch_delta_net",
        (
            *(f"{_CORE}.ssm.gated_delta_net.common.{name}" for name in ("HAVE_FLA", "l2norm")),
            f"{_CORE}.ssm.gated_delta_net.gdn.causal_conv1d",
            f"{_CORE}.ssm.gated_delta_net.gdn.chunk_gated_delta_rule",
            f"{_CORE}.models.gpt.experimental_attention_variant_module_specs.TESpecProvider",
        ),
        by="flash-linear-attention's kernels of gated delta nets by `cpu/delta_net.py`",
        reason="they are triton kernels; megatron-core's torch version takes no packed sequences",
        on_gpu="flash-linear-attention, which the extra `gpu` brings: other rounding",
        test=f"{_TEST}::test_use_torch_delta_net",
    ),
    Patch(
        f"{_CPU}:use_torch_mamba",
        (
            *(
                f"{_CORE}.ssm.mamba_mixer.{name}"
                for name in (
                    *("HAVE_MAMBA_SSM", "ExtendedRMSNorm", "mamba_split_conv1d_scan_combined"),
                    "_check_mamba_sequence_packing_support",
                )
            ),
            *(f"{_CORE}.ssm.mamba_context_parallel.{n}" for n in ("tex", "is_te_min_version")),
            f"{_CORE}.models.hybrid.hybrid_block.TENorm",
        ),
        by="mamba_ssm's kernels of Mamba-2 layers by `cpu/mamba.py` and `cpu/gated_norm.py`, a norm"
        " and a function of Transformer Engine's",
        reason="they are triton kernels, and Transformer Engine needs CUDA",
        on_gpu="mamba_ssm and causal_conv1d: other rounding",
        test=f"{_TEST}::test_use_torch_mamba",
    ),
    Patch(
        f"{_CPU}:know_linear_in_latent_experts",
        (
            f"{_CORE}.transformer.moe.moe_layer.HAVE_TE",
            f"{_CORE}.transformer.moe.moe_layer.TELinear",
        ),
        by="the missing linear of experts that are narrower than the model by the one of"
        " `cpu/te_workalike.py`",
        reason="it is imported only together with Transformer Engine",
        on_gpu="Transformer Engine's linear",
        test=f"{_TEST}::test_know_linear_in_latent_experts",
    ),
    Patch(
        "mcore_rl.device:leave_compiler_out",
        ("torch.compile", "torch.compiler.disable"),
        by="compiled functions by the functions themselves; torch's compiler is not even imported",
        reason="compilation needs a C++ compiler and minutes, the import half a second of a rank",
        on_gpu="compiled",
        test=f"{_TEST}::test_run_eagerly",
    ),
    Patch(
        f"{_KERNELS}:fuse_rotary",
        (f"{_CORE}.models.common.embeddings.rope_utils._apply_rotary_pos_emb_thd",),
        by="the rotary embedding of packed sequences by one pass of compiled code",
        reason="torch makes several passes over memory",
        on_gpu="Transformer Engine's fused kernel",
        switch=_COMPILER,
        test="tests/cpu/test_kernel_patches.py::test_rotary_embedding",
    ),
    Patch(
        f"{_KERNELS}:fuse_swiglu",
        (
            f"{_CORE}.transformer.moe.experts.weighted_bias_swiglu_impl",
            f"{_CORE}.transformer.mlp.weighted_bias_swiglu_impl",
            f"{_CORE}.transformer.mlp.bias_swiglu_impl",
            f"{_CORE}.transformer.moe.shared_experts.bias_swiglu_impl",
        ),
        by="SwiGLU of experts and dense layers by one pass of compiled code",
        reason="torch makes several passes over memory",
        on_gpu="megatron-core's fused function",
        switch=_COMPILER,
        test="tests/cpu/test_kernel_patches.py::test_swiglu",
    ),
    Patch(
        f"{_KERNELS}:fuse_permutation",
        tuple(
            f"{_CORE}.transformer.moe.token_dispatcher.{name}"
            for name in ("permute", "unpermute", "sort_chunks_by_idxs")
        ),
        by="the way of rows to experts and back by copies of whole rows",
        reason="torch computes an index for each of their elements",
        on_gpu="Transformer Engine's fused permutation",
        switch=_COMPILER,
        test="tests/cpu/test_kernel_patches.py::test_permutation",
    ),
    Patch(
        f"{_KERNELS}:use_faster_library",
        (f"{_CORE}.tensor_parallel.layers.linear_with_grad_accumulation_and_async_allreduce",),
        by="large products of linear layers by numpy's OpenBLAS, where it is faster",
        reason="torch's MKL is slower on AMD's processors",
        on_gpu="cuBLAS",
        switch=_COMPILER,
        test="tests/cpu/test_kernel_patches.py::test_linear_layers",
    ),
)
