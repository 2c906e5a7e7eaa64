"""Tensors are assembled from chunks in bands of any size, cast or not; each byte is read once."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from checkpoint_tools import reader as reader_module
from checkpoint_tools.assembly import Assembly, Stretch, join_pieces, make_pieces
from checkpoint_tools.ledger import Ledger
from checkpoint_tools.reader import Reader, bands
from checkpoint_tools.stored import DTYPE_BYTES, DTYPES, Checkpoint, Chunk, StoredTensor
from mcore_rl.weights.hf.checksums import sum_file


def split(size: int, rng: random.Random) -> list[int]:
    """Edges of a partition of [0, size)."""
    inner = rng.sample(range(1, size), min(size - 1, rng.randrange(3)))
    return [0, *sorted(inner), size]


def store(tensor: torch.Tensor, path: Path, rng: random.Random) -> StoredTensor:
    """The tensor cut along every axis at random, its chunks end to end in a file."""
    boxes: list[list[tuple[int, int]]] = [[]]
    for size in tensor.shape:
        edges = split(size, rng)
        boxes = [[*box, (a, b)] for box in boxes for a, b in pairwise(edges)]
    rng.shuffle(boxes)
    dtype, chunks, content = str(tensor.dtype).removeprefix("torch."), [], b""
    for box in boxes:
        part = tensor[tuple(slice(a, b) for a, b in box)].contiguous()
        offset, shape = tuple(a for a, _ in box), tuple(part.shape)
        chunks.append(Chunk("t", dtype, offset, shape, str(path), len(content), part.nbytes, False))
        content += part.view(-1).view(torch.uint8).numpy().tobytes()
    path.write_bytes(content)
    return StoredTensor("t", dtype, tuple(tensor.shape), tuple(chunks))


def read(assembly: Assembly, band_bytes: int, reader: Reader) -> torch.Tensor:
    size = DTYPE_BYTES[assembly.dtype]
    out = bytearray(assembly.num_bytes)
    for band in bands(assembly, band_bytes):
        reader.fill(assembly, band, memoryview(out)[band.start * size : band.stop * size])
    return torch.frombuffer(out, dtype=getattr(torch, assembly.dtype)).view(assembly.shape)


@pytest.mark.parametrize("rows_before_numpy", [0, 5, 100_000])
def test_a_tensor_is_put_together_from_chunks_of_any_cut(
    tmp_path: Path, rows_before_numpy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "ROWS_BEFORE_NUMPY", rows_before_numpy)
    for seed in range(40):
        check_random_cut(tmp_path, seed)


def check_random_cut(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(1, 5)))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    stored = store(tensor, tmp_path / "file", rng)
    dtype = rng.choice(["bfloat16", "float32"])
    edges = [chunk.start for chunk in stored.chunks]
    sums = {"file": sum_file(tmp_path / "file", edges)}
    ledger = Ledger([Checkpoint("hf", tmp_path, {"t": stored}, (), sums)])
    reader = Reader(scratch_bytes=rng.choice([2, 16, 1000]))
    found = read(join_pieces("t", dtype, shape, stored.chunks), rng.choice([1, 40, 4096]), reader)
    assert torch.equal(found, tensor.to(getattr(torch, dtype)))
    record = reader.take_record()
    reader.close()
    assert sum(span.num_bytes for span in record.read[str(tmp_path / "file")]) == tensor.nbytes
    ledger.add(record)
    ledger.close()
    assert ledger.num_checked == len(stored.chunks)


@pytest.mark.parametrize(
    ("band_bytes", "dtype"), [(1, "bfloat16"), (60, "float32"), (4096, "bfloat16")]
)
def test_matrices_that_are_stored_transposed_are_turned_and_read_once(
    tmp_path: Path, band_bytes: int, dtype: str
) -> None:
    path = tmp_path / "file"
    stacked = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    path.write_bytes(stacked.view(torch.uint8).numpy().tobytes())
    chunks = [Chunk("t", "bfloat16", (0,), (5, 7), str(path), 70 * i, 70, False) for i in range(3)]
    pieces = [
        piece
        for i, chunk in enumerate(chunks)
        for piece in make_pieces(chunk, (1, 7, 5), (0, (35, 1, 7)), (35 * i, (35, 5, 1)), 5)
    ]
    assembly = Assembly("t", dtype, (3, 7, 5), tuple(pieces))
    assert (len(pieces), assembly.held_bytes) == (3, 70)
    reader = Reader(scratch_bytes=16)
    found = read(assembly, band_bytes, reader)
    assert torch.equal(found, stacked.transpose(1, 2).to(getattr(torch, dtype)))
    assert sum(span.num_bytes for span in reader.take_record().read[str(path)]) == stacked.nbytes


def test_what_no_chunk_has_is_zero_and_padding_is_read_for_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(12)))
    chunk = Chunk("t", "uint8", (0,), (12,), str(path), 0, 12, False)
    assembly = Assembly(
        "t", "uint8", (10,), tuple(make_pieces(chunk, (8,), (0, (1,)), (1, (1,)), 10))
    )
    reader = Reader(scratch_bytes=3)
    reader.skip(Stretch(chunk, 8, 4))
    assert read(assembly, 4, reader).tolist() == [0, *range(8), 0]
    ledger = Ledger([Checkpoint("hf", tmp_path, {}, (), {"file": sum_file(path)})])
    ledger.add(reader.take_record())
    ledger.close()
    assert ledger.num_checked == 1


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
