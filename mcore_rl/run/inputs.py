"""A recipe in, everything out that a command reads before it starts a process; wrong input is
refused.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mcore_rl.algo.build import Advantages, TokenLoss, make_policy_loss
from mcore_rl.config import Config, ModelConfig, RolloutConfig
from mcore_rl.config.recipe import require
from mcore_rl.data.prompts import load_prompts
from mcore_rl.data.source import ShuffledStream
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.planning.checks import check_sizes
from mcore_rl.rewards.model_scorers import JudgeScorer, ModelScorer, RewardModelScorer
from mcore_rl.rewards.scorer import Scorer
from mcore_rl.rollout.teacher import check_same_vocabulary
from mcore_rl.slices.families.routing import check_routing
from mcore_rl.slices.families.value_head import has_value_head
from mcore_rl.slices.hf.carried import carried_tensors
from mcore_rl.slices.hf.config import read_hf_config
from mcore_rl.slices.hf.files import open_hf_dir
from mcore_rl.types import Prompt

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainInputs:
    """Everything that a training run consists of besides its processes."""

    tokenizer: PreTrainedTokenizerBase
    prompts: ShuffledStream[Prompt]
    held_out: list[Prompt]
    scorer: Scorer
    loss: TokenLoss
    advantages: Advantages


def read_train_inputs(config: Config) -> TrainInputs:
    """The inputs of `mcore-rl train`.

    Raises ValueError naming the option if a file cannot be used, or if a size or a model does not
    fit the rest.
    """
    tokenizer = open_tokenizer(config, "data.train")
    check_routing(config.train, read_hf_config(config.model.path))
    warn_of_cut_distribution(config.rollout)
    prompts = load_split(config, config.data.train, tokenizer)
    inputs = TrainInputs(
        tokenizer=tokenizer,
        prompts=ShuffledStream(prompts, config.run.seed, config.data.shuffle),
        held_out=load_split(config, config.eval.data, tokenizer)[: config.eval.max_prompts],
        scorer=make_scorer(config),
        loss=make_policy_loss(config.algorithm),
        advantages=Advantages(
            config.algorithm, config.reward.part_weights, config.critic.gae_lambda
        ),
    )
    if config.has_critic:
        check_critic(config)
    check_sizes(config)
    if config.teacher.path:
        check_teacher(config, tokenizer)
    return inputs


def open_tokenizer(config: Config, *needed: str) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Raises ValueError if one of the options `needed` is empty, if run.dir cannot be written, or if
    the model cannot be what the run needs.
    """
    require(config, *needed, "run.dir", "model.path")
    check_run_dir(config.run.dir)
    return _open_model(config.model)


def check_run_dir(run_dir: str) -> None:
    """Raise ValueError if the folder of the run is a file, or cannot be made or written to."""
    path = Path(run_dir).absolute()
    existing = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not existing.is_dir():
        raise ValueError(f"run.dir={run_dir}: {existing} is not a folder; choose another run.dir")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(
            f"run.dir={run_dir}: no permission to write to {existing}; choose another run.dir"
        )


def warn_of_cut_distribution(rollout: RolloutConfig) -> None:
    """Log a warning if tokens are drawn from another distribution than engines report."""
    if rollout.cuts_distribution:
        _log.warning(
            "rollout.top_p=%g and rollout.top_k=%d cut the distribution that tokens are drawn from,"
            " but engines report log-probs from before the cut. Training sees neither the cut nor"
            " the bias, and algorithm.correction cannot remove it. For training,"
            " rollout.top_p=1 and rollout.top_k=-1 are exact.",
            rollout.top_p,
            rollout.top_k,
        )


def _open_model(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory that was checked for what a run needs."""
    path = Path(model.path)
    try:
        hf_config = read_hf_config(path)
    except ValueError as error:
        raise ValueError(f"model.path={model.path}: {error}") from None
    if has_value_head(hf_config):
        raise ValueError(
            f"model.path={model.path}: {hf_config['architectures'][0]} gives values, not log-probs;"
            " a critic starts from it as critic.path"
        )
    if model.init == "hf":
        if not any(path.glob("*.safetensors")):
            raise ValueError(
                f"model.path={model.path}: no *.safetensors there; model.init=random starts without"
            )
        open_hf_dir(path)
        if carried := sorted(carried_tensors(path, hf_config)):
            print(
                f"{len(carried)} tensors are not trained, but go into exports unchanged:"
                f" {carried[0]}, ..."
            )
    return load_tokenizer(path, "model.path", model.trust_remote_code)


def without_replay(config: Config) -> Config:
    """The configuration for sequences that no engine sampled: the experts they went to are unknown.

    Raises ValueError as check_routing does.
    """
    train = replace(config.train, router_replay="none")
    check_routing(train, read_hf_config(config.model.path))
    return replace(config, train=train)


def load_split(
    config: Config, files: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    """The prompts of `files`, none if there are no files. Raises ValueError as load_prompts
    does.
    """
    if not files:
        return []
    return load_prompts(files, tokenizer, config.data.max_prompt_len, config.data.overlong)


def make_scorer(config: Config) -> Scorer:
    """The reward of a run. Raises ValueError if its function, template or tokenizer cannot be
    used.
    """
    questions: dict[str, ModelScorer] = {}
    if config.judge.is_used:
        questions["judge"] = JudgeScorer(config.reward.judge)
    if config.reward_model.is_used:
        folder = config.reward.model_tokenizer or config.reward_model.path
        trust_remote_code = config.model.trust_remote_code
        questions["reward_model"] = RewardModelScorer(folder, trust_remote_code)
    return Scorer(config.reward, config.rollout.max_response_len, questions)


def check_critic(config: Config) -> None:
    """Raise ValueError if the critic cannot start from its path, or has another vocabulary."""
    path = config.critic.path or config.model.path
    try:
        critic = read_hf_config(path)
        policy = read_hf_config(config.model.path)
    except ValueError as error:
        raise ValueError(f"critic.path={path}: {error}") from None
    if critic["vocab_size"] != policy["vocab_size"]:
        raise ValueError(
            f"critic.path={path}: its vocabulary has {critic['vocab_size']} tokens, that of"
            f" model.path={config.model.path} {policy['vocab_size']}; take one with the same"
            " tokenizer"
        )


def check_teacher(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if the teacher has no tokenizer, or one with other tokens than the
    model's.
    """
    path = config.teacher.path
    teacher = load_tokenizer(path, "teacher.path", config.model.trust_remote_code)
    check_same_vocabulary(tokenizer, teacher, config.model.path, path)


def check_no_trainer(config: Config) -> None:
    """Raise ValueError if the recipe needs trainer ranks, for a command that has none."""
    if config.rollout.quantization != "none":
        raise ValueError(
            f"rollout.quantization={config.rollout.quantization}: trainer ranks quantize, and an"
            " evaluation has none; use rollout.quantization=none"
        )
