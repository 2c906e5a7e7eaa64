"""Sums of token values over whole sequences, whose tokens may lie on several ranks."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SequenceSum = Callable[[Tensor], Tensor]
"""values_T -> at each token, the sum over its whole sequence; without gradient."""


def sequence_sum(
    lens_N: Sequence[int], device: torch.device, reduce: Callable[[Tensor], object] | None = None
) -> SequenceSum:
    """Return a function that sums token values by sequence.

    lens_N   tokens of each sequence on this rank
    reduce   adds, in place, the sums of the ranks that hold other parts of the sequences; None if
             no rank does
    """
    lens = torch.tensor(lens_N, device=device)
    index_T = torch.arange(len(lens_N), device=device).repeat_interleave(lens)

    def add_up(values_T: Tensor) -> Tensor:
        sums_N = torch.zeros(len(lens_N), dtype=torch.float64, device=device)
        sums_N.index_add_(0, index_T, values_T.detach().double())
        if reduce is not None:
            reduce(sums_N)
        return sums_N[index_T].to(values_T.dtype)

    return add_up
