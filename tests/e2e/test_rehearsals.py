"""The rehearsal of every large recipe: one whole step with real Megatron ranks, engines and Ray."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.recipes import LARGE
from tests.support.runs import Run

pytestmark = pytest.mark.e2e


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    """Collect started rehearsals; processes that they leave behind are killed at the end."""
    started: list[Run] = []
    yield started
    for run in started:
        run.kill_all()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", LARGE)
def test_one_step(recipe: str, tmp_path: Path, runs: list[Run]) -> None:
    run = Run(["train", f"recipe={recipe}", "rehearse=true"], tmp_path / "run")
    runs.append(run)
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()
    folder = tmp_path / "run_rehearsal"
    steps = [
        row for row in run.metrics("../run_rehearsal") if "loss/total" in row or "time/step" in row
    ]
    assert steps, sorted(folder.iterdir())
    print(
        recipe,
        {name: steps[-1].get(name) for name in ("time/step", "logprob_diff/mean", "time/sync")},
    )
