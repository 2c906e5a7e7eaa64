"""Files of a split are found by name, and what is missing is named."""

from pathlib import Path

import pytest

from mcore_rl.tasks.published import files_of_split, source_folder


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert source_folder(str(tmp_path), ["*"]) == tmp_path


def test_files_of_a_split_are_in_order(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("train-1.parquet", "train-0.parquet", "test.jsonl", "train.txt"):
        (tmp_path / "data" / name).touch()
    found = files_of_split(tmp_path, "train")
    assert [Path(path).name for path in found] == ["train-0.parquet", "train-1.parquet"]
    with pytest.raises(ValueError, match=r"no .parquet or .jsonl file with 'validation'"):
        files_of_split(tmp_path, "validation")
