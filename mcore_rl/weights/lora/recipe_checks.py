"""Checks that a recipe's adapter fits its model and the checkpoint that the run continues from."""

from pathlib import Path

from mcore_rl.config import LoraConfig, ModelConfig
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.lora.base import find_base_sum
from mcore_rl.weights.lora.facts import AdapterFacts, refuse_other_adapter
from mcore_rl.weights.lora.targets import list_targets, refuse_unused
from mcore_rl.weights.models.table import HfConfig


def check_factors(lora: LoraConfig, config: HfConfig) -> None:
    """Raise ValueError naming the target that the model of `config` does not have."""
    if lora.rank:
        list_targets(config, lora.targets, lora.experts)
        refuse_unused(config, lora.experts)


def check_resumed(
    checkpoint: Path, lora: LoraConfig, model: ModelConfig, policy: ModelFacts, seed: int
) -> None:
    """Raise ValueError unless a run can continue from a checkpoint's adapter, or its weights.

    The ranks check the same, but only once all processes have started.
    """
    own = None
    if lora.rank:
        base = find_base_sum(model.init, policy, seed)
        own = AdapterFacts.make(lora, policy.config, base, model.path)
    refuse_other_adapter(checkpoint, own)
