"""Sums over samples whose rows lie in several micro-batches or on several ranks.

A loss takes such a sum in the middle of its computation. So each is added up before the optimizer
step, one after the other, by running the losses of all micro-batches on known log-probs:

    round 1    every loss runs up to its first sum                    -> reduced over ranks: totals
    round 2    it gets the first totals, and runs up to its second sum               -> next totals
    ...        until no loss takes another sum
    the step   every loss gets the totals in turn

Sums carry no gradient, so the step's gradient is that of a loss which sees all rows at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import torch
from torch import Tensor

from mcore_rl.algo.lookup import needs_of
from mcore_rl.algo.registry import losses
from mcore_rl.algo.sequences import SequenceSum, sums_at
from mcore_rl.config import AlgorithmConfig
from mcore_rl.types import StoredBatch, SumsFrom, TrainBatch

LossOfPart = tuple[Callable[[SequenceSum], object], Tensor]
"""(runs the loss of a micro-batch with these sums, sample_T: the sample of each of its tokens)."""


def choose_sums(
    config: AlgorithmConfig, batch: TrainBatch | StoredBatch, *, is_first: bool
) -> SumsFrom:
    """Return where the loss of an optimizer step on `batch` gets its sums over samples from.

    is_first   the weights are still those of the old log-probs
    """
    needs = needs_of(config)
    if not needs.whole_batch:
        if batch.sample_N is None or len(np.unique(batch.sample_N)) == len(batch.lens_N):
            return "rows"
        if not needs.whole_samples:
            return "rows"
    # A correction sums old log-probs, if there are any; only the loss sums current ones.
    old_suffice = is_first or not losses.needs(config.loss).whole_samples
    return "old" if batch.old_logprobs_T is not None and old_suffice else "current"


def with_sums(config: AlgorithmConfig, batch: StoredBatch, *, is_first: bool) -> StoredBatch:
    """Return the batch with `choose_sums`; its samples are then numbered if these are added up."""
    sums_from = choose_sums(config, batch, is_first=is_first)
    if sums_from == "rows" or batch.sample_N is not None:
        return replace(batch, sums_from=sums_from)
    return replace(batch, sums_from=sums_from, sample_N=np.arange(len(batch.lens_N)))


@torch.no_grad()
def add_up_samples(
    parts: Sequence[LossOfPart],
    num_samples: int,
    device: torch.device,
    reduce: Callable[[Tensor], object] | None = None,
) -> list[Tensor]:
    """Return float64 [num_samples] for each sum that the losses take, in their order.

    num_samples   above every number of a sample, and the same on all ranks
    reduce        adds, in place, the sums of the ranks that hold other tokens of the samples
    """
    totals: list[Tensor] = []
    while True:
        # The last entry counts the micro-batches that take one more sum.
        sums_S1 = torch.zeros(num_samples + 1, dtype=torch.float64, device=device)
        for run_loss, sample_T in parts:
            run_loss(_add_next_sum(totals, sample_T, sums_S1))
        if reduce is not None:
            reduce(sums_S1)
        if not sums_S1[-1]:
            return totals
        totals.append(sums_S1[:-1])


def make_known_sums(totals: Sequence[Tensor], sample_T: Tensor) -> SequenceSum:
    """Return the sums of a micro-batch as `add_up_samples` found them; for one run of its loss."""
    calls = count()

    def answer(values_T: Tensor, *, whole_batch: bool = False) -> Tensor:
        call = next(calls)
        if call >= len(totals):
            raise ValueError(
                f"a loss takes more sums over samples in its optimizer step than the {len(totals)}"
                " that it took before it: their number must not depend on values"
            )
        return sums_at(sample_T, totals[call], whole_batch).to(values_T.dtype)

    return answer


def _add_next_sum(totals: Sequence[Tensor], sample_T: Tensor, sums_S1: Tensor) -> SequenceSum:
    """Return the sums of a micro-batch, which add the next sum's values to `sums_S1` and count it.

    Nothing is known of that sum and later ones; what the loss makes of their values is not used.
    """
    calls = count()

    def answer(values_T: Tensor, *, whole_batch: bool = False) -> Tensor:
        call = next(calls)
        if call < len(totals):
            return sums_at(sample_T, totals[call], whole_batch).to(values_T.dtype)
        if call == len(totals):
            sums_S1.index_add_(0, sample_T, values_T.detach().double())
            sums_S1[-1] += 1
        return values_T.detach()

    return answer
