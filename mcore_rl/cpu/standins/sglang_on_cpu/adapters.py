"""Low-rank adapters that SGLang serves, without pinned memory."""

from typing import Any

import torch
from torch import Tensor


class _Unpinned:
    """The module torch, but for `pin_memory=True`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, data: Any, *, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.tensor(data, **options)

    def zeros(self, *size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        return torch.zeros(*size, **options)


def keep_adapters_in_plain_memory() -> None:
    """Serve low-rank adapters by SGLang's torch backend without pinned memory.

    Its layers and its batches pin small tensors of theirs, and without an accelerator torch pins
    nothing.
    """
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    unpinned: Any = _Unpinned()
    layers.torch = unpinned
    torch_backend.torch = unpinned
    torch.Tensor.pin_memory = _return_plain  # pyright: ignore[reportAttributeAccessIssue]


def _return_plain(tensor: Tensor, device: object = None) -> Tensor:
    return tensor
