"""Says which adapters the engines of a run serve beside the policy's weights.

with a trainer      train.lora.sync=adapter: its factors, version by version
without one         besides, train.lora.path: the factors of that folder
"""

from pathlib import Path

from mcore_rl.config import LoraConfig
from mcore_rl.rollout.adapters import BASE, AdapterSlots
from mcore_rl.weight_sync.adapter.serving import SET_UP
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.lora.base import compute_base_sum
from mcore_rl.weights.lora.facts import serves_adapter
from mcore_rl.weights.lora.places import FIRST
from mcore_rl.weights.lora.served import list_served_modules
from mcore_rl.weights.lora.served_files import check_served
from mcore_rl.weights.lora.targets import list_targets


def list_served_names(lora: LoraConfig, *, has_trainer: bool) -> tuple[str, ...]:
    """Return the names that requests to engines may give: that of the policy first; () if none."""
    has_factors = has_trainer or bool(lora.path)
    if not (serves_adapter(lora) and has_factors):
        return ()
    return (*_list_names(lora), BASE)


def _list_names(lora: LoraConfig) -> tuple[str, ...]:
    """Return the names of the adapters that engines serve: several take turns."""
    return tuple(own.name for own in lora.list_adapters().values())


def make_adapter_slots(
    lora: LoraConfig, policy: ModelFacts, *, has_trainer: bool
) -> AdapterSlots | None:
    """Return the slots of a recipe's engines; None: weights are all that they serve.

    Raises ValueError as check_served does of a folder that engines are to begin with.
    """
    if not list_served_names(lora, has_trainer=has_trainer):
        return None
    folders = {}
    if has_trainer:
        names = list_targets(policy.config, lora.targets, lora.experts)
    else:
        folders = {lora.name: lora.path}
        base = compute_base_sum(policy.path)
        adapter = check_served(Path(lora.path), base, policy.config, policy.path)
        names = sorted({key[: -len(FIRST)] for key in adapter.shapes})
    modules = list_served_modules(names)
    adapters = _list_names(lora)
    # Among several, none is meant by requests that name none.
    default = BASE if lora.adapters else lora.name
    slots = adapters, lora.most_rank, modules, SET_UP
    return AdapterSlots(*slots, default=default, folders=folders)
