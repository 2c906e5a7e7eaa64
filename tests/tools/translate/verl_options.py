"""verl's own configurations, and translations of its options."""

from typing import Any

from omegaconf import OmegaConf

from mcore_rl.tools.translate.hydra import flatten
from mcore_rl.tools.translate.translation import ForeignOptions, Translation
from mcore_rl.tools.translate.verl import translate_verl
from tests.agents.environments.foreign import VERL

KINDS = ("ppo_megatron_trainer", "ppo_trainer")


def defaults_of(kind: str) -> dict[str, Any]:
    """Return verl's options with their defaults, by dotted name."""
    path = VERL / "verl/trainer/config" / f"_generated_{kind}.yaml"
    tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True, throw_on_missing=False)
    assert isinstance(tree, dict)
    return flatten(tree)


def translate(**given: Any) -> Translation:
    """Translate options whose names have "__" for "."."""
    options = {name.replace("__", "."): value for name, value in given.items()}
    return translate_verl(ForeignOptions(options, is_whole=False))
