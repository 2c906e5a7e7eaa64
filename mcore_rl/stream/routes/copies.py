"""Copies one side of pairs of tensors to the other, in as few calls and GPU kernels as possible."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_copy_all: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]

_Kind = tuple[torch.dtype, torch.dtype, bool]


class Copies:
    """Copies between tensors of equal shape, cast where dtypes differ.

    A GPU copies a list of pairs in one kernel if each side has one dtype and every pair is dense
    with equal strides. A single pair that differs makes it copy the whole list one by one, so pairs
    are grouped by these properties (torch 2.13, ForeachBinaryOpList.cu).
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        groups: dict[_Kind, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for left, right in pairs:
            is_dense = left.is_contiguous() and right.is_contiguous()
            groups[left.dtype, right.dtype, is_dense].append((left, right))
        self._groups = [tuple(map(list, zip(*group, strict=True))) for group in groups.values()]

    def to_right(self) -> None:
        for left, right in self._groups:
            _copy_all(right, left)

    def to_left(self) -> None:
        for left, right in self._groups:
            _copy_all(left, right)
