"""Converts options of verl 0.9 (ppo_trainer.yaml, ppo_megatron_trainer.yaml) into a recipe.

Data, rewards and the run itself are converted here. The last table lists options that a recipe does
without, and why.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    Found,
    RecipeLine,
    Translation,
    account,
    list_differing,
    longest_prefix,
)
from mcore_rl.tools.translate.verl_algorithm import (
    translate_advantage,
    translate_correction,
    translate_critic,
    translate_distillation,
    translate_kl,
    translate_loss,
)
from mcore_rl.tools.translate.verl_modes import translate_mode, translate_samples
from mcore_rl.tools.translate.verl_shared import (
    ACTOR,
    home_of,
    is_fully_async,
    take_prompts,
    take_shared,
)
from mcore_rl.tools.translate.verl_training import (
    translate_engines,
    translate_layout,
    translate_model,
    translate_optimizer,
    translate_sampling,
    translate_step,
    translate_turns,
)

PRECISION_AWARE = "read with use_precision_aware_optimizer only"
UNNEEDED: Mapping[str, str] = {
    "actor_rollout_ref.actor._target_": "classes are not chosen by name",
    "actor_rollout_ref.actor.checkpoint": "a checkpoint has everything that a run continues from",
    "actor_rollout_ref.actor.clip_ratio": "verl reads clip_ratio_low and clip_ratio_high instead",
    "actor_rollout_ref.actor.calculate_entropy": "it is always measured",
    "actor_rollout_ref.actor.data_loader_seed": "run.seed seeds all",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "read with use_dynamic_bsz only",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "deprecated there",
    "actor_rollout_ref.actor.rollout_n": "rollout.samples_per_prompt",
    "actor_rollout_ref.actor.shuffle": "mini-batches are drawn anew in each epoch",
    "actor_rollout_ref.actor.use_fused_kernels": "log-probs are computed in chunks",
    "actor_rollout_ref.actor.use_remove_padding": "sequences are always packed",
    "actor_rollout_ref.actor.use_torch_compile": "Megatron's kernels are used",
    "actor_rollout_ref.actor.entropy_": "log-probs are computed in chunks: train.logprob_chunk",
    "actor_rollout_ref.actor.fsdp_config": "Megatron trains",
    "actor_rollout_ref.actor.qat": "Megatron trains",
    "actor_rollout_ref.actor.megatron": "it is how Megatron ranks always run here",
    "actor_rollout_ref.actor.optim": "it is how Megatron's optimizer always runs here",
    "actor_rollout_ref.actor.optim.muon_": "read with optimizer=muon only",
    "actor_rollout_ref.actor.optim.main_grads_dtype": PRECISION_AWARE,
    "actor_rollout_ref.actor.optim.exp_avg_": PRECISION_AWARE,
    "actor_rollout_ref.actor.megatron.max_seqlen_per_dp_cp_rank": (
        "read with dynamic_context_parallel only"
    ),
    "actor_rollout_ref.actor.megatron.qat": "read with qat.enable only",
    "actor_rollout_ref.actor.megatron.router_replay": "experts to replay come with the samples",
    "actor_rollout_ref.actor.pad_to_length": "sequences are always packed",
    "actor_rollout_ref.actor.router_replay": "experts to replay come with the samples",
    "actor_rollout_ref.actor.load_weight": "weights are always loaded",
    "actor_rollout_ref.actor.tau_": "read by sapo only",
    "actor_rollout_ref.actor.policy_loss": "read by another loss only",
    "actor_rollout_ref.actor.kl_loss_": "read with use_kl_loss only",
    "actor_rollout_ref.actor.use_prefix_grouper": "train.share_prefixes",
    "actor_rollout_ref.actor.calculate_sum_pi_squared": "measured where an advantage needs it",
    "actor_rollout_ref.actor.sum_pi_squared_checkpointing": "train.recompute",
    "actor_rollout_ref.actor.clip_ratio_low": "read by losses that clip only",
    "actor_rollout_ref.actor.clip_ratio_high": "read by losses that clip only",
    "actor_rollout_ref.actor.clip_ratio_c": "read by the vanilla loss only",
    "actor_rollout_ref.actor.loss_scale_factor": "read with seq-mean-token-sum-norm only",
    "actor_rollout_ref.ref": "the reference's layout and micro-batches are the policy's",
    "actor_rollout_ref.rollout.name": "SGLang samples",
    "actor_rollout_ref.rollout.mode": "rollouts are always asynchronous requests",
    "actor_rollout_ref.rollout.agent": "collectors and environments' workers are started by need",
    "actor_rollout_ref.rollout.calculate_log_probs": "engines always report log-probs",
    "actor_rollout_ref.rollout.checkpoint_engine": "weights travel in slices: sync.bucket_mib",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": "sync.bucket_mib",
    "actor_rollout_ref.rollout.disable_log_stats": "engines' logs are in the run folder",
    "actor_rollout_ref.rollout.do_sample": "sampling is rollout.temperature",
    "actor_rollout_ref.rollout.dtype": "model.dtype",
    "actor_rollout_ref.rollout.enable_chunked_prefill": "SGLang's default",
    "actor_rollout_ref.rollout.enable_prefix_caching": "SGLang's default",
    "actor_rollout_ref.rollout.enforce_eager": "rollout.sglang.disable_cuda_graph",
    "actor_rollout_ref.rollout.engine_kwargs": "these engines are not used",
    "actor_rollout_ref.rollout.free_cache_engine": "engines on trainers' GPUs always release it",
    "actor_rollout_ref.rollout.layer_name_map": "names come from a table per family",
    "actor_rollout_ref.rollout.load_format": "weights always come by sync",
    "actor_rollout_ref.rollout.log_prob_": "micro-batches are those of training",
    "actor_rollout_ref.rollout.logprobs_mode": "log-probs are those of sampling",
    "actor_rollout_ref.rollout.max_model_len": "it follows from the prompts and responses",
    "actor_rollout_ref.rollout.max_num_batched_tokens": "rollout.sglang.chunked_prefill_size",
    "actor_rollout_ref.rollout.multi_stage_wake_up": "weights and KV cache come back in turn",
    "actor_rollout_ref.rollout.n_gpus_per_node": "rollout.engines",
    "actor_rollout_ref.rollout.prometheus": "metrics.jsonl has the engines' numbers",
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_len",
    "actor_rollout_ref.rollout.response_length": "rollout.max_response_len",
    "actor_rollout_ref.rollout.scheduling_policy": "SGLang's default",
    "actor_rollout_ref.rollout.skip_": "tokens are never decoded and encoded again",
    "actor_rollout_ref.rollout.trace": "samples.jsonl has conversations and tokens",
    "actor_rollout_ref.rollout.val_kwargs": "evaluation is greedy unless it is told to sample",
    "actor_rollout_ref.rollout.mtp": "see the model's",
    "actor_rollout_ref.rollout._target_": "classes are not chosen by name",
    "actor_rollout_ref.rollout.cudagraph_capture_sizes": "rollout.sglang.cuda_graph_bs",
    "actor_rollout_ref.rollout.ignore_eos": "a response ends with its stop token",
    "actor_rollout_ref.rollout.seed": "run.seed seeds all",
    "actor_rollout_ref.rollout.disaggregation": "an engine prefills and decodes in one server",
    "actor_rollout_ref.rollout.multi_turn": "read with multi_turn.enable only",
    "actor_rollout_ref.rollout.quantization_config_file": "rollout.quantization",
    "actor_rollout_ref.rollout.qat": "rollout.quantization",
    "actor_rollout_ref.rollout.layered_summon": "weights travel in slices: sync.bucket_mib",
    "actor_rollout_ref.model.hf_config_path": "config.json lies in model.path",
    "actor_rollout_ref.model.override_config": "it has nothing to override",
    "actor_rollout_ref.model.exclude_modules": "read with a rank of adapters only",
    "actor_rollout_ref.model.mtp": "read with mtp.enable only",
    "actor_rollout_ref.model.lora": "read with a rank of adapters only",
    "actor_rollout_ref.model.lora_alpha": "read with a rank of adapters only",
    "actor_rollout_ref.model.target_modules": "read with a rank of adapters only",
    "actor_rollout_ref.model.use_": "packing and fused kernels are not chosen",
    "actor_rollout_ref.model.fused_kernel_options": "packing and fused kernels are not chosen",
    "actor_rollout_ref.model.enable_": "train.recompute and cluster.offload",
    "actor_rollout_ref.model.tiled_mlp": "train.recompute=mlp",
    "actor_rollout_ref.actor.optim.min_lr": "read with a schedule that falls only",
    "critic.optim.min_lr": "read with a schedule that falls only",
    "actor_rollout_ref.nccl_timeout": "run.call_timeout_s",
    "actor_rollout_ref.actor.veomni": "Megatron trains: parallel.* has the layout",
    "actor_rollout_ref.ref.veomni": "the reference is computed as the policy is",
    "critic": "without adv_estimator=gae there is none; else it is as the policy's",
    "data.tool_config_path": "read with multi_turn.enable only",
    "data.function_tool_path": "read with multi_turn.enable only",
    "data.gen_batch_size": "read with filter_groups.enable only",
    "data.validation_shuffle": "held-out prompts keep their order",
    "data.custom_cls.name": "read with custom_cls.path only",
    "data.sampler.class_name": "read with sampler.class_path only",
    "data.datagen.name": "read with datagen.path only",
    "custom_reward_function": "read with its path only",
    "reward.custom_reward_function": "read with its path only",
    "algorithm.rollout_correction": "read with rollout_is, rollout_rs or bypass_mode only",
    "algorithm.kl_": "read with use_kl_in_reward only",
    "algorithm.norm_adv_by_std_in_grpo": "read by grpo only",
    "trainer.resume_from_path": "read with resume_mode=resume_path only",
    "trainer.del_local_ckpt_after_load": "checkpoint.keep",
    "data.dataloader_num_workers": "data.workers, for what is streamed",
    "data.filter_overlong_prompts_workers": "rows are read in batches",
    "data.image_patch_size": "the processor in model.path knows",
    "data.return_": "prompts keep their messages and ids",
    "data.val_batch_size": "held-out prompts are sampled at once",
    "data.trust_remote_code": "model.trust_remote_code",
    "data.use_shm": "files are mapped",
    "trainer.balance_batch": "micro-batches are always balanced",
    "trainer.device": "found at start",
    "trainer.n_gpus_per_node": "rollout.engines and parallel.*",
    "trainer.nnodes": "rollout.engines and parallel.*",
    "trainer.log_val_generations": "samples.jsonl and the report have samples",
    "trainer.rollout_data_dir": "samples.jsonl has them",
    "trainer.validation_data_dir": "samples.jsonl has them",
    "trainer.total_epochs": "a number of steps ends the run",
    "trainer.critic_warmup": "read with adv_estimator=gae only",
    "trainer.ray_wait_register_center_timeout": "run.startup_timeout_s",
    "trainer.use_legacy_worker_impl": "there is one implementation",
    "trainer.use_v1": "there is one implementation",
    "trainer.v1.sync": "it has no options",
    "trainer.v1.colocate_async": "read with trainer_mode=colocate_async only",
    "trainer.v1.separate_async": "rollout.max_in_flight bounds what is sampled ahead",
    "trainer.v1.separate_async.parameter_sync_step": "weights are synced after each step",
    "trainer.v1.separate_async.hybrid_rollout": "read with enable_switch only",
    "trainer.v1.sampler": "read with an asynchronous trainer only",
    "trainer.v1.sampler.sync_refill_failed_groups": "failed requests are sent again",
    "trainer.max_critic_ckpt_to_keep": "a checkpoint has both parts",
    "trainer.esi_redundant_time": "a job that is told to end saves first (docs/launch.md)",
    "reward.num_workers": "the reward is computed where samples are: reward.workers",
    "reward.reward_manager": "the function is reward.path",
    "reward.reward_kwargs": "reward.kwargs",
    "reward.reward_model": "reward_model.*",
    "reward.sandbox_fusion": "sandbox.*, or the server's own options",
    "reward_model": "reward_model.*",
    "sandbox_fusion": "sandbox.*, or the server's own options",
    "algorithm.filter_groups": "groups of equal rewards are passed over",
    "algorithm.pf_ppo": "read with use_pf_ppo only",
    "algorithm.lam": "read with adv_estimator=gae only",
    "algorithm.gamma": "read with adv_estimator=gae and reinforce_plus_plus only",
    "algorithm._target_": "classes are not chosen by name",
    "distillation": "read with distillation.enabled; the teacher's engines are set by teacher.*",
    "global_profiler": "profile.*",
    "skip": "read with enable only",
    "ray_kwargs": "cluster.*",
    "transfer_queue": "samples stay where they were drawn",
    "async_training.dynamic_schedule_": "GPUs of the trainer are lent to no engines",
    "async_training.concurrent_samples_per_replica": "rollout.max_in_flight",
    "async_training.compute_prox_log_prob": "algorithm.correction.bypass",
    "async_training.checkpoint_engine": "weights travel in slices: sync.bucket_mib",
    "rollout.n": "rollout.samples_per_prompt",
}
"""Prefixes of options' names, and what a user may want to know."""
PARTS_ANYWHERE: Mapping[str, str] = {
    "_target_": "classes are not chosen by name",
    "profiler": "profile.*",
}
"""The same, for parts of names."""


