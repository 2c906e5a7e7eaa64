"""Reads a command's inputs and refuses wrong ones before any process is started."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.lookup import needs_of
from mcore_rl.algo.policy_loss import TokenLoss, make_policy_loss
from mcore_rl.checks.algorithm import check_algorithm, check_names
from mcore_rl.checks.inputs import check_no_trainer, check_run_dir, list_adapter_data
from mcore_rl.checks.sizes import check_engines, check_sizes
from mcore_rl.cluster.adapter_slots import list_served_names
from mcore_rl.config import (
    AlgorithmConfig,
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
)
from mcore_rl.config.recipe import require
from mcore_rl.data.source import ShuffledStream
from mcore_rl.data.streamed.mixed import MixedPrompts
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.logs.token_rows import TokenTexts
from mcore_rl.planning.recipe_models import read_critic, read_policy
from mcore_rl.rollout.scoring import check_same_vocabulary
from mcore_rl.run.images import check_critic_images
from mcore_rl.run.prompts import PromptReader
from mcore_rl.run.roles.parity_check import MOST_SEQUENCES, make_probe
from mcore_rl.run.roles.turns import TurnOrder, TurnPrompts
from mcore_rl.run.rollouts import collector_spec
from mcore_rl.types import Prompt, TrainBatch
from mcore_rl.weights.hf.config import ModelFacts, with_trained_mtp
from mcore_rl.weights.hf.files import list_carried_tensors
from mcore_rl.weights.hf.folder import find_other_format
from mcore_rl.weights.hf.opened import open_hf_dir
from mcore_rl.weights.lora.recipe_checks import (
    check_critic_factors,
    check_factors,
    check_sampled_adapter,
)
from mcore_rl.weights.models.recipe_checks import check_routing
from mcore_rl.weights.models.settings import DEQUANTIZE_REMEDY
from mcore_rl.workers.collector_worker import CollectorSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainInputs:
    """All parts of a training run except its processes."""

    policy: ModelFacts
    prompts: ShuffledStream[Prompt] | MixedPrompts | TurnPrompts
    held_out: list[Prompt]
    collector: CollectorSpec
    loss: TokenLoss
    advantages: Advantages
    to_texts: TokenTexts
    parity_probe: TrainBatch
    """Prompts that engines and trainer score at the first sync, before there are samples."""
    turns: TurnOrder | None = None
    """Whose turn it is among several adapters; None without."""


def read_train_inputs(config: Config) -> TrainInputs:
    """Return the inputs of `mcore-rl train`.

    Raises ValueError naming the option if a file cannot be used, or if a size or a model does not
    fit the rest.
    """
    check_algorithm(config)
    policy, tokenizer = open_policy(
        config.model, config.algorithm, config.run.dir, list_train_prompts(config)
    )
    check_training(config.train, config.model, policy)
    check_factors(config.train.lora, config.model, policy, config.run.seed)
    critic = config.critic if needs_of(config.algorithm).critic else None
    if critic is not None:
        check_critic(critic.path, config.model.path, policy)
        check_critic_factors(critic.lora, read_critic(critic.path, policy))
    layout = config.parallel, critic, config.train
    check_sizes(policy, *layout, config.rollout, config.data, config.plan.ranks_per_host)
    check_rollout(config, policy)
    if config.teacher.path:
        check_teacher(config.teacher.path, config.model, tokenizer)
    warn_of_cut_distribution(config.rollout)
    adapters = list_served_names(config.train.lora, has_trainer=True)
    collector = collector_spec(config, policy, tokenizer, adapters)
    loss = make_policy_loss(config.algorithm)
    reader = PromptReader.make(config, tokenizer)
    prompts = reader.open_train(max(config.parity_check.sequences, MOST_SEQUENCES))
    held_out = reader.load_held_out()
    return TrainInputs(
        policy=policy,
        prompts=prompts.stream,
        held_out=held_out,
        collector=collector,
        loss=loss,
        advantages=Advantages(
            config.algorithm, config.reward.part_weights, config.critic.gae_lambda
        ),
        to_texts=TokenTexts(tokenizer),
        parity_probe=make_probe(held_out or prompts.first, config.parity_check.sequences),
        turns=make_turns(config.train.lora, prompts.stream),
    )


def make_turns(lora: LoraConfig, prompts: object) -> TurnOrder | None:
    """Return whose turn it is among several adapters, which `prompts` are told; None without."""
    if not isinstance(prompts, TurnPrompts):
        return None
    turns = TurnOrder([own.name for own in lora.adapters])
    turns.tell(prompts.choose)
    return turns


def list_train_prompts(config: Config) -> dict[str, list[str]]:
    """Return the options that must name a training run's prompts: the data of each adapter, too."""
    of_adapters = list_adapter_data(config.train.lora)
    if not of_adapters:
        return list_prompt_options(config.data)
    return {name: files for name, files in of_adapters.items() if name.endswith(".data")}


def list_prompt_options(data: DataConfig) -> dict[str, list[str]]:
    """Return data.train, which must name prompts; nothing if data.sources names them."""
    return {} if data.sources else {"data.train": data.train}


