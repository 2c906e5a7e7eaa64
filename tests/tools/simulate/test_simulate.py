"""Whole simulations: the real controller on engines and ranks that only pass time."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.tools.simulate.costs import RecipeCosts
from mcore_rl.tools.simulate.prediction import make_checked
from mcore_rl.tools.simulate.simulate import SimulationResult, simulate
from mcore_rl.tools.simulate.virtual_time import ReachedShares

SMALL = ("rollout.prompts_per_step=16", "rollout.samples_per_prompt=4", "simulate.steps=4")
RECIPE = "qwen3_30b_a3b_grpo_32"


def run(*overrides: str, recipe: str = RECIPE) -> SimulationResult:
    config = make_checked(load_recipe(recipe, [*SMALL, *overrides]))
    return simulate(config, RecipeCosts.make(config, ReachedShares()))


@pytest.fixture(scope="module")
def in_turns() -> SimulationResult:
    return run("rollout.mode=sync")


def without_real_time(summary: Any) -> dict[str, Any]:
    real = ("events", "real_seconds", "controller_cpu_s_per_step", "controller_share")
    return {name: value for name, value in summary.items() if name not in real}


def test_a_simulation_repeats_itself(in_turns: SimulationResult) -> None:
    again = run("rollout.mode=sync")
    assert without_real_time(again.summary) == without_real_time(in_turns.summary)
    assert again.steps == in_turns.steps
    other = run("rollout.mode=sync", "run.seed=1")
    assert other.summary["seconds"] != in_turns.summary["seconds"]


def test_phases_add_up_to_the_step(in_turns: SimulationResult) -> None:
    assert list(in_turns.steps) == [1, 2, 3, 4]
    for metrics in in_turns.steps.values():
        phases = [v for k, v in metrics.items() if k.startswith("time/")]
        phases.append(metrics["recovery/keep_seconds"])
        step_s, saved_s = metrics["time/step"], metrics.get("time/checkpoint", 0.0)
        assert sum(phases) - step_s - saved_s == pytest.approx(step_s, rel=1e-3)
        assert metrics["staleness/max"] == 0
    json.dumps(in_turns.summary)


def test_no_engine_waits_for_the_trainer_when_sampling_goes_on_beside_it(
    in_turns: SimulationResult,
) -> None:
    beside = run("rollout.mode=async", "rollout.max_staleness=2", "simulate.steps=6")
    assert beside.summary["step_s"] < in_turns.summary["step_s"]
    assert 0 < beside.summary["staleness_mean"] <= 2
    for result in (in_turns, beside):
        assert result.summary["prompts_unaccounted"] == 0


def test_lost_engines_and_runs_cost_time_but_no_prompt(in_turns: SimulationResult) -> None:
    failing = run(
        "rollout.mode=sync",
        "run.recovery.partner=none",
        "simulate.mtbf_hours=0.6",
        "simulate.steps=40",
        "simulate.restart_s=60",
        "simulate.engine_restart_s=10",
        "rollout.restarts=3",
        "checkpoint.every_steps=2",
    ).summary
    assert failing["engines_lost"] > 0 and failing["runs_lost"] > 0
    assert failing["prompts_unaccounted"] == 0
    assert failing["steps"] == 40
    assert failing["seconds"] / 40 > in_turns.summary["seconds"] / 4


def test_lost_ranks_are_recovered_for_less_than_a_restart() -> None:
    settings = ("rollout.mode=sync", "simulate.mtbf_hours=1", "simulate.steps=60")
    often = ("rollout.restarts=1000", "rollout.retries=50", "run.recovery.restarts=1000")
    more = ("simulate.engine_restart_s=10", *often)
    summary = run(*settings, *more, "simulate.notice_s=0", "simulate.replace_s=20").summary
    without = run(*settings, *more, "run.recovery.partner=none", "checkpoint.every_steps=2").summary
    assert summary["recoveries"] > 2 and summary["runs_lost"] == 0
    assert without["recoveries"] == 0 and without["runs_lost"] > 2
    assert summary["seconds"] < without["seconds"]
    assert summary["steps"] == without["steps"] == 60
    assert summary["prompts_unaccounted"] == 0


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "async"])
def test_lost_machines_cost_their_samples_but_no_prompt(mode: str) -> None:
    summary = run(
        f"rollout.mode={mode}",
        "rollout.engines=16",
        "simulate.node_mtbf_hours=0.3",
        "simulate.steps=30",
        "simulate.restart_s=60",
        "checkpoint.every_steps=2",
    ).summary
    assert summary["nodes"] == 2 + 8
    assert summary["nodes_lost"] >= 2 and summary["engines_lost"] >= 2
    assert summary["samples_lost"] > 0
    assert summary["prompts_unaccounted"] == 0
    assert summary["steps"] == 30


@pytest.mark.slow
def test_engines_on_gpus_of_ranks_come_back_with_them() -> None:
    """Lost engines and machines end no attempt, as long as machines are spare."""
    summary = run(
        *("rollout.mode=sync", "rollout.stage_weights=false", "cluster.colocated=true"),
        *("cluster.offload=true", "rollout.restarts=0", "run.recovery.restarts=1000"),
        *("simulate.node_mtbf_hours=0.3", "simulate.spare_nodes=1000", "simulate.mtbf_hours=10"),
        *("simulate.engine_restart_s=10", "simulate.steps=30"),
    ).summary
    assert summary["nodes_lost"] >= 2 and summary["engines_lost"] >= 3
    assert summary["recoveries"] >= 2 and summary["runs_lost"] == 0
    assert summary["prompts_unaccounted"] == 0
    assert summary["steps"] == 30


@pytest.mark.slow
def test_a_run_that_can_never_save_gives_up_and_says_what_to_change() -> None:
    with pytest.raises(RuntimeError, match=r"lost 1000 times.*simulate\.mtbf_hours=0\.001"):
        run("simulate.mtbf_hours=0.001", "run.recovery.partner=none", "simulate.restart_s=1")


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("mixtral_8x7b_ppo_16", ()),
        ("mixtral_8x7b_ppo_16", ("critic.colocated=false",)),
        ("deepseek_v3_grpo_256", ()),
        ("glm_4_5_air_dapo_32", ()),
    ],
)
def test_other_recipes(recipe: str, overrides: Sequence[str]) -> None:
    summary = run(*overrides, recipe=recipe).summary
    assert summary["step_s"] > 0
    assert 0 < summary["trainer_busy"] < 1 and 0 < summary["engines_busy"] <= 1


@pytest.mark.slow
def test_slow_engines_and_long_rewards_slow_the_run(in_turns: SimulationResult) -> None:
    slow = run("rollout.mode=sync", "simulate.slow_share=0.25", "simulate.slowdown=3").summary
    assert slow["phases_s"]["rollout"] > 1.5 * in_turns.summary["phases_s"]["rollout"]
    judged = run("rollout.mode=sync", "simulate.reward_s=30").summary
    assert judged["phases_s"]["reward"] == pytest.approx(30, abs=1)


def test_all_ranks_wait_for_one_that_is_slow(in_turns: SimulationResult) -> None:
    settings = ("rollout.mode=sync", "simulate.slowdown=3")
    slow = run(*settings, "simulate.slow_ranks=0.0625").summary  # one of 16
    even = in_turns.summary["phases_s"]
    assert slow["phases_s"]["train"] == pytest.approx(3 * even["train"], rel=0.1)
    assert slow["phases_s"]["rollout"] == pytest.approx(even["rollout"])
    assert run(*settings, "simulate.slow_ranks=0.03").steps == in_turns.steps


def test_longer_responses_take_longer(in_turns: SimulationResult) -> None:
    even = run("rollout.mode=sync", "simulate.response_len=1000", "simulate.response_spread=0")
    assert even.steps[2]["rollout/response_len"] == 1000
    assert even.summary["step_s"] < in_turns.summary["step_s"]
