"""`mcore-rl simulate`: its files, its table, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.config.recipe import load_recipe
from mcore_rl.tools.simulate.prediction import make_checked

RECIPE = ("simulate", "recipe=qwen3_30b_a3b_grpo_32", "simulate.steps=2")
SMALL = ("rollout.prompts_per_step=8", "rollout.samples_per_prompt=4")


def test_a_picture_a_trace_and_numbers_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RECIPE, *SMALL, f"run.dir={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert "seconds of a step" in printed and "prompts unaccounted for" in printed
    folder = tmp_path / "simulation"
    names = {path.name for path in folder.iterdir()}
    assert names == {"timeline.png", "trace.json", "result.json"}
    written = json.loads((folder / "result.json").read_text())
    assert list(written["steps"]) == ["1", "2"]
    out = tmp_path / "elsewhere"
    assert main([*RECIPE, *SMALL, "--json", "--out", str(out)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["step_s"] == written["summary"]["step_s"]
    assert (out / "result.json").is_file()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("simulate.prompt_len=100000", r"prompt_len=100000 exceeds data\.max_prompt_len=2048"),
        ("simulate.image_tokens=9", r"image_tokens=9: model.path=.* sees text alone"),
        ("simulate.cores=2", r"simulate\.cores=2 with simulate\.gpu=h100: ranks on GPUs share no"),
        ("simulate.gpu=tpu", "simulate.gpu='tpu': expected one of 'a100'"),
        ("rollout.tp=3", "rollout.tp=3"),
        ("algorithm.loss=none", "algorithm.loss"),
    ],
)
def test_wrong_settings_are_named(
    setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RECIPE, setting]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_only_the_steps_that_are_simulated_remain() -> None:
    config = make_checked(load_recipe("qwen3_30b_a3b_grpo_32", ["simulate.steps=7"]))
    assert (config.run.steps, config.eval.data, config.eval.every_steps) == (7, [], 0)
