"""Names of parts of a training model in, their device memory moved to host memory and back.

    held: nothing            everything is in host memory
          weights            parameters: enough for a forward pass or a weight sync
          weights, training  also gradients and optimizer state: a step, a checkpoint

Storages that are moved out are empty until they are moved back, so that reading them meanwhile
fails instead of giving old values. Views of them stay valid. Host memory is allocated (pinned)
once and kept.
"""

from collections.abc import Collection, Iterable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from mcore_rl.device import empty_cache, host_memory, synchronize
from mcore_rl.train.optimizer import parts_of
from mcore_rl.train.shards import local_tensors

WEIGHTS, TRAINING = "weights", "training"


class DeviceMemory:
    """The device memory of a rank's model chunks and optimizer; at first everything is held."""

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
    ) -> None:
        weights = _storages(local_tensors(chunks).values())
        training = _storages([*_optimizer_tensors(optimizer), *_gradients(chunks)])
        known = {memory.key for memory in weights}
        training = [memory for memory in training if memory.key not in known]
        self._parts = {WEIGHTS: weights, TRAINING: training}
        self._held = {WEIGHTS, TRAINING}

    def hold(self, wanted: Collection[str]) -> None:
        """Have exactly the parts `wanted` on the device; return once other memory is free."""
        moved_out = self._storages_of(self._held - set(wanted))
        for memory in moved_out:
            memory.copy_to_host()
        if moved_out:
            synchronize()
            for memory in moved_out:
                memory.free()
            empty_cache()
        for memory in self._storages_of(set(wanted) - self._held):
            memory.copy_back()
        synchronize()
        self._held = set(wanted)

    @property
    def num_bytes(self) -> int:
        """Bytes that are on the device now."""
        return sum(memory.num_bytes for memory in self._storages_of(self._held))

    def _storages_of(self, parts: Collection[str]) -> list["_Memory"]:
        return [memory for part in sorted(parts) for memory in self._parts[part]]


class _Memory:
    """One device storage, of which any number of tensors are views, and its host copy."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._host: Tensor | None = None
        self.key = storage._cdata
        self.num_bytes = storage.nbytes()

    def copy_to_host(self) -> None:
        if self._host is None:
            self._host = host_memory(self.num_bytes)
        self._host.copy_(self._bytes(), non_blocking=True)

    def free(self) -> None:
        self._storage.resize_(0)

    def copy_back(self) -> None:
        assert self._host is not None
        self._storage.resize_(self.num_bytes)
        self._bytes().copy_(self._host, non_blocking=True)

    def _bytes(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage)


def _storages(tensors: Iterable[Tensor]) -> list[_Memory]:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return [_Memory(storage) for storage in storages.values() if storage.nbytes()]


def _gradients(chunks: Sequence[DistributedDataParallel]) -> list[Tensor]:
    return [
        buffer.grad_data
        for chunk in chunks
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
    ]


def _optimizer_tensors(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Return the main weights and the moments."""
    tensors: list[Tensor] = []
    for part in parts_of(optimizer):
        inner = part.optimizer
        for group in inner.param_groups:
            tensors += [parameter.data for parameter in group["params"]]
        for state in inner.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return tensors
