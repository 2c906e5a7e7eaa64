"""Patches of SGLang that engines without CUDA need, in their order."""

from mcore_rl.device.replaced.entry import Patch

_SRT = "sglang.srt"
_BACKEND = f"{_SRT}.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_CHECKS = "tests/scenarios/device/test_sglang_on_cpu.py::test_sglang_on_cpu"


def _patch(
    module: str,
    function: str,
    names: tuple[str, ...],
    by: str,
    reason: str,
    on_gpu: str,
    **more: str,
) -> Patch:
    return Patch(
        f"sglang_on_cpu.{module}:{function}",
        names,
        by,
        reason,
        on_gpu=on_gpu,
        test=f"{_CHECKS}[check_{function}]",
        **more,  # type: ignore[arg-type]
    )


PATCHES: tuple[Patch, ...] = (
    _patch(
        "processes",
        "fork_workers",
        (f"{_SRT}.entrypoints.engine._set_envs_and_config",),
        "spawned scheduler and detokenizer processes by forked ones",
        "each spawned process imports SGLang again, 7 core-seconds",
        "spawned: CUDA does not survive a fork",
    ),
    _patch(
        "processes",
        "leave_megatron_out",
        ("sys.modules.megatron",),
        "`import megatron` in SGLang's debug dumper by a failure",
        "half a core-second per rank",
        "imported if installed",
    ),
    _patch(
        "processes",
        "keep_load_snapshots_in_temp_dir",
        (f"{_SRT}.managers.load_snapshot.shm_path_for",),
        "the place of load files, /dev/shm, by the engine's temporary folder",
        "they would stay when an engine is killed",
        "/dev/shm",
    ),
    _patch(
        "models",
        "import_models_when_asked",
        (f"{_SRT}.models.registry.ModelRegistry.models",),
        "the import of all 200 model files by that of one",
        "half a core-second per rank",
        "all are imported",
    ),
    _patch(
        "models",
        "import_few_image_processors",
        (
            f"{_SRT}.managers.tokenizer_manager.import_processors",
            f"{_SRT}.managers.multimodal_processor.PROCESSOR_MAPPING",
        ),
        "the import of all image processors by those of families here",
        "many need packages that are missing",
        "all are imported",
    ),
    _patch(
        "processes",
        "sleep_while_paused",
        (f"{_SRT}.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine",),
        "polling by waiting, while generation is paused",
        "a paused engine takes a whole core",
        "polls",
    ),
    _patch(
        "attention",
        "batch_attention",
        tuple(
            f"{_BACKEND}.{name}"
            for name in (
                *("init_forward_metadata", "_run_sdpa_forward_extend", "_run_sdpa_forward_decode"),
                *("forward_extend", "forward_decode"),
            )
        ),
        "torch_native's loop over requests by a call per group of requests; adds sinks and chosen"
        " keys",
        "the loop is 60 % of a decode step at 256 requests; gpt-oss needs sinks, DeepSeek-V3.2"
        " chosen keys",
        "flashinfer or FlashAttention: other rounding",
    ),
    _patch(
        "attention",
        "absorb_latents",
        (f"{_SRT}.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry",),
        "the form of latent attention in prefill by the one that reads the latent cache",
        "torch_native keeps no expanded keys and values",
        "chosen by the backend",
    ),
    _patch(
        "attention",
        "rotate_without_yarn",
        (f"{_SRT}.layers.rotary_embedding.factory.get_rope_cpu",),
        "the missing rotary embedding of latent attention without scaling by the plain one",
        "SGLang's CPU embeddings include yarn only; Moonlight has no scaling",
        "SGLang's own",
    ),
    _patch(
        "attention",
        "admit_torch_native",
        (f"{_SRT}.arg_groups.model_hook.attention_backends_of",),
        "gpt-oss's list of attention backends by one with torch_native",
        "`batch_attention` gives torch_native sinks",
        "a backend with sinks",
    ),
    _patch(
        "sparse_attention",
        "leave_sparse_defaults_out",
        (f"{_SRT}.configs.model_config.is_deepseek_dsa",),
        "the defaults of options of DeepSeek-V3.2 and GLM-5 by those of DeepSeek-V3",
        "SGLang asks CUDA for its version to choose pages, KV dtype and kernels",
        "chosen for the GPU",
    ),
    _patch(
        "sparse_attention",
        "keep_index_keys",
        (f"{_SRT}.mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class",),
        "the KV pool of sparse attention by one with index keys in the KV cache's dtype",
        "SGLang's has pages of 64 keys of 128 values in FP8, for its kernels",
        "SGLang's own",
    ),
    _patch(
        "sparse_attention",
        "choose_keys",
        tuple(
            f"{_SRT}.layers.attention.dsa.dsa_indexer.Indexer.{name}"
            for name in ("__init__", "forward_native")
        ),
        "the missing indexer by one in torch, without FP8 and its Hadamard transform; the weights"
        " of index heads in bfloat16 by those in the model's dtype",
        "SGLang's runs on accelerators only",
        "DeepGEMM or SGLang's kernels, FP8 index keys: other rounding",
    ),
    _patch(
        "sparse_attention",
        "report_chosen_keys",
        tuple(
            f"{_SRT}.{module}.create_indexer_capturer"
            for module in ("model_executor.model_runner", "state_capturer.indexer_topk")
        ),
        "the refusal of --enable-return-indexer-topk by acceptance",
        "`choose_keys` feeds it",
        "accepted",
    ),
    _patch(
        "experts",
        "gate_shared_expert",
        ("sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul",),
        "a triton kernel of Qwen2-MoE by torch",
        "SGLang has no CPU path",
        "the triton kernel",
    ),
    _patch(
        "delta_net",
        "norm_gated_outputs",
        (
            "sglang.kernels.ops.attention.fla.fused_norm_gate.FusedRMSNormGated.forward",
            "sglang.kernels.ops.attention.fla.layernorm_gated.RMSNorm.forward",
        ),
        "two triton kernels of gated delta nets by torch",
        "SGLang has no CPU path without Intel AMX",
        "the triton kernels",
    ),
    _patch(
        "delta_net",
        "keep_accepted_states",
        (
            f"{_SRT}.layers.attention.hybrid_linear_attn_backend"
            ".scatter_mamba_states_after_mtp_verify",
        ),
        "the triton kernels that copy the states behind accepted drafts by SGLang's own torch",
        "SGLang uses the latter for states of other layers alone",
        "the triton kernels",
    ),
    _patch(
        "data_parallel",
        "pad_batches",
        (f"{_BACKEND}.get_cpu_graph_seq_len_fill_value",),
        "the missing fill length of padded batches by 1",
        "torch_native lacks the method",
        "each backend's own",
    ),
    _patch(
        "data_parallel",
        "reduce_without_nccl",
        (f"{_SRT}.distributed.parallel_state.GroupCoordinator.reduce_scatterv",),
        "NCCL's reduce-scatter by all-reduce",
        "SGLang calls NCCL on every device",
        "NCCL, less traffic",
    ),
    _patch(
        "data_parallel",
        "wait_for_requests",
        (f"{_SRT}.managers.data_parallel_controller.sock_recv",),
        "polling by waiting, in the data-parallel controller",
        "polling takes a whole core",
        "polls",
    ),
    _patch(
        "experts",
        "group_experts",
        (
            f"{_SRT}.layers.moe.fused_moe_native.moe_forward_native",
            f"{_SRT}.layers.moe.token_dispatcher.standard._keeps_global_expert_ids",
        ),
        "the native expert layer by two grouped products of its own rank's experts",
        "five calls per expert; other ranks' experts are marked -1, which SGLang uses as an index",
        "fused expert kernels",
    ),
    _patch(
        "experts",
        "unpack_experts",
        tuple(
            f"{_SRT}.layers.quantization.compressed_tensors.compressed_tensors"
            f".CompressedTensorsWNA16TritonMoE.{name}"
            for name in ("create_moe_runner", "apply_weights")
        ),
        "the triton kernel of experts in INT4 by dequantized weights and `group_experts`",
        "SGLang has no CPU path",
        "the triton kernel: it dequantizes to the same bits as it computes",
    ),
    _patch(
        "experts",
        "keep_routed_experts_in_plain_memory",
        (f"{_SRT}.mem_cache.pool_host.common.ALLOC_MEMORY_FUNCS",),
        "the buffer of routed experts by plain memory",
        "SGLang registers it with the CUDA driver",
        "registered memory",
    ),
    _patch(
        "adapters",
        "keep_adapters_in_plain_memory",
        (
            f"{_SRT}.lora.layers.torch",
            f"{_SRT}.lora.backend.torch_backend.torch",
            "torch.Tensor.pin_memory",
        ),
        "pinned memory of served adapters by plain memory",
        "torch pins nothing without an accelerator",
        "pinned memory",
    ),
    _patch(
        "sampling",
        "allow_seeded_sampling",
        (f"{_SRT}.batch_invariant_ops.enable_batch_invariant_mode",),
        "the refusal of deterministic inference with torch_native by acceptance",
        "seeds per request need it",
        "batch-invariant triton kernels",
    ),
    _patch(
        "sampling",
        "sample_in_one_pass",
        (
            f"{_SRT}.layers.sampler.multinomial_with_seed",
            f"{_SRT}.layers.sampler.sampling_from_probs_torch",
        ),
        "sampling, with seeds and without, by compiled code, if there is a C compiler",
        "20 and 36 ms a step for 32 requests and 50,000 tokens, now 0.7 and 1 ms; with seeds the"
        " tokens are the same",
        "torch and a triton kernel",
        switch="rollout.compiled=false",
    ),
    _patch(
        "drafts",
        "sample_drafts",
        tuple(
            f"{_SRT}.speculative.eagle_utils.{name}"
            for name in (
                *("_verify_uses_greedy", "tree_speculative_sampling_target_only"),
                *("top_k_renorm_prob", "top_p_renorm_prob"),
            )
        ),
        "the choice of the likeliest tokens, where engines speculate, by sampling",
        "SGLang's sampling kernels for drafts are for GPUs",
        "CUDA kernels that sample",
    ),
    _patch(
        "drafts",
        "draft_in_torch",
        tuple(
            f"{_SRT}.speculative.draft_utils.DraftBackendFactory.{name}"
            for name in ("create_decode_backend", "create_draft_extend_backend")
        ),
        "the refusal of torch_native's attention for a draft model by that attention",
        "SGLang's other attention for a CPU needs Intel AMX",
        "attention in CUDA kernels",
    ),
    _patch(
        "drafts",
        "share_without_cuda",
        (
            f"{_SRT}.speculative.eagle_worker_v2.EagleDraftWorker.init_lm_head",
            "torch.cuda.synchronize",
            "torch.get_device_module",
        ),
        "a wait for CUDA by none, and a CPU's module by CUDA's, while a draft model gets the"
        " target's embedding",
        "the wait raises an error without CUDA, and a CPU has no cache of memory to empty",
        "both",
    ),
    _patch(
        "native_forward",
        "run_in_compiled_code",
        (
            f"{_SRT}.model_executor.model_runner.ModelRunner.load_model",
            f"{_SRT}.models.llama.LlamaModel.forward",
            f"{_SRT}.layers.logits_processor.LogitsProcessor._compute_lm_head",
        ),
        "the forward pass and output layer of Llama, Qwen2, Qwen3 and Qwen3-MoE by compiled code,"
        " if there is a C compiler",
        "the small torch calls of a layer cost more than what they compute",
        "SGLang's layers",
        switch="rollout.compiled=false",
    ),
    _patch(
        "models",
        "normalize_projections",
        (
            f"{_SRT}.models.minimax_m2.rms_sumsq_serial",
            f"{_SRT}.models.minimax_m2.rms_apply_serial",
        ),
        "two triton kernels of MiniMax-M2, which normalize queries and keys, by torch;"
        " `import_models_when_asked` applies it with the model",
        "SGLang has no CPU path",
        "the triton kernels",
    ),
    _patch(
        "mamba2",
        "scan_in_torch",
        (
            *(
                f"{_SRT}.layers.attention.mamba.mamba.{name}"
                for name in (
                    *("causal_conv1d_fn_triton", "causal_conv1d_update_triton"),
                    *("mamba_chunk_scan_combined", "selective_state_update"),
                )
            ),
            f"{_SRT}.models.nemotron_h.NemotronHMoE._forward_core_normal",
        ),
        "the kernels of Mamba-2 layers and the product of Nemotron-H's router by torch;"
        " `import_models_when_asked` applies it with the model",
        "SGLang has no CPU path; torch's product of another dtype is for GPUs",
        "triton kernels",
    ),
    Patch(
        "import_standin:",
        ("sys.meta_path",),
        by="the import of submodules of stand-in packages by stand-ins",
        reason="SGLang imports many names of CUDA packages that it does not use on a CPU",
        on_gpu="the packages themselves",
        test=f"{_CHECKS}[check_any_name_can_be_imported_from_a_stand_in]",
    ),
)
