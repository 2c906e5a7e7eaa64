"""Trains episodes of many turns as one row, and as a row per turn, on one rank of a tiny model.

Both train the same tokens behind the same contexts, so loss and norm of the gradient are the same
(tests/scenarios/train/test_episode_cuts.py compares the gradients themselves). A row per turn
computes the context of each turn again. The last line is JSON.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from mcore_rl.agents.messages import Answer, EndReason
from mcore_rl.agents.turn_tree import Cut, Fork, Turn, TurnTree, at_leaves, at_turns, rows_of
from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.batches.batch import select_each, with_loss_weights
from mcore_rl.batches.episodes import sample_of_episode
from mcore_rl.batches.local_stores import LocalStores
from mcore_rl.batches.packing import plan_microbatches
from mcore_rl.batches.stored_batch import make_stored_batch
from mcore_rl.config import AlgorithmConfig, OptimizerConfig
from mcore_rl.tools.doctor.lone_rank import LoneRank, qwen3_moe
from mcore_rl.types import EpisodeRecord, Prompt, Sample, TrainBatch, VersionSpan, WeightVersion


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--told", type=int, default=24, help="tokens told between answers")
    parser.add_argument("--answer", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--microbatch", type=int, default=2048, help="tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = qwen3_moe()
        # A learning rate of nothing: all steps have the same weights.
        rank = LoneRank(Path(folder), config, optimizer=OptimizerConfig(lr=1e-12))
        cuts: dict[str, Cut] = {"one row": at_leaves, "row per turn": at_turns}
        batches = {name: make_batch(args, config["vocab_size"], cut) for name, cut in cuts.items()}
        seconds: dict[str, list[float]] = {name: [] for name in cuts}
        stats = {name: step(rank, batch, args.microbatch) for name, batch in batches.items()}
        for _ in range(args.repeats):
            for name, batch in batches.items():
                began_s = time.perf_counter()
                step(rank, batch, args.microbatch)
                seconds[name].append(time.perf_counter() - began_s)
    result = {
        "episodes": args.episodes,
        "turns": args.turns,
        "seconds": {name: median(values) for name, values in seconds.items()},
        "tokens": {name: len(batch.token_ids_T) for name, batch in batches.items()},
        "speedup": median(seconds["row per turn"]) / median(seconds["one row"]),
        "loss": {name: loss for name, (loss, _) in stats.items()},
        "grad_norm": {name: norm for name, (_, norm) in stats.items()},
    }
    for name in cuts:
        print(f"{name:14}{result['tokens'][name]:8} tokens {result['seconds'][name]:8.3f} s")
    print(json.dumps(result))


def make_batch(args: argparse.Namespace, vocab_size: int, cut: Cut) -> TrainBatch:
    """Return random episodes as a batch, with an advantage per episode."""
    generator = random.Random(0)
    prompt = Prompt(0, (1,), (), "benchmark", None)
    samples = [make_episode(args, generator, vocab_size, prompt, cut) for _ in range(args.episodes)]
    stores = LocalStores()
    rows = stores.keep(samples)
    batch = stores.assemble(make_stored_batch(rows))
    batch = with_loss_weights(batch, "sequence_mean", 1)
    assert batch.sample_N is not None
    of_sample = torch.tensor([generator.uniform(-1, 1) for _ in samples])
    of_row = of_sample[torch.tensor(batch.sample_N)]
    advantages_T = of_row.repeat_interleave(torch.tensor(batch.lens_N)) * batch.loss_mask_T
    # The loss takes no sums over samples, so there is no pass for them.
    return TrainBatch(**{**vars(batch), "advantages_T": advantages_T, "sums_from": "rows"})


def make_episode(
    args: argparse.Namespace, generator: random.Random, vocab_size: int, prompt: Prompt, cut: Cut
) -> Sample:
    tree = TurnTree()
    for number in range(args.turns):
        told, said = (
            tuple(generator.randrange(vocab_size) for _ in range(length))
            for length in (args.told, args.answer)
        )
        tree.add(
            Turn(
                number=number,
                parent=number - 1 if number else None,
                fork=Fork.NONE,
                messages=(),
                tools=(),
                context_ids=told,
                token_ids=said,
                logprobs=(-1.0,) * args.answer,
                versions=(VersionSpan(0, args.answer, WeightVersion(0)),),
                finish_reason="stop",
                answer=Answer({"role": "assistant", "content": ""}),
            )
        )
    episode = EpisodeRecord(rows_of(tree, cut), tree.records(), EndReason.DONE, 0.0)
    return sample_of_episode(prompt, 0, episode, "")


def step(rank: LoneRank, batch: TrainBatch, microbatch: int) -> tuple[float, float]:
    """Take an optimizer step; return (loss, norm of the gradient)."""
    loss = make_policy_loss(AlgorithmConfig(loss="policy_gradient"))
    [parts] = plan_microbatches(batch.lens_N, 1, microbatch)
    stats = rank.actor.train_step(
        select_each(batch, parts), loss, temperature=1.0, num_tokens=len(batch.token_ids_T)
    )
    assert stats is not None, "the only rank owns the output"
    return stats.loss, stats.grad_norm


if __name__ == "__main__":
    main()
