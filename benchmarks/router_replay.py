"""Compares log-probs of engine and trainer with and without router replay, by dtype.

Trains the tiny model with a learning rate so small that no weight changes. So every run compares
the log-probs of the same samples under the same weights, which differ only by arithmetic and by
tokens that went to other experts. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from mcore_rl.logs.rows import read_rows

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "recipe=tiny_moe_grpo"
STILL = ["train.optimizer.lr=1e-12", "train.optimizer.min_lr=0", "train.optimizer.warmup_steps=0"]
METRICS = {
    "mean": "logprob_diff/mean",
    "max": "logprob_diff/token_max",
    "router": "logprob_diff/router",
    "flips": "logprob_diff/router_flip_share",
}
DEADLINE_S = 1800


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", default="bfloat16,float32", help="comma-separated")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "router_replay")
    parser.add_argument("overrides", nargs="*", help="key=value, for every run")
    args = parser.parse_args()
    data = args.out / "data"
    if not (data / "train.parquet").exists():
        call("data", "arithmetic", "--out", str(data))
    files = [
        f"data.train=[{data / 'train.parquet'}]",
        "eval.data=[]",
        f"sft.data=[{data / 'sft.parquet'}]",
    ]
    model = args.out / "warm_start" / "hf"
    if not (model / "config.json").exists():
        start = ["model.init=random", f"model.path={data / 'model'}", f"run.dir={model.parent}"]
        call("sft", RECIPE, *files, *start, *args.overrides)
    results = {}
    for dtype in args.dtypes.split(","):
        for replay in ("none", "engine"):
            folder = args.out / f"{dtype}_{replay}"
            if not (folder / "summary.json").exists():
                options = [
                    f"model.path={model}",
                    f"model.dtype={dtype}",
                    f"train.router_replay={replay}",
                    f"run.steps={args.steps}",
                    f"run.dir={folder}",
                    "rollout.deterministic=true",
                    "checkpoint.export_hf=false",
                    "parity_check.sequences=0",
                    *STILL,
                    *args.overrides,
                ]
                call("train", RECIPE, *files, *options)
            results[f"{dtype} {replay}"] = summarize(folder)
    print_table(results)
    print(json.dumps({"steps": args.steps, "runs": results}))


def summarize(folder: Path) -> dict[str, float]:
    """Return the mean of each metric over the steps, and of "max" the largest.

    "replaced" is the share of tokens that replay sent to other experts.
    """
    rows = [row for row in read_rows(folder / "metrics.jsonl") if "loss/total" in row]
    summary: dict[str, float] = {}
    for short, name in METRICS.items():
        values = [row[name] for row in rows]
        summary[short] = max(values) if short == "max" else fmean(values)
    summary["replaced"] = fmean(row.get("router/replaced_share", 0.0) for row in rows)
    return summary


def print_table(results: Mapping[str, Mapping[str, float]]) -> None:
    title = "model.dtype, router_replay"
    print(f"{title:28}{'mean':>10}{'max':>10}{'router':>10}{'flips':>8}{'replaced':>10}")
    for name, row in results.items():
        print(
            f"{name:28}{row['mean']:10.2e}{row['max']:10.2e}{row['router']:10.2e}"
            f"{row['flips']:8.2%}{row['replaced']:10.2%}"
        )


def call(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mcore_rl.cli", *words],
        cwd=ROOT,
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"mcore-rl {' '.join(words)}:\n{(done.stdout + done.stderr)[-3000:]}")


if __name__ == "__main__":
    main()
