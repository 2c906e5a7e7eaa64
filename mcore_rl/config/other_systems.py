"""Names that other systems have for options of a recipe, for the message about an unknown key."""

from collections.abc import Mapping

LAST_PARTS: Mapping[str, str] = {
    "adv_estimator": "algorithm.advantage",
    "advantage_estimator": "algorithm.advantage",
    "loss_mode": "algorithm.loss",
    "loss_agg_mode": "algorithm.aggregation",
    "clip_ratio_low": "algorithm.clip_low",
    "eps_clip": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "eps_clip_high": "algorithm.clip_high",
    "clip_ratio_c": "algorithm.dual_clip",
    "entropy_coeff": "algorithm.entropy_coef",
    "use_kl_loss": "algorithm.kl.coef",
    "kl_loss_coef": "algorithm.kl.coef",
    "kl_coef": "algorithm.kl.coef",
    "kl_loss_type": "algorithm.kl.estimator",
    "use_kl_in_reward": "algorithm.kl.in_reward",
    "lam": "algorithm.gae_lambda",
    "n": "rollout.samples_per_prompt",
    "n_samples_per_prompt": "rollout.samples_per_prompt",
    "num_generations": "rollout.samples_per_prompt",
    "num_generations_per_prompt": "rollout.samples_per_prompt",
    "train_batch_size": "rollout.prompts_per_step",
    "rollout_batch_size": "rollout.prompts_per_step",
    "num_prompts_per_step": "rollout.prompts_per_step",
    "max_response_length": "rollout.max_response_len",
    "rollout_max_response_len": "rollout.max_response_len",
    "max_new_tokens": "rollout.max_response_len",
    "max_prompt_length": "data.max_prompt_len",
    "train_files": "data.train",
    "val_files": "eval.data",
    "ppo_mini_batch_size": "train.mini_batches",
    "global_batch_size": "train.mini_batches",
    "ppo_epochs": "train.epochs",
    "ppo_max_token_len_per_gpu": "train.max_tokens_per_microbatch",
    "max_tokens_per_gpu": "train.max_tokens_per_microbatch",
    "tensor_model_parallel_size": "parallel.tp",
    "pipeline_model_parallel_size": "parallel.pp",
    "context_parallel_size": "parallel.cp",
    "expert_model_parallel_size": "parallel.ep",
    "expert_tensor_parallel_size": "parallel.etp",
    "total_epochs": "run.epochs",
    "total_training_steps": "run.steps",
    "num_rollout": "run.steps",
    "max_num_steps": "run.steps",
    "test_freq": "eval.every_steps",
    "save_freq": "checkpoint.every_steps",
    "save_interval": "checkpoint.every_steps",
    "default_local_dir": "run.dir",
}
"""The last part of a name in verl, slime, TRL or NeMo-RL -> the option."""


def find_option(name: str) -> str | None:
    """Return the option for which another system has this name, dashes or not, or None."""
    return LAST_PARTS.get(name.rpartition(".")[2].lstrip("-").replace("-", "_"))
