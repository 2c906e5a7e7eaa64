"""Process groups of the training ranks and the place of each rank in them."""

from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state as ps

from mcore_rl.config import ParallelConfig
from mcore_rl.train.runtime import init_distributed
from mcore_rl.types import RankCoordinate
from tests.support.distributed import run_ranks

LAYOUTS: list[dict[str, Any]] = [{"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp": 2, "ep": 2}]


def regroup(rank: int, world_size: int, port: int) -> list[tuple[RankCoordinate, int, int]]:
    """Return this rank's place, its tensor-parallel group's size and all groups, by layout."""
    places = []
    for layout in LAYOUTS:
        parallel = ParallelConfig(**layout)
        place = init_distributed(
            rank, world_size, "127.0.0.1", port, parallel, seed=0, timeout_s=60
        )
        groups = dist.distributed_c10d._world.pg_map
        places.append((place, ps.get_tensor_model_parallel_world_size(), len(groups)))
    dist.barrier()  # the store at which the other rank makes its last groups ends with rank 0
    return places


@pytest.mark.gloo
def test_ranks_regroup_to_every_layout() -> None:
    first, second = run_ranks(regroup, 2)
    assert [place for place, _, _ in first] == [
        RankCoordinate(dp=0, tp=0, pp=0, cp=0, ep=0, owns_output=True),
        RankCoordinate(dp=0, tp=0, pp=0, cp=0, ep=0, owns_output=False),
        RankCoordinate(dp=0, tp=0, pp=0, cp=0, ep=0, owns_output=True),
        RankCoordinate(dp=0, tp=0, pp=0, cp=0, ep=0, owns_output=True),
    ]
    assert [place for place, _, _ in second] == [
        RankCoordinate(dp=0, tp=1, pp=0, cp=0, ep=0, owns_output=False),
        RankCoordinate(dp=0, tp=0, pp=1, cp=0, ep=0, owns_output=True),
        RankCoordinate(dp=0, tp=0, pp=0, cp=1, ep=0, owns_output=False),
        RankCoordinate(dp=1, tp=0, pp=0, cp=0, ep=1, owns_output=True),
    ]
    assert [size for _, size, _ in first] == [2, 1, 1, 1]
    num_groups = [count for _, _, count in first]
    assert max(num_groups) < 2 * min(num_groups), "the groups of earlier layouts are still open"


def test_a_wrong_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 training ranks, but .* = 2 \* 1 \* 1 \* 1 = 2"):
        init_distributed(0, 3, "127.0.0.1", 1, ParallelConfig(tp=2), seed=0, timeout_s=1.0)
