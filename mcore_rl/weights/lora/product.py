"""Adds the product of two factors to a matrix: the only place where W0 + s B A is computed.

Trainer ranks, engines and exports hold different parts of a matrix, and must get the same bits. A
matrix product adds up in an order that depends on its shape and on the library. So the products
here are added up one by one, in the order of the factors' ranks, and each operation is rounded:

    W = round(W0 + s (((b_0 a_0) + b_1 a_1) + b_2 a_2 + ...))        in float32

A sum of 0 leaves W0 as it is, -0 too, so that factors of zeros change no bit of weights that were
decoded from FP8, among which -0 is common. An element has the same bits in any part of the matrix,
and on any device. On the host compiled code does it, if there is a compiler
(device/native/low_rank.c), after it was compared with torch; on a GPU a Triton kernel does.
"""

import ctypes
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mcore_rl.device.gpu_kernels import add_low_rank, has_kernel
from mcore_rl.device.native import load

_log = logging.getLogger(__name__)
_HOST_NUMEL = 1 << 16
"""Elements of W that torch computes at once on a processor: three times as much fits its cache."""
_DEVICE_NUMEL = 1 << 25
_COMPILED = (torch.float32, torch.bfloat16)


@torch.no_grad()
def add_product(weight_RC: Tensor, a_rC: Tensor, b_Rr: Tensor, scale: float) -> None:
    """Add s B A to W in place, as `merge_product` computes it."""
    merge_product(weight_RC, weight_RC, a_rC, b_Rr, scale)


@torch.no_grad()
def merge_product(
    base_RC: Tensor, weight_RC: Tensor, a_rC: Tensor, b_Rr: Tensor, scale: float
) -> None:
    """Write W0 + s B A to W, which may be W0: in float32, rounded once to the dtype of both.

    W0 may be in host memory below a W on a GPU. Memory without compiled code or kernel: float32
    twice for each element computed at once.
    """
    assert base_RC.dtype == weight_RC.dtype, f"{base_RC.dtype} and {weight_RC.dtype}"
    dense = all(t.stride(1) == 1 or t.shape[1] == 1 for t in (base_RC, weight_RC))
    if weight_RC.is_cpu and weight_RC.dtype in _COMPILED and dense:
        library = find_library()
        if library is not None:
            _merge_compiled(library, base_RC, weight_RC, a_rC, b_Rr, scale)
            return
    if base_RC is not weight_RC:
        weight_RC.copy_(base_RC, non_blocking=True)
    if has_kernel(weight_RC):
        add_low_rank(weight_RC, a_rC, b_Rr, scale)
    else:
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
        sum_PC.masked_fill_(sum_PC == 0, -0.0)
        part_PC.copy_(sum_PC.add_(part_PC.float()))


@cache
def find_library() -> Any:
    """Return the compiled code, or None if there is no compiler or its bits are not torch's."""
    library = load("low_rank")
    if library is None:
        return None
    library.add_low_rank.restype = None
    library.block_columns.restype = ctypes.c_int64
    generator = torch.Generator().manual_seed(0)
    for dtype in _COMPILED:
        weight, a, b = (
            torch.randn(shape, generator=generator).to(dtype)
            for shape in ((7, 149), (9, 149), (7, 9))
        )
        weight[0], b[0] = -0.0, 0.0
        expected = weight.clone()
        add_by_torch(expected, a, b, 0.3)
        _merge_compiled(library, weight, weight, a, b, 0.3)
        if not torch.equal(weight.view(torch.uint8), expected.view(torch.uint8)):
            _log.warning("the compiler reorders sums: factors are merged by torch, which is slower")
            return None
    return library


def _merge_compiled(
    library: Any, base_RC: Tensor, weight_RC: Tensor, a_rC: Tensor, b_Rr: Tensor, scale: float
) -> None:
    num_rows, num_columns = weight_RC.shape
    rank = len(a_rC)
    padded_rC = pad(a_rC.float(), (0, -num_columns % library.block_columns()))
    a_in_blocks = padded_rC.view(rank, -1, library.block_columns()).transpose(0, 1).contiguous()
    b_Rr = b_Rr.float().contiguous()
    library.add_low_rank(
        *(
            argument
            for tensor in (weight_RC, base_RC)
            for argument in (
                ctypes.c_void_p(tensor.data_ptr()),
                ctypes.c_int64(tensor.stride(0) * tensor.element_size()),
            )
        ),
        ctypes.c_int64(weight_RC.dtype == torch.bfloat16),
        *(ctypes.c_void_p(factor.data_ptr()) for factor in (a_in_blocks, b_Rr)),
        *map(ctypes.c_int64, (num_rows, num_columns, rank)),
        ctypes.c_float(scale),
    )
