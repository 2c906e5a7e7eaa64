"""Whole runs whose weights are rounded in training, and for the engines."""

from collections.abc import Callable

import pytest

from tests.support.runs import Run

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_engines_sample_with_the_rounded_weights_that_train(start: Callable[..., Run]) -> None:
    """With weights before rounding, log-probs would differ by more than 1e-3."""
    run = start("train", "train.fake_quantization=int4", "sync.verify_every=1", "run.steps=3")
    assert run.finish(400) == 0, run.tail()
    run.assert_nothing_left()
    steps = [line for line in run.metrics() if "loss/total" in line]
    assert len(steps) == 3
    assert all(line["logprob_diff/mean"] < 1e-4 for line in steps), steps


@pytest.mark.slow
def test_engines_serve_int4_and_compute_with_the_weights_that_train(
    start: Callable[..., Run],
) -> None:
    """Bfloat16 alone makes 0.002 of it; with weights that train unrounded, it would be 0.004."""
    options = ("model.dtype=bfloat16", "train.fake_quantization=int4", "sync.verify_every=1")
    run = start("train", *options, "rollout.quantization=int4", "run.steps=3")
    assert run.finish(400) == 0, run.tail()
    run.assert_nothing_left()
    assert "CompressedTensorsWNA16TritonMoE" in (run.run_dir / "logs/sglang_0.log").read_text()
    steps = [line for line in run.metrics() if "loss/total" in line]
    assert len(steps) == 3
    assert all(line["logprob_diff/mean"] < 3e-3 for line in steps), steps
