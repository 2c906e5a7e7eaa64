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
