"""Paths in shipped recipes lead to the package's files from any working directory."""

from pathlib import Path

import pytest

from mcore_rl.config.shipped import HOME, RECIPES_DIR, shipped_path

MODEL = "recipes/model/deepseek_v3"


def test_the_recipes_are_there() -> None:
    assert (RECIPES_DIR / "tiny_moe_grpo.yaml").is_file()


def test_a_shipped_path_leads_to_the_package_unless_there_is_one_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped_path(MODEL) == str(HOME / MODEL)
    (tmp_path / MODEL).mkdir(parents=True)
    assert shipped_path(MODEL) == MODEL


@pytest.mark.parametrize("path", ["", "/models/a", "Qwen/Qwen3-30B-A3B", "recipes/model/nowhere"])
def test_other_paths_stay_as_they_are(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert shipped_path(path) == path
