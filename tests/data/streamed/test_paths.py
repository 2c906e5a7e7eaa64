"""Files, folders and globs of a data set; those without a data file are refused by name."""

from pathlib import Path

import pytest

from mcore_rl.data.files import data_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = (
        "b.parquet",
        "a.jsonl",
        "sub/c.parquet",
        "_SUCCESS",
        ".d.parquet",
        ".x/e.jsonl",
        "f.csv",
    )
    for name in names:
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return tmp_path / "set"


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([""], ["a.jsonl", "b.parquet", "sub/c.parquet"]),
        (["*.parquet", "a.jsonl"], ["b.parquet", "a.jsonl"]),
        (["**/*.parquet"], ["b.parquet", "sub/c.parquet"]),
        (["b.parquet", "b.parquet"], ["b.parquet", "b.parquet"]),
    ],
)
def test_paths_stand_for_files_in_their_order(
    folder: Path, paths: list[str], expected: list[str]
) -> None:
    found = data_files([str(folder / path) for path in paths])
    assert [Path(file).relative_to(folder).as_posix() for file in found] == expected


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "part[1].jsonl").write_text("")
    assert data_files([str(tmp_path / "part[1].jsonl")]) == [str(tmp_path / "part[1].jsonl")]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none.parquet", r"data file .*none.parquet does not exist"),
        ("f.csv", r"data file .*f.csv: expected .parquet or .jsonl"),
        ("*.csv", r"data files .*\*.csv: the pattern matches no .* file \(1 others\)"),
        (".x", None),
        ("empty", r"data folder .*empty has no .parquet or .jsonl file: give another folder"),
    ],
)
def test_a_path_without_data_is_refused(folder: Path, path: str, message: str | None) -> None:
    (folder / "empty").mkdir()
    if message is None:  # a hidden folder that is named itself is not hidden
        assert len(data_files([str(folder / path)])) == 1
        return
    with pytest.raises(ValueError, match=message):
        data_files([str(folder / path)])
