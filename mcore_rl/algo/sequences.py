"""Sums of token values over whole samples, and the order of a sample's tokens.

The tokens of a sample may lie in several rows, and those of a row on several ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from mcore_rl.device import on_device
from mcore_rl.types import TrainBatch


class SequenceSum(Protocol):
    def __call__(self, values_T: Tensor, *, whole_batch: bool = False) -> Tensor:
        """Return, at each token, the sum over its whole sample; without gradient.

        whole_batch   the sum over all samples of the optimizer step instead
        """
        ...


def sequence_sum(
    lens_N: Sequence[int],
    device: torch.device,
    reduce: Callable[[Tensor], object] | None = None,
    sample_N: Sequence[int] | None = None,
    *,
    is_whole_batch: bool = True,
) -> SequenceSum:
    """Return a function that sums token values by sample, if the call has all rows of the samples.

    lens_N     tokens of each sequence on this rank
    reduce     adds, in place, the sums of the ranks that hold other parts of the sequences; None if
               no rank does
    sample_N   equal for the sequences of one sample; None: each sequence is a sample
    is_whole_batch   False if the optimizer step has other sequences, too; a sum over the batch is
                     then refused
    """
    numbers = range(len(lens_N)) if sample_N is None else sample_N
    places = {number: place for place, number in enumerate(dict.fromkeys(numbers))}
    place_N = [places[number] for number in numbers]

    @cache
    def make_index() -> Tensor:
        """Return the place of each token's sample; most losses take no sum and need none."""
        return _spread(place_N, lens_N, device)

    def add_up(values_T: Tensor, *, whole_batch: bool = False) -> Tensor:
        assert is_whole_batch or not whole_batch, "a sum over the batch is taken before the step"
        index_T = make_index()
        sums_N = torch.zeros(len(lens_N), dtype=torch.float64, device=device)
        sums_N.index_add_(0, index_T, values_T.detach().double())
        if reduce is not None:
            reduce(sums_N)
        return sums_at(index_T, sums_N, whole_batch).to(values_T.dtype)

    return add_up


def sums_at(sample_T: Tensor, sums_S: Tensor, whole_batch: bool) -> Tensor:
    """Return, at each token, the sum of its sample or that of all samples; as `sums_S`."""
    return sums_S.sum().expand(len(sample_T)) if whole_batch else sums_S[sample_T]


def samples_of_tokens(batch: TrainBatch) -> Tensor:
    """Return int64 [T], the number of each token's sample."""
    assert batch.sample_N is not None, "a batch whose sequences are samples of their own"
    return _spread(batch.sample_N, batch.lens_N, batch.loss_mask_T.device)


def _spread(value_N: Sequence[int], lens_N: Sequence[int], device: torch.device) -> Tensor:
    """Return each sequence's value at its tokens, int64 [T], without waiting for the device."""
    value_T = torch.tensor(value_N, dtype=torch.int64).repeat_interleave(torch.tensor(lens_N))
    return value_T if device.type == "cpu" else on_device(value_T)


def order_trained_tokens(batch: TrainBatch) -> Tensor:
    """Return int64 [R], the trained tokens, sample after sample, in the order they were sampled in.

    Rows of an episode with branches are not in that order: a row goes on after the branch.
    """
    trained_R = batch.loss_mask_T.nonzero()[:, 0]
    if batch.turn_T is None or batch.sample_N is None:
        return trained_R
    turn_R = batch.turn_T[trained_R].long()
    sample_R = samples_of_tokens(batch)[trained_R]
    in_turns = turn_R.argsort(stable=True)
    return trained_R[in_turns][sample_R[in_turns].argsort(stable=True)]


@dataclass
class Sequences:
    """Sums and means over the trained tokens of whole samples.

    sums     sums over samples
    mask_T   bool, the trained tokens
    """

    sums: SequenceSum
    mask_T: Tensor
    _num_tokens_T: Tensor | None = field(default=None, init=False)

    def sum(self, values_T: Tensor) -> Tensor:
        """Return, at each token, the sum over its sample, without gradient."""
        return self.sums(values_T.masked_fill(~self.mask_T, 0.0))

    def mean(self, values_T: Tensor) -> Tensor:
        """Return, at each token, the mean over its sample, without gradient."""
        return self.sum(values_T) / self._count_tokens().to(values_T.dtype)

    def batch_mean(self, values_T: Tensor, *, of_samples: bool) -> Tensor:
        """Return, at each token, the mean over the optimizer step, without gradient.

        of_samples   every sample has the same share, however long it is; else every token
        """
        share_T = 1 / self._count_tokens() if of_samples else torch.ones_like(values_T)
        share_T = share_T.to(values_T.dtype).masked_fill(~self.mask_T, 0.0)
        shared_T = share_T * values_T.masked_fill(~self.mask_T, 0.0)
        total_T = self.sums(share_T.double(), whole_batch=True)
        return (self.sums(shared_T.double(), whole_batch=True) / total_T).to(values_T.dtype)

    def _count_tokens(self) -> Tensor:
        # No cached_property: its lock is one for all threads, and `sums` may wait for other ranks.
        if self._num_tokens_T is None:
            self._num_tokens_T = self.sums(self.mask_T.double()).clamp(min=1)
        return self._num_tokens_T
