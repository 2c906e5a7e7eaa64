"""Differences of two tensors are counted and placed, over bands and by bits."""

import math
from pathlib import Path

import torch

from checkpoint_tools.assembly import whole
from checkpoint_tools.stored import Chunk
from checkpoint_tools.verify import Comparer, Pair


def pair_of(folder: Path, first: torch.Tensor, second: torch.Tensor) -> Pair:
    assemblies = []
    for name, tensor in (("first", first), ("second", second)):
        path = folder / name
        path.write_bytes(tensor.numpy().tobytes())
        shape = tuple(tensor.shape)
        chunk = Chunk("t", "float32", (0,) * len(shape), shape, str(path), 0, tensor.nbytes, False)
        assemblies.append(whole(chunk))
    return Pair("t", *assemblies)


def test_differences_in_several_bands_are_merged(tmp_path: Path) -> None:
    first = torch.zeros(300, 1000)
    second = first.clone()
    second[7, 30] = 0.5
    second[299, 999] = -2.0
    result = Comparer(4 << 20)(pair_of(tmp_path, first, second))
    difference = result.difference
    assert difference is not None
    assert (difference.index, difference.first, difference.second) == ((7, 30), 0.0, 0.5)
    assert (difference.count, difference.numel, difference.max_abs) == (2, 300_000, 2.0)
    assert result.crc32 != result.second_crc32


def test_bits_are_compared_not_values(tmp_path: Path) -> None:
    nan = torch.full((4,), math.nan)
    result = Comparer(4 << 20)(pair_of(tmp_path, nan, nan))
    assert result.difference is None and result.crc32 == result.second_crc32
    signed = Comparer(4 << 20)(pair_of(tmp_path, torch.zeros(4), -torch.zeros(4)))
    assert signed.difference is not None and signed.difference.count == 4


def test_a_single_tensor_is_only_read(tmp_path: Path) -> None:
    both = pair_of(tmp_path, torch.ones(5), torch.zeros(5))
    result = Comparer(4 << 20)(Pair("t", both.first))
    assert result.difference is None
    assert result.record.read.keys() == {str(tmp_path / "first")}
