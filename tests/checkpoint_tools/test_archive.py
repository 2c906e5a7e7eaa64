"""Elements are located in the archives of torch.save; damaged and hostile archives are refused."""

import io
import os
import zlib
from pathlib import Path

import pytest
import torch

from checkpoint_tools.archive import Located, Locator
from checkpoint_tools.stored import Chunk


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "int64"])
def test_we_find_the_elements_of_what_torch_writes(tmp_path: Path, dtype: str) -> None:
    tensor = torch.arange(24).view(4, 6).to(getattr(torch, dtype))
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    path = tmp_path / "file"
    path.write_bytes(b"before" + buffer.getvalue() + b"after")
    chunk = Chunk("t", dtype, (0, 0), (4, 6), str(path), 6, len(buffer.getvalue()), True)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        found = Locator().locate(descriptor, chunk)
        data = os.pread(descriptor, tensor.nbytes, found.start)
        wrong = Chunk("t", dtype, (0, 0), (6, 4), str(path), 6, len(buffer.getvalue()), True)
        with pytest.raises(
            ValueError, match=r"file: tensor 't': .* shape \(4, 6\), by the metadata"
        ):
            Locator().locate(descriptor, wrong)
    finally:
        os.close(descriptor)
    assert data == tensor.view(-1).view(torch.uint8).numpy().tobytes()
    assert found.around[0].start == 6 and found.around[1].stop == 6 + len(buffer.getvalue())


def test_an_archive_like_an_earlier_one_is_read_as_if_it_were_the_first(tmp_path: Path) -> None:
    """Every byte around its elements flipped in turn: the same place or the same error."""
    path, archives = tmp_path / "file", []
    for value in (1.0, 2.0):
        buffer = io.BytesIO()
        torch.save(torch.full((2, 8), value), buffer)
        archives.append(buffer.getvalue())
    first, second = archives
    chunks = [
        Chunk("t", "float32", (0, 0), (2, 8), str(path), start, len(first), True)
        for start in (0, len(first))
    ]

    def both(content: bytes) -> list[Located | str]:
        path.write_bytes(first + content)
        with path.open("rb") as file:
            primed = Locator()
            primed.locate(file.fileno(), chunks[0])
            return [_found(locator, file.fileno(), chunks[1]) for locator in (primed, Locator())]

    found, anew = both(second)
    assert isinstance(found, Located) and found == anew
    assert found.data_crc32 == zlib.crc32(torch.full((2, 8), 2.0).numpy().tobytes())
    at, refused = found.start - len(first), 0
    for i in (*range(at), *range(at + 64, len(second))):
        found, anew = both(second[:i] + bytes([second[i] ^ 4]) + second[i + 1 :])
        assert found == anew
        refused += isinstance(found, str)
    assert refused > 100


def _found(locator: Locator, descriptor: int, chunk: Chunk) -> Located | str:
    try:
        return locator.locate(descriptor, chunk)
    except ValueError as error:
        return str(error)


def test_an_archive_that_names_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "made"),)

    buffer = io.BytesIO()
    torch.save(Evil(), buffer)
    path = tmp_path / "file"
    path.write_bytes(buffer.getvalue())
    chunk = Chunk("t", "float32", (0,), (1,), str(path), 0, len(buffer.getvalue()), True)
    with path.open("rb") as file, pytest.raises(ValueError, match=r"it names (posix|os)\.mkdir"):
        Locator().locate(file.fileno(), chunk)
    assert not (tmp_path / "made").exists()
