"""The Python API has the names that docs/python_api.md promises, and no others."""

import re
from pathlib import Path

from mcore_rl import api
from mcore_rl.config.recipe import load_recipe
from tests.support.policy import read


def test_the_document_names_every_name_of_the_api() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", read(Path("docs/python_api.md")), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)", row)]
    assert sorted(named) == sorted(api.__all__)
    assert all(hasattr(api, name) for name in api.__all__)


def test_options_of_a_step_come_from_the_recipe() -> None:
    config = load_recipe("tiny_moe_grpo", ["rollout.prompts_per_step=8"])
    sampling, training = api.make_step_options(config)
    assert sampling.rollout.prompts_per_step == 8
    assert isinstance(training, api.StepOptions)
