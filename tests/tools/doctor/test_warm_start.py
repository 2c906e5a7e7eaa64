"""One command makes a model that solves some sums, and GRPO from it raises the reward."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from mcore_rl.tools.doctor import run_checks
from mcore_rl.tools.doctor.check import Stage
from mcore_rl.tools.doctor.runner import find_check, run_check
from mcore_rl.tools.doctor.warm_start import SIZES, main


def test_a_folder_that_is_there_is_not_replaced(tmp_path: Path, capsys) -> None:
    assert main(["--out", str(tmp_path)]) == 2
    assert f"--out={tmp_path} is there already: remove it" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_training_that_fails_leaves_no_folder(tmp_path: Path, capsys) -> None:
    out = tmp_path / "data" / "warm_start"
    assert main(["--out", str(out), "sft.batch_size=0"]) == 1
    assert "mcore-rl sft ended with status 2; its logs are in " in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.e2e
@pytest.mark.slow
def test_the_folder_has_prompts_and_weights_that_a_run_goes_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "warm_start"
    assert main(["--out", str(out), "sft.steps=2", "sft.batch_size=8"]) == 0
    assert {path.name for path in out.iterdir()} == {"train.parquet", "hf"}
    assert [path.name for path in tmp_path.iterdir()] == ["warm_start"]
    config = json.loads((out / "hf" / "config.json").read_text())
    assert {name: config[name] for name in SIZES} == SIZES
    index = json.loads((out / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    with safe_open(out / "hf" / index[name], "pt") as file:
        assert file.get_slice(name).get_shape() == [128, config["hidden_size"]]
    monkeypatch.setenv(run_checks.WARM_START, str(out))
    two_steps = ["run.steps=2", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"]
    monkeypatch.setenv(run_checks.SETTINGS, json.dumps(two_steps))
    check = find_check("run", "reward rises")
    result = run_check(Stage("run", "", (check,)), check, tmp_path / "logs")
    assert result.outcome == "failed" and ", target 0.1" in result.why, result
    assert result.figures["logprob_diff"] < 1e-4
    logs = tmp_path / "logs" / "run_reward_rises" / "run" / "logs"
    assert "controller.log" in {path.name for path in logs.iterdir()}


@pytest.mark.e2e
@pytest.mark.slow
def test_the_reward_rises_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "warm_start"
    assert main(["--out", str(out)]) == 0
    monkeypatch.setenv(run_checks.WARM_START, str(out))
    monkeypatch.delenv(run_checks.SETTINGS, raising=False)
    check = find_check("run", "reward rises")
    result = run_check(Stage("run", "", (check,)), check, tmp_path / "logs")
    assert result.outcome == "ok", result
    rise = result.figures["reward_last"] - result.figures["reward_first"]
    assert rise >= run_checks.LEAST_RISE
