"""`mcore-rl translate`, as a user calls it, also in place of what a script starts."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.cli import main
from mcore_rl.config.recipe import load_recipe
from mcore_rl.tools.translate.command import NAMES, add_arguments
from tests.support.policy import ROOT

SCRIPT = """
prompts=64
LAUNCH=(uv run --frozen --extra sglang python3)
[ -z "$PLAIN" ] || LAUNCH=(python)
"${LAUNCH[@]}" -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer' \\
    data.train_batch_size=${prompts} algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 \\
    trainer.logger=['console','wandb'] actor_rollout_ref.actor.strategy=megatron \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=True "$@"
"""


@pytest.mark.parametrize("plain", ["", "1"])
def test_a_script_is_translated_by_running_it(tmp_path: Path, plain: str) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    out = tmp_path / "made.yaml"
    command = f'{sys.executable} -m mcore_rl.cli translate verl --out {out} -- "$@"'
    shell = (
        f'python3() {{ {command}; }}; python() {{ python3 "$@"; }}; uv() {{ python3 "$@"; }};'
        f" export -f python3 python uv; bash {tmp_path}/run.sh trainer.nnodes=2"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PLAIN": plain}
    done = subprocess.run(
        ["bash", "-c", shell], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    config = load_recipe(str(out), ["run.steps=3"])
    assert config.rollout.prompts_per_step == 64 and config.rollout.samples_per_prompt == 8
    assert config.rollout.engines == 8 and config.parallel.world_size == 16
    assert config.train.megatron == {"apply_rope_fusion": True}
    assert config.cluster.cpus_per_rank == 8 and config.plan.gpu_memory_gib == 80
    assert config.train.optimizer.megatron["exp_avg_dtype"] == "float32"
    assert "to decide on" in done.stderr


SLIME_SCRIPT = """
pkill -9 sglang
sleep 300
ROLLOUT_ARGS=(
   --rollout-batch-size 48
   --sglang-cuda-graph-bs-decode $(seq 1 3)  # of decoding
)
ray start --head
ray job submit --address="http://127.0.0.1:8265" \\
   -- python3 train.py --colocate --actor-num-nodes 2 ${ROLLOUT_ARGS[@]}
"""


def test_a_script_of_slime_is_translated_with_its_commands_replaced(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SLIME_SCRIPT)
    out = tmp_path / "made.yaml"
    command = f"{sys.executable} -m mcore_rl.cli translate slime --out {out}"
    shell = f"""
    ray() {{ [ "$1" != job ] || {command} -- "$@"; }}
    pkill() {{ :; }}
    sleep() {{ :; }}
    export -f ray pkill sleep
    bash {tmp_path}/run.sh
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", shell], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    config = load_recipe(str(out), [])
    assert config.rollout.prompts_per_step == 48 and config.parallel.world_size == 16
    assert config.rollout.sglang["cuda_graph_bs_decode"] == [1, 2, 3]


def test_a_script_of_slime_is_read_without_being_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text(SLIME_SCRIPT)
    assert main(["translate", "slime", str(tmp_path / "run.sh"), "--", "--seed", "7"]) == 0
    out, error = capsys.readouterr()
    assert "To decide: --sglang-cuda-graph-bs-decode ($(seq 1 3)): the script computes it" in out
    assert "prompts_per_step: 48 # --rollout-batch-size" in out and "seed: 7 # --seed" in out
    assert "to decide on" in error


def test_a_configuration_of_nemo_rl_is_translated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base.yaml").write_text("grpo: {num_prompts_per_step: 48, seed: 3}\n")
    (tmp_path / "run.yaml").write_text("defaults: base.yaml\ndata_plane: {enabled: true}\n")
    assert main(["translate", "nemo-rl", str(tmp_path / "run.yaml"), "grpo.seed=7"]) == 0
    out, error = capsys.readouterr()
    assert "prompts_per_step: 48 # grpo.num_prompts_per_step" in out and "seed: 7" in out
    assert "unneeded: 1 options: samples stay where they were drawn" in error


def test_wrong_input_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for system, word in (("slime", "words"), ("nemo-rl", "words"), ("nemo-rl", "rm.max_steps=3")):
        assert main(["translate", system, word]) == 2
        assert word.split(".")[0] in capsys.readouterr().err


def test_sizes_that_do_not_fit_together_are_told_first(capsys: pytest.CaptureFixture[str]) -> None:
    engine = "actor_rollout_ref.rollout"
    given = [f"{engine}.tensor_model_parallel_size=4", f"{engine}.expert_parallel_size=3"]
    assert main(["translate", "verl", *given]) == 0
    first = capsys.readouterr().out.splitlines()[2]
    assert first.startswith("# To decide: ") and f"{engine}.expert_parallel_size" in first
    assert main(["translate", "verl", f"{engine}.tensor_model_parallel_size=4"]) == 0
    assert "refuses" not in capsys.readouterr().out


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
    for name in NAMES:
        assert parser.parse_args([name, "a=1"]).options == ["a=1"]


def test_a_file_that_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made.yaml"
    out.write_text("mine")
    assert main(["translate", "verl", "--out", str(out), "a=1"]) == 2
    assert "the file exists" in capsys.readouterr().err and out.read_text() == "mine"
