"""A teacher scores all rows of episodes: one that is the policy itself agrees with it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mcore_rl.tasks.calculator import prepare_calculator
from tests.support.chaos import ENVIRONMENT
from tests.support.runs import Run

pytestmark = pytest.mark.e2e


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """One step of a policy with random weights, which serves as its own teacher."""
    prepare_calculator(tmp_path)
    model_dir = tmp_path / "model"
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(model_dir)
    (tmp_path / "environment.py").write_text(ENVIRONMENT)
    settings = [
        "recipe=tiny_agent_calculator",
        f"model.path={model_dir}",
        f"teacher.path={model_dir}",
        "teacher.dtype=float32",
        "algorithm.advantage=distillation",
        "algorithm.loss=policy_gradient",
        f"data.train=[{tmp_path / 'train.parquet'}]",
        "eval.data=[]",
        "eval.every_steps=0",
        "checkpoint.export_hf=false",
        "parallel.ep=1",
        "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2",
        "rollout.max_response_len=120",
        "run.steps=1",
        "run.startup_timeout_s=600",
        f"agents.environment={tmp_path / 'environment.py'}:ToolTalk",
        f"agents.options.notes={tmp_path}",
        "agents.options.functions=null",
        "agents.options.reward=null",
        "agents.history=0",  # each answer begins a row
    ]
    run = Run(("train", *settings), tmp_path / "run")
    yield run
    run.kill_all()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_teacher_that_is_the_policy_agrees_with_it_in_every_row(run: Run) -> None:
    assert run.finish(900) == 0, run.tail()
    [step] = [line for line in run.metrics() if "loss/total" in line]
    assert step["episodes/rows"] > 1.5
    assert abs(step["kl/teacher"]) < 1e-5 and abs(step["loss/policy"]) < 1e-5
