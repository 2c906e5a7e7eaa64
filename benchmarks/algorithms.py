"""Held-out accuracy that each algorithm reaches from one warm start, over seeds; the last line is JSON.

All train the quickstart's model on its problems. A run that is there already is not made again, so that a
killed benchmark goes on where it was; --out names the folder. Prints a table and draws the reward curves.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure

from mcore_rl.metrics.rows import read_rows
from mcore_rl.report import moving_average

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "recipe=tiny_moe_grpo"
ALGORITHMS: dict[str, list[str]] = {
    "GRPO": [],
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
DEADLINE_S = 1800


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="comma-separated")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "algorithms")
    parser.add_argument("overrides", nargs="*", help="key=value, for every run")
    args = parser.parse_args()
    names, seeds = args.algorithms.split(","), [int(seed) for seed in args.seeds.split(",")]
    if unknown := sorted(set(names) - set(ALGORITHMS)):
        parser.error(f"no algorithm {unknown[0]!r}; there are {', '.join(ALGORITHMS)}")
    warm_start = make_warm_start(args.out)
    folders = {}
    for name in names:
        for seed in seeds:
            folder = args.out / f"{name}_{seed}"
            overrides = [*ALGORITHMS[name], f"run.seed={seed}", *args.overrides]
            train(folder, [f"model.path={warm_start}", *overrides])
            folders[name, seed] = folder
    draw(folders, args.out / "algorithms.png")
    report(folders, names, seeds)


def make_warm_start(out: Path) -> Path:
    data, folder = ROOT / "data" / "arithmetic", out / "warm_start"
    if not (data / "train.parquet").exists():
        mcore_rl(["data", "arithmetic", "--out", str(data)])
    if not (folder / "hf" / "config.json").exists():
        mcore_rl(["sft", RECIPE, "model.init=random", f"run.dir={folder}"])
    return folder / "hf"


def train(folder: Path, overrides: list[str]) -> None:
    if not (folder / "summary.json").exists():
        settings = ["checkpoint.export_hf=false", "log.console=false", *overrides]
        mcore_rl(["train", RECIPE, f"run.dir={folder}", *settings])


def mcore_rl(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "mcore_rl.cli", *arguments]
    print(" ".join(arguments), flush=True)
    subprocess.run(command, cwd=ROOT, check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL)


def report(folders: dict[tuple[str, int], Path], names: list[str], seeds: list[int]) -> None:
    print("| algorithm | warm start | after training, by seed | gain in the mean | samples |")
    print("|---|---|---|---|---|")
    figures = {}
    for name in names:
        summaries = [json.loads((folders[name, seed] / "summary.json").read_text()) for seed in seeds]
        before = statistics.fmean(s["warm_start_accuracy"] for s in summaries)
        after = [s["final_accuracy"] for s in summaries]
        samples = [num_samples(folders[name, seed]) for seed in seeds]
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
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "loss/total" in row]
    return sum(row.get("sampling/samples", row["rollout/samples"]) for row in rows)


def draw(folders: dict[tuple[str, int], Path], path: Path) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(name for name, _ in folders):
        curves = []
        for (other, _), folder in folders.items():
            if other == name:
                rows = [row for row in read_rows(folder / "metrics.jsonl") if "loss/total" in row]
                curves.append([row.get("sampling/reward_mean", row["reward/mean"]) for row in rows])
        means = [statistics.fmean(values) for values in zip(*curves, strict=False)]
        axes.plot(range(1, len(means) + 1), moving_average(means), label=name)
    axes.set(xlabel="step", ylabel="reward, mean over seeds, smoothed", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
