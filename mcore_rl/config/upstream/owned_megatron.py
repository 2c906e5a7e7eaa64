"""The fields of megatron-core's options that a recipe may not set, and what to do instead.

{parallel} and {optimizer} stand for the groups of options that belong to the same model.
"""

from mcore_rl.config.upstream.rules import Rules, with_reason

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
_ADAM = "the optimizer is Adam; leave it out"
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
            *("dsa_indexer_topk", "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss"),
            *("linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim"),
            *("linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
            *("apply_residual_connection_post_layernorm", "num_moe_experts", "moe_latent_size"),
            *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_layer_freq"),
            *("moe_ffn_hidden_size", "moe_router_topk", "moe_router_topk_limited_devices"),
            *("moe_router_num_groups", "moe_router_group_topk", "moe_router_pre_softmax"),
            *("moe_router_topk_scaling_factor", "moe_router_score_function"),
            *("moe_router_enable_expert_bias", "moe_apply_probs_on_input", "mtp_num_layers"),
            *("mtp_loss_scaling_factor", "mtp_standalone", "is_hybrid_model", "mamba_state_dim"),
            *("mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "mrope_section"),
            *("use_mamba_mem_eff_path", "q_lora_rank", "kv_lora_rank", "qk_head_dim"),
            *("qk_pos_emb_head_dim", "v_head_dim", "rope_type", "rotary_base", "rotary_percent"),
            *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast"),
            *("beta_slow", "mscale", "mscale_all_dim", "heterogeneous_block_specs"),
            *("hetereogenous_dist_checkpoint", "apply_query_key_layer_scaling"),
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
        **with_reason("set {parallel}.pp", "pipeline_model_parallel_size"),
        **with_reason(
            "set {parallel}.vpp",
            *("virtual_pipeline_model_parallel_size", "overlap_p2p_comm", "batch_p2p_comm"),
        ),
        **with_reason("set {parallel}.cp", "context_parallel_size"),
        **with_reason("set {parallel}.ep", "expert_model_parallel_size"),
        **with_reason("set {parallel}.etp", "expert_tensor_parallel_size", "moe_extended_tp"),
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
            "moe_router_force_load_balancing",
        ),
        **with_reason(
            _DROPS,
            *("moe_token_dropping", "moe_expert_capacity_factor", "moe_token_drop_policy"),
            "moe_pad_expert_input_to_capacity",
        ),
        **with_reason("set train.router_replay", "moe_enable_routing_replay"),
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
        ),
        **with_reason("set train.router_bias_rate", "moe_router_bias_update_rate"),
        **with_reason(
            "the mapping of weights knows the experts of grouped GEMM, which is always on",
            *("moe_grouped_gemm", "moe_use_legacy_grouped_gemm"),
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
        ),
        **with_reason(
            _UNREAD,
            *("cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "moe_per_layer_logging"),
            *("qk_clip", "qk_clip_alpha", "qk_clip_threshold", "log_max_attention_logit"),
            *("test_mode", "async_tensor_model_parallel_allreduce", "barrier_with_L1_time"),
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
            *("mlp_chunks_for_prefill", "cache_mla_latents"),
        ),
    },
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
        **with_reason(
            _ADAM,
            *("optimizer", "sgd_momentum", "muon_momentum", "muon_split_qkv"),
            *("muon_use_nesterov", "muon_scale_mode", "muon_fp32_matmul_prec", "muon_num_ns_steps"),
            *("muon_tp_mode", "muon_extra_scale_factor"),
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
        **with_reason(_UNREAD, "log_num_zeros_in_grad", "barrier_with_L1_time"),
    },
    values=dict.fromkeys(
        ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype"),
        (("float32", "bfloat16"), "checkpoints do not read scaled moments"),
    ),
)

DDP_RULES = Rules(
    refused={
        **with_reason("it is always on", "use_distributed_optimizer"),
        **with_reason(_GATHER, "overlap_param_gather", "align_param_gather"),
        **with_reason(_GROUPS, "num_distributed_optimizer_instances"),
        **with_reason(_BFLOAT16, "fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"),
        **with_reason(
            _FSDP,
            *("use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy"),
            *("outer_dp_sharding_strategy", "fsdp_double_buffer", "fsdp_manual_registration"),
            *("preserve_fp32_weights", "keep_fp8_transpose_cache", "gradient_reduce_div_fusion"),
            "suggested_communication_unit_size",
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
    }
)

READ_WITH_FULL = ("recompute_method", "recompute_num_layers")
"""Fields of TransformerConfig that megatron-core reads with train.recompute=full only."""
