"""Copies one side of pairs of tensors to the other, in as few calls and GPU kernels as possible."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcore_rl.types import Array

_copy_all: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]

_LARGE_BYTES = 256 * 2**10
"""From this size on, a pair of equal dtypes on the host is copied by memcpy, which is faster than
torch's loop over elements. Smaller pairs take one call of torch together: each call gives up the
interpreter's lock, and an engine that decodes may hold it for long.
"""

_Kind = tuple[torch.dtype, torch.dtype, bool]


class Copies:
    """Copies between tensors of equal shape, cast where dtypes differ.

    A GPU copies a list of pairs in one kernel if each side has one dtype and every pair is dense
    with equal strides. A single pair that differs makes it copy the whole list one by one, so pairs
    are grouped by these properties (torch 2.13, ForeachBinaryOpList.cu).
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        groups: dict[_Kind, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._large: list[tuple[Array, Array]] = []
        for left, right in pairs:
            is_dense = left.is_contiguous() and right.is_contiguous()
            if is_dense and _is_large_on_host(left, right):
                self._large.append((_bytes_of(left), _bytes_of(right)))
                continue
            groups[left.dtype, right.dtype, is_dense].append((left, right))
        self._groups = [tuple(map(list, zip(*group, strict=True))) for group in groups.values()]

    def to_right(self) -> None:
        for left, right in self._groups:
            _copy_all(right, left)
        for left_B, right_B in self._large:
            np.copyto(right_B, left_B)

    def to_left(self) -> None:
        for left, right in self._groups:
            _copy_all(left, right)
        for left_B, right_B in self._large:
            np.copyto(left_B, right_B)


def _is_large_on_host(left: Tensor, right: Tensor) -> bool:
    return (
        left.nbytes >= _LARGE_BYTES
        and left.dtype == right.dtype
        and left.device.type == right.device.type == "cpu"
    )


def _bytes_of(tensor: Tensor) -> Array:
    """Return a dense host tensor's memory as uint8."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()
