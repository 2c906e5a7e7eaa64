"""Converts options of verl 0.9 (ppo_trainer.yaml, ppo_megatron_trainer.yaml) into a recipe.

Data and rewards are converted here.
"""

from collections.abc import Mapping
from typing import Any

from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    Found,
    RecipeLine,
    Translation,
    account,
    list_differing,
)
from mcore_rl.tools.translate.verl_algorithm import (
    translate_advantage,
    translate_correction,
    translate_critic,
    translate_distillation,
    translate_kl,
    translate_loss,
)
from mcore_rl.tools.translate.verl_modes import translate_mode
from mcore_rl.tools.translate.verl_run import translate_run
from mcore_rl.tools.translate.verl_sft import is_sft, reason_for_sft, translate_sft
from mcore_rl.tools.translate.verl_shared import (
    ACTOR,
    home_of,
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
from mcore_rl.tools.translate.verl_unneeded import reason_of

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
    if is_sft(options):
        return account(options, translate_sft(options), reason_for_sft, "sft")
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
