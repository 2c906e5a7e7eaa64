"""Seeds in, the held-out accuracy that each algorithm reaches from one warm start out.

All train the quickstart's model on its problems. A run that exists is not repeated, so a killed
benchmark continues where it was; --out names the folder. Prints a table, draws the reward curves
and ends with a line of JSON.
"""

import json
import statistics
from pathlib import Path

from matplotlib.figure import Figure

from mcore_rl.report.curve import moving_average
from variants import Folders, read_summaries, step_rows, train_variants

ALGORITHMS: dict[str, list[str]] = {
    "GRPO": [],
    "PPO": ["recipe=tiny_moe_ppo"],
    "GSPO": [
        "algorithm.loss=gspo",
        "algorithm.aggregation=sequence_mean",
        "algorithm.clip_low=0.003",
        "algorithm.clip_high=0.004",
        "train.mini_batches=2",
    ],
    "CISPO": ["algorithm.loss=cispo", "algorithm.clip_low=1.0", "algorithm.clip_high=2.0"],
    "RLOO": ["algorithm.advantage=rloo", "algorithm.loss=policy_gradient"],
    "REINFORCE++": [
        "algorithm.advantage=reinforce_plus_plus",
        "algorithm.kl.coef=0.001",
        "algorithm.kl.estimator=k1",
        "algorithm.kl.in_reward=true",
    ],
    "DAPO": [
        "algorithm.clip_high=0.28",
        "algorithm.filter_overlong=true",
        "rollout.dynamic_sampling=true",
        "reward.overlong_buffer_len=4",
    ],
    "Online DPO": [
        "algorithm.advantage=dpo",
        "algorithm.loss=policy_gradient",
        "algorithm.aggregation=token_sum",
    ],
}


def main() -> None:
    folders, out = train_variants(__doc__ or "", ALGORITHMS, "algorithms")
    draw(folders, out / "algorithms.png")
    report(folders)


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
        axes.plot(range(1, len(means) + 1), moving_average(means), label=name)
    axes.set(xlabel="step", ylabel="reward, mean over seeds, smoothed", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
