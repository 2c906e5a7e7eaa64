"""Implements trainer and critic: cuts whole batches into micro-batches, and calls the ranks.

So the loop knows no parallel layout, and ranks get no whole batch.

TrainBatch   -> micro-batches for each data-parallel coordinate; scores come back as tensors
StoredBatch  -> a StoredBatch in parts for each; ranks read tokens from stores, write scores there
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from mcore_rl.batches.batch import make_filler, select_each, tokens_of
from mcore_rl.batches.packing import Plan, plan_microbatches, plan_shared_microbatches
from mcore_rl.batches.shared_prefixes import Sharing, find_batch_sharing
from mcore_rl.batches.stored_batch import find_stored_sharing, in_parts
from mcore_rl.config import CheckpointConfig, ParallelConfig, TrainConfig
from mcore_rl.logs.progress import look, say, say_once, tell_stage
from mcore_rl.logs.run_folder import RunFolder
from mcore_rl.process.clock import now_s
from mcore_rl.run.roles.failed_saves import (
    FAILED,
    count_failed_saves,
    note_failed_saves,
    prune_if_possible,
    set_aside_if_possible,
)
from mcore_rl.run.roles.skipped_steps import SkippedSteps
from mcore_rl.types import (
    FailedSaves,
    LogprobOptions,
    StepStats,
    StoredBatch,
    StoredColumn,
    TokenScores,
    TrainBatch,
)
from mcore_rl.weights.hf.flops import ModelFlops

S = TypeVar("S")
Batch = TypeVar("Batch", bound=TrainBatch | StoredBatch)
Share = TypeVar("Share", bound=Sequence[TrainBatch] | StoredBatch)
ShareTaken = TypeVar("ShareTaken", bound=Sequence[TrainBatch] | StoredBatch, contravariant=True)
Values = TypeVar("Values", bound=Tensor | StoredColumn, covariant=True)


class RankCalls(Protocol[ShareTaken, Values]):
    """The policy's ranks; `per_dp` has the micro-batches of each data-parallel coordinate."""

    def compute_logprobs(
        self, per_dp: Sequence[ShareTaken], options: LogprobOptions
    ) -> Sequence[Sequence[TokenScores[Values]]]:
        """Return scores by coordinate and micro-batch; `options.temperature` is never None here.

        For StoredBatches, ranks write the scores to the stores, and each coordinate returns the
        columns once.
        """
        ...

    def train_step(
        self, per_dp: Sequence[ShareTaken], *, temperature: float, num_tokens: int
    ) -> StepStats: ...

    def save(self, folder: str, extra: dict[str, Any]) -> FailedSaves | None: ...

    def finish_save(self) -> FailedSaves | None: ...


class CriticCalls(Protocol):
    """The critic's ranks; `per_dp` is as in RankCalls."""

    def compute_values(self, per_dp: Sequence[StoredBatch]) -> Sequence[Sequence[StoredColumn]]:
        """Write values to the stores; each coordinate returns their column."""
        ...

    def train_step(self, per_dp: Sequence[StoredBatch], *, num_tokens: int) -> StepStats: ...

    def save(self, folder: str, extra: dict[str, Any]) -> FailedSaves | None: ...

    def finish_save(self) -> FailedSaves | None: ...


