"""Checksums: equal for equal bytes, different for what goes wrong in transit."""

import torch

from mcore_rl.stream.verify import Checksum


def test_any_flipped_bit_changes_it() -> None:
    checksum = Checksum(4096)
    words_W = torch.randint(-(2**62), 2**62, (32,))
    expected = checksum(words_W, 7)
    for bit in range(32 * 64):
        changed_W = words_W.clone()
        changed_W.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        assert checksum(changed_W, 7) != expected, f"bit {bit}"
    assert checksum(words_W.clone(), 7) == expected


def test_words_that_trade_places_change_it() -> None:
    checksum = Checksum(4096)
    words_W = torch.arange(1, 65)
    swapped_W = words_W.clone()
    swapped_W[[3, 40]] = words_W[[40, 3]]
    assert checksum(swapped_W, 0) != checksum(words_W, 0)


def test_bytes_found_at_another_place_of_the_buffer_change_it() -> None:
    checksum = Checksum(4096)
    words_W = torch.arange(1, 65)
    assert checksum(words_W, 0) != checksum(words_W, 1)
