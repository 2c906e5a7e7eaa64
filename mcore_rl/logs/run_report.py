"""Prints a report of a run folder, from its rows of metrics and samples.

metrics.jsonl --> summary.json, reward_curve.png        samples.jsonl --> a few samples
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mcore_rl.logs.rows import has_rows, iter_rows, iter_rows_backward
from mcore_rl.process.disk import report_full_disk
from mcore_rl.process.errors import make_encodable

Row = Mapping[str, Any]
"""One line of metrics.jsonl or samples.jsonl (logs/names.py)."""

NUM_SAMPLES_SHOWN = 3


def load_metrics(run_dir: Path, is_wanted: Callable[[str], bool] = lambda name: True) -> list[Row]:
    """Return the rows of metrics.jsonl, of each its step and the numbers whose names are wanted.

    Raises ValueError if no training step was completed.
    """
    path = run_dir / "metrics.jsonl"
    if not has_rows(path):
        raise ValueError(
            f"{run_dir}: no metrics.jsonl; give the run.dir of an `mcore-rl train` run"
        )
    rows: list[Row] = []
    has_step = False
    for row in iter_rows(path):
        has_step = has_step or row.get("reward/mean") is not None
        rows.append({n: value for n, value in row.items() if n == "step" or is_wanted(n)})
    if not has_step:
        raise ValueError(f"{path}: no row has reward/mean; no training step was completed")
    return rows


def load_last_samples(run_dir: Path) -> list[Row]:
    """Return the rows of the last step in samples.jsonl, or none if there is no such file."""
    rows: list[Row] = []
    for row in iter_rows_backward(run_dir / "samples.jsonl"):
        if rows and row["step"] != rows[-1]["step"]:
            break
        rows.append(row)
    return rows[::-1]


def select_series(rows: Sequence[Row], name: str) -> list[tuple[int, float]]:
    """Return (step, value) of each row that has a finite value for `name`."""
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def pick_samples(rows: Sequence[Row]) -> list[Row]:
    """Return a few samples of a step, one per prompt, held-out ones if there are any."""
    held_out = [row for row in rows if row["split"] == "eval"]
    by_prompt: dict[int, Row] = {}
    for row in held_out or rows:
        by_prompt.setdefault(row["prompt_index"], row)
    return list(by_prompt.values())[:NUM_SAMPLES_SHOWN]


Summary = dict[str, float | int | None]


_NAMES = {"reward/mean", "time/step", "sync/seconds", "rollout/samples", "logprob_diff/mean"}


def is_summarized(name: str) -> bool:
    """Return whether a report of a run looks at numbers of that name."""
    return name in _NAMES or name.startswith("eval/")


def summarize(rows: Sequence[Row]) -> Summary:
    """Return the numbers of summary.json; None if the run did not log what a number needs.

    final_accuracy    after the last step; an older evaluation is never used instead
    train_seconds     wall time of all steps, without evaluations and start-up
    step0_logprob_diff_mean
                      at the first step, whose samples come from the initial weights
    """
    last_step = max(step for step, _ in select_series(rows, "reward/mean"))
    accuracies = dict(select_series(rows, "eval/greedy_accuracy"))
    steps = select_series(rows, "time/step")
    synced = select_series(rows, "sync/seconds")
    num_samples = sum(value for _, value in select_series(rows, "rollout/samples"))
    train_seconds = sum(value for _, value in steps)
    return {
        "warm_start_accuracy": accuracies.get(0),
        "final_accuracy": accuracies.get(last_step),
        "grpo_steps": last_step,
        "train_seconds": train_seconds if steps else None,
        "step0_logprob_diff_mean": dict(select_series(rows, "logprob_diff/mean")).get(1),
        "samples_per_second": num_samples / train_seconds if train_seconds else None,
        "sync_seconds_median": median(value for _, value in synced) if synced else None,
    }


def draw_reward_curve(rows: Sequence[Row], path: Path) -> None:
    """Draw the reward per step with its moving average and, if measured, held-out accuracy."""
    # Here, as a run draws after its last step: matplotlib takes a quarter of a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rewards = select_series(rows, "reward/mean")
    held_out = {
        name.removeprefix("eval/").replace("_", " "): points
        for name in sorted({name for row in rows for name in row})
        if name == "eval/greedy_accuracy" or name.startswith("eval/pass_at_")
        if (points := select_series(rows, name))
    }
    figure = Figure(figsize=(8, 6.4 if held_out else 3.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 if held_out else 1, 1, sharex=True, squeeze=False)[:, 0]
    steps = [step for step, _ in rewards]
    values = [value for _, value in rewards]
    axes[0].plot(steps, values, color="#4c78a8", alpha=0.35, linewidth=1.2, label="each step")
    axes[0].plot(
        steps,
        compute_moving_average(values),
        color="#4c78a8",
        linewidth=2.4,
        label="moving average",
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


def compute_moving_average(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Return the exponential moving average with `weight` on the past, without a bias to 0."""
    averages = []
    total = 0.0
    norm = 0.0
    for value in values:
        total = weight * total + value
        norm = weight * norm + 1.0
        averages.append(total / norm)
    return averages


