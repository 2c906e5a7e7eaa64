"""Measures the tokens per second of a GRPO step of this system and of TRL.

Both train the same float32 model (1 M parameters, 4 layers, 8 experts) on the same prompts, with 4
x 8 samples of 64 new tokens per step, on the same cores, one after the other. A step is everything
between the ends of two optimizer steps. The last line is JSON with the ratio.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from grpo_workload import (
    LEARNING_RATE,
    NUM_PROMPTS,
    RESPONSE_LEN,
    SAMPLES_PER_PROMPT,
    TOKENS_PER_STEP,
    make_workload,
)

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements" / "bench.txt"
TRL_SITE = ROOT / "benchmarks" / ".trl"
WARMUP_STEPS = 3
DEADLINE_S = 900


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps",
        type=int,
        default=20,
        help=f"steps of each system, including {WARMUP_STEPS} of warm-up",
    )
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="key=value, for this system's recipe")
    args = parser.parse_args()
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: args.cores]))
    install_trl()
    with tempfile.TemporaryDirectory(prefix="grpo_step_") as name:
        folder = Path(name)
        make_workload(folder)
        trl: dict[int, float] = {}
        for threads in range(1, args.cores + 1):
            trl[threads] = run_trl(folder, args.steps, threads)
        ours = run_ours(folder, args.steps, args.overrides)
    threads = min(trl, key=lambda count: trl[count])
    report(ours, trl[threads], threads)


def report(ours_s: float, trl_s: float, trl_threads: int) -> None:
    """Print a table, then one JSON object; arguments are seconds per step."""
    ours = TOKENS_PER_STEP / ours_s
    trl = TOKENS_PER_STEP / trl_s
    print(f"{'system':24s}{'s/step':>10s}{'tokens/s':>12s}")
    print(f"{'mcore_rl':24s}{ours_s:10.3f}{ours:12.0f}")
    print(f"{f'TRL, {trl_threads} threads':24s}{trl_s:10.3f}{trl:12.0f}")
    figures = {"ratio": ours / trl, "tokens_per_second": ours, "trl_tokens_per_second": trl}
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


def install_trl() -> None:
    """Install TRL and the packages only it needs beside the environment.

    torch and transformers are this system's.
    """
    stamp = TRL_SITE / ".installed"
    if stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text():
        return
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "-qq",
        "install",
        "--no-deps",
        "--upgrade",
    ]
    subprocess.run(
        [*command, "--target", str(TRL_SITE), "-r", str(REQUIREMENTS)],
        check=True,
        timeout=DEADLINE_S,
    )
    stamp.write_text(REQUIREMENTS.read_text())


def run_trl(folder: Path, num_steps: int, threads: int) -> float:
    """Return the median seconds per step of TRL with `threads` compute threads."""
    command = [sys.executable, str(ROOT / "benchmarks" / "grpo_trl.py"), "--folder", str(folder)]
    output = run(
        [*command, "--steps", str(num_steps), "--threads", str(threads)],
        OMP_NUM_THREADS=str(threads),
        PYTHONPATH=str(TRL_SITE),
    )
    measured = json.loads(output.strip().splitlines()[-1])
    check_length("TRL", measured["response_len"])
    return statistics.median(measured["seconds"][WARMUP_STEPS - 1 :])


def run_ours(folder: Path, num_steps: int, overrides: list[str]) -> float:
    """Return the median seconds per step of `mcore-rl train`, by its metrics.jsonl.

    The last step, which saves, does not count.
    """
    run_dir = folder / "run"
    settings = {
        "run.dir": run_dir,
        "run.steps": num_steps + 1,
        "run.resume": False,
        "model.path": folder / "model",
        "model.init": "hf",
        "model.dtype": "float32",
        "data.train": f"[{folder / 'train.parquet'}]",
        "rollout.prompts_per_step": NUM_PROMPTS,
        "rollout.samples_per_prompt": SAMPLES_PER_PROMPT,
        "rollout.max_response_len": RESPONSE_LEN,
        "rollout.temperature": 1.0,
        "train.mini_batches": 1,
        "train.epochs": 1,
        "train.optimizer.lr": LEARNING_RATE,
        "train.optimizer.min_lr": 0.0,
        "train.optimizer.schedule": "constant",
        "train.optimizer.warmup_steps": 0,
        "algorithm.kl.coef": 0.0,
        "reward.path": ROOT / "benchmarks" / "grpo_workload.py",
        "reward.name": "reward",
        "eval.data": "[]",
        "checkpoint.every_steps": 0,
        "checkpoint.export_hf": False,
        "log.tensorboard": False,
        "parallel.ep": 1,
    }
    command = [sys.executable, "-m", "mcore_rl.cli", "train", "recipe=tiny_moe_grpo"]
    run([*command, *(f"{key}={value}" for key, value in settings.items()), *overrides])
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "time/step" in row][WARMUP_STEPS:num_steps]
    assert steps, f"{run_dir}/metrics.jsonl has no time/step after {WARMUP_STEPS} steps"
    check_length("mcore_rl", min(row["rollout/response_len"] for row in steps))
    return statistics.median(row["time/step"] for row in steps)


def check_length(system: str, response_len: float) -> None:
    assert response_len > 0.99 * RESPONSE_LEN, (
        f"{system}: {response_len} tokens per response, not {RESPONSE_LEN}"
    )


def run(command: list[str], **environment: str) -> str:
    """Run a command in the repository and return its output; exit with its errors if it fails."""
    env = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} exited {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
