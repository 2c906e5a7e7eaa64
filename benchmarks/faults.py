"""Trains the quickstart's model twice from one warm start: alone, and under random faults.

Each fault is SIGKILL or SIGSTOP for a random process of the run, at a random moment; the next one
comes when the run has taken a few steps since. The faults follow from --seed. The table has the
seconds from a fault until the run has taken its next step, beyond what such a step takes in the
run that was left alone. The last line is JSON.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from mcore_rl.logs.rows import read_rows

COMMAND = (sys.executable, "-m", "mcore_rl.cli")
VICTIMS = {
    "trainer rank": ("ray::trainer_rank", (signal.SIGKILL, signal.SIGSTOP)),
    "engine scheduler": ("sglang::scheduler", (signal.SIGKILL, signal.SIGSTOP)),
    "engine server": ("mcore_rl.rollout.server", (signal.SIGKILL,)),
    "collector": ("ray::collector_rank", (signal.SIGKILL,)),
}
"""Kind of process -> a word of its command line, and the signals that it may get."""
SETTINGS = (
    "rollout.restarts=1000",
    "run.recovery.restarts=1000",
    "run.call_timeout_s=20",
    "rollout.request_timeout_s=20",
    "checkpoint.every_steps=20",
)
POLL_S = 0.02
STEP_TIMEOUT_S = 180.0
"""A run that takes no step for so long after a fault hangs."""


class Fault(NamedTuple):
    """A fault, and the seconds until the run's next two steps."""

    kind: str
    signal: str
    step: int
    seconds: float


class HangError(RuntimeError):
    """A run took no step after a fault."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("runs/faults"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    settings = make_warm_start(args.dir, args.steps)
    alone = train(args.dir / "alone", settings)
    disturbed = train(args.dir / "disturbed", settings, draw(args.seed, args.faults, args.steps))
    print(make_table(disturbed["faults"], alone["step_s"]))
    ranks = [lost_s(f, alone["step_s"]) for f in disturbed["faults"] if f.kind == "trainer rank"]
    engines = [lost_s(f, alone["step_s"]) for f in disturbed["faults"] if "engine" in f.kind]
    print(
        json.dumps(
            {
                "steps": args.steps,
                "faults": len(disturbed["faults"]),
                "times_as_long": round(disturbed["seconds"] / alone["seconds"], 2),
                "effective": round(alone["seconds"] / disturbed["seconds"], 2),
                "median_rank_s": round(median(ranks), 1) if ranks else None,
                "median_engine_s": round(median(engines), 1) if engines else None,
                "accuracy_alone": alone["accuracy"],
                "accuracy_disturbed": disturbed["accuracy"],
                "left_processes": disturbed["left"],
            }
        )
    )


def make_warm_start(folder: Path, num_steps: int) -> list[str]:
    """Make the quickstart's data and warm start unless they are there; return a run's settings."""
    data, warm = folder / "data", folder / "warm_start"
    if not (warm / "hf").is_dir():
        run_quietly("data", "arithmetic", "--out", str(data))
        shared = [f"model.path={data / 'model'}", f"sft.data=[{data / 'sft.parquet'}]"]
        run_quietly("sft", "recipe=tiny_moe_grpo", "model.init=random", *shared, f"run.dir={warm}")
    return [
        "recipe=tiny_moe_grpo",
        f"model.path={warm / 'hf'}",
        f"data.train=[{data / 'train.parquet'}]",
        f"eval.data=[{data / 'heldout.parquet'}]",
        f"run.steps={num_steps}",
        *SETTINGS,
    ]


def run_quietly(*arguments: str) -> None:
    subprocess.run((*COMMAND, *arguments), check=True, stdout=subprocess.DEVNULL, timeout=1200)


def draw(seed: int, num_faults: int, num_steps: int) -> list[tuple[int, float, str, int]]:
    """Return (step, seconds into it, kind of process, signal) of each fault, in order."""
    rng = random.Random(seed)
    gap = max((num_steps - 2) // num_faults, 1)
    faults = []
    for number in range(num_faults):
        kind = rng.choice(sorted(VICTIMS))
        number_of_signal = rng.choice(VICTIMS[kind][1])
        faults.append((1 + number * gap, rng.uniform(0.0, 1.0), kind, number_of_signal))
    return faults


def train(
    run: Path, settings: Sequence[str], faults: Sequence[tuple[int, float, str, int]] = ()
) -> dict[str, Any]:
    """Run to the end, under `faults`; return its seconds, median step, accuracy and faults."""
    with (run.parent / f"{run.name}.log").open("w") as log:
        process = psutil.Popen((*COMMAND, "train", *settings, f"run.dir={run}"), stdout=log)
        seen: set[psutil.Process] = set()
        struck = [strike(process, run, fault, seen) for fault in faults]
        while process.poll() is None:
            seen |= set(process.children(recursive=True))
            time.sleep(1.0)
    if process.returncode != 0:
        raise RuntimeError(f"{run} ended with status {process.returncode}: see {run.parent}")
    rows = [row for row in read_rows(run / "metrics.jsonl") if "loss/total" in row]
    summary = json.loads((run / "summary.json").read_text())
    return {
        "seconds": rows[-1]["timestamp"] - rows[0]["timestamp"],
        "step_s": median(row["time/step"] for row in rows),
        "accuracy": summary["final_accuracy"],
        "faults": struck,
        "left": sum(is_alive(p) for p in seen),
    }


def strike(
    process: psutil.Popen, run: Path, fault: tuple[int, float, str, int], seen: set[psutil.Process]
) -> Fault:
    """Wait for the step of a fault, signal a process, and wait until two more steps are taken."""
    step, delay_s, kind, number = fault
    wait_for_step(process, run, step)
    time.sleep(delay_s)
    children = process.children(recursive=True)
    seen |= set(children)
    word = VICTIMS[kind][0]
    victims = [p for p in children if is_alive(p) and word in " ".join(p.cmdline())]
    began_s = time.monotonic()
    if victims:
        random.Random(step).choice(victims).send_signal(number)
    taken = count_steps(run)
    wait_for_step(process, run, taken + 2)  # the step under way may not need the process
    return Fault(kind, signal.Signals(number).name, step, time.monotonic() - began_s)


def wait_for_step(process: psutil.Popen, run: Path, step: int) -> None:
    until_s = time.monotonic() + STEP_TIMEOUT_S
    while count_steps(run) < step and process.poll() is None:
        if time.monotonic() > until_s:
            raise HangError(f"{run} has not taken step {step} within {STEP_TIMEOUT_S:g} s")
        time.sleep(POLL_S)


def count_steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count('"loss/total"') if path.exists() else 0


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def lost_s(fault: Fault, step_s: float) -> float:
    """Return the seconds that a fault cost: two steps were waited for."""
    return max(fault.seconds - 2 * step_s, 0.0)


def make_table(faults: Sequence[Fault], step_s: float) -> str:
    by_kind: dict[tuple[str, str], list[float]] = defaultdict(list)
    for fault in faults:
        by_kind[fault.kind, fault.signal].append(lost_s(fault, step_s))
    rows = ["| process | signal | faults | seconds lost, median | most |", "|---|---|---|---|---|"]
    for (kind, name), seconds in sorted(by_kind.items()):
        rows.append(
            f"| {kind} | {name} | {len(seconds)} | {median(seconds):.1f} | {max(seconds):.1f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
