"""Simulates set-ups whose step times are published for NeMo-RL and verl, and compares.

    python benchmarks/published_steps.py            # the table in docs/simulate.md, on the screen
    python benchmarks/published_steps.py --write    # the same, into the file: make published-steps

NeMo-RL: docs/about/performance-summary.md of NVIDIA-NeMo/RL, release 0.5: GRPO on
OpenMathInstruct-2, DGX H100, Megatron-core and vLLM. verl: docs/perf/dpsk.md of
volcengine/verl (2025-08-20) and the script it names, run_deepseek671b_math_megatron_96gb.sh: GRPO
on DAPO-Math, H20, Megatron-core with the optimizer on the CPU, vLLM without CUDA graphs.

Given there are GPUs, layouts, samples per step and per optimizer step, the longest and the mean
sequence; not given are prompts (taken as 100 tokens) and the spread of lengths (taken as that of
simulate.response_spread). Their steps score old and reference log-probs, so the recipes here ask
for both where this loop has both. slime publishes no step time with its set-up.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from mcore_rl.config import Config
from mcore_rl.config.recipe import load_recipe
from mcore_rl.planning.recipe_models import read_policy
from mcore_rl.tools.simulate.costs import RecipeCosts
from mcore_rl.tools.simulate.prediction import make_checked
from mcore_rl.tools.simulate.simulate import simulate
from mcore_rl.tools.simulate.virtual_time import ReachedShares
from mcore_rl.tools.simulate.workload import Workload

PROMPT_LEN = 100
STEPS = 3
MODELS = Path(__file__).parent / "published_models"
DOCUMENT = Path(__file__).parents[1] / "docs/simulate.md"
BEGIN = "<!-- make published-steps writes from here -->"
END = "<!-- to here -->"
KINDS = ("mixture of experts", "dense", "FP8")
"""Kinds of rows; the text gives the range of ratios of each."""


@dataclass(frozen=True)
class Published:
    """A row of the table. engines: number and tensor-parallel size; trainer: tp, cp, ep, pp, dp.

    fp8      engines compute in FP8; so do the publishers' trainers, but not the simulated ones
    model    folder below MODELS instead of the recipe's model
    """

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
    model: str = ""
    fp8: bool = False

    @property
    def kind(self) -> str:
        """One of KINDS."""
        if self.fp8:
            return "FP8"
        return "dense" if self.model else "mixture of experts"


ROWS = (
    Published(
        "Qwen3-30B-A3B, on policy",
        "qwen3_30b_a3b_grpo_32",
        *(32, True, 4096, 3196, 2048, 4),
        *((16, 2), (1, 1, 8, 1, 32), 198),
    ),
    Published(
        "Qwen3-30B-A3B, one step off",
        "qwen3_30b_a3b_grpo_32",
        *(32, False, 4096, 3201, 2048, 4),
        *((8, 2), (1, 1, 8, 2, 8), 154),
    ),
    Published(
        "Qwen3-235B-A22B, on policy",
        "qwen3_235b_a22b_grpo_64_64",
        *(128, True, 8192, 5700, 512, 1),
        *((8, 16), (2, 2, 16, 8, 4), 431),
    ),
    Published(
        "Qwen3-235B-A22B, one step off",
        "qwen3_235b_a22b_grpo_64_64",
        *(256, False, 8192, 5707, 512, 1),
        *((16, 8), (4, 1, 16, 8, 4), 203),
    ),
    Published(
        "DeepSeek-V3, on policy",
        "deepseek_v3_grpo_256",
        *(256, True, 1536, 744, 512, 1),
        *((8, 32), (1, 1, 16, 16, 16), 134),
    ),
    Published(
        "DeepSeek-V3, one step off",
        "deepseek_v3_grpo_256",
        *(512, False, 1536, 738, 512, 1),
        *((8, 32), (1, 1, 16, 16, 16), 64.9),
    ),
    Published(
        "Llama-3.1-8B, on policy",
        "qwen3_30b_a3b_grpo_32",
        *(16, True, 4096, 1019, 2048, 4),
        *((16, 1), (1, 1, 1, 2, 8), 92.8),
        model="llama_3_1_8b",
    ),
    Published(
        "Llama-3.1-8B, one step off",
        "qwen3_30b_a3b_grpo_32",
        *(16, False, 4096, 1123, 2048, 4),
        *((8, 1), (1, 1, 1, 1, 8), 64.8),
        model="llama_3_1_8b",
    ),
    Published(
        "Qwen3-32B, on policy",
        "qwen3_30b_a3b_grpo_32",
        *(32, True, 4096, 3251, 2048, 4),
        *((8, 4), (4, 1, 1, 4, 2), 376),
        model="qwen3_32b",
    ),
    Published(
        "Qwen3-32B, one step off",
        "qwen3_30b_a3b_grpo_32",
        *(64, False, 4096, 3252, 2048, 4),
        *((8, 4), (4, 1, 1, 4, 2), 200),
        model="qwen3_32b",
    ),
    Published(
        "Llama-3.1-8B in FP8, one step off",
        "qwen3_30b_a3b_grpo_32",
        *(16, False, 4096, 1128, 2048, 4),
        *((8, 1), (1, 1, 1, 1, 8), 53),
        model="llama_3_1_8b",
        fp8=True,
    ),
    Published(
        "DeepSeek-V3 in FP8, one step off",
        "deepseek_v3_grpo_256",
        *(512, False, 1536, 761, 512, 1),
        *((16, 16), (1, 1, 16, 16, 16), 67.6),
        fp8=True,
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
        "rollout.ep": 1 if row.model else engine_tp,
        "rollout.prompts_per_step": row.samples // row.group_size,
        "rollout.samples_per_prompt": row.group_size,
        "rollout.max_response_len": row.longest - PROMPT_LEN,
        "data.max_prompt_len": PROMPT_LEN,
        "simulate.prompt_len": PROMPT_LEN,
        "simulate.gpu": row.gpu,
        "run.recovery.partner": "none",  # the published runs kept no states
        "train.mini_batches": row.mini_batches,
        "train.max_tokens_per_microbatch": row.longest,
        "algorithm.kl.coef": 0.01,
        "parallel.tp": tp,
        "parallel.cp": cp,
        "parallel.ep": ep,
        "parallel.pp": pp,
        "parallel.dp": dp,
        "parallel.stage_layers": stages(row, pp),
        "checkpoint.every_steps": 0,
        "rollout.restarts": 0 if row.colocated else 1,
        "rollout.quantization": "fp8" if row.fp8 else "none",
    }
    if row.model:
        settings["model.path"] = MODELS / row.model
    config = load_recipe(row.recipe, [f"{name}={value}" for name, value in settings.items()])
    return make_checked(with_mean(config, row.mean - PROMPT_LEN))


def stages(row: Published, pp: int) -> str:
    """Return layers of each pipeline stage, the larger ones in the middle; [] if all are equal."""
    recipe = load_recipe(row.recipe, [f"model.path={MODELS / row.model}"] if row.model else [])
    num_layers = len(read_policy(recipe.model.path).moe_layers)
    least, more = divmod(num_layers, pp)
    if not more:
        return "[]"
    counts = [least + (1 <= stage <= more) for stage in range(pp)]
    return str(counts).replace(" ", "")


def with_mean(config: Config, mean: float) -> Config:
    """Set simulate.response_len so that responses have this mean after they are cut."""
    low, high = mean, 8.0 * config.rollout.max_response_len
    for _ in range(30):
        middle = (low + high) / 2
        tried = replace(config, simulate=replace(config.simulate, response_len=middle))
        workload = Workload(tried.simulate, tried.rollout.max_response_len, tried.run.seed)
        found = fmean(workload.finish(prompt, 0)[0] for prompt in range(1000))
        low, high = (middle, high) if found < mean else (low, middle)
    return replace(config, simulate=replace(config.simulate, response_len=low))


def simulate_row(row: Published) -> float:
    """Return the seconds of a step, the mean over all but the first."""
    config = config_of(row)
    config = replace(config, run=replace(config.run, steps=STEPS))
    costs = RecipeCosts.make(config, ReachedShares())
    summary = simulate(config, costs).summary
    assert summary["gpus"] == row.gpus, (summary["gpus"], row)
    return summary["step_s"]


def table_row(row: Published, step_s: float) -> str:
    """Return the line of the table in docs/simulate.md."""
    simulated = f"{step_s:.{1 if step_s < 100 else 0}f}"
    ratio = float(simulated) / row.step_s
    return f"| {row.name} | {row.gpus} | {row.step_s:,g} s | {simulated} s | {ratio:.2f} |"


def ratio_of(line: str) -> float:
    """Return the last cell of a line of the table."""
    return float(line.split("|")[-2])


def ranges(lines: Sequence[str]) -> str:
    """Return a sentence with the least and the largest ratio of each kind of rows."""
    ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for row, line in zip(ROWS, lines, strict=True):
        ratios[row.kind].append(ratio_of(line))
    parts = [f"{kind} {min(all_of):.2f} to {max(all_of):.2f}" for kind, all_of in ratios.items()]
    return f"Simulated over published: {', '.join(parts)}."


def make_section(lines: Sequence[str]) -> str:
    """Return what stands between BEGIN and END in docs/simulate.md."""
    head = "| set-up | GPUs | published | simulated | ratio |\n|---|---|---|---|---|"
    return "\n".join([BEGIN, head, *lines, "", ranges(lines), END])


def split_document(text: str) -> tuple[str, str, str]:
    """Return docs/simulate.md as what comes before the section, the section, what comes after."""
    found = re.fullmatch(f"(.*)({BEGIN}.*{END})(.*)", text, re.DOTALL)
    assert found is not None, f"{DOCUMENT} lacks {BEGIN} and {END}"
    return found[1], found[2], found[3]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help=f"write the table into {DOCUMENT}")
    args = parser.parse_args()
    lines: list[str] = []
    for row in ROWS:
        lines.append(table_row(row, simulate_row(row)))
        print(lines[-1], flush=True)
    print(ranges(lines))
    if args.write:
        before, old, after = split_document(DOCUMENT.read_text())
        DOCUMENT.write_text(before + make_section(lines) + after)
        print(f"{DOCUMENT}: {'as it was' if old == make_section(lines) else 'changed'}")


if __name__ == "__main__":
    main()
