"""A command refuses a folder that another run uses, before it starts a process."""

from pathlib import Path

import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.run.commands import _run
from mcore_rl.run_folder import RunFolder
from mcore_rl.slices.hf.facts import ModelFacts


@pytest.mark.parametrize(
    ("command", "subfolder"), [("train", "."), ("sft", "."), ("eval", "eval"), ("pairs", "pairs")]
)
def test_a_folder_in_use_is_refused(command: str, subfolder: str, tmp_path: Path) -> None:
    config = load_recipe("qwen3_30b_a3b_grpo_8", [f"run.dir={tmp_path}"])
    policy = ModelFacts.read(config.model.path)
    folder = tmp_path / subfolder
    with (
        RunFolder(folder).locked(),
        pytest.raises(ValueError, match=rf"^the run folder {folder} is in use by process \d+ on "),
        _run(config, policy, command),
    ):
        raise AssertionError("the command began")
    assert sorted(path.name for path in folder.iterdir()) == ["run.lock"], "something was written"
