"""The reward curve: its moving average, and a picture with and without held-out accuracy."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from mcore_rl.logs.run_report import compute_moving_average, draw_reward_curve


def test_moving_average_starts_at_the_first_value_and_follows() -> None:
    assert compute_moving_average([1.0, 1.0, 1.0]) == pytest.approx([1.0, 1.0, 1.0])
    assert compute_moving_average([0.0, 1.0], weight=0.5) == pytest.approx([0.0, 1 / 1.5])
    assert compute_moving_average([]) == []


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.floats(0.0, 0.99))
def test_moving_average_stays_within_the_values_so_far(values: list[float], weight: float) -> None:
    for i, average in enumerate(compute_moving_average(values, weight)):
        so_far = values[: i + 1]
        slack = 1e-9 * max(map(abs, so_far), default=0.0)
        assert min(so_far) - slack <= average <= max(so_far) + slack


@pytest.mark.parametrize(("with_evaluation", "height"), [(True, 960), (False, 570)])
def test_held_out_accuracy_gets_its_own_axes(
    with_evaluation: bool, height: int, tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [{"step": step, "reward/mean": step / 3} for step in (1, 2, 3)]
    if with_evaluation:
        rows += [{"step": 0, "eval/greedy_accuracy": 0.2}, {"step": 3, "eval/pass_at_8": 0.9}]
    path = tmp_path / "curve.png"
    draw_reward_curve(rows, path)
    picture = imread(path)
    assert picture.shape[:2] == (height, 1200)
    assert (picture[..., :3].min(axis=-1) < 0.9).mean() > 0.005, "the picture is blank"
