"""`mcore-rl translate verl`, as a user calls it, also in place of a script's python3."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.config.recipe import load_recipe
from mcore_rl.translate.command import add_arguments
from tests.support.policy import ROOT

SCRIPT = """
prompts=64
python3 -m verl.trainer.main_ppo --config-path=./config --config-name='ppo_megatron_trainer' \\
    data.train_batch_size=${prompts} algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 \\
    trainer.logger=['console','wandb'] actor_rollout_ref.actor.strategy=megatron \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=True "$@"
"""


def test_a_script_is_translated_by_running_it(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    out = tmp_path / "made.yaml"
    command = f'{sys.executable} -m mcore_rl.cli translate verl --out {out} -- "$@"'
    shell = (
        f"python3() {{ {command}; }}; export -f python3; bash {tmp_path}/run.sh trainer.nnodes=2"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", shell], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    config = load_recipe(str(out), ["run.steps=3"])
    assert config.rollout.prompts_per_step == 64 and config.rollout.samples_per_prompt == 8
    assert config.rollout.engines == 8 and config.parallel.world_size == 16
    assert config.train.megatron == {"apply_rope_fusion": True}
    assert "to decide on" in done.stderr


def test_the_recipe_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", "verl", "algorithm.adv_estimator=rloo", "ray_kwargs.x=1"]) == 0
    out, error = capsys.readouterr()
    assert "advantage: rloo # algorithm.adv_estimator" in out
    assert "unneeded: ray_kwargs.x=1: cluster.*" in error


def test_other_systems_are_refused() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["unknown", "a=1"])
    assert parser.parse_args(["verl", "a=1"]).options == ["a=1"]


def test_a_file_that_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made.yaml"
    out.write_text("mine")
    assert main(["translate", "verl", "--out", str(out), "a=1"]) == 2
    assert "the file exists" in capsys.readouterr().err and out.read_text() == "mine"
