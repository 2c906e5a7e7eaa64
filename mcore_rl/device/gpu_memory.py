"""Where tensors are, streams of ordered work on a device, and GPU memory shared between processes.

Host work is synchronous, so a stream on the CPU does nothing; processes share host memory elsewhere
(mcore_rl/weight_sync).
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor

_Storage: Any = torch.UntypedStorage  # stubs lack sharing
_Core: Any = torch._C  # stubs lack the allocator's settings
_EXPANDABLE = "expandable_segments"


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


@contextmanager
def keep_segments_fixed() -> Iterator[None]:
    """Have torch allocate memory within the block that another process can open by a handle.

    With `expandable_segments:True`, which `PYTORCH_CUDA_ALLOC_CONF` sets, torch would pass file
    descriptors on by pidfd_getfd, which containers forbid. Settings hold for the whole process:
    what other threads allocate meanwhile lies in fixed segments, too.
    """
    before = _Core._accelerator_getAllocatorSettings()
    settings = [setting.strip() for setting in before.split(",")]
    if f"{_EXPANDABLE}:True" not in settings:
        yield
        return
    fixed = [s for s in settings if not s.startswith(f"{_EXPANDABLE}:")]
    _Core._accelerator_setAllocatorSettings(",".join([*fixed, f"{_EXPANDABLE}:False"]))
    try:
        yield
    finally:
        _Core._accelerator_setAllocatorSettings(before)


class LentMemory:
    """Memory for receivers to open, which is lent to one channel after another and never freed.

    torch keeps memory that it has exported until the other process says that it has closed it. A
    process that is killed does not, so freed memory would stay taken until this process ends.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = Lock()

    def take(self, num_words: int, device: torch.device) -> Tensor:
        """Return `num_words` int64 words of zeros on `device`, which are the caller's alone.

        Takes the smallest memory that was given back and is large enough. If all are too small, the
        largest makes room. Raises RuntimeError if `device` has no memory left.
        """
        with self._lock:
            free = sorted((w for w in self._free if w.device == device), key=len)
            fitting = [words_W for words_W in free if len(words_W) >= num_words]
            taken = fitting[:1] or free[-1:]
            self._free = [w for w in self._free if not any(w is words_W for words_W in taken)]
        if fitting:
            return fitting[0][:num_words].zero_()
        del free, taken
        with keep_segments_fixed():
            return torch.zeros(num_words, dtype=torch.int64, device=device)

    def give_back(self, words_W: Tensor) -> None:
        """Lend these words to others. Nothing queued on the device may write them any more."""
        whole_W = torch.empty(0, dtype=torch.int64, device=words_W.device)
        whole_W.set_(words_W.untyped_storage())
        with self._lock:
            self._free.append(whole_W)


LENT = LentMemory()
"""That of this process."""


def export_memory(words_W: Tensor) -> bytes:
    """Return a handle with which another process of this machine can open a tensor's GPU memory.

    What is queued for the tensor is done on return. One process can open it, once. The memory is
    freed when both processes have released it. If the other process is killed, it is freed when
    this one ends. Raises RuntimeError if the memory cannot be shared.
    """
    torch.cuda.current_stream(words_W.device).synchronize()
    fields = words_W.untyped_storage()._share_cuda_()  # type: ignore[attr-defined]
    plain = [field.hex() if isinstance(field, bytes) else field for field in fields[1:]]
    return json.dumps(plain).encode()


def open_memory(handle: bytes, device: torch.device) -> Tensor:
    """Open another process's memory as int64 words that `device` reads; RuntimeError if that fails.

    The memory may lie on another GPU that `readable_gpus` names. It is mapped for `device`
    (cudaIpcMemLazyEnablePeerAccess), so this process needs no CUDA context on that GPU. It may be
    longer than what was exported.
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
