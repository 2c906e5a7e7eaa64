"""Stage "run": `mcore-rl train` as a user starts it, with SGLang and Ray, on one device.

A tiny Qwen3-MoE, with random weights and from a warm start; on a GPU trainer and engine share it,
in turns. SETTINGS holds further settings of the run as a JSON list, in the words of its command
line.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, median
from typing import Any

from mcore_rl.device import has_cuda
from mcore_rl.process.safe_path import safe_module
from mcore_rl.tools.doctor.check import (
    Check,
    Figures,
    MissedTargetError,
    SkipCheckError,
    Stage,
    expect,
    find_own_folder,
)
from mcore_rl.tools.doctor.sync_checks import GPU_BUCKET_MIB
from mcore_rl.tools.doctor.warm_start import FOLDER, PROMPTS, WEIGHTS, prepare

SETTINGS = "MCORE_RL_KIT_SETTINGS"
WARM_START = "MCORE_RL_KIT_WARM_START"
"""The variable that names the folder of warm_start.py."""
STEPS = 6
WARM_STEPS = 40
LEAST_RISE = 0.1
"""Target from the warm start: how far the mean reward of the last steps is above the first."""
MOST_DIFFERENCE = {True: 0.05, False: 1e-4}
"""Target by whether there is a GPU: how far log-probs of trainer and engine differ in the mean; the
one computes in bfloat16, the other in float32."""
_TRAIN_S = 420.0
_ENDING_S = 60.0
"""How long `mcore-rl train` may take to end what it started, once it is interrupted."""
_DEADLINE_S = _TRAIN_S + _ENDING_S + 60
"""With what comes before: the data and the start of this process."""
ON_GPU = (
    "model.dtype=bfloat16",
    "cluster.colocated=true",
    "cluster.offload=true",
    "cluster.object_store_mib=512",
    "rollout.stage_weights=false",
    "rollout.restarts=0",
    "rollout.share_prompts=false",
    "rollout.sglang.attention_backend=triton",
    "rollout.sglang.sampling_backend=pytorch",
    "rollout.sglang.mem_fraction_static=0.5",
    "rollout.sglang.cuda_graph_max_bs_decode=32",
    "rollout.sglang.disable_prefill_cuda_graph=true",
    f"sync.bucket_mib={GPU_BUCKET_MIB}",
)
"""Settings that ask least of a machine: kernels by Triton and torch, which need neither SGLang's
libraries nor a compiler of CUDA code, SGLang's own scheduler, and a small object store."""


def check_grpo() -> Figures:
    """Every step of a short run ends; trainer and engine agree on what was sampled."""
    data = find_own_folder() / "arithmetic"
    prepare(data)
    model = (f"model.path={data / 'model'}", "model.init=random")
    return _train(data / PROMPTS, model, STEPS)


def check_rising_reward() -> Figures:
    """From a warm start, the reward of a longer run rises."""
    start = Path(os.environ.get(WARM_START) or FOLDER).resolve()
    if not (start / WEIGHTS).is_dir():
        raise SkipCheckError(
            f"{start / WEIGHTS} is not there: make warm-start, and carry the folder"
        )
    model = (f"model.path={start / WEIGHTS}", "model.init=hf")
    return expect_rise(_train(start / PROMPTS, model, WARM_STEPS))


def expect_rise(measured: Figures) -> Figures:
    """Return the figures of a run; MissedTargetError if its reward does not rise enough."""
    rise = measured["reward_last"] - measured["reward_first"]
    if rise < LEAST_RISE:
        raise MissedTargetError(
            f"the mean reward rises by {rise:.3f}, target {LEAST_RISE}", measured
        )
    return measured


def _train(prompts: Path, model: Sequence[str], num_steps: int) -> Figures:
    """Run `mcore-rl train` with these settings, in the check's folder; return its figures."""
    run_dir = find_own_folder() / "run"
    chosen = settings(prompts, model, run_dir, num_steps)
    began_s = time.time()
    _make_command("train", *chosen)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    [*_, last] = (int(s.partition("=")[2]) for s in chosen if s.startswith("run.steps="))
    return figures([json.loads(line) for line in lines], began_s, last)


def settings(prompts: Path, model: Sequence[str], run_dir: Path, num_steps: int) -> list[str]:
    """Return the settings of the run; later ones replace earlier ones."""
    return [
        "recipe=tiny_moe_grpo",
        f"run.dir={run_dir}",
        f"run.steps={num_steps}",
        *model,
        "parallel.ep=1",
        f"data.train=[{prompts}]",
        "eval.data=[]",
        "checkpoint.every_steps=0",
        "log.tensorboard=false",
        *(ON_GPU if has_cuda() else ()),
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
    rewards = [row["reward/mean"] for row in steps]
    window = max(1, min(5, num_steps // 2))
    return {
        "reward_first": round(mean(rewards[:window]), 4),
        "reward_last": round(mean(rewards[-window:]), 4),
        "first_step_done_s": round(steps[0]["timestamp"] - began_s, 1),
        "logprob_diff": difference,
        "logprob_diff_largest": max(row["logprob_diff/token_max"] for row in steps),
        "step_s": round(median(row["time/step"] for row in later), 3),
        "rollout_s": round(median(row["time/rollout"] for row in later), 3),
        "train_s": round(median(row["time/train"] for row in later), 3),
        "sync_s": round(median(row["time/sync"] for row in later), 3),
    }


def _make_command(*arguments: str) -> None:
    """Run a command of this package, its output with ours. Raises AssertionError if it fails, or is
    not done in time.
    """
    process = subprocess.Popen([*safe_module("mcore_rl.cli"), *arguments], stdin=subprocess.DEVNULL)
    try:
        status: int | str = process.wait(_TRAIN_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it ends what it started
        status = f"none after {_TRAIN_S:g} s"
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_S)
    expect(status == 0, f"mcore-rl {arguments[0]} ended with status {status}")


NEEDED = ("megatron", "zlib_ng", "ray", "sglang", "hydra", "pyarrow", "transformers")
RUN = Stage(
    "run",
    "mcore-rl train with SGLang and Ray on one device",
    (
        Check("GRPO with SGLang", check_grpo, _DEADLINE_S, modules=NEEDED),
        Check("reward rises", check_rising_reward, _DEADLINE_S, modules=NEEDED),
    ),
)
