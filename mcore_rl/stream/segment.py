"""Allocates tensors in an anonymous segment of memory that other processes can map."""

import mmap
import os
import weakref
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

_ALIGNED_BYTES = 64
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux"""


def map_segment(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map a segment, which lives as long as one of its mappings or descriptors.

    Pages are large where the system allows it, and are populated now, so that the first sync
    doesn't wait for them.
    """
    mapped = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED)
    with suppress(OSError):  # a kernel without large pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    with suppress(OSError):  # before Linux 5.14 the first sync populates them
        mapped.madvise(_POPULATE_WRITE)
    return mapped


class Segment:
    """Memory without a name, which ends with the last process that maps it.

    address     where it is mapped in this process
    descriptor  closed with this object
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create("mcore_rl_weights")
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, num_bytes)
        self._mapped = map_segment(self.descriptor, num_bytes)
        self.address = torch.frombuffer(self._mapped, dtype=torch.uint8).data_ptr()

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `tensor` lies in this segment."""
        return self.address <= tensor.data_ptr() < self.address + self.num_bytes

    def tensor_like(self, tensor: Tensor, offset: int) -> Tensor:
        """Return a tensor at byte `offset`, which has a storage of its own."""
        if tensor.nbytes == 0:
            return torch.empty_like(tensor)
        bytes_B = torch.frombuffer(
            self._mapped, dtype=torch.uint8, count=tensor.nbytes, offset=offset
        )
        strides = torch.empty_like(tensor, device="meta").stride()
        return bytes_B.view(tensor.dtype).as_strided(tensor.shape, strides)


def allocate_like(tensors: Mapping[str, Tensor]) -> tuple[Segment, dict[str, Tensor]]:
    """Return tensors like these, and the segment in which they lie."""
    offsets: dict[str, int] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        offsets[name] = num_bytes
        num_bytes += -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    segment = Segment(max(num_bytes, mmap.PAGESIZE))
    return segment, {name: segment.tensor_like(t, offsets[name]) for name, t in tensors.items()}
