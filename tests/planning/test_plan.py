"""`mcore-rl plan` prints the same plan as tables and as JSON, or an error by name."""

import json

import pytest

from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.plan import PlanOutput, print_plan

QWEN = "qwen3_30b_a3b_grpo_8"


def test_a_plan_is_the_same_in_tables_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_recipe(QWEN, [])
    assert print_plan(config)
    text = capsys.readouterr().out
    assert print_plan(config, PlanOutput(as_json=True))
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    lines = text.splitlines()
    for sentence in (*plan["explained"], plan["verdict"]):
        assert sentence in lines, "each sentence is one line, however long"
    assert plan["memory"]
    for rank in plan["memory"]:
        assert rank["bytes"] == pytest.approx(sum(rank["uses"].values()), abs=len(rank["uses"]))


def test_a_plan_begins_with_its_verdict_and_its_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_recipe("qwen3_30b_a3b_grpo_32", ["parallel.tp=4"])
    assert print_plan(config, PlanOutput(base_gpus=32, missing=["data.train: no file"]))
    first, second, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("fits: trainer ranks 0-31 are the fullest, ")
    assert second == "GPUs: 48 on 6 hosts (the recipe it starts from: 32)"
    assert others[-2:] == ["Here, `mcore-rl train` would refuse this:", "  data.train: no file"]
    assert not any("weight sync at" in line for line in others)


def test_details_are_tables_behind_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(load_recipe(QWEN, []), PlanOutput(detail=True))
    text = capsys.readouterr().out
    for title in (
        "memory of each rank of 80 GiB",
        "8 trainer ranks to 8 engine ranks",
        "one weight",
    ):
        assert text.index("Layout: ") < text.index(title)


def test_a_plan_that_does_not_fit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_recipe("moonlight_16b_a3b_grpo_8", ["plan.gpu_memory_gib=50"])
    assert not print_plan(config, PlanOutput(as_json=True))
    plan = json.loads(capsys.readouterr().out)
    assert not plan["fits"]
    assert plan["verdict"].startswith("does not fit: ")


@pytest.mark.parametrize(
    ("gib", "said"), [(80, "this fits: trainer ranks"), (50, "this does not fit: trainer ranks")]
)
def test_a_plan_tells_of_the_smallest_layout_after_a_loss(
    gib: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["parallel.dp=16", "cluster.gpus=null", "run.recovery.min_dp=9"]
    config = load_recipe("moonlight_16b_a3b_grpo_8", [f"plan.gpu_memory_gib={gib}", *more])
    print_plan(config)
    text = " ".join(capsys.readouterr().out.split())
    assert "min_dp=9, a run that lost nodes may go on with parallel.dp=" in text
    assert said in text


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
