"""Sampling beside training on prompts with images, of which some responses span two versions."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcore_rl.tasks.shapes import prepare_shapes
from tests.e2e.test_vision import settings_of
from tests.support.runs import Run

pytestmark = pytest.mark.e2e
Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(command, *overrides) -> Run; leftovers of a run are killed at the end."""
    prepare_shapes(tmp_path / "shapes")
    runs: list[Run] = []

    def start_run(command: str, *overrides: str) -> Run:
        settings = (command, *settings_of(tmp_path / "shapes"), *overrides)
        runs.append(Run(settings, tmp_path / "run"))
        return runs[-1]

    yield start_run
    for run in runs:
        run.kill_all()


@pytest.mark.slow
def test_responses_to_images_go_on_with_new_weights(start: Start) -> None:
    """An engine that goes on with new weights computes image and response again.

    The tower is trained, too: tokens behind a swap have the log-probs of the new tower's
    embeddings, whatever drew the earlier ones.
    """
    run = start(
        "train",
        *("rollout.mode=async", "rollout.max_staleness=2", "algorithm.correction.weight=token"),
        *("rollout.deterministic=false", "rollout.max_response_len=60", "data.max_prompt_len=64"),
        *("train.vision=all", "train.optimizer.lr=1e-3", "train.optimizer.vision_lr=1e-3"),
        *("eval.data=[]", "checkpoint.export_hf=false", "run.steps=6", "reward.noise=1.0"),
    )
    assert run.finish(500) == 0, run.tail()
    run.assert_nothing_left()
    steps = [line for line in run.metrics() if "loss/total" in line]
    assert [line["step"] for line in steps] == list(range(1, 7))
    assert {line["rollout/samples"] for line in steps} == {16.0}
    assert sum(line["staleness/partial"] for line in steps) > 0, steps
    assert 0 < max(line["staleness/max"] for line in steps) <= 2
    assert max(line["logprob_diff/arithmetic"] for line in steps) < 1e-4
    assert max(line["logprob_diff/stale"] for line in steps) > 1e-3
    diffs = [line["sync/parity_diff"] for line in steps]
    # Nothing is compared of a response that begins with a token of images, which is rare.
    assert max(diffs) < 1e-4 and sum(diff > 0 for diff in diffs) >= 4, diffs
