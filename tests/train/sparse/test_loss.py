"""The loss of indexers without a model: chunks of tokens, missing keys, padding and dtypes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_rl.train.sparse import loss
from mcore_rl.train.sparse.loss import Divergence, IndexerLoss

T, S, K, H, D = 7, 9, 4, 3, 5


def make_parts(dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return (queries, keys and weights of heads, the target, the chosen keys)."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    parts = [draw(T, H, D), draw(S, D), draw(T, H)]
    chosen_TK = torch.stack([torch.randperm(S, generator=generator)[:K] for _ in range(T)])
    chosen_TK[0, 1:] = -1
    chosen_TK[3, 2] = -1
    target_TK = torch.rand(T, K, generator=generator) * (chosen_TK >= 0)
    return parts, target_TK / target_TK.sum(1, keepdim=True), chosen_TK


def compute_plainly(parts: list[Tensor], target_TK: Tensor, chosen_TK: Tensor) -> Tensor:
    """Return each token's loss, [T], key by key in float64."""
    query, key, head_weights = (part.double() for part in parts)
    losses = []
    for t, chosen_K in enumerate(chosen_TK.tolist()):
        places = [k for k, place in enumerate(chosen_K) if place >= 0]
        scores = torch.stack(
            [head_weights[t] @ (query[t] @ key[chosen_K[k]]).relu() for k in places]
        )
        p = target_TK[t, places].double()
        losses.append((p * (p.log() - scores.log_softmax(0))).sum())
    return torch.stack(losses)


@pytest.mark.parametrize("bytes_at_once", [1, 1 << 28])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_loss_and_gradients_are_those_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, bytes_at_once: int, dtype: torch.dtype, tolerance: float
) -> None:
    monkeypatch.setattr(loss, "BYTES_AT_ONCE", bytes_at_once)
    parts, target_TK, chosen_TK = make_parts(dtype)
    padding_T = torch.arange(T) >= T - 2
    weights_T = IndexerLoss(1.0, padding_T, torch.zeros(1)).weigh_tokens(T)
    total: Any = Divergence.apply(*parts, target_TK, chosen_TK, weights_T)
    (3.0 * total).backward()
    found = [part.grad for part in parts]
    for part in parts:
        part.grad = None
    wanted = compute_plainly(parts, target_TK, chosen_TK)[: T - 2].sum()
    (3.0 * wanted).backward()
    assert float(total) == pytest.approx(float(wanted), rel=1e-6)
    for gradient, part in zip(found, parts, strict=True):
        assert gradient is not None and part.grad is not None and gradient.dtype == dtype
        torch.testing.assert_close(gradient, part.grad, rtol=tolerance, atol=tolerance)
