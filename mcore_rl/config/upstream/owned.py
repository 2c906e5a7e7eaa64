"""The fields of upstream classes that a recipe may not set, and what to do instead.

{parallel}, {optimizer} and {engine} stand for groups of options. The first two belong to the same
model; the third is rollout, judge, reward_model or teacher.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rules:
    """The fields of an upstream class that a recipe may not set, or only to some values.

    refused    field -> what to do instead, or why there is nothing to do
    prefixes   beginning of a field's name -> the same for all fields that begin so
    values     field -> (allowed values, why others are refused)
    """

    refused: Mapping[str, str]
    prefixes: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, tuple[tuple[object, ...], str]] = field(default_factory=dict)

    def refusal(self, name: str) -> str | None:
        """Return why the field is refused; None if a recipe may set it."""
        if name in self.refused:
            return self.refused[name]
        return next((why for start, why in self.prefixes.items() if name.startswith(start)), None)


def with_reason(reason: str, *names: str) -> dict[str, str]:
    """Return {name: reason} for all names."""
    return dict.fromkeys(names, reason)


_SHAPE = "the model's config.json decides it; change model.path"
_DTYPE = "set model.dtype"
_RANDOM = "tokens could not be scored twice alike; there is no option for it"
_DROPS = "it drops tokens, and every sampled token is trained on; there is no option for it"
_LOADED = "weights are loaded from model.path, or made by model.init=random"
_LENGTHS = "it needs micro-batches of one length, and packed sequences have many; leave it out"
_PLANNED = (
    "it needs a forward step that plans its layers, which packed sequences lack; leave it out"
)
_INFERENCE = "it is for inference, and engines generate here; see rollout.sglang"
_UNREAD = "nothing here reads it; leave it out"
_GROUPS = "its process groups are not made here; leave it out"
_BFLOAT16 = "weight sync and checkpoints read bfloat16 or float32 weights; leave it out"
_SHARDED_WEIGHTS = (
    "weight sync and checkpoints do not read weights that are sharded so; leave it out"
)
_STAGES = "set {parallel}.stage_layers"
_FSDP = "it belongs to Megatron FSDP, whose shards weight sync does not read; leave it out"
_GATHER = (
    "weight sync, checkpoints and log-probs read all weights right after a step, so they would be"
    " gathered twice; leave it out"
)
_CPU_ADAM = (
    "checkpoints, cluster.offload and `mcore-rl plan` do not read the copies that it keeps on the"
    " host; set {optimizer}.megatron.use_precision_aware_optimizer=true with exp_avg_dtype and"
    " exp_avg_sq_dtype=bfloat16, or use more ranks"
)
_SELECTED = (
    "the optimizer is Adam, Muon or Lion: megatron-core's distributed optimizer has no checkpoint"
    " of SGD, and gives SOAP and adaptive Muon whole matrices in one layout only; leave it out"
)
_FLOAT16 = "it scales losses for float16, and model.dtype is float32 or bfloat16; leave it out"

TRANSFORMER_RULES = Rules(
    refused={
        **with_reason(
            _SHAPE,
            *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups"),
            *("ffn_hidden_size", "kv_channels", "softmax_scale", "softmax_type"),
            *("layernorm_epsilon", "layernorm_zero_centered_gamma", "normalization"),
            *("add_bias_linear", "add_qkv_bias", "gated_linear_unit", "activation_func"),
            *("glu_linear_offset", "activation_func_clamp_value", "rotary_interleaved"),
            *("window_size", "window_attn_skip_freq", "qk_layernorm", "qk_l2_norm"),
            *("attention_output_gate", "multi_latent_attention", "no_rope_freq"),
            *("experimental_attention_variant", "dsa_indexer_n_heads", "dsa_indexer_head_dim"),
            "dsa_indexer_topk",
            *("linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim"),
            *("linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
            *("apply_residual_connection_post_layernorm", "num_moe_experts", "moe_latent_size"),
            *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_layer_freq"),
            *("moe_ffn_hidden_size", "moe_router_topk", "moe_router_topk_limited_devices"),
            *("moe_router_num_groups", "moe_router_group_topk", "moe_router_pre_softmax"),
            *("moe_router_topk_scaling_factor", "moe_router_score_function"),
            *("moe_router_enable_expert_bias", "moe_apply_probs_on_input", "mtp_standalone"),
            *("is_hybrid_model", "mamba_state_dim"),
            *("mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "mrope_section"),
            *("use_mamba_mem_eff_path", "q_lora_rank", "kv_lora_rank", "qk_head_dim"),
            *("qk_pos_emb_head_dim", "v_head_dim", "rope_type", "rotary_base", "rotary_percent"),
            *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast"),
            *("beta_slow", "mscale", "mscale_all_dim", "heterogeneous_block_specs"),
            *("hetereogenous_dist_checkpoint", "apply_query_key_layer_scaling"),
            *("mtp_use_repeated_layer", "mtp_hybrid_override_pattern", "dsa_indexer_topk_freq"),
            *("dsa_indexer_skip_topk_offset", "dsa_indexer_rope_interleaved"),
            *("dsa_indexer_rotate_activation", "dsa_indexer_scoring_relu"),
            *("dsa_indexer_k_norm_epsilon", "dsa_indexer_k_norm_fp32", "use_mup", "mup_width_mult"),
            *("mup_base_hidden_size", "mup_embedding_mult", "mup_output_mult"),
            *("mup_base_head_dim", "mup_attn_scale_power"),
        ),
        **with_reason(
            _LOADED,
            *("init_method_std", "embedding_init_method_std", "perform_initialization"),
            *("use_cpu_initialization", "init_model_with_meta_device"),
        ),
        **with_reason(
            _DTYPE,
            *("fp16", "bf16", "params_dtype", "pipeline_dtype", "enable_autocast"),
            "autocast_dtype",
        ),
        **with_reason("set {parallel}.tp", "tensor_model_parallel_size", "sequence_parallel"),
        **with_reason(
            _SHARDED_WEIGHTS,
            *("tensor_parallel_num_weight_shards", "gtp_weight_remat_size"),
            *("expert_tensor_parallel_num_weight_shards", "expert_gtp_weight_remat_size"),
        ),
        **with_reason("set {parallel}.pp", "pipeline_model_parallel_size"),
        **with_reason(
            "set {parallel}.vpp",
            *("virtual_pipeline_model_parallel_size", "overlap_p2p_comm", "batch_p2p_comm"),
        ),
        **with_reason("set {parallel}.cp", "context_parallel_size"),
        **with_reason("set {parallel}.ep", "expert_model_parallel_size"),
        **with_reason("set {parallel}.etp", "expert_tensor_parallel_size"),
        **with_reason(
            _STAGES,
            *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
            *("pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split"),
            "account_for_loss_in_pipeline_split",
        ),
        **with_reason(
            _GROUPS,
            *("hierarchical_context_parallel_sizes", "hybrid_context_parallel"),
            *("max_seqlen_per_dp_cp_rank", "use_ring_exchange_p2p"),
            "pipeline_model_parallel_comm_backend",
        ),
        **with_reason("set train.recompute", "recompute_granularity", "recompute_modules"),
        **with_reason(
            "set train.recompute=moe",
            *("moe_layer_recompute", "num_microbatches_with_partial_activation_checkpoints"),
        ),
        **with_reason(_RANDOM, "hidden_dropout", "attention_dropout", "moe_input_jitter_eps"),
        **with_reason(
            "experts would be drawn at random; there is no option for it",
            *("moe_router_force_load_balancing", "moe_router_force_biased"),
        ),
        **with_reason(
            _DROPS,
            *("moe_token_dropping", "moe_expert_capacity_factor", "moe_token_drop_policy"),
            *("moe_pad_expert_input_to_capacity", "moe_expert_rank_capacity_factor"),
        ),
        **with_reason("set train.router_replay", "moe_enable_routing_replay"),
        **with_reason(
            "set train.indexer_loss", "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"
        ),
        **with_reason(
            "a fused router neither replays experts nor reports its own, which train.router_replay"
            " and drift.routed_experts need; leave it out",
            "moe_router_fusion",
        ),
        **with_reason(
            "it adds experts to the router's choice, which train.router_replay and"
            " drift.routed_experts compare; Transformer Engine's grouped layers pad by themselves",
            *("moe_router_padding_for_quantization", "moe_router_padding_for_fp8"),
        ),
        **with_reason(
            "set train.router_aux_loss_coef and train.router_sequence_aux_loss_coef",
            *("moe_router_load_balancing_type", "moe_aux_loss_coeff"),
            "moe_router_quantile_balancing_ema",
        ),
        **with_reason("set train.router_bias_rate", "moe_router_bias_update_rate"),
        **with_reason(
            "the mapping of weights knows the experts of grouped GEMM, which is always on, with a"
            " parameter for each expert and gates before linear units; leave it out",
            *("moe_grouped_gemm", "moe_single_grouped_weight", "moe_single_grouped_bias"),
            *("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"),
            *("use_grouped_gemm_for_shared_expert", "use_grouped_gemm_for_dense_mlp"),
            *("use_transformer_engine_op_fuser", "mla_down_proj_fusion"),
        ),
        **with_reason("set moe_flex_dispatcher_backend=deepep", "moe_enable_deepep"),
        **with_reason(
            "losses are always summed over tokens, for sequences of any length",
            *("calculate_per_token_loss", "variable_seq_lengths"),
        ),
        **with_reason(_BFLOAT16, "fp8_param", "fp4_param", "cpu_offloading_weights"),
        **with_reason(
            _LENGTHS,
            *("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl", "cuda_graph_scope"),
            *("cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph"),
            *("cuda_graph_modules", "delay_offload_until_cuda_graph"),
            *("cuda_graph_warmup_steps", "tp_comm_overlap", "tp_comm_bulk_wgrad"),
            *("tp_comm_bulk_dgrad", "tp_comm_overlap_ag", "tp_comm_overlap_rs"),
            *("tp_comm_overlap_rs_dgrad", "tp_comm_split_ag", "tp_comm_atomic_ag"),
            *("tp_comm_split_rs", "tp_comm_atomic_rs", "tp_comm_overlap_disable_qkv"),
            *("tp_comm_overlap_disable_fc1", "tp_comm_bootstrap_backend"),
        ),
        **with_reason(
            _PLANNED,
            *("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
            *("ep_overlap_early_attn_memory_release", "defer_embedding_wgrad_compute"),
            *("wgrad_deferral_limit", "overlap_p2p_comm_warmup_flush"),
            "high_priority_a2a_comm_stream",
        ),
        **with_reason(
            _UNREAD,
            *("cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "moe_per_layer_logging"),
            *("qk_clip", "qk_clip_alpha", "qk_clip_threshold", "log_max_attention_logit"),
            *("test_mode", "barrier_with_L1_time", "mamba_training_ssm_states_dtype"),
        ),
        **with_reason(
            "layers are Transformer Engine's; there is no option for it",
            *("transformer_impl", "use_kitchen", "use_kitchen_attention"),
            "kitchen_attention_backend",
        ),
        **with_reason(
            _INFERENCE,
            *("flash_decode", "use_inference_optimized_layers", "inference_rng_tracker"),
            *("inference_fuse_tp_communication", "inference_sampling_seed", "symmetric_ar_type"),
            *("mlp_chunks_for_prefill", "cache_mla_latents", "inference_cuda_graph_scope"),
            *("inference_disable_triton_nvls_kernels", "inference_grouped_gemm_backend"),
            *("inference_moe_disable_fused_quant_kernels", "nccl_all_reduce_for_prefill"),
            *("inference_moe_token_dispatcher_type", "moe_pad_experts_for_cuda_graph_inference"),
        ),
        **with_reason(
            "set train.mtp_loss",
            *("mtp_num_layers", "mtp_loss_scaling_factor", "mtp_detach_heads"),
        ),
        **with_reason(_FSDP, "overlap_dispatch_backward_with_experts_wgrad"),
    },
    prefixes=with_reason(
        "it needs moe_expert_rank_capacity_factor, which drops tokens; leave it out",
        "moe_paged_stash",
    ),
    values={
        "moe_token_dispatcher_type": (
            ("alltoall", "flex"),
            "allgather does not take sequences of different lengths",
        ),
    },
)

OPTIMIZER_RULES = Rules(
    refused={
        **with_reason("set {optimizer}.lr", "lr", "decoupled_lr"),
        **with_reason("set {optimizer}.min_lr", "min_lr", "decoupled_min_lr"),
        **with_reason("set {optimizer}.weight_decay", "weight_decay"),
        **with_reason("set {optimizer}.beta1", "adam_beta1"),
        **with_reason("set {optimizer}.beta2", "adam_beta2"),
        **with_reason("set {optimizer}.eps", "adam_eps"),
        **with_reason("set {optimizer}.clip_grad", "clip_grad"),
        **with_reason(_DTYPE, "fp16", "bf16", "params_dtype"),
        **with_reason(
            _FLOAT16,
            *("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window"),
            "hysteresis",
        ),
        **with_reason("set {optimizer}.beta1 and {optimizer}.name=lion", "lion_beta1"),
        **with_reason("set {optimizer}.beta2 and {optimizer}.name=lion", "lion_beta2"),
        **with_reason(
            _SELECTED,
            *("sgd_momentum", "soap_precondition_frequency", "soap_shampoo_beta"),
            *("soap_use_kl_shampoo", "adaptive_muon_beta2"),
            *("adaptive_muon_eps", "adaptive_muon_moment2_method"),
        ),
        **with_reason("set {optimizer}.name", "optimizer"),
        **with_reason(
            "embeddings, norms and the like are Adam's; leave it out", "muon_scalar_optimizer"
        ),
        **with_reason(
            "its checkpoints belong to one layout; {optimizer}.name=muon divides matrices over"
            " data-parallel ranks without it",
            "use_layer_wise_distributed_optimizer",
        ),
        **with_reason("it is always on", "use_distributed_optimizer"),
        **with_reason(_GATHER, "overlap_param_gather", "overlap_param_gather_with_optimizer_step"),
        **with_reason(
            _CPU_ADAM,
            *("optimizer_cpu_offload", "optimizer_offload_fraction", "pin_cpu_grads"),
            *("use_torch_optimizer_for_cpu_offload", "overlap_cpu_optimizer_d2h_h2d"),
            "pin_cpu_params",
        ),
        **with_reason(
            "checkpoints hold whole float32 weights, not what bfloat16 leaves out; leave it out",
            *("store_param_remainders", "main_params_dtype"),
        ),
        **with_reason(_BFLOAT16, "fp8_recipe", "reuse_grad_buf_for_mxfp8_param_ag"),
        **with_reason(
            "Adam's step is taken in parts, which a graph cannot replay; leave it out",
            "optimizer_cuda_graph",
        ),
        **with_reason(_UNREAD, "log_num_zeros_in_grad", "barrier_with_L1_time"),
    },
    values={
        **dict.fromkeys(
            ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype"),
            (("float32", "bfloat16"), "checkpoints do not read scaled moments"),
        ),
        "muon_tp_mode": (
            ("duplicated", "distributed"),
            "with blockwise a step would depend on the model's tp",
        ),
        "muon_coefficient_type": (
            ("simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"),
            "the package emerging-optimizers has no others",
        ),
        "muon_scale_mode": (
            ("spectral", "shape_scaling", "unit_rms_norm"),
            "the package emerging-optimizers has no others",
        ),
        "muon_fp32_matmul_prec": (
            ("highest", "high", "medium"),
            "these are torch's precisions of float32 products",
        ),
    },
)

DDP_RULES = Rules(
    refused={
        **with_reason("it is always on", "use_distributed_optimizer"),
        **with_reason(_GATHER, "overlap_param_gather", "align_param_gather"),
        **with_reason(_GROUPS, "num_distributed_optimizer_instances"),
        **with_reason(
            _BFLOAT16,
            *("fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"),
        ),
        **with_reason(
            _FSDP,
            *("use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy"),
            *("outer_dp_sharding_strategy", "fsdp_double_buffer", "fsdp_manual_registration"),
            *("keep_fp8_transpose_cache", "gradient_reduce_div_fusion"),
            *("suggested_communication_unit_size", "fsdp_all_gather_in_start_param_sync"),
            "fsdp_db_use_persist_buf_on_alloc_fail",
        ),
        **with_reason(
            "cluster.offload frees and resizes the buffers that it registers; leave it out",
            *("nccl_ub", "disable_symmetric_registration"),
        ),
        **with_reason(_PLANNED, "delay_wgrad_compute"),
        **with_reason(
            "gradients are summed over ranks and divided by the step's tokens; leave it out",
            "average_in_collective",
        ),
    },
    prefixes={"megatron_fsdp_": _FSDP},
)

READ_WITH_FULL = ("recompute_method", "recompute_num_layers")
"""Fields of TransformerConfig that megatron-core reads with train.recompute=full only."""


_OWN = "the run chooses it for each engine; leave it out"
_CLIENT = "the run's own client talks to the engines over HTTP; leave it out"
_PLACES = (
    "weight sync sends each weight to the rank that holds it by {engine}.tp, ep, pp and"
    " attention_dp; leave it out"
)
_MEMORY = "weight sync writes weights in GPU memory; leave it out"
_STALE = (
    "what it keeps outlives a weight sync, so samples would mix old and new weights; leave it out"
)
_OTHER_WEIGHTS = (
    "weight sync sends the policy's weights as config.json describes them; leave it out"
)
_ONE_SERVER = "an engine prefills and decodes in one server; leave it out"
_SAMPLING = "each request says how it is sampled; set rollout.temperature, top_p or top_k"
_DRAFT_SYNC = (
    "the draft's weights would stay those of the start while the policy learns;"
    " set rollout.speculate=ngram, which has no weights"
)
_OTHER_TOKENS = "tokens would be drawn with other probabilities than the policy's; leave it out"

_COMMON = {
    **with_reason("set {engine}.path", "model_path"),
    **with_reason("set {engine}.tp", "tp_size"),
    **with_reason("set {engine}.ep", "ep_size"),
    **with_reason("set {engine}.pp", "pp_size"),
    **with_reason("set {engine}.dtype", "dtype"),
    **with_reason("set {engine}.kv_cache_len", "max_total_tokens"),
    **with_reason("set {engine}.max_concurrency", "max_running_requests"),
    **with_reason("set {engine}.colocated", "enable_memory_saver", "enable_weights_cpu_backup"),
    **with_reason(
        _OWN,
        *("host", "port", "device", "base_gpu_id", "gpu_id_step", "nnodes", "node_rank"),
        *("dist_init_addr", "nccl_port", "gated_launch_port", "use_ray", "is_embedding"),
        *("skip_tokenizer_init", "skip_server_warmup", "delete_ckpt_after_loading"),
    ),
    **with_reason(
        _CLIENT,
        *("api_key", "admin_api_key", "grpc_mode", "smg_grpc_mode", "grpc_port"),
        *("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_keyfile_password"),
        *("enable_ssl_refresh", "enable_http2", "enable_http_worker_reuseport"),
        *("fastapi_root_path", "sidecar", "sidecar_args", "smg_http_sidecar_port"),
    ),
    **with_reason(
        "requests could then bring pickled code, which SGLang runs; leave it out",
        "enable_custom_logit_processor",
    ),
    **with_reason(_ONE_SERVER, "encoder_only", "language_only", "enable_pdmux"),
}
_COMMON_PREFIXES = with_reason(_ONE_SERVER, "disaggregation_", "decoupled_spec_", "dllm_")

SERVED_RULES = Rules(refused=_COMMON, prefixes=_COMMON_PREFIXES)
"""For models that are served beside the policy: their weights never change."""

ROLLOUT_RULES = Rules(
    refused={
        **_COMMON,
        **with_reason("set model.path", "model_path"),
        **with_reason("set model.dtype", "dtype"),
        **with_reason("set cluster.colocated", "enable_memory_saver", "enable_weights_cpu_backup"),
        **with_reason("set rollout.attention_dp", "attn_dp_size", "dp_size", "enable_dp_attention"),
        **with_reason("set run.seed", "random_seed"),
        **with_reason("set model.trust_remote_code", "trust_remote_code"),
        **with_reason("set model.init", "load_format"),
        **with_reason("set rollout.quantization", "quantization"),
        **with_reason(
            "set rollout.stream_every", "stream_interval", "incremental_streaming_output"
        ),
        **with_reason(
            "set rollout.deterministic",
            *("enable_deterministic_inference", "rl_on_policy_target"),
        ),
        **with_reason("set drift.routed_experts", "enable_return_routed_experts"),
        **with_reason("set drift.indexer_topk", "enable_return_indexer_topk"),
        **with_reason(
            "a step changes it when new weights are in place; leave it out",
            *("weight_version", "custom_weight_loader"),
        ),
        **with_reason(
            _OTHER_WEIGHTS,
            *("json_model_override_args", "model_impl", "quantization_param_path"),
            *("modelopt_quant", "quantize_and_serve", "rl_quant_profile"),
            *("checkpoint_engine_wait_weights_before_ready", "enable_lora", "lora_paths"),
            *("enforce_shared_experts_fusion", "disable_shared_experts_fusion"),
            "enable_w4a4_mxfp4_megamoe",
        ),
        **with_reason(
            _PLACES,
            *("dcp_size", "attn_cp_size", "moe_dp_size", "dwdp_size", "enable_prefill_cp"),
            *("ep_num_redundant_experts", "enable_eplb", "init_expert_location"),
            *("ep_dispatch_algorithm", "elastic_ep_backend", "enable_elastic_expert_backup"),
            *("ep_join_mode", "ep_join_rank_offset", "elastic_ep_initial_size", "max_ep_size"),
            *("shared_experts_tp_size", "enable_shared_experts_attn_tp", "enable_waterfill"),
            *("enable_dense_mlp_attn_tp", "enable_kv_cache_sharding", "enable_cp_tp_group_sharing"),
        ),
        **with_reason(
            _MEMORY,
            *("cpu_offload_gb", "offload_group_size", "offload_num_in_group", "offload_mode"),
            *("offload_prefetch_step", "ple_offload_embedding", "ple_offload_backend"),
            *("ple_offload_dir", "enable_paged_experts", "paged_experts_num_resident"),
            *("weight_cache_mode", "weight_cache_socket", "weight_cache_timeout"),
        ),
        **with_reason(
            _STALE,
            *("hicache_storage_backend", "hicache_storage_backend_extra_config"),
            *("hicache_storage_prefetch_policy", "enable_lmcache", "lmcache_config_file"),
            *("enable_flexkv", "flexkv_config_file", "enable_unified_cache_external_linker"),
            *("unified_cache_external_linker_backend", "unified_cache_external_linker_config"),
            *("radix_cache_backend", "enable_response_store", "enable_session_radix_cache"),
        ),
        **with_reason(_SAMPLING, "sampling_defaults", "preferred_sampling_params"),
        **with_reason("set rollout.speculate", "speculative_algorithm"),
        **with_reason(
            "set rollout.speculate_tokens",
            *("speculative_num_draft_tokens", "speculative_num_steps", "speculative_eagle_topk"),
        ),
        **with_reason(
            "set rollout.speculate_when",
            *("speculative_adaptive", "speculative_adaptive_config"),
        ),
        **with_reason(
            _OTHER_TOKENS,
            *("speculative_accept_threshold_single", "speculative_accept_threshold_acc"),
        ),
        **with_reason(_DRAFT_SYNC, "speculative_draft_model_path", "uno_lora_path"),
    },
    prefixes={
        **_COMMON_PREFIXES,
        **with_reason(_MEMORY, "kt_"),
        **with_reason(_OTHER_WEIGHTS, "modelopt_", "modelexpress_", "lora_", "remote_instance_"),
    },
    values={
        "moe_a2a_backend": (
            ("none", "deepep"),
            "how the others place shared experts is not recorded, and weight sync needs it",
        ),
        "moe_dense_tp_size": ((1,), "SGLang knows only 1"),
    },
)
