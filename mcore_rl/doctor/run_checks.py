"""Stage "run": `mcore-rl train` as a user starts it, with SGLang and Ray, on one device.

A tiny Qwen3-MoE with random weights; on a GPU trainer and engine share it, in turns. SETTINGS holds
further settings of the run as a JSON list, in the words of its command line.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mcore_rl.device import has_cuda
from mcore_rl.doctor.check import Check, Figures, Stage, expect
from mcore_rl.doctor.sync_checks import GPU_BUCKET_MIB

SETTINGS = "MCORE_RL_KIT_SETTINGS"
STEPS = 6
MOST_DIFFERENCE = {True: 0.05, False: 1e-4}
"""Target by whether there is a GPU: how far log-probs of trainer and engine differ in the mean; the
one computes in bfloat16, the other in float32."""
_DEADLINE_S = 420.0
_SIZES = {"head_dim": 64, "moe_intermediate_size": 128}
"""Sizes of the model that kernels for GPUs have."""
_ON_GPU = (
    "model.dtype=bfloat16",
    "cluster.colocated=true",
    "cluster.offload=true",
    "rollout.stage_weights=false",
    "rollout.restarts=0",
    "rollout.sglang.mem_fraction_static=0.5",
    "rollout.sglang.cuda_graph_max_bs_decode=32",
    "rollout.sglang.disable_prefill_cuda_graph=true",
    f"sync.bucket_mib={GPU_BUCKET_MIB}",
    "canary.tolerance=1",
)


def grpo_with_sglang() -> Figures:
    """Every step of a short run ends; trainer and engine agree on what was sampled."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "arithmetic"
        _command("data", "arithmetic", "--out", str(data))
        config = data / "model" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | _SIZES))
        began_s = time.time()
        chosen = settings(data, folder / "run")
        _command("train", *chosen)
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    [*_, num_steps] = (int(s.partition("=")[2]) for s in chosen if s.startswith("run.steps="))
    return figures([json.loads(line) for line in lines], began_s, num_steps)


def settings(data: Path, run_dir: Path) -> list[str]:
    """Return the settings of the run; later ones replace earlier ones."""
    return [
        "recipe=tiny_moe_grpo",
        f"run.dir={run_dir}",
        f"run.steps={STEPS}",
        f"model.path={data / 'model'}",
        "model.init=random",
        "parallel.ep=1",
        f"data.train=[{data / 'train.parquet'}]",
        "eval.data=[]",
        *(_ON_GPU if has_cuda() else ()),
        *json.loads(os.environ.get(SETTINGS, "[]")),
    ]


def figures(rows: Sequence[dict[str, Any]], began_s: float, num_steps: int) -> Figures:
    """Return what the metrics of a run say; raise AssertionError if a step is missing or trainer
    and engine do not agree.

    began_s     seconds since the epoch at which the run was started
    num_steps   of the run
    """
    steps = [row for row in rows if "time/step" in row]
    expect(len(steps) == num_steps, f"{len(steps)} of {num_steps} steps have metrics")
    difference = max(row["logprob_diff/mean"] for row in steps)
    limit = MOST_DIFFERENCE[has_cuda()]
    expect(difference < limit, f"log-probs differ by {difference} in the mean, target {limit}")
    later = steps[1:] or steps
    return {
        "first_step_done_s": round(steps[0]["timestamp"] - began_s, 1),
        "logprob_diff": difference,
        "logprob_diff_largest": max(row["logprob_diff/token_max"] for row in steps),
        "step_s": round(median(row["time/step"] for row in later), 3),
        "rollout_s": round(median(row["time/rollout"] for row in later), 3),
        "train_s": round(median(row["time/train"] for row in later), 3),
        "sync_s": round(median(row["time/sync"] for row in later), 3),
    }


def _command(*arguments: str) -> None:
    """Run a command of this package, its output with ours. Raises AssertionError if it fails, or is
    not done in time.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "mcore_rl.cli", *arguments], stdin=subprocess.DEVNULL
    )
    try:
        status: int | str = process.wait(_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it ends what it started
        process.wait(60)
        status = f"none after {_DEADLINE_S:g} s"
    expect(status == 0, f"mcore-rl {arguments[0]} ended with status {status}")


RUN = Stage(
    "run",
    "mcore-rl train with SGLang and Ray on one device",
    (
        Check(
            "GRPO with SGLang",
            grpo_with_sglang,
            deadline_s=2 * _DEADLINE_S,
            modules=("megatron", "zlib_ng", "ray", "sglang", "hydra"),
        ),
    ),
)
