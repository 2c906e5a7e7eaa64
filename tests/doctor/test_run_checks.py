"""The run of the kit: settings of the command line come last, and its metrics can fail it."""

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.doctor import run_checks


def step(number: int, **changes: float) -> dict[str, Any]:
    parts = {f"time/{part}": 0.1 * number for part in ("rollout", "train", "sync")}
    differences = {"logprob_diff/mean": 1e-7, "logprob_diff/token_max": 1e-6}
    return {"timestamp": 100.0 + number, "time/step": number, **parts, **differences, **changes}


STEPS = [step(number) for number in range(1, run_checks.STEPS + 1)]


def test_the_figures_are_medians_of_all_steps_but_the_first() -> None:
    rows = [{"timestamp": 99.0, "eval/accuracy": 0.5}, *STEPS]
    assert run_checks.figures(rows, began_s=90.0, num_steps=6) == {
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
    plain = run_checks.settings(Path("data"), Path("run"))
    assert "cluster.colocated=true" not in plain
    monkeypatch.setenv(run_checks.SETTINGS, json.dumps(["run.steps=2", "train.ppo_epochs=1"]))
    assert run_checks.settings(Path("data"), Path("run")) == [
        *plain,
        "run.steps=2",
        "train.ppo_epochs=1",
    ]
    monkeypatch.setattr(run_checks, "has_cuda", lambda: True)
    assert "cluster.colocated=true" in run_checks.settings(Path("data"), Path("run"))


def test_a_command_that_fails_is_told_with_its_status() -> None:
    with pytest.raises(AssertionError, match="mcore-rl plan ended with status 2"):
        run_checks._command("plan", "recipe=none_such")