def make_report(run_dir: str | Path) -> Summary:
    """Write summary.json and reward_curve.png in `run_dir` and print a report.

    Returns the content of summary.json. The last printed line names the folder. Raises ValueError
    if the folder has no metrics of a training run, DiskFullError if the disk is full.
    """
    run_dir = Path(run_dir)
    rows = load_metrics(run_dir, is_summarized)
    summary = summarize(rows)
    summary_file = run_dir / "summary.json"
    with report_full_disk(summary_file):
        summary_file.write_text(json.dumps(summary, indent=2) + "\n")
    curve_file = run_dir / "reward_curve.png"
    with report_full_disk(curve_file):
        draw_reward_curve(rows, curve_file)
    console = Console(highlight=False)
    console.print(_make_table(summary))
    for row in pick_samples(load_last_samples(run_dir)):
        console.print(_make_panel(row, console.encoding))
    console.print("in the run folder: reward_curve.png, summary.json, samples.jsonl")
    print(f"run folder: {make_encodable(str(run_dir), console.encoding)}", flush=True)
    return summary


def _make_table(summary: Summary) -> Table:
    table = Table(
        show_header=False, title="held-out accuracy and cost of the run", title_justify="left"
    )
    before, after = summary["warm_start_accuracy"], summary["final_accuracy"]
    table.add_row("accuracy before", _format(before, ".1%"))
    table.add_row("accuracy after", _format(after, ".1%"), style="bold")
    if before is not None and after is not None:
        color = "green" if after > before else "red"
        table.add_row("gain", f"{(after - before) * 100:+.1f} points", style=f"bold {color}")
    table.add_row("steps", str(summary["grpo_steps"]))
    table.add_row("training time", _format(summary["train_seconds"], ",.0f", " s"))
    table.add_row("samples per second", _format(summary["samples_per_second"], ",.1f"))
    table.add_row("weight sync, median", _format(summary["sync_seconds_median"], ".3f", " s"))
    table.add_row(
        "log-prob difference at start", _format(summary["step0_logprob_diff_mean"], ".1e")
    )
    return table


def _make_panel(row: Row, encoding: str) -> Panel:
    """Show one sample, with escapes for what a terminal of `encoding` can't print."""
    truth = row["ground_truth"]
    heading = f"{row['split']} sample, step {row['step']}"
    title = f"{heading}: reward {_format(row['reward'], 'g')}, truth {truth}"
    shown = [row["prompt"].strip(), *row.get("images", ())]
    prompt = make_encodable("\n".join(shown), encoding)
    response = make_encodable(row["response"].strip(), encoding) or "(no text)"
    color = "green" if (row["reward"] or 0) > 0 else "red"
    return Panel(
        Text.assemble((prompt, "dim"), "\n", response),
        title=Text(make_encodable(title, encoding)),
        title_align="left",
        border_style=color,
    )


def _format(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else format(value, spec) + unit
