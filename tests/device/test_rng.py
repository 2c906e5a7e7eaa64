"""The default generators of a process: one on a CPU, one more with a GPU."""

import pytest
import torch

from mcore_rl.device import has_cuda
from mcore_rl.device.rng import GPU, HOST, default_generators


@pytest.mark.skipif(has_cuda(), reason="is about a machine without CUDA")
def test_without_cuda_the_hosts_generator_is_the_only_one() -> None:
    assert default_generators() == {HOST: torch.default_generator}


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
def test_a_gpu_draws_from_its_own_generator() -> None:
    gpu = default_generators()[GPU]
    state = gpu.get_state()
    first = torch.rand(4, device="cuda")
    gpu.set_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), first)
