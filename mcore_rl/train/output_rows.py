"""Computes the logits of the tokens that a loss reads, and of no others.

A prompt's tokens are not trained, so their part of the output layer, of the softmax and of both
gradients is left out:

    hidden states   p p p p r r r      [T, 1, H]; p prompt, r positions that predict a trained token
    output layer            r r r      [R, 1, H] -> logits [R, V / tp]
    log-probs       0 0 0 0 x x x      [T]

Under sequence parallelism each rank holds a part of the tokens, and the trained ones may lie on one
rank. The hidden states are gathered first, and the layer then runs as without it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from mcore_rl.train.packing import RankBatch
from mcore_rl.types import TrainBatch


def scored_rows(targets: TrainBatch) -> Tensor:
    """Return the tokens that the loss reads of a RankBatch's fields, int64 [R]; at least one.

    A rank without any scores its first token, since kernels and collectives want a row.
    """
    assert targets.loss_weights_T is not None, "the micro-batch has no loss weights"
    rows_R = (targets.loss_mask_T | (targets.loss_weights_T != 0)).nonzero()[:, 0]
    return rows_R if len(rows_R) else rows_R.new_zeros(1)


def at_tokens(values_R: Tensor, rows_R: Tensor, num_tokens: int) -> Tensor:
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
        """Return the micro-batch that a chunk runs on next, with the tokens that get logits.

        They are all tokens where nothing is trained.
        """
        if torch.is_grad_enabled():
            placed = replace(placed, scored_R=scored_rows(placed.batch))
        self._rows_R = placed.scored_R
        return placed

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
