"""Runs micro-batches through megatron-core's pipeline schedule and returns a report of each.

A report is what the last stage's output function returns for a micro-batch beside the loss.

Micro-batches differ in length. Every stage has all of them, so it knows the shape of the next
activation or gradient. megatron-core would send each shape ahead, and wait for the device twice on
every hop.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcore_rl.train.hybrid import is_hybrid
from mcore_rl.train.packing import RankBatch
from mcore_rl.train.shared_attention import SharedSeqParams
from mcore_rl.train.sparse.choices import IndexedSeqParams
from mcore_rl.train.vision.model import count_carried_features

Shape = list[int]
"""[rows, 1, hidden size] of what two stages exchange for a micro-batch: a row for each token of
this rank, and as many again for each feature of a vision tower that travels along."""


class KnownShapes(P2PCommunicator):
    """A P2PCommunicator for one pass over micro-batches whose shapes are known.

    incoming, outgoing   by chunk of this rank and by micro-batch: the shape of the chunk's input,
                         and of its output

    Micro-batches come and go in the order of megatron-core's schedule table, on interleaved stages
    once per model chunk: forward passes by their input, backward passes by their output's gradient.
    """

    def __init__(
        self,
        config: TransformerConfig,
        incoming: Sequence[Sequence[Shape]],
        outgoing: Sequence[Sequence[Shape]],
    ) -> None:
        group = ps.get_pipeline_model_parallel_group()
        super().__init__(group, config)
        group_size = config.microbatch_group_size_per_vp_stage or group.size()
        num_chunks = len(incoming)
        table = get_schedule_table(len(incoming[0]), num_chunks, group_size)
        is_first = group.rank() == 0
        is_last = group.rank() == group.size() - 1
        # The first stage gets nothing for the model's first chunk, the last stage sends nothing
        # for its last one. A backward pass goes through the chunks in reverse.
        last_chunk = num_chunks - 1
        backward = [(number, last_chunk - chunk) for number, chunk in table]
        self._from_previous = _order_shapes(incoming, table, 0 if is_first else None)
        self._to_next = _order_shapes(outgoing, table, last_chunk if is_last else None)
        self._from_next = _order_shapes(outgoing, backward, last_chunk if is_last else None)
        self._to_previous = _order_shapes(incoming, backward, 0 if is_first else None)

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape, Shape]:
        """Return (shape from the previous stage, shape from the next), without communication.

        AssertionError if a tensor to be sent has another shape than its receiver expects.
        """
        _check(tensor_send_next, self._to_next, "next")
        _check(tensor_send_prev, self._to_previous, "previous")
        nothing = [0, 0, 0]
        return (
            next(self._from_previous) if recv_prev else nothing,
            next(self._from_next) if recv_next else nothing,
        )


def stage_groups() -> ProcessGroupCollection:
    """Return the process groups that a schedule uses beside a communicator of its own."""
    groups = ProcessGroupCollection()
    groups.tp = ps.get_tensor_model_parallel_group()
    groups.cp = ps.get_context_parallel_group()
    groups.pp = ps.get_pipeline_model_parallel_group()
    groups.embd = ps.get_embedding_group(check_initialized=False)
    groups.pos_embd = ps.get_position_embedding_group(check_initialized=False)
    groups.dp = ps.get_data_parallel_group()
    groups.dp_cp = ps.get_data_parallel_group(with_context_parallel=True)
    groups.tp_dp_cp = ps.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return groups


def _order_shapes(
    shapes: Sequence[Sequence[Shape]], table: Sequence[tuple[int, int]], without_chunk: int | None
) -> Iterator[Shape]:
    """Return the shapes [chunk][number] in the order of (number, chunk) in `table`."""
    return iter([shapes[chunk][number] for number, chunk in table if chunk != without_chunk])


def _check(tensor: Tensor | None, expected: Iterator[Any], where: str) -> None:
    if tensor is not None:
        shape = next(expected)
        assert list(tensor.shape) == shape, (
            f"the {where} stage expects {shape}, not {list(tensor.shape)}"
        )


Report = dict[str, Any]
OutputFn = Callable[[RankBatch, Tensor], tuple[Tensor, Report]]
"""(batch, logits [T, V / tp]) -> (loss, report).

