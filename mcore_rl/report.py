"""A run folder in (metrics.jsonl, samples.jsonl); a printed report, reward_curve.png and summary.json out.

Metric names of a GRPO run. A row of metrics.jsonl holds step, timestamp (unix seconds) and any of:

  reward/mean std groups_without_signal     rewards of the rollout; share of groups with equal rewards
  reward/part/<name> errors                 means of what rewards are made of; samples whose reward failed
  sampling/rounds samples kept_share reward_mean   dynamic sampling, before groups were left out
  rollout/samples response_len response_len_max truncated_share tokens_per_second
  loss/total                                the weighted sum that was differentiated, router aux loss left out
  loss/policy entropy                       token means: clipped surrogate, entropy in nats; loss/nll in SFT
  loss/grad_norm train/learning_rate train/tokens train/optimizer_steps train/tokens_per_second
  clip/low_share high_share                 tokens whose gradient the clip took away
  ratio/mean token_max kl/old_new           policy against the old policy that sampled
  kl/ref                                    policy against the reference, by algorithm.kl.estimator
  kl/teacher                                reverse KL of the policy to the teacher, per sampled token
  preference/loss accuracy margin chosen_reward rejected_reward chosen_logprob rejected_logprob   of pairs
  kl/reward coef                            a KL in the reward: of the old policy, and its weight
  logprob_diff/mean token_max clipped_share |trainer - engine| in nats, same weights; share outside the clip
  time/<phase> time/step                    wall seconds; time/refit is the weight sync and its canary
  idle/trainer engines                      share of the time without work (docs/async.md)
  staleness/mean max                        versions from the oldest token to the weights that train on it
  staleness/partial dropped                 samples drawn by several versions; samples that grew too stale
  staleness/restarted                       responses that were cut off when weights changed, so far
  buffer/finished unfinished                groups begun beside training that the step did not take
  logprob_diff/stale router arithmetic      parts that add up to the mean; stale_share, router_flip_share
  router/replaced_share                     tokens whose experts train.router_replay changed in some layer
  refit/seconds transfer_seconds mib trainer_mib engines_failed   the weight sync as it measured itself
  refit/pause_s                             the part in which an engine does not generate, worst engine
  refit/canary_diff                         |trainer - engine| in nats right after the sync, worst engine
  router/aux_loss seq_aux_loss              load balance of the experts, 1 is perfect (coefficient not 0)
  router/max_violation idle_share load_entropy   load of the experts; router/layer_<i>/... of each layer
  eval/greedy_accuracy greedy_reward prompts pass_at_<k>   held-out evaluation, step 0 before training

Token metrics are means over the trained tokens, those named *_max maxima.
Rows of samples.jsonl: step, split (train or eval), prompt_index, prompt, response, reward, ground_truth,
finish_reason, weights (the versions that drew it).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mcore_rl.metrics.rows import read_rows

Row = Mapping[str, Any]
Summary = dict[str, float | int | None]

NUM_SAMPLES_SHOWN = 3


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


def load_metrics(run_dir: Path) -> list[Row]:
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{run_dir}: no metrics.jsonl; give the run.dir of an `mcore-rl train` run")
    rows: list[Row] = [*read_rows(path)]
    if not _series(rows, "reward/mean"):
        raise ValueError(f"{path}: no row has reward/mean; no training step was completed")
    return rows


def load_samples(run_dir: Path) -> list[Row]:
    path = run_dir / "samples.jsonl"
    return [*read_rows(path)] if path.exists() else []


def summarize(rows: Sequence[Row]) -> Summary:
    """The numbers of summary.json; None where the run logged nothing to take them from.

    final_accuracy is that after the last step: an older one never stands in for it.
    train_seconds is the wall time of all steps, without evaluations and start-up. step0_logprob_diff_mean is
    that of the first step, whose samples come from the weights training started from.
    """
    last_step = max(step for step, _ in _series(rows, "reward/mean"))
    accuracies = dict(_series(rows, "eval/greedy_accuracy"))
    steps = _series(rows, "time/step")
    refits = _series(rows, "refit/seconds")
    num_samples = sum(value for _, value in _series(rows, "rollout/samples"))
    train_seconds = sum(value for _, value in steps)
    return {
        "warm_start_accuracy": accuracies.get(0),
        "final_accuracy": accuracies.get(last_step),
        "grpo_steps": last_step,
        "train_seconds": train_seconds if steps else None,
        "step0_logprob_diff_mean": dict(_series(rows, "logprob_diff/mean")).get(1),
        "samples_per_second": num_samples / train_seconds if train_seconds else None,
        "refit_seconds_median": median(value for _, value in refits) if refits else None,
    }


def pick_samples(rows: Sequence[Row]) -> list[Row]:
    """Samples of the last step, held-out ones if there are any, of different prompts."""
    last_step = max((row["step"] for row in rows), default=0)
    last = [row for row in rows if row["step"] == last_step]
    held_out = [row for row in last if row["split"] == "eval"]
    by_prompt: dict[int, Row] = {}
    for row in held_out or last:
        by_prompt.setdefault(row["prompt_index"], row)
    return list(by_prompt.values())[:NUM_SAMPLES_SHOWN]


def draw_reward_curve(rows: Sequence[Row], path: Path) -> None:
    """Reward per step with its moving average; below it the held-out accuracy, if any was measured."""
    rewards = _series(rows, "reward/mean")
    held_out = {
        name.removeprefix("eval/").replace("_", " "): points
        for name in sorted({name for row in rows for name in row})
        if name == "eval/greedy_accuracy" or name.startswith("eval/pass_at_")
        if (points := _series(rows, name))
    }
    figure = Figure(figsize=(8, 6.4 if held_out else 3.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 if held_out else 1, 1, sharex=True, squeeze=False)[:, 0]
    steps = [step for step, _ in rewards]
    values = [value for _, value in rewards]
    axes[0].plot(steps, values, color="#4c78a8", alpha=0.35, linewidth=1.2, label="each step")
    axes[0].plot(steps, moving_average(values), color="#4c78a8", linewidth=2.4, label="moving average")
    axes[0].set_ylabel("mean reward")
    axes[0].set_title(f"{path.parent.resolve().name}: training reward", loc="left")
    for (label, points), color in zip(held_out.items(), ("#f58518", "#54a24b", "#b279a2"), strict=False):
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
    """Exponential with `weight` on the past; early values are averaged over what there is."""
    averages, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + value, weight * norm + 1.0
        averages.append(total / norm)
    return averages


def _series(rows: Sequence[Row], name: str) -> list[tuple[int, float]]:
    """(step, value) of the rows that have a finite value."""
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def _make_table(summary: Summary) -> Table:
    table = Table(show_header=False, title="held-out accuracy and cost of the run", title_justify="left")
    before, after = summary["warm_start_accuracy"], summary["final_accuracy"]
    table.add_row("accuracy before", _format(before, ".1%"))
    table.add_row("accuracy after", _format(after, ".1%"), style="bold")
    if before is not None and after is not None:
        color = "green" if after > before else "red"
        table.add_row("gain", f"{(after - before) * 100:+.1f} points", style=f"bold {color}")
    table.add_row("steps", str(summary["grpo_steps"]))
    table.add_row("training time", _format(summary["train_seconds"], ",.0f", " s"))
    table.add_row("samples per second", _format(summary["samples_per_second"], ",.1f"))
    table.add_row("weight sync, median", _format(summary["refit_seconds_median"], ".3f", " s"))
    table.add_row("log-prob difference at start", _format(summary["step0_logprob_diff_mean"], ".1e"))
    return table


def _make_panel(row: Row) -> Panel:
    reward = _format(row["reward"], "g")
    title = f"{row['split']} sample, step {row['step']}: reward {reward}, truth {row['ground_truth']}"
    text = Text.assemble((row["prompt"].strip(), "dim"), "\n", row["response"].strip() or "(no text)")
    color = "green" if (row["reward"] or 0) > 0 else "red"
    return Panel(text, title=Text(title), title_align="left", border_style=color)


def _format(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else format(value, spec) + unit
