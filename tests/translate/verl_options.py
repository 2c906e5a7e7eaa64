"""verl's own configurations, and changes of their options."""

from typing import Any

from omegaconf import OmegaConf

from mcore_rl.translate.foreign import ForeignOptions, flatten
from mcore_rl.translate.verl import Translation, translate_verl
from tests.agents.environments.foreign import VERL

KINDS = ("ppo_megatron_trainer", "ppo_trainer")


def defaults_of(kind: str) -> dict[str, Any]:
    """Return verl's options with their defaults, by dotted name."""
    path = VERL / "verl/trainer/config" / f"_generated_{kind}.yaml"
    tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True, throw_on_missing=False)
    assert isinstance(tree, dict)
    return flatten(tree)


def changed(value: Any) -> Any:
    """Return another value than a default, which says something."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 or 2
    if isinstance(value, list):
        return ["other"]
    return {"other": 1} if isinstance(value, dict) else "other"


def translate(**given: Any) -> Translation:
    """Translate options whose names have "__" for "."."""
    options = {name.replace("__", "."): value for name, value in given.items()}
    return translate_verl(ForeignOptions(options, is_whole=False))


def values(translation: Translation) -> dict[str, Any]:
    return {line.key: line.value for line in translation.lines}


def decided(translation: Translation) -> set[str]:
    """Return the names of the options that are left to the user."""
    return {name for item in translation.decisions for name in item.source.split(", ")}


def told(translation: Translation) -> set[str]:
    """Return the names of all options that the translation accounts for."""
    lines = {name for line in translation.lines for name in line.sources}
    return lines | decided(translation) | {item.source for item in translation.unneeded}
