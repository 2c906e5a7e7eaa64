"""Chunks of files: every row in one of them, and files that cannot be used refused by name."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.data.streamed.index import RowIndex, columns_of, count_rows, index_rows, keys_of
from tests.support.prompt_sets import BY_DIFFICULTY, RULES, open_index, write_rows


def assert_complete(index: RowIndex, rows_of_files: list[int]) -> None:
    """Every row of every file is in one chunk, in order."""
    assert index.num_rows == sum(rows_of_files)
    assert index.first_C.tolist() == [0, *np.cumsum(index.rows_C)[:-1]]
    for number, num_rows in enumerate(rows_of_files):
        mine = index.file_C == number
        ends = np.cumsum(index.rows_C[mine])
        assert index.file_row_C[mine].tolist() == [0, *ends[:-1]][: mine.sum()]
        assert index.rows_C[mine].sum() == num_rows
    assert (index.rows_C > 0).all()


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("chunk_bytes", [1, 1000, 10**9])
def test_every_row_is_in_one_chunk(tmp_path: Path, kind: str, chunk_bytes: int) -> None:
    files = write_rows(tmp_path, [40, 0, 1, 30], kind)
    index = open_index(files, chunk_bytes)
    assert_complete(index, [40, 0, 1, 30])
    if chunk_bytes == 1:
        assert set(index.rows_C) == {1}
    if chunk_bytes == 10**9:
        assert len(index.rows_C) == (3 if kind == "jsonl" else 6 + 1 + 5)  # row groups of 7 rows


@settings(max_examples=50)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 99), st.booleans())
def test_lines_of_any_length_are_in_one_chunk_each(
    tmp_path_factory: pytest.TempPathFactory, lens: list[int], chunk_bytes: int, is_ended: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    lines = ["{}", *("{" + " " * num_spaces + "}" for num_spaces in lens)]
    path.write_text("\n".join(lines) + "\n" * is_ended)
    index = index_rows([str(path)], [], chunk_bytes, lambda where, names: None)
    assert_complete(index, [len(lines)])
    assert count_rows([str(path)], 10**9) - len(lines) in (0, 1)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_rows_are_counted_up_to_a_bound(tmp_path: Path, kind: str) -> None:
    files = write_rows(tmp_path, [40, 10], kind)
    assert 50 <= count_rows(files, 1000) <= 52
    assert count_rows([*files, "never looked at.parquet"], 20) > 20


def test_the_hash_tells_other_rows_and_not_other_places(tmp_path: Path) -> None:
    index = open_index(write_rows(tmp_path / "a", [40, 30]))
    assert open_index(write_rows(tmp_path / "b", [40, 30])).digest() == index.digest()
    others = [
        open_index(write_rows(tmp_path / "c", [30, 40])),
        open_index(write_rows(tmp_path / "d", [40, 30], long_rows=[5])),
        open_index(write_rows(tmp_path / "e", [40, 30]), chunk_bytes=150),
    ]
    assert len({index.digest(), *(other.digest() for other in others)}) == 4


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    [whole] = write_rows(tmp_path / "whole", [40])
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(Path(whole).read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"cut.parquet cannot be read \(Arrow.*copy it again"):
        open_index([whole, str(cut)])
    empty = write_rows(tmp_path / "empty", [0, 0])
    with pytest.raises(ValueError, match=r"empty/0.parquet, .*1.parquet: no row in 2 files"):
        open_index(empty)
    lines = tmp_path / "x.jsonl"
    lines.write_text('{"prompt": []}\n')
    with pytest.raises(ValueError, match=r"x.jsonl line 1 lacks `data_source`; it has prompt"):
        open_index([str(lines)])
    lines.write_text("{\n")
    with pytest.raises(ValueError, match=r"x.jsonl line 1 is not JSON"):
        open_index([str(lines)])


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_difficulty_is_in_every_file(tmp_path: Path, kind: str) -> None:
    files = write_rows(tmp_path, [5], kind)
    open_index(files, rules=BY_DIFFICULTY)
    other = type(RULES)(64, "filter", "extra_info.hardness")
    message = (
        r"0.\w+( line 1)? lacks `extra_info.hardness` \(data.curriculum.column\); it has .*index"
    )
    with pytest.raises(ValueError, match=message):
        open_index(files, rules=other)


def test_names_in_structs_are_dotted(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    [file] = write_rows(tmp_path, [1])
    schema = pq.read_schema(file)
    row = {"a": {"b": {"c": 1}}, "d": 2}
    assert "reward_model.ground_truth" in columns_of(schema)
    assert keys_of(row) == ["a", "a.b", "a.b.c", "d"]
