"""Adds the product of two factors to a matrix: the only place where W0 + s B A is computed.

Trainer ranks, engines and exports hold different parts of a matrix, and must get the same bits. A
matrix product adds up in an order that depends on its shape and on the library. So the products
here are added up one by one, in the order of the factors' ranks, and each operation is rounded:

    W = round(W0 + s (((b_0 a_0) + b_1 a_1) + b_2 a_2 + ...))        in float32

An element has the same bits in any part of the matrix, and on any device. On the host compiled code
does it, if there is a compiler (device/native/low_rank.c), after it was compared with torch; on a
GPU a Triton kernel does.
"""

import ctypes
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mcore_rl.device.gpu_kernels import add_low_rank, has_kernel
from mcore_rl.device.native import load

_log = logging.getLogger(__name__)
_HOST_NUMEL = 1 << 16
"""Elements of W that torch computes at once on a processor: three times as much fits its cache."""
_DEVICE_NUMEL = 1 << 25
_COMPILED = (torch.float32, torch.bfloat16)


@torch.no_grad()
def add_product(weight_RC: Tensor, a_rC: Tensor, b_Rr: Tensor, scale: float) -> None:
    """Add s B A to W in place, in float32, rounded once to the dtype of W.

    Memory without compiled code or kernel: float32 twice for each element computed at once.
    """
    if has_kernel(weight_RC):
        add_low_rank(weight_RC, a_rC, b_Rr, scale)
        return
    is_dense = weight_RC.stride(1) == 1 or weight_RC.shape[1] == 1
    if weight_RC.is_cpu and weight_RC.dtype in _COMPILED and is_dense:
        library = find_library()
        if library is not None:
            _add_compiled(library, weight_RC, a_rC, b_Rr, scale)
            return
    add_by_torch(weight_RC, a_rC, b_Rr, scale)


def add_by_torch(weight_RC: Tensor, a_rC: Tensor, b_Rr: Tensor, scale: float) -> None:
    """Do what add_product does on any device, for any dtype and strides."""
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


@cache
def find_library() -> Any:
    """Return the compiled code, or None if there is no compiler or its bits are not torch's."""
    library = load("low_rank")
    if library is None:
        return None
    library.add_low_rank.restype = None
    generator = torch.Generator().manual_seed(0)
    for dtype in _COMPILED:
        weight, a, b = (
            torch.randn(shape, generator=generator).to(dtype)
            for shape in ((7, 149), (9, 149), (7, 9))
        )
        expected = weight.clone()
        add_by_torch(expected, a, b, 0.3)
        _add_compiled(library, weight, a, b, 0.3)
        if not torch.equal(weight, expected):
            _log.warning("the compiler reorders sums: factors are merged by torch, which is slower")
            return None
    return library


def _add_compiled(
    library: Any, weight_RC: Tensor, a_rC: Tensor, b_Rr: Tensor, scale: float
) -> None:
    a_rC, b_Rr = a_rC.float().contiguous(), b_Rr.float().contiguous()
    num_rows, num_columns = weight_RC.shape
    numbers = num_rows, num_columns, len(a_rC)
    library.add_low_rank(
        ctypes.c_void_p(weight_RC.data_ptr()),
        ctypes.c_int64(weight_RC.stride(0) * weight_RC.element_size()),
        ctypes.c_int64(weight_RC.dtype == torch.bfloat16),
        *(ctypes.c_void_p(factor.data_ptr()) for factor in (a_rC, b_Rr)),
        *map(ctypes.c_int64, numbers),
        ctypes.c_float(scale),
    )
