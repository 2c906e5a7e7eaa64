"""Row files: flushed rows, torn lines, cutting after a resume."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.metrics.rows import RowFile, _to_line, read_rows
from mcore_rl.process.disk import DiskFullError


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


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\r"])
def test_only_a_newline_ends_a_row(separator: str, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    rows = [{"step": step, "response": f"one{separator}two"} for step in (1, 2, 3)]
    for last_step, written in ((None, rows[:2]), (2, rows[2:])):  # the second open cuts and resumes
        file = RowFile(path, last_step)
        file.write(*written)
        file.close()
    assert read_rows(path) == rows


def test_a_row_torn_inside_a_character_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_steps(path, None, 1)
    with path.open("ab") as file:
        file.write('{"step": 2, "text": "½'.encode()[:-1])
    assert steps_in(path) == [1]


def test_a_lone_surrogate_is_valid_utf8_on_disk_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    row = {"step": 1, "response": "a\ud83db", "\udfff": ["\udc00", {"\ud800": "½"}]}
    file = RowFile(path, None)
    file.write(row)
    file.close()
    text = path.read_bytes().decode("utf-8", errors="strict")
    assert "½" in text and "\\ud83d" in text
    assert read_rows(path) == [row]


@given(st.text(st.characters(), max_size=12))
def test_any_text_reads_back(text: str) -> None:
    """Two surrogates that form a pair are the one exception: they come back as their character."""
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    line = _to_line({"step": 1, "text": text})
    assert line.count("\n") == 1 and line.encode("utf-8")
    assert json.loads(line) == {"step": 1, "text": joined}


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    file = RowFile(path, None)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), file._file.fileno())
    for write in (lambda: file.write({"step": 1}), file.close):
        with pytest.raises(DiskFullError, match="no space left on device") as caught:
            write()
        assert str(caught.value).startswith(f"cannot write {path}: ")
        assert "\n" not in str(caught.value)
