"""Runs the policy on one training rank: computes log-probs and takes optimizer steps."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor

from mcore_rl.algo.diagnostics import attribute_diff
from mcore_rl.algo.sample_sums import add_up_samples, make_known_sums
from mcore_rl.algo.sequences import SequenceSum, samples_of_tokens, sequence_sum
from mcore_rl.config import TrainConfig
from mcore_rl.train.logprobs import (
    VocabParallelSoftmax,
    place_at_tokens,
    vocab_parallel_logprobs,
    vocab_parallel_scores,
)
from mcore_rl.train.offload import ReferenceWeights
from mcore_rl.train.packing import RankBatch, fields_on_device
from mcore_rl.train.router import RoutingRecord
from mcore_rl.train.runtime import is_on_last_stage, rank_coordinate
from mcore_rl.train.schedule import Report
from mcore_rl.train.stats import check_finite, gather_tokens, sum_masked, token_sums
from mcore_rl.train.trained_model import TrainedModel
from mcore_rl.train.vision.rank_images import tower_work
from mcore_rl.train.weights import local_tensors
from mcore_rl.types import LogprobOptions, StepStats, TokenScores, TrainBatch
from mcore_rl.weights.hf.config import ModelFacts, choose_trained
from mcore_rl.weights.hf.flops import TowerFlops
from mcore_rl.weights.models.table import HfConfig

TokenLoss = Callable[[Tensor, Tensor, TrainBatch, SequenceSum], tuple[Tensor, Mapping[str, Tensor]]]
"""(logprobs_T, entropy_T, batch of the same tokens, its sequence sums) -> (loss_T, metrics_T)."""


class Actor(TrainedModel):
    """One rank's share of the policy and its optimizer."""

    _reference: ReferenceWeights | None = None

    def _make_config(self, stored: ModelFacts, train: TrainConfig) -> HfConfig:
        """Return the config with layers for multi-token prediction if they are trained."""
        return choose_trained(stored.config, train.mtp_loss)

    def compute_logprobs(
        self,
        microbatches: Sequence[TrainBatch],
        options: LogprobOptions = LogprobOptions(temperature=1.0),
    ) -> list[TokenScores] | None:
        """Return the log-probs of each micro-batch's tokens on the owning rank, None on the others.

        Entry t is log p(token t | tokens before it), and 0 for the first token of a sequence.
        `options.temperature` must be a number. `options.reference` scores with the weights that
        `snapshot_reference` kept; their routers choose the experts themselves. Router flips are
        returned if the batch names the engine's experts, the trainer's own experts with
        train.router_replay=old_pass. Raises ValueError if no reference was kept.
        """
        temperature = options.temperature
        assert temperature is not None, "a rank does not know the rollout's temperature"
        softmax = self._softmax(temperature)

        def output(batch: RankBatch, logits_TV: Tensor) -> tuple[Tensor, Report]:
            logprobs_T, squares_T = vocab_parallel_scores(
                logits_TV, batch.labels_T, softmax, sum_squares=options.sum_squares
            )
            return logits_TV.new_zeros(()), {"logprobs": logprobs_T, "sum_squares": squares_T}

        batches = self._rank_batches(microbatches)
        replay = self._train.router_replay
        with self._reference_weights() if options.reference else nullcontext():
            reports, records = self._run(
                batches,
                output,
                forward_only=True,
                replay=replay == "engine" and not options.reference,
                record=replay == "old_pass" and not options.reference,
                replay_keys=(self._replays_keys and not options.reference) or None,
            )
        if not is_on_last_stage():
            return None
        nums_tokens = [len(microbatch.token_ids_T) for microbatch in microbatches]
        scores = _token_scores(batches, nums_tokens, reports, records)
        whose = "the reference's log-probs" if options.reference else "the trainer's log-probs"
        check_finite(whose, [score.logprobs_T for score in scores])
        return scores if rank_coordinate().owns_output else None

    def train_step(
        self,
        microbatches: Sequence[TrainBatch],
        loss_fn: TokenLoss,
        *,
        temperature: float,
        num_tokens: int,
    ) -> StepStats | None:
        """Take an optimizer step on sum(loss_weights * loss).

        Returns the stats on the owning rank, None on the others. Raises ValueError if a replay
        needs experts or keys that a micro-batch does not name.

        num_tokens   tokens of the whole step, over all data-parallel ranks
        """

        softmax = self._softmax(temperature)
        replay = self._train.router_replay != "none"
        if replay and not all(batch.names_experts for batch in microbatches):
            raise ValueError(
                f"train.router_replay={self._train.router_replay}, but a micro-batch has no routed"
                " experts: set train.router_replay=none"
            )
        if self._replays_keys and not all(batch.names_keys for batch in microbatches):
            raise ValueError(
                "train.indexer_replay=engine, but a micro-batch has no keys that indexers chose:"
                " set train.indexer_replay=none"
            )
        batches = self._rank_batches(microbatches, are_learned=True)
        totals = self._sums_over_samples(batches, loss_fn, softmax, replay=replay)

        def output(batch: RankBatch, logits_RV: Tensor) -> tuple[Tensor, Report]:
            logprobs_T, entropy_T = _logprobs_and_entropy(batch, logits_RV, softmax)
            sums = _sequence_sum(batch, totals)
            loss_T, metrics_T = loss_fn(logprobs_T, entropy_T, batch.batch, sums)
            assert batch.batch.loss_weights_T is not None
            loss = (loss_T * batch.batch.loss_weights_T).sum()
            sums = token_sums(loss, metrics_T, batch.batch.loss_mask_T, batch.num_tokens)
            report = {"sums": sums, "logprobs": logprobs_T.detach(), "fields": batch.batch}
            if self._drafts is not None:
                drafts = self._drafts.learn(batch, logits_RV, softmax)
                return (loss + drafts) * num_tokens, report
            return loss * num_tokens, report

        return self._optimizer_step(
            batches, output, num_tokens, replay=replay, replay_keys=self._replays_keys
        )

    @property
    def _replays_keys(self) -> bool:
        """Return whether attention reads the keys that the engine's indexers chose."""
        return self._train.indexer_replay == "engine"

    def _sums_over_samples(
        self,
        batches: Sequence[RankBatch],
        loss_fn: TokenLoss,
        softmax: VocabParallelSoftmax,
        *,
        replay: bool,
    ) -> list[Tensor] | None:
        """Return the sums that the loss takes over samples, as add_up_samples does; a collective.

        None if the loss can take them from each micro-batch. Stages before the last have none.
        """
        source = batches[0].batch.sums_from
        if batches[0].batch.sample_N is None or source == "rows":
            return None
        current = source == "current"
        scores = self._scores(batches, softmax, replay=replay) if current else []
        if not is_on_last_stage():
            return []
        fields = [fields_on_device(batch.batch) for batch in batches]
        logprobs = scores or [cast(Tensor, of_batch.old_logprobs_T) for of_batch in fields]
        return _add_up(fields, logprobs, loss_fn)

    def _scores(
        self, batches: Sequence[RankBatch], softmax: VocabParallelSoftmax, *, replay: bool
    ) -> list[Tensor]:
        """Return the current log-probs of each micro-batch's local tokens on the last stage."""

        def output(batch: RankBatch, logits_TV: Tensor) -> tuple[Tensor, Report]:
            logprobs_T, _ = vocab_parallel_scores(
                logits_TV, batch.labels_T, softmax, sum_squares=False
            )
            return logits_TV.new_zeros(()), {"logprobs": logprobs_T}

        reports, _ = self._run(
            batches,
            output,
            forward_only=True,
            replay=replay,
            replay_keys=self._replays_keys or None,
        )
        return [report["logprobs"] for report in reports]

    def snapshot_reference(self) -> None:
        """Keep a copy of the current weights in host memory as the reference policy.

        With low-rank factors the reference is the model without them, which is kept anyway.
        """
        if self._adapter is not None:
            return
        self._reference = ReferenceWeights(local_tensors(self.chunks))

    def _reference_weights(self) -> AbstractContextManager[None]:
        if self._adapter is not None:
            return self.without_adapter()
        if self._reference is None:
            raise ValueError("no reference policy was kept: call snapshot_reference() first")
        return self._reference.swap_in(local_tensors(self.chunks))

    def _sum_routing(
        self, report: Report, batch: RankBatch, record: RoutingRecord
    ) -> dict[str, Tensor]:
        """Return what makes log-probs differ from the engine's, and the effect of a replay."""
        fields: TrainBatch = report["fields"]
        flips_T = record.flips_T
        metrics_T: dict[str, Tensor] = {}
        if self._train.router_replay != "none" and record.replaced_T is not None:
            metrics_T["router/replaced_share"] = record.replaced_T > 0
        if fields.rollout_logprobs_T is not None and fields.stale_T is not None:
            trainer_T = report["logprobs"]
            if fields.old_logprobs_T is not None:
                # Use the scores before the first update, and the flips of that forward pass.
                trainer_T = fields.old_logprobs_T
                flips_T = fields.router_flips_T
            difference_T = trainer_T - fields.rollout_logprobs_T
            metrics_T |= attribute_diff(difference_T, fields.stale_T, flips_T)
        return sum_masked(metrics_T, fields.loss_mask_T)

    def _work(self, batches: Sequence[RankBatch]) -> dict[str, float]:
        """Return the operations of the vision tower; {} without one. A collective."""
        if self._tower_flops is None:
            return {}
        images = [batch.vision for batch in batches]
        return tower_work(self._tower_flops, images, self._train.vision)

    @cached_property
    def _tower_flops(self) -> TowerFlops | None:
        """Operations of the vision tower, counted once: every tensor of the model is looked at."""
        return TowerFlops.from_facts(ModelFacts(self._hf_path, self.hf_config))

    def _softmax(self, temperature: float) -> VocabParallelSoftmax:
        return VocabParallelSoftmax(
            ps.get_tensor_model_parallel_group(),
            self.hf_config["vocab_size"],
            temperature,
            self._train.logprob_chunk,
        )


