"""Trains with `mcore-rl train`; prints a JSON line with seconds, tokens and phases of each step."""

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from grpo_options import RECIPE, list_own, list_own_on_gpu
from grpo_workload import BY_NAME, Workload
from quiet_command import output_of

PHASES = ("rollout", "reward", "logprobs", "train", "sync")
LARGEST_LOG = 2**22
"""Larger files of a run are not kept."""


def measure(
    workload: Workload, folder: Path, run_dir: Path, num_steps: int, overrides: list[str]
) -> None:
    """Print the figures of all steps but the first and the last."""
    settings = list_own(workload, folder, run_dir, num_steps)
    command = [sys.executable, "-m", "mcore_rl.cli", "train", f"recipe={RECIPE}"]
    output_of([*command, *(f"{key}={value}" for key, value in settings.items()), *overrides])
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "time/step" in row][1:num_steps]
    figures = {
        "seconds": [row["time/step"] for row in rows],
        "tokens": [round(row["rollout/response_len"] * workload.num_samples) for row in rows],
        "phases": {name: [row.get(f"time/{name}", 0.0) for row in rows] for name in PHASES},
    }
    print(json.dumps(figures))


def keep_logs(run_dir: Path) -> None:
    """Remove from a run's folder what is no log: weights and other large files."""
    for path in run_dir.rglob("*"):
        if path.is_file() and path.stat().st_size > LARGEST_LOG:
            path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=tuple(BY_NAME), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--max-tokens", type=int, default=32768, help="of a GPU's micro-batch")
    parser.add_argument("--run-dir", type=Path, help="where the run's logs stay; must be new")
    parser.add_argument("overrides", nargs="*", help="key=value, for the recipe")
    args = parser.parse_args()
    # The run ends by itself at a Ctrl-C, which it gets, too; a handler is not inherited by it.
    signal.signal(signal.SIGINT, lambda *_: None)
    workload = BY_NAME[args.workload]
    on_gpu = list_own_on_gpu(workload, args.max_tokens) if args.device == "cuda" else []
    with tempfile.TemporaryDirectory(prefix="grpo_ours_") as name:
        run_dir = args.run_dir or Path(name, "run")
        try:
            measure(workload, args.folder, run_dir, args.steps, [*on_gpu, *args.overrides])
        finally:
            if args.run_dir:
                keep_logs(run_dir)


if __name__ == "__main__":
    main()
