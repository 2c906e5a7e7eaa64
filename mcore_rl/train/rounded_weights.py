"""Trains a model as engines in low precision compute with it (quantization-aware training).

    weights --copied--> kept                forward and backward pass
       |                  |                          ^
       +-- quantized and dequantized, in place ------+      put back --> optimizer step, checkpoint

The layers know nothing of it: whatever computes with a weight reads its rounded value, and the
gradient is taken for the weight's own (straight-through estimator, arXiv:1308.3432). So it works
with every layer, kernel and layout, and costs a copy of the rounded matrices while a pass runs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_rl.weights.box import Box, Shape, Shard
from mcore_rl.weights.hf.low_precision import Precision, check_whole, is_rounded, round_weights
from mcore_rl.weights.models import hf_tensor_shapes
from mcore_rl.weights.models.table import HfConfig


class RoundedWeights:
    """The matrices of one rank that engines hold in low precision."""

    def __init__(
        self, precision: Precision, shards: Iterable[Shard], shapes: Mapping[str, Shape], rank: int
    ) -> None:
        """Find the matrices among the rank's `shards`.

        shapes  of the HF tensors
        rank    for messages

        Raises ValueError naming a matrix whose part on this rank cuts a block or group.
        """
        self._precision: Precision = precision
        rounded = [shard for shard in shards if is_rounded(precision, shard.box.name)]
        self._parts = group_rows(rounded)
        for part in self._parts:
            first, last = part[0].box, part[-1].box
            box = Box(first.name, first.start, last.stop)
            check_whole(precision, box, shapes[first.name], f"trainer rank {rank}")

    @contextmanager
    def swap_in(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Give the matrices among the rank's `tensors` their rounded values for a while.

        Afterwards they are bit for bit what they were.
        """
        kept: list[tuple[Sequence[Tensor], Tensor]] = []
        try:
            for part in self._parts:
                views = [shard.view(tensors) for shard in part]
                whole_NK = torch.cat(views)
                kept.append((views, whole_NK))
                _write(round_weights(self._precision, whole_NK), views)
            yield
        finally:
            for views, whole_NK in kept:
                _write(whole_NK, views)


def make_rounded_weights(
    precision: Literal["none"] | Precision, shards: Iterable[Shard], hf_config: HfConfig
) -> RoundedWeights | None:
    """Return the rank's matrices that train.fake_quantization rounds; None: it is "none"."""
    if precision == "none":
        return None
    return RoundedWeights(precision, shards, hf_tensor_shapes(hf_config), dist.get_rank())


def group_rows(shards: Iterable[Shard]) -> list[list[Shard]]:
    """Return the shards in lists of such that lie one below the other in an HF matrix.

    A block may span several of them: Megatron keeps the rows of a head beside its keys.
    """

    def place(shard: Shard) -> tuple[str, Shape, Shape]:
        return shard.box.name, shard.box.start[1:], shard.box.start

    joined: list[list[Shard]] = []
    for shard in sorted(shards, key=place):
        if joined and _continues(joined[-1][-1].box, shard.box):
            joined[-1].append(shard)
        else:
            joined.append([shard])
    return joined


def _continues(above: Box, below: Box) -> bool:
    """Return whether `below` begins where `above` ends, with the same columns."""
    columns = (above.start[1:], above.stop[1:]) == (below.start[1:], below.stop[1:])
    return above.name == below.name and columns and above.stop[0] == below.start[0]


@torch.no_grad()
def _write(whole_NK: Tensor, views: Sequence[Tensor]) -> None:
    rows = whole_NK.split([len(view) for view in views])
    for view, part in zip(views, rows, strict=True):
        view.copy_(part)
