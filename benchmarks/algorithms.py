"""Measures the held-out accuracy that each algorithm reaches from one warm start, over seeds.

All learn the countdown problems, with the options that docs/algorithms.md shows for them. A run
that exists is not repeated, so a killed benchmark continues where it was; --out names the folder.
Prints a table, draws the reward curves and ends with a line of JSON.
"""

import json
import re
import statistics
from pathlib import Path

from matplotlib.figure import Figure

from mcore_rl.logs.run_report import compute_moving_average
from variants import COUNTDOWN, ROOT, Folders, read_summaries, step_rows, train_variants

DOCUMENT = ROOT / "docs" / "algorithms.md"
STEPS_PER_ROLLOUT = 2
"""Optimizer steps per rollout: in the second, ratios differ from 1, so clipping has an effect."""
CRITIC = [
    "rollout.prompts_per_step=512",
    "rollout.samples_per_prompt=1",
    "critic.mini_batches=2",
    "critic.warmup_steps=5",
    "critic.optimizer.lr=1e-3",
]
MORE: dict[str, list[str]] = {
    "GRPO": [],
    "Dr. GRPO": [],
    "DAPO": [],
    "GSPO": [],
    "CISPO": [],
    "RLOO": [],
    "REINFORCE++": [],
    "PPO": CRITIC,
    "Online DPO": ["train.mini_batches=1"],
}
"""The algorithms compared, each with its options beside those that the document shows."""


def main() -> None:
    variants = {
        name: [*documented_options(name), f"train.mini_batches={STEPS_PER_ROLLOUT}", *more]
        for name, more in MORE.items()
    }
    folders, out = train_variants(__doc__ or "", COUNTDOWN, variants, "algorithms")
    draw(folders, out / "algorithms.png")
    report(folders)


def documented_options(name: str) -> list[str]:
    """Return the options in the algorithm's row of the document's table."""
    row = re.search(rf"^\| {re.escape(name)} \| `([^`]+)`", DOCUMENT.read_text(), re.MULTILINE)
    if row is None:
        raise ValueError(f"{DOCUMENT} has no row for {name!r}")
    return row[1].split()


def report(folders: Folders) -> None:
    print("| algorithm | warm start | after training, by seed | gain in the mean | samples |")
    print("|---|---|---|---|---|")
    figures = {}
    for name, seed_folders in folders.items():
        summaries = read_summaries(seed_folders)
        before = statistics.fmean(summary["warm_start_accuracy"] for summary in summaries)
        after = [summary["final_accuracy"] for summary in summaries]
        samples = [num_samples(folder) for folder in seed_folders]
        gain = statistics.fmean(after) - before
        by_seed = ", ".join(f"{100 * value:.1f} %" for value in after)
        print(
            f"| {name} | {100 * before:.1f} % | {by_seed} | {100 * gain:.1f} points |"
            f" {statistics.fmean(samples):,.0f} |"
        )
        figures[name] = {"before": before, "after": after, "gain": gain}
    print(json.dumps(figures))


def num_samples(folder: Path) -> float:
    """Return how many samples were drawn to train on, including those of groups left out."""
    return sum(row.get("sampling/samples", row["rollout/samples"]) for row in step_rows(folder))


def reward_curve(folder: Path) -> list[float]:
    return [row.get("sampling/reward_mean", row["reward/mean"]) for row in step_rows(folder)]


def draw(folders: Folders, path: Path) -> None:
    """Draw each algorithm's reward, the mean over seeds, to an image file."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, seed_folders in folders.items():
        curves = [reward_curve(folder) for folder in seed_folders]
        means = [statistics.fmean(values) for values in zip(*curves, strict=False)]
        axes.plot(range(1, len(means) + 1), compute_moving_average(means), label=name)
    axes.set(xlabel="step", ylabel="reward, mean over seeds, smoothed", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
