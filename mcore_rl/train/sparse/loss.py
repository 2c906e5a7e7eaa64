"""The indexer's own loss: how far its scores are from attention to the keys that were chosen.

    attention's queries and keys -> softmax over the chosen keys -> mean over heads ->  target p
    the indexer's scores         -> softmax over the chosen keys                    ->  own    q

    loss of a token = KL(p || q)        (DeepSeek-V3.2, arXiv:2512.02556, equation 4)

The target has no gradient, and the indexer's inputs have none either: the policy gets the gradient
that it gets without this loss. megatron-core 0.19.2 has the loss of the keys that an indexer
chooses itself; the one here is of any chosen keys, and keeps no scores of all pairs of tokens.

Axes: T local tokens, t those computed at once, S packed tokens of all context-parallel ranks, K
chosen keys of a token (-1 for none; each token has one at least), H heads, D and d sizes of heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BYTES_AT_ONCE = 1 << 28
"""Bytes of the largest tensors that are in memory for a few tokens at once."""
FLOAT32 = 4


@dataclass(frozen=True)
class IndexerLoss:
    """The weight of the loss, and the sums that layers of a chunk add to for a micro-batch.

    coef        the loss is multiplied by it (train.indexer_loss)
    padding_T   bool, True on padding; None without padding
    sums_L      float64, of each layer of the model, to which the tokens' losses are added
    """

    coef: float
    padding_T: Tensor | None
    sums_L: Tensor

    def weigh_tokens(self, num_tokens: int) -> Tensor:
        """Return float32 [T], 0 on padding and 1 elsewhere."""
        if self.padding_T is None:
            return torch.ones(num_tokens, device=self.sums_L.device)
        return 1.0 - self.padding_T.float()


@torch.no_grad()
def compute_target(
    query_THD: Tensor, key_SD: Tensor, chosen_TK: Tensor, scale: float, group: dist.ProcessGroup
) -> Tensor:
    """Return attention to the chosen keys, mean over heads, float32 [T, K]; 0 where there is none.

    query_THD   of this rank's heads; those of all ranks of `group` count. A collective of them
    key_SD      what all heads read, as in latent attention whose keys are not projected
    """
    parts = []
    for rows in _divide(chosen_TK, key_SD.shape[1] + 3 * query_THD.shape[1]):
        keys_tKD, is_none_tK = _pick_keys(key_SD.float(), chosen_TK[rows])
        scores_tHK = torch.einsum("thd,tkd->thk", query_THD[rows].float(), keys_tKD) * scale
        scores_tHK.masked_fill_(is_none_tK[:, None], float("-inf"))
        parts.append(scores_tHK.softmax(-1).sum(1))
    target_TK = torch.cat(parts)
    if group.size() > 1:
        dist.all_reduce(target_TK, group=group)
    return target_TK / target_TK.sum(1, keepdim=True)


class Divergence(torch.autograd.Function):
    """Adds up the loss of tokens, each multiplied by its weight.

    Gradients of the indexer's parts are computed together with the loss, a few tokens at once: what
    is kept for the backward pass is as large as these parts.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_THd: Tensor,
        key_Sd: Tensor,
        head_weights_TH: Tensor,
        target_TK: Tensor,
        chosen_TK: Tensor,
        weights_T: Tensor,
    ) -> Tensor:
        """Return the sum, a float32 scalar. `target_TK` is of compute_target."""
        key_Sd32 = key_Sd.detach().float().requires_grad_()
        total = torch.zeros((), device=key_Sd.device)
        key_grad_Sd = torch.zeros_like(key_Sd32)
        row_grads = []
        for rows in _divide(chosen_TK, key_Sd.shape[1] + 3 * query_THd.shape[1]):
            parts = [x[rows].detach().float() for x in (query_THd, head_weights_TH)]
            query_tHd, head_weights_tH = (part.requires_grad_() for part in parts)
            with torch.enable_grad():
                scores_tK = score_keys(query_tHd, key_Sd32, head_weights_tH, chosen_TK[rows])
                divergence_t = diverge(target_TK[rows], scores_tK, chosen_TK[rows])
                some = (divergence_t * weights_T[rows]).sum()
                grads = torch.autograd.grad(some, (query_tHd, head_weights_tH, key_Sd32))
            total += some.detach()
            row_grads.append(grads[:2])
            key_grad_Sd += grads[2]
        query_grads, weight_grads = zip(*row_grads, strict=True)
        ctx.save_for_backward(torch.cat(query_grads), key_grad_Sd, torch.cat(weight_grads))
        ctx.dtypes = query_THd.dtype, key_Sd.dtype, head_weights_TH.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Return the gradients of the indexer's parts; the others have none."""
        own = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *((grad * grads[0]).to(dtype) for grad, dtype in own), None, None, None


def score_keys(
    query_tHd: Tensor, key_Sd: Tensor, head_weights_tH: Tensor, chosen_tK: Tensor
) -> Tensor:
    """Return the indexer's scores of chosen keys, [t, K]; without meaning where there is none."""
    keys_tKd, _ = _pick_keys(key_Sd, chosen_tK)
    products_tHK = torch.einsum("thd,tkd->thk", query_tHd, keys_tKd).relu()
    return torch.einsum("th,thk->tk", head_weights_tH, products_tHK)


def diverge(target_tK: Tensor, scores_tK: Tensor, chosen_tK: Tensor) -> Tensor:
    """Return KL(target || softmax of the scores) over the chosen keys of each token, [t]."""
    is_none_tK = chosen_tK < 0
    own_tK = scores_tK.masked_fill(is_none_tK, float("-inf")).log_softmax(-1)
    own_tK = own_tK.masked_fill(is_none_tK, 0.0)
    return (torch.xlogy(target_tK, target_tK) - target_tK * own_tK).sum(-1)


def _pick_keys(key_SD: Tensor, chosen_tK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen keys, [t, K, D], the first key where there is none, and where that is."""
    rows = chosen_tK.clamp(min=0).flatten()
    return key_SD.index_select(0, rows).unflatten(0, chosen_tK.shape), chosen_tK < 0


def _divide(chosen_TK: Tensor, numbers_per_key: int) -> Iterator[slice]:
    """Yield the tokens that are computed at once, with so many numbers for each chosen key."""
    num_tokens, topk = chosen_TK.shape
    size = max(1, BYTES_AT_ONCE // (FLOAT32 * topk * numbers_per_key))
    for first in range(0, num_tokens, size):
        yield slice(first, min(first + size, num_tokens))