@dataclass(frozen=True)
class Packing:
    """How a batch is cut into micro-batches; see batches.packing.plan_microbatches.

    dp_size       data-parallel coordinates; each gets as many micro-batches as any other
    multiple_of   divides the number of micro-batches, as interleaved pipelines need
    max_tokens    of one micro-batch
    shares        shared beginnings of a micro-batch's sequences count once
    flops         models the work to balance; None: balance tokens
    """

    dp_size: int
    multiple_of: int
    max_tokens: int
    shares: bool = False
    flops: ModelFlops | None = None

    @staticmethod
    def from_config(
        parallel: ParallelConfig, train: TrainConfig, flops: ModelFlops | None = None
    ) -> "Packing":
        multiple_of = parallel.pp if parallel.vpp else 1
        max_tokens = train.max_tokens_per_microbatch
        return Packing(parallel.dp_size, multiple_of, max_tokens, train.share_prefixes, flops)

    def fit(self, parallel: ParallelConfig) -> "Packing":
        """Return the packing for ranks that go on in this layout."""
        return replace(self, dp_size=parallel.dp_size)

    def plan(self, batch: TrainBatch) -> Plan:
        """Return the sequence indices of each micro-batch, by data-parallel coordinate."""
        return self._plan(batch.lens_N, lambda: find_batch_sharing(batch))

    def plan_stored(self, batch: StoredBatch) -> Plan:
        """Return the plan of a batch without its tokens, as `plan` does."""
        return self._plan(batch.lens_N, lambda: find_stored_sharing(batch))

    def _plan(self, lens_N: Sequence[int], find_sharing: Callable[[], Sharing]) -> Plan:
        limits = (self.dp_size, self.max_tokens, self.multiple_of, self._work)
        if not self.shares:
            return plan_microbatches(lens_N, *limits)
        return plan_shared_microbatches(lens_N, find_sharing(), *limits)

    def _work(self, num_tokens: int) -> float:
        """Return the modeled work of a sequence of n tokens: a n + b n^2; layers may have windows.

        a   work of the products of a token with weights
        b   work of a query and a key in attention
        """
        return float(num_tokens) if self.flops is None else self.flops.count_forward([num_tokens])


@dataclass(frozen=True)
class TrainSpeed:
    """Computes the speed at which the ranks of a model train.

    peak_flops   the peak operations per second of a rank's GPU in bfloat16; None if it is unknown,
                 as on a CPU
    """

    flops: ModelFlops
    num_ranks: int
    peak_flops: float | None

    def metrics(
        self, lens_N: Sequence[int], seconds: float, tower_tflop: float = 0.0
    ) -> dict[str, float]:
        """Return the metrics of a step over sequences of these lengths.

        tower_tflop   operations of a vision tower in the step, 10**12
        """
        operations = self.flops.count_training(lens_N) + 1e12 * tower_tflop
        flops = operations / (seconds * self.num_ranks)
        metrics = {
            "train/tokens_per_second_per_gpu": sum(lens_N) / (seconds * self.num_ranks),
            "train/tflops_per_gpu": flops / 1e12,
        }
        if self.peak_flops is not None:
            metrics["train/mfu"] = flops / self.peak_flops
        return metrics


