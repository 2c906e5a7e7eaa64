"""Refuses what does not go together with several adapters that take turns (train.lora.adapters).

Errors name the options, their values and a remedy.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from mcore_rl.config.agents import AgentsConfig
from mcore_rl.config.algorithm import AlgorithmConfig
from mcore_rl.config.data import DataConfig
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.config.run import CheckpointConfig, EvalConfig, RunConfig
from mcore_rl.config.training import LoraConfig
from mcore_rl.config.tree import spell

ADAPTER_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
BASE = "base"
"""Names the weights without any adapter in requests to engines."""


class Conflict(NamedTuple):
    """An option whose value contradicts several adapters, if `is_wrong`."""

    is_wrong: bool
    option: str
    value: object
    why: str
    remedy: str


def check_turns(
    lora: LoraConfig,
    run: RunConfig,
    data: DataConfig,
    evaluation: EvalConfig,
    rollout: RolloutConfig,
    agents: AgentsConfig,
    algorithm: AlgorithmConfig,
    checkpoint: CheckpointConfig,
) -> None:
    """Raise ValueError if adapters cannot take turns as the recipe says."""
    if not (lora.rank and lora.adapters):
        return
    _check_names(lora)
    conflicts = (
        *_find_in_sampling(lora, rollout, agents, algorithm),
        *_find_in_prompts(data, evaluation),
        *_find_in_run(run, checkpoint),
    )
    for conflict in conflicts:
        if conflict.is_wrong:
            raise ValueError(
                f"{conflict.option}={spell(conflict.value)} with {len(lora.adapters)}"
                f" train.lora.adapters: {conflict.why}; {conflict.remedy}"
            )
    if run.steps % len(lora.adapters):
        raise ValueError(
            f"run.steps={run.steps} with {len(lora.adapters)} train.lora.adapters, which take turns"
            " and get equally many: set run.steps to a multiple of their number"
        )


def _check_names(lora: LoraConfig) -> None:
    names = [own.name for own in lora.adapters]
    for i, name in enumerate(names):
        if not ADAPTER_NAME.fullmatch(name) or name == BASE or name in names[:i]:
            raise ValueError(
                f"train.lora.adapters[{i}].name={name!r}: give each adapter a name of its own, of"
                " letters, digits, '-' and '_', and none of them 'base', which names the weights"
                " without an adapter"
            )


def _find_in_sampling(
    lora: LoraConfig, rollout: RolloutConfig, agents: AgentsConfig, algorithm: AlgorithmConfig
) -> Iterator[Conflict]:
    yield Conflict(
        lora.sync != "adapter",
        "train.lora.sync",
        lora.sync,
        "engines have the weights of one merged adapter only",
        "set train.lora.sync=adapter, with which they serve all",
    )
    yield Conflict(
        rollout.mode != "sync",
        "rollout.mode",
        rollout.mode,
        "samples drawn beside training would be those of the adapter before",
        "set rollout.mode=sync",
    )
    yield Conflict(
        agents.is_used,
        "agents.environment",
        agents.environment,
        "programs of episodes choose among the weights of one policy",
        "leave out agents.environment, or train one adapter",
    )
    yield Conflict(
        algorithm.advantage == "gae",
        "algorithm.advantage",
        algorithm.advantage,
        "one critic would learn the values of all of them",
        "choose an advantage without a critic, such as grpo",
    )
    target = algorithm.kl.target
    yield Conflict(
        target > 0,
        "algorithm.kl.target",
        target,
        "one coefficient would be steered by the KL of all of them",
        "set algorithm.kl.target=0.0",
    )


def _find_in_prompts(data: DataConfig, evaluation: EvalConfig) -> Iterator[Conflict]:
    own = "each adapter has prompts of its own"
    move = "set train.lora.adapters[...].data, and leave it out"
    yield Conflict(bool(data.train), "data.train", data.train, own, move)
    yield Conflict(bool(data.sources), "data.sources", data.sources, own, move)
    curriculum = data.curriculum
    yield Conflict(
        curriculum.is_used,
        "data.curriculum.column",
        curriculum.column,
        "their prompts are drawn without a curriculum",
        "leave out data.curriculum",
    )
    move = "set train.lora.adapters[...].eval, and leave it out"
    yield Conflict(bool(evaluation.data), "eval.data", evaluation.data, own, move)
    yield Conflict(bool(evaluation.sets), "eval.sets", evaluation.sets, own, move)


def _find_in_run(run: RunConfig, checkpoint: CheckpointConfig) -> Iterator[Conflict]:
    yield Conflict(
        run.epochs is not None,
        "run.epochs",
        run.epochs,
        "each passes over prompts of its own",
        "set run.steps",
    )
    yield Conflict(
        bool(checkpoint.hub_repo),
        "checkpoint.hub_repo",
        checkpoint.hub_repo,
        "the run's export has a folder for each, and is no model",
        "leave it out, and upload what mcore-rl-ckpt to-hf --lora --name makes",
    )
