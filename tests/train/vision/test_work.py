"""The operations of a step's towers are counted once, whatever ranks run them."""

from typing import Any

import pytest
import torch

from mcore_rl.config import ParallelConfig
from mcore_rl.train.runtime import init_distributed
from mcore_rl.train.vision.rank_images import RankImages, tower_work
from mcore_rl.types import TrainBatch
from mcore_rl.weights.hf.config import ModelFacts
from mcore_rl.weights.hf.flops import TowerFlops
from tests.support.distributed import run_each
from tests.support.tiny_training import my_batches
from tests.support.tiny_vision import make_vision_batches

FACTS = ModelFacts.read("recipes/model/qwen2_5_vl_7b")


def work(rank: int, world_size: int, port: int, layout: dict[str, Any]) -> dict[str, float]:
    parallel = ParallelConfig(**layout)
    init_distributed(rank, world_size, "127.0.0.1", port, parallel, seed=0, timeout_s=60)
    flops = TowerFlops.from_facts(FACTS)
    assert flops is not None
    return tower_work(flops, map(images_of, my_batches(make_vision_batches())), "projector")


def images_of(batch: TrainBatch) -> RankImages:
    nothing = torch.empty(0, dtype=torch.int64)
    return RankImages(nothing, nothing, batch.images)


@pytest.mark.gloo
def test_every_layout_counts_the_same() -> None:
    flops = TowerFlops.from_facts(FACTS)
    assert flops is not None
    grids = [
        grid
        for batch in make_vision_batches()
        if batch.images is not None
        for grid in batch.images.grids_I3.tolist()
    ]
    wanted = flops.count_training(grids, "projector") / 1e12
    for ranks in run_each(work, 2, [{"tp": 2}, {"pp": 2}, {"cp": 2}, {"dp": 2}]):
        for metrics in ranks:
            assert metrics == {"train/tower_tflop": pytest.approx(wanted, rel=1e-6)}
