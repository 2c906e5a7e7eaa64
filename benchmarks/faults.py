"""Trains a tiny model with tools twice from one warm start: alone, and under random faults.

The run has every kind of process: two trainer ranks, a critic, two engines, a collector with its
gateway, environment workers, a sandbox and a search server. Faults of all kinds (fault_run.py)
follow from --seed; each comes at a random moment once the run has taken --every more steps. After
each, the run is checked. A benchmark that was stopped goes on after its last fault if it is called
again with the same --dir.

Prints a table of the seconds lost by kind, and writes <dir>/faults.png; the last line is JSON.
Seconds are lost beyond the steps that were taken meanwhile, at the run's own median step.
"""

import argparse
import json
import random
import subprocess
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from fault_machine import open_namespace
from fault_run import COMMAND, JUMP, VICTIMS, Fault, Struck, TrainRun, find_unavailable, strike
from mcore_rl.logs.ledger.balance import read_balance
from mcore_rl.logs.rows import read_rows

TOOLS = Path(__file__).with_name("fault_tools.py").absolute()
ENGINES = ("engine scheduler", "engine server")
RANKS = ("trainer rank", "critic rank")
SETTINGS = (
    "recipe=tiny_agent_calculator",
    "algorithm.advantage=gae",
    "agents.workers=2",
    "agents.episodes_per_worker=32",
    "agents.deadline_s=20",
    f'agents.options.functions=["{TOOLS}:calculator"]',
    f"agents.options.reward={TOOLS}:reward",
    "sandbox.workers=2",
    "rollout.engines=2",
    "rollout.samples_per_prompt=4",
    "rollout.restarts=1000",
    "rollout.request_timeout_s=20",
    "reward.max_failed_share=1",
    "run.recovery.restarts=1000",
    "run.call_timeout_s=40",
    "checkpoint.every_steps=5",
    "checkpoint.on_error=continue",
    "checkpoint.export_hf=false",
    "eval.every_steps=0",
    "eval.max_prompts=64",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("runs/faults"))
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps from one fault to the next")
    parser.add_argument("--alone", type=int, default=20, help="steps of the run left alone")
    parser.add_argument("--sft", type=int, default=500, help="steps of the warm start")
    parser.add_argument(
        "--prompts", type=int, default=8, help="prompts of a step, of four episodes each"
    )
    parser.add_argument("--kinds", default="", help="processes, by comma; default: all")
    parser.add_argument("--how", default="", help="faults, by comma; default: all")
    parser.add_argument(
        "--clock",
        action="store_true",
        help="also set this machine's clock five minutes forward, and back; all programs see it",
    )
    parser.add_argument("--steps", type=int, help="of the run; default: enough for all faults")
    parser.add_argument("--seed", type=int, default=0)
    with open_namespace() as namespace:
        measure(parser.parse_args(), namespace)


def measure(args: argparse.Namespace, namespace: str | None) -> None:
    """Train alone and under faults; print the table, and the figures as JSON."""
    folder: Path = args.dir.absolute()
    left_out = find_unavailable(namespace)
    if not args.clock:
        left_out.setdefault(JUMP, "--clock was not given")
    kinds = [kind for kind in args.kinds.split(",") if kind] or list(VICTIMS)
    wanted = [how for how in args.how.split(",") if how]
    faults = draw(args.seed, args.faults, list_faults(kinds, wanted, left_out))
    settings = make_warm_start(folder, args.sft)
    settings.append(f"rollout.prompts_per_step={args.prompts}")
    alone = train_alone(TrainRun(folder / "alone", settings, namespace), args.alone)
    num_steps = args.steps or 10 + args.faults * (args.every + 3)
    run = TrainRun(folder / "disturbed", settings, namespace)
    rows = disturb(run, faults, args.every, num_steps)
    step_s = measure_step(run.folder)
    print(make_table(rows, step_s))
    plot(rows, step_s, folder / "faults.png")
    figures = summarize(rows, step_s, alone)
    print(json.dumps({**figures, **read_end(run.folder), "left_out": left_out}))


