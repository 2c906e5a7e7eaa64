"""Compiled RMSNorm is torch's, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from mcore_rl.cpu.kernels.layers import RmsNorm, rms_norm


@pytest.mark.parametrize("shape", [(7, 128), (3, 5, 33), (0, 8)])
def test_values_and_gradients_are_those_of_torch(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight, dy = torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape)
    results = []
    for norm in (rms_norm, lambda x, w, eps: F.rms_norm(x, w.shape, w, eps)):
        leaves = own_x, own_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = norm(own_x, own_weight, 1e-6)
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_slice_is_normed_along_its_last_axis() -> None:
    x, weight = torch.randn(6, 4, 16)[:, :2, 8:], torch.rand(8)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), F.rms_norm(x, (8,), weight, 1e-6))


def test_other_precisions_go_to_torch() -> None:
    norm = RmsNorm(8, eps=1e-6, dtype=torch.bfloat16)
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    assert torch.equal(norm(x), F.rms_norm(x, (8,), norm.weight, 1e-6))
