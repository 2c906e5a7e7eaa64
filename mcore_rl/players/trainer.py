"""The training ranks as the loop sees them: whole batches in, micro-batches per rank out.

Batches are cut here, so the loop sees no parallel layout and the ranks see no whole batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from mcore_rl.config import CheckpointConfig, ParallelConfig
from mcore_rl.data.batch import make_filler, select, split_by_lens
from mcore_rl.data.packing import plan_microbatches
from mcore_rl.run_folder import RunFolder
from mcore_rl.types import LogprobOptions, StepStats, TokenScores, TrainBatch

T = TypeVar("T")
S = TypeVar("S")


class RankCalls(Protocol):
    """The training ranks, called by data-parallel coordinate: one list of micro-batches per coordinate."""

    def compute_logprobs(
        self, per_dp: Sequence[Sequence[TrainBatch]], options: LogprobOptions
    ) -> list[list[TokenScores]]:
        """`options.temperature` is never None here."""
        ...

    def train_step(
        self, per_dp: Sequence[Sequence[TrainBatch]], *, temperature: float, num_tokens: int
    ) -> StepStats: ...

    def save(self, folder: str, extra: dict[str, Any]) -> None: ...

    def finish_save(self) -> None: ...


class CriticCalls(Protocol):
    """The critic's ranks, likewise."""

    def compute_values(self, per_dp: Sequence[Sequence[TrainBatch]]) -> list[list[Tensor]]: ...

    def train_step(
        self, per_dp: Sequence[Sequence[TrainBatch]], *, num_tokens: int
    ) -> StepStats: ...

    def save(self, folder: str, extra: dict[str, Any]) -> None: ...

    def finish_save(self) -> None: ...


@dataclass(frozen=True)
class Packing:
    """How a batch is cut for ranks: see plan_microbatches."""

    dp_size: int
    multiple_of: int
    max_tokens: int

    @staticmethod
    def of(parallel: ParallelConfig, max_tokens: int) -> "Packing":
        return Packing(parallel.dp_size, parallel.pp if parallel.vpp else 1, max_tokens)

    def plan(self, batch: TrainBatch) -> list[list[list[int]]]:
        return plan_microbatches(batch.lens_N, self.dp_size, self.max_tokens, self.multiple_of)


class PackedTrainer:
    """Packs each batch for the ranks and puts their answers back in the order of the batch."""

    def __init__(
        self,
        ranks: RankCalls,
        folder: RunFolder,
        *,
        packing: Packing,
        temperature: float,
        checkpoint: CheckpointConfig,
    ) -> None:
        self._ranks, self._folder, self._packing = ranks, folder, packing
        self._temperature, self._checkpoint = temperature, checkpoint

    def compute_logprobs(
        self, batch: TrainBatch, options: LogprobOptions = LogprobOptions()
    ) -> TokenScores:
        if options.temperature is None:
            options = replace(options, temperature=self._temperature)
        plan = self._packing.plan(batch)
        answers = self._ranks.compute_logprobs(_cut(batch, plan), options)
        flat = _flat(plan, answers)
        logprobs_T = _put_back(
            batch.lens_N, [(indices, scores.logprobs_T) for indices, scores in flat]
        )
        flips = [(i, s.router_flips_T) for i, s in flat if s.router_flips_T is not None]
        squares = [(i, s.sum_squares_T) for i, s in flat if s.sum_squares_T is not None]
        experts = [(i, s.routed_experts_TLK) for i, s in flat if s.routed_experts_TLK is not None]
        others = [
            _put_back(batch.lens_N, parts) if parts else None for parts in (flips, squares, experts)
        ]
        return TokenScores(logprobs_T, *others)

    def train_step(self, batch: TrainBatch) -> StepStats:
        per_dp, num_tokens = _cut(batch, self._packing.plan(batch)), sum(batch.lens_N)
        return self._ranks.train_step(per_dp, temperature=self._temperature, num_tokens=num_tokens)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Begin to save, after the previous save is complete; then drop what is older than the newest
        kept.
        """
        self._ranks.save(str(self._folder.checkpoint(step)), dict(state))
        if not self._checkpoint.asynchronous:
            self._ranks.finish_save()
        self._folder.prune(self._checkpoint.keep)


class PackedCritic:
    """The same for the critic, whose ranks get what they read of a batch."""

    def __init__(
        self,
        ranks: CriticCalls,
        folder: RunFolder,
        *,
        packing: Packing,
        checkpoint: CheckpointConfig,
    ) -> None:
        self._ranks, self._folder, self._packing = ranks, folder, packing
        self._checkpoint = checkpoint

    def compute_values(self, batch: TrainBatch) -> Tensor:
        plan = self._packing.plan(batch)
        answers = self._ranks.compute_values(_cut(_for_critic(batch), plan))
        return _put_back(batch.lens_N, _flat(plan, answers))

    def train_step(self, batch: TrainBatch) -> StepStats:
        per_dp = _cut(_for_critic(batch), self._packing.plan(batch))
        return self._ranks.train_step(per_dp, num_tokens=sum(batch.lens_N))

    def save(self, step: int) -> None:
        """As a trainer's; what is too old goes with the trainer's save, which comes after."""
        self._ranks.save(str(self._folder.critic_checkpoint(step)), {})
        if not self._checkpoint.asynchronous:
            self._ranks.finish_save()


def _for_critic(batch: TrainBatch) -> TrainBatch:
    return TrainBatch(
        token_ids_T=batch.token_ids_T,
        loss_mask_T=batch.loss_mask_T,
        lens_N=batch.lens_N,
        loss_weights_T=batch.loss_weights_T,
        values_T=batch.values_T,
        returns_T=batch.returns_T,
    )


def _flat(plan: Sequence[Sequence[T]], answers: Sequence[Sequence[S]]) -> list[tuple[T, S]]:
    """Each micro-batch's indices with its answer."""
    return [
        pair for of_rank in zip(plan, answers, strict=True) for pair in zip(*of_rank, strict=True)
    ]


def _put_back(lens_N: Sequence[int], parts: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
    """Values of micro-batches, each given with its sequences' indices, in the order of the whole batch."""
    by_index: dict[int, Tensor] = {}
    for indices, values_T in parts:
        lens = [lens_N[i] for i in indices]
        by_index |= dict(zip(indices, split_by_lens(values_T[: sum(lens)], lens), strict=True))
    return torch.cat([by_index[i] for i in range(len(lens_N))])


def _cut(batch: TrainBatch, plan: Sequence[Sequence[Sequence[int]]]) -> list[list[TrainBatch]]:
    return [[select(batch, i) if i else make_filler(batch) for i in rank] for rank in plan]
