"""Trains on stored samples in one process, by a trainer that takes batches with their tokens."""

from collections.abc import Mapping

from mcore_rl.batches.assembly import name_columns, refer_to_columns, scatter
from mcore_rl.batches.local_stores import LocalStores
from mcore_rl.loops.roles import TokenTrainer
from mcore_rl.types import LogprobOptions, StepStats, StoredBatch, StoredColumn, TokenScores


class LocalTrainer:
    """A trainer in the process of its stores; implements roles.StoredTrainer."""

    def __init__(self, trainer: TokenTrainer, stores: LocalStores) -> None:
        self._trainer = trainer
        self._stores = stores

    def compute_logprobs(
        self, batch: StoredBatch, options: LogprobOptions = LogprobOptions()
    ) -> TokenScores[StoredColumn]:
        """Write the scores to the stores, and return their columns."""
        scores = self._trainer.compute_logprobs(self._stores.assemble(batch), options)
        columns = name_columns([scores], options)
        scatter(batch, {name: values[0] for name, values in columns.items()}, self._stores.write)
        return refer_to_columns(columns)

    def train_step(self, batch: StoredBatch) -> StepStats:
        return self._trainer.train_step(self._stores.assemble(batch))

    def save(self, step: int, state: Mapping[str, object]) -> None:
        self._trainer.save(step, state)
