"""Keeps a frozen copy of the weights in host memory and swaps it in for a forward pass."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class ReferenceWeights:
    """A host copy of the tensors it is made from.

    While it is swapped in, a second host copy keeps the current values.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._frozen = _host_copy(tensors)

    @contextmanager
    def swapped_in(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block `tensors` hold the frozen values; afterwards the previous ones again."""
        current = _host_copy(tensors)
        _copy(self._frozen, tensors)
        try:
            yield
        finally:
            _copy(current, tensors)


def _host_copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])
