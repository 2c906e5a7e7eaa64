"""Finds the parameter of an engine rank, and the element of it, at which a view begins.

    qkv_proj [12, 8]      view qkv_proj[4:8], strides (8, 1)     locate -> ("qkv_proj", 32)
                          a new tensor, or one of another dtype  locate -> None

Several parameters may lie in one memory block.
"""

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor


class LocalTensors:
    """The local tensors of a rank; raises ValueError naming one that is not contiguous."""

    def __init__(self, local_tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(local_tensors)
        self.refresh()

    def refresh(self) -> None:
        """Find the tensors where they lie now, after someone gave them new memory."""
        self._storages = {name: tensor.untyped_storage() for name, tensor in self._tensors.items()}
        self._names: dict[int, list[str]] = {}
        """Memory block -> local tensors that lie in it."""
        for name, tensor in self._tensors.items():
            if not tensor.is_contiguous():
                raise ValueError(
                    f"parameter {name!r} is not contiguous (strides {tensor.stride()})"
                )
            self._names.setdefault(self._storages[name]._cdata, []).append(name)

    def locate(self, view: Tensor) -> tuple[str, int] | None:
        """Return (local tensor, element of it that `view` begins at), or None if it is in none."""
        for name in self._names.get(view.untyped_storage()._cdata, ()):
            tensor = self._tensors[name]
            offset = int(view.storage_offset()) - int(tensor.storage_offset())
            if 0 <= offset < tensor.numel() and view.dtype == tensor.dtype:
                return name, offset
        return None

    def check_unchanged(self) -> None:
        """Raise ValueError if a parameter got new memory, to which no recorded place applies."""
        for name, tensor in self._tensors.items():
            if tensor.untyped_storage()._cdata != self._storages[name]._cdata:
                raise ValueError(
                    f"load_weights replaced the memory of parameter {name!r}: cannot be traced"
                )

    @cached_property
    def device(self) -> torch.device:
        """The device of the parameters; the CPU if there are none."""
        return next((tensor.device for tensor in self._tensors.values()), torch.device("cpu"))
