"""Segments: tensors lie in memory that a descriptor leads to, each in storage of its own."""

import mmap
import os

import torch

from mcore_rl.stream.segment import Segment, allocate_like, map_segment


def test_tensors_have_their_shapes_strides_and_storages_in_memory_that_others_can_map() -> None:
    like = {
        "matrix": torch.zeros(3, 5, dtype=torch.bfloat16),
        "transposed": torch.zeros(4, 6).t(),
        "none": torch.zeros(0, 7),
        "scalar": torch.zeros((), dtype=torch.float64),
    }
    segment, tensors = allocate_like(like)
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


def test_memory_outlives_the_segment_as_long_as_a_mapping_does() -> None:
    segment = Segment(mmap.PAGESIZE)
    descriptor = segment.descriptor
    mapped = map_segment(descriptor, segment.num_bytes)
    tensor = segment.tensor_like(torch.zeros(8), 64)
    del segment
    tensor.fill_(3)
    assert torch.frombuffer(mapped, dtype=torch.float32, count=8, offset=64).tolist() == [3] * 8
    try:
        os.fstat(descriptor)
    except OSError:
        return
    raise AssertionError(f"descriptor {descriptor} is still open")
