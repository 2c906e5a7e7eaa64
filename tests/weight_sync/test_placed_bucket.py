"""Placed buckets: values arrive exactly, in any number of parts; changed bytes are refused."""

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from mcore_rl.tools.doctor.toy_engine import column_cut, make_tensors, row_cut
from mcore_rl.weight_sync.buckets import Bucket, plan_buckets
from mcore_rl.weight_sync.placed_bucket import PlacedBucket, find_holdings
from mcore_rl.weight_sync.transports.host import one_pass
from mcore_rl.weight_sync.verify import ROW_WORDS, ROWS, XXH3
from mcore_rl.weight_sync.waits import TransferError
from mcore_rl.weights.box import Box, Shard
from mcore_rl.weights.plan.shared_region import Slice


def placed_in(
    bucket: Bucket,
    words_W: Tensor,
    shards: list[Shard],
    tensors: dict[str, Tensor],
    sums: str = XXH3,
) -> PlacedBucket:
    by_name: dict[str, list[Shard]] = defaultdict(list)
    for shard in shards:
        by_name[shard.box.name].append(shard)
    return PlacedBucket(bucket, words_W, find_holdings(bucket, by_name), tensors, sums=sums)


def packed(
    bucket: Bucket, shards: list[Shard], tensors: dict[str, Tensor], sums: str = XXH3
) -> Tensor:
    """The bucket's words, packed as version 3."""
    words_W = torch.zeros(bucket.num_words, dtype=torch.int64)
    placed_in(bucket, words_W, shards, tensors, sums).pack(3)
    return words_W


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [24, 1000, 1 << 20])
def test_packed_cast_and_unpacked_values_are_exact(dtype: str, bucket_bytes: int) -> None:
    hf = make_tensors()
    source_shards, sources = row_cut(hf, 0, 1, "float32")
    target_shards, targets = column_cut(hf, 0, 1, dtype)
    expected = {name: tensor.clone() for name, tensor in targets.items()}
    for tensor in targets.values():
        tensor.fill_(float("nan"))
    slices = [Slice(shard.box, dtype) for shard in target_shards]
    for bucket in plan_buckets({(0, 0): slices}, 1, bucket_bytes):
        placed = placed_in(bucket, packed(bucket, source_shards, sources), target_shards, targets)
        placed.place(3)
    assert all(torch.equal(targets[name], expected[name]) for name in expected)


SHARD = Shard(Box("w", (0,), (6,)), "param", 0, (1,), "float32")


def one_bucket(sums: str = XXH3) -> tuple[Bucket, Tensor]:
    (bucket,) = plan_buckets({(0, 0): [Slice(SHARD.box, "float32")]}, 1, 1024)
    return bucket, packed(bucket, [SHARD], {"param": torch.arange(6, dtype=torch.float32)}, sums)


def received(
    bucket: Bucket, words_W: Tensor, tensors: dict[str, Tensor], sums: str = XXH3
) -> PlacedBucket:
    return placed_in(bucket, words_W, [SHARD], tensors, sums)


def test_a_slice_may_lie_in_several_parts_and_land_in_several_tensors() -> None:
    whole = Slice(Box("w", (0, 0), (4, 3)), "float32")
    (bucket,) = plan_buckets({(0, 0): [whole]}, 1, 1024)
    halves = [
        Shard(Box("w", (2 * i, 0), (2 * i + 2, 3)), "fused", 6 * (1 - i), (3, 1), "float32")
        for i in range(2)
    ]
    words_W = packed(bucket, halves, {"fused": torch.arange(12, dtype=torch.float32)})
    twice = [Shard(whole.box, name, 0, (3, 1), "float32") for name in ("embedding", "head")]
    tensors = {name: torch.zeros(12) for name in ("embedding", "head")}
    placed = placed_in(bucket, words_W, twice, tensors)
    placed.place(3)
    assert tensors["head"].tolist() == tensors["embedding"].tolist() == [*range(6, 12), *range(6)]
    with pytest.raises(AssertionError, match="only 6 elements"):
        placed_in(bucket, words_W, halves[:1], tensors)


