"""The Triton kernel of fp8_kernel.py, in a module of its own, as Triton wants it."""

# ruff: noqa: ANN001
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false

import triton
import triton.language as tl


@triton.jit
def quantize(
    weights,
    values,
    scales,
    num_rows,
    num_columns,
    weight_row,
    weight_column,
    value_row,
    value_column,
    scale_row,
    scale_column,
    fp8_max,
    min_amax,
    BLOCK: tl.constexpr,
) -> None:
    """Quantize one block; arguments end in the strides and constants of `quantize_blocks`."""
    block_row = tl.program_id(0)
    block_column = tl.program_id(1)
    rows = (block_row * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    columns = (block_column * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    inside = (rows < num_rows) & (columns < num_columns)
    read = weights + rows * weight_row + columns * weight_column
    matrix = tl.load(read, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.max(tl.abs(matrix), axis=1), axis=0)
    num_nans = tl.sum(tl.sum((matrix != matrix).to(tl.int32), axis=1), axis=0)
    # div_rn: Triton's own division is off by a bit, and engines compare scales with torch's.
    scale = tl.div_rn(tl.maximum(amax, min_amax), fp8_max)
    scale = tl.where(num_nans > 0, float("nan"), scale)
    quantized = matrix * tl.div_rn(1.0, scale)
    write = values + rows * value_row + columns * value_column
    tl.store(write, quantized.to(values.dtype.element_ty), mask=inside)
    tl.store(scales + block_row * scale_row + block_column * scale_column, scale)
