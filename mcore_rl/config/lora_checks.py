"""Refuses what contradicts low-rank factors of the policy or the critic, or is unread beside them.

Errors name the options, their values and a remedy. What depends on the model is refused by
weights/lora/recipe_checks.py.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mcore_rl.config.agents import AgentsConfig
from mcore_rl.config.rollout import RolloutConfig
from mcore_rl.config.run import EvalConfig
from mcore_rl.config.training import CriticConfig, LoraConfig, OptimizerConfig, TrainConfig
from mcore_rl.config.tree_checks import Unread
from mcore_rl.config.turn_checks import ADAPTER_NAME, BASE

_CRITIC = "critic.optimizer"
_FROZEN = (
    "train.freeze_router",
    "train.vision",
    "train.indexer_loss",
    "train.mtp_loss",
    "train.router_aux_loss_coef",
    "train.router_sequence_aux_loss_coef",
    "train.router_bias_rate",
)
"""Options of weights that are frozen under factors: routers, indexers, layers for multi-token
prediction, biases, vision towers."""


def find_unread_beside_lora(
    train: TrainConfig, critic: CriticConfig, optimizers: Mapping[str, OptimizerConfig]
) -> Iterator[Unread]:
    """Yield the options that nothing reads. `optimizers`: by group."""
    yield from _find_unread_of_critic(critic)
    if not train.lora.rank:
        yield Unread(("train.lora",), "train.lora.rank=0", "set train.lora.rank=32")
        return
    context = f"train.lora.rank={train.lora.rank}"
    remedy = "set train.lora.rank=0"
    yield Unread(_FROZEN, context, remedy)
    for group in optimizers:
        if group != _CRITIC:
            yield Unread((f"{group}.vision_lr",), context, remedy)
    sync = train.lora.sync
    if sync in ("merged", "adapter"):
        remedy = "set train.lora.sync=factors"
        yield Unread(("train.lora.engine_base",), f"train.lora.sync={sync}", remedy)
    if sync != "adapter":
        remedy = "set train.lora.sync=adapter"
        yield Unread(("train.lora.name",), f"train.lora.sync={sync}", remedy)
    if train.lora.adapters:
        context = f"{len(train.lora.adapters)} train.lora.adapters"
        remedy = "give each adapter its own"
        yield Unread(("train.lora.name", "train.lora.path"), context, remedy)


def _find_unread_of_critic(critic: CriticConfig) -> Iterator[Unread]:
    rank = critic.lora.rank
    if rank:
        options = (f"{_CRITIC}.vision_lr",)
        yield Unread(options, f"critic.lora.rank={rank}", "set critic.lora.rank=0")
    else:
        yield Unread(("critic.lora",), "critic.lora.rank=0", "set critic.lora.rank=32")


def check_lora(
    train: TrainConfig,
    critic: CriticConfig,
    optimizers: Mapping[str, OptimizerConfig],
    rollout: RolloutConfig,
) -> None:
    """Raise ValueError if factors cannot be trained, or brought to engines, as the recipe says."""
    if critic.lora.rank:
        own = {_CRITIC: optimizers[_CRITIC]}
        passed = {**train.megatron, **critic.megatron}, {**train.ddp, **critic.ddp}
        _check_trained("critic", critic.lora.rank, own, *passed)
    if not train.lora.rank:
        return
    if train.lora.sync == "factors" and not rollout.stage_weights:
        raise ValueError(
            "train.lora.sync=factors with rollout.stage_weights=false: engines merge factors into"
            " a second copy of their weights, which they don't have; set train.lora.sync=merged,"
            " or rollout.stage_weights=true where engines have GPUs of their own"
        )
    if train.lora.sync == "adapter":
        _check_served_adapter(train.lora.name, rollout)
    own = {group: options for group, options in optimizers.items() if group != _CRITIC}
    _check_trained("train", train.lora.rank, own, train.megatron, train.ddp)


def check_base_sets(evaluation: EvalConfig, lora: LoraConfig, agents: AgentsConfig) -> None:
    """Raise ValueError if a set of eval.sets asks weights that engines cannot tell apart."""
    for each in evaluation.sets:
        if each.model == "policy":
            continue
        where = f"eval.sets: {each.name} has model={each.model}"
        if not lora.rank or lora.sync != "adapter":
            raise ValueError(
                f"{where} with train.lora.rank={lora.rank} and train.lora.sync={lora.sync}: engines"
                " serve the weights below factors by name with train.lora.sync=adapter alone; set"
                f" it, or leave model out of {each.name}"
            )
        if agents.environment:
            raise ValueError(
                f"{where} with agents.environment={agents.environment}: programs of episodes choose"
                f" who answers by the model of each request; leave model out of {each.name}"
            )


def _check_trained(
    group: str,
    rank: int,
    optimizers: Mapping[str, OptimizerConfig],
    megatron: Mapping[str, Any],
    ddp: Mapping[str, Any],
) -> None:
    """Raise ValueError if an optimizer, or an option of Megatron's, cannot train factors.

    megatron, ddp   the options of the model's group; the critic's come on top of the policy's
    """
    factors = f"{group}.lora.rank={rank}"
    for name, optimizer in optimizers.items():
        if optimizer.name == "muon":
            raise ValueError(
                f"{name}.name=muon with {factors}: it makes the update of a matrix orthogonal, and"
                " the updates of two factors do not make that of their product;"
                f" set {name}.name=adam or lion"
            )
    if megatron.get("gradient_accumulation_fusion"):
        option = f"{group}.megatron.gradient_accumulation_fusion"
        raise ValueError(
            f"{option}=true with {factors}: it adds gradients of weights to a buffer, which frozen"
            f" weights do not have; set {option}=false"
        )
    if ddp.get("overlap_grad_reduce"):
        option = f"{group}.ddp.overlap_grad_reduce"
        raise ValueError(
            f"{option}=true with {factors}: factors get their gradients outside of autograd, which"
            f" it watches; set {option}=false"
        )


def _check_served_adapter(name: str, rollout: RolloutConfig) -> None:
    """Raise ValueError if engines of these options cannot serve an adapter by this name."""
    where = "train.lora.sync=adapter with"
    if not rollout.stage_weights:
        raise ValueError(
            f"{where} rollout.stage_weights=false: engines that give up their weights between"
            " rollouts serve no adapter beside them; set train.lora.sync=merged, or"
            " rollout.stage_weights=true where engines have GPUs of their own"
        )
    if not ADAPTER_NAME.fullmatch(name) or name == BASE:
        raise ValueError(
            f"train.lora.name={name!r}: give letters, digits, '-' and '_', and not 'base', which"
            " names the weights without an adapter"
        )
    for option, most in (("pp", 1), ("attention_dp", 1)):
        value = getattr(rollout, option)
        if value > most:
            raise ValueError(
                f"{where} rollout.{option}={value}: engines load adapters with {option}={most}"
                f" alone; set rollout.{option}={most}, or train.lora.sync=factors"
            )
    if rollout.quantization != "none":
        raise ValueError(
            f"{where} rollout.quantization={rollout.quantization}: factors are not served beside"
            " quantized weights; set rollout.quantization=none, or train.lora.sync=factors"
        )
