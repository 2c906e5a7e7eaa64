"""The policy on one training rank: packed micro-batches in, log-probs, optimizer steps, weights and
checkpoints out.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor

from mcore_rl.algo.diagnostics import attribute_diff
from mcore_rl.algo.sequences import SequenceSum, sequence_sum
from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from mcore_rl.device import device
from mcore_rl.slices.box import Shard
from mcore_rl.slices.hf_config import moe_layers, read_hf_config
from mcore_rl.train.checkpoint import Checkpointer, TrainState
from mcore_rl.train.export import export_hf
from mcore_rl.train.hf_config import make_transformer_config
from mcore_rl.train.logprobs import vocab_parallel_logprobs, vocab_parallel_sum_squares
from mcore_rl.train.model import make_chunks
from mcore_rl.train.optimizer import learning_rate, make_optimizer, set_learning_rate, wrap_chunks
from mcore_rl.train.packing import RankBatch, make_rank_batch
from mcore_rl.train.reference import ReferenceWeights
from mcore_rl.train.router import RouterFlips
from mcore_rl.train.runtime import on_last_stage, rank_coordinate
from mcore_rl.train.schedule import OutputFn, Report, run_schedule
from mcore_rl.train.shards import local_tensors, weight_layout
from mcore_rl.train.stats import reduce_router_aux_loss, reduce_sums, token_sums
from mcore_rl.train.weights import fill_weights
from mcore_rl.types import StepStats, TokenScores, TrainBatch

TokenLoss = Callable[[Tensor, Tensor, TrainBatch, SequenceSum], tuple[Tensor, Mapping[str, Tensor]]]
"""(logprobs_T, entropy_T, batch of the same tokens, sums over its sequences) -> (loss_T, metrics_T)."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Actor:
    """One rank's share of the policy and its optimizer. Every method is a collective over all ranks.

    Every rank of a data-parallel group passes the same micro-batches, every group equally many; with
    `parallel.vpp` their number is a multiple of `parallel.pp`.
    """

    def __init__(
        self,
        model: ModelConfig,
        parallel: ParallelConfig,
        train: TrainConfig,
        optimizer: OptimizerConfig,
        total_steps: int,
        seed: int,
    ) -> None:
        """Build the model in the layout of the process groups and fill it. Errors: see read_hf_config,
        fill_weights.
        """
        self.hf_config = read_hf_config(model.path)
        self.step = 0
        """Optimizer steps taken."""
        self._hf_path = Path(model.path)
        self._optimizer_config, self._total_steps = optimizer, total_steps
        self._dtype = model.dtype
        dtype = DTYPES[model.dtype]
        self._config = make_transformer_config(
            self.hf_config, parallel, dtype, train.recompute, train.router_aux_loss_coef
        )
        chunks = make_chunks(self._config, self.hf_config)
        fill_weights(chunks, model, self.hf_config, seed)
        self.chunks = wrap_chunks(self._config, chunks)
        self._flips = RouterFlips(chunks, full_recompute=train.recompute == "full")
        self._optimizer = make_optimizer(optimizer, dtype, self.chunks)
        self._checkpointer = Checkpointer(TrainState(self.chunks, self._optimizer, parallel))
        self._reference: ReferenceWeights | None = None
        _freeze_garbage()

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
        the weights of `snapshot_reference`. Router flips come along if the batch has the engine's experts.
        """

        def output(batch: RankBatch, logits_TV: Tensor) -> tuple[Tensor, Report]:
            logprobs_T, _ = self._logprobs(batch, logits_TV, temperature)
            report = {"logprobs": logprobs_T}
            if sum_squares:
                group, size = ps.get_tensor_model_parallel_group(), self.hf_config["vocab_size"]
                report["sum_squares"] = vocab_parallel_sum_squares(logits_TV, group, size, temperature)
            return logits_TV.new_zeros(()), report

        batches = self._rank_batches(microbatches)
        with self._reference_weights() if reference else nullcontext():
            reports, flips = self._run(batches, output, forward_only=True)
        if not on_last_stage():
            return None
        scores = []
        for i, (batch, microbatch) in enumerate(zip(batches, microbatches, strict=True)):
            num_tokens = len(microbatch.token_ids_T)
            logprobs_T = _gather_tokens(reports[i]["logprobs"].float(), batch.targets_T, num_tokens)
            flips_T = None if flips is None else _gather_tokens(flips[i], batch.targets_T, num_tokens)
            squares_T = reports[i].get("sum_squares")
            if squares_T is not None:
                squares_T = _gather_tokens(squares_T, batch.targets_T, num_tokens)
            scores.append(TokenScores(logprobs_T, flips_T, squares_T))
        return scores if rank_coordinate().owns_output else None

    def train_step(
        self, microbatches: Sequence[TrainBatch], loss_fn: TokenLoss, *, temperature: float, num_tokens: int
    ) -> StepStats | None:
        """One optimizer step on sum(loss_weights * loss); stats on the owning rank, None on the others.

        num_tokens   tokens of the whole step, over all data-parallel ranks
        """

        def output(batch: RankBatch, logits_TV: Tensor) -> tuple[Tensor, Report]:
            logprobs_T, entropy_T = self._logprobs(batch, logits_TV, temperature)
            loss_T, metrics_T = loss_fn(logprobs_T, entropy_T, batch.batch, _sequence_sum(batch))
            assert batch.batch.loss_weights_T is not None
            loss = (loss_T * batch.batch.loss_weights_T).sum()
            # megatron-core divides gradients by the step's tokens; the weights already hold every
            # denominator.
            report = {"loss": loss.detach().clone(), "metrics": metrics_T, "logprobs": logprobs_T.detach()}
            return loss * num_tokens, report

        assert microbatches, "train_step without micro-batches"
        self._checkpointer.maybe_finish()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        rate = learning_rate(self._optimizer_config, self.step, self._total_steps)
        set_learning_rate(self._optimizer, rate)
        batches = self._rank_batches(microbatches)
        reports, flips = self._run(batches, output, forward_only=False)
        succeeded, grad_norm, _ = self._optimizer.step()
        assert succeeded, f"optimizer step {self.step} was skipped: gradient norm {grad_norm}"
        self.step += 1
        aux = self._router_aux_loss(len(microbatches))
        if not on_last_stage():
            return None
        sums = [
            _sums(report, batch, None if flips is None else flips[i])
            for i, (report, batch) in enumerate(zip(reports, batches, strict=True))
        ]
        loss, metrics = reduce_sums(sums, num_tokens)
        if not rank_coordinate().owns_output:
            return None
        return StepStats(loss, float(grad_norm or 0.0), rate, num_tokens, metrics | aux)

    def snapshot_reference(self) -> None:
        """Keep the current weights, in host memory, as the reference policy."""
        self._reference = ReferenceWeights(local_tensors(self.chunks))

    def weight_layout(self) -> tuple[list[Shard], dict[str, Tensor]]:
        """(shards of HF tensors on this rank, the parameters they lie in)."""
        return weight_layout(self.chunks, self.hf_config)

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Start a checkpoint of weights, optimizer, step, generators and `extra` (equal on all ranks).

        Returns when the state is copied; the folder appears under its name after `finish_save`, the next
        save or some later train_step.
        """
        self._checkpointer.save(Path(folder), self.step, extra)

    def finish_save(self, timeout_s: float = 600.0) -> None:
        """Wait until the save under way, if there is one, is complete."""
        self._checkpointer.finish(timeout_s)

    def load(self, folder: Path) -> dict[str, Any]:
        """Continue from a checkpoint of the same model in any layout; returns its `extra`."""
        self.step, extra = self._checkpointer.load(Path(folder))
        return extra

    def export_hf(self, out_dir: Path) -> None:
        """Write the weights as a HuggingFace directory beside the tokenizer and config they came with."""
        shards, tensors = self.weight_layout()
        export_hf(shards, tensors, self.hf_config, self._dtype, Path(out_dir), self._hf_path)

    def _reference_weights(self) -> AbstractContextManager[None]:
        if self._reference is None:
            raise ValueError("no reference policy was kept: call snapshot_reference() first")
        return self._reference.swapped_in(local_tensors(self.chunks))

    def _run(
        self, batches: Sequence[RankBatch], output: OutputFn, *, forward_only: bool
    ) -> tuple[list[Report], list[Tensor] | None]:
        """Reports of the last stage, and each micro-batch's router flips."""
        self._flips.begin(batches, forward_only=forward_only)
        reports = run_schedule(
            self.chunks, batches, output, forward_only=forward_only, on_forward=self._flips.enter
        )
        return reports, self._flips.take(batches)

    def _rank_batches(self, microbatches: Sequence[TrainBatch]) -> list[RankBatch]:
        tp, cp = ps.get_tensor_model_parallel_world_size(), ps.get_context_parallel_world_size()
        cp_rank = ps.get_context_parallel_rank()
        return [make_rank_batch(batch, cp_rank, cp, tp).to(device()) for batch in microbatches]

    def _logprobs(self, batch: RankBatch, logits_TV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        group = ps.get_tensor_model_parallel_group()
        return vocab_parallel_logprobs(
            logits_TV, batch.labels_T, group, self.hf_config["vocab_size"], temperature
        )

    def _router_aux_loss(self, num_microbatches: int) -> dict[str, float]:
        if not self._config.moe_aux_loss_coeff:
            return {}
        layers = moe_layers(self.hf_config)
        return {"router_aux_loss": reduce_router_aux_loss(len(layers), sum(layers), num_microbatches)}


def _sums(report: Report, batch: RankBatch, flips_T: Tensor | None) -> dict[str, Tensor]:
    """What adds up over the step of one micro-batch's report."""
    fields, metrics_T = batch.batch, dict(report["metrics"])
    if fields.rollout_logprobs_T is not None and fields.stale_T is not None:
        trainer_T = report["logprobs"]
        if fields.old_logprobs_T is not None:
            trainer_T, flips_T = fields.old_logprobs_T, fields.router_flips_T
        metrics_T |= attribute_diff(trainer_T - fields.rollout_logprobs_T, fields.stale_T, flips_T)
    return token_sums(report["loss"], metrics_T, fields.loss_mask_T, batch.num_tokens)


def _sequence_sum(batch: RankBatch) -> SequenceSum:
    group = ps.get_context_parallel_group()
    reduce = partial(dist.all_reduce, group=group) if group.size() > 1 else None
    return sequence_sum(batch.batch.lens_N, batch.tokens_T.device, reduce)


def _gather_tokens(local_T: Tensor, targets_T: Tensor, num_tokens: int) -> Tensor:
    """Put each context-parallel rank's values at the tokens they belong to; [num_tokens] on every one of
    them.
    """
    whole = torch.zeros(num_tokens, dtype=local_T.dtype)
    has_target = (targets_T >= 0).cpu()
    whole[targets_T.cpu()[has_target]] = local_T.detach().cpu()[has_target]
    group = ps.get_context_parallel_group()
    if group.size() > 1:
        on_device = whole.to(device())
        dist.all_reduce(on_device, group=group)
        whole = on_device.cpu()
    return whole


def _freeze_garbage() -> None:
    """Exempt what lives as long as the process from garbage collection, which megatron-core forces at each
    save.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
