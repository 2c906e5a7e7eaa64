"""Allocates tensors in an anonymous segment of memory that other processes can map."""

import ctypes
import mmap
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mcore_rl.types import Array

_ALIGNED_BYTES = 64
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux"""
_MAX_BUFFERS = os.sysconf("SC_IOV_MAX")
_POLICY = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def map_segment(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Map a segment, which lives as long as one of its mappings or descriptors.

    The mapping has large pages if the system allows them.
    """
    mapped = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED)
    with suppress(OSError):  # A kernel without large pages.
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


def populate(starts: Array, stops: Array) -> None:
    """Enter the pages of mapped memory into this process's page table, so that writes don't wait.

    starts, stops   addresses of parts, int64
    """
    if len(starts) == 0:
        return
    firsts = starts // mmap.PAGESIZE * mmap.PAGESIZE
    order = np.argsort(firsts)
    firsts = firsts[order]
    ends = np.maximum.accumulate(-(-stops[order] // mmap.PAGESIZE) * mmap.PAGESIZE)
    begins = np.flatnonzero(np.append(True, firsts[1:] > ends[:-1]))
    lasts = np.append(begins[1:] - 1, len(ends) - 1)
    for first, end in zip(firsts[begins].tolist(), ends[lasts].tolist(), strict=True):
        # Before Linux 5.14 the call fails; then each first write to a page populates the page.
        _load_libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _POPULATE_WRITE)


@cache
def _load_libc() -> ctypes.CDLL:
    """Return libc, whose calls let other threads run; calls of the mmap module don't."""
    return ctypes.CDLL(None)


class Segment:
    """Memory without a name, which ends with the last process that maps it.

    address     of the mapping in this process
    descriptor  of the memory; closed with this object
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

    def make_tensor_like(self, tensor: Tensor, offset: int) -> Tensor:
        """Return a tensor at byte `offset`, with a storage of its own."""
        if tensor.nbytes == 0:
            return torch.empty_like(tensor)
        bytes_B = torch.frombuffer(
            self._mapped, dtype=torch.uint8, count=tensor.nbytes, offset=offset
        )
        return bytes_B.view(tensor.dtype).as_strided(tensor.shape, _find_dense_strides(tensor))

    def write(self, tensors: Mapping[str, Tensor], offsets: Mapping[str, int]) -> None:
        """Write the values of `tensors` to rising `offsets`, where make_tensor_like made tensors.

        The file is written, not the mapping: so new pages are not cleared first, which would take
        half of the time. Only mappings get large pages that must be asked for. Other threads run
        meanwhile, because few calls write everything.
        """
        if _must_ask_for_large_pages():
            for name, tensor in tensors.items():
                self.make_tensor_like(tensor, offsets[name]).copy_(tensor)
            return
        buffers: list[memoryview] = []
        stop = 0
        for name, tensor in tensors.items():
            buffers += [memoryview(bytes(offsets[name] - stop)), _view_bytes(tensor)]
            stop = offsets[name] + tensor.nbytes
        write_at(self.descriptor, buffers, 0)


def write_at(descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all buffers one after the other, in calls of up to 1,024 buffers and below 2 GiB."""
    left = [buffer for buffer in buffers if len(buffer) > 0]
    while left:
        written = os.pwritev(descriptor, left[:_MAX_BUFFERS], offset)
        offset += written
        num_whole = 0
        while num_whole < len(left) and written >= len(left[num_whole]):
            written -= len(left[num_whole])
            num_whole += 1
        left = left[num_whole:]
        if written:
            left[0] = left[0][written:]


def allocate_like(tensors: Mapping[str, Tensor]) -> tuple[Segment, dict[str, int]]:
    """Return a segment for tensors like these, and the offset of each tensor."""
    offsets: dict[str, int] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        offsets[name] = num_bytes
        num_bytes += -(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    return Segment(max(num_bytes, mmap.PAGESIZE)), offsets


def _view_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of the tensor, or of a dense copy, in memory order."""
    if tensor.stride() != _find_dense_strides(tensor):
        tensor = torch.empty_like(tensor).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def _find_dense_strides(tensor: Tensor) -> tuple[int, ...]:
    return torch.empty_like(tensor, device="meta").stride()


@cache
def _must_ask_for_large_pages() -> bool:
    """Return whether shared memory has large pages only where a mapping asks for them."""
    return _POLICY.exists() and "[advise]" in _POLICY.read_text()
