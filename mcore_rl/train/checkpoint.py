"""Checkpoints that any layout can load: model, optimizer and extra state in, one folder per save out.

A save goes to `<folder>.incomplete` and is renamed when every rank has written its part, so a folder that
has its own name is whole. Tensors are copied to host memory first (peak: one host copy of the rank's model
and optimizer state); a thread writes them while training goes on, and takes checksums of what it wrote.
"""

import queue
import shutil
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as ps
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.distributed.checkpoint.storage import WriteResult

from mcore_rl.config import ParallelConfig
from mcore_rl.device import device, synchronize
from mcore_rl.slices.hf.checksums import (
    FileSums,
    read_manifest,
    sum_file,
    sum_small_files,
    write_manifest,
)
from mcore_rl.train.rng import rng_state, set_rng_state

INCOMPLETE = ".incomplete"
OF_FILE = ".checksums.json"
"""Ending of the checksums of one file, until those of all ranks are in one."""


@dataclass(frozen=True)
class TrainState:
    """What a checkpoint holds, as the ranks hold it."""

    chunks: Sequence[torch.nn.Module]
    optimizer: MegatronOptimizer
    parallel: ParallelConfig


class Checkpointer:
    """Saves and loads; every method is a collective over all ranks."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._pending: Save | None = None

    def save(self, folder: Path, step: int, extra: dict[str, Any]) -> None:
        """Copy the state and start writing it; `finish` (or the next save) makes the folder count.

        extra   picklable, the same on every rank
        """
        self.finish()
        sharded = _sharded_state(self._state, is_loading=False)
        sharded |= {
            "rng": _rng_object(),
            "step": step,
            "extra": extra,
            "layout": _layout(self._state.parallel),
        }
        self._pending = start_save(sharded, folder)

    def finish(self, timeout_s: float = 600.0) -> None:
        """Wait for the save under way and make its folder count. TimeoutError, or the writer's error, names
        it.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.finish(timeout_s)

    def maybe_finish(self) -> None:
        """Finish the save under way if all ranks have written their part."""
        if self._pending is None:
            return
        writing = torch.tensor([int(self._pending.is_writing())], device=device())
        dist.all_reduce(writing)
        if writing.item() == 0:
            self.finish()

    def load(self, folder: Path) -> tuple[int, dict[str, Any]]:
        """Restore model, optimizer and, if the layout is the one it was saved in, generators; (step, extra).

        ValueError if `folder` is not a complete checkpoint.
        """
        if not (folder / "metadata.json").is_file():
            raise ValueError(f"{folder} is not a complete checkpoint: choose another step's folder")
        state = self._state
        common = dist_checkpointing.load_common_state_dict(str(folder))
        same_layout = common["layout"] == _layout(state.parallel)
        sharded = _sharded_state(state, is_loading=True) | (
            {"rng": _rng_object()} if same_layout else {}
        )
        if "optimizer" not in common:
            del sharded["optimizer"]
        loaded = dist_checkpointing.load(sharded, str(folder))
        for name, chunk in _named_chunks(state.chunks):
            unwrap_model(chunk).load_state_dict(loaded[name])
        with torch.no_grad():
            if "optimizer" in common:
                state.optimizer.load_state_dict(loaded["optimizer"])
            else:  # a model alone, as mcore-rl-ckpt from-hf writes it
                state.optimizer.reload_model_params()
        if same_layout:
            set_rng_state(loaded["rng"])
        return loaded["step"], loaded["extra"]


