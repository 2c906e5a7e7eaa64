"""The compiled rotary embedding is megatron-core's, forward and backward."""

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from torch import Tensor

from mcore_rl.cpu.kernels.layers import rotary

LENS = (5, 1, 3)


def angles(num_positions: int, turned: int) -> Tensor:
    inverse = 1.0 / 10000.0 ** (torch.arange(0, turned, 2) / turned)
    half = torch.outer(torch.arange(num_positions).float(), inverse)
    return torch.cat([half, half], -1)[:, None, None]


@pytest.mark.parametrize("turned", [8, 6])
@pytest.mark.parametrize("by_token", [False, True])
def test_values_and_gradients_are_those_of_megatron(turned: int, by_token: bool) -> None:
    torch.manual_seed(0)
    wide = torch.randn(sum(LENS), 3, 12)
    freqs = angles(sum(LENS), turned)
    positions = [range(sum(LENS))] if by_token else [range(length) for length in LENS]
    packed = freqs[[place for part in positions for place in part]]
    dy, results = torch.randn(sum(LENS), 3, 8), []
    for way in ("compiled", "torch"):
        leaf = wide.clone().requires_grad_()
        x = leaf[..., 2:10]
        if way == "compiled":
            y = rotary(x, freqs, LENS, 1.25, by_token)
            assert y is not None
        else:
            y = _apply_rotary_pos_emb_bshd(x[:, None], packed, mscale=1.25)[:, 0]
        results.append((y, *torch.autograd.grad(y, [leaf], dy)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_another_scale_makes_other_tables() -> None:
    x, freqs = torch.randn(3, 1, 4), angles(3, 4)
    first, second = (rotary(x, freqs, (3,), mscale, by_token=True) for mscale in (1.0, 2.0))
    assert first is not None and second is not None
    torch.testing.assert_close(2 * first, second)


def test_angles_whose_halves_differ_are_left_to_megatron() -> None:
    freqs = angles(3, 4)
    freqs[1, 0, 0, 3] += 0.5
    assert rotary(torch.randn(3, 1, 4), freqs, (3,), 1.0, by_token=True) is None
