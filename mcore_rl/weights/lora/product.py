"""Adds the product of two factors to a matrix: the only place where W0 + s B A is computed.

Trainer ranks, engines and exports hold different parts of a matrix, and must get the same bits. A
matrix product adds up in an order that depends on its shape and on the library. So the products
here are added up one by one, in the order of the factors' ranks, and each operation is rounded:

    W = round(W0 + s (((b_0 a_0) + b_1 a_1) + b_2 a_2 + ...))        in float32

An element has the same bits in any part of the matrix and on any device. On a processor this takes
about as long as a matrix product, because a block of rows stays in its cache.
"""

import torch
from torch import Tensor

_HOST_NUMEL = 1 << 16
"""Elements of W that are computed at once on a processor: three times as much fits its cache."""
_DEVICE_NUMEL = 1 << 25


@torch.no_grad()
def add_product(weight_RC: Tensor, a_rC: Tensor, b_Rr: Tensor, scale: float) -> None:
    """Add s B A to W in place, in float32, rounded once to the dtype of W.

    Memory: float32 twice for each element that is computed at once.
    """
    a_rC, b_Rr = a_rC.float(), b_Rr.float()
    num_rows, num_columns = weight_RC.shape
    step = max(1, (_HOST_NUMEL if weight_RC.is_cpu else _DEVICE_NUMEL) // num_columns)
    for first in range(0, num_rows, step):
        part_PC, b_Pr = weight_RC[first : first + step], b_Rr[first : first + step]
        sum_PC = b_Pr[:, :1] * a_rC[:1]
        term_PC = torch.empty_like(sum_PC)
        for k in range(1, len(a_rC)):
            torch.mul(b_Pr[:, k : k + 1], a_rC[k : k + 1], out=term_PC)
            sum_PC += term_PC
        sum_PC *= scale
        part_PC.copy_(sum_PC.add_(part_PC.float()))
