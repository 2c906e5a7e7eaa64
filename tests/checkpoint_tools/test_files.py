"""A folder's files against its checksums.json, and checksums.json made from the files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoint_tools.files import check_manifest, check_whole_files, write_checksums
from checkpoint_tools.opening import open_checkpoint
from mcore_rl.weights.hf.checksums import MANIFEST, read_manifest
from tests.support.checkpoint_folders import flip_byte

DATA = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(40), "b": torch.zeros(40)}, tmp_path / DATA)
    (tmp_path / "tokenizer.json").write_text('{"x": 1}')
    assert write_checksums(open_checkpoint(tmp_path, use_sums=False)) == tmp_path / MANIFEST
    return tmp_path


def test_an_intact_folder_is_accepted(folder: Path) -> None:
    sums = check_manifest(folder, [DATA])
    assert sums == read_manifest(folder)
    assert sums is not None and sums.keys() == {DATA, "tokenizer.json"}
    assert [span.num_bytes for span in sums[DATA].spans][1:] == [160, 160]
    assert check_whole_files(open_checkpoint(folder)) == 1  # the header


def test_a_folder_without_checksums_has_none(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    assert check_manifest(folder, [DATA]) is None
    assert check_whole_files(open_checkpoint(folder)) == 0


def test_changed_small_files_are_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"x": 2}')
    with pytest.raises(ValueError, match=r"tokenizer\.json: its contents do not agree"):
        check_manifest(folder, [DATA])


def test_a_data_file_without_checksums_is_named(folder: Path) -> None:
    (folder / "more.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"more\.safetensors is not in checksums\.json"):
        check_manifest(folder, [DATA, "more.safetensors"])


def test_a_damaged_header_is_named(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    content = bytearray((folder / DATA).read_bytes())
    content[20] ^= 1
    (folder / DATA).write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: byte 0 does not agree"):
        check_whole_files(checkpoint)


@pytest.mark.parametrize("name", [DATA, "tokenizer.json"])
def test_new_checksums_do_not_make_damage_whole(folder: Path, name: str) -> None:
    before = (folder / MANIFEST).read_bytes()
    flip_byte(folder / name)
    checkpoint = open_checkpoint(folder, use_sums=False)
    with pytest.raises(ValueError, match=rf"{name} no longer agree .* name: --changed {name}$"):
        write_checksums(checkpoint)
    assert (folder / MANIFEST).read_bytes() == before
    write_checksums(checkpoint, [name])
    assert check_manifest(folder, [DATA]) is not None


def test_new_files_get_checksums(folder: Path) -> None:
    (folder / "README.md").write_text("a model")
    with pytest.raises(ValueError, match=r"README\.md is not in checksums\.json"):
        check_manifest(folder, [DATA])
    write_checksums(open_checkpoint(folder, use_sums=False))
    assert check_manifest(folder, [DATA]) is not None
