"""Adds up the operations that vision towers have in an optimizer step, over all ranks.

Only ranks of the first stage see pixels, so only they know which images of a micro-batch are equal.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from mcore_rl.device import device
from mcore_rl.train.runtime import rank_coordinate
from mcore_rl.train.vision.rank_images import RankImages
from mcore_rl.weights.hf.tower_flops import TowerFlops


def tower_work(
    flops: TowerFlops, micro_batches: Iterable[RankImages | None], part: str
) -> dict[str, float]:
    """Return the operations of the step's towers as a metric, 10**12; a collective over all ranks.

    Each data-parallel coordinate counts once, although all of its ranks of the first stage run the
    same tower.

    part   train.vision
    """
    operations = 0.0
    where = rank_coordinate()
    if where.pp == where.tp == where.cp == 0:
        for images in micro_batches:
            if images is not None and images.images is not None:
                operations += flops.training(images.images.grids_I3.tolist(), part)
    total = torch.tensor(operations / 1e12, device=device(), dtype=torch.float32)
    dist.all_reduce(total)
    return {"train/tower_tflop": float(total)}
