"""A run folder in (metrics.jsonl, samples.jsonl); a printed report, reward_curve.png and summary.json out."""

import json
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mcore_rl.report.curve import draw_reward_curve
from mcore_rl.report.rows import Row, load_metrics, load_samples, pick_samples
from mcore_rl.report.summary import Summary, summarize


def make_report(run_dir: str | Path) -> Summary:
    """Write summary.json and reward_curve.png in `run_dir`, print the report; its last line names the folder.

    ValueError if the folder holds no metrics of a training run.
    """
    run_dir = Path(run_dir)
    rows = load_metrics(run_dir)
    summary = summarize(rows)
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw_reward_curve(rows, run_dir / "reward_curve.png")
    console = Console(highlight=False)
    console.print(_make_table(summary))
    for row in pick_samples(load_samples(run_dir)):
        console.print(_make_panel(row))
    console.print("in the run folder: reward_curve.png, summary.json, samples.jsonl")
    print(f"run folder: {run_dir}", flush=True)
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


def _make_panel(row: Row) -> Panel:
    reward = _format(row["reward"], "g")
    title = (
        f"{row['split']} sample, step {row['step']}: reward {reward}, truth {row['ground_truth']}"
    )
    text = Text.assemble(
        (row["prompt"].strip(), "dim"), "\n", row["response"].strip() or "(no text)"
    )
    color = "green" if (row["reward"] or 0) > 0 else "red"
    return Panel(text, title=Text(title), title_align="left", border_style=color)


def _format(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else format(value, spec) + unit
