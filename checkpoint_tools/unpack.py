"""Computes the elements that quantized values and scales encode, band by band in order.

Peak memory: `Packed.held_bytes` and three bands.
"""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from checkpoint_tools.assembly import whole
from checkpoint_tools.cast import view_bytes
from checkpoint_tools.packed import MXFP4_GROUP, MXFP4_GROUP_BYTES, Packed
from checkpoint_tools.reader import Band, Reader, bands
from checkpoint_tools.stored import DTYPE_BYTES, Chunk

_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
"""The value of every byte. A lookup takes a sixth of the time of torch's conversion."""
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_EXPONENT_BIAS = 127
_LARGEST_BAND = 1 << 18
"""Number of elements whose intermediate values stay in the processor's cache."""


def unpack_tensor(packed: Packed, reader: Reader, band_bytes: int) -> Iterator[memoryview]:
    """Yield a tensor's elements as bytes, multiplied in float32 and rounded once.

    Each stored byte is read once.
    """
    band = min(_LARGEST_BAND, band_bytes // 4)
    unpack = _decode_fp8 if packed.format == "fp8" else _decode_mxfp4
    return unpack(packed, reader, band)


def _decode_fp8(packed: Packed, reader: Reader, band_len: int) -> Iterator[memoryview]:
    """Yield bands of whole rows, at least one."""
    block_rows, block_columns = packed.block
    num_columns = packed.shape[1]
    scales_nk = _read(reader, packed.scales, 0, prod(packed.scales.shape))
    scales_nk = scales_nk.view(getattr(torch, packed.scales.dtype)).to(torch.float32)
    scales_nk = scales_nk.view(packed.scales.shape)
    for band in bands(whole(packed.values), band_len):
        bytes_RK = _read(reader, packed.values, band.start, band.stop)
        values_RK = _E4M3.index_select(0, bytes_RK.to(torch.int32)).view(-1, num_columns)
        first = band.start // num_columns
        last = band.stop // num_columns
        for block in range(first // block_rows, -(-last // block_rows)):
            start = max(first, block * block_rows)
            stop = min(last, (block + 1) * block_rows)
            factors_K = scales_nk[block].repeat_interleave(block_columns)[:num_columns]
            values_RK[start - first : stop - first] *= factors_K
        yield view_bytes(values_RK.to(getattr(torch, packed.dtype)))


def _decode_mxfp4(packed: Packed, reader: Reader, band_len: int) -> Iterator[memoryview]:
    """Yield bands of some groups of all rows of an expert, whose rows become columns.

    The products of all 4096 pairs of scale and 4-bit value are computed beforehand.
    """
    num_experts, num_rows, num_groups, _ = packed.values.shape
    exponents = torch.arange(256, dtype=torch.int32)[:, None] - _EXPONENT_BIAS
    values = torch.cat([_E2M1, -_E2M1]).expand(256, 16)
    table = torch.ldexp(values, exponents).to(getattr(torch, packed.dtype)).view(-1)
    step = max(1, band_len // (MXFP4_GROUP * num_rows))
    scaled = num_rows * num_groups
    for expert in range(num_experts):
        start = expert * scaled
        size = scaled * MXFP4_GROUP_BYTES
        values_NGB = _read(reader, packed.values, expert * size, (expert + 1) * size).view(
            num_rows, num_groups, MXFP4_GROUP_BYTES
        )
        scales_NG = _read(reader, packed.scales, start, start + scaled).view(num_rows, num_groups)
        for first in range(0, num_groups, step):
            groups = slice(first, min(first + step, num_groups))
            bytes_CN = values_NGB[:, groups].reshape(num_rows, -1).t().contiguous()
            bytes_GBN = bytes_CN.view(-1, MXFP4_GROUP_BYTES, num_rows)
            index_GBHN = torch.stack([bytes_GBN & 15, bytes_GBN >> 4], dim=2).to(torch.int32)
            index_GBHN += (scales_NG[:, groups].t().to(torch.int32) << 4)[:, None, None]
            yield view_bytes(table.index_select(0, index_GBHN.view(-1)))


def _read(reader: Reader, chunk: Chunk, start: int, stop: int) -> Tensor:
    """Read the bytes of a chunk's elements [start, stop)."""
    out = torch.empty((stop - start) * DTYPE_BYTES[chunk.dtype], dtype=torch.uint8)
    made = whole(chunk)
    reader.fill(made, Band(start, stop, made.pieces), view_bytes(out))
    return out
