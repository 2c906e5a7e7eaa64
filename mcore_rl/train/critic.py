"""Runs the critic on one training rank: a model with a value head computes values and learns."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from torch import Tensor

from mcore_rl.slices.families.table import HfConfig
from mcore_rl.slices.families.value_head import with_value_head
from mcore_rl.slices.hf.facts import ModelFacts
from mcore_rl.train.gather import gather_tokens
from mcore_rl.train.packing import RankBatch
from mcore_rl.train.runtime import on_last_stage, rank_coordinate
from mcore_rl.train.schedule import Report
from mcore_rl.train.stats import token_sums
from mcore_rl.train.trained_model import TrainedModel
from mcore_rl.types import StepStats, TrainBatch

ValueLoss = Callable[[Tensor, TrainBatch], tuple[Tensor, Mapping[str, Tensor]]]
"""(values_T, batch of the same tokens) -> (loss_T, metrics_T)."""


class CriticModel(TrainedModel):
    """One rank's share of the critic and its optimizer.

    The value at a token is the value of the state before it: of the tokens that precede it.
    """

    def _built_config(self, stored: ModelFacts) -> HfConfig:
        """Return the config of a policy or of a reward model with one label, with a value head."""
        return with_value_head(stored.config)

    def compute_values(self, microbatches: Sequence[TrainBatch]) -> list[Tensor] | None:
        """Return the float32 values of each micro-batch's tokens, 0 for a sequence's first token.

        Only the owning rank returns them, the others None.
        """

        def output(batch: RankBatch, values_T1: Tensor) -> tuple[Tensor, Report]:
            return values_T1.new_zeros(()), {"values": values_T1[:, 0].detach()}

        batches = self._rank_batches(microbatches)
        reports, _ = self._run(batches, output, forward_only=True)
        if not on_last_stage():
            return None
        values = gather_tokens(
            [report["values"].float() for report in reports],
            [batch.targets_T for batch in batches],
            [len(microbatch.token_ids_T) for microbatch in microbatches],
            [batch.twins_T for batch in batches],
        )
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

        return self._optimizer_step(microbatches, output, num_tokens)
