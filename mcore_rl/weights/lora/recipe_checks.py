"""Checks that a recipe's adapter fits its model and the checkpoint that the run continues from."""

from pathlib import Path

from mcore_rl.config import LoraConfig, ModelConfig
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.lora.base import find_base_sum
from mcore_rl.weights.lora.facts import AdapterFacts, refuse_other_adapter, serves_adapter
from mcore_rl.weights.lora.peft_files import check_start, read_peft
from mcore_rl.weights.lora.served import refuse_unserved
from mcore_rl.weights.lora.targets import list_targets, refuse_unused


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
    if lora.path:
        adapter = read_peft(Path(lora.path))
        check_start(adapter, _make_facts(lora, model, policy, seed), policy.config)


def check_resumed(
    checkpoint: Path, lora: LoraConfig, model: ModelConfig, policy: ModelFacts, seed: int
) -> None:
    """Raise ValueError unless a run can continue from a checkpoint's adapter, or its weights.

    The ranks check the same, but only once all processes have started.
    """
    own = _make_facts(lora, model, policy, seed) if lora.rank else None
    refuse_other_adapter(checkpoint, own)


def _make_facts(
    lora: LoraConfig, model: ModelConfig, policy: ModelFacts, seed: int
) -> AdapterFacts:
    base = find_base_sum(model.init, policy, seed)
    return AdapterFacts.make(lora, policy.config, base, model.path)
