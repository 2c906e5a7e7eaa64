"""Filters and searches find the rows that fit, of 100,000 samples within half a second."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.logs.rows import RowFile
from mcore_rl.tools.view.sample_index import CUT_OFF, Filter, SampleIndex
from mcore_rl.types import CUT_OFF as TRUE_CUT_OFF
from tests.support.many_samples import write_many_samples


def index_rows(folder: Path, rows: Iterable[dict[str, Any]] = ()) -> SampleIndex:
    if rows:
        RowFile(folder / "samples.jsonl", None).write(*rows)
    index = SampleIndex(folder)
    while not index.refresh():
        pass
    return index


ROWS: list[dict[str, Any]] = [
    {
        "step": step,
        "split": "eval" if step == 0 else "train",
        "prompt_index": number,
        "prompt": f"Question {number}?",
        "response": ["plain", 'Say "Hi"\n', "ÉTÉ", "reward"][number],
        "response_len": 10 * (number + 1),
        "reward": [0.0, 1.0, None, 0.5][number],
        "finish_reason": ["stop", "length", "done", "max_turns"][number],
        **({"reward_error": "ValueError: no"} if number == 2 else {}),
    }
    for step in range(3)
    for number in range(4)
]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Filter(), range(12)),
        (Filter(split="eval"), range(4)),
        (Filter(first_step=1, last_step=1), range(4, 8)),
        (Filter(min_reward=0.5), [1, 3, 5, 7, 9, 11]),
        (Filter(max_reward=0.5), [0, 3, 4, 7, 8, 11]),
        (Filter(min_length=20, max_length=30), [1, 2, 5, 6, 9, 10]),
        (Filter(reason="done"), [2, 6, 10]),
        (Filter(reason="never"), []),
        (Filter(truncated=True), [1, 3, 5, 7, 9, 11]),
        (Filter(failed=True), [2, 6, 10]),
        (Filter(prompt=0, first_step=2), [8]),
        (Filter(text="PLAIN"), [0, 4, 8]),
        (Filter(text='"hi"\n'), [1, 5, 9]),
        (Filter(text="ÉT"), [2, 6, 10]),
        (Filter(text="reward"), [3, 7, 11]),
        (Filter(text="question 1", split="eval"), [1]),
        (Filter(text="40"), []),
        (Filter(text="2"), [2, 6, 10]),
        (Filter(text="stop"), []),
    ],
)
def test_filters(tmp_path: Path, wanted: Filter, expected: Iterable[int]) -> None:
    """Keys, numbers and end reasons are no text of a sample."""
    assert index_rows(tmp_path, ROWS).find(wanted).rows.tolist() == list(expected)


def test_rows_are_sorted_and_unknown_rewards_come_last(tmp_path: Path) -> None:
    index = index_rows(tmp_path, ROWS[:4])
    rows = index.find(Filter()).rows
    assert index.sort(rows, "-reward").tolist() == [1, 3, 0, 2]
    assert index.sort(rows, "reward").tolist() == [0, 3, 1, 2]
    with pytest.raises(ValueError, match="sort=-text: step, reward"):
        index.sort(rows, "-text")


def test_new_rows_are_found_by_an_earlier_search(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    file = RowFile(path, None, rotate_bytes=400)
    file.write(*ROWS[:4])
    index = index_rows(tmp_path)
    assert index.find(Filter(text="plain")).rows.tolist() == [0]
    file.write(*ROWS[4:8])
    file.write(*ROWS[8:])
    assert not index.refresh()
    while not index.refresh():
        pass
    assert index.find(Filter(text="plain")).rows.tolist() == [0, 4, 8]
    assert index.read(8)["step"] == 2


def test_a_resume_forgets_rows_that_are_gone(tmp_path: Path) -> None:
    index = index_rows(tmp_path, ROWS)
    index.find(Filter(text="plain"))
    RowFile(tmp_path / "samples.jsonl", 0)
    while not index.refresh():
        pass
    assert index.num_rows == 4
    assert index.find(Filter(text="plain")).rows.tolist() == [0]
    with pytest.raises(LookupError, match="no sample 4; there are 4"):
        index.read(4)


def test_odd_lines_are_counted_and_surrogates_are_read(tmp_path: Path) -> None:
    odd = '{"step": 1, "response": "\\ud800 lone"}'
    last = json.dumps({"step": 2, "response": "last"})
    lines = ["no JSON", "[1]", odd, '{"step": "x"}', '{"turns": 3}', '{"reward": []}', last]
    (tmp_path / "samples.jsonl").write_text("".join(line + "\n" for line in lines))
    index = index_rows(tmp_path)
    assert (index.num_rows, index.num_bad) == (2, 5)
    assert index.find(Filter(text="lone")).rows.tolist() == [0]
    assert not index.counts_tokens


def test_ends_that_cut_off_are_those_of_samples() -> None:
    assert CUT_OFF == TRUE_CUT_OFF


@pytest.mark.slow
def test_100_000_samples_are_filtered_in_half_a_second(tmp_path: Path) -> None:
    write_many_samples(tmp_path, 100_000)
    start = time.process_time()
    index = index_rows(tmp_path)
    indexed_s = time.process_time() - start
    assert index.num_rows == 100_000
    assert index.columns.nbytes <= 100_000 * 60
    slowest = 0.0
    for wanted, num in (
        (Filter(min_reward=0.5, split="train"), 50_000),
        (Filter(truncated=True, min_length=100), 0),
        (Filter(text="needle 99999"), 1),
        (Filter(text="Apples"), 100_000),
        (Filter(text="absent"), 0),
    ):
        start = time.process_time()
        found = index.find(wanted)
        index.sort(found.rows, "-reward")
        slowest = max(slowest, time.process_time() - start)
        while found.num_searched < index.num_rows:
            found = index.find(wanted)
        assert len(found.rows) == num, wanted
    print(f"indexed in {indexed_s:.2f} s, slowest filter {slowest:.3f} s")
    assert indexed_s < 4.0
    assert slowest < 0.5
