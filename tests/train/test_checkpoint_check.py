"""A damaged or hostile checkpoint is refused, by name, before anything of it is loaded."""

import io
import logging
import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import megatron.core  # registers the classes that torch.load may build
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mcore_rl.train.checkpoint_check import check_checkpoint, only_safe_pickles
from mcore_rl.weights.hf.checksums import MANIFEST, sum_file, write_manifest
from mcore_rl.weights.megatron_files import metadata
from tests.support.common_state import Hostile
from tests.support.hostile_files import dict_with_nested_key, write_zip_bomb

assert megatron.core
FILE = "__0_0.distcp"


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def write_checkpoint(folder: Path, objects: Mapping[str, object] | None = None) -> Path:
    """A tensor and some objects in one file, described as torch.distributed.checkpoint does."""
    folder.mkdir()
    values = {"weight": torch.arange(600.0), "rng/shard_0_1": [{"python": 1}], **(objects or {})}
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    content = b""
    for key, value in values.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        offset = None
        entries[key] = BytesStorageMetadata()
        if isinstance(value, torch.Tensor):
            offset = torch.Size([0])
            chunks = [ChunkStorageMetadata(offset, value.shape)]
            entries[key] = TensorStorageMetadata(
                TensorProperties(dtype=value.dtype), value.shape, chunks
            )
        storage[MetadataIndex(key, offset)] = _StorageInfo(
            FILE, len(content), len(buffer.getvalue())
        )
        content += buffer.getvalue()
    (folder / FILE).write_bytes(content)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, storage_data=storage)))
    torch.save({"step": 3, "extra": {}, "layout": {"tp": 1}}, folder / "common.pt")
    edges = [info.offset for info in storage.values()]
    sums = {FILE: sum_file(folder / FILE, edges)}
    sums |= {name: sum_file(folder / name) for name in (".metadata", "common.pt")}
    write_manifest(folder, sums)
    return folder


def test_an_intact_checkpoint_is_accepted(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step")
    check_checkpoint(folder, verify=True)


@pytest.mark.parametrize("name", [FILE, ".metadata", "common.pt"])
def test_a_flipped_bit_is_refused_with_the_name_of_its_file(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "step")
    path = folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}: .* does not agree with {MANIFEST}"):
        check_checkpoint(folder, verify=True)


def test_damage_is_placed_by_the_name_of_the_tensor(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step")
    content = bytearray((folder / FILE).read_bytes())
    content[1500] ^= 1
    (folder / FILE).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{FILE}: 'weight' does not agree"):
        check_checkpoint(folder, verify=True)
    check_checkpoint(folder, verify=False)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step")
    os.truncate(folder / FILE, 100)
    with pytest.raises(ValueError, match=rf"{FILE} has 100 bytes"):
        check_checkpoint(folder, verify=True)


def test_a_checkpoint_without_checksums_is_loaded_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path / "step")
    (folder / MANIFEST).unlink()
    with caplog.at_level(logging.WARNING):
        check_checkpoint(folder, verify=True)
    assert [record.message for record in caplog.records] == [
        f"{folder} has no {MANIFEST}: loaded without verification"
    ]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_code_in_the_metadata_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    folder = write_checkpoint(tmp_path / "step")
    hostile = Metadata({}, planner_data=Hostile(tmp_path / "ran"))
    (folder / ".metadata").write_bytes(pickle.dumps(hostile, protocol=protocol))
    with pytest.raises(ValueError, match=r"\.metadata .*names \w+\.\w+, which no checkpoint needs"):
        check_checkpoint(folder, verify=False)
    assert not (tmp_path / "ran").exists()


def test_code_in_the_common_file_is_refused_and_not_run(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step")
    torch.save({"step": Hostile(tmp_path / "ran")}, folder / "common.pt")
    with pytest.raises(ValueError, match=r"common\.pt names (posix|os)\.mkdir"):
        check_checkpoint(folder, verify=False)
    assert not (tmp_path / "ran").exists()


def test_code_in_an_object_is_refused_and_not_run(tmp_path: Path) -> None:
    objects = {"rng/shard_1_2": [Hostile(tmp_path / "ran")]}
    folder = write_checkpoint(tmp_path / "step", objects)
    with pytest.raises(ValueError, match=rf"{FILE}: object 'rng/shard_1_2' names \w+\.mkdir"):
        check_checkpoint(folder, verify=False)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("state", "is_accepted"),
    [
        (None, True),
        (torch.empty(0, dtype=torch.uint8), True),
        (io.BytesIO(), True),
        (torch.frombuffer(bytearray(pickle.dumps({})), dtype=torch.uint8), False),
        (io.BytesIO(b"something"), False),
    ],
)
def test_an_extra_state_that_would_be_unpickled_is_refused(
    tmp_path: Path, state: object, is_accepted: bool
) -> None:
    objects = {"decoder.layers.fc1._extra_state/shard_0_2": [state]}
    folder = write_checkpoint(tmp_path / "step", objects)
    if is_accepted:
        check_checkpoint(folder, verify=True)
    else:
        with pytest.raises(ValueError, match=r"object 'decoder.*' holds a state of Transformer"):
            check_checkpoint(folder, verify=True)


def test_the_load_itself_builds_no_other_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = tmp_path / "file"
    torch.save(Hostile(tmp_path / "ran"), path)
    with only_safe_pickles(), pytest.raises(pickle.UnpicklingError, match="Weights only"):
        torch.load(path, weights_only=False)
    assert not (tmp_path / "ran").exists()
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


@pytest.mark.parametrize("verify", [True, False])
def test_a_file_that_the_list_lacks_is_not_loaded(tmp_path: Path, verify: bool) -> None:
    folder = write_checkpoint(tmp_path / "step")
    names = (".metadata", "common.pt")
    write_manifest(folder, {name: sum_file(folder / name) for name in names})
    with pytest.raises(ValueError, match=rf"{FILE} is not in {MANIFEST}: "):
        check_checkpoint(folder, verify=verify)


@pytest.mark.slow
def test_files_that_take_for_ever_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "DEADLINE_S", 5.0)
    folder = write_checkpoint(tmp_path / "step")
    common = (folder / "common.pt").read_bytes()
    write_zip_bomb(folder / "common.pt", 50 << 20)
    with pytest.raises(ValueError, match=r"common\.pt is damaged: .* is compressed"):
        check_checkpoint(folder, verify=False)
    (folder / "common.pt").write_bytes(common)
    (folder / ".metadata").write_bytes(dict_with_nested_key())
    with pytest.raises(ValueError, match=r"\.metadata cannot be read within 5 s"):
        check_checkpoint(folder, verify=False)