def reason_of(name: str) -> str | None:
    """Return why an option is not needed, or None."""
    for part in name.split("."):
        if part in PARTS_ANYWHERE:
            return PARTS_ANYWHERE[part]
    return longest_prefix(UNNEEDED, name)


TRACKERS = {"tensorboard": "log.tensorboard", "console": "log.console"}
PROJECTS = ("wandb", "swanlab", "trackio", "clearml")
"""Trackers whose project is log.<name>_project."""
OVERLONG = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)
SANDBOXES = (
    "reward.sandbox_fusion.url",
    "sandbox_fusion.url",
    "reward_model.sandbox_fusion.url",
)
REWARD_MODELS = ("reward_model.enable", "reward.reward_model.enable")
FUNCTIONS = ("custom_reward_function", "reward.custom_reward_function")
WITHOUT_COUNTERPART: Mapping[str, tuple[Any, str]] = {
    "trainer.val_before_train": (True, "with eval.data the policy is evaluated before step 1"),
    "data.train_max_samples": (-1, "cut the file: all of its prompts are used"),
    "data.apply_chat_template_kwargs": ({}, "change the template in model.path"),
    "data.custom_cls.path": (None, "write its rows to a file (docs/data.md)"),
    "data.tokenizer": (None, "the tokenizer is that of model.path"),
    "trainer.val_only": (False, "`mcore-rl eval` evaluates model.path"),
    "trainer.default_hdfs_dir": (None, "checkpoints go to run.dir, which may be a mount"),
    "data.audio_key": ("audios", "prompts have images and frames of videos, and no audio"),
    "data.mm_processor_kwargs": ({}, "change the processor's options in model.path"),
    **{
        f"skip.{name}.enable": (False, "each step samples: no rollout is read from a folder")
        for name in ("rollout", "rollout_tq", "async_rollout")
    },
    "trainer.checkpoint_callback_class": (None, "nothing of one's own is called after a save"),
    "trainer.v1.sampler.custom_sampler.path": (None, "data.curriculum orders prompts"),
    "actor_rollout_ref.rollout.router_config_path": (
        None,
        "rollout.migration_gap and rollout.min_free_kv bound what an engine is given",
    ),
    "actor_rollout_ref.rollout.moe_load_balance_metrics_interval": (
        0,
        "the load of experts is measured in the trainer alone (docs/metrics.md)",
    ),
    "actor_rollout_ref.rollout.disaggregation.enabled": (
        False,
        "an engine prefills and decodes in one server",
    ),
    "data.sampler.class_path": (None, "data.curriculum orders prompts (docs/data.md)"),
    "data.datagen.path": (None, "write its rows to a file (docs/data.md)"),
}


