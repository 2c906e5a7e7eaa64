"""Rewards of models that are served beside the policy, in a whole run."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.runs import Run
from tests.support.tiny_models import write_reward_model

pytestmark = pytest.mark.e2e


GUESTS = (
    "reward_model.colocated=true",
    "reward_model.restarts=0",
    "cluster.colocated=true",
    "cluster.offload=true",
    "rollout.stage_weights=false",
    "rollout.restarts=0",
)


@pytest.mark.slow
@pytest.mark.parametrize("placement", [(), GUESTS], ids=["own_gpus", "shared_gpus"])
def test_a_run_learns_from_a_judge_and_a_reward_model(
    start: Callable[..., Run], arithmetic: Path, tmp_path: Path, placement: Sequence[str]
) -> None:
    """The judge is a model that writes random numbers and words; its last number is the verdict."""
    write_reward_model("qwen3", tmp_path / "reward_model")
    template = tmp_path / "judge.jinja"
    template.write_text("{{ prompt }} = {{ ground_truth }}")
    run = start(
        "train",
        f"judge.path={arithmetic / 'model'}",
        "judge.dtype=float32",
        "judge.kv_cache_len=4096",
        f"reward_model.path={tmp_path / 'reward_model'}",
        "reward_model.dtype=float32",
        "reward_model.kv_cache_len=4096",
        f"reward.judge.template={template}",
        r"reward.judge.verdict='(\d+)'",
        "reward.judge.high=100",
        "reward.judge.temperature=1",
        "reward.judge.max_tokens=24",
        "reward.parts=[score,judge,reward_model]",
        "reward.weights=[1.0,0.01,1.0]",
        "reward.on_error=value",
        "reward.error_value=-1",
        "reward.max_failed_share=0.5",
        "run.steps=2",
        *placement,
        "checkpoint.export_hf=false",
    )
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()
    steps = [row for row in run.metrics() if "rollout/samples" in row]
    assert len(steps) == 2
    for step in steps:
        assert {f"reward/part/{name}" for name in ("score", "judge", "reward_model")} <= step.keys()
        assert step["reward/errors"] < 0.5 * step["rollout/samples"]
    samples = [
        json.loads(line) for line in (run.run_dir / "samples.jsonl").read_text().splitlines()
    ]
    assert len({round(sample["reward"], 6) for sample in samples}) > 4