def open_policy(
    model: ModelConfig, algorithm: AlgorithmConfig, run_dir: str, needed: Mapping[str, Any]
) -> tuple[ModelFacts, PreTrainedTokenizerBase]:
    """Return the facts about the policy's model and the model's tokenizer; a run reads them once.

    needed   values of options that must be set

    Raises ValueError if one of the options is empty, if the algorithm is unknown, if run.dir cannot
    be written, or if the model does not suit the run.
    """
    require({**needed, "run.dir": run_dir, "model.path": model.path})
    check_names(algorithm)
    check_run_dir(run_dir)
    return _open_model(model)


def check_rollout(config: Config, policy: ModelFacts) -> None:
    """Raise ValueError naming an option of engines with which they cannot serve the model."""
    dtype = config.model.dtype
    check_engines(policy, dtype, config.rollout, config.drift, config.data, config.eval)


def check_sampling(config: Config, policy: ModelFacts) -> None:
    """Raise ValueError unless engines without a trainer can sample from the model in model.path."""
    check_no_trainer(config.rollout)
    check_engines_load(policy)
    check_rollout(config, policy)
    lora, held_out = config.train.lora, config.eval.sets
    check_sampled_adapter(lora, config.model, policy, config.run.seed, held_out)


def warn_of_cut_distribution(rollout: RolloutConfig) -> None:
    """Warn if engines sample from another distribution than the one whose log-probs they report."""
    if rollout.cuts_distribution:
        _log.warning(
            "rollout.top_p=%g and rollout.top_k=%d cut the distribution that tokens are drawn from,"
            " but engines report log-probs from before the cut. Training sees neither the cut nor"
            " the bias, and algorithm.correction cannot remove it. For training,"
            " rollout.top_p=1 and rollout.top_k=-1 are exact.",
            rollout.top_p,
            rollout.top_k,
        )


def _open_model(model: ModelConfig) -> tuple[ModelFacts, PreTrainedTokenizerBase]:
    """Return the facts and the tokenizer of a model; check that a run can use both."""
    policy = read_policy(model.path)
    if policy.has_value_head:
        raise ValueError(
            f"model.path={model.path}: {policy.architecture} gives values, not log-probs;"
            " a critic starts from it as critic.path"
        )
    if model.init == "hf":
        if not any(policy.path.glob("*.safetensors")):
            raise ValueError(
                f"model.path={model.path}: {policy.path} has no .safetensors files"
                f"{find_other_format(policy.path)}; model.init=random starts without"
            )
        open_hf_dir(policy)
    return policy, load_tokenizer(policy.path, "model.path", model.trust_remote_code)


def check_training(train: TrainConfig, model: ModelConfig, policy: ModelFacts) -> None:
    """Raise ValueError naming an option of `train` that the model or its files have no part for.

    Says which tensors are not trained.
    """
    check_routing(train, policy.config)
    if model.init != "hf":
        return
    config = policy.config
    if train.mtp_loss:
        config = with_trained_mtp(config)
        try:
            open_hf_dir(replace(policy, config=config))
        except ValueError as error:
            raise ValueError(
                f"train.mtp_loss={train.mtp_loss}: {error}; without these layers set"
                " train.mtp_loss=0.0"
            ) from None
    carried = list_carried_tensors(policy.path, config).keys() - policy.family.copies(config)
    if carried:
        print(
            f"{len(carried)} tensors are not trained, but go into exports unchanged:"
            f" {min(carried)}, ..."
        )


def without_replay(train: TrainConfig, model: ModelConfig, policy: ModelFacts) -> TrainConfig:
    """Return the options of training without replays, for sequences that no engine sampled.

    Raises ValueError as check_training does.
    """
    train = replace(train, router_replay="none", indexer_replay="none")
    check_training(train, model, policy)
    return train


def check_critic(path: str, policy_path: str, policy: ModelFacts) -> None:
    """Raise ValueError if the critic cannot start from `path` (critic.path).

    The critic also must read the same tokens and images as the policy.
    """
    critic = read_critic(path, policy)
    if critic.vocab_size != policy.vocab_size:
        raise ValueError(
            f"critic.path={path}: its vocabulary has {critic.vocab_size} tokens, that"
            f" of model.path={policy_path} {policy.vocab_size}; take one with the same"
            " tokenizer"
        )
    check_critic_images(path, critic, policy)


def check_teacher(path: str, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if the teacher has no tokenizer, or other tokens than the model."""
    teacher = load_tokenizer(path, "teacher.path", model.trust_remote_code)
    check_same_vocabulary(tokenizer, teacher, model.path, path)


def check_engines_load(policy: ModelFacts) -> None:
    """Raise ValueError if engines cannot load the model, for a command without trainer ranks."""
    if policy.is_packed:
        raise ValueError(
            f"model.path={policy.path} has {policy.packing.upper()} weights: engines get them from"
            f" trainer ranks, which decode them, and this command has none; {DEQUANTIZE_REMEDY}"
        )
