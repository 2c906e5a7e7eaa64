"""Checksums: equal for equal bytes, different for the faults that happen in transit."""

import torch
from torch import Tensor

from mcore_rl.stream.verify import ROW_WORDS, Checksums


def random_words(num_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (num_rows * ROW_WORDS,), generator=generator)


def test_any_flipped_bit_changes_the_sum_of_its_slice_alone() -> None:
    checksums = Checksums(0, [1, 1, 2])
    words_W = random_words(4)
    expected = checksums(words_W)
    for bit in range(0, 4 * ROW_WORDS * 64, 5):
        changed_W = words_W.clone()
        changed_W.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        differs = (checksums(changed_W) != expected).tolist()
        at = min(2, bit // 64 // ROW_WORDS)
        assert differs == [i == at for i in range(3)], f"bit {bit}"
    assert torch.equal(checksums(words_W.clone()), expected)


def test_exchanged_words_and_pages_change_the_checksum() -> None:
    checksums = Checksums(0, [32])
    words_W = random_words(32)
    for first, second, length in ((3, 40, 1), (0, 512, 512), (512, 1024, 512)):
        swapped_W = words_W.clone()
        swapped_W[first : first + length] = words_W[second : second + length]
        swapped_W[second : second + length] = words_W[first : first + length]
        assert not torch.equal(checksums(swapped_W), checksums(words_W)), (first, second)


def test_runs_of_equal_slices_have_the_sums_of_each_slice_alone() -> None:
    words_W = random_words(9)
    together = Checksums(ROW_WORDS, [1, 1, 3, 3])(words_W)
    alone = [
        Checksums(first * ROW_WORDS, [rows])(words_W)
        for first, rows in ((1, 1), (2, 1), (3, 3), (6, 3))
    ]
    assert torch.equal(together, torch.cat(alone))
