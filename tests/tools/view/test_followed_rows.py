"""Rows are handed out once while a run appends, rotates, resumes and starts over."""

from pathlib import Path
from typing import Any

from mcore_rl.logs.rows import RowFile
from mcore_rl.tools.view import followed
from mcore_rl.tools.view.followed import FollowedRows
from mcore_rl.tools.view.sample_index import parse_row


class Reader:
    """Keeps what a follower of `path` knows."""

    def __init__(self, path: Path) -> None:
        self.file = FollowedRows(path)
        self.rows: list[tuple[int, int, Any]] = []
        self.num_restarts = 0

    def read(self) -> list[int]:
        """Return the steps of all rows, after reading what is new."""
        while True:
            new = self.file.read_new()
            if new.is_restart:
                self.rows = []
                self.num_restarts += 1
            for position, line in new.lines:
                row = parse_row(line)
                assert row is not None
                self.rows.append((position, len(line), row))
            if new.is_end:
                break
        for position, length, row in self.rows:
            assert parse_row(self.file.read_at(position, length)) == row
        return [row["step"] for _, _, row in self.rows]


def make_rows(steps: range) -> list[dict[str, Any]]:
    return [{"step": step, "text": "é" * 30} for step in steps]


def test_rows_of_all_segments_come_once_in_order(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    reader = Reader(path)
    assert reader.read() == []
    file = RowFile(path, None, rotate_bytes=300)
    for start in range(0, 40, 4):
        file.write(*make_rows(range(start, start + 4)))
        assert reader.read() == list(range(start + 4))
    assert len(list(tmp_path.glob("samples.0*.jsonl"))) == 10
    assert reader.num_restarts == 0


def test_a_torn_row_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    reader = Reader(path)
    path.write_bytes(b'{"step": 1}\n{"step"')
    assert reader.read() == [1]
    with path.open("ab") as file:
        file.write(b": 2}\n")
    assert reader.read() == [1, 2]


def test_a_resume_that_grew_again_is_read_anew(tmp_path: Path) -> None:
    """Even if the file is as long as before, or longer."""
    path = tmp_path / "samples.jsonl"
    RowFile(path, None).write(*make_rows(range(10)))
    reader = Reader(path)
    reader.read()
    again = RowFile(path, 5)
    again.write(*({"step": step, "text": "o" * 60} for step in range(6, 10)))
    assert reader.read() == list(range(10))
    assert [row["text"][0] for _, _, row in reader.rows] == ["é"] * 6 + ["o"] * 4
    assert reader.num_restarts == 1


def test_a_run_that_starts_over_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    RowFile(path, None, rotate_bytes=500).write(*make_rows(range(30)))
    reader = Reader(path)
    reader.read()
    RowFile(path, None).write(*make_rows(range(3)))
    assert reader.read() == [0, 1, 2]


def test_a_row_longer_than_a_block_is_whole(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(followed, "BLOCK_BYTES", 64)
    path = tmp_path / "samples.jsonl"
    RowFile(path, None).write({"step": 1, "text": "x" * 1000}, {"step": 2})
    assert Reader(path).read() == [1, 2]
