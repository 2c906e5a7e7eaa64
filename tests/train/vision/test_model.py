"""The rotary angles of a packed micro-batch are whole on every context-parallel rank."""

from typing import Any

import pytest
import torch

from mcore_rl.config import ParallelConfig
from mcore_rl.train.runtime import init_distributed
from mcore_rl.train.vision.model import WholePositions
from tests.support.distributed import run_ranks


def angles(rank: int, world_size: int, port: int) -> torch.Tensor:
    init_distributed(
        rank, world_size, "127.0.0.1", port, ParallelConfig(cp=world_size), seed=0, timeout_s=60
    )
    rotary: Any = WholePositions(kv_channels=8, rotary_percent=1.0, rotary_base=100)
    rotary.cp_group = None
    return rotary(torch.arange(12).reshape(3, 1, 4), [1, 2, 1])


@pytest.mark.gloo
def test_angles_are_not_cut_over_context_parallel_ranks() -> None:
    [whole] = run_ranks(angles, 1)
    assert whole.shape == (4, 1, 1, 8)
    frequencies = 100 ** -(torch.arange(4) / 4)
    axes = torch.tensor([0, 1, 1, 2])
    wanted = torch.arange(12).reshape(3, 4)[axes].T * frequencies
    torch.testing.assert_close(whole[:, 0, 0], torch.cat([wanted, wanted], dim=1))
    for cut in run_ranks(angles, 2):
        assert torch.equal(cut, whole)
