"""A slice plan and the tensors of all its ranks in one process in, the target tensors filled."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mcore_rl.slices.plan.whole import SlicePlan, Transfer


@torch.no_grad()
def copy_box(
    transfer: Transfer, source: Mapping[str, Tensor], target: Mapping[str, Tensor]
) -> None:
    """Copy one box from the tensors of its source rank to those of its target rank, casting as needed."""
    transfer.target.view(target).copy_(transfer.source.view(source))


def reshard(
    plan: SlicePlan,
    sources: Sequence[Mapping[str, Tensor]],
    targets: Sequence[Mapping[str, Tensor]],
) -> None:
    """Execute the whole plan by local copies; `sources[rank]` and `targets[rank]` are tensors by name."""
    for transfer in plan.transfers:
        copy_box(transfer, sources[transfer.source_rank], targets[transfer.target_rank])
