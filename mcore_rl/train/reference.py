"""Keeps a frozen copy of the weights in host memory and swaps it in for a forward pass.

    device   current weights ----> frozen weights ----> current weights
               | to host   ^ from host   (forward pass)   ^ from host
               v           |                              |
    host     buffer        frozen copy                    buffer

Copies from and to pinned memory are queued in the order of the GPU's work, so the host never waits.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from mcore_rl.device import pinned_like


class ReferenceWeights:
    """A host copy of the tensors it is made from.

    A second one, made at the first pass, keeps the current values while it is swapped in.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._frozen = _buffers(tensors)
        self._current: dict[str, Tensor] = {}
        _copy(tensors, self._frozen)

    @contextmanager
    def swapped_in(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block `tensors` hold the frozen values; afterwards the previous ones again."""
        self._current = self._current or _buffers(tensors)
        _copy(tensors, self._current)
        _copy(self._frozen, tensors)
        try:
            yield
        finally:
            _copy(self._current, tensors)


def _buffers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: pinned_like(tensor) for name, tensor in tensors.items()}


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name], non_blocking=True)
