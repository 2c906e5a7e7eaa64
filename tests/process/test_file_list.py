"""A folder against its list of files, and JSON files that would take too much to read."""

import json
from pathlib import Path

import pytest

from mcore_rl.process import file_list
from mcore_rl.process.file_list import MANIFEST, find_fault, list_files, read_json


def write_list(folder: Path, sizes: dict[str, int]) -> None:
    files = {name: {"bytes": num_bytes} for name, num_bytes in sizes.items()}
    (folder / MANIFEST).write_text(json.dumps({"files": files}))


def test_a_folder_is_what_its_list_proves(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("123")
    write_list(tmp_path, {"a": 3})
    assert find_fault(tmp_path) == ""
    write_list(tmp_path, {"a": 4})
    assert find_fault(tmp_path) == f"{tmp_path}/a has 3 bytes, by {MANIFEST} it should have 4"
    write_list(tmp_path, {"a": 3, "b": 1})
    assert find_fault(tmp_path) == f"{tmp_path}/b, named in {MANIFEST}, does not exist"
    write_list(tmp_path, {})
    assert find_fault(tmp_path) == f"{tmp_path}/a is not in {MANIFEST}"
    write_list(tmp_path, {"../a": 3})
    assert "'../a', which is not a file of the folder" in find_fault(tmp_path)


@pytest.mark.parametrize("text", ["", "[", "{}", '{"files": {"a": 1}}', "[" * 100_000])
def test_a_damaged_list_is_a_fault(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    assert find_fault(tmp_path).startswith(f"{tmp_path / MANIFEST} is damaged (")


def test_hidden_and_temporary_files_are_not_listed(tmp_path: Path) -> None:
    for name in (".metadata", ".hidden", "a", "a.part", MANIFEST):
        (tmp_path / name).touch()
    assert list(list_files(tmp_path)) == [".metadata", "a"]


def test_json_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "index.json"
    path.write_text("[1, 2]")
    assert read_json(path) == [1, 2]
    monkeypatch.setattr(file_list, "MAX_JSON_BYTES", 5)
    with pytest.raises(ValueError, match="it has 6 bytes, at most 5 are read"):
        read_json(path)