def list_faults(
    kinds: Sequence[str], wanted: Sequence[str], left_out: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return by kind the faults that can be done to it; `wanted`: these alone, if any are named."""
    found = {
        kind: [
            how
            for how in VICTIMS[kind].faults
            if how not in left_out and (not wanted or how in wanted)
        ]
        for kind in kinds
    }
    return {kind: hows for kind, hows in found.items() if hows}


def draw(seed: int, num_faults: int, possible: Mapping[str, Sequence[str]]) -> list[Fault]:
    """Return the faults in order: each kind of process once, then each again, in random orders."""
    rng = random.Random(seed)
    kinds = sorted(possible)
    faults: list[Fault] = []
    while len(faults) < num_faults:
        for kind in rng.sample(kinds, len(kinds)):
            faults.append(
                Fault(len(faults), kind, rng.choice(possible[kind]), rng.uniform(0.0, 3.0))
            )
    return faults[:num_faults]


def make_warm_start(folder: Path, num_steps: int) -> list[str]:
    """Make data, index and warm start unless they are there; return a run's settings."""
    data, warm, search = folder / "data", folder / "warm_start", folder / "search"
    if not (data / "model").is_dir():
        run_quietly("data", "calculator", "--out", str(data))
    if not (search / "index").is_dir():
        run_quietly("data", "search", "--out", str(search))
        corpus, index = str(search / "corpus.jsonl"), str(search / "index")
        run_quietly("search", "build", "--corpus", corpus, "--out", index)
    if not (warm / "hf").is_dir():
        shared = [f"model.path={data / 'model'}", f"sft.data=[{data / 'sft.parquet'}]"]
        sized = ["model.init=random", f"sft.steps={num_steps}", f"run.dir={warm}"]
        run_quietly("sft", "recipe=tiny_agent_calculator", *shared, *sized)
    return [
        *SETTINGS,
        f"model.path={warm / 'hf'}",
        f"data.train=[{data / 'train.parquet'}]",
        f"eval.data=[{data / 'heldout.parquet'}]",
        f"search.index={search / 'index'}",
    ]


def run_quietly(*arguments: str) -> None:
    subprocess.run((*COMMAND, *arguments), check=True, stdout=subprocess.DEVNULL, timeout=3600)


def train_alone(run: TrainRun, num_steps: int) -> dict[str, float]:
    """Return seconds of a step and the last accuracy of a run without a fault."""
    run.settings = [*run.settings, f"run.steps={num_steps}"]
    run.start()
    assert run.process is not None
    if run.process.wait(3600) != 0:
        raise RuntimeError(f"the run without a fault failed: {run.tail()}")
    return {
        "step_s": measure_step(run.folder),
        "steps_s": measure_steps(run.folder),
        "accuracy": json.loads((run.folder / "summary.json").read_text())["final_accuracy"],
    }


def measure_step(folder: Path) -> float:
    """Return the median of the seconds from one step of a run to the next.

    Faults disturb fewer than half of the steps, so a disturbed run tells how fast its machine was.
    """
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "loss/total" in row]
    return median(b["timestamp"] - a["timestamp"] for a, b in pairwise(rows))


def measure_steps(folder: Path) -> float:
    """Return the seconds from the first step of a run to its last one."""
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "loss/total" in row]
    return rows[-1]["timestamp"] - rows[0]["timestamp"]


def disturb(run: TrainRun, faults: Sequence[Fault], every: int, num_steps: int) -> list[Struck]:
    """Do the faults that <run>.faults.jsonl does not have yet; let the run end; return all."""
    path = run.folder.with_suffix(".faults.jsonl")
    rows = [Struck(**row) for row in read_rows(path)]
    run.settings = [*run.settings, f"run.steps={num_steps}"]
    before = run.count_steps()
    run.start()
    run.wait_for_step(before + 1)
    at_step, at_s = run.count_steps(), time.monotonic()
    for fault in faults[len(rows) :]:
        if not run.wait_for_step(at_step + every - 2):
            raise RuntimeError(f"no step to disturb: {run.tail()}")
        struck = strike(run, fault)
        now_step, now_s = run.count_steps(), time.monotonic()
        struck.window_s, struck.window_steps = now_s - at_s, now_step - at_step
        at_step, at_s = now_step, now_s
        with path.open("a") as file:
            file.write(json.dumps(asdict(struck)) + "\n")
        print(json.dumps(asdict(struck)), flush=True)
        rows.append(struck)
    assert run.process is not None
    if run.process.wait(3600) != 0:
        raise RuntimeError(f"the disturbed run did not end well: {run.tail()}")
    if left := run.end():
        rows[-1].problems += tuple(f"left after the end: {title}" for title in left)
    return rows


