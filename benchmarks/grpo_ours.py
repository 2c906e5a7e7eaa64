"""Trains with `mcore-rl train`; prints a JSON line with the seconds and tokens of each step."""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from grpo_workload import BY_NAME, LEARNING_RATE, MAX_PROMPT_LEN, Workload
from quiet_command import ROOT, output_of

DENSE = {"train.router_aux_loss_coef": 0.0}
"""Options of a run whose model has no experts."""


def settings_of(workload: Workload, folder: Path, run_dir: Path, num_steps: int) -> dict[str, Any]:
    """Return options of the run; it has a step more, the last, which saves."""
    longest = MAX_PROMPT_LEN + workload.max_len
    return {
        "run.dir": run_dir,
        "run.steps": num_steps + 1,
        "run.resume": False,
        "model.path": folder / "model",
        "model.init": "hf",
        "model.dtype": "float32",
        "data.train": f"[{folder / 'train.parquet'}]",
        "data.max_prompt_len": MAX_PROMPT_LEN,
        "rollout.prompts_per_step": workload.num_prompts,
        "rollout.samples_per_prompt": workload.samples_per_prompt,
        "rollout.max_response_len": workload.max_len,
        "rollout.temperature": 1.0,
        "rollout.kv_cache_len": workload.num_samples * longest,
        "train.mini_batches": 1,
        "train.epochs": 1,
        "train.optimizer.lr": LEARNING_RATE,
        "train.optimizer.min_lr": 0.0,
        "train.optimizer.schedule": "constant",
        "train.optimizer.warmup_steps": 0,
        "algorithm.kl.coef": 0.0,
        "reward.path": ROOT / "benchmarks" / "grpo_reward.py",
        "reward.name": "reward",
        "eval.data": "[]",
        "checkpoint.every_steps": 0,
        "checkpoint.export_hf": False,
        "log.tensorboard": False,
        "train.share_prefixes": True,  # faster in all workloads
        "parallel.ep": 1,
        "parallel.dp": workload.processes,
        "rollout.engines": workload.processes,
        **(DENSE if workload.shape is None else {}),
    }


def measure(workload: Workload, folder: Path, num_steps: int, overrides: list[str]) -> None:
    """Print the figures of all steps but the first and the last."""
    with tempfile.TemporaryDirectory(prefix="grpo_ours_") as name:
        run_dir = Path(name, "run")
        settings = settings_of(workload, folder, run_dir, num_steps)
        command = [sys.executable, "-m", "mcore_rl.cli", "train", "recipe=tiny_moe_grpo"]
        options = [*(f"{key}={value}" for key, value in settings.items()), *overrides]
        output_of([*command, *options])
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "time/step" in row][1:num_steps]
    tokens = [round(row["rollout/response_len"] * workload.num_samples) for row in rows]
    print(json.dumps({"seconds": [row["time/step"] for row in rows], "tokens": tokens}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=tuple(BY_NAME), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("overrides", nargs="*", help="key=value, for the recipe")
    args = parser.parse_args()
    measure(BY_NAME[args.workload], args.folder, args.steps, args.overrides)


if __name__ == "__main__":
    main()
