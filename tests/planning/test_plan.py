"""`mcore-rl plan` prints the same plan as tables and as JSON, or an error by name."""

import json

import pytest

from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.plan import print_plan

QWEN = "qwen3_30b_a3b_grpo_8"


def test_a_plan_is_the_same_in_tables_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_recipe(QWEN, [])
    assert print_plan(config)
    text = capsys.readouterr().out
    assert print_plan(config, as_json=True)
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    lines = text.splitlines()
    for sentence in (*plan["explained"], plan["verdict"]):
        assert sentence in lines, "each sentence is one line, however long"
    assert plan["memory"]
    for rank in plan["memory"]:
        assert rank["bytes"] == pytest.approx(sum(rank["uses"].values()), abs=len(rank["uses"]))


def test_a_plan_that_does_not_fit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_recipe("moonlight_16b_a3b_grpo_8", ["plan.gpu_memory_gib=50"])
    assert not print_plan(config, as_json=True)
    plan = json.loads(capsys.readouterr().out)
    assert not plan["fits"]
    assert plan["verdict"].startswith("does not fit: ")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.path=''"], "model.path is not set"),
        (["algorithm.loss=gsp"], "algorithm.loss='gsp'"),
        (["parallel.pp=5"], "=5 does not divide num_hidden_layers=48"),
        (["rollout.tp=3", "rollout.ep=1", "rollout.engines=2"], "rollout.tp=3 does not divide"),
    ],
)
def test_nothing_is_printed_of_a_recipe_that_cannot_run(
    overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        print_plan(load_recipe(QWEN, overrides))
    assert capsys.readouterr().out == ""


def test_the_default_configuration_lacks_a_model() -> None:
    with pytest.raises(ValueError, match=r"^model.path is not set"):
        print_plan(Config())
