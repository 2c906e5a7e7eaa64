"""Prints a report of a run folder and writes its reward_curve.png and summary.json."""

import json
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mcore_rl.logs.report_curve import draw_reward_curve
from mcore_rl.logs.report_rows import Row, load_last_samples, load_metrics, pick_samples
from mcore_rl.logs.report_summary import Summary, is_summarized, summarize
from mcore_rl.process.disk import reporting_full_disk
from mcore_rl.process.text import make_encodable


def make_report(run_dir: str | Path) -> Summary:
    """Write summary.json and reward_curve.png in `run_dir` and print a report.

    Returns the content of summary.json. The last printed line names the folder. Raises ValueError
    if the folder has no metrics of a training run, DiskFullError if the disk is full.
    """
    run_dir = Path(run_dir)
    rows = load_metrics(run_dir, is_summarized)
    summary = summarize(rows)
    summary_file = run_dir / "summary.json"
    with reporting_full_disk(summary_file):
        summary_file.write_text(json.dumps(summary, indent=2) + "\n")
    curve_file = run_dir / "reward_curve.png"
    with reporting_full_disk(curve_file):
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
