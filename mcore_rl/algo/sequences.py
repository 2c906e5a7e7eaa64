"""Sums over whole sequences of token values, wherever the sequences' tokens lie."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SequenceSum = Callable[[Tensor], Tensor]
"""values_T -> their sum over the whole sequence, at each of its tokens, without gradient."""


def sequence_sum(
    lens_N: Sequence[int], device: torch.device, reduce: Callable[[Tensor], object] | None = None
) -> SequenceSum:
    """Of sequences with `lens_N` tokens here; `reduce` adds, in place, what ranks with other parts have."""
    lens = torch.tensor(lens_N, device=device)
    index_T = torch.arange(len(lens_N), device=device).repeat_interleave(lens)

    def add_up(values_T: Tensor) -> Tensor:
        sums_N = torch.zeros(len(lens_N), dtype=torch.float64, device=device)
        sums_N.index_add_(0, index_T, values_T.detach().double())
        if reduce is not None:
            reduce(sums_N)
        return sums_N[index_T].to(values_T.dtype)

    return add_up
