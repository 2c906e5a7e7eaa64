"""The arguments of `mcore-rl agent run`."""

import argparse

import pytest

from mcore_rl.config import Config
from mcore_rl.run.command_arguments import add_agent_arguments


def test_settings_and_flags_are_taken() -> None:
    asked = []

    def load(settings: object, command: str) -> Config:
        asked.append((settings, command))
        return Config()

    parser = argparse.ArgumentParser()
    add_agent_arguments(parser, load)
    args = parser.parse_args(["run", "recipe=tiny_agent_calculator", "a=b", "--greedy"])
    assert (args.episodes, args.greedy) == (2, True)
    with pytest.raises(ValueError, match=r"agents\.environment is not set"):
        args.run(args)
    assert asked == [(["recipe=tiny_agent_calculator", "a=b"], "train")]
    none = parser.parse_args(["run", "recipe=x", "--episodes", "0"])
    with pytest.raises(ValueError, match="--episodes 0: at least 1"):
        none.run(none)
