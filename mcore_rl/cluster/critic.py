"""The critic's ranks, with a train.critic.CriticModel in each.

They take micro-batches and return values and step stats.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mcore_rl.cluster.model_group import ModelGroup, ModelWorker
from mcore_rl.types import StepStats, TrainBatch


class CriticWorker(ModelWorker):
    """One rank of the critic; `spec.loss` is a ValueLoss. Ranks that own no output return None."""

    def _model_cls(self) -> Any:
        from mcore_rl.train.critic import CriticModel

        return CriticModel

    def compute_values(self, microbatches: Sequence[TrainBatch]) -> list[Tensor] | None:
        return self._model.compute_values(microbatches)

    def train_step(
        self, microbatches: Sequence[TrainBatch], *, num_tokens: int
    ) -> StepStats | None:
        return self._model.train_step(microbatches, self._loss, num_tokens=num_tokens)


class CriticGroup(ModelGroup):
    """All ranks of the critic; plays players.trainer.CriticCalls."""

    role = "critic"
    worker_cls = CriticWorker

    def compute_values(self, per_dp: Sequence[Sequence[TrainBatch]]) -> list[list[Tensor]]:
        return self._group.dispatch("compute_values", per_dp, deadline_s=self._call_timeout_s)

    def train_step(self, per_dp: Sequence[Sequence[TrainBatch]], *, num_tokens: int) -> StepStats:
        stats = self._group.dispatch(
            "train_step", per_dp, deadline_s=self._call_timeout_s, num_tokens=num_tokens
        )
        return stats[0]
