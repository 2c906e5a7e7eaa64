"""Which checkpoint a run continues from when the newest is damaged."""

import os
from pathlib import Path
from typing import Any, cast

import pytest

from mcore_rl.config import Config, RunConfig
from mcore_rl.config.recipe import load_recipe
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.run.startup import choose_checkpoint, find_damaged_file
from tests.support.checkpoint_folders import flip_byte, write_checkpoint


def make_folder(root: Path, steps: tuple[int, ...], has_critic: bool = False) -> RunFolder:
    folder = RunFolder(root, has_critic=has_critic)
    for step in steps:
        for part in folder.list_parts(step):
            write_checkpoint(part)
    return folder


def test_the_newest_is_taken_as_it_is_unless_a_whole_one_is_asked_for(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, (1, 2))
    flip_byte(folder.checkpoint(2) / "__0_0.distcp")
    assert choose_checkpoint(folder, folder.newest_checkpoint(), True) == folder.checkpoint(2)
    assert choose_checkpoint(folder, None, "newest_whole") is None


def test_the_newest_whole_one_is_taken_and_damaged_ones_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, (1, 2, 3, 4))
    flip_byte(folder.checkpoint(4) / "__0_0.distcp")
    (folder.checkpoint(3) / "common.pt").write_text("cut")
    chosen = choose_checkpoint(folder, folder.newest_checkpoint(), "newest_whole")
    assert chosen == folder.checkpoint(2) == folder.newest_checkpoint()
    first, second = capsys.readouterr().out.splitlines()
    assert f"{folder.checkpoint(4)}/__0_0.distcp: bytes 0 to 700 do not agree" in first
    assert f"{folder.checkpoint(3)}/common.pt has 3 bytes" in second
    assert second.endswith("now ends in .damaged; the run continues from step 2")
    names = sorted(path.name for path in folder.checkpoints.iterdir())
    assert names == ["step_000001", "step_000002", "step_000003.damaged", "step_000004.damaged"]


@pytest.mark.parametrize("damage", ["missing", "cut", "unlisted"])
def test_without_reading_files_that_are_missing_or_of_other_sizes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    folder = make_folder(tmp_path, (1, 2))
    part = folder.checkpoint(2)
    if damage == "missing":
        (part / "common.pt").unlink()
    elif damage == "cut":
        os.truncate(part / "__0_0.distcp", 10)
    else:
        (part / "other.pt").touch()
    assert choose_checkpoint(folder, part, True) == folder.checkpoint(1)
    said = capsys.readouterr().out
    assert str(part) in said and "the run continues from step 1" in said
    assert folder.complete_steps() == [1]
    (folder.checkpoint(1) / "common.pt").unlink()
    newest = folder.newest_checkpoint()
    assert choose_checkpoint(folder, newest, True) == newest, "the ranks refuse it"


def test_a_damaged_critic_spoils_the_checkpoint_of_its_step(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, (1, 2), has_critic=True)
    flip_byte(folder.critic_checkpoint(2) / "common.pt")
    chosen = choose_checkpoint(folder, folder.newest_checkpoint(), "newest_whole")
    assert chosen == folder.checkpoint(1)
    assert not folder.checkpoint(2).exists() and not folder.critic_checkpoint(2).exists()


def test_without_a_whole_one_nothing_is_moved(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, (1, 2))
    for step in (1, 2):
        flip_byte(folder.checkpoint(step) / "common.pt")
    message = r"no checkpoint in .* is whole: .*step_000002/common.pt.*step_000001/common.pt"
    with pytest.raises(ValueError, match=message):
        choose_checkpoint(folder, folder.newest_checkpoint(), "newest_whole")
    assert folder.newest_checkpoint() == folder.checkpoint(2)


def test_a_checkpoint_without_checksums_proves_nothing(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step_000001")
    assert find_damaged_file(folder) == ""
    (folder / "checksums.json").unlink()
    assert "nothing proves that it is whole" in find_damaged_file(folder)


@pytest.mark.parametrize(
    ("given", "read"), [("true", True), ("false", False), ("newest_whole", "newest_whole")]
)
def test_the_option_is_taken_from_the_command_line(given: str, read: bool | str) -> None:
    resume = load_recipe("tiny_moe_grpo", [f"run.resume={given}"]).run.resume
    assert resume == read and type(resume) is type(read)


def test_another_value_is_refused() -> None:
    assert Config().run.resume is True
    with pytest.raises(ValueError, match=r"run.resume='newest': expected one of .*'newest_whole'"):
        RunConfig(resume=cast(Any, "newest"))
