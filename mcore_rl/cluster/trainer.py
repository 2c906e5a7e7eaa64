"""The Megatron ranks as Ray workers, and all of them as one object that the players of the loop call."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.cluster.answers import Answers
from mcore_rl.cluster.group import RankGroup
from mcore_rl.cluster.placement import Slot
from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig
from mcore_rl.stream.wire import Link, Report
from mcore_rl.types import StepStats, TokenScores, TrainBatch


@dataclass(frozen=True)
class TrainerSpec:
    """What every rank builds; `loss` is a picklable TokenLoss."""

    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    total_steps: int
    seed: int
    loss: Any
    collective_timeout_s: float


class TrainerWorker:
    """One rank: a train.Actor and the sender of its weights. Megatron is imported inside the process only."""

    def __init__(self, spec: TrainerSpec, rank: int, master_addr: str, master_port: int) -> None:
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        from mcore_rl.train.actor import Actor
        from mcore_rl.train.runtime import init_distributed

        world_size = spec.parallel.world_size
        self._coordinate = init_distributed(
            rank, world_size, master_addr, master_port, spec.parallel, spec.seed, spec.collective_timeout_s
        )
        self._rank, self._loss = rank, spec.loss
        self._actor = Actor(
            spec.model, spec.parallel, spec.train, spec.optimizer, spec.total_steps, spec.seed
        )
        self._sender: Any = None

    def coordinate(self) -> Any:
        return self._coordinate

    def compute_logprobs(
        self, microbatches: Sequence[TrainBatch], *, reference: bool, temperature: float, sum_squares: bool
    ) -> list[TokenScores] | None:
        return self._actor.compute_logprobs(
            microbatches, reference=reference, temperature=temperature, sum_squares=sum_squares
        )

    def train_step(
        self, microbatches: Sequence[TrainBatch], *, temperature: float, num_tokens: int
    ) -> StepStats | None:
        return self._actor.train_step(
            microbatches, self._loss, temperature=temperature, num_tokens=num_tokens
        )

    def snapshot_reference(self) -> None:
        self._actor.snapshot_reference()

    def save(self, folder: str, extra: dict[str, Any]) -> None:
        self._actor.save(Path(folder), extra)

    def finish_save(self, timeout_s: float) -> None:
        self._actor.finish_save(timeout_s)

    def load(self, folder: str) -> dict[str, Any]:
        return self._actor.load(Path(folder))

    def export_hf(self, folder: str) -> None:
        self._actor.export_hf(Path(folder))

    def connect(self, link: Link) -> Report:
        if self._sender is None:
            from mcore_rl.stream.sender import WeightSender

            self._sender = WeightSender(*self._actor.weight_layout(), self._rank)
        return self._sender.connect(link)

    def send(self, version: int, engines: Sequence[str], timeout_s: float) -> dict[str, Report]:
        return self._sender.send(version, engines, timeout_s)


class TrainerGroup:
    """All ranks; micro-batches go out by data-parallel coordinate, answers come from the ranks that own them.

    Every call raises RankError when a rank raises, dies, or does not answer within `call_timeout_s`.
    """

    def __init__(self, slots: Sequence[Slot], log_dir: Path, call_timeout_s: float) -> None:
        """Start the processes, without waiting for them."""
        self._group = RankGroup("trainer", slots, log_dir)
        self._call_timeout_s = call_timeout_s
        self._building: Answers | None = None

    def start_build(self, spec: TrainerSpec, timeout_s: float) -> None:
        """Begin to build the model on every rank; `wait_built` ends it."""
        address, port = self._group.meeting_points(timeout_s)[0]
        args = [(spec, rank, address, port) for rank in range(spec.parallel.world_size)]
        self._building = self._group.start_build(TrainerWorker, args, timeout_s)

    def wait_built(self) -> None:
        """Return once every rank holds its share of the model."""
        assert self._building is not None, "start_build comes first"
        self._group.finish(self._building)
        self._group.find_coordinates(self._call_timeout_s)

    @property
    def world_size(self) -> int:
        return len(self._group.ranks)

    def compute_logprobs(
        self,
        per_dp: Sequence[Sequence[TrainBatch]],
        *,
        reference: bool,
        temperature: float,
        sum_squares: bool = False,
    ) -> list[list[TokenScores]]:
        return self._group.dispatch(
            "compute_logprobs",
            per_dp,
            deadline_s=self._call_timeout_s,
            reference=reference,
            temperature=temperature,
            sum_squares=sum_squares,
        )

    def train_step(
        self, per_dp: Sequence[Sequence[TrainBatch]], *, temperature: float, num_tokens: int
    ) -> StepStats:
        stats = self._group.dispatch(
            "train_step",
            per_dp,
            deadline_s=self._call_timeout_s,
            temperature=temperature,
            num_tokens=num_tokens,
        )
        return stats[0]

    def snapshot_reference(self) -> None:
        self._call("snapshot_reference")

    def save(self, folder: str, extra: dict[str, Any]) -> None:
        """Begin to save; the state is copied when this returns, and written while training goes on."""
        self._call("save", folder, extra)

    def finish_save(self) -> None:
        """Wait until the save under way, if there is one, is complete."""
        self._call("finish_save", self._call_timeout_s)

    def load(self, folder: str) -> dict[str, Any]:
        """Restore the checkpoint; what was saved beside the model comes back."""
        return self._call("load", folder)[0]

    def export_hf(self, folder: str) -> None:
        self._call("export_hf", folder)

    async def connect(self, link: Link) -> Sequence[Report]:
        return await self._group.call_all_async("connect", link, deadline_s=self._call_timeout_s)

    async def send(
        self, version: int, engines: Sequence[str], timeout_s: float
    ) -> Sequence[Mapping[str, Report]]:
        return await self._group.call_all_async(
            "send", version, engines, timeout_s, deadline_s=self._call_timeout_s
        )

    async def watch(self) -> None:
        """Return never; raise RankError once a rank's process is gone."""
        await self._group.watch()

    def gpu_ids(self) -> list[tuple[str, ...]]:
        """GPUs of its machine by rank; none where there are none. Before the model is built, too."""
        return self._group.gpu_ids(self._call_timeout_s)

    def pids(self) -> list[int]:
        """Process ids by rank, each on its own machine."""
        return self._group.pids(self._call_timeout_s)

    def _call(self, method: str, *args: object) -> list[Any]:
        return self._group.call_all(method, *args, deadline_s=self._call_timeout_s)
