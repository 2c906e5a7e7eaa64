"""A user's loop over the Python API trains, evaluates, saves, and leaves nothing behind."""

from pathlib import Path

import pytest

from tests.support.runs import Run, tiny_settings

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_the_example_of_a_loop_stops_once_the_reward_is_high_enough(
    arithmetic: Path, runs: list[Run], tmp_path: Path
) -> None:
    """A reward of 0 is always reached, so the loop ends after five of its seven steps."""
    recipe, *settings = tiny_settings(arithmetic)
    settings += ["run.steps=7", "reward.path=examples/own_reward.py"]
    settings += ["reward.name=score_closeness", "checkpoint.export_hf=false"]
    settings += ["algorithm.path=examples/own_advantage.py", "algorithm.advantage=above_median"]
    arguments = ["0", recipe.removeprefix("recipe="), *settings]
    runs.append(Run(arguments, tmp_path / "run", program=["examples/own_loop.py"]))
    [run] = runs
    assert run.finish() == 0, run.tail()
    run.assert_nothing_left()
    trained = [row["step"] for row in run.metrics() if "reward/mean" in row]
    assert trained == [1, 2, 3, 4, 5]
    assert any("eval/greedy_accuracy" in row or "eval/accuracy" in row for row in run.metrics())
    assert (run.run_dir / "checkpoints/step_000005").is_dir()
