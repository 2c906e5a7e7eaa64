"""The critic's ranks, with a train.critic.CriticModel in each.

They take micro-batches and return values and step stats.
"""

from collections.abc import Sequence
from typing import Any

from mcore_rl.cluster.model_group import ModelGroup, ModelWorker, Share
from mcore_rl.types import StepStats, StoredBatch, StoredColumn

VALUES = StoredColumn("values")


class CriticWorker(ModelWorker):
    """One rank of the critic; `spec.loss` is a ValueLoss. Ranks that own no output return None."""

    def _model_cls(self) -> Any:
        from mcore_rl.train.critic import CriticModel

        return CriticModel

    def compute_values(self, share: Share) -> list[Any] | None:
        """For a StoredBatch the values go to its stores; their column is returned."""
        values = self._model.compute_values(self._with_tokens(share))
        if values is None or not isinstance(share, StoredBatch):
            return values
        self._keep(share, {VALUES.name: values})
        return [VALUES]

    def train_step(self, share: Share, *, num_tokens: int) -> StepStats | None:
        with_tokens = self._with_tokens(share)
        return self._model.train_step(with_tokens, self._loss, num_tokens=num_tokens)


class CriticGroup(ModelGroup):
    """All ranks of the critic; plays players.trainer.CriticCalls."""

    role = "critic"
    worker_cls = CriticWorker

    def compute_values(self, per_dp: Sequence[Share]) -> list[list[Any]]:
        return self._group.dispatch("compute_values", per_dp, deadline_s=self._answer_s)

    def train_step(self, per_dp: Sequence[Share], *, num_tokens: int) -> StepStats:
        stats = self._group.dispatch(
            "train_step", per_dp, deadline_s=self._answer_s, num_tokens=num_tokens
        )
        return stats[0]