COLUMNS = {
    "data.prompt_key": ("prompt", "prompt"),
    "data.image_key": ("images", "images"),
    "data.video_key": ("videos", "videos"),
    "data.reward_fn_key": ("data_source", "data_source"),
}
"""Options that name a column -> (name in data.columns, verl's default, which holds here, too)."""


def translate_data(options: ForeignOptions) -> Found:
    for theirs, (ours, default) in COLUMNS.items():
        name = options.take(theirs, default)
        if name != default:
            yield RecipeLine(f"data.columns.{ours}", name, (theirs,))
    for theirs, ours in (("data.train_files", "data.train"), ("data.val_files", "eval.data")):
        files = [home_of(file) for file in options.take_list(theirs)]
        yield RecipeLine(ours, files, (theirs,))
    longest = take_shared(options, "data.max_prompt_length")
    yield RecipeLine("data.max_prompt_len", longest, ("data.max_prompt_length",))
    cut = options.take("data.truncation", "error")
    dropped = options.take("data.filter_overlong_prompts", False)
    if dropped or cut == "error":
        value = "filter" if dropped else "error"
        yield RecipeLine(
            "data.overlong", value, ("data.filter_overlong_prompts", "data.truncation")
        )
    else:
        yield Decision("data.truncation", cut, "prompts are never cut: longer ones are dropped")
    if not options.take("data.shuffle", True):
        yield RecipeLine("data.shuffle", False, ("data.shuffle",))
    seed = options.take("data.seed", None)
    if seed is not None:
        yield RecipeLine("run.seed", seed, ("data.seed",))
    yield from list_differing(options, WITHOUT_COUNTERPART)
    most = options.take("data.val_max_samples", -1)
    if most > 0:
        yield RecipeLine("eval.max_prompts", most, ("data.val_max_samples",))


