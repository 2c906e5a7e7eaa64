"""Checksums: equal for equal bytes, different for the faults that happen in transit."""

import pytest
import torch
from torch import Tensor

from mcore_rl.weight_sync.verify import ROW_WORDS, ROWS, XXH3, list_sum_kinds, make_sums

each_kind = pytest.mark.parametrize("kind", [XXH3, ROWS])


def random_words(num_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (num_rows * ROW_WORDS,), generator=generator)


@each_kind
def test_any_flipped_bit_changes_the_sum_of_its_slice_alone(kind: str) -> None:
    checksums = make_sums(kind, 0, [1, 1, 2])
    words_W = random_words(4)
    expected = checksums(words_W)
    for bit in range(0, 4 * ROW_WORDS * 64, 5):
        changed_W = words_W.clone()
        changed_W.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        differs = (checksums(changed_W) != expected).tolist()
        at = min(2, bit // 64 // ROW_WORDS)
        assert differs == [i == at for i in range(3)], f"bit {bit}"
    assert torch.equal(checksums(words_W.clone()), expected)


@each_kind
def test_exchanged_words_and_pages_change_the_checksum(kind: str) -> None:
    checksums = make_sums(kind, 0, [32])
    words_W = random_words(32)
    for first, second, length in ((3, 40, 1), (0, 512, 512), (512, 1024, 512)):
        swapped_W = words_W.clone()
        swapped_W[first : first + length] = words_W[second : second + length]
        swapped_W[second : second + length] = words_W[first : first + length]
        assert not torch.equal(checksums(swapped_W), checksums(words_W)), (first, second)


@each_kind
def test_a_slice_that_was_cut_off_has_another_checksum(kind: str) -> None:
    words_W = random_words(4)
    cut_W = words_W.clone()
    cut_W[-ROW_WORDS // 2 :] = 0
    checksums = make_sums(kind, 0, [4])
    assert not torch.equal(checksums(words_W), checksums(cut_W))


@each_kind
def test_runs_of_equal_slices_have_the_sums_of_each_slice_alone(kind: str) -> None:
    words_W = random_words(9)
    together = make_sums(kind, ROW_WORDS, [1, 1, 3, 3])(words_W)
    alone = [
        make_sums(kind, first * ROW_WORDS, [rows])(words_W)
        for first, rows in ((1, 1), (2, 1), (3, 3), (6, 3))
    ]
    assert torch.equal(together, torch.cat(alone))


def test_xxh3_tells_exchanged_rows_which_rows_cannot() -> None:
    words_W = random_words(4)
    swapped_W = words_W.view(4, ROW_WORDS)[[1, 0, 2, 3]].reshape(-1)
    by_rows = make_sums(ROWS, 0, [4])
    by_xxh3 = make_sums(XXH3, 0, [4])
    assert torch.equal(by_rows(words_W), by_rows(swapped_W))
    assert not torch.equal(by_xxh3(words_W), by_xxh3(swapped_W))


def test_xxh3_has_the_value_that_other_releases_expect() -> None:
    """XXH3 of 576 zero bytes, as xxhash 4.1.0 gives it."""
    zeros_W = torch.zeros(ROW_WORDS, dtype=torch.int64)
    assert int(make_sums(XXH3, 0, [1])(zeros_W)) & (2**64 - 1) == 0x8665B2EBD197DC10


def test_a_rank_on_a_gpu_offers_no_kind_that_only_hosts_compute() -> None:
    assert list_sum_kinds(torch.device("cuda", 0)) == (ROWS,)
    assert list_sum_kinds(torch.device("cpu"))[0] == XXH3
    with pytest.raises(AssertionError, match="no checksums of kind"):
        make_sums(XXH3, 0, [1], torch.device("cuda", 0))
