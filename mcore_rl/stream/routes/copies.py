"""Pairs of tensors in; one side copied to the other in as few calls, and on a GPU kernels, as can be."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_copy_all: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class Copies:
    """Copies between tensors of equal shape, cast on the way.

    A GPU does a list of copies in one kernel if each side has one dtype and all tensors are dense, with equal
    strides in each pair; a single other pair would have all of the list copied one by one. So pairs that are
    alike in this go together (torch 2.13, ForeachBinaryOpList.cu).
    """

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        groups: dict[tuple[torch.dtype, torch.dtype, bool], list[tuple[Tensor, Tensor]]] = (
            defaultdict(list)
        )
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
