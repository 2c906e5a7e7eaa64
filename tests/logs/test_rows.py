"""Row files: flushed rows, torn lines, cutting after a resume."""

import json
import os
import shutil
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.logs import rows as rows_module
from mcore_rl.logs.rows import RowFile, _encode_row, iter_rows_backward, read_rows
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
    line = _encode_row({"step": 1, "text": text})
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


SEGMENT_BYTES = 120
"""A segment of the tests has five rows or so."""


def write_rotated(path: Path, last_step: int | None, steps: list[int]) -> None:
    """Write each row by itself, as a run does."""
    file = RowFile(path, last_step, SEGMENT_BYTES)
    for step in steps:
        file.write({"step": step, "text": "½" * (step % 3)})
    file.close()


def files_of(path: Path) -> list[str]:
    return sorted(each.name for each in path.parent.iterdir())


def test_a_full_file_becomes_a_segment_and_rows_keep_their_order(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_rotated(path, None, list(range(20)))
    assert files_of(path)[:3] == ["m.000001.jsonl", "m.000002.jsonl", "m.000003.jsonl"]
    for segment in tmp_path.glob("m.0*.jsonl"):
        assert SEGMENT_BYTES <= segment.stat().st_size < 2 * SEGMENT_BYTES
    assert steps_in(path) == list(range(20))
    assert [row["step"] for row in iter_rows_backward(path)] == list(range(19, -1, -1))
    write_rotated(path, 19, list(range(20, 30)))
    assert steps_in(path) == list(range(30))


def test_starting_over_keeps_the_previous_segments_and_none_before_them(tmp_path: Path) -> None:
    path, previous = tmp_path / "m.jsonl", tmp_path / "m.previous.jsonl"
    for num_steps in (30, 12, 3):
        write_rotated(path, None, list(range(num_steps)))
    assert steps_in(path) == [0, 1, 2]
    assert steps_in(previous) == list(range(12))
    write_rotated(path, None, [7])
    assert steps_in(previous) == [0, 1, 2] and steps_in(path) == [7]
    assert files_of(path) == ["m.jsonl", "m.previous.jsonl"]


def test_a_start_over_that_was_killed_goes_on(tmp_path: Path) -> None:
    """The file was renamed, and the first of three segments: both belong to the previous rows."""
    path, previous = tmp_path / "m.jsonl", tmp_path / "m.previous.jsonl"
    write_rotated(path, None, list(range(20)))
    assert (tmp_path / "m.000003.jsonl").exists()
    path.rename(previous)
    (tmp_path / "m.000001.jsonl").rename(tmp_path / "m.previous.000001.jsonl")
    write_rotated(path, None, [0])
    assert steps_in(previous) == list(range(20)) and steps_in(path) == [0]


@given(
    num_steps=st.integers(1, 40),
    last_step=st.integers(0, 40),
    cut_bytes=st.integers(0, 150),
    num_gone=st.integers(0, 8),
    block_bytes=st.integers(1, 64),
)
def test_whatever_moment_a_run_is_killed_at_a_resume_leaves_one_row_per_step(
    tmp_path_factory: pytest.TempPathFactory,
    num_steps: int,
    last_step: int,
    cut_bytes: int,
    num_gone: int,
    block_bytes: int,
) -> None:
    """Killed in a write (its rows are cut), in a rotation, or in the resume before this one, which
    had taken back the newest files already.
    """
    last_step = min(last_step, num_steps - 1)
    path = tmp_path_factory.mktemp("rows") / "m.jsonl"
    write_rotated(path, None, list(range(num_steps)))
    end = max(0, path.stat().st_size - cut_bytes)
    os.truncate(path, end)
    if end == 0:
        path.unlink()
    for segment in sorted(path.parent.glob("m.0*.jsonl"), reverse=True)[:num_gone]:
        if json.loads(segment.read_text().split("\n")[0])["step"] > last_step:
            segment.unlink()
            path.unlink(missing_ok=True)
    kept = [step for step in steps_in(path) if step <= last_step]
    assert kept == list(range(len(kept)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "_BLOCK_BYTES", block_bytes)
        write_rotated(path, last_step, list(range(len(kept), num_steps + 3)))
        assert [row["step"] for row in iter_rows_backward(path)] == list(range(num_steps + 3))[::-1]
    assert steps_in(path) == list(range(num_steps + 3))


def test_a_whole_row_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    write_steps(path, 2, 3)
    assert steps_in(path) == [1, 2, 3]


def test_a_resume_reads_the_end_alone(tmp_path: Path) -> None:
    """It takes back a tenth of 100 MiB of rows, and does not even look at the first ones."""
    path = tmp_path / "samples.jsonl"
    row = json.dumps({"step": 100, "text": "x" * 20_000}) + "\n"
    num_rows = (100 << 20) // len(row)
    with path.open("w") as file:
        file.write("nonsense\n" * 1000)
        for i in range(num_rows):
            file.write(row.replace("100", str(100 + i // 100), 1))
    last_step = 100 + num_rows * 9 // 10 // 100
    tracemalloc.start()
    try:
        write_steps(path, last_step, last_step + 1)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 << 20, f"{peak_bytes} bytes at once"
    first_two = [row["step"] for row, _ in zip(iter_rows_backward(path), range(2), strict=False)]
    assert first_two == [last_step + 1, last_step]
    kept_bytes = len("nonsense\n" * 1000) + len(row) * 100 * (last_step - 99)
    assert path.stat().st_size - kept_bytes < 100
    with pytest.raises(ValueError, match=r"samples.jsonl: byte 8991: not a JSON row: 'nonsense'"):
        list(iter_rows_backward(path))


def test_a_kill_inside_a_character_of_a_segment_loses_that_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_rotated(path, None, list(range(9)))
    copy = tmp_path / "copy"
    copy.mkdir()
    for number in range(1, path.stat().st_size):
        for each in tmp_path.glob("m*.jsonl"):
            shutil.copy(each, copy)
        os.truncate(copy / path.name, path.stat().st_size - number)
        steps = steps_in(copy / path.name)
        assert steps == list(range(len(steps)))
