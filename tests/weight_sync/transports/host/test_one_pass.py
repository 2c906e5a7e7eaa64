"""Compiled moves of slices: the bytes and checksums that torch and xxhash give, in any layout."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from xxhash import xxh3_64_intdigest

from mcore_rl.weight_sync.buckets import HEADER_WORDS, BucketPiece
from mcore_rl.weight_sync.transports.host.one_pass import OnePass, Part, are_rows
from mcore_rl.weight_sync.verify import ROW_WORDS, XXH3, make_sums
from mcore_rl.weights.box import Box

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def lay_out(sizes: list[int], dtype: str = "uint8") -> tuple[Tensor, list[BucketPiece]]:
    """A bucket of sevens, and pieces of these numbers of elements."""
    pieces = []
    first_word = ROW_WORDS
    row_elements = ROW_WORDS * 8 // getattr(torch, dtype).itemsize
    for size in sizes:
        num_rows = -(-size // row_elements)
        pieces.append(BucketPiece(Box("w", (0,), (size,)), dtype, first_word, num_rows))
        first_word += num_rows * ROW_WORDS
    return torch.full((first_word,), 0x0707070707070707), pieces


def bound(words_W: Tensor, pieces: list[BucketPiece], parts: list[Part]) -> OnePass:
    made = OnePass.maybe_make(words_W, pieces, parts)
    assert made is not None, "there is a compiler"
    return made


def sums_in(words_W: Tensor, pieces: list[BucketPiece]) -> list[int]:
    return words_W[HEADER_WORDS : HEADER_WORDS + len(pieces)].tolist()


def expected_sums(words_W: Tensor, pieces: list[BucketPiece]) -> list[int]:
    sums = make_sums(XXH3, pieces[0].first_word, [piece.num_rows for piece in pieces])
    return sums(words_W).tolist()


SIZES = st.one_of(st.integers(1, 5000), st.integers(1, 200).map(lambda n: 1024 * n + 576))


@settings(max_examples=60)
@given(sizes=st.lists(SIZES, min_size=1, max_size=5), skew=st.integers(0, 70))
def test_dense_slices_of_any_length_arrive_with_the_sums_of_xxhash(
    sizes: list[int], skew: int
) -> None:
    words_W, pieces = lay_out(sizes)
    values = torch.randint(0, 256, (skew + sum(sizes),), dtype=torch.uint8)
    received = torch.zeros_like(values)
    ends = torch.tensor(sizes).cumsum(0).tolist()
    spans = [slice(skew + end - size, skew + end) for size, end in zip(sizes, ends, strict=True)]

    def parts_of(own: Tensor) -> list[Part]:
        return [
            (i, own[span], piece.values(words_W))
            for i, (span, piece) in enumerate(zip(spans, pieces, strict=True))
        ]

    bound(words_W, pieces, parts_of(values)).pack(with_sums=True)
    for span, piece in zip(spans, pieces, strict=True):
        data = words_W[piece.first_word :][: piece.num_rows * ROW_WORDS].view(torch.uint8)
        assert torch.equal(data[: piece.box.numel], values[span])
        assert not data[piece.box.numel :].any(), "the padding is not zero"
    assert sums_in(words_W, pieces) == expected_sums(words_W, pieces)
    sums_P = bound(words_W, pieces, parts_of(received)).place()
    assert sums_P.tolist() == sums_in(words_W, pieces)
    assert torch.equal(received[skew:], values[skew:]) and not received[:skew].any()


def test_the_sum_is_xxhashs_own() -> None:
    words_W, pieces = lay_out([100_000])
    values = torch.randint(0, 256, (100_000,), dtype=torch.uint8)
    bound(words_W, pieces, [(0, values, pieces[0].values(words_W))]).pack(with_sums=True)
    data = words_W[ROW_WORDS:].numpy().data.cast("B")
    assert sums_in(words_W, pieces)[0] & (2**64 - 1) == xxh3_64_intdigest(data)


def test_rows_apart_and_slices_in_parts_are_moved_with_their_sums() -> None:
    words_W, pieces = lay_out([4000, 600], "float32")
    matrix = torch.randn(80, 100)
    first = pieces[0].values(words_W).view(80, 50)
    second = pieces[1].values(words_W)
    halves = torch.randn(2, 300)
    parts = [
        (0, matrix[:, 50:], first),
        (1, halves[1], second[:300]),
        (1, halves[0], second[300:]),
    ]
    sender = bound(words_W, pieces, parts)
    sender.pack(with_sums=True)
    assert sender.rest == []
    assert torch.equal(first, matrix[:, 50:])
    assert torch.equal(second, torch.cat([halves[1], halves[0]]))
    assert sums_in(words_W, pieces) == expected_sums(words_W, pieces)
    target = torch.zeros(80, 120)
    placed = bound(words_W, pieces, [(0, target[:, 7:57], first)])
    assert placed.place().tolist() == sums_in(words_W, pieces)
    assert torch.equal(target[:, 7:57], matrix[:, 50:])
    assert not target[:, :7].any() and not target[:, 57:].any()


def test_what_is_cast_or_not_in_rows_is_left_to_others_and_summed() -> None:
    words_W, pieces = lay_out([600, 600, 8], "float32")
    values = torch.randn(600)
    first, second, third = (piece.values(words_W) for piece in pieces)
    column = torch.randn(600, 2)
    cube = torch.randn(3, 4, 5)[:2, :2, :2]
    parts = [(0, values.double(), first), (1, column[:, 0], second), (2, cube, third.view(2, 2, 2))]
    sender = bound(words_W, pieces, parts)
    assert [index for index, _, _ in sender.rest] == [0, 2], "a column is 600 rows of a number"
    for _, own, in_bucket in sender.rest:
        in_bucket.copy_(own)
    sender.pack(with_sums=True)
    assert torch.equal(second, column[:, 0])
    assert sums_in(words_W, pieces) == expected_sums(words_W, pieces)


def test_sums_that_a_bucket_came_with_stay_in_it() -> None:
    words_W, pieces = lay_out([600])
    values = torch.ones(600, dtype=torch.uint8)
    bound(words_W, pieces, [(0, values, pieces[0].values(words_W))]).pack(with_sums=False)
    assert sums_in(words_W, pieces) == [0x0707070707070707]
    assert torch.equal(pieces[0].values(words_W), values)


def test_the_memory_of_own_tensors_is_kept() -> None:
    words_W, pieces = lay_out([1 << 16])
    own = torch.full((1 << 16,), 5, dtype=torch.uint8)
    sender = bound(words_W, pieces, [(0, own, pieces[0].values(words_W))])
    del own
    for _ in range(8):
        torch.zeros(1 << 16, dtype=torch.uint8)
    sender.pack(with_sums=True)
    assert pieces[0].values(words_W).tolist() == [5] * (1 << 16)


@settings(max_examples=60)
@given(
    sizes=st.lists(SIZES, min_size=1, max_size=5),
    skew=st.integers(0, 70),
    gap=st.sampled_from([0, 1, 64]),
)
def test_slices_written_elsewhere_have_the_sums_of_packed_ones(
    sizes: list[int], skew: int, gap: int
) -> None:
    words_W, pieces = lay_out(sizes)
    scratch_W = torch.full_like(words_W, 0x0707070707070707)
    values = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    room = torch.zeros(skew + sum(sizes) + gap * len(sizes), dtype=torch.uint8)
    places = []
    at = skew
    for size in sizes:
        places.append(room[at : at + size])
        at += size + gap

    def parts_of(own: list[Tensor]) -> list[Part]:
        views = (piece.values(scratch_W) for piece in pieces)
        return [(i, part, view) for i, (part, view) in enumerate(zip(own, views, strict=True))]

    packed = [(i, value, pieces[i].values(words_W)) for i, value in enumerate(values)]
    bound(words_W, pieces, packed).pack(with_sums=True)
    receiver = bound(scratch_W, pieces, parts_of(places))
    written = bound(scratch_W, pieces, parts_of(values)).write(receiver.targets)
    assert written.tolist() == sums_in(words_W, pieces) == receiver.sum_own().tolist()
    assert all(map(torch.equal, places, values))
    assert int(room.count_nonzero()) == sum(int(value.count_nonzero()) for value in values)


def test_rows_apart_at_both_ends_and_cast_slices_are_written_with_their_sums() -> None:
    words_W, pieces = lay_out([4000, 600], "float32")
    first = pieces[0].values(words_W).view(2, 40, 50)
    second = pieces[1].values(words_W)
    source = torch.randn(2, 90, 100)[:, 5:45, 50:]
    target = torch.zeros(3, 41, 60)
    column = torch.zeros(600, 2)
    cast = torch.randn(600, dtype=torch.float64)
    sender = bound(words_W, pieces, [(0, source, first), (1, cast, second)])
    places = [(0, target[1:, :40, 7:57], first), (1, column[:, 1], second)]
    receiver = bound(words_W, pieces, places)
    assert sender.rest == [(1, cast, second)]
    second.copy_(cast)
    written = sender.write(receiver.targets).tolist()
    assert torch.equal(target[1:, :40, 7:57], source)
    assert torch.equal(column[:, 1], cast.float())
    assert int(target.count_nonzero()) == int(source.count_nonzero())
    assert not column[:, 0].any()
    assert receiver.sum_own().tolist() == written


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((4, 5), (5, 1), True),
        ((4, 5), (9, 1), True),
        ((600,), (2,), True),
        ((4, 5), (1, 4), False),
        ((2, 4, 16), (200, 20, 1), True),
        ((2, 4, 15), (200, 20, 1), False),
    ],
)
def test_parts_of_many_short_rows_are_left_to_torch(
    shape: tuple[int, ...], strides: tuple[int, ...], expected: bool
) -> None:
    dense = torch.empty(shape, device="meta").stride()
    assert are_rows(shape, strides, dense, 4) == expected
