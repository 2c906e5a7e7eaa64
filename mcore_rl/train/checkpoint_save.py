"""Writes a sharded state to a checkpoint folder, in threads, while training goes on.

A save goes to `<folder>.incomplete`, which is renamed when every rank has written its part, so a
folder under its own name is complete. Tensors in device memory are first copied to the host; peak:
one host copy of the rank's model and optimizer state. Tensors whose memory is moved out are written
from where they lie in host memory, without a copy.
"""

import queue
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor
from torch.distributed.checkpoint.api import _is_wrapped_exception
from torch.distributed.checkpoint.storage import WriteResult

from mcore_rl.device import device, synchronize
from mcore_rl.process.disk import UnwritableError, report_unwritable
from mcore_rl.process.errors import describe_error
from mcore_rl.process.file_list import INCOMPLETE
from mcore_rl.train.optimizer import Readable, as_it_is
from mcore_rl.train.storage import (
    FILE_MANIFEST,
    SHARED,
    Storage,
    commit_checkpoint,
    make_empty,
)
from mcore_rl.weights.hf.checksums import sum_file, write_manifest

ASYNC = "mcore"
"""megatron-core's own planning of files; its default asks for nvidia-resiliency-ext's processes."""
NUM_FILES = 2
"""Files that a rank writes its part to."""


def start_save(
    sharded: dict[str, Any],
    folder: Path,
    readable: Readable = as_it_is,
    storage: Storage = SHARED,
    texts: Mapping[str, str] = MappingProxyType({}),
) -> "Save":
    """Copy a sharded state and start writing it; collective over all ranks.

    `folder` counts after `finish` of the save that is returned. `readable` returns, for a tensor
    whose memory is moved out, its copy in host memory; that is not copied again. `texts` are
    further files by name, alike on all ranks.
    """
    in_use = _read_on_host(sharded, readable)
    staging = folder.with_name(folder.name + INCOMPLETE)

    def prepare() -> None:
        if dist.get_rank() == 0:
            storage.run(make_empty, staging)
        storage.prepare(staging)

    def write_texts() -> None:
        if dist.get_rank() == 0:
            for name, text in texts.items():
                (staging / name).write_text(text)

    write_together(staging, prepare)
    if texts:
        write_together(staging, write_texts)
    strategy = _ThreadedStrategy(in_use, storage)
    request = dist_checkpointing.save(
        sharded, str(staging), strategy, async_sharded_save=True, async_strategy=ASYNC
    )
    assert request is not None and strategy.plan is not None
    return Save(request, strategy.plan, staging, folder, storage)


