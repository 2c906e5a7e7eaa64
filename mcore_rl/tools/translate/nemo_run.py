"""Data, rewards and the run itself in NeMo-RL 0.7, as options of a recipe."""

from typing import Any

from mcore_rl.tools.translate.foreign import Decision, ForeignOptions, Found, RecipeLine
from mcore_rl.tools.translate.nemo_policy import loop_of
from mcore_rl.tools.translate.tables import differing, renamed, switched

NO_END = 100_000
"""From so many steps on, it is the epochs that end a run."""
REWARDS = {"math": "math", "math_multi_reward": "math", "code": "code"}
"""Environments, and the file under recipes/rewards/ that judges the same answers."""
SETS = {"train": "data.train", "validation": "eval.data"}
COLUMNS = "write the columns prompt, data_source, reward_model and extra_info (docs/recipes.md)"
WITHOUT_COUNTERPART: dict[str, tuple[Any, str]] = {
    "data.use_multiple_dataloader": (False, "data.sources mixes files by weight (docs/data.md)"),
    "data.num_prompts_per_dataloader": (None, "data.sources mixes files by weight"),
    "data.custom_dataloader": (None, "data.curriculum and data.sources choose prompts"),
    "data.dataset_name": (None, COLUMNS),
    "data.prompt_file": (None, COLUMNS),
    "data.default.prompt_file": (None, COLUMNS),
    "data.default.system_prompt_file": (None, COLUMNS),
    "checkpointing.checkpoint_must_save_by": (None, "a job that is told to end saves first"),
    "logger.swanlab_enabled": (False, "log.* has tensorboard, wandb_project and mlflow_uri"),
}


def translate_data(options: ForeignOptions) -> Found:
    """Yield the files of prompts; sets that have a name are left to the user."""
    for theirs, ours in SETS.items():
        group = f"data.{theirs}"
        several: Any = options.take(group, None)
        path = options.take(f"{group}.data_path", None)
        below = options.below(f"{group}.", but=("seed",))
        yield RecipeLine(ours, [path] if path else [], (f"{group}.data_path",))
        if several:
            advice = f"give their files as {ours}, or data.sources mixes them by weight"
            yield Decision(group, several, advice)
        for name, value in below.items():
            if name == "split_validation_size" and value:
                yield Decision(f"{group}.{name}", value, "set eval.data, a file of its own")
            elif name != "data_path":
                yield Decision(f"{group}.{name}", value, COLUMNS)
    yield from renamed(options, {"data.shuffle": ("data.shuffle", None)})
    yield from differing(options, WITHOUT_COUNTERPART)


def translate_reward(options: ForeignOptions) -> Found:
    name = options.take("data.default.env_name", "math")
    if name in REWARDS:
        path = f"recipes/rewards/{REWARDS[name]}.py"
        yield RecipeLine("reward.path", path, ("data.default.env_name",))
    else:
        advice = "set reward.path (docs/rewards.md), or agents.environment (docs/agents.md)"
        yield Decision("data.default.env_name", name, advice)
    group = f"{loop_of(options)}.reward_shaping"
    if options.take(f"{group}.enabled", False):
        for ours, theirs, default in (("buffer_len", "length", 128), ("penalty", "penalty", 1)):
            source = f"{group}.overlong_buffer_{theirs}"
            value = options.take(source, default)
            yield RecipeLine(f"reward.overlong_{ours}", value, (source, f"{group}.enabled"))
        bound = options.take(f"{group}.max_response_length", None)
        if bound is not None:
            advice = "the penalty here grows over the last tokens before rollout.max_response_len"
            yield Decision(f"{group}.max_response_length", bound, advice)


def translate_run(options: ForeignOptions) -> Found:
    """Yield steps, saves, evaluations, folder and trackers."""
    loop = loop_of(options)
    folder = options.take("checkpointing.checkpoint_dir", "results/grpo")
    yield RecipeLine("run.dir", folder, ("checkpointing.checkpoint_dir",))
    steps = options.take(f"{loop}.max_num_steps", 1_000_000)
    epochs = options.take(f"{loop}.max_num_epochs", 1)
    if steps < NO_END:
        yield RecipeLine("run.steps", steps, (f"{loop}.max_num_steps",))
    else:
        advice = "set run.steps: rows of data.train, times epochs, by rollout.prompts_per_step"
        yield Decision(f"{loop}.max_num_epochs, {loop}.max_num_steps", epochs, advice)
    saves = options.take("checkpointing.save_period", 10)
    if options.take("checkpointing.enabled", True):
        sources = ("checkpointing.save_period", "checkpointing.enabled")
        yield RecipeLine("checkpoint.every_steps", saves, sources)
        kept = options.take("checkpointing.keep_top_k", 3)
        yield RecipeLine("checkpoint.keep", kept, ("checkpointing.keep_top_k",))
        advice = "there the best checkpoints are kept, here the newest: see checkpoint.keep"
        metric = options.take("checkpointing.metric_name", None)
        yield Decision("checkpointing.metric_name", metric, advice)
    table: dict[str, tuple[str, Any]] = {
        f"{loop}.max_val_samples": ("eval.max_prompts", None),
        f"{loop}.seed": ("run.seed", 42),
    }
    yield from renamed(options, table)
    every = options.take(f"{loop}.val_period", 10)
    yield RecipeLine("eval.every_steps", max(every, 0), (f"{loop}.val_period",))
    yield from _trackers(options)


def _trackers(options: ForeignOptions) -> Found:
    names = ("logger.wandb_enabled", "logger.wandb.project")
    yield from switched(options, *names, "log.wandb_project", "grpo-dev")
    names = ("logger.mlflow_enabled", "logger.mlflow.tracking_uri")
    yield from switched(options, *names, "log.mlflow_uri", "http://localhost:5000")
    yield from renamed(options, {"logger.tensorboard_enabled": ("log.tensorboard", False)})
