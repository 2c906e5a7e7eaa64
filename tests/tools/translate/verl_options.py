"""verl's options by version, and translations of them.

peers/verl_0_9_1_options.json   option -> default: of ppo_trainer and of ppo_megatron_trainer, and
                                those that both have; its source and license are in NOTICE, too
"""

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mcore_rl.tools.translate.hydra import flatten
from mcore_rl.tools.translate.translation import ForeignOptions, Translation
from mcore_rl.tools.translate.verl import translate_verl
from tests.agents.environments.foreign import VERL

KINDS = ("ppo_megatron_trainer", "ppo_trainer")
RECORDED = Path(__file__).with_name("peers") / "verl_0_9_1_options.json"


def defaults_of(kind: str) -> dict[str, Any]:
    """Return the options of verl 0.9.1 with their defaults, by dotted name."""
    held = json.loads(RECORDED.read_text())
    return flatten(held["both"]) | flatten(held[kind])


def former_defaults_of(kind: str) -> dict[str, Any]:
    """Return the options of the installed verl, 0.7.1, with their defaults, by dotted name."""
    path = VERL / "verl/trainer/config" / f"_generated_{kind}.yaml"
    tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True, throw_on_missing=False)
    assert isinstance(tree, dict)
    return flatten(tree)


def translate(**given: Any) -> Translation:
    """Translate options whose names have "__" for "."."""
    options = {name.replace("__", "."): value for name, value in given.items()}
    return translate_verl(ForeignOptions(options, is_whole=False))