def translate_run(options: ForeignOptions) -> Found:
    """Yield steps, saves, evaluations, folder and trackers."""
    name = options.take("trainer.experiment_name", "gsm8k")
    folder = options.take("trainer.default_local_dir", f"runs/{name}")
    yield RecipeLine("run.dir", folder, ("trainer.default_local_dir", "trainer.experiment_name"))
    yield from _steps(options)
    saves = options.take("trainer.save_freq", -1)
    yield RecipeLine("checkpoint.every_steps", max(saves, 0), ("trainer.save_freq",))
    kept = options.take("trainer.max_actor_ckpt_to_keep", None)
    if kept is not None:
        yield RecipeLine("checkpoint.keep", kept, ("trainer.max_actor_ckpt_to_keep",))
    elif saves > 0:
        advice = "all checkpoints are kept there, here the newest: set checkpoint.keep"
        yield Decision("trainer.max_actor_ckpt_to_keep", None, advice)
    every = int(options.take("trainer.test_freq", -1))
    yield RecipeLine("eval.every_steps", max(every, 0), ("trainer.test_freq",))
    resume = options.take("trainer.resume_mode", "auto")
    if resume == "disable":
        yield RecipeLine("run.resume", False, ("trainer.resume_mode",))
    elif resume != "auto":
        path = options.take("trainer.resume_from_path", None)
        advice = "a run continues from its own folder: convert the checkpoint to HuggingFace format"
        names = "trainer.resume_mode, trainer.resume_from_path"
        yield Decision(names, path or resume, f"{advice} and set model.path")
    yield from _trackers(options)


