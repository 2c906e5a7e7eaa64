"""Makes a recipe of verl's options (0.7: ppo_trainer.yaml and ppo_megatron_trainer.yaml).

Data, rewards and the run itself in verl 0.7, as options of a recipe.
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
    differing,
)
from mcore_rl.tools.translate.verl_algorithm import (
    translate_advantage,
    translate_correction,
    translate_critic,
    translate_kl,
    translate_loss,
)
from mcore_rl.tools.translate.verl_training import (
    ACTOR,
    home_of,
    shared,
    translate_engines,
    translate_layout,
    translate_model,
    translate_optimizer,
    translate_sampling,
    translate_step,
    translate_turns,
)
from mcore_rl.tools.translate.verl_unneeded import reason_of

TRACKERS = {"tensorboard": "log.tensorboard", "console": "log.console"}
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
    "data.prompt_key": ("prompt", "the column is named prompt"),
    "data.image_key": ("images", "the column is named images"),
    "data.video_key": ("videos", "the column is named videos, and holds frames"),
    "data.train_max_samples": (-1, "cut the file: all of its prompts are used"),
    "data.apply_chat_template_kwargs": ({}, "change the template in model.path"),
    "data.custom_cls.path": (None, "write its rows to a file (docs/data.md)"),
    "data.tokenizer": (None, "the tokenizer is that of model.path"),
    "trainer.val_only": (False, "`mcore-rl eval` evaluates model.path"),
    "trainer.default_hdfs_dir": (None, "checkpoints go to run.dir, which may be a mount"),
    "data.sampler.class_path": (None, "data.curriculum orders prompts (docs/data.md)"),
    "data.datagen.path": (None, "write its rows to a file (docs/data.md)"),
}


def translate_data(options: ForeignOptions) -> Found:
    for theirs, ours in (("data.train_files", "data.train"), ("data.val_files", "eval.data")):
        files = [home_of(file) for file in options.take_list(theirs)]
        yield RecipeLine(ours, files, (theirs,))
    longest = shared(options, "data.max_prompt_length")
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
    yield from differing(options, WITHOUT_COUNTERPART)
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
    yield RecipeLine(
        "eval.every_steps", max(options.take("trainer.test_freq", -1), 0), ("trainer.test_freq",)
    )
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
    epochs = options.take("trainer.total_epochs", 30)
    if total is not None:
        yield RecipeLine("run.steps", total, ("trainer.total_training_steps",))
        return
    paths = [Path(home_of(file)) for file in options.take_list("data.train_files")]
    if paths and all(path.is_file() and path.suffix == ".parquet" for path in paths):
        rows = sum(pq.read_metadata(path).num_rows for path in paths)
        prompts = shared(options, "data.train_batch_size")
        sources = ("trainer.total_epochs", "data.train_files")
        yield RecipeLine("run.steps", max(epochs * (rows // prompts), 1), sources)
    else:
        advice = "set run.steps: rows of data.train, times epochs, by rollout.prompts_per_step"
        yield Decision("trainer.total_epochs", epochs, advice)


def _trackers(options: ForeignOptions) -> Found:
    loggers = options.take_list("trainer.logger", ["console", "wandb"])
    for logger, ours in TRACKERS.items():
        if logger not in loggers:
            yield RecipeLine(ours, False, ("trainer.logger",))
    project = options.take("trainer.project_name", "verl_examples")
    if "wandb" in loggers:
        yield RecipeLine("log.wandb_project", project, ("trainer.project_name", "trainer.logger"))
    for logger in set(loggers) - {*TRACKERS, "wandb"}:
        advice = (
            "log.* has tensorboard, wandb_project and mlflow_uri; all numbers are in metrics.jsonl"
        )
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
    return account(options, _found(options), reason_of)


def _found(options: ForeignOptions) -> Found:
    yield from translate_run(options)
    yield from translate_model(options)
    yield from translate_layout(options)
    yield from translate_step(options)
    yield from translate_optimizer(options, f"{ACTOR}.optim", "train.optimizer", 1e-6)
    yield from translate_data(options)
    yield from translate_engines(options)
    yield from translate_sampling(options)
    yield from translate_turns(options)
    yield from translate_advantage(options)
    yield from translate_loss(options)
    yield from translate_kl(options)
    yield from translate_correction(options)
    yield from translate_critic(options)
    yield from translate_reward(options)
