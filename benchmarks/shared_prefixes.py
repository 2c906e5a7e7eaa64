"""Trains sequences with common beginnings, computed once (train.share_prefixes) and separately.

    python benchmarks/shared_prefixes.py

responses   16 responses to each prompt, as GRPO trains them
turns       episodes of 16 turns, each turn a row of its own behind the whole conversation

Each way runs in a process of its own, in turns, on one thread, with one rank of a tiny model. Loss
and norm of the gradient are the same (tests/scenarios/train/test_shared_prefixes.py compares
log-probs and gradients). The last line is JSON.
"""

import argparse
import json
import random
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

from agents_train import make_batch as make_episodes
from mcore_rl.agents.turn_tree import at_turns
from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.batches.batch import select_each, with_loss_weights
from mcore_rl.config import AlgorithmConfig, OptimizerConfig, TrainConfig
from mcore_rl.tools.doctor.lone_rank import LoneRank, qwen3_moe
from mcore_rl.tools.doctor.step_checks import pack_as_a_run
from mcore_rl.types import TrainBatch

WAYS = {"separate": False, "shared": True}
_rank: LoneRank


def make_responses(args: argparse.Namespace, vocab_size: int) -> TrainBatch:
    """Return random responses to random prompts."""
    generator = torch.Generator().manual_seed(0)
    rows, masks, advantages = [], [], []
    for _ in range(args.prompts):
        prompt = torch.randint(0, vocab_size, (args.prompt_len,), generator=generator)
        for _ in range(args.samples):
            own = torch.randint(0, vocab_size, (args.response_len,), generator=generator)
            rows.append(torch.cat([prompt, own]))
            masks.append(torch.arange(len(rows[-1])) >= args.prompt_len)
            advantages.append(masks[-1] * torch.randn((), generator=generator))
    batch = TrainBatch(torch.cat(rows), torch.cat(masks), tuple(map(len, rows)))
    weighted = with_loss_weights(batch, "sequence_mean", 1)
    return TrainBatch(**{**vars(weighted), "advantages_T": torch.cat(advantages)})


def start(folder: Path, share: bool) -> None:
    """Build this process's rank."""
    global _rank
    torch.set_num_threads(1)
    # A learning rate of nothing: all steps have the same weights.
    train = TrainConfig(share_prefixes=share)
    _rank = LoneRank(folder, qwen3_moe(), train=train, optimizer=OptimizerConfig(lr=1e-12))


def step(batch: TrainBatch, microbatch: int, share: bool) -> dict[str, float]:
    """Take an optimizer step on this process's rank."""
    train = TrainConfig(max_tokens_per_microbatch=microbatch, share_prefixes=share)
    began_s = time.perf_counter()
    recipe = _rank.recipe
    [parts] = pack_as_a_run(recipe.model.path, recipe.parallel, train).plan(batch)
    stats = _rank.actor.train_step(
        select_each(batch, parts),
        make_policy_loss(AlgorithmConfig(loss="policy_gradient")),
        temperature=1.0,
        num_tokens=len(batch.token_ids_T),
    )
    seconds = time.perf_counter() - began_s
    assert stats is not None, "the only rank owns the output"
    return {"seconds": seconds, "loss": stats.loss, "grad_norm": stats.grad_norm}


def compare(
    pools: dict[str, ProcessPoolExecutor], batch: TrainBatch, args: argparse.Namespace
) -> dict[str, Any]:
    """Return the medians of alternating steps."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(args.repeats + 1):
        for way, share in WAYS.items():
            found[way].append(pools[way].submit(step, batch, args.microbatch, share).result())
    seconds = {way: median(each["seconds"] for each in found[way][1:]) for way in WAYS}
    return {
        "tokens": len(batch.token_ids_T),
        "seconds": seconds,
        "speedup": seconds["separate"] / seconds["shared"],
        "loss": {way: found[way][0]["loss"] for way in WAYS},
        "grad_norm": {way: found[way][0]["grad_norm"] for way in WAYS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--response-len", type=int, default=64)
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--told", type=int, default=24, help="tokens told between answers")
    parser.add_argument("--answer", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--microbatch", type=int, default=2048, help="tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    vocab_size = qwen3_moe()["vocab_size"]
    random.seed(0)
    batches = {
        "responses": make_responses(args, vocab_size),
        "turns": make_episodes(args, vocab_size, at_turns),
    }
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        pools = {
            way: ProcessPoolExecutor(1, get_context("spawn"), start, (Path(folder) / way, share))
            for way, share in WAYS.items()
        }
        try:
            for name, batch in batches.items():
                result[name] = compare(pools, batch, args)
                print(f"{name:10} {result[name]['speedup']:.2f} times as fast: {result[name]}")
        finally:
            for pool in pools.values():
                pool.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