def _logprobs_and_entropy(
    batch: RankBatch, logits_RV: Tensor, softmax: VocabParallelSoftmax
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of the local tokens, [T]; 0 where there are no logits."""
    rows_R = batch.scored_R
    assert rows_R is not None, "a training pass names the tokens that get logits"
    values_R = vocab_parallel_logprobs(logits_RV, batch.labels_T[rows_R], softmax)
    logprobs_T, entropy_T = (place_at_tokens(x, rows_R, len(batch.labels_T)) for x in values_R)
    return logprobs_T, entropy_T


def _token_scores(
    batches: Sequence[RankBatch],
    nums_tokens: Sequence[int],
    reports: Sequence[Report],
    records: Sequence[RoutingRecord],
) -> list[TokenScores]:
    """Bring scores of all context-parallel ranks into the micro-batches' order; collective."""
    targets_T = [batch.targets_T for batch in batches]
    twins_T = [batch.twins_T for batch in batches]

    def gather(values_T: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        present = [value for value in values_T if value is not None]
        return gather_tokens(present, targets_T, nums_tokens, twins_T) if present else values_T

    logprobs_T = gather_tokens(
        [r["logprobs"].float() for r in reports], targets_T, nums_tokens, twins_T
    )
    flips_T = gather([record.flips_T for record in records])
    squares_T = gather([report["sum_squares"] for report in reports])
    experts_TLK = [
        _experts(batch, num_tokens, record.experts_TLK)
        for batch, num_tokens, record in zip(batches, nums_tokens, records, strict=True)
    ]
    scores = zip(logprobs_T, flips_T, squares_T, experts_TLK, strict=True)
    return [TokenScores(*fields) for fields in scores]


def _experts(batch: RankBatch, num_tokens: int, experts_TLK: Tensor | None) -> Tensor | None:
    """Bring recorded experts, which are numbers plus 1, into the micro-batch's order.

    Each micro-batch travels alone: those of a step may take gigabytes. Dense layers become -1.
    """
    if experts_TLK is None:
        return None
    [gathered_TLK] = gather_tokens(
        [experts_TLK.int()], [batch.sources_T], [num_tokens], [batch.twins_T]
    )
    return (gathered_TLK - 1).to(torch.int16)


def _add_up(
    fields: Sequence[TrainBatch], logprobs: Sequence[Tensor], loss_fn: TokenLoss
) -> list[Tensor]:
    """Return the sums over samples of losses with these log-probs; collective on the last stage.

    fields, logprobs   of each micro-batch's local tokens, on the device
    """
    group = ps.get_data_parallel_group(with_context_parallel=True)
    samples = [samples_of_tokens(batch) for batch in fields]
    num_samples = max(int(sample_T.amax()) for sample_T in samples) + 1
    most = torch.tensor(num_samples, device=logprobs[0].device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    parts = [
        (partial(loss_fn, logprobs_T, torch.zeros_like(logprobs_T), batch), sample_T)
        for batch, logprobs_T, sample_T in zip(fields, logprobs, samples, strict=True)
    ]
    reduce = partial(dist.all_reduce, group=group)
    return add_up_samples(parts, int(most), logprobs[0].device, reduce)


def _sequence_sum(batch: RankBatch, totals: Sequence[Tensor] | None) -> SequenceSum:
    """Return the sums of a micro-batch on the device; `_sums_over_samples` returned `totals`."""
    if totals is not None:
        return make_known_sums(totals, samples_of_tokens(batch.batch))
    group = ps.get_context_parallel_group()
    reduce = partial(dist.all_reduce, group=group) if group.size() > 1 else None
    device = batch.tokens_T.device
    return sequence_sum(batch.batch.lens_N, device, reduce, is_whole_batch=False)
