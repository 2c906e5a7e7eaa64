"""Moves parts of a training model between device memory and host memory, by their names.

    held: nothing            everything is in host memory: enough for a checkpoint or an export
          weights            parameters: enough for a forward pass or a weight sync
          weights, training  also gradients and optimizer state: a step

Storages that are moved out are empty until they are moved back, so that reading them meanwhile
fails instead of giving old values; `readable` gives their copies. Views of them stay valid. Host
memory is allocated (pinned) once and kept. Gradients are not copied: each step begins with zeros.

A frozen copy of the weights, in host memory, is swapped in for the reference's forward passes:

    device   current weights ----> frozen weights ----> current weights
               | to host   ^ from host   (forward pass)   ^ from host
               v           |                              |
    host     buffer        frozen copy                    buffer

Copies from and to pinned memory are queued in the order of the GPU's work, so the host never waits.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from mcore_rl.device import allocate_pinned_like, empty_cache, host_memory, synchronize
from mcore_rl.train.lora.turns import Turns
from mcore_rl.train.optimizer import parts_of
from mcore_rl.train.weights import local_tensors


class ReferenceWeights:
    """A host copy of the tensors it is made from.

    A second one, made at the first pass, keeps the current values while it is swapped in.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._frozen = _buffers(tensors)
        self._current: dict[str, Tensor] = {}
        _copy(tensors, self._frozen)

    @contextmanager
    def swap_in(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block `tensors` hold the frozen values; afterwards the previous ones again."""
        self._current = self._current or _buffers(tensors)
        _copy(tensors, self._current)
        _copy(self._frozen, tensors)
        try:
            yield
        finally:
            _copy(self._current, tensors)


def _buffers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: allocate_pinned_like(tensor) for name, tensor in tensors.items()}


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name], non_blocking=True)


WEIGHTS, TRAINING = "weights", "training"


class DeviceMemory:
    """The device memory of a rank's model chunks and optimizer; at first everything is held.

    Values may change only while "training" is held.
    """

    def __init__(self, turns: Turns) -> None:
        """`turns` has the chunks, and the optimizer of each adapter or of all weights."""
        self._turns = turns
        self.find_storages()

    def find_storages(self) -> None:
        """Find all storages again; an optimizer may allocate new ones when it loads its state.

        Call it while everything is held.
        """
        of_weights, of_gradients, of_state = [], [], []
        for learner in self._turns.visit():
            of_weights += _weights(learner.chunks)
            of_gradients += _gradients(learner.chunks)
            of_state += list_optimizer_tensors(learner.optimizer)
        weights, state = _storages(of_weights), _storages(of_state)
        gradients = _storages(of_gradients, has_values=False)
        known = {memory.key for memory in [*weights, *gradients]}
        training = [*gradients, *(memory for memory in state if memory.key not in known)]
        self._parts = {WEIGHTS: weights, TRAINING: training}
        self._by_key = {memory.key: memory for memory in [*weights, *training]}
        self._held = {WEIGHTS, TRAINING}

    def hold(self, wanted: Collection[str]) -> None:
        """Keep exactly the parts `wanted` on the device; return once other memory is free."""
        if TRAINING in self._held:
            for memory in self._by_key.values():
                memory.is_copied = False
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

    def overwrites_host(self, wanted: Collection[str]) -> bool:
        """Return whether `hold(wanted)` writes to the copies in host memory."""
        moved_out = self._storages_of(self._held - set(wanted))
        return any(TRAINING in self._held or not memory.is_copied for memory in moved_out)

    def readable(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, or the view of its copy in host memory if its storage is moved out."""
        memory = self._by_key.get(tensor.untyped_storage()._cdata)
        return tensor if memory is None or memory.is_held else memory.view_on_host(tensor)

    def read_bytes(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the bytes of a storage as uint8: in device memory, or of its copy if moved out."""
        memory = self._by_key.get(storage._cdata)
        if memory is None:
            return _bytes_of(storage)
        return memory.bytes_on_device() if memory.is_held else memory.bytes_on_host()

    @property
    def num_bytes(self) -> int:
        """Bytes that are on the device now."""
        return sum(memory.num_bytes for memory in self._storages_of(self._held))

    def _storages_of(self, parts: Collection[str]) -> list["_Memory"]:
        return [memory for part in sorted(parts) for memory in self._parts[part]]


class _Memory:
    """One device storage and its host copy; any number of tensors are views of the storage."""

    def __init__(self, storage: torch.UntypedStorage, *, has_values: bool) -> None:
        """Without `has_values`, its values are not kept while it is moved out."""
        self._storage = storage
        self._has_values = has_values
        self._host: Tensor | None = None
        self.key = storage._cdata
        self.num_bytes = storage.nbytes()
        self.is_copied = False
        """True if the host copy has the current values."""

    @property
    def is_held(self) -> bool:
        return self._storage.nbytes() > 0

    def copy_to_host(self) -> None:
        if self.is_copied or not self._has_values:
            return
        if self._host is None:
            self._host = host_memory(self.num_bytes)
        self._host.copy_(self.bytes_on_device(), non_blocking=True)
        self.is_copied = True

    def free(self) -> None:
        self._storage.resize_(0)

    def copy_back(self) -> None:
        self._storage.resize_(self.num_bytes)
        if self._has_values:
            assert self._host is not None
            self.bytes_on_device().copy_(self._host, non_blocking=True)

    def view_on_host(self, tensor: Tensor) -> Tensor:
        """Return a view of the host copy with the place and shape of `tensor` in the storage."""
        typed = self.bytes_on_host().view(tensor.dtype)
        return typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def bytes_on_host(self) -> Tensor:
        assert self._host is not None and self.is_copied, "its values are not in host memory"
        return self._host

    def bytes_on_device(self) -> Tensor:
        return _bytes_of(self._storage)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storages(tensors: Iterable[Tensor], *, has_values: bool = True) -> list[_Memory]:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return [
        _Memory(storage, has_values=has_values) for storage in storages.values() if storage.nbytes()
    ]


def _weights(chunks: Sequence[DistributedDataParallel]) -> list[Tensor]:
    """Return weights, saved buffers and low-rank factors."""
    return [*local_tensors(chunks).values(), *(p for chunk in chunks for p in chunk.parameters())]


def _gradients(chunks: Sequence[DistributedDataParallel]) -> list[Tensor]:
    return [
        buffer.grad_data
        for chunk in chunks
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
    ]


def list_optimizer_tensors(optimizer: MegatronOptimizer) -> list[Tensor]:
    """Return the main weights and the moments."""
    tensors: list[Tensor] = []
    for part in parts_of(optimizer):
        inner = part.optimizer
        for group in inner.param_groups:
            tensors += [parameter.data for parameter in group["params"]]
        for state in inner.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return tensors
