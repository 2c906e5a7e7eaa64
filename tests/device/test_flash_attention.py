"""Attention with sinks from a kernel without: values and gradients of the softmax with a sink.

On the CPU a dense kernel with flash attention's contract takes the place of torch's.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.device import has_cuda
from mcore_rl.device.attention import AttentionSpec, attend_packed, fits_flash, flash_attention
from mcore_rl.device.probes import error_of_sinks

SCALE = 0.4


@dataclass(frozen=True)
class DenseKernel:
    """Attention by whole matrices; like flash attention, it makes probabilities from `lse`."""

    lens_N: tuple[int, ...]
    window: int | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Any]:
        scores_hTT = self._scores(q, k)
        lse_hT = scores_hTT.logsumexp(-1)
        out = torch.einsum("htu,uhd->thd", (scores_hTT - lse_hT[..., None]).exp(), _wide(v, q))
        return out, lse_hT, "state"

    def backward(
        self, grad: Tensor, qkv: tuple[Tensor, ...], out: Tensor, lse_hT: Tensor, state: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert state == "state"
        q, k, v = qkv
        probs_hTT = (self._scores(q, k) - lse_hT[..., None]).exp()
        rows_hT = (grad * out).sum(-1).T
        grad_probs = torch.einsum("thd,uhd->htu", grad, _wide(v, q))
        grad_scores = probs_hTT * (grad_probs - rows_hT[..., None]) * SCALE
        grad_q = torch.einsum("htu,uhd->thd", grad_scores, _wide(k, q))
        grad_k = torch.einsum("htu,thd->uhd", grad_scores, q)
        grad_v = torch.einsum("htu,thd->uhd", probs_hTT, grad)
        return grad_q, _narrow(grad_k, k), _narrow(grad_v, v)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        sequence_T = torch.repeat_interleave(
            torch.arange(len(self.lens_N)), torch.tensor(self.lens_N)
        )
        distance_TT = torch.arange(len(q))[:, None] - torch.arange(len(q))
        seen_TT = (sequence_T[:, None] == sequence_T) & (distance_TT >= 0)
        if self.window is not None:
            seen_TT &= distance_TT <= self.window
        scores_hTT = torch.einsum("thd,uhd->htu", q, _wide(k, q)) * SCALE
        return scores_hTT.masked_fill(~seen_TT, -torch.inf)


def _wide(kv: Tensor, q: Tensor) -> Tensor:
    """Repeat key heads for the query heads that share them."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], 1)


def _narrow(grad: Tensor, kv: Tensor) -> Tensor:
    return grad.unflatten(1, (kv.shape[1], -1)).sum(2)


def inputs(num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v and sinks, of four query heads on two key heads."""
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = [(num_tokens, 4, 8), (num_tokens, 2, 8), (num_tokens, 2, 8), (4,)]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [tensor.to(dtype).requires_grad_() for tensor in made]


def with_gradients(out_Tx: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    weights = torch.arange(out_Tx.numel()).view_as(out_Tx).cos()
    return [out_Tx.detach(), *torch.autograd.grad((out_Tx * weights).sum(), tensors)]


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("lens_N", [(9,), (5, 1, 7)])
def test_values_and_gradients_are_those_of_the_softmax_with_a_sink(
    lens_N: tuple[int, ...], window: int | None
) -> None:
    tensors = inputs(sum(lens_N), torch.float64)
    q, k, v, sinks_h = tensors
    got = flash_attention(q, k, v, sinks_h, DenseKernel(lens_N, window)).flatten(1)
    wanted = attend_packed(q, k, v, lens_N, AttentionSpec(SCALE, window, sinks_h))
    pairs = zip(with_gradients(got, tensors), with_gradients(wanted, tensors), strict=True)
    for one, other in pairs:
        # attend_packed sums probabilities in float32
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_without_sinks_it_is_plain_attention() -> None:
    lens_N = (4, 6)
    q, k, v, _ = inputs(10, torch.float64)
    tensors = [q, k, v]
    got = flash_attention(q, k, v, None, DenseKernel(lens_N)).flatten(1)
    wanted = attend_packed(q, k, v, lens_N, AttentionSpec(SCALE))
    for one, other in zip(
        with_gradients(got, tensors), with_gradients(wanted, tensors), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_the_cpu_has_no_flash_attention() -> None:
    q, _, v, _ = inputs(3, torch.bfloat16)
    assert not fits_flash(q, v)


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 128])
def test_torchs_kernel_on_a_gpu(window: int | None) -> None:
    assert error_of_sinks(window) < 0.02
