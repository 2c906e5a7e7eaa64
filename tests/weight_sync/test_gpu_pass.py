"""A bucket in one pass on a GPU, by Triton's interpreter: the bytes and sums that torch gives."""

from tests.support.triton_code import needs_triton, run_with_triton

BEGIN = """
import pytest, torch
from mcore_rl.weights.box import Box, Shard
from mcore_rl.weights.plan.shared_region import Slice
from mcore_rl.weight_sync import placed_bucket
from mcore_rl.weight_sync.buckets import plan_buckets
from mcore_rl.weight_sync.placed_bucket import GpuPass
from mcore_rl.weight_sync.placed_bucket import PlacedBucket, find_holdings
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weight_sync.verify import ROWS, RowSums

placed_bucket.has_kernel = lambda words_W: True


def shards_of(shapes, margin, dtype):
    return {
        f"w{i}": [Shard(box, f"t{i}", margin, (box.shape[1] + margin, 1), dtype)]
        for i, box in enumerate(Box(f"w{i}", (0, 0), s) for i, s in enumerate(shapes))
    }


def tensors_of(shapes, margin, dtype):
    torch.manual_seed(0)
    dtype = getattr(torch, dtype)
    return {f"t{i}": torch.randn(n, m + margin).to(dtype) for i, (n, m) in enumerate(shapes)}


def buckets_of(shapes, dtype, bucket_bytes):
    slices = [Slice(Box(f"w{i}", (0, 0), shape), dtype) for i, shape in enumerate(shapes)]
    return plan_buckets({(0, 0): slices}, 1, bucket_bytes)
"""
EXACT = (
    BEGIN
    + """
SHAPES = [(8, 64), (3, 5), (128, 300), (64, 1024), (2, 30000)]
for margin, source, target, bucket_bytes, num_kernels in [
    (0, "bfloat16", "bfloat16", 1 << 20, 4),  # rows of 5 elements are no whole words
    (4, "bfloat16", "bfloat16", 100_000, 4),
    (3, "bfloat16", "bfloat16", 1 << 20, 0),  # rows begin within a word
    (0, "float32", "bfloat16", 1 << 20, 0),  # torch casts
    (8, "float32", "float32", 100_000, 4),
]:
    sources, targets = tensors_of(SHAPES, margin, source), tensors_of(SHAPES, margin, target)
    for tensor in targets.values():
        tensor.fill_(7)
    moved = set()
    for bucket in buckets_of(SHAPES, target, bucket_bytes):
        words_W = torch.full((bucket.num_words,), -1)
        held = find_holdings(bucket, shards_of(SHAPES, margin, source))
        packed = PlacedBucket(bucket, words_W, held, sources, sums=ROWS)
        packed.pack(3)
        rest = {part[0] for part in packed._gpu_pass.rest}
        moved |= {p.box.name for i, p in enumerate(bucket.pieces) if i not in rest}
        sums = RowSums(bucket.pieces[0].first_word, [p.num_rows for p in bucket.pieces])
        assert torch.equal(packed.sums_P, sums(words_W))
        held = find_holdings(bucket, shards_of(SHAPES, margin, target))
        PlacedBucket(bucket, words_W, held, targets, sums=ROWS).place(3)
    assert len(moved) == num_kernels, (moved, source, target, margin)
    for name, tensor in targets.items():
        assert torch.equal(tensor[:, margin:], sources[name][:, margin:].to(tensor.dtype))
        assert (tensor[:, :margin] == 7).all(), "bytes beside the slice were written"
"""
)
REFUSED = (
    BEGIN
    + """
SHAPES = [(16, 64), (3, 5)]
sources, targets = tensors_of(SHAPES, 0, "bfloat16"), tensors_of(SHAPES, 0, "bfloat16")
(bucket,) = buckets_of(SHAPES, "bfloat16", 1 << 20)
words_W = torch.zeros(bucket.num_words, dtype=torch.int64)
held = find_holdings(bucket, shards_of(SHAPES, 0, "bfloat16"))
PlacedBucket(bucket, words_W, held, sources, sums=ROWS).pack(3)
placed = PlacedBucket(bucket, words_W, held, targets, sums=ROWS)
for tensor in targets.values():
    tensor.fill_(7)
with pytest.raises(TransferError, match="sent version 3 bucket 0 where .* expected version 4"):
    placed.place(4)
assert all((tensor == 7).all() for tensor in targets.values()), "another version was placed"
for piece in bucket.pieces:
    words_W[piece.first_word] ^= 1 << 40
    with pytest.raises(TransferError, match=f"{piece.box.name} .* has checksum"):
        placed.place(3)
    words_W[piece.first_word] ^= 1 << 40
placed.place(3)
"""
)


@needs_triton
def test_values_arrive_exactly_with_torchs_sums() -> None:
    run_with_triton(EXACT, TRITON_INTERPRET="1")


@needs_triton
def test_a_changed_word_is_named_and_another_version_leaves_tensors_alone() -> None:
    run_with_triton(REFUSED, TRITON_INTERPRET="1")
