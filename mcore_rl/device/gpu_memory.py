"""Where tensors are, streams of ordered work on a device, and GPU memory shared between processes.

Host work is synchronous, so a stream on the CPU does nothing; processes share host memory elsewhere
(mcore_rl/weight_sync).
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_Storage: Any = torch.UntypedStorage  # stubs lack sharing


def common_device(tensors: Iterable[Tensor]) -> torch.device:
    """Return the device of all tensors, or the CPU if they are on several."""
    devices = {tensor.device for tensor in tensors}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


class DeviceStream:
    """Ordered work on one device, concurrent with its other work; a CUDA stream on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the body after the work queued before it; wait for it to finish on a normal exit."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def synchronize(self) -> None:
        """Wait for all work queued so far."""
        if self._stream is not None:
            self._stream.synchronize()


def gpu_id(device: torch.device) -> str:
    """Return the UUID of the GPU, equal in every process that sees it; "" for the CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def readable_gpus(device: torch.device) -> tuple[str, ...]:
    """Return the UUIDs of the visible GPUs whose memory `device` can read, itself included."""
    if device.type != "cuda":
        return ()
    return tuple(
        gpu_id(peer)
        for peer in _visible_gpus()
        if peer.index == device.index or torch.cuda.can_device_access_peer(device, peer)
    )


def export_memory(words_W: Tensor) -> bytes:
    """Return a handle with which another process of this machine can open a tensor's GPU memory.

    What is queued for the tensor is done on return. One process can open it, once. The memory is
    freed when both processes have released it. If the other process is killed, it is freed when
    this one ends.
    """
    torch.cuda.current_stream(words_W.device).synchronize()
    fields = words_W.untyped_storage()._share_cuda_()  # type: ignore[attr-defined]
    plain = [field.hex() if isinstance(field, bytes) else field for field in fields[1:]]
    return json.dumps(plain).encode()


def open_memory(handle: bytes, device: torch.device) -> Tensor:
    """Open another process's memory as int64 words that `device` reads; RuntimeError if that fails.

    The memory may lie on another GPU that `readable_gpus` names. It is mapped for `device`
    (cudaIpcMemLazyEnablePeerAccess), so this process needs no CUDA context on that GPU.
    """
    memory, num_bytes, offset, counter, counter_offset, event, _ = json.loads(handle)
    storage = _Storage._new_shared_cuda(
        device.index,
        bytes.fromhex(memory),
        num_bytes,
        offset,
        bytes.fromhex(counter),
        counter_offset,
        bytes.fromhex(event),
        False,  # the sender has waited for its work: no event to wait for
    )
    return torch.empty(0, dtype=torch.int64, device=device).set_(storage)


def _visible_gpus() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
