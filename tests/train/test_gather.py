"""Values of context-parallel ranks come back in the order of the micro-batch."""

import pytest
import torch
from megatron.core import parallel_state as ps
from torch import Tensor

from mcore_rl.config import ParallelConfig
from mcore_rl.train.packing import make_rank_batch
from mcore_rl.train.runtime import init_distributed
from mcore_rl.train.stats import gather_tokens
from mcore_rl.types import TrainBatch
from tests.support.distributed import run_ranks

LENS = (5, 1, 6)


def gather(rank: int, world_size: int, port: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return, of two micro-batches, the ids of the tokens themselves, twice each, and of the
    predicted ones.
    """
    parallel = ParallelConfig(cp=world_size)
    init_distributed(rank, world_size, "127.0.0.1", port, parallel, seed=0, timeout_s=60)
    parts, pairs = [], []
    for first, lens_N in ((1, LENS), (101, (2, 3))):
        ids_T = torch.arange(first, first + sum(lens_N))
        batch = TrainBatch(ids_T, torch.ones_like(ids_T).bool(), lens_N)
        parts.append(make_rank_batch(batch, ps.get_context_parallel_rank(), world_size, 1))
        pairs.append(torch.stack([parts[-1].tokens_T, parts[-1].tokens_T], dim=1))
    nums_tokens = [sum(LENS), 5]
    return (
        gather_tokens(pairs, [part.sources_T for part in parts], nums_tokens, [None, None]),
        gather_tokens(
            [part.labels_T for part in parts],
            [part.targets_T for part in parts],
            nums_tokens,
            [None, None],
        ),
    )


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.gloo)])
def test_every_value_comes_back_to_its_token(world_size: int) -> None:
    wanted = [list(range(1, 13)), list(range(101, 106))]
    firsts = {1, 6, 7, 101, 103}
    for pairs_T2, labels_T in run_ranks(gather, world_size):
        for ids, pairs, labels in zip(wanted, pairs_T2, labels_T, strict=True):
            assert pairs.tolist() == [[token, token] for token in ids]
            assert labels.tolist() == [0 if token in firsts else token for token in ids]


def test_a_token_gets_the_value_of_the_one_computed_for_it() -> None:
    [[first], [second]] = run_ranks(gather_twins, 1)[0]
    assert first.tolist() == [5, 6, 7, 5, 6, 8]
    assert second.tolist() == [1, 2]


def gather_twins(rank: int, world_size: int, port: int) -> tuple[list[Tensor], list[Tensor]]:
    """Gather two micro-batches; in the first, tokens 3 and 4 are not computed."""
    init_distributed(rank, 1, "127.0.0.1", port, ParallelConfig(), seed=0, timeout_s=60)
    twins_T = [torch.tensor([0, 1, 2, 0, 1, 5]), None]
    values = [torch.tensor([5, 6, 7, 8]), torch.tensor([1, 2])]
    indices = [torch.tensor([0, 1, 2, 5]), torch.tensor([0, 1])]
    first, second = gather_tokens(values, indices, [6, 2], twins_T)
    return [first], [second]
