"""Device memory of a model in training, given up to host memory and taken back.

    held: nothing            everything is in host memory
          weights            parameters: a forward pass, a weight sync
          weights, training  gradients and optimizer state as well: a step, a checkpoint

What is given up is empty until it is taken back, so that whoever reads it meanwhile fails instead of reading
old values. Views of it stay valid. Peak: the host memory is allocated (pinned) once and kept.
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
    """Of one rank's model chunks and their optimizer; at first all of it is held."""

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
    ) -> None:
        weights = _storages(local_tensors(chunks).values())
        training = _storages([*_optimizer_tensors(optimizer), *_gradients(chunks)])
        known = {memory.key for memory in weights}
        self._parts = {WEIGHTS: weights, TRAINING: [m for m in training if m.key not in known]}
        self._held = {WEIGHTS, TRAINING}

    def hold(self, wanted: Collection[str]) -> None:
        """Have exactly the parts `wanted` on the device. Returns when what was given up is free."""
        given_up = self._of(self._held - set(wanted))
        for memory in given_up:
            memory.copy_to_host()
        if given_up:
            synchronize()
            for memory in given_up:
                memory.free()
            empty_cache()
        for memory in self._of(set(wanted) - self._held):
            memory.take_back()
        synchronize()
        self._held = set(wanted)

    @property
    def num_bytes(self) -> int:
        """On the device now."""
        return sum(memory.num_bytes for memory in self._of(self._held))

    def _of(self, parts: Collection[str]) -> list["_Memory"]:
        return [memory for part in sorted(parts) for memory in self._parts[part]]


class _Memory:
    """One storage, which any number of tensors are views of."""

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

    def take_back(self) -> None:
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
    """Main weights and moments."""
    tensors = []
    for part in parts_of(optimizer):
        inner = part.optimizer
        tensors += [parameter.data for group in inner.param_groups for parameter in group["params"]]
        tensors += [
            v for state in inner.state.values() for v in state.values() if isinstance(v, Tensor)
        ]
    return tensors
