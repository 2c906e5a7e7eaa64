"""Sums over a softmax and its gradient, row by row, by Triton kernels that read the logits once.

    logits [T, V] --sum_rows--> peak, target's logit, sums [T]      bfloat16 is read, nothing kept
    logits, sums --differentiate_rows--> gradient [T, V]            in the logits' precision

torch takes a dozen passes over float32 copies of the logits forward, and eight backward. A peak
that is found on the way rescales what was summed before (arXiv:1805.02867, algorithm 3).
"""

from typing import Any

import torch
from torch import Tensor

_BLOCK = 4096


def sum_rows(
    logits_TV: Tensor, columns_T: Tensor, num_real: int, temperature: float, *, squares: bool
) -> Tensor:
    """Return float32 [4, T] or, with `squares`, [5, T], of x = (logit - peak) / temperature.

    columns_T   int64, the target's column, or -1 for a row whose target lies elsewhere
    num_real    the columns from here on do not count
    Rows: the largest logit (-1e30 of no columns); the target's logit, or the largest; sum of exp x;
    sum of x exp x; sum of exp 2x.
    """
    from mcore_rl.device import triton_kernels

    num_rows = len(logits_TV)
    sums_ST = logits_TV.new_empty(5 if squares else 4, num_rows, dtype=torch.float32)
    kernel: Any = triton_kernels.sum_rows
    if num_rows:
        kernel[num_rows,](
            logits_TV,
            columns_T,
            sums_ST,
            num_rows,
            num_real,
            logits_TV.stride(0),
            temperature,
            SQUARES=squares,
            BLOCK=_BLOCK,
        )
    return sums_ST


def differentiate_rows(
    logits_TV: Tensor,
    columns_T: Tensor,
    num_real: int,
    temperature: float,
    totals: tuple[Tensor, Tensor, Tensor],
    grad_logprob_T: Tensor,
    grad_entropy_T: Tensor,
) -> Tensor:
    """Return the gradient of the logits [T, V]; 0 in columns that do not count.

    totals   (peak, log of the sum of exp x, entropy), float32 [T], over all columns of all ranks
    """
    from mcore_rl.device import triton_kernels

    num_rows, num_columns = logits_TV.shape
    grads_TV = torch.empty_like(logits_TV, memory_format=torch.contiguous_format)
    kernel: Any = triton_kernels.differentiate_rows
    if num_rows:
        kernel[num_rows, -(-num_columns // _BLOCK)](
            logits_TV,
            grads_TV,
            columns_T,
            *totals,
            grad_logprob_T,
            grad_entropy_T,
            num_columns,
            num_real,
            logits_TV.stride(0),
            temperature,
            BLOCK=_BLOCK,
        )
    return grads_TV
