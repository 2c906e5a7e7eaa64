"""The Triton kernels that gpu_kernels.py runs.

They are in a module of their own because Triton is imported only where a kernel runs.
"""

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


@triton.jit(do_not_specialize=["version", "index"])
def copy_and_sum(
    chunks,
    words,
    sums,
    multipliers,
    version,
    index,
    PLACING: tl.constexpr,
    COPYING: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    FIELDS: tl.constexpr,
    MOST_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Move one chunk of several rows and add its checksum; arguments as in `ChunkTable._run`."""
    chunk = chunks + tl.program_id(0) * FIELDS
    own = tl.load(chunk).to(tl.pointer_type(tl.int64))
    own_stride = tl.load(chunk + 1)
    at = tl.load(chunk + 2)
    stride = tl.load(chunk + 3)
    row_words = tl.load(chunk + 4).to(tl.int32)
    num_words = tl.load(chunk + 5).to(tl.int32)
    if PLACING:
        is_expected = (tl.load(words) == version) & (tl.load(words + 1) == index)
        num_words = tl.where(is_expected, num_words, 0)
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for block in tl.static_range(MOST_WORDS // BLOCK):
        i = block * BLOCK + tl.arange(0, BLOCK)
        inside = i < num_words
        row = i // row_words
        column = i - row * row_words
        in_bucket = at + row * stride + column
        in_own = own + row * own_stride + column
        if COPYING and not PLACING:
            word = tl.load(in_own, mask=inside, other=0)
            tl.store(words + in_bucket, word, mask=inside)
        else:
            word = tl.load(words + in_bucket, mask=inside, other=0)
            if COPYING:
                tl.store(in_own, word, mask=inside)
        total += word * tl.load(multipliers + (in_bucket.to(tl.int32) % ROW_WORDS))
    tl.atomic_add(sums + tl.load(chunk + 6), tl.sum(total, axis=0))


@triton.jit
def _move_pairs(
    source,
    target,
    num_words,
    first,
    multipliers,
    COPYING: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """Copy an even number of words between multiples of 16 bytes; return their checksum.

    A step has PARTS * LANES words, a whole number of rows of the checksum. So a multiplier is
    loaded once for all steps, and the compiler sees that accesses have 16 bytes. `first` is the
    place of the first word in a row of the checksum. Without COPYING the words are only summed.
    Callers state what is a multiple of what: Triton loses such a hint on an argument.
    """
    start = tl.arange(0, STEPS)[:, None] * (PARTS * LANES)
    total = tl.zeros((STEPS, LANES), dtype=tl.int64)
    for part in tl.static_range(PARTS):
        lane = part * LANES + tl.arange(0, LANES)
        i = start + lane[None, :]
        inside = i < num_words
        word = tl.load(source + i, mask=inside, other=0)
        if COPYING:
            tl.store(target + i, word, mask=inside)
        total += word * tl.load(multipliers + (first + lane) % ROW_WORDS)[None, :]
    return tl.sum(tl.sum(total, axis=1), axis=0)


@triton.jit(do_not_specialize=["version", "index"])
def copy_and_sum_dense(
    chunks,
    words,
    sums,
    multipliers,
    version,
    index,
    PLACING: tl.constexpr,
    COPYING: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    FIELDS: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Move one chunk whose words lie side by side in pairs, and add its checksum."""
    chunk = chunks + tl.program_id(0) * FIELDS
    own = tl.multiple_of(tl.load(chunk).to(tl.pointer_type(tl.int64)), 16)
    at = tl.multiple_of(tl.load(chunk + 2), 2)
    num_words = tl.load(chunk + 5).to(tl.int32)
    if PLACING:
        is_expected = (tl.load(words) == version) & (tl.load(words + 1) == index)
        num_words = tl.where(is_expected, num_words, 0)
    num_words = tl.multiple_of(num_words, 2)
    bucket = words + at
    if COPYING and not PLACING:
        source, target = own, bucket
    else:
        source, target = bucket, own
    first = (at % ROW_WORDS).to(tl.int32)
    total = _move_pairs(
        source, target, num_words, first, multipliers, COPYING, ROW_WORDS, STEPS, LANES, PARTS
    )
    tl.atomic_add(sums + tl.load(chunk + 6), total)


@triton.jit
def sum_rows(
    logits,
    columns,
    sums,
    num_rows,
    num_real,
    row_stride,
    temperature,
    SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Read a row of logits once; arguments are those of `row_softmax.sum_rows`."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * row_stride
    peak = -1e30
    total = 0.0
    weighted = 0.0
    squares = 0.0
    for first in range(0, num_real, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < num_real
        values = tl.load(start + column, mask=inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(values, axis=0))
        shift = (peak - higher) / temperature
        scale = tl.exp(shift)
        x = tl.where(inside, (values - higher) / temperature, 0.0)
        exp = tl.where(inside, tl.exp(x), 0.0)
        weighted = scale * (weighted + shift * total) + tl.sum(exp * x, axis=0)
        total = scale * total + tl.sum(exp, axis=0)
        if SQUARES:
            squares = scale * scale * squares + tl.sum(exp * exp, axis=0)
        peak = higher
    own = tl.load(columns + row)
    target = tl.load(start + tl.maximum(own, 0)).to(tl.float32)
    tl.store(sums + row, peak)
    tl.store(sums + num_rows + row, tl.where(own < 0, peak, target))
    tl.store(sums + 2 * num_rows + row, total)
    tl.store(sums + 3 * num_rows + row, weighted)
    if SQUARES:
        tl.store(sums + 4 * num_rows + row, squares)


@triton.jit
def differentiate_rows(
    logits,
    grads,
    columns,
    peaks,
    log_totals,
    entropies,
    grads_logprob,
    grads_entropy,
    num_columns,
    num_real,
    row_stride,
    temperature,
    BLOCK: tl.constexpr,
) -> None:
    """Write one block of a row's gradient; arguments as in `row_softmax.differentiate_rows`."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_real
    start = row.to(tl.int64)
    values = tl.load(logits + start * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    log_p = (values - tl.load(peaks + row)) / temperature - tl.load(log_totals + row)
    p = tl.where(inside, tl.exp(log_p), 0.0)
    grad_logprob = tl.load(grads_logprob + row)
    factor = tl.load(grads_entropy + row) * (log_p + tl.load(entropies + row))
    grad = -p * (tl.where(inside, factor, 0.0) + grad_logprob)
    grad += tl.where(column == tl.load(columns + row), grad_logprob, 0.0)
    write = grads + start * num_columns + column
    tl.store(write, (grad / temperature).to(grads.dtype.element_ty), mask=column < num_columns)


@triton.jit
def pull_rows(
    chunks,
    bases,
    sums,
    multipliers,
    COPYING: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    FIELDS: tl.constexpr,
    MOST_UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
) -> None:
    """Copy one chunk of several rows from the source to its place and add its checksum.

    Arguments as in `PullTable.run`. Units are words or single bytes. A byte counts in the checksum
    as the word does that has only this byte.
    """
    chunk = chunks + tl.program_id(0) * FIELDS
    source_byte = tl.load(bases + tl.load(chunk)) + tl.load(chunk + 1)
    if UNIT_BYTES == 8:
        source = source_byte.to(tl.pointer_type(tl.int64))
        target = tl.load(chunk + 3).to(tl.pointer_type(tl.int64))
    else:
        source = source_byte.to(tl.pointer_type(tl.uint8))
        target = tl.load(chunk + 3).to(tl.pointer_type(tl.uint8))
    source_stride = tl.load(chunk + 2)
    target_stride = tl.load(chunk + 4)
    at = tl.load(chunk + 5)
    stride = tl.load(chunk + 6)
    row_units = tl.load(chunk + 7).to(tl.int32)
    num_units = tl.load(chunk + 8).to(tl.int32)
    total = tl.zeros((BLOCK,), dtype=tl.int64)
    for block in tl.static_range(MOST_UNITS // BLOCK):
        i = block * BLOCK + tl.arange(0, BLOCK)
        inside = i < num_units
        row = i // row_units
        column = i - row * row_units
        unit = tl.load(source + row * source_stride + column, mask=inside, other=0)
        if COPYING:
            tl.store(target + row * target_stride + column, unit, mask=inside)
        place = at + row * stride + column
        if UNIT_BYTES == 8:
            word = unit
        else:
            word = unit.to(tl.int64) << (8 * (place % 8))
            place = place // 8
        total += word * tl.load(multipliers + place % ROW_WORDS)
    tl.atomic_add(sums + tl.load(chunk + 9), tl.sum(total, axis=0))


@triton.jit
def pull_dense(
    chunks,
    bases,
    sums,
    multipliers,
    COPYING: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    FIELDS: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Copy one chunk whose words lie side by side in pairs, and add its checksum."""
    chunk = chunks + tl.program_id(0) * FIELDS
    source_byte = tl.load(bases + tl.load(chunk)) + tl.load(chunk + 1)
    source = tl.multiple_of(source_byte.to(tl.pointer_type(tl.int64)), 16)
    target = tl.multiple_of(tl.load(chunk + 3).to(tl.pointer_type(tl.int64)), 16)
    first = (tl.load(chunk + 5) % ROW_WORDS).to(tl.int32)
    num_words = tl.multiple_of(tl.load(chunk + 8).to(tl.int32), 2)
    total = _move_pairs(
        source, target, num_words, first, multipliers, COPYING, ROW_WORDS, STEPS, LANES, PARTS
    )
    tl.atomic_add(sums + tl.load(chunk + 9), total)


@triton.jit
def add_low_rank(
    weight,
    first,
    second,
    num_rows,
    num_columns,
    rank,
    weight_row,
    weight_column,
    first_row,
    first_column,
    second_row,
    second_column,
    scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Add s B A to a tile of the weight; arguments as in gpu_kernels.add_low_rank.

    Compiled without fused multiply-add, so that each operation is rounded for itself. A sum of 0
    leaves the weight as it is, -0 too.
    """
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    has_row = rows < num_rows
    has_column = columns < num_columns
    b = second + rows * second_row
    a = first + columns * first_column
    b_value = tl.load(b, mask=has_row, other=0.0).to(tl.float32)
    a_value = tl.load(a, mask=has_column, other=0.0).to(tl.float32)
    total = b_value[:, None] * a_value[None, :]
    for k in range(1, rank):
        b_value = tl.load(b + k * second_column, mask=has_row, other=0.0).to(tl.float32)
        a_value = tl.load(a + k * first_row, mask=has_column, other=0.0).to(tl.float32)
        total = total + b_value[:, None] * a_value[None, :]
    total = total * scale
    place = weight + rows[:, None] * weight_row + columns[None, :] * weight_column
    inside = has_row[:, None] & has_column[None, :]
    before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    after = tl.where(total == 0.0, before, total + before)
    tl.store(place, after.to(weight.dtype.element_ty), mask=inside)
