"""Each file of recipes/algorithm/ is the published algorithm of its name, for any recipe."""

import re
from pathlib import Path

import pytest

from mcore_rl.checks.algorithm import check_algorithm
from mcore_rl.cli import main
from mcore_rl.config import AlgorithmConfig
from mcore_rl.config.recipe import load_recipe
from mcore_rl.config.shipped import RECIPES_DIR
from mcore_rl.run.rehearsal import rehearse

RECIPE = "qwen3_30b_a3b_grpo_8"
NAMES = sorted(path.stem for path in (RECIPES_DIR / "algorithm").glob("*.yaml"))
OF_THIS_PAGE = {"grpo", "ppo", "dapo"}
"""The document gives these further options, for the problems that it compares algorithms on."""
PLANNED = {"gspo", "reinforce_plus_plus", "remax"}
"""A plan takes seconds; these differ in what a trainer holds and an engine draws."""
ROWS = {
    re.sub(r"\W+", "_", name.replace("++", "_plus_plus").replace(" with ", " ")).lower(): cell
    for name, cell in re.findall(
        r"^\| (.+?) \| `(algorithm\.[^`]+)` \|$", Path("docs/algorithms.md").read_text(), re.M
    )
}


def load_algorithm(*overrides: str) -> AlgorithmConfig:
    return load_recipe(RECIPE, list(overrides)).algorithm


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in PLANNED | OF_THIS_PAGE else pytest.mark.slow)
        for name in NAMES
    ],
)
def test_any_recipe_takes_an_algorithm(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"algorithm={name}", f"run.dir={tmp_path / 'run'}"]
    config = load_recipe(RECIPE, overrides)
    check_algorithm(config)
    small = rehearse(config).algorithm
    assert (small.advantage, small.loss) == (config.algorithm.advantage, config.algorithm.loss)
    if name in PLANNED:
        assert main(["plan", f"recipe={RECIPE}", *overrides]) == 0
        assert "GPUs: 8 on 1 host" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_THIS_PAGE])
def test_an_algorithm_has_the_options_of_the_document(name: str) -> None:
    options = ROWS[name].split()
    if "algorithm.correction.bypass=true" in options:
        options.append("algorithm.correction.weight=none")
    assert load_algorithm(f"algorithm={name}") == load_algorithm(*options)