def write_together(path: Path, write: Callable[[], None]) -> None:
    """Call `write` on each rank, and wait for all; collective over all ranks.

    If it raises on any rank, every rank raises: UnwritableError with the first rank's message, or
    whatever else it was as RuntimeError.
    """
    error: Exception | None = None
    told: tuple[type[RuntimeError], str] | None = None
    try:
        with report_unwritable(path):
            write()
    except UnwritableError as raised:
        error, told = raised, (type(raised), str(raised))
    except Exception as raised:  # the other ranks would wait for this one
        error, told = raised, (RuntimeError, describe_error(raised))
    all_told: list[tuple[type[RuntimeError], str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(all_told, told)
    for rank, of_rank in enumerate(all_told):
        if of_rank is not None:
            kind, message = of_rank
            raise kind(f"rank {rank} {message}") from error


@dataclass(frozen=True)
class SavePlan:
    """The parts of megatron-core's plan: its writer on this rank, and on rank 0 the metadata."""

    writer: Any
    metadata: Any
    config: CheckpointingConfig


class Save:
    """A save under way on this rank."""

    def __init__(
        self, request: AsyncRequest, plan: SavePlan, staging: Path, folder: Path, storage: Storage
    ) -> None:
        self._request = request
        self._plan = plan
        self._storage = storage
        self._staging = staging
        self.folder = folder
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._write, name=f"save {folder.name}", daemon=True)
        self._thread.start()

    def is_writing(self) -> bool:
        return self._thread.is_alive()

    def wait_written(self, timeout_s: float) -> None:
        """Wait until this rank has written its files. Raises TimeoutError after `timeout_s`."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"rank {dist.get_rank()} waited {timeout_s:.0f} s for its writer of {self._staging}"
            )

    def finish(self, timeout_s: float) -> None:
        """Wait for the files of all ranks and give the folder its name; collective over all ranks.

        Raises UnwritableError on every rank if any rank's disk is full or fails, TimeoutError if
        this rank's writer needs longer than `timeout_s`. Earlier checkpoints are not touched.
        """
        self.wait_written(timeout_s)
        write_together(self._staging, self._raise_error)
        results = self._plan.writer.retrieve_write_results()
        is_first = dist.get_rank() == 0
        gathered = [None] * dist.get_world_size() if is_first else None
        dist.gather_object(results, gathered)
        write_together(self._staging, partial(self._complete, gathered))
        self._storage.leave(self._staging)

    def _write(self) -> None:
        if self._request.async_fn is not None:
            self._error = self._request.async_fn(*self._request.async_fn_args)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _complete(self, results: Sequence[Any] | None) -> None:
        """Write on rank 0 what says that the checkpoint is complete, and give it its name.

        As megatron-core's finalization does, which leaves ranks waiting if rank 0 cannot write.
        """
        if results is None:
            return
        for rank, result in enumerate(results):
            if _is_wrapped_exception(result):
                raise RuntimeError(f"rank {rank} could not write its files") from result[0]
        self._plan.writer.finish(self._plan.metadata, results)
        save_config(self._plan.config, str(self._staging))
        self._storage.bring_rest(self._staging)
        self._storage.run(commit_checkpoint, self._staging, self.folder)


def discard(folder: Path, storage: Storage) -> None:
    """Remove what was written of a checkpoint whose save raised on every rank; a collective."""
    staging = folder.with_name(folder.name + INCOMPLETE)
    dist.barrier()
    with suppress(OSError):
        storage.prepare(staging)
        storage.leave(staging)
    if dist.get_rank() == 0:
        with suppress(OSError):
            storage.run(shutil.rmtree, staging, True)


class _ThreadedStrategy(TorchDistSaveShardedStrategy):
    """megatron-core's writer, called from a thread of this process instead of forked processes.

    Forks of a process with CUDA, gloo and Ray threads are fragile, and outlive a killed rank.
    """

    def __init__(self, in_use: Collection[int], storage: Storage) -> None:
        """in_use   addresses of the tensors' memory that training goes on writing to"""
        super().__init__(thread_count=NUM_FILES)
        self.plan: SavePlan | None = None
        self._in_use = in_use
        self._storage = storage

    def _get_save_and_finalize_callbacks(
        self, writer: Any, save_state_dict_ret: Any, async_strategy: str
    ) -> AsyncRequest:
        config = CheckpointingConfig(self.backend, self.version)
        self.plan = SavePlan(writer, save_state_dict_ret[1], config)
        request = super()._get_save_and_finalize_callbacks(
            writer, save_state_dict_ret, async_strategy
        )
        if request.async_fn is None:  # nothing to write on this rank
            return request
        transforms = [writer.transforms] if hasattr(writer, "transforms") else []
        arguments = (
            transforms,
            _copy_to_host(writer.write_buckets, self._in_use),
            writer.results_queue,
        )
        write = partial(_write_buckets, storage=self._storage)
        return request._replace(async_fn=write, async_fn_args=arguments, preload_fn=None)


def _read_on_host(sharded: dict[str, Any], readable: Readable) -> set[int]:
    """Replace tensors whose memory is moved out by their host copies.

    Returns the addresses of the storages of the other tensors.
    """
    moved: set[int] = set()
    for entry in _entries(sharded):
        data = readable(entry.data)
        if data is not entry.data:
            moved.add(data.untyped_storage().data_ptr())
            entry.data = data
    apply_factories(sharded)
    in_use: set[int] = set()
    for entry in _entries(sharded):
        address = entry.data.untyped_storage().data_ptr()
        if address in moved:
            entry.data = _move_to_own_storage(entry.data)
        elif entry.data.device.type == device().type:
            in_use.add(address)
    return in_use


def _entries(sharded: Mapping[str, Any]) -> list[ShardedTensor | ShardedTensorFactory]:
    return [
        entry
        for entry in nested_values(sharded)
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
        if isinstance(entry.data, Tensor)
    ]


def _move_to_own_storage(tensor: Tensor) -> Tensor:
    """Return a host tensor as the only one of a storage; its memory is shared if contiguous.

    megatron-core copies a tensor that is smaller than its storage.
    """
    if not tensor.is_contiguous() or not tensor.numel():
        return tensor.clone()
    bytes_u8 = tensor.detach().view(-1).view(torch.uint8).numpy()
    return torch.frombuffer(bytes_u8, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def _copy_to_host(buckets: Sequence[Any], in_use: Collection[int]) -> list[Any]:
    """Return megatron-core's write buckets with their tensors in host memory."""
    staged = []
    for path, key, (blobs, tensors) in buckets:
        copies = [(item, _host_copy(tensor, in_use)) for item, tensor in tensors]
        staged.append((path, key, (blobs, copies)))
    synchronize()
    return staged


def _host_copy(tensor: Tensor, in_use: Collection[int]) -> Tensor:
    """Copy a tensor to host memory unless it is a copy, as megatron-core makes of host views."""
    is_copy = tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() not in in_use
    return tensor if is_copy else tensor.to("cpu", copy=True)


def _write_buckets(
    transforms: list[Any],
    buckets: list[Any],
    results: "queue.Queue[Any]",
    storage: Storage = SHARED,
) -> Exception | None:
    """Write every bucket's file and its checksums; return the error of the first that failed.

    megatron-core's finalization takes {bucket number: what was written}, or that error, from
    `results`.
    """
    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        path = Path(bucket[0])
        try:
            with report_unwritable(path):
                written[number] = _write_bucket(transforms, number, bucket)
                storage.bring(path, _sum_written(path, written[number]))
        except Exception as error:  # whatever it is, finish() raises it on the main thread
            for written_path, *_ in buckets[: number + 1]:  # the run's logs may need the space
                with suppress(OSError):
                    Path(written_path).unlink(missing_ok=True)
            results.put(error)
            return error
    results.put(written)
    return None


def _write_bucket(transforms: list[Any], number: int, bucket: Any) -> Sequence[WriteResult]:
    """Write one file by megatron-core's function, which returns its error or what was written."""
    write: Any = FileSystemWriterAsync.write_preloaded_data
    _, answer = write(transforms, number, bucket, None, None, use_fsync=True)
    if isinstance(answer, Exception):
        raise answer
    return answer


def _sum_written(path: Path, items: Sequence[WriteResult]) -> Path:
    """Write the checksums of a new file's items beside it, for `commit_checkpoint`."""
    edges = [item.storage_data.offset for item in items]
    write_manifest(path.parent, {path.name: sum_file(path, edges)}, path.name + FILE_MANIFEST)
    return path.with_name(path.name + FILE_MANIFEST)
