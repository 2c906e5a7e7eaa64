"""Micro-batches through megatron-core's pipeline schedule: packed batches in, what the last stage reports
out.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcore_rl.train.packing import RankBatch

Report = dict[str, Any]
OutputFn = Callable[[RankBatch, Tensor], tuple[Tensor, Report]]
"""(batch, logits [T, V / tp]) -> (loss summed over this rank's tokens, scaled to the step's; report)."""


def run_schedule(
    chunks: Sequence[DistributedDataParallel],
    batches: Sequence[RankBatch],
    output_fn: OutputFn,
    *,
    forward_only: bool,
    on_forward: Callable[[RankBatch], None],
) -> list[Report]:
    """Run every micro-batch forward (and backward); one report per micro-batch on the last stage, none
    elsewhere. `on_forward` hears of each micro-batch before a chunk of the model runs on it.
    """
    iterators = [iter(batches) for _ in chunks]
    virtual = len(chunks) > 1
    # forward_only alone would keep activations, and count the router's auxiliary loss
    with torch.set_grad_enabled(not forward_only):
        reports = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, output_fn, on_forward),
            data_iterator=iterators if virtual else iterators[0],
            model=list(chunks) if virtual else chunks[0],
            num_microbatches=len(batches),
            seq_length=1,  # shapes travel with the activations (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
        )
    for iterator in iterators:
        assert next(iterator, None) is None, "the schedule left micro-batches over"
    return reports


def _forward_step(
    output_fn: OutputFn,
    on_forward: Callable[[RankBatch], None],
    batches: Iterator[RankBatch],
    model: torch.nn.Module,
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Report]]]:
    batch = next(batches)
    on_forward(batch)
    out = model(
        batch.tokens_T[None],
        batch.positions_T[None],
        None,
        packed_seq_params=_packed_seq_params(batch),
        padding_mask=_padding_mask(batch, model),
    )
    return out, partial(_report, output_fn, batch)


def _report(
    output_fn: OutputFn, batch: RankBatch, logits_1TV: Tensor
) -> tuple[Tensor, Tensor, Report]:
    """The 3-tuple of calculate_per_token_loss: gradients are divided by the sum of the token counts of all
    ranks.
    """
    loss, report = output_fn(batch, logits_1TV[0])
    return loss, torch.tensor(batch.num_tokens, dtype=torch.int, device=loss.device), report


def _packed_seq_params(batch: RankBatch) -> PackedSeqParams:
    cu_seqlens = batch.cu_seqlens_N1
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=batch.max_len,
        max_seqlen_kv=batch.max_len,
    )


def _padding_mask(batch: RankBatch, model: torch.nn.Module) -> Tensor | None:
    """[1, T], True on padding, for the router's statistics.

    Under sequence parallelism the first stage cuts the mask for its TP rank; megatron-core 0.16.1 does not
    on the others.
    """
    if batch.padding_T is None:
        return None
    mask = batch.padding_T
    chunk = unwrap_model(model)
    if chunk.config.sequence_parallel and not chunk.pre_process:
        mask = mask.chunk(ps.get_tensor_model_parallel_world_size())[
            ps.get_tensor_model_parallel_rank()
        ]
    return mask[None].contiguous()
