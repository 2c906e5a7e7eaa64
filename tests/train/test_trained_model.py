"""Values of context-parallel ranks come back in the order of the micro-batch."""

import pytest
import torch
from megatron.core import parallel_state as ps
from torch import Tensor

from mcore_rl.config import ParallelConfig
from mcore_rl.train.packing import make_rank_batch
from mcore_rl.train.runtime import init_distributed
from mcore_rl.train.trained_model import gather_tokens
from mcore_rl.types import TrainBatch
from tests.support.distributed import run_ranks

LENS = (5, 1, 6)


def gather(rank: int, world_size: int, port: int) -> tuple[Tensor, Tensor]:
    """Return the gathered ids of the tokens themselves, twice each, and of the predicted ones."""
    parallel = ParallelConfig(cp=world_size)
    init_distributed(rank, world_size, "127.0.0.1", port, parallel, seed=0, timeout_s=60)
    ids_T = torch.arange(1, sum(LENS) + 1)
    batch = TrainBatch(ids_T, torch.ones_like(ids_T).bool(), LENS)
    part = make_rank_batch(batch, ps.get_context_parallel_rank(), world_size, 1)
    pairs_T2 = torch.stack([part.tokens_T, part.tokens_T], dim=1)
    return (
        gather_tokens(pairs_T2, part.sources_T, len(ids_T)),
        gather_tokens(part.labels_T, part.targets_T, len(ids_T)),
    )


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.gloo)])
def test_every_value_comes_back_to_its_token(world_size: int) -> None:
    ids = list(range(1, 13))
    firsts = {1, 6, 7}
    for pairs_T2, labels_T in run_ranks(gather, world_size):
        assert pairs_T2.tolist() == [[token, token] for token in ids]
        assert labels_T.tolist() == [0 if token in firsts else token for token in ids]
