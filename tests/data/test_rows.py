"""Rows of data files: where lines end, and what is refused by file and line."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.data.rows import (
    get_mapping,
    ground_truth_of,
    load_rows,
    messages_of,
    python_rows,
    refuse_images,
    require,
    write_parquet,
)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.lists(st.dictionaries(TEXTS, TEXTS, min_size=1)), st.booleans())
def test_any_text_comes_back_from_jsonl(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]], ascii_only: bool
) -> None:
    path = tmp_path_factory.mktemp("rows") / "x.jsonl"
    text = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows)
    path.write_bytes(text.encode())
    assert [row for _, row in load_rows([str(path)])] == rows


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x1c", "\x0b"])
def test_rows_are_split_at_newlines_alone(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "x.jsonl"
    value = f"one{separator}two"
    line = json.dumps({"a": value}, ensure_ascii=separator < " ")
    path.write_bytes(f"{line}\r\n\n{line}".encode())
    assert list(load_rows([str(path)])) == [
        (f"{path} line 1", {"a": value}),
        (f"{path} line 3", {"a": value}),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (rb'{"a": "\ud83d"}', r"x.jsonl line 2 has half of a surrogate pair, '\\ud83d'"),
        (rb'{"a": ["x", {"\uDE00": 1}]}', r"x.jsonl line 2 has half of a surrogate pair"),
        (b'{"a": "\xed\xa0\xbd"}', r"x.jsonl line 2 is not UTF-8: "),
        (b'{"a": "\xff"}', r"x.jsonl line 2 is not UTF-8: "),
        (b"{oops", r"x.jsonl line 2 is not JSON: "),
        (b"[1, 2]", r"x.jsonl line 2 is not a JSON object: \[1, 2\]"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": "\\ud83d\\ude00 \\\\ud"}\n' + line + b"\n")
    rows = load_rows([str(path)])
    assert next(rows) == (f"{path} line 1", {"a": "\N{GRINNING FACE} \\ud"})
    with pytest.raises(ValueError, match=message):
        next(rows)


def test_files_are_read_in_order_and_their_kinds_may_differ(tmp_path: Path) -> None:
    write_parquet([{"a": 1}, {"a": 2}], tmp_path / "x.parquet")
    (tmp_path / "y.jsonl").write_text('{"a": 3}\n')
    files = [str(tmp_path / "x.parquet"), str(tmp_path / "y.jsonl")]
    assert [row["a"] for _, row in load_rows(files)] == [1, 2, 3]
    assert [where for where, _ in load_rows(files)][1:] == [
        f"{files[0]} row 1",
        f"{files[1]} line 1",
    ]


def test_missing_files_other_kinds_and_lacking_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data file /nowhere.parquet does not exist"):
        list(load_rows(["/nowhere.parquet"]))
    (tmp_path / "x.csv").write_text("a\n")
    with pytest.raises(ValueError, match=r"x.csv: expected .parquet or .jsonl"):
        list(load_rows([str(tmp_path / "x.csv")]))
    assert require({"a": 0}, "a", "here") == 0
    with pytest.raises(ValueError, match=r"here lacks `a`; it has a, b"):
        require({"a": None, "b": 1}, "a", "here")


def test_images_are_refused_where_nothing_looks_at_them() -> None:
    for images in (None, []):
        refuse_images({"images": images}, "row 0")
    refuse_images({}, "row 0")
    with pytest.raises(ValueError, match="row 0 has 2 `images`, but they are not read here"):
        refuse_images({"images": [b"a", b"b"]}, "row 0")


def test_messages_of_another_column() -> None:
    row = {"messages": [{"role": "user", "content": "hi"}]}
    assert messages_of(row, "row 0", "messages") == ({"role": "user", "content": "hi"},)
    with pytest.raises(ValueError, match="row 0: `messages` is 'hi', not a list of chat messages"):
        messages_of({"messages": "hi"}, "row 0", "messages")


def test_parquet_maps_are_mappings_at_every_depth(tmp_path: Path) -> None:
    texts = pa.map_(pa.string(), pa.string())
    table = pa.table(
        {
            "reward_model": pa.array([[("ground_truth", "7"), ("style", "rule")]], texts),
            "extra_info": pa.array([{"tools": [("a", "b")]}], pa.struct([("tools", texts)])),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    [(where, row)] = load_rows([str(tmp_path / "x.parquet")])
    assert ground_truth_of(row, where) == "7"
    assert get_mapping(row, "extra_info", where) == {"tools": {"a": "b"}}
    twice = pa.table({"reward_model": pa.array([[("a", "7"), ("a", "8")]], texts)})
    with pytest.raises(ValueError, match=r"data file x.parquet: a map in it has a key twice"):
        python_rows(twice, "x.parquet")


@pytest.mark.parametrize("value", [{"a": 1}, '{"a": 1}', ' {"a":\n1}'])
def test_a_mapping_may_be_written_as_json(value: object) -> None:
    assert get_mapping({"extra_info": value}, "extra_info", "row 0") == {"a": 1}


@pytest.mark.parametrize(
    "row", [{}, *({"extra_info": value} for value in (None, {}, "", [], "{}"))]
)
def test_no_mapping_is_an_empty_one(row: dict) -> None:
    assert get_mapping(row, "extra_info", "row 0") == {}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("72", "str '72'"),
        ("{oops", "str '{oops'"),
        ("[1]", r"str '\[1\]'"),
        ([{"ground_truth": "72"}], r"list \[\{"),
        ([["ground_truth", "72"]], r"list \[\["),
        (72, "int 72"),
        (0, "int 0"),
        (True, "bool True"),
    ],
)
@pytest.mark.parametrize("column", ["reward_model", "extra_info"])
def test_another_type_than_a_mapping_is_named_with_place_and_remedy(
    value: object, told: str, column: str
) -> None:
    with pytest.raises(
        ValueError,
        match=f"^x.jsonl line 3: `{column}` is the {told}.*, not a mapping: write an object .*"
        "or its JSON text$",
    ):
        get_mapping({column: value}, column, "x.jsonl line 3")


def test_a_ground_truth_is_required() -> None:
    assert ground_truth_of({"reward_model": '{"ground_truth": "72"}'}, "row 0") == "72"
    with pytest.raises(ValueError, match="row 0 lacks `reward_model`"):
        ground_truth_of({"reward_model": None}, "row 0")
    with pytest.raises(ValueError, match="row 0: `reward_model` lacks `ground_truth`; it has a"):
        ground_truth_of({"reward_model": {"a": 1}}, "row 0")
