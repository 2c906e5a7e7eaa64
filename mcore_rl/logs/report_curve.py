"""Draws reward_curve.png from rows of metrics."""

from collections.abc import Sequence
from pathlib import Path

from mcore_rl.logs.report_rows import Row, series
from mcore_rl.process.text import make_encodable


def draw_reward_curve(rows: Sequence[Row], path: Path) -> None:
    """Draw the reward per step with its moving average and, if measured, held-out accuracy."""
    # Here, as a run draws after its last step: matplotlib takes a quarter of a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rewards = series(rows, "reward/mean")
    held_out = {
        name.removeprefix("eval/").replace("_", " "): points
        for name in sorted({name for row in rows for name in row})
        if name == "eval/greedy_accuracy" or name.startswith("eval/pass_at_")
        if (points := series(rows, name))
    }
    figure = Figure(figsize=(8, 6.4 if held_out else 3.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 if held_out else 1, 1, sharex=True, squeeze=False)[:, 0]
    steps = [step for step, _ in rewards]
    values = [value for _, value in rewards]
    axes[0].plot(steps, values, color="#4c78a8", alpha=0.35, linewidth=1.2, label="each step")
    axes[0].plot(
        steps, moving_average(values), color="#4c78a8", linewidth=2.4, label="moving average"
    )
    axes[0].set_ylabel("mean reward")
    run_name = make_encodable(path.parent.resolve().name)
    axes[0].set_title(f"{run_name}: training reward", loc="left", parse_math=False)
    for (label, points), color in zip(
        held_out.items(), ("#f58518", "#54a24b", "#b279a2"), strict=False
    ):
        axes[1].plot(*zip(*points, strict=True), marker="o", color=color, linewidth=2, label=label)
    if held_out:
        axes[1].set_ylim(-0.02, 1.02)
        axes[1].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes[1].set_title("held-out problems", loc="left")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, loc="lower right")
    axes[-1].set_xlabel("step")
    figure.savefig(path)


def moving_average(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Return the exponential moving average with `weight` on the past, without a bias to 0."""
    averages = []
    total = 0.0
    norm = 0.0
    for value in values:
        total = weight * total + value
        norm = weight * norm + 1.0
        averages.append(total / norm)
    return averages
