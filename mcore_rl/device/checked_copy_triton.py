"""The Triton kernel of checked_copy_kernel.py, in a module of its own, as Triton wants it."""

# ruff: noqa: ANN001
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["version", "index"])
def checked_copy(
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
    """Move one chunk and add its checksum; arguments are those of `ChunkTable`'s methods."""
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
