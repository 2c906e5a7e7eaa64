"""Held-out accuracy that each algorithm reaches from one warm start, over seeds; the last line is JSON.

All train the quickstart's model on its problems. A run that is there already is not made again, so that a
killed benchmark goes on where it was; --out names the folder. Prints a table and draws the reward curves.
"""

import json
import statistics
from pathlib import Path

from matplotlib.figure import Figure

from mcore_rl.report.curve import moving_average
from variants import Folders, step_rows, summaries_of, train_variants

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
    for name, of_seeds in folders.items():
        summaries = summaries_of(of_seeds)
        before = statistics.fmean(s["warm_start_accuracy"] for s in summaries)
        after = [s["final_accuracy"] for s in summaries]
        samples = [num_samples(folder) for folder in of_seeds]
        gain = statistics.fmean(after) - before
        by_seed = ", ".join(f"{100 * value:.1f} %" for value in after)
        print(
            f"| {name} | {100 * before:.1f} % | {by_seed} | {100 * gain:.1f} points |"
            f" {statistics.fmean(samples):,.0f} |"
        )
        figures[name] = {"before": before, "after": after, "gain": gain}
    print(json.dumps(figures))


def num_samples(folder: Path) -> float:
    """All that were drawn to train on, groups that were left out included."""
    return sum(row.get("sampling/samples", row["rollout/samples"]) for row in step_rows(folder))


def draw(folders: Folders, path: Path) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, of_seeds in folders.items():
        curves = [
            [row.get("sampling/reward_mean", row["reward/mean"]) for row in step_rows(folder)]
            for folder in of_seeds
        ]
        means = [statistics.fmean(values) for values in zip(*curves, strict=False)]
        axes.plot(range(1, len(means) + 1), moving_average(means), label=name)
    axes.set(xlabel="step", ylabel="reward, mean over seeds, smoothed", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
