"""Segments: tensors lie in memory that a descriptor leads to, each in storage of its own."""

import mmap
import os

import numpy as np
import pytest
import torch

from mcore_rl.weight_sync.transports.host import segment as segment_module
from mcore_rl.weight_sync.transports.host.segment import (
    Segment,
    allocate_like,
    map_segment,
    populate,
    write_at,
)


def test_tensors_have_their_shapes_strides_and_storages_in_memory_that_others_can_map() -> None:
    like = {
        "matrix": torch.zeros(3, 5, dtype=torch.bfloat16),
        "transposed": torch.zeros(4, 6).t(),
        "none": torch.zeros(0, 7),
        "scalar": torch.zeros((), dtype=torch.float64),
    }
    segment, offsets = allocate_like(like)
    tensors = {
        name: segment.make_tensor_like(tensor, offsets[name]) for name, tensor in like.items()
    }
    mapped = mmap.mmap(os.dup(segment.descriptor), segment.num_bytes)
    for name, tensor in tensors.items():
        assert tensor.shape == like[name].shape and tensor.dtype == like[name].dtype
        assert tensor.stride() == like[name].stride()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert segment.holds(tensor) == (name != "none") and not segment.holds(like[name])
        before = bytes(mapped)
        tensor.fill_(1)
        changed = sum(a != b for a, b in zip(before, bytes(mapped), strict=True))
        assert (changed > 0) == (tensor.numel() > 0)
    assert all((tensor == 1).all() for tensor in tensors.values()), "they do not overlap"


@pytest.mark.parametrize("asks", [False, True])
def test_values_are_written_between_one_another_also_where_large_pages_are_asked_for(
    asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_module, "_must_ask_for_large_pages", lambda: asks)
    values = {
        "matrix": torch.randn(3, 5).bfloat16(),
        "transposed": torch.randn(4, 6).t(),
        "column": torch.randn(40, 50)[:, 3],
        "none": torch.zeros(0, 7),
        "scalar": torch.tensor(5.0, dtype=torch.float64),
    }
    many = {f"part {i}": torch.full((i % 7,), i) for i in range(2 * os.sysconf("SC_IOV_MAX"))}
    segment, offsets = allocate_like(values | many)
    segment.write(values | many, offsets)
    for name, tensor in (values | many).items():
        assert torch.equal(segment.make_tensor_like(tensor, offsets[name]), tensor), name


def test_a_write_that_the_kernel_cuts_short_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwritev
    monkeypatch.setattr(
        os, "pwritev", lambda fd, buffers, at: whole(fd, [b[:7] for b in buffers[:1]], at)
    )
    segment = Segment(mmap.PAGESIZE)
    parts = [memoryview(os.urandom(size)) for size in (5, 0, 7, 30, 1)]
    write_at(segment.descriptor, parts, 11)
    expected = b"".join(parts)
    assert os.pread(segment.descriptor, 100, 11)[: len(expected)] == expected


def test_pages_of_parts_are_populated_and_no_others() -> None:
    page = mmap.PAGESIZE
    segment = Segment(64 * page)
    starts = np.array([20 * page + 5, 3 * page, 4 * page - 1, 40 * page])
    stops = np.array([22 * page + 1, 3 * page + 8, 5 * page, 40 * page])
    populate(segment.address + starts, segment.address + stops)
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(segment.address // page * 8)
        entries = np.frombuffer(pagemap.read(64 * 8), np.uint64)
    assert np.flatnonzero(entries >> np.uint64(63)).tolist() == [3, 4, 20, 21, 22]
    populate(starts[:0], stops[:0])


def test_memory_outlives_the_segment_as_long_as_a_mapping_does() -> None:
    segment = Segment(mmap.PAGESIZE)
    descriptor = segment.descriptor
    mapped = map_segment(descriptor, segment.num_bytes)
    tensor = segment.make_tensor_like(torch.zeros(8), 64)
    del segment
    tensor.fill_(3)
    assert torch.frombuffer(mapped, dtype=torch.float32, count=8, offset=64).tolist() == [3] * 8
    try:
        os.fstat(descriptor)
    except OSError:
        return
    raise AssertionError(f"descriptor {descriptor} is still open")
