"""Ranks agree on who routes which token, and on which step is skipped."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig
from mcore_rl.train.trained_model import TrainedModel
from mcore_rl.types import StepStats
from tests.support.distributed import run_ranks
from tests.support.tiny_training import (
    NUM_TOKENS,
    make_actor,
    my_batches,
    token_loss,
    write_hf_model,
)

LENS = (5, 1, 6, 9)


def routed(rank: int, world_size: int, port: int, model: ModelConfig, layout: Any) -> Any:
    actor = make_actor(rank, world_size, port, model, ParallelConfig(**layout))
    assert isinstance(actor, TrainedModel)
    assert len(actor.select_routed_tokens(())) == 0, "a filler has no token"
    return actor.select_routed_tokens(LENS).tolist(), actor.select_seen_tokens(LENS).tolist()


@pytest.mark.gloo
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
        pytest.param({"cp": 2}, marks=pytest.mark.slow),
        {"tp": 2, "cp": 2},
    ],
    ids=str,
)
def test_context_and_sequence_parallel_ranks_divide_the_tokens(
    tmp_path: Path, layout: dict[str, int]
) -> None:
    model = ModelConfig(path=str(write_hf_model(tmp_path)), dtype="float32")
    world_size = torch.tensor(list(layout.values())).prod().item()
    found = run_ranks(routed, int(world_size), model, layout)
    of_ranks = [tokens for tokens, _ in found]
    assert all(tokens == sorted(tokens) and tokens for tokens in of_ranks)
    assert sorted(token for tokens in of_ranks for token in tokens) == list(range(sum(LENS)))
    firsts = {0, *torch.tensor(LENS[:-1]).cumsum(0).tolist()}
    for routed_here, seen in found:
        assert seen == sorted(seen)
        assert {*routed_here, *(t + 1 for t in routed_here)} - {21} - firsts <= set(seen)
        assert len(seen) < 21 or "cp" not in layout


def train_with(
    rank: int, world_size: int, port: int, path: str, scales: list[float]
) -> tuple[list[StepStats | None], list[torch.Tensor]]:
    """Take a step for each scale of the loss; return its stats, and the weights."""
    optimizer = OptimizerConfig(lr=1e-3, megatron={"grad_norm_skip_threshold": 1e3})
    model = ModelConfig(path=path, dtype="float32")
    actor = make_actor(rank, world_size, port, model, ParallelConfig(ep=2), optimizer)

    def step(scale: float) -> StepStats | None:
        def loss(*args: Any) -> Any:
            loss_T, metrics = token_loss(*args)
            return scale * loss_T, metrics

        return actor.train_step(my_batches(), loss, temperature=1.0, num_tokens=NUM_TOKENS)

    stats = [step(scale) for scale in scales]
    return stats, [tensor.clone() for tensor in actor.weight_layout()[1].values()]


@pytest.mark.gloo
def test_a_step_of_a_huge_gradient_is_skipped_and_told(tmp_path: Path) -> None:
    path = str(write_hf_model(tmp_path))
    plain = run_ranks(train_with, 2, path, [1.0, 1.0])
    spiked = run_ranks(train_with, 2, path, [1.0, 1e9, 1.0])
    for (_, weights), (stats, others) in zip(plain, spiked, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
        norms = [step.grad_norm for step in stats]
        assert norms[1] > 1e3 > max(norms[0], norms[2]) > 0
        assert [step.metrics["train/skipped_share"] for step in stats] == [0.0, 1.0, 0.0]
