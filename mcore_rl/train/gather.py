"""Brings the values of all context-parallel ranks together."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from torch import Tensor

from mcore_rl.device import device


def gather_tokens(
    locals_T: Sequence[Tensor],
    indices_T: Sequence[Tensor],
    nums_tokens: Sequence[int],
    twins_T: Sequence[Tensor | None],
) -> list[Tensor]:
    """Return the values of all context-parallel ranks in the order of each micro-batch.

    There is an entry per micro-batch; each result is [num_tokens, ...] on the CPU of every one of
    these ranks. Value i goes to token index_T[i], and is left out if that is -1; further axes may
    follow T. All micro-batches travel together, so the host waits for the device once. `twins_T`
    are SharedRows.twins_T of each micro-batch; None where each token has a value of its own.

        index_T   rank 0:  1 2 - -    rank 1:  3 4        "-" is -1
        result    0 a b c d           of values a b . .   and c d
    """
    assert len(locals_T) == len(indices_T) == len(nums_tokens), "values of some micro-batches"
    first_tokens = [0, *accumulate(nums_tokens)]
    index_T = torch.cat(
        [
            torch.where(index >= 0, index + first, -1)
            for index, first in zip(indices_T, first_tokens, strict=False)
        ]
    )
    has_index_T = index_T >= 0
    local_T = torch.cat([values.detach() for values in locals_T]).cpu()
    whole_T = torch.zeros(first_tokens[-1], *local_T.shape[1:], dtype=local_T.dtype)
    whole_T[index_T[has_index_T]] = local_T[has_index_T]
    group = ps.get_context_parallel_group()
    if group.size() > 1:
        on_gpu = whole_T.to(device())
        dist.all_reduce(on_gpu, group=group)
        whole_T = on_gpu.cpu()
    parts = zip(whole_T.split(list(nums_tokens)), twins_T, strict=True)
    return [values if twins is None else values[twins] for values, twins in parts]
