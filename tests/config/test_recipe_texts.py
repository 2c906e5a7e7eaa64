"""A text of a recipe file reaches the tree as it stands there, or is refused with a remedy."""

from pathlib import Path

import pytest

from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.config.recipe_texts import check_texts
from mcore_rl.config.shipped import RECIPES_DIR


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(f"# mine\ndefaults: [tiny_moe_grpo, _self_]\n{text}\n")
    return path


@pytest.mark.parametrize("text", ["1e5", "true", "off", "007", "1.10", "0x10", "1_000", "12:30"])
def test_a_text_that_yaml_changes_is_refused_with_the_quoted_form(
    tmp_path: Path, text: str
) -> None:
    path = write(tmp_path, f"run:\n  dir: {text}")
    with pytest.raises(ValueError, match=rf'run.dir: YAML reads {text} as .*: dir: "{text}"$'):
        load_recipe(str(path), [])
    quoted = write(tmp_path, f'run:\n  dir: "{text}"')
    assert load_recipe(str(quoted), []).run.dir == text


@pytest.mark.parametrize("text", ["7", "1.5", "2026-01-01", "é (copy)", "a=b", "-1"])
def test_what_yaml_does_not_change_is_taken(tmp_path: Path, text: str) -> None:
    assert load_recipe(str(write(tmp_path, f"run: {{dir: {text}}}")), []).run.dir == text


def test_elements_of_lists_are_checked_and_numbers_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.train: YAML reads 1e5 as 100000.0"):
        check_texts(write(tmp_path, "data: {train: [a.jsonl, 1e5]}"), Config)
    check_texts(write(tmp_path, "run: {steps: 0x10}\ntrain: {optimizer: {lr: 1e-3}}"), Config)
    check_texts(write(tmp_path, "log: {wandb_project: null}"), Config)


def test_shipped_recipes_need_no_quotes() -> None:
    for path in RECIPES_DIR.glob("*.yaml"):
        check_texts(path, Config)
