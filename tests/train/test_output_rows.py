"""Logits are computed for the tokens that a loss reads, in every tensor-parallel layout."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import unwrap_model

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.train.logprobs import place_at_tokens, select_scored_rows
from mcore_rl.types import TrainBatch
from tests.support.distributed import run_ranks
from tests.support.tiny_training import (
    LENS,
    NUM_TOKENS,
    make_actor,
    make_batches,
    token_loss,
    write_hf_model,
)


def make_targets(mask: list[bool], weights: list[float]) -> TrainBatch:
    return TrainBatch(
        torch.zeros(len(mask), dtype=torch.int64),
        torch.tensor(mask),
        (len(mask),),
        loss_weights_T=torch.tensor(weights),
    )


def test_rows_are_those_with_a_mask_or_a_weight() -> None:
    targets = make_targets([False, True, False, True], [0.0, 0.5, 0.25, 0.0])
    assert select_scored_rows(targets).tolist() == [1, 2, 3]


def test_a_rank_without_trained_tokens_has_one_row() -> None:
    assert select_scored_rows(make_targets([False] * 3, [0.0] * 3)).tolist() == [0]


def test_a_batch_without_weights_is_refused() -> None:
    with pytest.raises(AssertionError, match="no loss weights"):
        select_scored_rows(
            TrainBatch(torch.zeros(1, dtype=torch.int64), torch.ones(1).bool(), (1,))
        )


def test_values_return_to_their_tokens_with_their_gradient() -> None:
    values_R = torch.tensor([2.0, 3.0], requires_grad=True)
    values_T = place_at_tokens(values_R, torch.tensor([1, 3]), 5)
    assert values_T.tolist() == [0.0, 2.0, 0.0, 3.0, 0.0]
    (values_T * torch.arange(5.0)).sum().backward()
    assert values_R.grad is not None and values_R.grad.tolist() == [1.0, 3.0]


def rows_in_passes(
    rank: int, world_size: int, port: int, path: str, layout: dict[str, Any]
) -> tuple[list[int], list[int], bool]:
    """Return the rows of logits of each micro-batch in a training and in a scoring pass."""
    actor = make_actor(rank, world_size, port, ModelConfig(path=path), ParallelConfig(**layout))
    layer: Any = unwrap_model(actor.chunks[-1]).output_layer
    seen: list[int] = []
    layer.register_forward_hook(lambda module, args, out: seen.append(len(out[0])))
    actor.train_step(make_batches(), token_loss, temperature=1.0, num_tokens=NUM_TOKENS)
    trained = seen.copy()
    seen.clear()
    actor.compute_logprobs(make_batches())
    return trained, seen, layer.sequence_parallel


@pytest.mark.gloo
@pytest.mark.parametrize("tp", [1, 2])
def test_the_output_layer_computes_trained_tokens_alone(tmp_path: Path, tp: int) -> None:
    path = str(write_hf_model(tmp_path / "model"))
    for trained, scored, is_sequence_parallel in run_ranks(rows_in_passes, tp, path, {"tp": tp}):
        assert trained == [int(batch.loss_mask_T.sum()) for batch in make_batches()]
        assert scored == [math.ceil(sum(lens) / tp) * tp for lens in LENS]
        assert is_sequence_parallel == (tp > 1)
