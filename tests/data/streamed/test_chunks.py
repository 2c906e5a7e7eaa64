"""Rows of chunks are those of the whole files; files that changed in the meantime are refused."""

import random
from pathlib import Path

import pytest

from mcore_rl.data.rows import load_rows
from mcore_rl.data.streamed import windows as module
from mcore_rl.data.streamed.windows import ChunkReader
from tests.support.prompt_sets import RULES, open_index, write_rows

COLUMNS = ("prompt", "data_source", "reward_model", "extra_info")


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("batch_rows", [1, 5, 4096])
def test_chunks_in_any_order_give_the_rows_of_the_files(
    tmp_path: Path, kind: str, batch_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH_ROWS", batch_rows)
    files = write_rows(tmp_path, [40, 3, 30], kind, group_rows=13)
    expected = list(load_rows(files))
    index = open_index(files)
    wanted = list(range(len(index.rows_C)))
    random.Random(0).shuffle(wanted)
    for some in (wanted[::2], wanted[1::2]):
        read = ChunkReader(index, RULES.columns).read(some)
        assert set(read) == set(some)
        for chunk, rows in read.items():
            first, count = int(index.first_C[chunk]), int(index.rows_C[chunk])
            numbers = list(range(count))[::-1]
            for number, (where, row) in zip(numbers, rows.rows(numbers), strict=True):
                expected_where, expected_row = expected[first + number]
                assert where == expected_where
                assert row is not None
                assert {n: row[n] for n in COLUMNS} == {n: expected_row[n] for n in COLUMNS}
                assert kind == "jsonl" or "ability" not in row  # a column that nothing reads


def test_a_blank_line_is_no_row(tmp_path: Path) -> None:
    [file] = write_rows(tmp_path, [2], "jsonl")
    lines = Path(file).read_text().splitlines()
    Path(file).write_text(f"{lines[0]}\n \n\n{lines[1]}")
    index = open_index([file])
    read = ChunkReader(index, RULES.columns).read(range(len(index.rows_C)))
    rows = [row for chunk in read for row in read[chunk].rows(range(index.rows_C[chunk]))]
    assert [where.rpartition(" ")[2] for where, _ in rows] == ["1", "2", "3", "4"]
    assert [row is None for _, row in rows] == [False, True, True, False]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_file_that_changed_since_the_start_is_refused(tmp_path: Path, kind: str) -> None:
    files = write_rows(tmp_path, [40], kind, group_rows=40)
    index = open_index(files)
    write_rows(tmp_path, [10], kind)
    with pytest.raises(ValueError, match=rf"0.{kind} has changed since the run began: .* rows"):
        ChunkReader(index, RULES.columns).read(range(len(index.rows_C)))
    Path(files[0]).unlink()
    with pytest.raises(ValueError, match=rf"0.{kind} cannot be read \(FileNotFoundError"):
        ChunkReader(index, RULES.columns).read([0])
