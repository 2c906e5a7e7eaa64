"""Row files: flushed rows, torn lines, cutting after a resume."""

import json
from pathlib import Path

import pytest

from mcore_rl.metrics.rows import RowFile, read_rows


def write_steps(path: Path, last_step: int | None, *steps: int) -> None:
    file = RowFile(path, last_step)
    file.write(*({"step": step, "loss": step / 2} for step in steps))
    file.close()


def steps_in(path: Path) -> list[int]:
    return [row["step"] for row in read_rows(path)]


def test_a_row_is_on_disk_before_the_file_is_closed(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "m.jsonl", None)
    file.write({"step": 1, "text": "naïve \n ½"})
    assert read_rows(tmp_path / "m.jsonl") == [{"step": 1, "text": "naïve \n ½"}]
    file.close()


def test_a_resume_leaves_no_step_twice(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_steps(path, None, 0, 1, 2, 2, 3, 4)
    write_steps(path, 2, 3, 4, 5)
    assert steps_in(path) == [0, 1, 2, 2, 3, 4, 5]


def test_a_row_torn_by_a_kill_is_dropped_and_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_steps(path, None, 1, 2)
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert steps_in(path) == [1, 2]
    write_steps(path, 3, 4)
    assert steps_in(path) == [1, 2, 4]


def test_starting_over_keeps_the_previous_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_steps(path, None, 1, 2)
    write_steps(path, None, 1)
    assert steps_in(path) == [1]
    assert steps_in(tmp_path / "m.previous.jsonl") == [1, 2]


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "m.jsonl", None)
    file.write({"step": 1, "nan": float("nan"), "inf": float("-inf"), "one": 1.0})
    file.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)
    assert row == {"step": 1, "nan": None, "inf": None, "one": 1.0}


def test_a_broken_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"m.jsonl:2: not a JSON row: 'nonsense"):
        read_rows(tmp_path / "m.jsonl")
