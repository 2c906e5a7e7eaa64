"""The policy on one training rank: a model that gives log-probs and learns from a loss on them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor

from mcore_rl.algo.diagnostics import attribute_diff
from mcore_rl.algo.sequences import SequenceSum, sequence_sum
from mcore_rl.train.logprobs import vocab_parallel_logprobs, vocab_parallel_sum_squares
from mcore_rl.train.packing import RankBatch
from mcore_rl.train.reference import ReferenceWeights
from mcore_rl.train.routing import RoutingRecord
from mcore_rl.train.runtime import on_last_stage, rank_coordinate
from mcore_rl.train.schedule import Report
from mcore_rl.train.shards import local_tensors
from mcore_rl.train.trained_model import TrainedModel, gather_tokens
from mcore_rl.types import StepStats, TokenScores, TrainBatch

TokenLoss = Callable[[Tensor, Tensor, TrainBatch, SequenceSum], tuple[Tensor, Mapping[str, Tensor]]]
"""(logprobs_T, entropy_T, batch of the same tokens, sums over its sequences) -> (loss_T, metrics_T)."""


class Actor(TrainedModel):
    """One rank's share of the policy and its optimizer."""

    _reference: ReferenceWeights | None = None

    def compute_logprobs(
        self,
        microbatches: Sequence[TrainBatch],
        *,
        reference: bool = False,
        temperature: float = 1.0,
        sum_squares: bool = False,
    ) -> list[TokenScores] | None:
        """Log-probs of each micro-batch's tokens on the owning rank, None on the others.

        Entry t is log p(token t | tokens before it); 0 for the first token of a sequence. `reference` takes
        the weights of `snapshot_reference`, and their own experts. Router flips come along if the batch has
        the engine's experts, and with train.router_replay=old_pass where the trainer sent the tokens.
        """

        def output(batch: RankBatch, logits_TV: Tensor) -> tuple[Tensor, Report]:
            logprobs_T, _ = self._logprobs(batch, logits_TV, temperature)
            report = {"logprobs": logprobs_T}
            if sum_squares:
                group, size = ps.get_tensor_model_parallel_group(), self.hf_config["vocab_size"]
                report["sum_squares"] = vocab_parallel_sum_squares(
                    logits_TV, group, size, temperature
                )
            return logits_TV.new_zeros(()), report

        batches = self._rank_batches(microbatches)
        with self._reference_weights() if reference else nullcontext():
            replay, record = (
                self._replay == mode and not reference for mode in ("engine", "old_pass")
            )
            reports, records = self._run(
                batches, output, forward_only=True, replay=replay, record=record
            )
        if not on_last_stage():
            return None
        scores = []
        for i, (batch, microbatch) in enumerate(zip(batches, microbatches, strict=True)):
            num_tokens = len(microbatch.token_ids_T)
            logprobs_T = gather_tokens(reports[i]["logprobs"].float(), batch.targets_T, num_tokens)
            flips_T, experts_TLK = records[i].flips_T, records[i].experts_TLK
            if flips_T is not None:
                flips_T = gather_tokens(flips_T, batch.targets_T, num_tokens)
            if experts_TLK is not None:
                experts_TLK = gather_tokens(experts_TLK.int(), batch.sources_T, num_tokens) - 1
                experts_TLK = experts_TLK.to(torch.int16)
            squares_T = reports[i].get("sum_squares")
            if squares_T is not None:
                squares_T = gather_tokens(squares_T, batch.targets_T, num_tokens)
            scores.append(TokenScores(logprobs_T, flips_T, squares_T, experts_TLK))
        return scores if rank_coordinate().owns_output else None

    def train_step(
        self,
        microbatches: Sequence[TrainBatch],
        loss_fn: TokenLoss,
        *,
        temperature: float,
        num_tokens: int,
    ) -> StepStats | None:
        """One optimizer step on sum(loss_weights * loss); stats on the owning rank, None on the others.

        num_tokens   tokens of the whole step, over all data-parallel ranks
        """

        def output(batch: RankBatch, logits_TV: Tensor) -> tuple[Tensor, Report]:
            logprobs_T, entropy_T = self._logprobs(batch, logits_TV, temperature)
            loss_T, metrics_T = loss_fn(logprobs_T, entropy_T, batch.batch, _sequence_sum(batch))
            assert batch.batch.loss_weights_T is not None
            loss = (loss_T * batch.batch.loss_weights_T).sum()
            report = {
                "loss": loss.detach().clone(),
                "metrics": metrics_T,
                "logprobs": logprobs_T.detach(),
            }
            return loss * num_tokens, report

        replay = self._replay != "none"
        if replay and any(batch.routed_experts_TLK is None for batch in microbatches):
            raise ValueError(
                f"train.router_replay={self._replay}, but no one told which experts the tokens went to:"
                " set train.router_replay=none"
            )
        return self._optimizer_step(microbatches, output, num_tokens, replay=replay)

    def snapshot_reference(self) -> None:
        """Keep the current weights, in host memory, as the reference policy."""
        self._reference = ReferenceWeights(local_tensors(self.chunks))

    def _reference_weights(self) -> AbstractContextManager[None]:
        if self._reference is None:
            raise ValueError("no reference policy was kept: call snapshot_reference() first")
        return self._reference.swapped_in(local_tensors(self.chunks))

    def _sums(self, report: Report, batch: RankBatch, record: RoutingRecord) -> dict[str, Tensor]:
        """With where the difference to the engine's log-probs comes from, and what a replay changed."""
        fields, flips_T = batch.batch, record.flips_T
        if self._replay != "none" and record.replaced_T is not None:
            replaced = {"router/replaced_share": record.replaced_T > 0}
            report = {**report, "metrics": {**report["metrics"], **replaced}}
        if fields.rollout_logprobs_T is not None and fields.stale_T is not None:
            trainer_T = report["logprobs"]
            if fields.old_logprobs_T is not None:
                trainer_T, flips_T = fields.old_logprobs_T, fields.router_flips_T
            difference_T = trainer_T - fields.rollout_logprobs_T
            attributed = attribute_diff(difference_T, fields.stale_T, flips_T)
            report = {**report, "metrics": {**report["metrics"], **attributed}}
        return super()._sums(report, batch, record)

    def _logprobs(
        self, batch: RankBatch, logits_TV: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        group = ps.get_tensor_model_parallel_group()
        return vocab_parallel_logprobs(
            logits_TV, batch.labels_T, group, self.hf_config["vocab_size"], temperature
        )


def _sequence_sum(batch: RankBatch) -> SequenceSum:
    group = ps.get_context_parallel_group()
    reduce = partial(dist.all_reduce, group=group) if group.size() > 1 else None
    return sequence_sum(batch.batch.lens_N, batch.tokens_T.device, reduce)
