"""Copies of many tensors at once, of any dtypes and strides."""

import pytest
import torch

from mcore_rl.weight_sync.placed_bucket import Copies


def test_pairs_of_all_kinds_are_copied_both_ways() -> None:
    matrix = torch.arange(24.0).view(4, 6)
    lefts = [matrix[:2], matrix[2:, 1:3], torch.arange(5), matrix.T[5:], torch.full((3,), 2.5)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.float32, torch.bfloat16]
    rights = [
        torch.zeros(left.shape, dtype=dtype) for left, dtype in zip(lefts, dtypes, strict=True)
    ]
    expected = [left.clone() for left in lefts]
    copies = Copies(zip(lefts, rights, strict=True))
    copies.copy_right()
    assert all(
        torch.equal(right, left.to(right.dtype)) for left, right in zip(lefts, rights, strict=True)
    )
    for left in lefts:
        left.zero_()
    copies.copy_left()
    assert all(torch.equal(left, value) for left, value in zip(lefts, expected, strict=True))
    Copies([]).copy_right()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_large_pairs_are_copied_byte_for_byte_among_small_ones(dtype: torch.dtype) -> None:
    """Above the size from which a pair of equal bytes is copied by itself; a parameter is one."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(700, 1000), (3, 5), (1, 600_000)]
    lefts = [torch.randn(s, generator=generator).to(dtype) for s in shapes]
    lefts[0] = torch.nn.Parameter(lefts[0], requires_grad=dtype == torch.float32)
    rights = [torch.zeros(s, dtype=dtype) for s in shapes]
    expected = [left.detach().clone().view(torch.uint8) for left in lefts]
    with torch.no_grad():
        copies = Copies(zip(lefts, rights, strict=True))
        copies.copy_right()
        for left in lefts:
            left.zero_()
        copies.copy_left()
    for tensors in (lefts, rights):
        pairs = zip(tensors, expected, strict=True)
        assert all(torch.equal(t.detach().view(torch.uint8), value) for t, value in pairs)
