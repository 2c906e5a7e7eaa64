"""Each system is read and translated by its own rules."""

import pytest

from mcore_rl.tools.translate.command import NAMES
from mcore_rl.tools.translate.systems import SYSTEMS
from tests.tools.translate.accounts import values


def test_the_command_names_all_systems() -> None:
    assert tuple(SYSTEMS) == NAMES


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("verl", ["data.train_batch_size=48"]),
        ("slime", ["--rollout-batch-size", "48"]),
        ("nemo-rl", ["grpo.num_prompts_per_step=48"]),
    ],
)
def test_options_of_each_system_are_read_and_translated(name: str, arguments: list[str]) -> None:
    system = SYSTEMS[name]
    translation = system.translate(system.read(arguments))
    assert values(translation)["rollout.prompts_per_step"] == 48
