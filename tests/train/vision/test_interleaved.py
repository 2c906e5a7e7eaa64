"""Rotary axes that take turns are those of transformers, whole on every context-parallel rank."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.config import ParallelConfig
from mcore_rl.train.runtime import init_distributed
from mcore_rl.train.vision.model import InterleavedPositions, interleave_axes
from tests.support.distributed import run_ranks


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 4))
def test_axes_are_those_of_transformers(height: int, width: int, more: int) -> None:
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    time = max(height, width) * 3 - height - width + more
    section = [time, height, width]
    num_frequencies = sum(section)
    axes_3F = torch.arange(3)[:, None].expand(3, num_frequencies).clone()
    module: Any = Qwen3VLTextRotaryEmbedding.__new__(Qwen3VLTextRotaryEmbedding)
    torch.nn.Module.__init__(module)
    module.mrope_section = section
    wanted = module.recomposition_frequencies(axes_3F)[:num_frequencies].tolist()
    found = interleave_axes(section, num_frequencies)
    assert found == wanted
    assert [found.count(axis) for axis in range(3)] == section


def angles(rank: int, world_size: int, port: int) -> torch.Tensor:
    init_distributed(
        rank, world_size, "127.0.0.1", port, ParallelConfig(cp=world_size), seed=0, timeout_s=60
    )
    rotary: Any = InterleavedPositions(
        section=[2, 1, 1], kv_channels=8, rotary_percent=1.0, rotary_base=100
    )
    rotary.cp_group = None
    return rotary(torch.arange(12).reshape(3, 1, 4), [2, 1, 1])


@pytest.mark.gloo
def test_angles_are_not_cut_over_context_parallel_ranks() -> None:
    [whole] = run_ranks(angles, 1)
    assert whole.shape == (4, 1, 1, 8)
    frequencies = 100 ** -(torch.arange(4) / 4)
    axes = torch.tensor([0, 1, 2, 0])
    wanted = torch.arange(12).reshape(3, 4)[axes].T * frequencies
    torch.testing.assert_close(whole[:, 0, 0], torch.cat([wanted, wanted], dim=1))
    for cut in run_ranks(angles, 2):
        assert torch.equal(cut, whole)