def _steps(options: ForeignOptions) -> Found:
    total = options.take("trainer.total_training_steps", None)
    if total is not None:
        yield RecipeLine("run.steps", total, ("trainer.total_training_steps",))
        return
    if is_fully_async(options):
        yield from translate_samples(options)
        return
    epochs = options.take("trainer.total_epochs", 30)
    paths = [Path(home_of(file)) for file in options.take_list("data.train_files")]
    if paths and all(path.is_file() and path.suffix == ".parquet" for path in paths):
        rows = sum(pq.read_metadata(path).num_rows for path in paths)
        prompts, _ = take_prompts(options)
        sources = ("trainer.total_epochs", "data.train_files")
        yield RecipeLine("run.steps", max(epochs * (rows // prompts), 1), sources)
    else:
        yield RecipeLine("run.epochs", float(epochs), ("trainer.total_epochs",))


def _trackers(options: ForeignOptions) -> Found:
    loggers = options.take_list("trainer.logger", ["console", "wandb"])
    for logger, ours in TRACKERS.items():
        if logger not in loggers:
            yield RecipeLine(ours, False, ("trainer.logger",))
    project = options.take("trainer.project_name", "verl_examples")
    sources = ("trainer.project_name", "trainer.logger")
    for logger in PROJECTS:
        if logger in loggers:
            yield RecipeLine(f"log.{logger}_project", project, sources)
    for logger in set(loggers) - {*TRACKERS, *PROJECTS}:
        advice = "see docs/monitoring.md#trackers; all numbers are in metrics.jsonl"
        yield Decision("trainer.logger", logger, advice)


def translate_reward(options: ForeignOptions) -> Found:
    """Yield the function or the model that rewards; there, the data may choose a function."""
    groups = [group for group in FUNCTIONS if options.take(f"{group}.path", None) is not None]
    sandboxes = [name for name in SANDBOXES if options.take(name, None) is not None]
    models = [name for name in REWARD_MODELS if options.take(name, False)]
    if groups:
        group = groups[0]
        path = home_of(options.given[f"{group}.path"])
        yield RecipeLine("reward.path", path, (f"{group}.path",))
        function = options.take(f"{group}.name", "compute_score")
        yield RecipeLine("reward.name", function, (f"{group}.name",))
        for name, value in options.below(f"{group}.reward_kwargs.").items():
            yield RecipeLine(f"reward.kwargs.{name}", value, (f"{group}.reward_kwargs.{name}",))
    elif sandboxes:
        yield RecipeLine("reward.path", "recipes/rewards/code.py", (sandboxes[0],))
        yield RecipeLine("reward.kwargs.sandbox_url", options.given[sandboxes[0]], (sandboxes[0],))
    elif not models:
        advice = "there it is chosen by data_source: set reward.path, such as"
        advice += " recipes/rewards/gsm8k.py or math.py (docs/rewards.md)"
        yield Decision("custom_reward_function.path", None, advice)
    if models:
        names = ("reward_model.model.path", "reward.reward_model.model_path")
        given = [name for name in names if options.take(name, None) is not None]
        path = home_of(options.given[given[0]]) if given else ""
        yield RecipeLine("reward_model.path", path, tuple(given))
        advice = "set reward_model.tp and reward_model.engines, and reward.parts to weigh it"
        yield Decision(models[0], True, advice)
    yield from _overlong(options)


def _overlong(options: ForeignOptions) -> Found:
    for group in OVERLONG:
        if options.take(f"{group}.enable", False):
            for ours, theirs in (("buffer_len", "len"), ("penalty", "penalty_factor")):
                value = options.take(f"{group}.{theirs}", 1)
                yield RecipeLine(f"reward.overlong_{ours}", value, (f"{group}.{theirs}",))


def translate_verl(options: ForeignOptions) -> Translation:
    """Return the options of a recipe that does what verl does with `options`."""
    return account(options, _translate(options), reason_of)


def _translate(options: ForeignOptions) -> Found:
    yield from translate_run(options)
    yield from translate_model(options)
    yield from translate_layout(options)
    yield from translate_step(options)
    yield from translate_optimizer(options, f"{ACTOR}.optim", "train.optimizer", 1e-6)
    yield from translate_data(options)
    yield from translate_engines(options)
    yield from translate_sampling(options)
    yield from translate_mode(options)
    yield from translate_turns(options)
    yield from translate_advantage(options)
    yield from translate_loss(options)
    yield from translate_distillation(options)
    yield from translate_kl(options)
    yield from translate_correction(options)
    yield from translate_critic(options)
    yield from translate_reward(options)
