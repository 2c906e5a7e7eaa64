"""The nearest layout that fits: fits indeed, changes nothing without need, is told to the user."""

from typing import Any

import pytest

from mcore_rl.cli import main
from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.config.tree import with_settings
from mcore_rl.planning.memory import predict_memory
from mcore_rl.planning.peak_memory import RankMemory
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.planning.suggest import count_available, find_too_large
from mcore_rl.planning.verdict import judge_recipe

QWEN = "qwen3_30b_a3b_grpo_32"
GIB = 2**30


def test_processes_take_memory_of_their_own() -> None:
    config = with_settings(Config(), {"plan.gpu_memory_gib": 80.0, "plan.process_gib": 5.0})
    ranks = [
        RankMemory("trainer", "fits", "train step", {"weights": 70 * GIB}, num_processes=2),
        RankMemory("trainer", "does not", "train step", {"weights": 70 * GIB + 1}, 2),
    ]
    assert count_available(config.plan, ranks[0]) == 70 * GIB
    assert find_too_large(config.plan, ranks) == ranks[1:]


@pytest.mark.parametrize(
    "gpu_gib", [55, *(pytest.param(n, marks=pytest.mark.slow) for n in (40, 30))]
)
def test_the_nearest_layout_fits_and_nothing_changes_without_need(gpu_gib: int) -> None:
    config = load_recipe(QWEN, [f"plan.gpu_memory_gib={gpu_gib}"])
    verdict = judge_recipe(config)
    assert find_too_large(config.plan, verdict.ranks)
    settings = verdict.suggested
    assert settings
    changed = with_settings(config, settings)
    assert not find_too_large(changed.plan, predict_memory(PlannedRun.make(changed)))
    for key in settings.keys() - {"parallel.dp", "rollout.ep"}:  # which follow from the others
        fewer = {k: v for k, v in settings.items() if k != key}
        assert not _fits(config, fewer), f"{key} need not change"


@pytest.mark.parametrize(("response_len", "is_halved"), [(2048, True), (36_000, False)])
def test_half_a_micro_batch_comes_before_another_layout_if_it_holds_the_longest_sequence(
    response_len: int, is_halved: bool
) -> None:
    given = [f"rollout.max_response_len={response_len}", "rollout.kv_cache_len=65536"]
    large = ["train.max_tokens_per_microbatch=65536", "plan.gpu_memory_gib=68"]
    config = load_recipe(QWEN, [*given, *large, "train.recompute=full"])
    suggested = judge_recipe(config).suggested
    assert suggested is not None and _fits(config, dict(suggested))
    option = "train.max_tokens_per_microbatch"
    assert (suggested.keys() == {option}) == (option in suggested) == is_halved


@pytest.mark.parametrize(
    ("recipe", "given", "options"),
    [
        (
            "qwen3_next_80b_a3b_grpo_64",
            ["rollout.max_concurrency=2048"],
            {"rollout.max_concurrency"},
        ),
        pytest.param(
            *(QWEN, ["rollout.tp=1", "rollout.ep=1"], {"rollout.engines", "rollout.tp"}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_engine_on_the_trainers_gpus_takes_less_if_it_takes_most(
    recipe: str, given: list[str], options: set[str]
) -> None:
    shared = ["cluster.colocated=true", "cluster.offload=true", "rollout.restarts=0"]
    shared += ["rollout.stage_weights=false", "rollout.engines=4", "rollout.mode=sync"]
    config = load_recipe(recipe, [*shared, *given])
    verdict = judge_recipe(config)
    worst = max(find_too_large(config.plan, verdict.ranks), key=lambda rank: rank.num_bytes)
    assert worst.side == "trainer" and worst.largest.startswith("engine's")
    assert verdict.suggested is not None and verdict.suggested.keys() == options
    assert _fits(config, dict(verdict.suggested))


def _fits(config: Config, settings: dict[str, Any]) -> bool:
    try:
        changed = with_settings(config, settings)
    except ValueError:
        return False
    return not find_too_large(changed.plan, predict_memory(PlannedRun.make(changed)))


def test_what_does_not_fit_is_told_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"recipe={QWEN}", "plan.gpu_memory_gib=40"]) == 1
    out, error = capsys.readouterr()
    assert "does not fit: trainer ranks 0-15 are" in out
    assert "most is gradients" in out
    assert "The nearest layout that fits: " in out
    assert "does not fit its GPUs" in error
    assert main(["plan", f"recipe={QWEN}", "plan.gpu_memory_gib=6"]) == 1
    assert "No layout on up to eight times as many GPUs fits" in capsys.readouterr().out
