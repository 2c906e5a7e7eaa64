"""The fields of SGLang's ServerArgs that a recipe may not set, and what to do instead.

{engine} stands for the group of options of the engines: rollout, judge, reward_model or teacher.
"""

from mcore_rl.config.upstream.rules import Rules, with_reason

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
    " set speculative_algorithm=NGRAM, which has no weights"
)

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
            "set rollout.deterministic",
            *("enable_deterministic_inference", "rl_on_policy_target"),
        ),
        **with_reason("set drift.routed_experts", "enable_return_routed_experts"),
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
        "speculative_algorithm": (
            ("NGRAM",),
            "the draft's weights would stay those of the start while the policy learns",
        ),
    },
)