def _named_chunks(chunks: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    return [(f"model{i}" if len(chunks) > 1 else "model", chunk) for i, chunk in enumerate(chunks)]


def _sharded_state(state: TrainState, *, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    sharded: dict[str, Any] = {
        name: unwrap_model(chunk).sharded_state_dict(metadata=metadata)
        for name, chunk in _named_chunks(state.chunks)
    }
    sharded["optimizer"] = state.optimizer.sharded_state_dict(
        sharded, is_loading=is_loading, metadata=metadata
    )
    return sharded


def _rng_object() -> ShardedObject:
    return ShardedObject("rng", rng_state(), (dist.get_world_size(),), (dist.get_rank(),))


def _layout(parallel: ParallelConfig) -> dict[str, Any]:
    return {
        name: getattr(parallel, name) for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp_size")
    }


def start_save(sharded: dict[str, Any], folder: Path) -> "Save":
    """Copy a sharded state and start writing it; collective over all ranks. `finish` makes `folder` count."""
    staging = folder.with_name(folder.name + INCOMPLETE)
    if dist.get_rank() == 0:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    dist.barrier()
    strategy = _ThreadedStrategy(_memory_of(sharded))
    request = dist_checkpointing.save(sharded, str(staging), strategy, async_sharded_save=True)
    assert request is not None
    return Save(request, staging, folder)


class _ThreadedStrategy(TorchDistSaveShardedStrategy):
    """megatron-core's writer, called from a thread of this process instead of forked ones.

    Forks of a process with CUDA, gloo and Ray threads are fragile, and outlive a killed rank.
    """

    def __init__(self, in_use: Collection[int]) -> None:
        """in_use   addresses of the memory that training goes on in"""
        super().__init__("torch_dist", 1)
        self._in_use = in_use

    def _get_save_and_finalize_callbacks(
        self, writer: Any, save_state_dict_ret: Any
    ) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        if request.async_fn is None:  # nothing to write on this rank
            return request
        transforms = [writer.transforms] if hasattr(writer, "transforms") else []
        arguments = (transforms, _on_host(writer.write_buckets, self._in_use), writer.results_queue)
        return request._replace(async_fn=_write_buckets, async_fn_args=arguments, preload_fn=None)


def _memory_of(sharded: Mapping[str, Any]) -> set[int]:
    data = [entry.data for entry in nested_values(sharded) if isinstance(entry, ShardedBase)]
    tensors = [x for x in data if isinstance(x, Tensor) and x.device.type == device().type]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def _on_host(buckets: Sequence[Any], in_use: Collection[int]) -> list[Any]:
    staged = [
        (path, key, (blobs, [(item, _host_copy(tensor, in_use)) for item, tensor in tensors]))
        for path, key, (blobs, tensors) in buckets
    ]
    synchronize()
    return staged


def _host_copy(tensor: Tensor, in_use: Collection[int]) -> Tensor:
    """Of what is not a copy already, as megatron-core makes of views in host memory."""
    is_copy = tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() not in in_use
    return tensor if is_copy else tensor.to("cpu", copy=True)


def _write_buckets(transforms: list[Any], buckets: list[Any], results: "queue.Queue[Any]") -> None:
    """Put {bucket number: what was written} or the error into `results`, as megatron-core's finalisation
    expects.
    """
    written: dict[int, Any] = {}
    answers: queue.Queue[tuple[int, Any]] = queue.Queue()
    for i, bucket in enumerate(buckets):
        running: queue.Queue[int] = queue.Queue()
        running.put(i)
        FileSystemWriterAsync.write_preloaded_data(
            transforms,
            i,
            bucket,
            answers,
            running,
            use_fsync=True,  # type: ignore[arg-type]
        )
        _, answer = answers.get_nowait()
        if isinstance(answer, Exception):
            results.put(answer)
            return
        try:
            _sum_written(Path(bucket[0]), answer)
        except OSError as error:
            results.put(error)
            return
        written[i] = answer
    results.put(written)


def _sum_written(path: Path, items: Sequence[WriteResult]) -> None:
    """Checksums of a file just written, item by item, beside it: `_merge_checksums` collects them."""
    edges = [item.storage_data.offset for item in items]
    write_manifest(path.parent, {path.name: sum_file(path, edges)}, path.name + OF_FILE)


def _merge_checksums(folder: Path) -> None:
    """checksums.json out of what all ranks have left, and of the small files."""
    sums: dict[str, FileSums] = {}
    for path in sorted(folder.glob(f"*{OF_FILE}")):
        sums |= read_manifest(folder, path.name) or {}
        path.unlink()
    write_manifest(folder, sums | sum_small_files(folder, sums))


class Save:
    """A save under way on this rank."""

    def __init__(self, request: AsyncRequest, staging: Path, folder: Path) -> None:
        self._request, self._staging, self._folder = request, staging, folder
        self._thread = threading.Thread(
            target=request.async_fn or (lambda: None),
            args=request.async_fn_args,
            name=f"save {folder.name}",
            daemon=True,
        )
        self._thread.start()

    def is_writing(self) -> bool:
        return self._thread.is_alive()

    def finish(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"rank {dist.get_rank()} waited {timeout_s:.0f} s for its writer of {self._staging}"
            )
        for finalize in self._request.finalize_fns:
            finalize()
        dist.barrier()
        if dist.get_rank() == 0:
            _merge_checksums(self._staging)
            shutil.rmtree(self._folder, ignore_errors=True)
            self._staging.rename(self._folder)
        dist.barrier()
