"""Tensors in, the device they lie on out; work on it in an order of its own; GPU memory shared by processes.

On the host work is done when it is called, and processes share memory without asking anything here.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_Storage: Any = torch.UntypedStorage  # stubs lack sharing


def common_device(tensors: Iterable[Tensor]) -> torch.device:
    """Where all of them lie; the host if they lie in several places."""
    devices = {tensor.device for tensor in tensors}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


class DeviceStream:
    """Work on one device in order, beside whatever else the device does: on a GPU a CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is called inside begins when the work before it is done, and is done when this ends well."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def synchronize(self) -> None:
        """Wait until all work called so far is done."""
        if self._stream is not None:
            self._stream.synchronize()


def gpu_id(device: torch.device) -> str:
    """The same in every process that sees this GPU; empty for the host."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def readable_gpus(device: torch.device) -> tuple[str, ...]:
    """The GPUs whose memory can be read from `device`: itself, and peers that this process sees."""
    if device.type != "cuda":
        return ()
    return tuple(
        gpu_id(peer)
        for peer in _visible_gpus()
        if peer.index == device.index or torch.cuda.can_device_access_peer(device, peer)
    )


def export_memory(words_W: Tensor) -> bytes:
    """A handle by which one other process of this machine can open the GPU memory of a whole tensor, once.

    The memory lasts until both processes have let go of it; that of a process that was killed is returned
    when this process ends.
    """
    fields = words_W.untyped_storage()._share_cuda_()  # type: ignore[attr-defined]
    plain = [field.hex() if isinstance(field, bytes) else field for field in fields[1:]]
    return json.dumps([gpu_id(words_W.device), *plain]).encode()


def open_memory(handle: bytes) -> Tensor:
    """int64 words of another process, on that process's GPU; RuntimeError if they cannot be opened."""
    gpu, memory, num_bytes, offset, counter, counter_offset, event, has_event = json.loads(handle)
    at = {gpu_id(device): device for device in _visible_gpus()}[gpu]
    storage = _Storage._new_shared_cuda(
        at.index,
        bytes.fromhex(memory),
        num_bytes,
        offset,
        bytes.fromhex(counter),
        counter_offset,
        bytes.fromhex(event),
        has_event,
    )
    return torch.empty(0, dtype=torch.int64, device=at).set_(storage)


def _visible_gpus() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
