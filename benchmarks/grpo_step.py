"""Measures the tokens per second of GRPO steps of this system and of another, on four workloads.

Both train the same float32 model on the same prompts, on the same cores, in turns. A step is
everything between the ends of two optimizer steps; its tokens are those of the responses. The other
is TRL, or verl with `--against verl`, and runs with the number of threads and the micro-batch that
are fastest for it. The last line is JSON.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_rivals import RIVALS, Resources, Rival, run_script
from grpo_workload import BY_NAME, WORKLOADS, Workload, make_workload

STEPS = {"1M-32x64": 16, "1M-256x256": 6, "55M-64x128": 5, "SmolLM2-32x128": 4}
"""Steps of a turn of each system."""
WARMUP_STEPS = 2
TRIAL_STEPS = 3


def main() -> None:
    args = parse_arguments()
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: args.cores]))
    RIVALS[args.against].install()
    cells = {}
    for name in args.workloads:
        workload = BY_NAME[name]
        with tempfile.TemporaryDirectory(prefix="grpo_step_") as folder:
            make_workload(workload, Path(folder))
            steps = args.steps or STEPS[name]
            cells[name] = compare(workload, Path(folder), steps, args)
        print(json.dumps({name: cells[name]}), flush=True)
    report(cells, args.against)
    if args.png:
        draw(cells, args.against, args.png)
    ratios = [cell["ratio"] for cell in cells.values()]
    mean = round(math.exp(statistics.fmean(map(math.log, ratios))), 3)
    print(json.dumps({"geometric_mean": mean, "rival": args.against, "workloads": cells}))


def parse_arguments() -> argparse.Namespace:
    names = [workload.name for workload in WORKLOADS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--against", choices=tuple(RIVALS), default="trl")
    parser.add_argument("--steps", type=int, help=f"steps of a turn, {WARMUP_STEPS} of warm-up")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each system")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument(
        "--rival-resources",
        nargs=2,
        type=int,
        metavar=("THREADS", "MICRO_BATCH"),
        help="how the other runs; by default the fastest of four ways is looked for",
    )
    parser.add_argument("--png", type=Path, help="draw the ratios")
    parser.add_argument("--overrides", nargs="*", default=[], help="key=value, for our recipe")
    return parser.parse_args()


def compare(
    workload: Workload, folder: Path, num_steps: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Return medians of tokens per second of both, of alternating turns, and their ratio."""
    rival = RIVALS[args.against]
    if args.rival_resources:
        resources = Resources(*args.rival_resources)
    else:
        resources = fastest_resources(rival, workload, folder, args.cores)
    ours: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for turn in range(args.repeats):
        systems = [
            lambda: ours.append(run_ours(workload, folder, num_steps, args.overrides)),
            lambda: others.append(rival.run(workload, folder, num_steps, resources)),
        ]
        for run_system in systems if turn % 2 == 0 else reversed(systems):
            run_system()
    our_rates, rival_rates = list(map(rate, ours)), list(map(rate, others))
    figures = {
        "ratio": statistics.median(our_rates) / statistics.median(rival_rates),
        "tokens_per_second": statistics.median(our_rates),
        "rival_tokens_per_second": statistics.median(rival_rates),
        "least": min(our_rates) / max(rival_rates),
        "most": max(our_rates) / min(rival_rates),
        "response_len": mean_len(workload, ours),
        "rival_response_len": mean_len(workload, others),
        "seconds": statistics.median(s for run in ours for s in run["seconds"]),
        "rival_seconds": statistics.median(s for run in others for s in run["seconds"]),
    }
    rounded = {name: round(value, 3) for name, value in figures.items()}
    return rounded | {
        "rival_threads": resources.threads,
        "rival_micro_batch": resources.micro_batch,
    }


def fastest_resources(rival: Rival, workload: Workload, folder: Path, cores: int) -> Resources:
    """Try each number of threads, then smaller micro-batches with the faster one."""
    whole = workload.num_samples

    def rate_of(resources: Resources) -> float:
        return rate(rival.run(workload, folder, TRIAL_STEPS, resources))

    rates = {r: rate_of(r) for r in (Resources(n, whole) for n in range(1, cores + 1))}
    threads = max(rates, key=lambda resources: rates[resources]).threads
    for micro_batch in (whole // 2, whole // 4):
        resources = Resources(threads, micro_batch)
        rates[resources] = rate_of(resources)
    return max(rates, key=lambda resources: rates[resources])


def rate(run: Mapping[str, Any]) -> float:
    """Return tokens per second of a turn's steps after its warm-up."""
    warm = WARMUP_STEPS - 1  # the first step is not in the list
    return sum(run["tokens"][warm:]) / sum(run["seconds"][warm:])


def mean_len(workload: Workload, runs: Sequence[Mapping[str, Any]]) -> float:
    return statistics.fmean(n for run in runs for n in run["tokens"]) / workload.num_samples


def run_ours(
    workload: Workload, folder: Path, num_steps: int, overrides: Sequence[str]
) -> dict[str, Any]:
    """Return seconds and tokens of the steps of `mcore-rl train` but the first."""
    run = ["--workload", workload.name, "--folder", str(folder), "--steps", str(num_steps)]
    return run_script(sys.executable, "grpo_ours.py", [*run, *overrides])


def report(cells: Mapping[str, Mapping[str, Any]], rival: str) -> None:
    """Print a table of tokens per second."""
    print(
        f"{'workload':18s}{'mcore_rl':>10s}{rival:>10s}{'ratio':>8s}{'length':>9s}{'threads':>9s}"
    )
    for name, cell in cells.items():
        rates = f"{cell['tokens_per_second']:10.0f}{cell['rival_tokens_per_second']:10.0f}"
        rest = f"{cell['ratio']:8.2f}{cell['response_len']:9.1f}{cell['rival_threads']:9d}"
        print(f"{name:18s}{rates}{rest}")


def draw(cells: Mapping[str, Mapping[str, Any]], rival: str, path: Path) -> None:
    """Draw the ratios as bars, with the range from the worst pair of turns to the best."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.8), layout="constrained")
    axes = figure.subplots()
    ratios = [cell["ratio"] for cell in cells.values()]
    below = [cell["ratio"] - cell["least"] for cell in cells.values()]
    above = [cell["most"] - cell["ratio"] for cell in cells.values()]
    bars = axes.barh(list(cells), ratios, xerr=[below, above], color="#4477aa", capsize=3)
    axes.bar_label(bars, labels=[f"{ratio:.2f}" for ratio in ratios], label_type="center")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel(f"tokens per second of a GRPO step, relative to {rival}")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
