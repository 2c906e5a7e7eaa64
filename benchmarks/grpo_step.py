"""Measures the tokens per second of GRPO steps of this system and of another, on four workloads.

Both train the same float32 model on the same prompts, on the same cores, in turns. A step is
everything between the ends of two optimizer steps; its tokens are those of the responses. This
system runs twice: with its compiled code for CPUs, and in plain torch (CC=none). The other is TRL,
or verl with `--against verl`; it keeps freed memory as this system does, and runs with the number
of processes and threads and the micro-batch that are the fastest of a grid. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_models import make_workload
from grpo_rivals import RIVALS, Resources, Rival, run_script
from grpo_workload import BY_NAME, WORKLOADS, Workload

STEPS = {"1M-32x64": 16, "1M-256x256": 6, "55M-64x128": 5, "SmolLM2-32x128": 4}
"""Steps of a turn of each system."""
WARMUP_STEPS = 2
TRIAL_STEPS = WARMUP_STEPS + 5
"""Steps of each way in which the other system is tried: five are measured."""
Run = dict[str, Any]


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
    print(json.dumps({"rival": args.against, "workloads": cells}))


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
        nargs=3,
        type=int,
        metavar=("PROCESSES", "THREADS", "MICRO_BATCH"),
        help="how the other runs; by default the fastest of a grid is looked for",
    )
    parser.add_argument("--png", type=Path, help="draw the ratios")
    parser.add_argument("--overrides", nargs="*", default=[], help="key=value, for our recipe")
    return parser.parse_args()


def compare(
    workload: Workload, folder: Path, num_steps: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Return medians of tokens per second, of alternating turns, and their ratios to the rival."""
    rival = RIVALS[args.against]
    if args.rival_resources:
        resources = Resources(*args.rival_resources)
    else:
        resources = find_fastest(rival, workload, folder, args.cores)
    options = ["--steps", str(num_steps), *args.overrides]
    systems: dict[str, Callable[[], Run]] = {
        "compiled": lambda: run_ours(workload, folder, options),
        "plain": lambda: run_ours(workload, folder, options, CC="none"),
        "rival": lambda: rival.run(workload, folder, num_steps, resources),
    }
    runs: dict[str, list[Run]] = {name: [] for name in systems}
    for turn in range(args.repeats):
        for name in systems if turn % 2 == 0 else reversed(systems):
            runs[name].append(systems[name]())
    return summarize(workload, runs) | {
        "processes": 2 * workload.processes,  # of ranks and engines
        "rival_processes": resources.processes,
        "rival_threads": resources.threads,
        "rival_micro_batch": resources.micro_batch,
    }


def summarize(workload: Workload, runs: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """Return the figures of a workload; those of this system begin with compiled_ and plain_."""
    rates = {name: [rate(run) for run in turns] for name, turns in runs.items()}
    figures: dict[str, float] = {}
    for name, turns in runs.items():
        figures[f"{name}_tokens_per_second"] = statistics.median(rates[name])
        figures[f"{name}_response_len"] = mean_len(workload, turns)
        figures[f"{name}_seconds"] = statistics.median(s for run in turns for s in run["seconds"])
        if name != "rival":
            middle = statistics.median(rates[name]) / statistics.median(rates["rival"])
            figures[f"{name}_ratio"] = middle
            figures[f"{name}_least"] = min(rates[name]) / max(rates["rival"])
            figures[f"{name}_most"] = max(rates[name]) / min(rates["rival"])
    return {name: round(value, 3) for name, value in figures.items()}


def find_fastest(rival: Rival, workload: Workload, folder: Path, cores: int) -> Resources:
    """Try all numbers of processes and threads that fit the cores, each with three micro-batches.

    Data-parallel processes divide the samples; a rival that runs as one process is tried as one.
    """
    grid = [
        Resources(processes, threads, workload.num_samples // processes // parts)
        for processes in range(1, cores + 1 if rival.is_data_parallel else 2)
        for threads in range(1, cores // processes + 1)
        for parts in (1, 2, 4)
    ]
    rates = {r: rate(rival.run(workload, folder, TRIAL_STEPS, r)) for r in grid}
    for resources, tokens_per_second in rates.items():
        print(f"{workload.name}: {resources}: {tokens_per_second:.0f} tokens a second", flush=True)
    return max(rates, key=lambda resources: rates[resources])


def rate(run: Run) -> float:
    """Return tokens per second of a turn's steps after its warm-up."""
    warm = WARMUP_STEPS - 1  # the first step is not in the list
    return sum(run["tokens"][warm:]) / sum(run["seconds"][warm:])


def mean_len(workload: Workload, runs: Sequence[Run]) -> float:
    return statistics.fmean(n for run in runs for n in run["tokens"]) / workload.num_samples


def run_ours(workload: Workload, folder: Path, options: Sequence[str], **environment: str) -> Run:
    """Return seconds and tokens of the steps of `mcore-rl train` but the first."""
    run = ["--workload", workload.name, "--folder", str(folder), *options]
    return run_script(sys.executable, "grpo_ours.py", run, **environment)


def report(cells: Mapping[str, Mapping[str, Any]], rival: str) -> None:
    """Print a table of tokens per second."""
    columns = ("workload", "compiled", "plain torch", rival, "processes", f"{rival}'s best")
    print("".join(f"{column:>16s}" for column in columns))
    for name, cell in cells.items():
        best = "{rival_processes} x {rival_threads}, {rival_micro_batch}".format(**cell)
        values = [
            f"{cell['compiled_tokens_per_second']:.0f} ({cell['compiled_ratio']:.2f})",
            f"{cell['plain_tokens_per_second']:.0f} ({cell['plain_ratio']:.2f})",
            f"{cell['rival_tokens_per_second']:.0f}",
            f"{cell['processes']}",
            best,
        ]
        print(f"{name:>16s}" + "".join(f"{value:>16s}" for value in values))


def draw(cells: Mapping[str, Mapping[str, Any]], rival: str, path: Path) -> None:
    """Draw the ratios as bars, with the range from the worst pair of turns to the best."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for kind, offset, color in (("compiled", -0.2, "#4477aa"), ("plain", 0.2, "#bbbbbb")):
        ratios = [cell[f"{kind}_ratio"] for cell in cells.values()]
        below = [cell[f"{kind}_ratio"] - cell[f"{kind}_least"] for cell in cells.values()]
        above = [cell[f"{kind}_most"] - cell[f"{kind}_ratio"] for cell in cells.values()]
        places = [i + offset for i in range(len(cells))]
        bars = axes.barh(
            places, ratios, 0.38, xerr=[below, above], color=color, capsize=3, label=kind
        )
        axes.bar_label(bars, labels=[f"{ratio:.2f}" for ratio in ratios], label_type="center")
    axes.set_yticks(range(len(cells)), list(cells))
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.legend()
    axes.set_xlabel(f"tokens per second of a GRPO step on a CPU, relative to {rival}")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
