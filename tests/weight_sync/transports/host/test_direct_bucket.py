"""Direct buckets: slices are summed where they are, written where they belong, and summed there."""

import shutil

import pytest
import torch
from torch import Tensor

from mcore_rl.tools.doctor.toy_engine import column_cut, make_tensors, row_cut
from mcore_rl.weight_sync.buckets import Bucket, plan_buckets
from mcore_rl.weight_sync.placed_bucket import Holding, find_holdings
from mcore_rl.weight_sync.transports.host.direct import (
    DirectBucket,
    can_be_written,
    count_direct_words,
)
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weights.box import Box, Shard
from mcore_rl.weights.plan.shared_region import Slice

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

Rank = tuple[list[Shard], dict[str, Tensor]]


def held_by(bucket: Bucket, rank: Rank) -> list[Holding]:
    names = {shard.box.name for shard in rank[0]}
    return find_holdings(
        bucket, {name: [s for s in rank[0] if s.box.name == name] for name in names}
    )


def bound(bucket: Bucket, rank: Rank, message_W: Tensor) -> DirectBucket:
    scratch_W = torch.full((bucket.num_words,), 7, dtype=torch.int64)
    return DirectBucket(bucket, scratch_W, held_by(bucket, rank), rank[1], message_W)


def both_ends(bucket: Bucket, source: Rank, target: Rank) -> tuple[DirectBucket, DirectBucket]:
    """Sender and receiver, in one process: targets are addresses in it."""
    message_W = torch.zeros(count_direct_words(bucket), dtype=torch.int64)
    sender = bound(bucket, source, message_W)
    receiver = bound(bucket, target, message_W)
    sender.targets = receiver.own_targets
    return sender, receiver


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [24, 1000, 1 << 20])
def test_values_arrive_exactly_cast_or_not_in_any_number_of_parts(
    dtype: str, bucket_bytes: int
) -> None:
    hf = make_tensors()
    source = row_cut(hf, 0, 1, "float32")
    shards, targets = column_cut(hf, 0, 1, dtype)
    expected = {name: tensor.clone() for name, tensor in targets.items()}
    for tensor in targets.values():
        tensor.fill_(float("nan"))
    slices = [Slice(shard.box, dtype) for shard in shards]
    for bucket in plan_buckets({(0, 0): slices}, 1, bucket_bytes):
        sender, receiver = both_ends(bucket, source, (shards, targets))
        sender.pack(3)
        receiver.place(3)
    assert all(torch.equal(targets[name], expected[name]) for name in expected)


BOX = Box("w", (0, 0), (40, 50))
SHARD = Shard(BOX, "param", 0, (50, 1), "float32")


def one_bucket() -> Bucket:
    (bucket,) = plan_buckets({(0, 0): [Slice(BOX, "float32")]}, 1, 1 << 20)
    return bucket


@pytest.mark.parametrize("width", [50, 70])
def test_a_byte_that_changed_in_the_receivers_tensor_is_refused_by_name(width: int) -> None:
    wide = Shard(BOX, "param", 0, (width, 1), "float32")
    target = torch.zeros(40 * width)
    sender, receiver = both_ends(
        one_bucket(), ([SHARD], {"param": torch.randn(2000)}), ([wide], {"param": target})
    )
    sender.pack(1)
    receiver.place(1)
    target.view(torch.uint8)[4 * width + 3] ^= 1
    with pytest.raises(TransferError, match=r"w \(0, 0\) to \(40, 50\), bound for param, has chec"):
        receiver.place(1)


def test_another_version_is_refused() -> None:
    rank = [SHARD], {"param": torch.randn(2000)}
    sender, receiver = both_ends(one_bucket(), rank, ([SHARD], {"param": torch.zeros(2000)}))
    sender.pack(3)
    with pytest.raises(TransferError, match=r"sent version 3 bucket 0 .* expected version 4"):
        receiver.place(4)


def test_the_message_is_header_and_sums_which_a_relay_passes_on() -> None:
    rank = [SHARD], {"param": torch.randn(2000)}
    sender, receiver = both_ends(one_bucket(), rank, ([SHARD], {"param": torch.zeros(2000)}))
    sender.pack(3)
    assert sender.message_u8.numel() == 8 * 3
    assert receiver.sums_P.tolist() == [sender.message_u8.view(torch.int64)[-1].item()]


@pytest.mark.parametrize(
    ("strides", "dtype", "writable"),
    [
        ((50, 1), "float32", True),
        ((99, 1), "float32", True),
        ((1, 40), "float32", False),
        ((50, 1), "bfloat16", False),
    ],
)
def test_only_rows_of_the_slices_own_dtype_are_written_by_others(
    strides: tuple[int, int], dtype: str, writable: bool
) -> None:
    shard = Shard(BOX, "param", 0, strides, dtype)
    bucket = one_bucket()
    assert can_be_written(bucket, find_holdings(bucket, {"w": [shard]})) == writable