The loss is summed over this rank's tokens and scaled by the tokens of the step.
"""


EnterFn = Callable[[RankBatch, torch.nn.Module], RankBatch]
"""(batch in host memory, chunk of the model) -> what the chunk needs of it, on the device."""


def run_schedule(
    chunks: Sequence[DistributedDataParallel],
    batches: Sequence[RankBatch],
    output_fn: OutputFn,
    *,
    forward_only: bool,
    enter: EnterFn,
) -> list[Report]:
    """Run every micro-batch forward and, unless `forward_only`, backward.

    Returns one report per micro-batch on the last stage, none elsewhere. `enter` is called each
    time before a chunk of the model runs on a micro-batch.
    """
    iterators = [iter(batches) for _ in chunks]
    virtual = len(chunks) > 1
    config = unwrap_model(chunks[0]).config
    # megatron-core's forward_only alone keeps activations and counts the router's auxiliary loss.
    with torch.set_grad_enabled(not forward_only):
        reports = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, output_fn, enter),
            data_iterator=iterators if virtual else iterators[0],
            model=list(chunks) if virtual else chunks[0],
            num_microbatches=len(batches),
            seq_length=1,  # without meaning: micro-batches differ in length
            micro_batch_size=1,
            forward_only=forward_only,
            **_hops(config, batches, chunks),
        )
    for iterator in iterators:
        assert next(iterator, None) is None, "the schedule did not run all micro-batches"
    return reports


def _hops(
    config: TransformerConfig,
    batches: Sequence[RankBatch],
    chunks: Sequence[DistributedDataParallel],
) -> dict[str, Any]:
    """Return the arguments by which stages know what they exchange; none without a pipeline."""
    if config.pipeline_model_parallel_size == 1:
        return {}
    parts = config.tensor_model_parallel_size if config.sequence_parallel else 1

    def shapes(num_features: int) -> list[list[int]]:
        """Return the shape of each micro-batch that travels with features of its images."""
        return [
            [len(b.tokens_T) // parts * (1 + num_features * b.has_images), 1, config.hidden_size]
            for b in batches
        ]

    carried = [count_carried_features(unwrap_model(chunk)) for chunk in chunks]
    incoming = [shapes(before) for before, _ in carried]
    outgoing = [shapes(behind) for _, behind in carried]
    return {
        "p2p_communicator": KnownShapes(config, incoming, outgoing),
        "pg_collection": stage_groups(),
    }


def _forward_step(
    output_fn: OutputFn,
    enter: EnterFn,
    batches: Iterator[RankBatch],
    model: torch.nn.Module,
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Report]]]:
    batch = enter(next(batches), model)
    vision = batch.vision
    positions = batch.positions_T[None] if vision is None else vision.rotary_3P[:, None]
    out = model(
        batch.tokens_T[None],
        positions,
        None,
        packed_seq_params=_make_packed_seq_params(batch, model),
        padding_mask=_make_padding_mask(batch, model),
        **({} if vision is None else {"vision": vision}),
    )
    return out, partial(_report, output_fn, batch)


def _report(
    output_fn: OutputFn, batch: RankBatch, logits_1TV: Tensor
) -> tuple[Tensor, Tensor, Report]:
    """Return (loss, number of tokens, report), as megatron-core's calculate_per_token_loss asks.

    It divides gradients by the number of tokens of all ranks.
    """
    loss, report = output_fn(batch, logits_1TV[0])
    num_tokens = torch.full((), batch.num_tokens, dtype=torch.int, device=loss.device)
    return loss, num_tokens, report


def _make_packed_seq_params(batch: RankBatch, model: torch.nn.Module) -> PackedSeqParams:
    cu_seqlens = batch.cu_seqlens_N1
    sequences_1T = None
    if is_hybrid(unwrap_model(model)):  # Mamba layers see the tokens of all context-parallel ranks
        num_tokens = len(batch.tokens_T) * ps.get_context_parallel_world_size()
        numbers_N = torch.arange(len(cu_seqlens) - 1, dtype=torch.int32, device=cu_seqlens.device)
        sequences_1T = numbers_N.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)[None]
    own = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=batch.max_len,
        max_seqlen_kv=batch.max_len,
        seq_idx=sequences_1T,
    )
    if batch.chunk_keys is not None:
        return IndexedSeqParams(**vars(own), keys=batch.chunk_keys)
    return own if batch.shared is None else SharedSeqParams.from_rows(own, batch.shared)


def _make_padding_mask(batch: RankBatch, model: torch.nn.Module) -> Tensor | None:
    """Return the mask for the router's statistics, [1, T], True on padding; None without padding.

    Under sequence parallelism megatron-core 0.19.2 cuts the mask for its TP rank on the first stage
    of a GPTModel only; elsewhere it is cut here.
    """
    if batch.padding_T is None:
        return None
    mask = batch.padding_T
    chunk = unwrap_model(model)
    if chunk.config.sequence_parallel and not (chunk.pre_process and not is_hybrid(chunk)):
        parts = mask.chunk(ps.get_tensor_model_parallel_world_size())
        mask = parts[ps.get_tensor_model_parallel_rank()]
    return mask[None].contiguous()