def read_end(folder: Path) -> dict[str, object]:
    balance = read_balance(folder)
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "accuracy": summary["final_accuracy"],
        "steps_s": round(measure_steps(folder), 1),
        "books_balance": balance.holds,
        "finished": balance.ended == "finished",
    }


def lost_s(row: Struck, step_s: float) -> float:
    """Return the seconds that a fault cost, beyond those of the steps that were taken."""
    return max(row.seconds - row.gained * step_s, 0.0)


def summarize(rows: Sequence[Struck], step_s: float, alone: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of all faults; `step_s` is of the disturbed run itself."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_kind[row.kind].append(lost_s(row, step_s))

    def find_median(kinds: Sequence[str]) -> float | None:
        lost = [seconds for kind in kinds for seconds in by_kind.get(kind, [])]
        return round(median(lost), 1) if lost else None

    steps = sum(row.window_steps for row in rows)
    seconds = sum(row.window_s for row in rows)
    return {
        "faults": len(rows),
        "steps_a_fault": round(steps / len(rows), 1),
        "step_s": round(step_s, 2),
        "step_alone_s": round(alone["step_s"], 2),
        "steps_alone_s": round(alone["steps_s"], 1),
        "effective": round(steps * step_s / seconds, 2),
        "median_rank_s": find_median(RANKS),
        "median_engine_s": find_median(ENGINES),
        "median_s": {kind: round(median(lost), 1) for kind, lost in sorted(by_kind.items())},
        "hangs": sum(problem.startswith("hang") for row in rows for problem in row.problems),
        "problems": [
            f"{row.number} {row.kind} {row.how}: {problem}"
            for row in rows
            for problem in row.problems
        ],
        "accuracy_alone": alone["accuracy"],
    }


def group_rows(rows: Sequence[Struck]) -> dict[tuple[str, str], list[Struck]]:
    groups: dict[tuple[str, str], list[Struck]] = defaultdict(list)
    for row in rows:
        groups[row.kind, row.how].append(row)
    return dict(sorted(groups.items()))


def make_table(rows: Sequence[Struck], step_s: float) -> str:
    lines = [
        "| process | fault | times | run ended | seconds lost, median | most |",
        "|---|---|---|---|---|---|",
    ]
    for (kind, how), group in group_rows(rows).items():
        lost = [lost_s(row, step_s) for row in group]
        num_ended = sum(row.ended is not None for row in group)
        figures = f"{median(lost):.1f} | {max(lost):.1f} |"
        lines.append(f"| {kind} | {how} | {len(group)} | {num_ended} | {figures}")
    return "\n".join(lines)


def plot(rows: Sequence[Struck], step_s: float, path: Path) -> None:
    """Draw the seconds that each kind of fault cost."""
    groups = group_rows(rows)
    figure = Figure(figsize=(7, 0.3 * len(groups) + 1.2), layout="constrained")
    axes = figure.subplots()
    for place, group in enumerate(groups.values()):
        lost = [lost_s(row, step_s) for row in group]
        axes.plot(lost, [place] * len(lost), "o", color="tab:blue", alpha=0.5)
        axes.plot([median(lost)], [place], "|", color="black", markersize=14)
    axes.set_yticks(range(len(groups)), [f"{kind}: {how}" for kind, how in groups])
    axes.invert_yaxis()
    axes.set_xlabel("seconds lost (line: median)")
    axes.set_xlim(left=0)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
