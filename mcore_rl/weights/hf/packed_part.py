"""Reads the part of a packed matrix that a box names, and decodes it.

    two stored tensors --values and scales of the blocks that it touches--> PackedPart --> elements

The elements are those that `mcore-rl-ckpt dequantize` writes in bfloat16 for FP8, and in the
scales' dtype for INT4, so that a rank computes with the bits of the dequantized model.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_rl.weights.box import Box
from mcore_rl.weights.hf.fp8 import BLOCK
from mcore_rl.weights.hf.int4 import GROUP
from mcore_rl.weights.hf.int4_groups import dequantize_groups
from mcore_rl.weights.hf.packing import Packing, find_stored
from mcore_rl.weights.hf.quantize import dequantize_blocks


@dataclass(frozen=True)
class PackedPart:
    """The part `box` of a matrix, as files have it.

    values   int4: int32 words of the groups that the box touches; fp8: float8_e4m3fn [N, K]
    scales   of the groups or blocks that the box touches; of blocks in float32
    """

    packing: Packing
    box: Box
    values: Tensor
    scales: Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dequantize(self, device: torch.device | None = None) -> Tensor:
        """Return the elements of the box on `device`, default where the part is.

        Peak memory: three times the part in float32.
        """
        values, scales = (t.to(device, non_blocking=True) for t in (self.values, self.scales))
        first_row, first_column = self.box.start
        if self.packing == "fp8":
            skipped = first_row % BLOCK, first_column % BLOCK
            return dequantize_blocks(values, scales, torch.bfloat16, skipped)
        weights_NK = dequantize_groups(values, scales)
        return weights_NK.narrow(1, first_column % GROUP, self.box.shape[1])


def read_part(packing: Packing, values: Any, scales: Any, box: Box) -> PackedPart:
    """Return the part `box` of a matrix.

    values, scales   of the whole matrix, as slices of safetensors; no more than the part needs is
                     read
    """
    stored = find_stored(packing, box)
    read = scales[stored.scales]
    if packing == "fp8":
        read = read.to(torch.float32)
    return PackedPart(packing, box, values[stored.values], read)
