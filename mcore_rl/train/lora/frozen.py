"""Keeps the weights below factors in host memory, which a critic on the same GPUs may share.

    policy's rank   W0 --copy--> memory without a name <--map-- critic's rank of the same layout

    | bytes of the index | index: name -> dtype, shape, first byte | W0 of a tensor | ... |

What a critic's rank does not find there, or finds with other bits, it copies into memory of its
own. Weights that nobody else maps are kept in INT4 or block FP8 where the model's files have them
so (packed.py).
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from mcore_rl.device import allocate_pinned_like, pin_in_place
from mcore_rl.process.kept_memory import KeptMemory, map_kept
from mcore_rl.train.lora.packed import KeptPart, restore_parts

_log = logging.getLogger(__name__)
_INDEX_BYTES = 8
_ALIGNED_BYTES = 64
_MORE_DIGITS = 4
"""Room in the index for digits of places, which lie behind the index and all tensors before."""


@dataclass(frozen=True)
class BaseSharing:
    """Whether a rank's frozen weights lie in memory that others can map, and where others' lie.

    lends      others may map this rank's
    borrowed   path of those of another process; "": there are none
    """

    lends: bool = False
    borrowed: str = ""


ALONE = BaseSharing()


class FrozenWeights:
    """Copies of tensors in host memory, by name.

    path     of memory that others can map; "": these are this process's alone
    packed   of tensors that are kept in INT4 or block FP8 instead: their parts
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        sharing: BaseSharing = ALONE,
        packed: Mapping[str, Sequence[KeptPart]] = MappingProxyType({}),
    ) -> None:
        assert not packed or sharing == ALONE, "packed parts lie where no other process maps them"
        self.path = ""
        self.packed = packed
        tensors = {name: tensor for name, tensor in tensors.items() if name not in packed}
        self._memory = KeptMemory()
        if sharing.lends:
            self.copies = self._lend(tensors)
            return
        found = _map_equal(sharing.borrowed, tensors) if sharing.borrowed else {}
        own = {name: _copy_to_host(t) for name, t in tensors.items() if name not in found}
        self.copies = {**found, **own}
        parts = (kept.part for of_tensor in packed.values() for kept in of_tensor)
        self.own_bytes = sum(kept.nbytes for kept in (*own.values(), *parts))

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set tensors to their frozen values."""
        for name, copy in self.copies.items():
            tensors[name].copy_(copy, non_blocking=True)
        restore_parts(self.packed, tensors)

    def _lend(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        index, num_bytes = _lay_out(tensors)
        encoded = json.dumps(index).encode()
        self.path = self._memory.reserve("frozen_weights", num_bytes)
        finalize(self, self._memory.close)
        self.own_bytes = num_bytes
        bytes_B = _map(self.path)
        start = _INDEX_BYTES + len(encoded)
        head = len(encoded).to_bytes(_INDEX_BYTES, "little") + encoded
        bytes_B[:start] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        pin_in_place(bytes_B)
        copies = _view(bytes_B, index)
        for name, copy in copies.items():
            copy.copy_(tensors[name])
        return copies


Index = dict[str, tuple[str, list[int], int]]
"""Name -> dtype, shape, first byte."""


def _lay_out(tensors: Mapping[str, Tensor]) -> tuple[Index, int]:
    """Return the places of tensors behind their index, and the bytes of all."""
    index: Index = {
        name: (str(t.dtype).removeprefix("torch."), list(t.shape), 0) for name, t in tensors.items()
    }
    total = sum(tensor.nbytes + _ALIGNED_BYTES for tensor in tensors.values())
    room = len(json.dumps(index)) + len(tensors) * (len(str(total)) + _MORE_DIGITS)
    end = _INDEX_BYTES + room
    for name, tensor in tensors.items():
        start = -(-end // _ALIGNED_BYTES) * _ALIGNED_BYTES
        index[name] = (*index[name][:2], start)
        end = start + tensor.nbytes
    assert len(json.dumps(index)) <= room, f"an index of {len(index)} tensors is longer than {room}"
    return index, end


def _map(path: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(map_kept(path), dtype=np.uint8))


def _view(bytes_B: Tensor, index: Index) -> dict[str, Tensor]:
    views = {}
    for name, (kind, shape, start) in index.items():
        dtype = getattr(torch, kind)
        stop = start + prod(shape) * dtype.itemsize
        views[name] = bytes_B[start:stop].view(dtype).view(shape)
    return views


def _map_equal(path: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of another process's memory that equal those of the same name."""
    try:
        bytes_B = _map(path)
    except ValueError as error:
        _log.warning("frozen weights are copied, as the policy's are gone: %s", error)
        return {}
    length = int.from_bytes(bytes(bytes_B[:_INDEX_BYTES].tolist()), "little")
    encoded = bytes(bytes_B[_INDEX_BYTES : _INDEX_BYTES + length].numpy())
    lent = _view(bytes_B, {name: tuple(entry) for name, entry in json.loads(encoded).items()})
    equal = {
        name: lent[name]
        for name, tensor in tensors.items()
        if name in lent
        and lent[name].dtype == tensor.dtype
        and torch.equal(lent[name], tensor.cpu())
    }
    if equal:
        pin_in_place(bytes_B)
    return equal


def _copy_to_host(tensor: Tensor) -> Tensor:
    copy = allocate_pinned_like(tensor)
    copy.copy_(tensor)
    return copy
