"""Files of a checkpoint that take too much time or memory are refused by their names."""

import pickle
import time
from pathlib import Path

import pytest
import torch

from mcore_rl.weights.megatron_files import metadata
from mcore_rl.weights.megatron_files.metadata import check_archive, check_bounded
from tests.support.hostile_files import dict_with_nested_key, write_archive, write_zip_bomb


@pytest.mark.parametrize("name", [".metadata", pytest.param("common.pt", marks=pytest.mark.slow)])
def test_a_key_whose_hash_takes_for_ever_is_refused_in_time(tmp_path: Path, name: str) -> None:
    if name == ".metadata":
        (tmp_path / name).write_bytes(dict_with_nested_key())
    else:
        write_archive(tmp_path / name, dict_with_nested_key())
    begun = time.monotonic()
    with pytest.raises(ValueError, match=rf"{name} cannot be read within 2 s: .* not loaded"):
        check_bounded(tmp_path, deadline_s=2.0)
    assert time.monotonic() - begun < 30


def test_a_pickle_that_takes_all_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "common.pt"
    write_archive(path, pickle.dumps(b"0" * (300 << 20)))
    monkeypatch.setattr(metadata, "MEMORY_BYTES", 64 << 20)
    monkeypatch.setattr(metadata, "MEMORY_PER_BYTE", 1)
    with pytest.raises(ValueError, match=r"common\.pt takes more than 364 MiB of memory"):
        check_bounded(tmp_path)


def test_what_torch_saves_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "common.pt"
    state = {"step": 3, "dtype": torch.bfloat16, "generator": torch.get_rng_state(), "set": {1}}
    torch.save(state, path)
    check_archive(path, path.stat().st_size)
    check_bounded(tmp_path)


def test_an_archive_that_unpacks_to_more_than_it_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "common.pt"
    write_zip_bomb(path, 50 << 20)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(ValueError, match=r"'archive/data.pkl' in it is compressed"):
        check_archive(path, path.stat().st_size)
    write_archive(path, b"0" * 100)
    with pytest.raises(ValueError, match="it has 90 bytes and unpacks to 102"):
        check_archive(path, 90)
