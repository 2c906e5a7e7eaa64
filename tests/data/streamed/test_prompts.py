"""Prompts by position: those of the whole files, and rows that cannot become one."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.data.prompts import load_prompts
from mcore_rl.data.streamed import prompts as module
from mcore_rl.data.streamed.prompts import RowRules, StreamedPrompts
from mcore_rl.tasks.arithmetic import make_tokenizer
from tests.support.prompt_sets import BY_DIFFICULTY, make_row, open_source, write_rows

STRICT = RowRules(64, "error")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_ROWS", 6)


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Any]:
    """Return lines(*rows) -> a file of them."""

    def write(*rows: dict[str, Any]) -> list[str]:
        path = tmp_path / "x.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [str(path)]

    yield write


def read_all(source: StreamedPrompts) -> list[Any]:
    rows = [source.read(position) for position in range(source.num_rows)]
    source.close()
    return rows


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("lookahead", [1, 20, 1000])
def test_prompts_are_those_of_the_files_loaded_whole(
    tmp_path: Path, kind: str, lookahead: int
) -> None:
    files = write_rows(tmp_path, [30, 5, 20], kind, long_rows=[3, 40])
    expected = load_prompts(files, make_tokenizer(), 64, "filter")
    in_order = read_all(open_source(files, shuffle=False, lookahead=lookahead))
    assert [row.prompt for row in in_order if row.prompt] == expected
    assert [row.index for row in in_order if row.why_not == "overlong"] == [3, 40]
    shuffled = read_all(open_source(files, lookahead=lookahead))
    prompts = sorted((row.prompt for row in shuffled if row.prompt), key=lambda p: p.index)
    assert prompts == expected


def test_positions_may_be_read_in_any_order(tmp_path: Path) -> None:
    source = open_source(write_rows(tmp_path, [50]), first_index=1000)
    expected = [source.read(position).index for position in range(120)]
    assert sorted(expected[:50]) == list(range(1000, 1050))
    for position in (100, 3, 4, 60, 59, 0):
        assert source.read(position).index == expected[position]
        assert source.read_again(119 - position).index == expected[119 - position]
    source.close()


def test_a_row_has_its_difficulty(tmp_path: Path) -> None:
    files = write_rows(tmp_path, [20])
    rows = read_all(open_source(files, BY_DIFFICULTY))
    assert sorted(row.difficulty for row in rows) == [number / 10 for number in range(20)]
    assert all(row.difficulty == row.index / 10 for row in rows)
    assert all(math.isnan(row.difficulty) for row in read_all(open_source(files)))


@pytest.mark.parametrize(
    ("difficulty", "message"),
    [
        ("hard", r"line 2: data.curriculum.column=extra_info.difficulty is 'hard', not a finite"),
        (True, r"line 2: .* is True, not a finite number; correct the row"),
        (None, r"line 2 lacks `difficulty`"),
    ],
)
def test_a_difficulty_that_is_no_number_is_refused(
    lines: Any, difficulty: object, message: str
) -> None:
    row = make_row(1)
    row["extra_info"]["difficulty"] = difficulty
    with pytest.raises(ValueError, match=message):
        read_all(open_source(lines(make_row(0), row), BY_DIFFICULTY, shuffle=False))
    flat = {**make_row(1), "extra_info": 5}
    with pytest.raises(
        ValueError, match=r"line 2: `extra_info` is the int 5, not a mapping: write"
    ):
        read_all(open_source(lines(make_row(0), flat), BY_DIFFICULTY, shuffle=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None}, r"x.jsonl line 3 lacks `prompt`"),
        ({"prompt": "2 + 2 ?"}, r"x.jsonl line 3: `prompt` is '2 \+ 2 \?', not a list of chat"),
        ({"prompt": [{"role": "user"}]}, r"x.jsonl line 3: the chat template cannot render"),
        ({"reward_model": {}}, r"x.jsonl line 3: `reward_model` lacks `ground_truth`"),
    ],
)
def test_a_row_that_is_no_prompt_is_named(lines: Any, change: dict[str, Any], message: str) -> None:
    rows = [make_row(number) for number in range(5)]
    source = open_source(lines(*rows[:2], rows[2] | change, *rows[3:]), shuffle=False)
    with pytest.raises(ValueError, match=message):
        read_all(source)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("column", ["images", "videos"])
def test_a_row_that_shows_something_is_refused(tmp_path: Path, column: str, kind: str) -> None:
    rows = [{**make_row(0), column: []}, {**make_row(1), column: ["https://h/a.png"]}]
    path = tmp_path / f"x.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source([str(path)], STRICT)
    message = rf"x.{kind} (row 1|line 2) has 1 `{column}`, but they are not read here: choose"
    with pytest.raises(ValueError, match=message):
        source.read(0)


def test_an_overlong_prompt_is_refused_if_the_recipe_says_so(tmp_path: Path) -> None:
    source = open_source(write_rows(tmp_path, [9], long_rows=[4]), STRICT, shuffle=False)
    with pytest.raises(
        ValueError, match=r"0.parquet row 4: its prompt has \d+ tokens, more than .*=64: raise it"
    ):
        read_all(source)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_mappings_may_be_written_as_json_or_maps(tmp_path: Path, kind: str) -> None:
    rows = [make_row(number) for number in range(5)]
    for row in rows:
        row["extra_info"] = json.dumps(row["extra_info"])
    path = tmp_path / f"x.{kind}"
    if kind == "parquet":
        truths = [list(row["reward_model"].items()) for row in rows]
        table = pa.Table.from_pylist(rows).drop_columns("reward_model")
        column = pa.array(truths, pa.map_(pa.string(), pa.string()))
        pq.write_table(table.append_column("reward_model", column), path)
    else:
        for row in rows:
            row["reward_model"] = json.dumps(row["reward_model"])
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_all(open_source([str(path)], BY_DIFFICULTY, shuffle=False))
    assert [row.prompt.ground_truth for row in read] == ["0", "1", "2", "3", "4"]
    assert [row.difficulty for row in read] == [0.0, 0.1, 0.2, 0.3, 0.4]
    assert read[4].prompt.extra_info["difficulty"] == 0.4
