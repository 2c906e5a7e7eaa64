"""Ranks agree on who routes which token, before any of them has the tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.config import ModelConfig, ParallelConfig
from mcore_rl.train.trained_model import TrainedModel
from tests.support.distributed import run_ranks
from tests.support.tiny_training import make_actor, write_hf_model

LENS = (5, 1, 6, 9)


def routed(rank: int, world_size: int, port: int, model: ModelConfig, layout: Any) -> Any:
    actor = make_actor(rank, world_size, port, model, ParallelConfig(**layout))
    assert isinstance(actor, TrainedModel)
    assert len(actor.routed_tokens(())) == 0, "a filler has no token"
    return actor.routed_tokens(LENS).tolist()


@pytest.mark.gloo
@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}], ids=str)
def test_context_and_sequence_parallel_ranks_divide_the_tokens(
    tmp_path: Path, layout: dict[str, int]
) -> None:
    model = ModelConfig(path=str(write_hf_model(tmp_path)), dtype="float32")
    world_size = torch.tensor(list(layout.values())).prod().item()
    of_ranks = run_ranks(routed, int(world_size), model, layout)
    assert all(tokens == sorted(tokens) and tokens for tokens in of_ranks)
    assert sorted(token for tokens in of_ranks for token in tokens) == list(range(sum(LENS)))
