"""Computes log-probs and entropies of the tokens that a loss reads, from vocab-parallel logits.

A prompt's tokens are not trained, so their part of the output layer, of the softmax and of both
gradients is left out:

    hidden states   p p p p r r r      [T, 1, H]; p prompt, r positions that predict a trained token
    output layer            r r r      [R, 1, H] -> logits [R, V / tp]
    log-probs       0 0 0 0 x x x      [T]

Under sequence parallelism each rank holds a part of the tokens, and the trained ones may lie on one
rank. The hidden states are gathered first, and the layer then runs as without it.

The softmax takes two small all-reduces. The logits are not modified. They stay in the model's
precision; float32 copies are made of a few tokens at a time:

    logits_TV   bfloat16, kept for the backward pass
    x_CV        float32, of `chunk` tokens: (logits - their maximum) / temperature

On a GPU Triton kernels read the logits as they are instead (device/row_softmax.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from mcore_rl.device.gpu_kernels import has_kernel
from mcore_rl.device.row_softmax import differentiate_rows, sum_rows
from mcore_rl.train.packing import RankBatch
from mcore_rl.types import TrainBatch

FAR_BELOW = -1e30
"""The logit of vocabulary padding; finite, so that 0 * FAR_BELOW is 0."""


def select_scored_rows(targets: TrainBatch) -> Tensor:
    """Return the tokens that the loss reads of a RankBatch's fields, int64 [R]; at least one.

    A rank without any scores its first token, since kernels and collectives want a row.
    """
    assert targets.loss_weights_T is not None, "the micro-batch has no loss weights"
    rows_R = (targets.loss_mask_T | (targets.loss_weights_T != 0)).nonzero()[:, 0]
    return rows_R if len(rows_R) else rows_R.new_zeros(1)


def name_scored_rows(batch: RankBatch) -> RankBatch:
    """Return a micro-batch in host memory with the tokens that get logits.

    They are all tokens where nothing is trained. The host knows them, so that no device is asked.
    """
    if not torch.is_grad_enabled():
        return batch
    return replace(batch, scored_R=select_scored_rows(batch.batch))


def place_at_tokens(values_R: Tensor, rows_R: Tensor, num_tokens: int) -> Tensor:
    """Return [num_tokens] with the values of `rows_R` at their tokens, and 0 elsewhere."""
    return values_R.new_zeros(num_tokens).index_copy(0, rows_R, values_R)


class OutputRows:
    """Hooks into the output layer of the last stage's chunk."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._rows_R: Tensor | None = None
        for chunk in chunks:
            layer: Any = getattr(chunk, "output_layer", None)
            if isinstance(layer, ColumnParallelLinear):
                layer.register_forward_pre_hook(self._select)
                layer.register_forward_hook(self._restore, always_call=True)

    def enter(self, placed: RankBatch) -> RankBatch:
        """Return the micro-batch that a chunk runs on next, which names the tokens with logits."""
        self._rows_R = placed.scored_R
        return placed

    @contextmanager
    def choose(self, rows_R: Tensor) -> Iterator[None]:
        """Within the block the output layer gives logits of these tokens."""
        of_batch, self._rows_R = self._rows_R, rows_R
        try:
            yield
        finally:
            self._rows_R = of_batch

    def _select(self, layer: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._rows_R is None:
            return None
        hidden_T1H, *others = args
        linear: Any = layer
        if linear.sequence_parallel:
            # The layer's backward adds up the gradients of all ranks; gathering must not do it
            # again.
            hidden_T1H = gather_from_sequence_parallel_region(
                hidden_T1H, tensor_parallel_output_grad=False
            )
            linear.sequence_parallel, linear.allreduce_dgrad = False, True
        return hidden_T1H.index_select(0, self._rows_R), *others

    def _restore(self, layer: torch.nn.Module, *_: Any) -> None:
        linear: Any = layer
        if linear.allreduce_dgrad and linear.config.sequence_parallel:
            linear.sequence_parallel, linear.allreduce_dgrad = True, False


@dataclass(frozen=True)
class VocabParallelSoftmax:
    """A softmax over the vocabulary that tensor-parallel ranks share.

    group         the ranks that share the padded vocabulary
    size          entries from here on are padding and get probability 0
    temperature   divides the logits
    chunk         tokens whose float32 logits are in memory at once
    """

    group: dist.ProcessGroup
    size: int
    temperature: float
    chunk: int

    def num_real(self, width: int) -> int:
        """Return how many of this rank's `width` columns are not padding."""
        return min(max(self.size - self.group.rank() * width, 0), width)

    def reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduce `value` in place over the ranks of the vocabulary."""
        if self.group.size() > 1:
            dist.all_reduce(value, op=op, group=self.group)
        return value

    def peaks(self, logits_TV: Tensor) -> Tensor:
        """Return the largest real logit of each token, float32 [T]; collective."""
        num_real = self.num_real(logits_TV.shape[-1])
        if num_real:
            peak_T = logits_TV[:, :num_real].amax(-1).float()
        else:
            peak_T = logits_TV.new_full(logits_TV.shape[:1], FAR_BELOW, dtype=torch.float32)
        return self.reduce(peak_T, dist.ReduceOp.MAX)

    def chunks(self, logits_TV: Tensor, peak_T: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, float32 (logits - peak) / temperature of these rows) of all tokens."""
        num_tokens, width = logits_TV.shape
        num_real = self.num_real(width)
        for first in range(0, num_tokens, self.chunk):
            rows = slice(first, min(first + self.chunk, num_tokens))
            x_CV = logits_TV[rows].to(torch.float32, copy=True)
            x_CV -= peak_T[rows, None]
            if self.temperature != 1.0:
                x_CV /= self.temperature
            x_CV[:, num_real:] = FAR_BELOW
            yield rows, x_CV


def vocab_parallel_logprobs(
    logits_TV: Tensor, targets_T: Tensor, softmax: VocabParallelSoftmax
) -> tuple[Tensor, Tensor]:
    """Return float32 (log-prob of each target [T], entropy [T]) of softmax(logits / temperature).

    logits_TV is this rank's slice of the padded softmax.
    """
    return _LogprobEntropy.apply(logits_TV, targets_T, softmax)  # type: ignore


@torch.no_grad()
def vocab_parallel_scores(
    logits_TV: Tensor, targets_T: Tensor, softmax: VocabParallelSoftmax, *, sum_squares: bool
) -> tuple[Tensor, Tensor | None]:
    """Return float32 (log-prob of each target [T], sum of the squared probabilities [T] or None).

    The sum is 1 where one token is certain. Has no gradient, and computes no entropy.
    """
    columns_T = _find_columns(targets_T, logits_TV.shape[-1], softmax)
    _, (target_x_T, total_T, _, *squares) = _sum_up(
        logits_TV, columns_T, softmax, weighted=False, squares=sum_squares
    )
    return target_x_T - total_T.log(), squares[0] / total_T.square() if sum_squares else None


def _find_columns(targets_T: Tensor, width: int, softmax: VocabParallelSoftmax) -> Tensor:
    """Return each target's column in this rank's slice; -1 where it lies in another."""
    local_T = targets_T - softmax.group.rank() * width
    return torch.where((local_T >= 0) & (local_T < width), local_T, -1)


def _sum_up(
    logits_TV: Tensor,
    columns_T: Tensor,
    softmax: VocabParallelSoftmax,
    *,
    weighted: bool,
    squares: bool,
) -> tuple[Tensor, Tensor]:
    """Return (peak [T], sums [3 or 4, T]) over the vocabulary of all ranks; collective.

    With x = (logit - peak) / temperature: the target's x, the sums of exp x, of x exp x and, with
    `squares`, of exp 2x. Without `weighted` nobody reads the sum of x exp x.
    """
    if has_kernel(logits_TV):
        peak_T, sums_ST = _sum_by_kernel(logits_TV, columns_T, softmax, squares)
    else:
        peak_T, sums_ST = _sum_by_torch(logits_TV, columns_T, softmax, weighted, squares)
    return peak_T, softmax.reduce(sums_ST, dist.ReduceOp.SUM)


def _sum_by_kernel(
    logits_TV: Tensor, columns_T: Tensor, softmax: VocabParallelSoftmax, squares: bool
) -> tuple[Tensor, Tensor]:
    """Return (peak over all ranks, this rank's sums), from one pass over the logits."""
    num_real, temperature = softmax.num_real(logits_TV.shape[-1]), softmax.temperature
    own = sum_rows(logits_TV, columns_T, num_real, temperature, squares=squares)
    own_peak_T, target_T, total_T, weighted_T, *more = own
    peak_T = softmax.reduce(own_peak_T.clone(), dist.ReduceOp.MAX)
    shift_T = (own_peak_T - peak_T) / temperature
    scale_T = shift_T.exp()
    sums = (
        ((target_T - peak_T) / temperature).masked_fill(columns_T < 0, 0.0),
        total_T * scale_T,
        (weighted_T + shift_T * total_T) * scale_T,
        *(square_T * scale_T.square() for square_T in more),
    )
    return peak_T, torch.stack(sums)


def _sum_by_torch(
    logits_TV: Tensor,
    columns_T: Tensor,
    softmax: VocabParallelSoftmax,
    weighted: bool,
    squares: bool,
) -> tuple[Tensor, Tensor]:
    """Return (peak over all ranks, this rank's sums), from float32 copies of a few tokens each."""
    peak_T = softmax.peaks(logits_TV)
    sums_ST = logits_TV.new_zeros(4 if squares else 3, len(logits_TV), dtype=torch.float32)
    for rows, x_CV in softmax.chunks(logits_TV, peak_T):
        target_C = x_CV.gather(-1, columns_T[rows, None].clamp(min=0))[:, 0]
        sums_ST[0, rows] = target_C.masked_fill(columns_T[rows] < 0, 0.0)
        exp_CV = x_CV.exp() if weighted else x_CV.exp_()
        sums_ST[1, rows] = exp_CV.sum(-1)
        if weighted:
            sums_ST[2, rows] = torch.linalg.vecdot(exp_CV, x_CV)
        if squares:
            sums_ST[3, rows] = exp_CV.square_().sum(-1)
    return peak_T, sums_ST


class _LogprobEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, softmax: VocabParallelSoftmax
    ) -> tuple[Tensor, Tensor]:
        columns = _find_columns(targets, logits.shape[-1], softmax)
        peak, (target_x, total, weighted) = _sum_up(
            logits, columns, softmax, weighted=True, squares=False
        )
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(logits, columns, peak, log_total, entropy)
        ctx.softmax = softmax
        ctx.set_materialize_grads(False)
        return target_x - log_total, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> Any:  # type: ignore
        """Return the logits' gradient: d logprob / dx = onehot - p, dH / dx = -p (log p + H)."""
        logits, columns, *totals = ctx.saved_tensors
        softmax = ctx.softmax
        zeros = torch.zeros_like(totals[0])
        by_logprob = zeros if grad_logprob is None else grad_logprob.contiguous()
        by_entropy = zeros if grad_entropy is None else grad_entropy.contiguous()
        if has_kernel(logits):
            num_real = softmax.num_real(logits.shape[-1])
            inputs = (logits, columns, num_real, softmax.temperature)
            return differentiate_rows(*inputs, tuple(totals), by_logprob, by_entropy), None, None
        peak, log_total, entropy = totals
        grads = torch.empty_like(logits)
        for rows, x in softmax.chunks(logits, peak):
            log_p = x.sub_(log_total[rows, None])
            grad = log_p.exp()
            if grad_entropy is None:
                grad *= -by_logprob[rows, None]
            else:
                factor = log_p.add_(entropy[rows, None]).mul_(-by_entropy[rows, None])
                grad *= factor.sub_(by_logprob[rows, None])
            own = by_logprob[rows].masked_fill(columns[rows] < 0, 0.0)
            grad.scatter_add_(-1, columns[rows, None].clamp(min=0), own[:, None])
            grads[rows] = grad.div_(softmax.temperature)
        return grads, None, None
