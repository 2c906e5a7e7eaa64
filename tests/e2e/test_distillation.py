"""On-policy distillation end to end: a policy comes nearer to its served teacher."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.support.runs import Run

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_the_reverse_kl_to_the_teacher_falls(
    start: Callable[..., Run], arithmetic: Path, tmp_path: Path
) -> None:
    """The teacher is the policy, made surer of what it says."""
    teacher = tmp_path / "teacher"
    model = AutoModelForCausalLM.from_pretrained(arithmetic / "model")
    model.lm_head.weight.data.mul_(8.0)
    model.save_pretrained(teacher)
    options = [
        f"teacher.path={teacher}",
        "teacher.dtype=float32",
        "algorithm.advantage=distillation",
    ]
    refused = start("train", *options)
    assert refused.finish() == 2 and "no tokenizer there" in refused.tail()

    for path in (arithmetic / "model").glob("*token*"):
        (teacher / path.name).write_bytes(path.read_bytes())
    run = start(
        "train",
        *options,
        "algorithm.loss=policy_gradient",
        "run.steps=6",
        "eval.data=[]",
        "train.optimizer.lr=5e-3",
        "train.optimizer.warmup_steps=0",
        "checkpoint.export_hf=false",
    )
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()
    kl = [line["kl/teacher"] for line in run.metrics() if "kl/teacher" in line]
    assert len(kl) == 6
    assert kl[0] > 0.2 and sum(kl[-2:]) / 2 < 0.8 * kl[0], kl
