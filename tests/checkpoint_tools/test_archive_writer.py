"""torch.load reads the archives that are written here, of any size."""

import io
import os
import zlib
from pathlib import Path

import pytest
import torch

from checkpoint_tools.archive import STORAGES, Locator
from checkpoint_tools.archive_writer import make_archive
from checkpoint_tools.stored import Chunk


@pytest.mark.parametrize("dtype", sorted(set(STORAGES.values())))
def test_torch_loads_what_we_write(dtype: str) -> None:
    tensor = torch.arange(35).view(5, 7).to(getattr(torch, dtype))
    data = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    archive = make_archive(dtype, (5, 7))
    content = archive.prefix + data + archive.suffix(zlib.crc32(data))
    assert len(content) == archive.num_bytes
    assert len(archive.prefix) % 64 == 0
    assert torch.equal(torch.load(io.BytesIO(content), weights_only=True), tensor)


def test_an_archive_of_more_than_4_gib_has_its_sizes(tmp_path: Path) -> None:
    """Written with a hole in place of the elements, so that it takes no room on the disk."""
    shape = (5, 1 << 30)
    archive = make_archive("uint8", shape)
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(archive.prefix)
        file.seek(archive.data_bytes, os.SEEK_CUR)
        file.write(archive.suffix(0))
    assert path.stat().st_size == archive.num_bytes
    chunk = Chunk("t", "uint8", (0, 0), shape, str(path), 0, archive.num_bytes, True)
    with path.open("rb") as file:
        assert Locator().locate(file.fileno(), chunk).start == len(archive.prefix)
    mapped = torch.load(path, weights_only=True, mmap=True)
    assert tuple(mapped.shape) == shape
    assert int(mapped[4, -1]) == 0


def test_a_dtype_without_a_storage_type_is_refused() -> None:
    with pytest.raises(ValueError, match="tensors of float8_e4m3fn cannot be written"):
        make_archive("float8_e4m3fn", (2, 2))
