"""Simulates set-ups whose step times are published for NeMo-RL and verl, and compares.

    python benchmarks/published_steps.py

NeMo-RL: docs/about/performance-summary.md of NVIDIA-NeMo/RL, release 0.4: GRPO on
OpenMathInstruct-2, DGX H100, bfloat16, Megatron-core and vLLM. verl: docs/perf/dpsk.md of
volcengine/verl (2025-08-20) and the script it names, run_deepseek671b_math_megatron_96gb.sh: GRPO
on DAPO-Math, H20, Megatron-core with the optimizer on the CPU, vLLM without CUDA graphs.

Given there are GPUs, layouts, samples per step and per optimizer step, the longest and the mean
sequence; not given are prompts (taken as 100 tokens) and the spread of lengths (taken as that of
simulate.response_spread). Their steps score old and reference log-probs, so the recipes here ask
for both where this loop has both. slime publishes no step time with its set-up.
"""

import argparse
import json
from dataclasses import dataclass, replace
from statistics import fmean

from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.models import read_models
from mcore_rl.simulation.command import checked
from mcore_rl.simulation.hardware import ReachedShares
from mcore_rl.simulation.recipe_costs import RecipeCosts
from mcore_rl.simulation.simulate import simulate
from mcore_rl.simulation.workload import Workload

PROMPT_LEN = 100


@dataclass(frozen=True)
class Published:
    """A row of the table. engines: number and tensor-parallel size; trainer: tp, cp, ep, pp, dp."""

    name: str
    recipe: str
    gpus: int
    colocated: bool
    longest: int
    mean: int
    samples: int
    mini_batches: int
    engines: tuple[int, int]
    trainer: tuple[int, int, int, int, int]
    step_s: float
    group_size: int = 16
    gpu: str = "h100"


ROWS = (
    Published(
        "Qwen3-30B-A3B, on policy",
        "qwen3_30b_a3b_grpo_32",
        *(32, True, 4096, 3154, 2048, 4),
        *((8, 4), (2, 1, 8, 1, 16), 225),
    ),
    Published(
        "Qwen3-30B-A3B, one step off",
        "qwen3_30b_a3b_grpo_32",
        *(32, False, 4096, 3158, 2048, 4),
        *((8, 2), (1, 1, 8, 2, 8), 244),
    ),
    Published(
        "Qwen3-235B-A22B, on policy",
        "qwen3_235b_a22b_grpo_64_64",
        *(128, True, 8192, 5671, 512, 1),
        *((8, 16), (2, 2, 16, 8, 4), 506),
    ),
    Published(
        "Qwen3-235B-A22B, one step off",
        "qwen3_235b_a22b_grpo_64_64",
        *(256, False, 8192, 5691, 512, 1),
        *((16, 8), (4, 1, 16, 8, 4), 241),
    ),
    Published(
        "DeepSeek-V3, on policy",
        "deepseek_v3_grpo_256",
        *(256, True, 1536, 745, 512, 1),
        *((8, 32), (1, 1, 16, 16, 16), 154),
    ),
    Published(
        "DeepSeek-V3, one step off",
        "deepseek_v3_grpo_256",
        *(512, False, 1536, 744, 512, 1),
        *((8, 32), (1, 1, 16, 16, 16), 77.9),
    ),
    Published(
        "verl: DeepSeek-V3, on policy",
        "deepseek_v3_grpo_256",
        *(96, True, 9732, 2060, 768, 3),
        *((3, 32), (8, 1, 8, 12, 1), 1700),
        group_size=8,
        gpu="h20",
    ),
)


def config_of(row: Published) -> Config:
    """Return the recipe with the row's sizes, and response lengths of its mean."""
    num_engines, engine_tp = row.engines
    tp, cp, ep, pp, dp = row.trainer
    settings = {
        "cluster.colocated": row.colocated,
        "cluster.offload": row.colocated,
        "rollout.stage_weights": not row.colocated,
        "rollout.mode": "sync" if row.colocated else "one_step_off",
        "rollout.engines": num_engines,
        "rollout.tp": engine_tp,
        "rollout.ep": engine_tp,
        "rollout.prompts_per_step": row.samples // row.group_size,
        "rollout.samples_per_prompt": row.group_size,
        "rollout.max_response_len": row.longest - PROMPT_LEN,
        "data.max_prompt_len": PROMPT_LEN,
        "simulate.prompt_len": PROMPT_LEN,
        "simulate.gpu": row.gpu,
        "train.mini_batches": row.mini_batches,
        "train.max_tokens_per_microbatch": row.longest,
        "algorithm.kl.coef": 0.01,
        "parallel.tp": tp,
        "parallel.cp": cp,
        "parallel.ep": ep,
        "parallel.pp": pp,
        "parallel.dp": dp,
        "parallel.stage_layers": "[]" if 94 % pp == 0 or pp == 1 else stages(row, pp),
        "checkpoint.every_steps": 0,
        "rollout.restarts": 0 if row.colocated else 1,
    }
    config = load_recipe(row.recipe, [f"{name}={value}" for name, value in settings.items()])
    return checked(with_mean(config, row.mean - PROMPT_LEN))


def stages(row: Published, pp: int) -> str:
    """Return layers of each pipeline stage, the larger ones in the middle."""
    num_layers = len(read_models(load_recipe(row.recipe, [])).policy.moe_layers)
    least, more = divmod(num_layers, pp)
    counts = [least + (1 <= stage <= more) for stage in range(pp)]
    return str(counts).replace(" ", "")


def with_mean(config: Config, mean: float) -> Config:
    """Set simulate.response_len so that responses have this mean after they are cut."""
    low, high = mean, 8.0 * config.rollout.max_response_len
    for _ in range(30):
        middle = (low + high) / 2
        tried = replace(config, simulate=replace(config.simulate, response_len=middle))
        workload = Workload(tried)
        found = fmean(workload.finish(prompt, 0)[0] for prompt in range(1000))
        low, high = (middle, high) if found < mean else (low, middle)
    return replace(config, simulate=replace(config.simulate, response_len=low))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    results = []
    for row in ROWS:
        config = config_of(row)
        config = replace(config, run=replace(config.run, steps=args.steps))
        costs = RecipeCosts.of(config, read_models(config), ReachedShares())
        summary = simulate(config, costs).summary
        assert summary["gpus"] == row.gpus, (summary["gpus"], row)
        ratio = summary["step_s"] / row.step_s
        phases = {name: round(s, 1) for name, s in summary["phases_s"].items() if s >= 0.05}
        print(f"{row.name}, {row.gpus} GPUs: {summary['step_s']:.1f} s, published {row.step_s:g} s")
        print(f"    ratio {ratio:.2f}; {phases}")
        results.append({"name": row.name, "gpus": row.gpus, "ratio": round(ratio, 3)})
    print(json.dumps({"published_steps": results}))


if __name__ == "__main__":
    main()
