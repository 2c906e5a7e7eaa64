"""Opens GPU memory of another process without a copy and without a count of references.

torch shares a storage with a count of its readers, so memory that a killed process had opened is
never freed. Here the driver's handles travel alone: whoever exports memory must keep it until the
other process has closed it, or is gone.
"""

import ctypes
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
"""cudaIpcMemLazyEnablePeerAccess: memory of another GPU is mapped for the current one."""


def can_export(device: torch.device) -> bool:
    """Return whether torch's memory on `device` can be exported.

    Memory of expandable segments cannot (PYTORCH_CUDA_ALLOC_CONF).
    """
    if not can_open(device):
        return False
    with suppress(RuntimeError, ImportError):
        export_memory(torch.zeros(1, device=device).data_ptr())
        return True
    return False


def can_open(device: torch.device) -> bool:
    """Return whether kernels on `device` can read memory that other processes export."""
    return device.type == "cuda" and all(map(find_spec, ("triton", "cuda")))


def export_memory(address: int) -> tuple[bytes, int]:
    """Return the handle of the allocation that `address` lies in, and its bytes before `address`.

    Raises RuntimeError if the driver gives no handle.
    """
    from cuda.bindings import driver, runtime  # pyright: ignore[reportMissingImports]

    base, _ = _check(driver.cuMemGetAddressRange(address), "the range of an allocation")
    handle = _check(runtime.cudaIpcGetMemHandle(int(base)), "a handle of GPU memory")
    return ctypes.string_at(handle.getPtr(), _HANDLE_BYTES), address - int(base)


def open_memory(handle: bytes, device: torch.device) -> int:
    """Map another process's allocation for `device`; return the address of its first byte.

    Raises RuntimeError if the driver refuses, as it does for memory of the calling process.
    """
    from cuda.bindings import runtime  # pyright: ignore[reportMissingImports]

    assert len(handle) == _HANDLE_BYTES, f"a handle of {len(handle)} bytes"
    opened = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(opened.getPtr(), handle, _HANDLE_BYTES)
    with torch.cuda.device(device):
        flags = _LAZY_PEER_ACCESS
        return int(_check(runtime.cudaIpcOpenMemHandle(opened, flags), "another process's memory"))


def close_memory(address: int, device: torch.device) -> None:
    """Unmap what `open_memory` mapped; work that reads it must be done."""
    from cuda.bindings import runtime  # pyright: ignore[reportMissingImports]

    with torch.cuda.device(device):
        _check(runtime.cudaIpcCloseMemHandle(address), "an end of another process's memory")


def _check(returned: tuple[Any, ...], what: str) -> Any:
    """Return what a call of cuda.bindings returned behind its status."""
    status, *values = returned
    if int(status):
        raise RuntimeError(f"CUDA gave no {what}: {status.name}")
    return tuple(values) if len(values) > 1 else values[0] if values else None
