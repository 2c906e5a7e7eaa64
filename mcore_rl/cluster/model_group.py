"""Runs the Megatron ranks of one model as Ray workers, behind one object that stands for them all.

A call passes one argument per data-parallel coordinate, and returns the answers of the ranks that
own an output.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from mcore_rl.cluster.answers import Answers
from mcore_rl.cluster.folder_keeper import CarriedStorage
from mcore_rl.cluster.group import RankGroup
from mcore_rl.cluster.shared_folder import RunFiles
from mcore_rl.cluster.stores import StoreHandles
from mcore_rl.config import ModelConfig, OptimizerConfig, ParallelConfig, ProfileConfig, TrainConfig
from mcore_rl.config.deadlines import answer_s
from mcore_rl.device import device_name, exact_pinning, leave_compiler_out, peak_flops
from mcore_rl.planning.slots import Slot
from mcore_rl.process.gc_pause import without_collector
from mcore_rl.types import StoredBatch, TrainBatch
from mcore_rl.types.lost_samples import SamplesLost

Share = Sequence[TrainBatch] | StoredBatch
"""The micro-batches of a data-parallel coordinate, or references to them in parts."""


@dataclass(frozen=True)
class ModelSpec:
    """The model that every rank builds its share of; `loss` must be picklable.

    profile, profile_dir   the steps and ranks to capture, and the folder of the captures
    """

    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    total_steps: int
    seed: int
    loss: Any
    collective_timeout_s: float
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    profile_dir: str = ""


class ModelWorker:
    """One rank of a model in training. Only this process imports Megatron, not the controller."""

    _stores: StoreHandles | None = None

    def __init__(
        self,
        spec: ModelSpec,
        rank: int,
        master_addr: str,
        master_port: int,
        gpu_ids: Sequence[str] = (),
        storage: CarriedStorage | None = None,
    ) -> None:
        """`gpu_ids` has the rank's GPU, of those that its machine has; it is empty on a CPU.

        `storage`: how to reach the run folder; None if this node sees it.
        """
        os.environ.update(exact_pinning(os.environ))
        leave_compiler_out()
        with without_collector():
            from mcore_rl.train.runtime import init_distributed

            model_cls = self._model_cls()
        world_size = spec.parallel.world_size
        self._coordinate = init_distributed(
            rank,
            world_size,
            master_addr,
            master_port,
            spec.parallel,
            spec.seed,
            spec.collective_timeout_s,
            gpu_ids,
        )
        self._rank = rank
        self._loss = spec.loss
        self._profile = spec.profile
        self._profile_dir = Path(spec.profile_dir)
        self._model = model_cls(
            spec.model, spec.parallel, spec.train, spec.optimizer, spec.total_steps, spec.seed
        )
        if storage is not None:
            self._model.keep_files_with(storage)

    def _model_cls(self) -> Any:
        """Return the subclass of TrainedModel that each rank has a share of."""
        raise NotImplementedError

    def connect_stores(self, stores: StoreHandles) -> None:
        self._stores = stores

    def _with_tokens(self, share: Share) -> Sequence[TrainBatch]:
        """Return micro-batches with what this rank reads: its tokens, their images, its layers'
        experts.

        Raises SamplesLost on all ranks if any of them finds samples lost: none has begun then.
        """
        from mcore_rl.train.runtime import is_true_anywhere

        if not isinstance(share, StoredBatch):
            return share
        assert self._stores is not None, "connect_stores comes first"
        lost = None
        parts: list[TrainBatch] = []
        try:
            model = self._model
            parts = self._stores.assemble_parts(
                share, model.layers, model.select_routed_tokens, model.select_seen_tokens
            )
            if share.nums_images_N is not None:
                parts = self._stores.with_images(parts, share, with_pixels=self._model.reads_pixels)
        except SamplesLost as error:
            lost = error
        if is_true_anywhere(lost is not None):
            raise lost or SamplesLost("", [])
        return parts

    def _keep(self, share: StoredBatch, columns: Mapping[str, Sequence[Tensor]]) -> None:
        """Bring values, one tensor per micro-batch, to the stores of the samples."""
        assert self._stores is not None, "connect_stores comes first"
        self._stores.scatter_parts(share, columns)

    def peak_flops(self) -> float | None:
        return peak_flops()

    def device_name(self) -> str:
        return device_name()

    def coordinate(self) -> Any:
        return self._coordinate

    def hold(self, parts: Collection[str]) -> None:
        self._model.hold(parts)

    def save(self, folder: str, extra: dict[str, Any]) -> None:
        self._model.save(Path(folder), extra)

    def finish_save(self, timeout_s: float) -> None:
        self._model.finish_save(timeout_s)

    def load(self, folder: str, verify: bool) -> dict[str, Any]:
        return self._model.load(Path(folder), verify=verify)

    def export_hf(self, folder: str) -> None:
        self._model.export_hf(Path(folder))


class ModelGroup:
    """All ranks of one model.

    Every call raises RankError if a rank raises, dies or does not answer in time. Ranks wait for
    one another for up to `call_timeout_s`, and calls for ranks ANSWER_MARGIN_S longer.
    """

    role: str
    worker_cls: type[ModelWorker]

    def __init__(
        self,
        slots: Sequence[Slot],
        log_dir: Path,
        call_timeout_s: float,
        runtime_envs: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the processes, without waiting for them; `runtime_envs` has Ray's, by rank."""
        self._group = RankGroup(self.role, slots, log_dir, runtime_envs)
        self._call_timeout_s = call_timeout_s
        self._answer_s = answer_s(call_timeout_s)
        self._building: Answers | None = None
        self._files: RunFiles | None = None

    def keep_files_with(self, files: RunFiles) -> None:
        """Have ranks that do not see the run folder bring their files there; before the build."""
        self._files = files

    def start_build(
        self, spec: ModelSpec, timeout_s: float, gpu_ids: Sequence[Sequence[str]] = ()
    ) -> None:
        """Begin to build the model on every rank; `wait_built` waits for it.

        `gpu_ids` has the GPU of each rank; if empty, ranks use those that Ray assigned to them.
        """
        address, port = self._group.meeting_points(timeout_s)[0]
        self._group.check_environment(timeout_s)
        num_ranks = spec.parallel.world_size
        gpus = gpu_ids or self._group.gpu_ids(timeout_s)
        args = [
            (spec, rank, address, port, gpus[rank], self._storage_of(rank))
            for rank in range(num_ranks)
        ]
        self._building = self._group.start_build(self.worker_cls, args, timeout_s)

    def _storage_of(self, rank: int) -> CarriedStorage | None:
        node = self._group.ranks[rank].node
        return self._files.storage_of(node) if self._files is not None else None

    def wait_built(self) -> None:
        """Return once every rank has built its share of the model."""
        assert self._building is not None, "start_build comes first"
        self._group.finish(self._building)
        self._group.find_coordinates(self._answer_s)

    @property
    def world_size(self) -> int:
        return len(self._group.ranks)

    def connect_stores(self, stores: StoreHandles) -> None:
        """Tell every rank where the samples of StoredBatches lie."""
        self._call("connect_stores", stores)

    async def hold(self, parts: Collection[str]) -> None:
        """Keep these parts of every rank's model in device memory and offload the others."""
        await self._group.call_all_async("hold", tuple(parts), deadline_s=self._answer_s)

    def save(self, folder: str, extra: dict[str, Any]) -> None:
        """Begin to save: the state is copied on return and written while training goes on."""
        self._call("save", folder, extra)

    def finish_save(self) -> None:
        """Wait until the save under way is complete, if there is one."""
        self._call("finish_save", self._call_timeout_s)

    def load(self, folder: str, *, verify: bool = True) -> dict[str, Any]:
        """Restore the checkpoint and return the `extra` that was saved with it.

        `verify`: compare its files with the checksums beside them first.
        """
        return self._call("load", folder, verify)[0]

    def export_hf(self, folder: str) -> None:
        self._call("export_hf", folder)

    def first_of_nodes(self) -> dict[str, Any]:
        """See RankGroup.first_of_nodes."""
        return self._group.first_of_nodes()

    async def watch(self) -> None:
        """Never return; raise RankError once a rank's process is gone."""
        await self._group.watch(call_timeout_s=self._answer_s)

    def peak_flops(self) -> float | None:
        """Return the operations per second that a rank's GPU can do at most; None on a CPU."""
        return self._call("peak_flops")[0]

    def device_names(self) -> list[str]:
        """Return the names of the ranks' GPUs, "cpu" for ranks without one; each name once."""
        return sorted(set(self._call("device_name")))

    def gpu_ids(self) -> list[tuple[str, ...]]:
        """Return, by rank, the GPUs that Ray assigned; may be called before the model is built."""
        return self._group.gpu_ids(self._answer_s)

    def pids(self) -> list[int]:
        """Return process ids by rank, each on its own machine."""
        return self._group.pids(self._answer_s)

    def _call(self, method: str, *args: object) -> list[Any]:
        return self._group.call_all(method, *args, deadline_s=self._answer_s)
