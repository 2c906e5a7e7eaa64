"""Arrays in files are the same arrays, and their files have no name that could be left behind."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.batches.sample_store import SpillFiles
from mcore_rl.process.disk import DiskFullError


def open_files(folder: Path) -> int:
    """Count the mappings of this process whose files lie in `folder`."""
    return Path("/proc/self/maps").read_text().count(str(folder.resolve()))


def test_arrays_come_back_and_their_file_goes_with_them(tmp_path: Path) -> None:
    arrays = [
        np.arange(7, dtype=np.int32),
        np.zeros((0, 3, 2), np.uint8),
        np.arange(60, dtype=np.uint8).reshape(10, 3, 2)[:, ::2],
        np.array([0.5, -1.0], np.float32),
    ]
    spill = SpillFiles(str(tmp_path))
    moved = spill.move(arrays)
    for k, array in enumerate(arrays):
        assert moved[k].dtype == array.dtype and np.array_equal(moved[k], array)
        assert not array.size or (isinstance(moved[k], np.memmap) and not moved[k].flags.writeable)
    assert spill.num_bytes == sum(array.nbytes for array in arrays)
    assert os.listdir(tmp_path) == []
    assert open_files(tmp_path) > 0
    del moved
    gc.collect()
    assert open_files(tmp_path) == 0


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout.spill_dir=\S+/none: there is no such folder"):
        SpillFiles(str(tmp_path / "none"))


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: open("/dev/full", "w+b"))  # noqa: SIM115
    with pytest.raises(DiskFullError, match="no space left on device"):
        SpillFiles(str(tmp_path)).move([np.zeros(100_000)])
