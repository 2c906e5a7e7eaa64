"""Lists NeMo-RL's options that a recipe does without, and why."""

from collections.abc import Mapping

from mcore_rl.tools.translate.translation import longest_prefix

ALWAYS = "it is how Megatron ranks always run here"
SLICES = "weights travel in slices: sync.bucket_mib"
ADAPTERS = "read with peft.enabled only"
CONFIG = "config.json in model.path says what the model is"
UNNEEDED: Mapping[str, str] = {
    **{f"{loop}.normalize_rewards": "adv_estimator has it" for loop in ("grpo", "ppo")},
    **{
        f"{loop}.{name}": reason
        for loop in ("grpo", "ppo")
        for name, reason in {
            "adv_estimator": "read by another estimator only",
            f"async_{loop}": f"read with async_{loop}.enabled only",
            "batch_multiplier": "read with use_dynamic_sampling only",
            "calculate_advantages_on_gpu": "advantages take no time",
            "dynamic_sampling_max_gen_batches": "read with use_dynamic_sampling only",
            "max_num_epochs": "max_num_steps ends the run",
            "reward_scaling": "read with reward_scaling.enabled only",
            "reward_shaping": "read with reward_shaping.enabled only",
            "skip_reference_policy_logprobs_calculation": (
                "there is a reference with algorithm.kl.coef only"
            ),
            "use_leave_one_out_baseline": "adv_estimator has it",
            "val_at_": "the policy is always evaluated before the first step",
            "val_batch_size": "held-out prompts are sampled at once",
        }.items()
    },
    "loss_fn.force_on_policy_ratio": "the ratio is 1 with train.mini_batches=1 and epochs=1",
    "loss_fn.truncated_importance_sampling": "read with use_importance_sampling_correction only",
    "checkpointing": "checkpoints have their own format, and all that a run continues from",
    "policy.tokenizer": "the tokenizer is that of model.path",
    "policy.hf_config_overrides": "it has nothing to override",
    "policy.generation_batch_size": "requests are sent at once: rollout.max_concurrency",
    "policy.logprob_batch_size": "micro-batches are those of training",
    "policy.train_micro_batch_size": "micro-batches are counted in tokens",
    "policy.offload_optimizer_for_logprob": "cluster.offload",
    "policy.activation_checkpointing_enabled": "train.recompute",
    "policy.refit_buffer_size_gb": SLICES,
    "policy.generation.refit_cfg": SLICES,
    "policy.dynamic_batching": "micro-batches are those of training, in tokens",
    "policy.sequence_packing": "sequences are always packed",
    "policy.make_sequence_length_divisible_by": "sequences are padded as the layout needs it",
    "policy.dtensor_cfg": "Megatron trains",
    "policy.quant_": "read with quant_cfg only",
    "policy.disable_modelopt_layer_spec": "read with quant_cfg only",
    "policy.generation.model_name": "NeMo-RL sets it by itself",
    "policy.generation._": "NeMo-RL sets it by itself",
    "policy.optimizer": "Megatron's optimizer: policy.megatron_cfg.optimizer",
    "policy.scheduler": "Megatron's schedule: policy.megatron_cfg.scheduler",
    "policy.draft": "read with draft.enabled only",
    "policy.router_replay": "experts to replay come with the samples",
    "policy.max_grad_norm": "policy.megatron_cfg.optimizer.clip_grad",
    "policy.megatron_cfg": ALWAYS,
    "policy.megatron_cfg.converter_type": "families of models are tables here (docs/models.md)",
    "policy.megatron_cfg.force_reconvert_from_hf": "weights are read from model.path",
    "policy.megatron_cfg.defer_fp32_logits": "log-probs are computed in chunks",
    "policy.megatron_cfg.linear_ce_fusion_chunk_size": "train.logprob_chunk",
    "policy.megatron_cfg.empty_unused_memory_level": "cluster.offload",
    "policy.megatron_cfg.clear_memory_caches_before_refit": "cluster.offload",
    "policy.megatron_cfg.recompute_": "read with activation_checkpointing only",
    "policy.megatron_cfg.moe_router_": CONFIG,
    "policy.megatron_cfg.mtp_": "read with mtp_num_layers only",
    "policy.megatron_cfg.peft": ADAPTERS,
    "policy.megatron_cfg.fp8_cfg": "read with fp8_cfg.enabled only",
    "policy.megatron_cfg.inference_": "SGLang generates",
    "policy.megatron_cfg.optimizer.min_lr": "a constant schedule has no end",
    "policy.megatron_cfg.optimizer.bf16": "model.dtype",
    "policy.megatron_cfg.optimizer.fp16": "model.dtype",
    "policy.megatron_cfg.optimizer.params_dtype": "main weights are float32",
    "policy.megatron_cfg.optimizer.sgd_momentum": "the optimizer is Adam",
    "policy.megatron_cfg.optimizer.optimizer_offload_fraction": (
        "read with optimizer_cpu_offload only"
    ),
    "policy.megatron_cfg.scheduler": "the weight decay is constant",
    "policy.megatron_cfg.scheduler.lr_decay_iters": "a constant schedule has no end",
    "policy.megatron_cfg.scheduler.lr_warmup_init": "a warm-up begins with 0",
    "policy.generation.backend": "SGLang samples",
    "policy.generation.port_range": "ports are found at start",
    "policy.generation.use_async_rollouts": "rollouts are always asynchronous requests",
    "policy.generation.mcore_generation_config": "SGLang samples",
    "policy.generation.vllm_cfg": "SGLang samples",
    "policy.generation.vllm_kwargs": "SGLang samples",
    "policy.generation.sglang_cfg": "the run chooses it for each engine",
    "policy.generation.sglang_cfg.max_running_requests": "rollout.max_concurrency",
    "policy.generation.real_quant": "read with quant_cfg only",
    "policy.generation.colocated": "read without colocated.enabled only",
    "data.max_input_seq_length": "data.max_prompt_len",
    "data.num_workers": "data.workers, for what is streamed",
    "data.add_": "the chat template is always applied, and decides",
    "data.default": "the columns have fixed names (docs/recipes.md)",
    "data.train.seed": "run.seed seeds all",
    "data.validation": "run.seed seeds all",
    "env": "a reward's own options are reward.kwargs, an environment's agents.options",
    "logger": "the run folder has logs and numbers; log.* chooses trackers",
    "cluster": "ports and places are found at start",
    "data_plane": "samples stay where they were drawn",
    "value": "it is as the policy's",
    "value_loss_fn": "there is no critic without PPO",
}
"""Prefixes of options' names, and what a user may want to know."""


def reason_of(name: str) -> str | None:
    """Return why an option is not needed, or None."""
    return longest_prefix(UNNEEDED, name)
