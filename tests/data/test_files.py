"""Rows are written as parquet in verl's columns, whole or not at all."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.data.rows import prompt_row, write_parquet


def test_rows_come_back_in_verls_columns(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.parquet"
    write_parquet([prompt_row("one plus one ?", "2", "unit", "train", 3)], path)
    assert pq.read_table(path).to_pylist() == [
        {
            "prompt": [{"role": "user", "content": "one plus one ?"}],
            "data_source": "unit",
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"split": "train", "index": 3},
        }
    ]
    assert [p.name for p in path.parent.iterdir()] == ["x.parquet"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet([{"a": 1}], path)
    with pytest.raises(pa.ArrowInvalid):
        write_parquet([{"a": 1}, {"a": "text"}], path)
    assert pq.read_table(path).to_pylist() == [{"a": 1}]