class PackedTrainer(Generic[Batch, Share, Values]):
    """Packs each batch for the policy's ranks; the base class for both kinds of batches."""

    def __init__(
        self,
        ranks: RankCalls[Share, Values],
        folder: RunFolder,
        *,
        packing: Packing,
        temperature: float,
        checkpoint: CheckpointConfig,
        speed: TrainSpeed | None = None,
        skipped: SkippedSteps | None = None,
        export: Callable[[str], None] | None = None,
    ) -> None:
        """`speed` adds the speed of each step to its metrics; `skipped` notes steps left out.

        export   writes the policy to a folder, where checkpoint.export_every_steps is set
        """
        self._skipped = skipped or SkippedSteps(folder, "policy", 0)
        self._ranks = ranks
        self._folder = folder
        self._export = export
        self._speed = speed
        self._packing = packing
        self._temperature = temperature
        self._checkpoint = checkpoint
        self.num_steps = 0
        """Optimizer steps since this process began that should have changed the policy: they were
        not skipped, and their learning rate and their gradient were not 0.
        """

    def fit(self, parallel: ParallelConfig) -> None:
        """Pack for ranks that go on in this layout, and count the speed of as many."""
        self._packing = self._packing.fit(parallel)
        if self._speed is not None:
            self._speed = replace(self._speed, num_ranks=parallel.world_size)

    def train_step(self, batch: Batch) -> StepStats:
        per_dp = self._cut(batch)
        num_tokens = sum(batch.lens_N)
        began_s = now_s()
        stats = self._ranks.train_step(per_dp, temperature=self._temperature, num_tokens=num_tokens)
        note_failed_saves(self._folder, stats.failed_saves)
        if self._checkpoint.on_error == "continue":
            failed = {FAILED: count_failed_saves(self._folder)}
            stats = replace(stats, metrics={**stats.metrics, **failed})
        is_taken = not self._skipped.note(batch, stats)
        self.num_steps += is_taken and stats.learning_rate > 0 and stats.grad_norm > 0
        if self._speed is None:
            return stats
        tower_tflop = stats.metrics.get("train/tower_tflop", 0.0)
        speed = self._speed.metrics(batch.lens_N, now_s() - began_s, tower_tflop)
        return replace(stats, metrics={**stats.metrics, **speed})

    def save(self, step: int, state: Mapping[str, object]) -> None:
        """Wait for the previous save, start this one, then remove those that are not to be kept.

        Returns once this save is complete, unless checkpoint.asynchronous is set. The console tells
        when it is. An export of the step, where one is due, is complete, too.
        """
        say(f"saving step {step}")
        say_once(lambda: self._folder.is_saved(step), f"saved step {step}")
        self._folder.begun_steps.append(step)
        note_failed_saves(
            self._folder, self._ranks.save(str(self._folder.checkpoint(step)), dict(state))
        )
        if not self._checkpoint.asynchronous:
            note_failed_saves(self._folder, self._ranks.finish_save())
            look()
        prune_if_possible(self._folder, self._checkpoint)
        every_steps = self._checkpoint.export_every_steps
        if self._export is not None and every_steps and step % every_steps == 0:
            with tell_stage(f"export of step {step}", is_told=True):
                self._export(str(self._folder.step_export(step)))

    def _cut(self, batch: Batch) -> list[Share]:
        """Return the micro-batches of each data-parallel coordinate."""
        raise NotImplementedError

    def _with_temperature(self, options: LogprobOptions) -> LogprobOptions:
        if options.temperature is not None:
            return options
        return replace(options, temperature=self._temperature)


class PackedTokenTrainer(PackedTrainer[TrainBatch, Sequence[TrainBatch], Tensor]):
    """Trains on batches with their tokens; implements roles.TokenTrainer."""

    def compute_logprobs(
        self, batch: TrainBatch, options: LogprobOptions = LogprobOptions()
    ) -> TokenScores[Tensor]:
        plan = self._packing.plan(batch)
        per_dp = _cut_tokens(batch, plan)
        answers = self._ranks.compute_logprobs(per_dp, self._with_temperature(options))
        scored = _pair_up(plan, answers)
        logprobs_T = _put_back(batch.lens_N, [(i, scores.logprobs_T) for i, scores in scored])
        return TokenScores(
            logprobs_T,
            router_flips_T=_put_back_optional(batch.lens_N, scored, "router_flips_T"),
            sum_squares_T=_put_back_optional(batch.lens_N, scored, "sum_squares_T"),
            routed_experts_TLK=_put_back_optional(batch.lens_N, scored, "routed_experts_TLK"),
        )

    def _cut(self, batch: TrainBatch) -> list[Sequence[TrainBatch]]:
        return _cut_tokens(batch, self._packing.plan(batch))


class PackedStoredTrainer(PackedTrainer[StoredBatch, StoredBatch, StoredColumn]):
    """Trains on samples that lie in stores; implements roles.StoredTrainer."""

    def compute_logprobs(
        self, batch: StoredBatch, options: LogprobOptions = LogprobOptions()
    ) -> TokenScores[StoredColumn]:
        per_dp = self._cut(batch)
        return self._ranks.compute_logprobs(per_dp, self._with_temperature(options))[0][0]

    def _cut(self, batch: StoredBatch) -> list[StoredBatch]:
        return _cut_stored(batch, self._packing)


