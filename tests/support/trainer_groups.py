"""Trainers of tiny workers on Ray, and the wait for the end of their processes."""

import os
import time
from pathlib import Path
from typing import TypeVar

from mcore_rl.cluster.model_groups import TrainerGroup
from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from mcore_rl.planning.slots import Slot
from mcore_rl.workers.model_worker import ModelSpec

G = TypeVar("G", bound=TrainerGroup)


def build_trainer(kind: type[G], slots: list[Slot], folder: Path, timeout_s: float) -> G:
    """Start a trainer with a data-parallel rank in each slot, and wait until it is built."""
    made = kind(slots, folder / "logs", call_timeout_s=60)
    parts = ModelConfig(), ParallelConfig(dp=len(slots)), TrainConfig(), OptimizerConfig()
    made.start_build(ModelSpec(*parts, 1, 0, None, 60.0), timeout_s=timeout_s)
    made.wait_built()
    return made


def wait_until_gone(pids: list[int], timeout_s: float = 5.0) -> list[int]:
    """Return those of the processes that are still there after `timeout_s`."""
    until_s = time.monotonic() + timeout_s
    while (
        alive := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    ) and time.monotonic() < until_s:
        time.sleep(0.05)
    return alive
