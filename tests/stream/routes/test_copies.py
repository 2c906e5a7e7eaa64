"""Copies of many tensors at once, of any dtypes and strides."""

import torch

from mcore_rl.stream.routes.copies import Copies


def test_pairs_of_all_kinds_are_copied_both_ways() -> None:
    matrix = torch.arange(24.0).view(4, 6)
    lefts = [matrix[:2], matrix[2:, 1:3], torch.arange(5), matrix.T[5:], torch.full((3,), 2.5)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.float32, torch.bfloat16]
    rights = [
        torch.zeros(left.shape, dtype=dtype) for left, dtype in zip(lefts, dtypes, strict=True)
    ]
    expected = [left.clone() for left in lefts]
    copies = Copies(zip(lefts, rights, strict=True))
    copies.to_right()
    assert all(
        torch.equal(right, left.to(right.dtype)) for left, right in zip(lefts, rights, strict=True)
    )
    for left in lefts:
        left.zero_()
    copies.to_left()
    assert all(torch.equal(left, value) for left, value in zip(lefts, expected, strict=True))
    Copies([]).to_right()
