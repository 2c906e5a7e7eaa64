"""Supervised fine-tuning end to end: the loss falls, the export loads, a second run continues."""

from collections.abc import Callable

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.runs import Run

pytestmark = pytest.mark.e2e


def test_sft_from_random_weights_learns_exports_and_continues(start: Callable[..., Run]) -> None:
    common = ("model.init=random", "sft.batch_size=16", "checkpoint.every_steps=10")
    run = start("sft", "sft.steps=20", *common)
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()
    losses = [line["loss/nll"] for line in run.metrics() if "loss/nll" in line]
    assert len(losses) == 20
    assert sum(losses[-5:]) / 5 < 0.8 * losses[0]
    model = AutoModelForCausalLM.from_pretrained(run.run_dir / "hf")
    assert model.config.architectures == ["Qwen3MoeForCausalLM"]
    assert run.tail().strip().splitlines()[-1].endswith("hf")

    more = start("sft", "sft.steps=22", *common, run_dir=run.run_dir)
    assert more.finish() == 0, more.tail()
    steps = [line["step"] for line in more.metrics() if "loss/nll" in line]
    assert steps == list(range(1, 23))
