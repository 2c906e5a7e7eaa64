"""A user's advantage and loss train the tiny recipe, on ranks that get them from the controller."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.documented import own_algorithm
from tests.support.runs import Run

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_a_documented_advantage_and_loss_train(start: Callable[..., Run], tmp_path: Path) -> None:
    path = tmp_path / "my_algo.py"
    path.write_text(own_algorithm())
    run = start(
        "train",
        f"algorithm.path={path}",
        "algorithm.advantage=greedy_margin",
        "algorithm.loss=tanh_gate",
        "rollout.temperature=1.5",
        "run.steps=2",
        "train.mini_batches=2",
        "train.optimizer.lr=1e-3",
        "eval.data=[]",
        "checkpoint.export_hf=false",
    )
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()
    steps = [line for line in run.metrics() if "rollout/samples" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(0 < line["clip/gate"] < 2 for line in steps), steps
    assert any(line["loss/grad_norm"] > 0 for line in steps), steps
