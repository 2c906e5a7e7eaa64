"""The default generators of a process: one on a CPU, one more with a GPU_RNG."""

import pytest
import torch

from mcore_rl.device import GPU_RNG, HOST_RNG, default_generators, has_cuda


@pytest.mark.skipif(has_cuda(), reason="is about a machine without CUDA")
def test_without_cuda_the_hosts_generator_is_the_only_one() -> None:
    assert default_generators() == {HOST_RNG: torch.default_generator}


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU_RNG")
def test_a_gpu_draws_from_its_own_generator() -> None:
    gpu = default_generators()[GPU_RNG]
    state = gpu.get_state()
    first = torch.rand(4, device="cuda")
    gpu.set_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), first)
