"""Computes token log-probs and entropies from vocab-parallel logits, with two small all-reduces.

The logits are not modified.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FAR_BELOW = -1e30
"""The logit of vocabulary padding; finite, so that 0 * FAR_BELOW is 0."""


def vocab_parallel_logprobs(
    logits_TV: Tensor,
    targets_T: Tensor,
    group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return float32 (log-prob of each target [T], entropy [T]) of softmax(logits / temperature).

    logits_TV is this rank's slice of the padded vocabulary, which the ranks of `group` share.
    Entries from `vocab_size` on are padding and get probability 0.
    """
    return _LogprobEntropy.apply(logits_TV, targets_T, group, vocab_size, temperature)  # type: ignore


@torch.no_grad()
def vocab_parallel_sum_squares(
    logits_TV: Tensor, group: dist.ProcessGroup, vocab_size: int, temperature: float
) -> Tensor:
    """Return the sum of the squared probabilities, float32 [T]; 1 where one token is certain."""
    first = group.rank() * logits_TV.shape[-1]
    num_real = min(max(vocab_size - first, 0), logits_TV.shape[-1])
    x = logits_TV.float() / temperature
    x[:, num_real:] = FAR_BELOW
    x -= _reduce(x.amax(-1), dist.ReduceOp.MAX, group)[:, None]
    exp = x.exp_()
    total, squares = _reduce(
        torch.stack([exp.sum(-1), exp.square().sum(-1)]), dist.ReduceOp.SUM, group
    )
    return squares / total.square()


def _reduce(value: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Tensor:
    if group.size() > 1:
        dist.all_reduce(value, op=op, group=group)
    return value


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup,
        vocab_size: int,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        width = logits.shape[-1]
        first = group.rank() * width
        num_real = min(max(vocab_size - first, 0), width)
        if num_real:
            peak = logits[:, :num_real].amax(-1)
        else:
            peak = logits.new_full(logits.shape[:1], FAR_BELOW)
        peak = _reduce(peak.float(), dist.ReduceOp.MAX, group)
        x = logits.float() - peak[:, None]  # the only buffer of this size saved for the backward
        if temperature != 1.0:
            x /= temperature
        x[:, num_real:] = FAR_BELOW
        exp = x.exp()
        local = targets - first
        is_local = (local >= 0) & (local < width)
        index = local.clamp(0, width - 1)[:, None]
        target_x = x.gather(-1, index)[:, 0].masked_fill(~is_local, 0.0)
        stats = torch.stack([target_x, exp.sum(-1), torch.linalg.vecdot(exp, x)])
        target_x, total, weighted = _reduce(stats, dist.ReduceOp.SUM, group)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(x, index, is_local, log_total, entropy)
        ctx.temperature = temperature
        ctx.dtype = logits.dtype
        ctx.set_materialize_grads(False)
        return target_x - log_total, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> Any:  # type: ignore
        """Return the logits' gradient: d logprob / dx = onehot - p, dH / dx = -p (log p + H)."""
        x, index, is_local, log_total, entropy = ctx.saved_tensors
        log_p = x - log_total[:, None]
        grad = log_p.exp()
        if grad_entropy is None:
            assert grad_logprob is not None
            grad *= -grad_logprob[:, None]
        else:
            factor = (log_p + entropy[:, None]) * -grad_entropy[:, None]
            grad *= factor if grad_logprob is None else factor - grad_logprob[:, None]
        if grad_logprob is not None:
            grad.scatter_add_(-1, index, (grad_logprob * is_local)[:, None])
        return (grad / ctx.temperature).to(ctx.dtype), None, None, None, None
