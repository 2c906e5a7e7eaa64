"""Prompt files of both kinds, overlong prompts, and what is refused."""

import json
from pathlib import Path

import pytest

from mcore_rl.data.prompts import load_prompts
from mcore_rl.data.rows import prompt_row, write_parquet
from mcore_rl.tasks.arithmetic import make_tokenizer

SHORT, LONG = (
    "Ada has 3 apples",
    "Ada has 3 apples and gets 4 more . how many apples does Ada have now ?",
)


@pytest.fixture
def rows() -> list[dict]:
    return [prompt_row(q, str(i), "unit", "train", i) for i, q in enumerate((SHORT, LONG, SHORT))]


def test_parquet_and_jsonl_give_the_same_prompts(tmp_path: Path, rows: list[dict]) -> None:
    write_parquet(rows, tmp_path / "p.parquet")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer()
    parquet = load_prompts([str(tmp_path / "p.parquet")], tokenizer, 64, "error")
    jsonl = load_prompts([str(tmp_path / "p.jsonl")], tokenizer, 64, "error")
    assert parquet == jsonl
    assert [p.ground_truth for p in parquet] == ["0", "1", "2"]
    assert parquet[0].data_source == "unit"
    assert parquet[0].extra_info == {"split": "train", "index": 0}
    assert tokenizer.decode(parquet[0].token_ids) == f"<|user|> {SHORT} <|assistant|>"


def test_overlong_prompts_are_dropped_and_counted_or_refused(
    tmp_path: Path, rows: list[dict], caplog
) -> None:
    write_parquet(rows, tmp_path / "p.parquet")
    files, tokenizer = [str(tmp_path / "p.parquet")], make_tokenizer()
    with caplog.at_level("INFO"):
        kept = load_prompts(files, tokenizer, 8, "filter")
    assert [p.index for p in kept] == [0, 2]
    assert "1 overlong dropped" in caplog.text
    with pytest.raises(
        ValueError,
        match=r"1 of 3 prompts are longer than data.max_prompt_len=8, the first is row 1",
    ):
        load_prompts(files, tokenizer, 8, "error")
    with pytest.raises(ValueError, match="no prompt of at most 2 tokens among 3"):
        load_prompts(files, tokenizer, 2, "filter")


def test_a_row_without_a_column_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"data_source": "a"}\n')
    with pytest.raises(ValueError, match=r"x.jsonl line 1 lacks `prompt`; it has data_source"):
        load_prompts([str(tmp_path / "x.jsonl")], make_tokenizer(), 8, "filter")


def test_prompts_are_the_same_from_the_cache(tmp_path: Path, rows: list[dict]) -> None:
    write_parquet(rows, tmp_path / "p.parquet")
    files = [str(tmp_path / "p.parquet")]
    cache = tmp_path / "cache"
    plain = load_prompts(files, make_tokenizer(), 64, "error")
    for _ in range(2):
        assert load_prompts(files, make_tokenizer(), 64, "error", cache) == plain
    assert len(list(cache.iterdir())) == 1


def test_mappings_may_be_written_as_json(tmp_path: Path, rows: list[dict]) -> None:
    written = [
        {**row, "reward_model": json.dumps(row["reward_model"]), "extra_info": '{"index": 3}'}
        for row in rows
    ]
    write_parquet(written, tmp_path / "p.parquet")
    prompts = load_prompts([str(tmp_path / "p.parquet")], make_tokenizer(), 64, "error")
    assert [p.ground_truth for p in prompts] == ["0", "1", "2"]
    assert [p.extra_info for p in prompts] == [{"index": 3}] * 3


@pytest.mark.parametrize(
    ("column", "value"), [("reward_model", "72"), ("reward_model", [1]), ("extra_info", "a note")]
)
def test_columns_of_other_types_are_named_by_row(
    tmp_path: Path, rows: list[dict], column: str, value: object
) -> None:
    rows[1][column] = value
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=rf"p.jsonl line 2: `{column}` is the .* write an object"):
        load_prompts([str(tmp_path / "p.jsonl")], make_tokenizer(), 64, "error")
