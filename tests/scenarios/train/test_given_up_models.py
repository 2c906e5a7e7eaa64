"""A rank that gives its model up leaves nothing in its process, where another one is built."""

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from mcore_rl.config import (
    AdapterConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from mcore_rl.device import communicators
from mcore_rl.process.kept_memory import KeptMemory
from mcore_rl.process.network import find_free_port
from mcore_rl.workers.model_worker import ModelSpec, TrainerWorker
from tests.support.distributed import run_ranks
from tests.support.tiny_training import NUM_TOKENS, my_batches, token_loss, write_hf_model

slow = partial(pytest.param, marks=pytest.mark.slow)
NUM_ROUNDS = 5
GROWTH_BYTES = 24 << 20
"""More than the allocator keeps, and less than three models with their optimizers."""
OVERLAPPED = {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}}
ADAPTERS = [AdapterConfig(name=name) for name in ("ada", "eve")]
KINDS = [
    ({"dp": 2, "ep": 2}, OVERLAPPED),
    slow({"tp": 2, "ep": 2}, {"recompute": "full", "share_prefixes": True}),
    slow({"pp": 2, "vpp": 2}, {}),
    slow({"dp": 2, "ep": 2}, {"lora": LoraConfig(rank=4)}),
    slow({"dp": 2, "ep": 2}, {"lora": LoraConfig(rank=4, adapters=ADAPTERS)}),
]
Held = tuple[int, int, int]
"""Descriptors, threads, and resident bytes of a process."""


def train(worker: TrainerWorker, memory: KeptMemory, folder: Path) -> float | None:
    """Take a step, keep the state, and begin a checkpoint; return the loss where it is known."""
    stats = worker.train_step(my_batches(), temperature=1.0, num_tokens=NUM_TOKENS).stats
    size = worker.count_kept_bytes()
    worker.use_kept_memory([memory.reserve(f"copy{k}", size) for k in range(2)])
    worker.keep_state(1)
    worker.describe()
    worker.save(str(folder), {})
    return None if stats is None else stats.loss


def build_again(
    rank: int, world_size: int, port: int, spec: ModelSpec, ports: list[int], root: Path
) -> list[tuple[float | None, Held]]:
    """Return by round the loss, and what the process holds once the model is given up."""
    rounds = []
    process, memory = psutil.Process(), KeptMemory()
    for k, each in enumerate(ports):
        worker = TrainerWorker(spec, rank, "127.0.0.1", each)
        loss = train(worker, memory, root / f"round{k}")
        model = worker._model
        held = [weakref.ref(it) for it in (model, *model.chunks, *model.chunks[0].parameters())]
        worker.close(30.0)
        del worker, model
        communicators.destroy_communicators()
        assert not any(ref() is not None for ref in held), "a part of the model is left"
        resident = process.memory_info().rss
        rounds.append((loss, (process.num_fds(), process.num_threads(), resident)))
    return rounds


@pytest.mark.parametrize(("layout", "options"), KINDS)
def test_nothing_is_left_of_a_model_that_was_given_up(
    tmp_path: Path, layout: dict[str, Any], options: dict[str, Any]
) -> None:
    spec = ModelSpec(
        model=ModelConfig(path=str(write_hf_model(tmp_path / "hf"))),
        parallel=ParallelConfig(**layout),
        train=TrainConfig(**options),
        optimizer=OptimizerConfig(lr=1e-3),
        total_steps=6,
        seed=0,
        loss=token_loss,
        collective_timeout_s=60.0,
        lends_frozen="lora" in options,
    )
    ports = [find_free_port("127.0.0.1") for _ in range(NUM_ROUNDS)]
    for rounds in run_ranks(build_again, 2, spec, ports, tmp_path):
        losses = {loss for loss, _ in rounds}
        assert len(losses) == 1, "a model that is built again begins as the first one"
        (fds, threads, resident), *_, last = [held for _, held in rounds]
        assert last[:2] == (fds, threads), f"descriptors and threads grow: {rounds}"
        assert last[2] < resident + GROWTH_BYTES, f"memory grows: {rounds}"
