"""Checks that a recipe's adapter fits its model and the checkpoint that the run continues from."""

from collections.abc import Sequence
from pathlib import Path

from mcore_rl.config import CriticLoraConfig, EvalSetConfig, LoraConfig, ModelConfig
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.lora.base import find_base_sum
from mcore_rl.weights.lora.facts import (
    OF_CRITIC,
    AdapterFacts,
    refuse_other_adapters,
    serves_adapter,
)
from mcore_rl.weights.lora.peft_files import check_start, read_peft
from mcore_rl.weights.lora.served import refuse_unserved
from mcore_rl.weights.lora.targets import list_targets, refuse_unused
from mcore_rl.weights.models.value_head import add_value_head


def check_factors(lora: LoraConfig, model: ModelConfig, policy: ModelFacts, seed: int) -> None:
    """Raise ValueError naming the target that the model does not have, or that engines cannot
    serve, or what differs in path.
    """
    if not lora.rank:
        return
    list_targets(policy.config, lora.targets, lora.experts)
    refuse_unused(policy.config, lora.experts)
    if serves_adapter(lora):
        refuse_unserved(policy.config, lora.targets, lora.experts)
    for name, own in lora.list_adapters().items():
        if own.path:
            facts = _make_facts(lora, model, policy, seed)[name]
            group = f"train.lora.adapters.{name}" if name else "train.lora"
            check_start(read_peft(Path(own.path)), facts, policy.config, group)


def check_sampled_adapter(
    lora: LoraConfig,
    model: ModelConfig,
    policy: ModelFacts,
    seed: int,
    held_out: Sequence[EvalSetConfig] = (),
) -> None:
    """Raise ValueError unless a command without a trainer can sample with train.lora.path.

    It samples with the weights alone if there is no path; then no set of `held_out` may ask them by
    name.
    """
    refuse_several(lora, "a command without a trainer")
    if not (lora.rank and lora.path):
        if asked := [each.name for each in held_out if each.model == "base"]:
            raise ValueError(
                f"eval.sets: {', '.join(asked)} with model=base and no train.lora.path: all answers"
                " are those of the weights alone; leave model out, or set train.lora.path"
            )
        return
    if not serves_adapter(lora):
        raise ValueError(
            f"train.lora.path={lora.path} with train.lora.sync={lora.sync}: no trainer of this"
            " command merges factors, but engines can serve them; set train.lora.sync=adapter, or"
            " model.path of what mcore-rl-ckpt merge-lora makes of them"
        )
    check_factors(lora, model, policy, seed)


def refuse_several(lora: LoraConfig, command: str) -> None:
    """Raise ValueError if a recipe has several adapters, which `command` cannot use."""
    if lora.rank and lora.adapters:
        raise ValueError(
            f"train.lora.adapters names {len(lora.adapters)} adapters, which take turns in"
            f" mcore-rl train alone, not in {command}: leave it out, and set train.lora.rank"
        )


def check_critic_factors(lora: CriticLoraConfig, critic: ModelFacts) -> None:
    """Raise ValueError naming the target that the critic does not have.

    critic   the model that it starts from
    """
    if lora.rank:
        config = add_value_head(critic.config)
        list_targets(config, lora.targets, lora.experts)
        refuse_unused(config, lora.experts)


def check_resumed(
    checkpoint: Path, lora: LoraConfig, model: ModelConfig, policy: ModelFacts, seed: int
) -> None:
    """Raise ValueError unless a run can continue from a checkpoint's adapter, or its weights.

    The ranks check the same, but only once all processes have started.
    """
    own = _make_facts(lora, model, policy, seed) if lora.rank else {}
    refuse_other_adapters(checkpoint, own)


def check_resumed_critic(
    checkpoint: Path, lora: CriticLoraConfig, model: ModelConfig, critic: ModelFacts, seed: int
) -> None:
    """Raise ValueError unless a critic can continue from its checkpoint; see check_resumed."""
    own = {}
    if lora.rank:
        base = find_base_sum(model.init, critic, seed)
        own[""] = AdapterFacts.make(lora, add_value_head(critic.config), base, str(critic.path))
    refuse_other_adapters(checkpoint, own, options=OF_CRITIC)


def _make_facts(
    lora: LoraConfig, model: ModelConfig, policy: ModelFacts, seed: int
) -> dict[str, AdapterFacts]:
    base = find_base_sum(model.init, policy, seed)
    return {
        name: AdapterFacts.make(own, policy.config, base, model.path)
        for name, own in lora.list_adapters().items()
    }
