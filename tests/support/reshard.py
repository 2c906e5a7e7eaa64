"""Executes a slice plan by local copies, with the tensors of all its ranks in one process.

    sources[transfer.source_rank] --copy_box--> targets[transfer.target_rank]    every transfer

A real sync sends the same boxes between processes (mcore_rl/weight_sync).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mcore_rl.weights.plan.whole import SlicePlan, Transfer


@torch.no_grad()
def copy_box(
    transfer: Transfer, source: Mapping[str, Tensor], target: Mapping[str, Tensor]
) -> None:
    """Copy one box from its source rank's tensors to its target rank's, casting as needed."""
    transfer.target.view(target).copy_(transfer.source.view(source))


def reshard(
    plan: SlicePlan,
    sources: Sequence[Mapping[str, Tensor]],
    targets: Sequence[Mapping[str, Tensor]],
) -> None:
    """Fill the target tensors; `sources[rank]` and `targets[rank]` map names to local tensors."""
    for transfer in plan.transfers:
        copy_box(transfer, sources[transfer.source_rank], targets[transfer.target_rank])
