"""Passes activations and gradients between pipeline stages whose micro-batches differ in length.

Every stage has all micro-batches, so it knows the shape of what comes next. megatron-core would
send each shape ahead, and wait for the device twice on every hop.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core import parallel_state as ps
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor

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
        self._from_previous = _in_order(incoming, table, 0 if is_first else None)
        self._to_next = _in_order(outgoing, table, last_chunk if is_last else None)
        self._from_next = _in_order(outgoing, backward, last_chunk if is_last else None)
        self._to_previous = _in_order(incoming, backward, 0 if is_first else None)

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
    groups.dp_cp = ps.get_data_parallel_group(with_context_parallel=True)
    return groups


def _in_order(
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
