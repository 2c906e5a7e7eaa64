"""Says which adapters the engines of a run serve beside the policy's weights."""

from mcore_rl.config import LoraConfig
from mcore_rl.rollout.adapters import AdapterSlots
from mcore_rl.weight_sync.adapter.serving import SET_UP
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.lora.facts import serves_adapter
from mcore_rl.weights.lora.served import list_served_modules
from mcore_rl.weights.lora.targets import list_targets


def make_adapter_slots(lora: LoraConfig, policy: ModelFacts) -> AdapterSlots | None:
    """Return the slots of a recipe's engines; None: weights are all that they serve."""
    if not serves_adapter(lora):
        return None
    names = list_targets(policy.config, lora.targets, lora.experts)
    modules = list_served_modules(names)
    return AdapterSlots((lora.name,), lora.rank, modules, SET_UP, default=lora.name)
