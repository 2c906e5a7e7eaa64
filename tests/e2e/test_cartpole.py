"""The recipe of CartPole: returns rise from random weights, in a short run and in the whole one."""

from pathlib import Path

import pytest

from mcore_rl.tasks.cartpole import prepare_cartpole
from tests.support.runs import Run

pytestmark = pytest.mark.e2e


def play(folder: Path, *settings: str, timeout_s: float) -> list[dict[str, float]]:
    """Return the metrics of a run of the recipe."""
    prepare_cartpole(folder / "data")
    run = Run(
        [
            "train",
            "recipe=tiny_agent_cartpole",
            f"model.path={folder / 'data' / 'model'}",
            f"data.train=[{folder / 'data' / 'train.parquet'}]",
            f"eval.data=[{folder / 'data' / 'heldout.parquet'}]",
            *settings,
        ],
        folder / "run",
    )
    try:
        assert run.finish(timeout_s) == 0, run.tail()
        run.assert_nothing_left()
        return run.metrics()
    finally:
        run.kill_all()


@pytest.mark.slow
def test_returns_rise_within_a_few_steps(tmp_path: Path) -> None:
    settings = ["run.steps=5", "eval.every_steps=0", "eval.max_prompts=4"]
    lines = play(tmp_path, *settings, "checkpoint.export_hf=false", timeout_s=170)
    steps = [line for line in lines if "loss/total" in line]
    returns = [line["reward/mean"] for line in steps]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert returns[-1] > returns[0] + 2, returns
    assert all(line["logprob_diff/arithmetic"] < 1e-5 for line in steps)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_held_out_games_go_on_for_longer_than_400_steps(tmp_path: Path) -> None:
    lines = play(tmp_path, timeout_s=2400)
    returns = [line["eval/greedy_reward"] for line in lines if "eval/greedy_reward" in line]
    assert returns[0] < 30 and returns[-1] > 400, returns
