"""The arguments of `mcore-rl agent run`."""

import argparse
from pathlib import Path

import pytest

from mcore_rl.run.command_arguments import add_agent_arguments


def test_settings_and_flags_are_taken(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_agent_arguments(parser)
    settings = ["recipe=tiny_moe_grpo", f"model.path={tmp_path}", "--greedy"]
    args = parser.parse_args(["run", *settings])
    assert (args.episodes, args.greedy) == (2, True)
    with pytest.raises(ValueError, match=r"agents\.environment is not set"):
        args.run(args)
    none = parser.parse_args(["run", "recipe=x", "--episodes", "0"])
    with pytest.raises(ValueError, match="--episodes 0: at least 1"):
        none.run(none)
