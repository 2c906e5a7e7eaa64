"""Predicts runs of tiny_moe_grpo on this machine from one measured step of each layout.

    mcore-rl data arithmetic
    python benchmarks/simulate_laptop.py
    python benchmarks/simulate_laptop.py --keep    # predicts again what was measured before

Of each layout a run in rollout.mode=sync is measured. Its second step calibrates the simulation,
which then predicts the later steps of that run, and those of a run that samples beside training.
The machine has to be quiet: other work takes cores that the prediction gives to the run.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.logs.run_report import load_metrics
from mcore_rl.tools.simulate.calibration import Calibration
from mcore_rl.tools.simulate.costs import RecipeCosts
from mcore_rl.tools.simulate.prediction import make_checked
from mcore_rl.tools.simulate.simulate import simulate
from mcore_rl.tools.simulate.virtual_time import ReachedShares

LAYOUTS = {
    "one rank": ("parallel.ep=1",),
    "EP 2": ("parallel.ep=2",),
    "TP 2": ("parallel.ep=1", "parallel.tp=2"),
    "PP 2": ("parallel.ep=1", "parallel.pp=2"),
}
MODES = {
    "sync": ("rollout.mode=sync",),
    "async": ("rollout.mode=async", "rollout.max_staleness=1", "algorithm.correction.weight=token"),
}
COMMON = (
    "model.init=random",
    "eval.data=[]",
    "checkpoint.every_steps=0",
    "checkpoint.export_hf=false",
    "simulate.gpu=cpu",
    f"simulate.cores={os.cpu_count()}",
)
CALIBRATED = 2
"""The step that calibrates; the first one compiles and warms up."""


def measure(settings: Sequence[str], folder: Path, steps: int) -> None:
    """Run the recipe for real."""
    shutil.rmtree(folder, ignore_errors=True)
    words = ["train", "recipe=tiny_moe_grpo", f"run.dir={folder}", f"run.steps={steps}", *settings]
    command = [sys.executable, "-c", "from mcore_rl.cli import main; raise SystemExit(main())"]
    subprocess.run([*command, *words], check=True, capture_output=True, timeout=600)


def later_steps(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean seconds of a step, its share of rollout, and the seconds of a sync.

    Short and long steps take turns where sampling goes on beside training: a median would be of
    either kind.
    """
    later = [row for row in rows if "time/step" in row and row["step"] > CALIBRATED]
    step_s = fmean(row["time/step"] for row in later)
    return {
        "step_s": step_s,
        "rollout_share": fmean(row["time/rollout"] for row in later) / step_s,
        "sync_s": fmean(row["time/sync"] for row in later),
    }


def keep_first_steps(folder: Path, to: Path) -> Path:
    """Copy what a calibration reads of a run, up to its second step."""
    to.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "config.yaml", to)
    rows = [row for row in load_metrics(folder) if row["step"] <= CALIBRATED]
    (to / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return to


def predict(config: Config, calibration: Calibration, steps: int) -> dict[str, float]:
    """Return what `later_steps` does, of a simulation."""
    config = replace(
        config,
        run=replace(config.run, steps=steps),
        simulate=replace(config.simulate, steps=steps),
    )
    costs = RecipeCosts.make(config, ReachedShares())
    simulated, costs = calibration.apply(config.simulate, costs)
    result = simulate(replace(config, simulate=simulated), costs)
    return later_steps([{"step": step, **row} for step, row in result.steps.items()])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/simulate_laptop"))
    parser.add_argument("--keep", action="store_true", help="measure nothing, take runs of --out")
    args = parser.parse_args()
    ratios: dict[str, dict[str, float]] = {}
    for name, layout in LAYOUTS.items():
        folders = {mode: args.out / f"{name.replace(' ', '_')}_{mode}" for mode in MODES}
        for mode, settings in MODES.items() if not args.keep else ():
            measure((*COMMON, *layout, *settings), folders[mode], args.steps)
        first = keep_first_steps(folders["sync"], args.out / "calibration")
        for mode, settings in MODES.items():
            recipe = load_recipe("tiny_moe_grpo", [*COMMON, *layout, *settings])
            config = make_checked(recipe)
            calibration = Calibration.measure(first, config.plan, config.simulate)
            predicted = predict(config, calibration, args.steps)
            measured = later_steps(load_metrics(folders[mode]))
            found = {key: round(predicted[key] / measured[key], 3) for key in measured}
            ratios[f"{name}, {mode}"] = found
            print(f"{name}, {mode}: measured {measured}")
            print(f"    predicted {predicted}; ratios {found}", flush=True)
    print(json.dumps({"predicted_over_measured": ratios}))


if __name__ == "__main__":
    main()
