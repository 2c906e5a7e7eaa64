"""Sizes and places of what is stored, as messages and plans state them."""

from pathlib import Path

import pytest
import torch

from checkpoint_tools.stored import DTYPE_BYTES, DTYPES, Checkpoint, Chunk, StoredTensor


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_has_torchs_size(dtype: str) -> None:
    assert DTYPE_BYTES[dtype] == getattr(torch, dtype).itemsize


def test_a_chunk_tells_file_tensor_and_offset() -> None:
    chunk = Chunk("w", "bfloat16", (4, 0), (2, 3), "/dir/file", 100, 640, True)
    assert (chunk.file, chunk.data_bytes) == ("file", 12)
    assert chunk.where == "/dir/file: tensor 'w' at (4, 0)"
    first = Chunk("w", "bfloat16", (0, 0), (4, 3), "/dir/file", 0, 24, False)
    assert first.where == "/dir/file: tensor 'w'"


def test_bytes_are_those_of_the_elements_not_of_the_archives_around_them() -> None:
    chunk = Chunk("w", "float32", (0,), (5,), "/dir/file", 0, 1000, True)
    tensors = {
        "w": StoredTensor("w", "float32", (5,), (chunk,)),
        "scalar": StoredTensor("scalar", "int64", (), ()),
    }
    assert Checkpoint("torch_dist", Path("/dir"), tensors, (), None).num_bytes == 20 + 8
