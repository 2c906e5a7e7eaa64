"""The recipe of verifiers: held-out tasks of a user's taskset are solved more often after it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mcore_rl.tasks.calculator import prepare_calculator
from tests.agents.environments.foreign import PYTHON, needs_agents_venv
from tests.support.runs import Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, needs_agents_venv()]
Start = Callable[..., Run]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Start]:
    """begin(name, command, *settings) -> Run; what it leaves is killed at the end."""
    runs: list[Run] = []

    def begin_run(name: str, command: str, *settings: str) -> Run:
        runs.append(Run((command, *settings), tmp_path / name))
        return runs[-1]

    yield begin_run
    for run in runs:
        run.kill_all()


def finish(run: Run) -> Run:
    assert run.finish(1700) == 0, run.tail()
    run.assert_nothing_left()
    return run


@pytest.mark.timeout(3600)
def test_held_out_sums_of_a_taskset_become_right(begin: Start, tmp_path: Path) -> None:
    data = tmp_path / "data"
    prepare_calculator(data)
    warm = finish(
        begin(
            "warm_start",
            "sft",
            "recipe=tiny_agent_calculator",
            "model.init=random",
            f"model.path={data / 'model'}",
            f"sft.data=[{data / 'sft.parquet'}]",
        )
    )
    run = finish(
        begin(
            "run",
            "train",
            "recipe=tiny_agent_verifiers",
            f"model.path={warm.run_dir / 'hf'}",
            f"data.train=[{data / 'train.parquet'}]",
            f"eval.data=[{data / 'heldout.parquet'}]",
            "checkpoint.export_hf=false",
            f"agents.python={PYTHON}",
        )
    )
    right = [line["eval/greedy_reward"] for line in run.metrics() if "eval/greedy_reward" in line]
    assert right[0] < 0.2 and right[-1] > 0.6, right