def test_a_bucket_may_be_packed_and_verified_in_other_memory_than_it_travels_in() -> None:
    bucket, expected_W = one_bucket()
    message_W = torch.full_like(expected_W, 7)
    scratch_W = torch.full_like(expected_W, 7)
    held = find_holdings(bucket, {"w": [SHARD]})
    values = torch.arange(6, dtype=torch.float32)
    received = torch.zeros(6)
    sent = PlacedBucket(bucket, scratch_W, held, {"param": values}, message_W, XXH3)
    sent.pack(3)
    assert sent.message_u8.data_ptr() == message_W.data_ptr()
    assert torch.equal(message_W.view(-1, ROW_WORDS)[1], expected_W.view(-1, ROW_WORDS)[1])
    scratch_W.fill_(7)
    placed = PlacedBucket(bucket, scratch_W, held, {"param": received}, message_W, XXH3)
    placed.place(3)
    assert torch.equal(received, values)
    message_W[-1] ^= 1
    with pytest.raises(TransferError, match="has checksum"):
        placed.place(3)


def test_a_relay_packs_the_checksums_that_its_buckets_came_with() -> None:
    bucket, words_W = one_bucket()
    arrived = received(bucket, words_W, {"param": torch.zeros(6)})
    sums_P = arrived.sums_P
    forwarded_W = torch.zeros_like(words_W)
    spoiled = {"param": torch.arange(6, dtype=torch.float32) + 1}
    placed_in(bucket, forwarded_W, [SHARD], spoiled).pack(3, sums_P)
    with pytest.raises(TransferError, match="has checksum"):
        received(bucket, forwarded_W, {"param": torch.zeros(6)}).place(3)


@pytest.mark.parametrize("sums", [XXH3, ROWS])
def test_a_changed_byte_is_refused_by_name(sums: str) -> None:
    bucket, words_W = one_bucket(sums)
    words_W.view(torch.uint8)[bucket.pieces[0].first_word * 8 + 5] ^= 1
    with pytest.raises(
        TransferError, match=r"w \(0,\) to \(6,\), bound for param, has checksum .* engine rank 0"
    ):
        received(bucket, words_W, {"param": torch.zeros(6)}, sums).place(3)


def test_a_bucket_of_another_version_is_refused_untouched() -> None:
    bucket, words_W = one_bucket()
    target = torch.zeros(6)
    with pytest.raises(
        TransferError, match=r"sent version 3 bucket 0 .* expected version 4 bucket 0"
    ):
        received(bucket, words_W, {"param": target}).place(4)
    assert not target.any()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """From its call on, this process finds no compiler."""

    def hide() -> None:
        monkeypatch.setenv("CC", "none")
        one_pass.find_library.cache_clear()
        assert one_pass.find_library() is None

    yield hide
    one_pass.find_library.cache_clear()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_ranks_with_and_without_a_compiler_send_the_same_words(
    no_compiler: Callable[[], None],
) -> None:
    compiled = one_bucket()
    no_compiler()
    plain = one_bucket()
    assert torch.equal(plain[1], compiled[1])
    target = torch.zeros(6)
    received(*compiled, {"param": target}).place(3)
    assert target.tolist() == [*range(6)]
    compiled[1].view(torch.uint8)[-5] ^= 1
    with pytest.raises(TransferError, match="has checksum"):
        received(*compiled, {"param": torch.zeros(6)}).place(3)


def test_a_message_carries_no_more_than_header_and_slices_in_whole_rows() -> None:
    bucket, words_W = one_bucket()
    assert (
        received(bucket, words_W, {"param": torch.zeros(6)}).message_u8.numel() == 2 * ROW_WORDS * 8
    )
