"""Calls to the ranks of a model that each rank makes itself, all of them the same ones."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as ps

from mcore_rl.algo.policy_loss import make_policy_loss
from mcore_rl.config import AlgorithmConfig
from mcore_rl.train.actor import Actor
from mcore_rl.types import LogprobOptions, StepStats, TokenScores, TrainBatch

POLICY_GRADIENT = AlgorithmConfig(loss="policy_gradient")


class CallsTogether:
    """RankCalls played by every rank: all make the same calls and gather each other's answers."""

    def __init__(self, actor: Actor, algorithm: AlgorithmConfig = POLICY_GRADIENT) -> None:
        self._actor = actor
        self._loss = make_policy_loss(algorithm)

    def compute_logprobs(
        self, per_dp: Sequence[Sequence[TrainBatch]], options: LogprobOptions
    ) -> list[list[TokenScores]]:
        own = per_dp[ps.get_data_parallel_rank()]
        return _of_owners(self._actor.compute_logprobs(own, options))

    def train_step(
        self, per_dp: Sequence[Sequence[TrainBatch]], *, temperature: float, num_tokens: int
    ) -> StepStats:
        mine = per_dp[ps.get_data_parallel_rank()]
        stats = self._actor.train_step(
            mine, self._loss, temperature=temperature, num_tokens=num_tokens
        )
        return _of_owners(stats)[0]

    def save(self, folder: str, extra: dict[str, Any]) -> None: ...

    def finish_save(self) -> None: ...


def _of_owners(answer: Any) -> list[Any]:
    """Return the answers that are not None, by data-parallel coordinate."""
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (ps.get_data_parallel_rank(), answer))
    return [a for _, a in sorted((a for a in answers if a[1] is not None), key=lambda a: a[0])]
