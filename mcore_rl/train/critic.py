"""Runs the critic on one training rank: a model with a value head computes values and learns."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from mcore_rl.config import TrainConfig
from mcore_rl.train.packing import RankBatch
from mcore_rl.train.runtime import is_on_last_stage, rank_coordinate
from mcore_rl.train.schedule import Report
from mcore_rl.train.stats import check_finite, gather_tokens, token_sums
from mcore_rl.train.trained_model import TrainedModel
from mcore_rl.types import StepStats, TrainBatch
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.models.table import HfConfig
from mcore_rl.weights.models.value_head import add_value_head

ValueLoss = Callable[[Tensor, TrainBatch], tuple[Tensor, Mapping[str, Tensor]]]
"""(values_T, batch of the same tokens) -> (loss_T, metrics_T)."""


class CriticModel(TrainedModel):
    """One rank's share of the critic and its optimizer.

    The value at a token is the value of the state before it: of the tokens that precede it; at a
    sequence's first token it is that of the whole sequence.
    """

    def _make_config(self, stored: ModelFacts, train: TrainConfig) -> HfConfig:
        """Return the config of a policy or of a reward model with one label, with a value head."""
        return add_value_head(stored.config)

    def compute_values(self, microbatches: Sequence[TrainBatch]) -> list[Tensor] | None:
        """Return the float32 values of each micro-batch's tokens; see TrainBatch.values_T.

        Only the owning rank returns them, the others None.
        """

        def output(batch: RankBatch, values_T1: Tensor) -> tuple[Tensor, Report]:
            return values_T1.new_zeros(()), {"values": values_T1[:, 0].detach()}

        batches = self._rank_batches(microbatches)
        reports, _ = self._run(batches, output, forward_only=True)
        if not is_on_last_stage():
            return None
        pairs = zip(batches, microbatches, strict=True)
        places = [_value_places(batch, microbatch.lens_N) for batch, microbatch in pairs]
        values = gather_tokens(
            [report["values"].float() for report in reports],
            [places_T for places_T, _ in places],
            [len(microbatch.token_ids_T) for microbatch in microbatches],
            [twins_T for _, twins_T in places],
        )
        check_finite("the critic's values", values)
        return values if rank_coordinate().owns_output else None

    def train_step(
        self, microbatches: Sequence[TrainBatch], loss_fn: ValueLoss, *, num_tokens: int
    ) -> StepStats | None:
        """Take an optimizer step on sum(loss_weights * loss).

        Returns the stats on the owning rank, None on the others.

        num_tokens   tokens of the whole step, over all data-parallel ranks
        """

        def output(batch: RankBatch, values_T1: Tensor) -> tuple[Tensor, Report]:
            loss_T, metrics_T = loss_fn(values_T1[:, 0].float(), batch.batch)
            loss = (loss_T * cast(Tensor, batch.batch.loss_weights_T)).sum()
            mask_T = batch.batch.loss_mask_T
            return loss * num_tokens, {
                "sums": token_sums(loss, metrics_T, mask_T, batch.num_tokens)
            }

        return self._optimizer_step(self._rank_batches(microbatches), output, num_tokens)


def _value_places(batch: RankBatch, lens_N: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """Return (the token that has the value after each local one, twins_T), as gather_tokens asks.

    It is the token that follows, and after a sequence's last token its first one, in which no other
    value would lie. Sequences that share their first tokens each have a value of their own there.

        tokens              a b c | d e
        value after them    b c a | e d
    """
    first_N = torch.tensor((0, *lens_N)).cumsum(0)[:-1]
    is_last_T = (batch.sources_T >= 0) & (batch.targets_T < 0)
    places_T = torch.where(is_last_T, first_N[batch.sequences_T], batch.targets_T)
    if batch.twins_T is None:
        return places_T, None
    twins_T = batch.twins_T.clone()
    twins_T[first_N] = first_N
    return places_T, twins_T
