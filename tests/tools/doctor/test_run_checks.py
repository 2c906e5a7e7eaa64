"""The runs of the GPU checks: settings of the command line come last, and metrics can fail them."""

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config.recipe import load_recipe
from mcore_rl.tools.doctor import run_checks
from mcore_rl.tools.doctor.check import MissedTargetError, SkipCheckError
from mcore_rl.tools.doctor.warm_start import prepare


def step(number: int, **changes: float) -> dict[str, Any]:
    parts = {f"time/{part}": 0.1 * number for part in ("rollout", "train", "sync")}
    differences = {"logprob_diff/mean": 1e-7, "logprob_diff/token_max": 1e-6}
    reward = {"reward/mean": 0.1 * number}
    own = {"timestamp": 100.0 + number, "time/step": number}
    return {**own, **parts, **differences, **reward, **changes}


STEPS = [step(number) for number in range(1, run_checks.STEPS + 1)]


def test_the_figures_are_medians_of_all_steps_but_the_first() -> None:
    rows = [{"timestamp": 99.0, "eval/accuracy": 0.5}, *STEPS]
    assert run_checks.figures(rows, began_s=90.0, num_steps=6) == {
        "reward_first": 0.2,
        "reward_last": 0.5,
        "first_step_done_s": 11.0,
        "logprob_diff": 1e-7,
        "logprob_diff_largest": 1e-6,
        "step_s": 4,
        "rollout_s": 0.4,
        "train_s": 0.4,
        "sync_s": 0.4,
    }


def test_a_missing_step_and_ranks_that_do_not_agree_fail_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(AssertionError, match="5 of 6 steps have metrics"):
        run_checks.figures(STEPS[1:], began_s=90.0, num_steps=6)
    apart = [*STEPS[:-1], step(6, **{"logprob_diff/mean": 0.01})]
    with pytest.raises(AssertionError, match=r"differ by 0\.01 in the mean, target 0\.0001"):
        run_checks.figures(apart, began_s=90.0, num_steps=6)
    monkeypatch.setattr(run_checks, "has_cuda", lambda: True)
    assert run_checks.figures(apart, began_s=90.0, num_steps=6)["logprob_diff"] == 0.01


def test_settings_of_the_command_line_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(run_checks.SETTINGS, raising=False)
    chosen = Path("train.parquet"), ("model.init=random",), Path("run"), 6
    plain = run_checks.settings(*chosen)
    assert "cluster.colocated=true" not in plain
    monkeypatch.setenv(run_checks.SETTINGS, json.dumps(["run.steps=2", "train.ppo_epochs=1"]))
    assert run_checks.settings(*chosen) == [*plain, "run.steps=2", "train.ppo_epochs=1"]


def test_on_a_gpu_a_first_step_needs_no_library_or_compiler_of_cuda_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(run_checks.SETTINGS, raising=False)
    monkeypatch.setattr(run_checks, "has_cuda", lambda: True)
    prepare(tmp_path)
    model = (f"model.path={tmp_path / 'model'}", "model.init=random")
    chosen = run_checks.settings(tmp_path / "train.parquet", model, tmp_path / "run", 6)
    [recipe, *overrides] = chosen
    config = load_recipe(recipe.partition("=")[2], overrides)
    assert config.cluster.colocated and config.cluster.object_store_mib == 512
    assert not config.rollout.share_prompts and not config.log.tensorboard
    assert config.rollout.sglang["attention_backend"] == "triton"
    assert config.rollout.sglang["sampling_backend"] == "pytorch"


def test_a_command_that_fails_is_told_with_its_status() -> None:
    with pytest.raises(AssertionError, match="mcore-rl plan ended with status 2"):
        run_checks._make_command("plan", "recipe=none_such")


def test_a_warm_start_that_is_not_there_skips_the_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(run_checks.WARM_START, str(tmp_path))
    with pytest.raises(SkipCheckError, match=f"{tmp_path}/hf is not there: make warm-start"):
        run_checks.check_rising_reward()


@pytest.mark.parametrize(("last", "rises"), [(0.55, True), (0.45, False)])
def test_a_reward_that_does_not_rise_misses_its_target_and_keeps_its_figures(
    last: float, rises: bool
) -> None:
    measured = {"reward_first": 0.4, "reward_last": last, "step_s": 1.0}
    if rises:
        assert run_checks.expect_rise(measured) == measured
        return
    with pytest.raises(MissedTargetError, match=r"rises by 0\.050, target 0\.1") as caught:
        run_checks.expect_rise(measured)
    assert caught.value.figures == measured
