"""Every choice that the document names is one, and every one there is, is named."""

import re
from pathlib import Path

import pytest

from mcore_rl.algo.aggregation import AGGREGATIONS
from mcore_rl.algo.estimator import Advantages
from mcore_rl.algo.kl import KL_ESTIMATORS
from mcore_rl.algo.lookup import advantages, losses
from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.algo.preferences import PAIR_LOSSES
from mcore_rl.config.recipe import load_recipe

DOCUMENT = Path("docs/algorithms.md").read_text()
ROWS = [
    row for row in re.findall(r"^\| (.+?) \| (.+) \|$", DOCUMENT, re.MULTILINE) if "=" in row[1]
]


def overrides_of(cell: str) -> list[list[str]]:
    """The options in each pair of backticks that sets any; the table's head may name what they
    begin with.
    """
    options = [code.split() for code in re.findall(r"`([^`]+)`", cell) if "=" in code]
    heads = re.findall(r"options, after `(.+?)`", DOCUMENT[: DOCUMENT.index(cell)])
    return [[o if "." in o.split("=")[0] else f"{heads[-1]}{o}" for o in each] for each in options]


@pytest.mark.parametrize(("name", "cell"), ROWS, ids=[name for name, _ in ROWS])
def test_the_options_of_each_algorithm_make_one(name: str, cell: str) -> None:
    assert overrides_of(cell)
    for overrides in overrides_of(cell):
        config = load_recipe("tiny_moe_grpo", overrides)
        Advantages(config.algorithm, config.reward.part_weights)
        make_policy_loss(config.algorithm)


@pytest.mark.parametrize(
    "registry",
    [advantages, losses, AGGREGATIONS, KL_ESTIMATORS, PAIR_LOSSES],
    ids=lambda r: r.option,
)
def test_every_choice_is_named(registry) -> None:
    missing = [
        name
        for name in registry.names
        if not re.search(rf"(`|loss=){name.removesuffix('+')}\b", DOCUMENT)
    ]
    assert not missing
