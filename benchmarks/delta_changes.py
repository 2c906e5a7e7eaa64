"""How much of a model's bytes a difference takes after each step, as sync.delta codes it.

    python benchmarks/delta_changes.py --png docs/delta_changes.png

Models train in bfloat16 with Adam at a learning rate of reinforcement learning, on random tokens.
The difference is that of a rank's weights before and after a step. SmolLM2's weights are
dequantized from 4 bits, so its shares may not be those of the published bfloat16 weights. The last
line is JSON.
"""

import argparse
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_rl.config import OptimizerConfig
from mcore_rl.tools.doctor.lone_rank import LoneRank, qwen3_moe
from mcore_rl.weight_sync.transports.delta import take_changes
from smollm2 import write_smollm2

MIXTURE = "mixture"
SMOLLM2 = "smollm2"
TITLES = {
    MIXTURE: "a mixture of experts of two layers, random weights",
    SMOLLM2: "SmolLM2-135M-Instruct, dequantized from 4 bits",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(TITLES), default=list(TITLES))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--png", type=Path, help="draw the histograms")
    args = parser.parse_args()
    shares = {name: in_a_process(shares_of, name, args.steps, args.lr) for name in args.models}
    for name, of_steps in shares.items():
        print(TITLES[name])
        counts, edges = np.histogram(of_steps, bins=8)
        for count, low, high in zip(counts, edges, edges[1:], strict=False):
            print(f"{100 * low:6.2f} to {100 * high:6.2f} % of the bytes  {'#' * int(count)}")
    if args.png:
        draw(shares, args.lr, args.png)
    figures = {name: figures_of(of_steps) for name, of_steps in shares.items()}
    print(json.dumps({"lr": args.lr, "steps": args.steps, "models": figures}))


def in_a_process(function: Callable[..., list[float]], *arguments: Any) -> list[float]:
    """Return what it returns in a process of its own: one holds a single rank of a trainer."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def shares_of(name: str, num_steps: int, lr: float) -> list[float]:
    """Return the share of the bytes that the difference takes after each step."""
    torch.set_num_threads(1)
    optimizer = OptimizerConfig(lr=lr, schedule="constant", warmup_steps=0)
    with tempfile.TemporaryDirectory() as folder:
        config, weights = qwen3_moe(), None
        if name == SMOLLM2:
            weights = str(write_smollm2(Path(folder, "model")))
            config = json.loads(Path(weights, "config.json").read_text())
        rank = LoneRank(Path(folder, "run"), config, "bfloat16", None, optimizer, weights)
        before = rank.weights()
        shares = []
        for _ in range(num_steps):
            rank.step()
            now = rank.weights()
            shares.append(share_of(before, now))
            before = now
    return shares


def share_of(before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> float:
    """Return the bytes of the difference, as a share of those of the weights."""
    coded = whole = 0
    for name, tensor in now.items():
        pair = [t.flatten().view(torch.uint16).numpy() for t in (before[name], tensor)]
        coded += take_changes(*pair).num_bytes
        whole += pair[1].nbytes
    return coded / whole


def figures_of(shares: Sequence[float]) -> dict[str, Any]:
    return {
        "mean_share": float(np.mean(shares)),
        "median_share": float(np.median(shares)),
        "first_share": shares[0],
        "most_share": max(shares),
    }


def draw(shares: Mapping[str, Sequence[float]], lr: float, path: Path) -> None:
    """Draw a histogram of each model's steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.8), layout="constrained")
    for axes, (name, of_steps) in zip(
        np.atleast_1d(figure.subplots(1, len(shares))), shares.items(), strict=True
    ):
        axes.hist([100 * share for share in of_steps], bins=25, color="#4477aa")
        axes.set_title(TITLES[name], fontsize=9)
        axes.set_xlabel("% of the bytes of the weights")
        axes.set_ylabel("steps")
    figure.suptitle(f"bytes of a difference after a step of Adam, learning rate {lr:g}", fontsize=9)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
