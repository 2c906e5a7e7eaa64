"""Splits of GPUs between trainer and engines."""

import json

import pytest

from mcore_rl.cli import main
from mcore_rl.config.recipe import load_recipe
from mcore_rl.tools.simulate.prediction import SimulatedSplit, make_checked, search

SMALL = ["rollout.prompts_per_step=8", "rollout.samples_per_prompt=4", "simulate.steps=2"]


def splits_of(recipe: str, num_gpus: int, *overrides: str) -> tuple[list[SimulatedSplit], int]:
    config = make_checked(load_recipe(recipe, [*SMALL, *overrides]))
    return search(config, num_gpus)


@pytest.mark.slow
def test_splits_use_all_gpus_and_the_fastest_comes_first() -> None:
    splits, num_refused = splits_of("qwen3_30b_a3b_grpo_32", 32)
    assert num_refused > 0, "two ranks of a trainer do not hold the model"
    assert [s.step_s for s in splits] == sorted(s.step_s for s in splits)
    for split in splits:
        assert split.num_trainer_gpus + split.num_engine_gpus == 32
        assert split.num_trainer_gpus == 2 * split.settings["parallel.dp"]
    assert len({split.settings["rollout.tp"] for split in splits}) > 1


@pytest.mark.slow
def test_on_shared_gpus_both_have_all() -> None:
    splits, _ = splits_of("qwen3_30b_a3b_grpo_8", 16)
    assert {(s.num_trainer_gpus, s.num_engine_gpus) for s in splits} == {(16, 16)}


def test_too_few_gpus_are_an_error_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ["simulate", "recipe=qwen3_235b_a22b_grpo_64_64", *SMALL]
    assert main([*recipe, "--search", "16"]) == 2
    assert "splits of 16 GPUs fits: give more GPUs" in capsys.readouterr().err


def test_a_search_is_printed_as_a_table_or_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ["simulate", "recipe=qwen3_30b_a3b_grpo_32", *SMALL]
    assert main([*recipe, "--search"]) == 0
    assert "seconds of a step" in capsys.readouterr().out
    few = ("parallel.ep=4", "train.recompute=full", "plan.gpu_memory_gib=200")
    assert main([*recipe, *few, "--search", "8", "--json"]) == 0
    assert {"settings", "step_s"} < set(json.loads(capsys.readouterr().out)[0])
