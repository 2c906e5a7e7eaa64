"""The kernel is taken where it can run, and gives the bits that torch gives."""

import pytest
import torch

from mcore_rl.device.gpu_kernels import has_kernel, quantize_blocks
from mcore_rl.weights.hf import quantize


def test_there_is_no_kernel_for_host_memory() -> None:
    assert not has_kernel(torch.zeros(2, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 128), (300, 129), (4096, 7168)])
def test_values_and_scales_have_torchs_bits(shape: tuple[int, int]) -> None:
    weights = torch.randn(shape, device="cuda").mul_(torch.randn(shape, device="cuda").exp())
    weights = weights.bfloat16()
    n, k = -(-shape[0] // 128), -(-shape[1] // 128)
    wanted, got = (torch.empty(shape, dtype=torch.float8_e4m3fn) for _ in range(2))
    wanted_scales, scales = torch.empty(n, k), torch.empty(n, k, device="cuda")
    quantize.quantize_into(weights.cpu(), wanted, wanted_scales)
    on_gpu = got.cuda()
    quantize_blocks(weights, on_gpu, scales, 128, quantize._FP8_MAX, quantize._MIN_AMAX)
    assert torch.equal(scales.cpu(), wanted_scales)
    assert torch.equal(on_gpu.cpu().view(torch.uint8), wanted.view(torch.uint8))
