"""Holds what routers read and record while a micro-batch runs through a chunk of the model.

Axes: T tokens of the micro-batch on a context-parallel rank, t those of them that this rank routes
(sequence parallelism splits them), L layers of the model, l layers of the chunk, K experts a token.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mcore_rl.device import to_host
from mcore_rl.train.packing import RankBatch


@dataclass
class RoutingRecord:
    """The routers' decisions on the local tokens of one micro-batch, over all layers.

    flips_T       int32, layers in which the token went to other experts than the batch names
    replaced_T    int32, layers in which a replay changed the router's own choice
    experts_TLK   int16, number of the expert the token went to, plus 1; 0 in dense layers, without
                  meaning on padding; in host memory
    parts         (tokens, layers, their experts as above) of this rank's chunks, in host memory
    """

    flips_T: Tensor | None = None
    replaced_T: Tensor | None = None
    experts_TLK: Tensor | None = None
    parts: list[tuple[slice, slice, Tensor]] = field(default_factory=list)

    def own_experts(self, shape: tuple[int, int, int]) -> Tensor:
        """Return what this rank recorded, int16 of `shape` [T, L, K]; 0 where others did."""
        experts_TLK = torch.zeros(shape, dtype=torch.int16)
        for rows, layers, taken_tlK in self.parts:
            experts_TLK[rows, layers] = taken_tlK
        return experts_TLK


@dataclass(frozen=True)
class ChunkRun:
    """A micro-batch on its way through one chunk.

    batch       the micro-batch, on the device
    layers      the chunk's layers
    rows        the tokens that this rank routes
    given_tlK   int16, the experts that the batch names, on the device; None if it names none
    taken_tlK   int16, the experts that tokens were sent to, plus 1; None if they are not recorded
    """

    batch: RankBatch
    record: RoutingRecord
    layers: slice
    rows: slice
    given_tlK: Tensor | None
    taken_tlK: Tensor | None

    def given(self, layer_number: int) -> Tensor | None:
        """Return the experts that the batch names in a layer, counted from 1, int64 [t, K]."""
        if self.given_tlK is None:
            return None
        return self.given_tlK[:, layer_number - 1 - self.layers.start].long()

    def take(self, layer_number: int, taken_TK: Tensor) -> None:
        """Note the experts that a layer, counted from 1, sent its tokens to."""
        if self.taken_tlK is not None:
            layer = layer_number - 1 - self.layers.start
            self.taken_tlK[:, layer] = (taken_TK + 1).to(torch.int16)

    def keep_taken(self) -> None:
        """Bring the noted experts to host memory, where they are once the device is done."""
        if self.taken_tlK is not None:
            self.record.parts.append((self.rows, self.layers, to_host(self.taken_tlK)))


def layers_of(chunk: torch.nn.Module) -> slice:
    """Return the range of layers of a GPTModel, counted from 0 over the whole model."""
    layers: Any = chunk.get_submodule("decoder.layers")
    numbers = [layer.layer_number for layer in layers]
    return slice(numbers[0] - 1, numbers[-1])
