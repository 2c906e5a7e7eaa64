"""Counts the memory of tensors that are made within a block, and how much of it lived at once."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class PeakAllocations(TorchDispatchMode):
    """The storages that operations of the block make, backward passes included.

    Those that were there before do not count, nor do buffers inside of operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {tensor.untyped_storage()._cdata for tensor in _list_tensors((args, kwargs))}
        out = func(*args, **kwargs)
        for tensor in _list_tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._known:
                self._add(storage)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= num_bytes


def _list_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, Tensor)]
