"""Quantizes a trainer rank's routed experts to INT4 before they are sent.

    experts in bfloat16 --each sync--> words, scales --slices--> engines
                                           |
                                  memory only while weights are sent

A matrix is quantized by the rank that holds it, by the formula of weights/hf/int4_groups.py, which
`train.fake_quantization=int4` rounds by, too: engines compute with the bits that training does.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.device.gpu_memory import common_device
from mcore_rl.weights.box import Box, Shape, Shard, contiguous_strides
from mcore_rl.weights.hf.int4 import PACKED, SCALE
from mcore_rl.weights.hf.int4_groups import quantize_groups
from mcore_rl.weights.hf.low_precision import check_whole, is_rounded
from mcore_rl.weights.layouts.packed_experts import PARTS

_TENSOR = "int4_experts"
"""Begin of the names of the local tensors with words and with scales."""


@dataclass(frozen=True)
class _PackedShard:
    """The part of a matrix that a rank holds, and its words and scales."""

    weights: Shard
    words: Shard
    scales: Shard


class PackedExperts:
    """Holds words and scales of a rank's routed experts, for engines that serve INT4."""

    def __init__(
        self,
        shards: Iterable[Shard],
        tensors: Mapping[str, Tensor],
        shapes: Mapping[str, Shape],
        rank: int,
    ) -> None:
        """Find the routed experts among the `shards` of `tensors`, the rank's parameters.

        shapes  of the HF tensors
        rank    for messages

        Raises ValueError naming a matrix whose part on this rank cuts a group.
        """
        self._weights = tensors
        others: list[Shard] = []
        self._packed: list[_PackedShard] = []
        numels = dict.fromkeys(PARTS, 0)
        for shard in shards:
            if not is_rounded("int4", shard.box.name):
                others.append(shard)
                continue
            check_whole("int4", shard.box, shapes[shard.box.name], f"trainer rank {rank}")
            words, scales = (_place(shard.box, suffix, numels) for suffix in (PACKED, SCALE))
            self._packed.append(_PackedShard(shard, words, scales))
        device = common_device(tensors.values())
        dtypes = {suffix: getattr(torch, dtype) for suffix, (_, dtype) in PARTS.items()}
        buffers = {
            _TENSOR + suffix: torch.empty(numel, dtype=dtypes[suffix], device=device)
            for suffix, numel in numels.items()
        }
        self._buffers = [(buffer, buffer.untyped_storage().nbytes()) for buffer in buffers.values()]
        self._free()
        parts = [part for packed in self._packed for part in (packed.words, packed.scales)]
        self.shards: list[Shard] = [*others, *parts]
        self.tensors: dict[str, Tensor] = {**tensors, **buffers}
        """The parameters, and words and scales, which have memory in `swap_in` alone."""

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Give `tensors` the words and scales of the current weights for a while."""
        for buffer, num_bytes in self._buffers:
            buffer.untyped_storage().resize_(num_bytes)
        try:
            self._fill()
            yield
        finally:
            self._free()

    @torch.no_grad()
    def _fill(self) -> None:
        for packed in self._packed:
            words, scales = quantize_groups(packed.weights.view(self._weights))
            packed.words.view(self.tensors).copy_(words)
            packed.scales.view(self.tensors).copy_(scales)

    def _free(self) -> None:
        for buffer, _ in self._buffers:
            buffer.untyped_storage().resize_(0)


def _place(box: Box, suffix: str, numels: dict[str, int]) -> Shard:
    """Return the shard with the words or the scales of `box`, behind those that are placed."""
    columns, dtype = PARTS[suffix]
    start, stop = ((row, column // columns) for row, column in (box.start, box.stop))
    part = Box(box.name + suffix, start, stop)
    offset = numels[suffix]
    numels[suffix] += part.numel
    return Shard(part, _TENSOR + suffix, offset, contiguous_strides(part.shape), dtype)
