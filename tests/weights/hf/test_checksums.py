"""CRC-32 of files and parts of files, and the manifest that keeps them."""

import json
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.weights.hf.checksums import (
    MANIFEST,
    ByteSpan,
    FileSums,
    read_manifest,
    sum_file,
    sum_ranges,
    sum_safetensors,
    sum_small_files,
    write_manifest,
)


def test_spans_that_do_not_tile_the_file_are_refused() -> None:
    with pytest.raises(ValueError, match="a span begins at byte 5, the one before ends at 4"):
        FileSums(9, (ByteSpan(0, 4, 0), ByteSpan(5, 4, 0)))
    with pytest.raises(ValueError, match="spans end at byte 4 of 9"):
        FileSums(9, (ByteSpan(0, 4, 0),))


def test_a_manifest_is_written_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    write_manifest(tmp_path, {"file": sum_file(tmp_path / "file", [2])})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["checksums.json", "file"]
    content = (tmp_path / "file").read_bytes()
    sums = FileSums(
        5, (ByteSpan(0, 2, zlib.crc32(content[:2])), ByteSpan(2, 3, zlib.crc32(content[2:])))
    )
    assert read_manifest(tmp_path) == {"file": sums}
    assert sum_small_files(tmp_path, ["other"]).keys() == {"file"}
    assert read_manifest(tmp_path / "file") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda content: {**content, "algorithm": "md5"},
        lambda content: {"algorithm": "crc32"},
        lambda content: {**content, "files": {"file": {"bytes": 5, "spans": [[0, 4, "00000000"]]}}},
        lambda content: {**content, "files": {"file": {"bytes": 5, "spans": [[0, 5, "no hex"]]}}},
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, change) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    write_manifest(tmp_path, {"file": sum_file(tmp_path / "file")})
    content = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(change(content)))
    with pytest.raises(
        ValueError, match=r"checksums.json is damaged .*: copy it from the original again"
    ):
        read_manifest(tmp_path)


def test_every_tensor_of_a_safetensors_file_has_a_checksum(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7)}
    save_file(tensors, tmp_path / "file")
    sums = sum_safetensors(tmp_path / "file")
    wanted = {zlib.crc32(tensor.numpy().tobytes()) for tensor in tensors.values()}
    assert {span.crc32 for span in sums.spans[1:]} == wanted


def test_a_file_that_ends_too_early_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    with pytest.raises(ValueError, match=r"file ends at byte 5 of at least 9"):
        sum_ranges(tmp_path / "file", [(2, 9)])


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname"])
def test_a_list_that_names_files_elsewhere_is_damaged(tmp_path: Path, name: str) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps({"algorithm": "crc32", "files": {name: {}}}))
    with pytest.raises(ValueError, match=r"checksums.json is damaged .* not a file of the folder"):
        read_manifest(tmp_path)


def test_a_list_that_is_nested_deeply_is_damaged(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"checksums.json is damaged .*nested too deeply"):
        read_manifest(tmp_path)


def test_files_in_folders_are_listed_and_hidden_ones_are_not(tmp_path: Path) -> None:
    for name in ("a", "below/b", ".git/c", "below/.d", "e.part", ".metadata"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert sum_small_files(tmp_path, ()).keys() == {"a", "below/b", ".metadata"}


@pytest.mark.parametrize("crc", [" 24af614", "+24af614", "024AF614", "24af614", "0_4af614"])
def test_a_number_that_was_written_otherwise_is_damage(tmp_path: Path, crc: str) -> None:
    """A flipped bit may leave a number that Python reads, even the same one."""
    entry = {"bytes": 3, "spans": [[0, 3, crc]]}
    content = {"algorithm": "crc32", "files": {"config.json": entry}}
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"checksums.json is damaged .*no CRC-32 in eight"):
        read_manifest(tmp_path)