class PackedCritic:
    """Packs each batch for the critic's ranks, with only the fields that they read.

    Implements roles.Critic.
    """

    def __init__(
        self,
        ranks: CriticCalls,
        folder: RunFolder,
        *,
        packing: Packing,
        checkpoint: CheckpointConfig,
        skipped: SkippedSteps | None = None,
    ) -> None:
        self._ranks = ranks
        self._folder = folder
        self._packing = packing
        self._checkpoint = checkpoint
        self._skipped = skipped or SkippedSteps(folder, "critic", 0)

    def fit(self, parallel: ParallelConfig) -> None:
        """Pack for ranks that go on in this layout."""
        self._packing = self._packing.fit(parallel)

    def compute_values(self, batch: StoredBatch) -> StoredColumn:
        return self._ranks.compute_values(_cut_stored(_for_critic(batch), self._packing))[0][0]

    def train_step(self, batch: StoredBatch) -> StepStats:
        batch = _for_critic(batch)
        per_dp = _cut_stored(batch, self._packing)
        stats = self._ranks.train_step(per_dp, num_tokens=sum(batch.lens_N))
        note_failed_saves(self._folder, stats.failed_saves)
        self._skipped.note(batch, stats)
        return stats

    def save(self, step: int) -> None:
        """Wait for the previous save, then start this one.

        The trainer saves after the critic and removes old checkpoints. Parts of this step that an
        earlier process has left are set aside before: a policy of one and a critic of the other
        must not count as a checkpoint.
        """
        set_aside_if_possible(self._folder, step, self._checkpoint)
        path = str(self._folder.critic_checkpoint(step))
        note_failed_saves(self._folder, self._ranks.save(path, {}))
        if not self._checkpoint.asynchronous:
            note_failed_saves(self._folder, self._ranks.finish_save())


def _for_critic(batch: StoredBatch) -> StoredBatch:
    """Return the batch with only the fields that a critic reads."""
    none = {name: None for name in vars(batch) if name.endswith(("_T", "_TLK"))}
    names = ("loss_mask_T", "values_T", "returns_T")
    kept = {name: getattr(batch, name) for name in names}
    return replace(batch, version=None, advantages_N=None, **{**none, **kept})


def _cut_tokens(batch: TrainBatch, plan: Plan) -> list[Sequence[TrainBatch]]:
    """Return the micro-batches of each data-parallel coordinate; empty ones become fillers."""
    selected = iter(select_each(batch, [indices for part in plan for indices in part if indices]))
    return [
        [next(selected) if indices else make_filler(batch) for indices in microbatches]
        for microbatches in plan
    ]


def _cut_stored(batch: StoredBatch, packing: Packing) -> list[StoredBatch]:
    """Return the sequences of each data-parallel coordinate, in its micro-batches."""
    return [in_parts(batch, parts) for parts in packing.plan_stored(batch)]


def _pair_up(plan: Plan, answers: Sequence[Sequence[S]]) -> list[tuple[list[int], S]]:
    """Return each micro-batch's sequence indices with its answer, over all ranks."""
    pairs: list[tuple[list[int], S]] = []
    for planned, answered in zip(plan, answers, strict=True):
        pairs += zip(planned, answered, strict=True)
    return pairs


def _put_back(lens_N: Sequence[int], parts: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
    """Return the values of micro-batches in the order of the whole batch.

    `parts` has (sequence indices, values by token) of each micro-batch.
    """
    order = [i for indices, _ in parts for i in indices]
    # A filler micro-batch has tokens, but no sequence of the batch.
    values = [values_T[: sum(lens_N[i] for i in indices)] for indices, values_T in parts]
    place_N = torch.tensor(order).argsort().tolist()
    return torch.cat(values)[tokens_of([lens_N[i] for i in order], place_N)]


def _put_back_optional(
    lens_N: Sequence[int],
    scored: Sequence[tuple[Sequence[int], TokenScores[Tensor]]],
    field: str,
) -> Tensor | None:
    """Call `_put_back` for a field of TokenScores; return None if the ranks left the field out."""
    parts = [(i, getattr(scores, field)) for i, scores in scored]
    parts = [(i, values) for i, values in parts if values is not None]
    return _put_back(lens_N, parts) if parts else None
