"""Measures the seconds and the peak memory that a rank takes to make its part of a plan.

The largest case has 8,192 trainer ranks and 2,048 engine ranks. A few ranks spread over each side
are planned, each from new layouts; the best of three counts. Prints a table, and last a JSON
object with seconds per case.
"""

import argparse
import json
import time
import tracemalloc
from dataclasses import dataclass

from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.deployment import Deployment, make_deployment
from mcore_rl.planning.recipe_models import PlannedRun
from mcore_rl.weights.plan.local import plan_recvs, plan_sends

CASES: dict[str, list[str]] = {
    "qwen3_30b 16->16": ["qwen3_30b_a3b_grpo_32"],
    "qwen3_235b 64->64": ["qwen3_235b_a22b_grpo_64_64"],
    "deepseek_v3 256->256": ["deepseek_v3_grpo_256", "cluster=h100"],
    "kimi_k2 256->128": ["kimi_k2_grpo_256_128"],
    "deepseek_v3 8192->2048": [
        "deepseek_v3_grpo_256",
        "cluster=h100",
        "parallel.dp=128",
        "rollout.engines=64",
    ],
    "deepseek_v3 8192->2048, wide engines": [
        "deepseek_v3_grpo_256",
        "cluster=h100",
        "parallel.dp=128",
        "rollout.engines=8",
        "rollout.tp=256",
        "rollout.ep=256",
        "rollout.attention_dp=256",
    ],
}


@dataclass(frozen=True)
class Cost:
    """Time and memory that one rank took, and the number of boxes in its plan."""

    seconds: float
    peak_bytes: int
    num_slices: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="ranks to sample on each side")
    args = parser.parse_args()
    print(f"{'case':40s}{'side':10s}{'ms max':>10s}{'MiB max':>10s}{'slices max':>12s}")
    seconds = {}
    for name, settings in CASES.items():
        worst = 0.0
        for is_trainer in (True, False):
            costs = [measure(settings, is_trainer, i, args.ranks) for i in range(args.ranks)]
            slowest = max(cost.seconds for cost in costs)
            peak = max(cost.peak_bytes for cost in costs)
            slices = max(cost.num_slices for cost in costs)
            side = "trainer" if is_trainer else "engine"
            print(
                f"{name:40s}{side:10s}{slowest * 1e3:10.1f}{peak / 2**20:10.1f}{slices:12d}",
                flush=True,
            )
            worst = max(worst, slowest)
        seconds[name] = round(worst, 4)
    print(json.dumps({"seconds_per_rank": seconds}))


def measure(settings: list[str], is_trainer: bool, i: int, num_samples: int) -> Cost:
    """Plan for the rank that is number `i` of `num_samples` spread over a side."""
    deployment = _deployment(settings)
    num_ranks = (deployment.source if is_trainer else deployment.target).num_ranks
    rank = i * (num_ranks - 1) // max(1, num_samples - 1)
    seconds = []
    for _ in range(3):
        deployment = _deployment(settings)
        began_s = time.perf_counter()
        _plan(deployment, rank, is_trainer)
        seconds.append(time.perf_counter() - began_s)
    deployment = _deployment(settings)
    tracemalloc.start()
    num_slices = _plan(deployment, rank, is_trainer)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return Cost(min(seconds), peak_bytes, num_slices)


def _deployment(settings: list[str]) -> Deployment:
    config = load_recipe(settings[0], settings[1:])
    return make_deployment(PlannedRun.make(config))


def _plan(deployment: Deployment, rank: int, is_trainer: bool) -> int:
    sides = deployment.source, deployment.target, deployment.hosts
    flows = plan_sends(rank, *sides) if is_trainer else plan_recvs(rank, *sides)
    return len({id(piece) for flow in flows for piece in flow.slices})


if __name__ == "__main__":
    main()
