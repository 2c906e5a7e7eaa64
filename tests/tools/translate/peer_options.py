"""Options of slime and of NeMo-RL by version, listed from their definitions, and real examples.

peers/slime_0_3_1_options.json      option -> a value that is not its default: slime's own, and
                                    Megatron's training script's at the commit that slime pins
peers/slime_0_3_1_examples.json     script -> the command line that it runs
peers/nemo_rl_0_7_0_options.json    option -> default: of the configurations of GRPO and of PPO, and
                                    further ones of other examples and of the declared types
peers/nemo_rl_0_7_0_examples.json   configuration -> what it changes in that of GRPO

Each file begins with its source and license, which NOTICE names, too.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.tools.translate.nemo_rl import translate_nemo_rl
from mcore_rl.tools.translate.slime import translate_slime
from mcore_rl.tools.translate.translation import ForeignOptions, Translation

PEERS = Path(__file__).with_name("peers")


def _read(name: str) -> dict[str, Any]:
    """Return what a file holds besides the line that says where it comes from."""
    held = json.loads((PEERS / name).read_text())
    del held["source"]
    return held


SLIME: dict[str, dict[str, Any]] = _read("slime_0_3_1_options.json")
SCRIPTS: dict[str, list[str]] = _read("slime_0_3_1_examples.json")
NEMO: dict[str, dict[str, Any]] = _read("nemo_rl_0_7_0_options.json")
CONFIGS: dict[str, dict[str, Any]] = _read("nemo_rl_0_7_0_examples.json")


NUM_QUICK = 4
"""Examples of each peer that `make test` translates."""


def by_lane(examples: Iterable[str]) -> list[Any]:
    """Return the parameters of a test of every example; most are left to the night."""
    names = enumerate(examples)
    return [
        pytest.param(name, marks=[pytest.mark.slow] * (number >= NUM_QUICK))
        for number, name in names
    ]


def slime(program: str = "train.py", /, **given: Any) -> Translation:
    """Translate options of slime, whose names have "_" for "-" here."""
    options = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    return translate_slime(ForeignOptions(options, is_whole=False, config_name=program))


def nemo(**given: Any) -> Translation:
    """Translate options of NeMo-RL, whose names have "__" for "."."""
    options = {name.replace("__", "."): value for name, value in given.items()}
    return translate_nemo_rl(ForeignOptions(options, is_whole=False))


def whole_nemo(name: str) -> ForeignOptions:
    """Return all options of one of NeMo-RL's examples."""
    return ForeignOptions({**NEMO["grpo"], **CONFIGS[name]}, is_whole=True)
