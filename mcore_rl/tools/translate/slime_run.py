"""Converts the run itself of slime 0.3.1, whatever it trains on: folder, saves, trackers."""

from collections.abc import Mapping
from typing import Any

from mcore_rl.tools.translate.slime_training import first_given
from mcore_rl.tools.translate.translation import (
    Decision,
    ForeignOptions,
    Found,
    RecipeLine,
    translate_renamed,
    translate_switched,
)

OF_THE_RUN: Mapping[str, tuple[Any, str]] = {
    "--apply-chat-template-kwargs": ({}, "change the template in model.path, or agents.template"),
    "--custom-config-path": (None, "give its options on the command line"),
    "--start-rollout-id": (None, "a run continues after its newest checkpoint"),
    "--ckpt-step": (None, "a run continues from its newest checkpoint"),
    "--wandb-mode": (None, "set the variable WANDB_MODE"),
    "--wandb-host": (None, "set the variable WANDB_BASE_URL"),
    "--wandb-team": (None, "set the variable WANDB_ENTITY"),
    "--wandb-dir": (None, "set the variable WANDB_DIR"),
    "--train-env-vars": ({}, "set variables where the run is started"),
}
"""Options without counterpart, their defaults, and what there is instead."""


def translate_run(options: ForeignOptions) -> Found:
    """Yield folder, saves and trackers; the steps are those of the loop."""
    folder = options.take("--save", None)
    yield RecipeLine("run.dir", str(folder or "runs/slime").rstrip("/"), ("--save",))
    every = options.take("--save-interval", None)
    yield RecipeLine("checkpoint.every_steps", every or 0, ("--save-interval",))
    if every:
        advice = "all checkpoints are kept there, here the newest: set checkpoint.keep"
        kept = options.take("--save-retain-interval", None)
        yield Decision("--save-retain-interval", kept, advice)
    name, seed = first_given(options, ("--seed", "--rollout-seed"), 1234)
    yield RecipeLine("run.seed", seed, (name,))
    minutes = options.take("--distributed-timeout-minutes", 10)
    if minutes != 10:
        yield RecipeLine("run.call_timeout_s", 60.0 * minutes, ("--distributed-timeout-minutes",))
    yield from _trackers(options)


def _trackers(options: ForeignOptions) -> Found:
    names = ("--use-wandb", "--wandb-project")
    yield from translate_switched(options, *names, "log.wandb_project", "slime")
    yield from translate_renamed(options, {"--use-tensorboard": ("log.tensorboard", False)})
    switches = ("--profile", "--use-pytorch-profiler")
    if [name for name in switches if options.take(name, False)]:
        first = options.take("--profile-step-start", 10)
        steps = list(range(first, options.take("--profile-step-end", 12)))
        sources = (*switches, "--profile-step-start", "--profile-step-end")
        yield RecipeLine("profile.steps", steps, sources)
