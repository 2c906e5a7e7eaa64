"""Calibration by a run, here one that a simulation with other speeds stands for."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.config.secrets import dump_config
from mcore_rl.tools.simulate.calibration import Calibration, _read_config
from mcore_rl.tools.simulate.costs import RecipeCosts
from mcore_rl.tools.simulate.prediction import make_checked
from mcore_rl.tools.simulate.simulate import simulate
from mcore_rl.tools.simulate.virtual_time import ReachedShares

SMALL = ("rollout.prompts_per_step=16", "rollout.samples_per_prompt=4", "checkpoint.every_steps=0")


def recipe(*overrides: str) -> Config:
    return make_checked(load_recipe("qwen3_30b_a3b_grpo_32", [*SMALL, *overrides]))


def costs_of(config: Config) -> RecipeCosts:
    return RecipeCosts.make(config, ReachedShares())


def measure(run_dir: Path, config: Config) -> Calibration:
    return Calibration.measure(run_dir, config.plan, config.simulate)


def slower(costs: RecipeCosts) -> RecipeCosts:
    """Costs of a cluster on which sampling takes twice, training three times as long."""
    return replace(
        costs,
        engine=costs.engine.slow_down(2),
        trainer=replace(costs.trainer, factor=3.0),
        sync_s=costs.sync_s * 5,
        swap_s=costs.swap_s * 5,
        read_back_s=costs.read_back_s * 5,
        parity_check_s=costs.parity_check_s * 5,
        other_s=7.0,
    )


def measured_run(folder: Path, config: Config) -> Mapping[int, Mapping[str, float]]:
    """Write what a run on that cluster would have logged."""
    steps = simulate(config, slower(costs_of(config))).steps
    rows = [{"step": step, **metrics} for step, metrics in steps.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    OmegaConf.save(OmegaConf.create(dump_config(config)), folder / "config.yaml")
    return steps


def test_a_calibration_finds_how_much_slower_a_run_was(tmp_path: Path) -> None:
    lens = ("simulate.response_len=2000", "simulate.response_spread=0.4")
    config = recipe("rollout.mode=sync", "simulate.steps=2", *lens)
    steps = measured_run(tmp_path, config)
    found = measure(tmp_path, config)
    assert found.train == pytest.approx(3, rel=0.1)
    assert found.sync == pytest.approx(5, rel=0.01)
    assert found.rollout == pytest.approx(2, rel=0.25), "lengths are those of one step's extremes"
    assert found.other_s == pytest.approx(7, abs=0.1)
    assert found.prompt_len == 256, "what a simulation assumes"
    assert found.response_len == steps[2]["rollout/response_len"]
    assert found.response_spread == pytest.approx(0.4, abs=0.15)


@pytest.mark.slow
def test_predictions_of_another_mode_and_batch_are_near(tmp_path: Path) -> None:
    lens = ("simulate.response_len=2000", "simulate.response_spread=0.4")
    measured_run(tmp_path, recipe("rollout.mode=sync", "simulate.steps=2", *lens))
    other = recipe("rollout.mode=one_step_off", "rollout.prompts_per_step=24", *lens)
    truth = simulate(other, slower(costs_of(other))).summary
    calibration = measure(tmp_path, other)
    simulated, costs = calibration.apply(other.simulate, costs_of(other))
    predicted = simulate(replace(other, simulate=simulated), costs).summary
    assert predicted["step_s"] == pytest.approx(truth["step_s"], rel=0.2)


@pytest.mark.slow
def test_lengths_that_the_user_gives_stay(tmp_path: Path) -> None:
    measured_run(tmp_path, recipe("rollout.mode=sync", "simulate.steps=2"))
    given = recipe("simulate.response_len=123")
    simulated, _ = measure(tmp_path, given).apply(given.simulate, costs_of(given))
    assert simulated.response_len == 123
    free = recipe()
    simulated, _ = measure(tmp_path, free).apply(free.simulate, costs_of(free))
    assert simulated.response_len > 2000


@pytest.mark.slow
def test_lengths_before_the_cut_are_found_where_many_were_cut(tmp_path: Path) -> None:
    cut = ("rollout.max_response_len=500", "simulate.prompt_share=0", "simulate.prompt_len=100")
    lens = ("simulate.response_len=900", "simulate.response_spread=0.9")
    config = recipe("rollout.mode=sync", "simulate.steps=2", *cut, *lens)
    steps = measured_run(tmp_path, config)
    assert steps[2]["rollout/truncated_share"] > 0.4
    found = measure(tmp_path, config)
    assert found.prompt_len == 100
    assert found.response_len == pytest.approx(900, rel=0.4)
    assert found.response_spread == pytest.approx(0.9, rel=0.3)


def test_runs_that_tell_nothing_are_refused(tmp_path: Path) -> None:
    config = recipe("rollout.mode=async", "simulate.steps=2")
    with pytest.raises(ValueError, match=r"calibration=.*: no config\.yaml there"):
        measure(tmp_path, config)
    measured_run(tmp_path, config)
    with pytest.raises(ValueError, match=r"mode=async, whose phases overlap; give one with"):
        measure(tmp_path, config)


def test_a_run_of_an_older_version_is_read_with_its_name_of_the_parity_check(
    tmp_path: Path,
) -> None:
    written = dump_config(recipe("rollout.mode=sync", "parity_check.sequences=3"))
    written["canary"] = written.pop("parity_check")
    OmegaConf.save(OmegaConf.create(written), tmp_path / "config.yaml")
    assert _read_config(tmp_path).parity_check.sequences == 3
