"""`mcore-rl simulate --effective`: replays agree with whole simulations, and what is refused."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from mcore_rl.cli import main
from mcore_rl.config import Config, PlanConfig, SimulateConfig
from mcore_rl.config.recipe import load_recipe
from mcore_rl.tools.simulate.costs import RecipeCosts
from mcore_rl.tools.simulate.effective_time import predict_effective_time
from mcore_rl.tools.simulate.fault_replay import EffectiveTime, replay
from mcore_rl.tools.simulate.prediction import make_checked
from mcore_rl.tools.simulate.recovery_costs import CheckpointCosts, RecoveryCosts
from mcore_rl.tools.simulate.simulate import simulate
from mcore_rl.tools.simulate.virtual_time import ReachedShares

RECIPE = "qwen3_30b_a3b_grpo_32"
SMALL = ("rollout.prompts_per_step=16", "rollout.samples_per_prompt=4")
FAILING = (
    "simulate.mtbf_hours=2",
    "simulate.steps=100",
    "simulate.notice_s=0",
    "simulate.restart_s=60",
    "simulate.engine_restart_s=10",
    "rollout.restarts=1000",
    "rollout.retries=50",
    "run.recovery.restarts=1000",
    "checkpoint.every_steps=4",
)


def make(*overrides: str) -> tuple[Config, RecipeCosts]:
    config = make_checked(load_recipe(RECIPE, [*SMALL, *overrides]))
    return config, RecipeCosts.make(config, ReachedShares())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "partner"),
    [
        ("sync", "memory"),
        ("one_step_off", "memory"),
        ("one_step_off", "none"),
    ],
)
def test_losses_cost_what_the_real_controller_loses_to_them(mode: str, partner: str) -> None:
    """Beside replays of as many steps, by what each kind of loss costs there in the mean."""
    config, costs = make(*FAILING, f"rollout.mode={mode}", f"run.recovery.partner={partner}")
    faults = predict_effective_time(config, costs).costs
    num_steps, step = config.simulate.steps, faults.step
    summary = simulate(config, costs).summary
    num_ranks = summary["recoveries"] + summary["runs_lost"]
    num_engines = summary["engines_lost"]
    ways = [replay(faults, num_steps, seed, recovers=partner == "memory") for seed in range(200)]
    expected_s = num_ranks * mean_s(ways, "ranks lost", RANK_CAUSES)
    expected_s += num_engines * mean_s(ways, "engines lost", ["engines"])
    expected_s += fmean(sum(lost_s(way, what) for what in ("saves", "copies")) for way in ways)
    extra_s = summary["seconds"] - num_steps * step.step_s - step.refill_s
    assert num_ranks >= 4 and num_engines >= 4
    assert expected_s > 300
    assert extra_s == pytest.approx(expected_s, rel=0.3)


RANK_CAUSES = ["recoveries", "work done again", "restarts"]


def lost_s(way: EffectiveTime, what: str) -> float:
    return way.shares.get(what, 0.0) * way.hours * 3600


def mean_s(ways: Sequence[EffectiveTime], kind: str, causes: Sequence[str]) -> float:
    """Return the seconds that a loss of a kind costs."""
    total_s = sum(lost_s(way, what) for way in ways for what in causes)
    return total_s / sum(way.counts[kind] for way in ways)


@pytest.mark.slow
def test_costs_of_failures_change_nothing_without_them() -> None:
    names = ("seconds", "step_s", "phases_s", "engines_busy", "trainer_busy")
    other = ("notice_s=99", "replace_s=99", "restart_s=99", "engine_restart_s=99", "storage_gbps=1")
    found = []
    for options in ((), [f"simulate.{option}" for option in other]):
        config, costs = make("simulate.steps=3", *options)
        summary = simulate(config, costs).summary
        found.append({name: summary[name] for name in names})
    assert found[0] == found[1]


@pytest.mark.slow
def test_one_slow_rank_slows_all_and_costs_effective_time() -> None:
    config, costs = make("rollout.mode=sync", "simulate.slowdown=3", "simulate.mtbf_hours=1e9")
    slow = replace(config.simulate, slow_ranks=1 / 16)
    few = replace(config.simulate, slow_ranks=1 / 64)  # a quarter of a rank of 16
    found = [
        predict_effective_time(replace(config, simulate=simulated), costs)
        for simulated in (config.simulate, few, slow)
    ]
    even, none, one = (report.costs.step for report in found)
    assert none == even
    assert one.work_s == pytest.approx(3 * even.work_s, rel=0.01)
    assert one.ideal_s == even.ideal_s
    share = found[2].partner_memory.shares["slow ranks and engines"]
    assert share == pytest.approx(1 - found[2].partner_memory.effective, abs=0.05)
    assert share > 0.1 and found[0].partner_memory.shares["slow ranks and engines"] == 0


@pytest.mark.slow
def test_recoveries_and_checkpoints_grow_with_bytes_and_shrink_with_speed() -> None:
    simulated, plan = SimulateConfig(), PlanConfig()
    small, large = (RecoveryCosts.make(b, simulated, plan, 0.7) for b in (1e9, 10e9))
    assert large.keep_s == pytest.approx(10 * small.keep_s)
    assert large.load_s == pytest.approx(10 * small.load_s)
    assert large.recovery_s - large.load_s == simulated.notice_s + simulated.replace_s
    fast = RecoveryCosts.make(10e9, simulated, replace(plan, link_gbps=800.0), 0.7)
    assert fast.mirror_s == pytest.approx(large.mirror_s / 2) and fast.keep_s == large.keep_s
    config, costs = make("simulate.storage_gbps=80", "checkpoint.asynchronous=false")
    at_once = CheckpointCosts.predict(config, costs)
    beside = CheckpointCosts.predict(*make("simulate.storage_gbps=40"))
    assert beside.load_s == beside.write_s == pytest.approx(2 * at_once.load_s)
    assert at_once.write_s == 0.0 and at_once.save_s == beside.save_s + at_once.load_s


def test_a_table_and_numbers_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["simulate", f"recipe={RECIPE}", *SMALL, "simulate.steps=3"]
    failing = [*command, "simulate.mtbf_hours=50", "--effective", f"--out={tmp_path}"]
    assert main(failing) == 0
    printed = capsys.readouterr().out
    assert "effective time" in printed and "a recovery takes" in printed
    written = json.loads((tmp_path / "effective_time.json").read_text())
    assert written["gpus"] == 32
    assert 0.9 < written["partner_memory"]["effective"] < 1
    assert written["partner_memory"]["counts"]["recoveries"] > 0
    assert main([*failing, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == written
    never = [*command, "simulate.mtbf_hours=0.05", "--effective", f"--out={tmp_path}"]
    assert main(never) == 0
    printed = capsys.readouterr().out
    assert re.search(r"with restarts, no step ended after step \d+ in 1,000 losses", printed)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((), r"simulate\.mtbf_hours=0: --effective needs"),
        (
            ("simulate.mtbf_hours=9", "simulate.node_mtbf_hours=7"),
            r"simulate\.node_mtbf_hours=7: --effective draws failures of GPUs alone",
        ),
    ],
)
def test_rates_that_say_nothing_are_refused(
    settings: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", f"recipe={RECIPE}", *settings, "--effective"]) == 2
    assert re.search(message, capsys.readouterr().err)
