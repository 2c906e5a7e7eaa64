"""Measures a training step of a mixture of experts on one GPU, by the kind of experts' products.

    python benchmarks/gpu_step.py [--variants grouped_mm,cutlass] [--tokens 8192,32768]

The model is that of the GPU checks: 1.4 B parameters on a GPU, tiny on a CPU, where the smallest
size runs. Each variant has a process of its own, since libraries read their variables as they
start. A step's time is the median of --steps steps; the table of kernels and the time in which the
GPU had nothing to do are those of one more step, under torch's profiler. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mcore_rl.config import TrainConfig
from mcore_rl.config.training import ExpertGemm
from mcore_rl.device import (
    describe_device,
    forget_peak,
    has_cuda,
    has_transformer_engine,
    peak_bytes,
    peak_flops,
    synchronize,
)
from mcore_rl.device.profiler import Launch, record_launches
from mcore_rl.device.setup import use_torch_modules_on_cuda
from mcore_rl.process.clock import now_s
from mcore_rl.run.roles.trainer import TrainSpeed
from mcore_rl.tools.doctor.lone_rank import LoneRank, make_batch, qwen3_moe
from mcore_rl.types import TrainBatch
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.flops import ModelFlops

GAP_S = 5e-6
"""Time between two kernels from which on the GPU is taken to have waited for the host."""
SEQUENCES_OF = 8192
"""Tokens of the sequences that a longer micro-batch repeats."""
MOST_TOKENS_ON_CPU = 256
DEADLINE_S = 600


@dataclass(frozen=True)
class Variant:
    """How experts are multiplied, and the variables of the process that does it."""

    expert_gemm: ExpertGemm
    environment: Mapping[str, str] = field(default_factory=dict)


VARIANTS = {
    "separate": Variant("separate"),
    "cutlass": Variant("separate", {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"}),
    "grouped_mm": Variant("grouped_mm"),
    "grouped_mm_one_connection": Variant("grouped_mm", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    parser.add_argument("--tokens", default="8192,32768", help="of a micro-batch, comma-separated")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--recompute", default="selective", help="train.recompute")
    parser.add_argument("--kernels", type=int, default=12, help="rows of the table of kernels")
    parser.add_argument("--only", choices=VARIANTS, help="measure this variant in this process")
    args = parser.parse_args()
    sizes = [int(size) for size in args.tokens.split(",")]
    if not has_cuda():
        sizes = [MOST_TOKENS_ON_CPU]
    if args.only:
        print(json.dumps(measure_variant(VARIANTS[args.only], sizes, args)))
        return
    results = {name: run_alone(name, sys.argv[1:]) for name in args.variants.split(",")}
    for name, by_size in results.items():
        for size, figures in by_size.items():
            print_figures(f"{name}, {size} tokens", figures)
    print(json.dumps({**describe_device(), "variants": results}))


def run_alone(name: str, options: Sequence[str]) -> dict[str, Any]:
    """Return the figures of a variant by tokens of a micro-batch; {"failed": ...} if it fails."""
    done = subprocess.run(
        [sys.executable, __file__, *options, "--only", name],
        env={**os.environ, **VARIANTS[name].environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode:
        return {"failed": {"error": done.stderr.strip().splitlines()[-1]}}
    return json.loads(done.stdout.splitlines()[-1])


def measure_variant(
    variant: Variant, sizes: Sequence[int], args: argparse.Namespace
) -> dict[str, Any]:
    if has_cuda() and not has_transformer_engine():
        use_torch_modules_on_cuda()
    train = TrainConfig(recompute=args.recompute, expert_gemm=variant.expert_gemm)
    config = qwen3_moe()
    with tempfile.TemporaryDirectory() as folder:
        rank = LoneRank(Path(folder), config, train=train)
        flops = ModelFlops.from_facts(ModelFacts.read(folder))
    results = {}
    for size in sizes:
        rank.batch = repeat_sequences(size, config["vocab_size"])
        results[str(size)] = measure_steps(rank, flops, args)
    return results


def repeat_sequences(num_tokens: int, vocab_size: int) -> TrainBatch:
    """Return a micro-batch of at least `num_tokens` in sequences of at most SEQUENCES_OF / 2."""
    batch = make_batch(min(num_tokens, SEQUENCES_OF), vocab_size)
    times = -(-num_tokens // SEQUENCES_OF)
    assert batch.loss_weights_T is not None
    return replace(
        batch,
        token_ids_T=batch.token_ids_T.repeat(times),
        loss_mask_T=batch.loss_mask_T.repeat(times),
        lens_N=batch.lens_N * times,
        loss_weights_T=batch.loss_weights_T.repeat(times) / times,
    )


def measure_steps(rank: LoneRank, flops: ModelFlops, args: argparse.Namespace) -> dict[str, Any]:
    losses = [rank.step(args.microbatches).loss]
    forget_peak()
    seconds = [time_of(lambda: losses.append(rank.step(args.microbatches).loss))]
    seconds += [time_of(lambda: rank.step(args.microbatches)) for _ in range(args.steps - 1)]
    lens_N = rank.batch.lens_N * args.microbatches
    step_s = statistics.median(seconds)
    speed = TrainSpeed(flops, 1, peak_flops()).metrics(lens_N, step_s)
    launches = record_launches(lambda: rank.step(args.microbatches))
    return {
        "tokens_per_s": round(speed["train/tokens_per_second_per_gpu"], 1),
        "tflops": round(speed["train/tflops_per_gpu"], 4),
        "mfu": round(speed["train/mfu"], 4) if "train/mfu" in speed else None,
        "step_s": round(step_s, 4),
        "slowest_step_s": round(max(seconds), 4),
        "second_loss": losses[1],
        "peak_gib": round(peak_bytes() / 2**30, 2),
        **summarize(launches),
        "kernels": list_largest(launches, args.kernels),
    }


def time_of(work: Callable[[], object]) -> float:
    synchronize()
    began_s = now_s()
    work()
    synchronize()
    return now_s() - began_s


def summarize(launches: Sequence[Launch]) -> dict[str, float]:
    """Return how long the device worked and waited between its first and last kernel.

    launches        kernels and copies
    busy_s          time in which at least one ran
    waits, wait_s   times longer than GAP_S in which none ran, and their sum
    longest_wait_s  the longest of them
    """
    busy_s, gaps, end_s = 0.0, [], launches[0].start_s
    for launch in launches:
        if launch.start_s > end_s:
            gaps.append(launch.start_s - end_s)
        busy_s += max(0.0, launch.end_s - max(end_s, launch.start_s))
        end_s = max(end_s, launch.end_s)
    waits = [gap for gap in gaps if gap > GAP_S]
    return {
        "launches": len(launches),
        "busy_s": round(busy_s, 4),
        "profiled_s": round(end_s - launches[0].start_s, 4),
        "waits": len(waits),
        "wait_s": round(sum(waits), 4),
        "longest_wait_s": round(max(waits, default=0.0), 6),
    }


def list_largest(launches: Sequence[Launch], count: int) -> list[dict[str, Any]]:
    """Return the kernels that took most time: name, runs, milliseconds, share of all."""
    times: dict[str, list[float]] = {}
    for launch in launches:
        times.setdefault(launch.name, []).append(launch.end_s - launch.start_s)
    total_s = sum(map(sum, times.values()))
    largest = sorted(times, key=lambda name: -sum(times[name]))[:count]
    return [
        {
            "name": name,
            "runs": len(times[name]),
            "ms": round(1e3 * sum(times[name]), 3),
            "share": round(sum(times[name]) / total_s, 4),
        }
        for name in largest
    ]


def print_figures(title: str, figures: Mapping[str, Any]) -> None:
    print(title)
    for name, value in figures.items():
        if name != "kernels":
            print(f"  {name:16}{value}")
    for kernel in figures.get("kernels", ()):
        share, milliseconds = kernel["share"], kernel["ms"]
        print(f"  {share:7.1%}{milliseconds:10.2f} ms{kernel['runs']:7} x {kernel['name']:.90}")


if __name__ == "__main__":
    main()
