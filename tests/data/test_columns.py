"""Prompt files with the columns of other systems become the same prompts."""

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.config import ColumnsConfig, DataConfig
from mcore_rl.data.columns import OURS, Columns
from mcore_rl.data.prompts import load_prompts
from mcore_rl.data.streamed.open import open_prompts
from mcore_rl.tasks.arithmetic import make_tokenizer
from mcore_rl.types import Prompt
from tests.support.prompt_sets import are_right

QUESTION = "Ada has 3 apples and gets 4 more . how many apples does Ada have now ?"
MESSAGES = [{"role": "user", "content": QUESTION}]
VERL: dict[str, Any] = {
    "prompt": MESSAGES,
    "data_source": "unit",
    "reward_model": {"ground_truth": "7"},
    "extra_info": {"level": 3},
}
OTHERS: list[tuple[ColumnsConfig, dict[str, Any]]] = [
    (
        ColumnsConfig(preset="slime"),
        {"prompt": QUESTION, "label": "7", "metadata": {"level": 3}, "data_source": "unit"},
    ),
    (
        ColumnsConfig(preset="nemo_rl", extra=["level"]),
        {"input": QUESTION, "output": "7", "task_name": "unit", "level": 3},
    ),
    (
        ColumnsConfig(preset="trl", extra=["level"]),
        {"prompt": MESSAGES, "solution": "7", "data_source": "unit", "level": 3},
    ),
    (
        ColumnsConfig(prompt="q", answer="meta.answer", data_source="set", extra_info="meta.not"),
        {"q": QUESTION, "meta": json.dumps({"answer": "7"}), "set": "unit"},
    ),
]


def load(folder: Path, config: ColumnsConfig, row: dict[str, Any]) -> Prompt:
    """Return the prompt of a file with one row, which loading and streaming agree on."""
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    columns = Columns.make(config)
    [whole] = load_prompts([str(file)], make_tokenizer(), 64, "error", folder, None, columns)
    data = DataConfig(train=[str(file)], max_prompt_len=64, workers=0, columns=config)
    stream = open_prompts(data, 0, make_tokenizer, are_right)
    assert stream.take(1) == [whole]
    stream.close()
    return whole


@pytest.mark.parametrize(("config", "row"), OTHERS)
def test_other_columns_are_the_same_prompt(
    tmp_path: Path, config: ColumnsConfig, row: dict[str, Any]
) -> None:
    ours = load(tmp_path, ColumnsConfig(), VERL)
    read = load(tmp_path, config, row)
    assert read.token_ids == ours.token_ids and read.messages == ours.messages
    assert (read.ground_truth, read.data_source) == ("7", "unit")
    assert read.extra_info == ({} if config.preset == "verl" else {"level": 3})


def test_a_plain_text_gets_the_system_message(tmp_path: Path) -> None:
    config = ColumnsConfig(preset="slime", system="answer in one word .")
    read = load(tmp_path, config, {"prompt": QUESTION, "label": 7})
    assert read.messages == ({"role": "system", "content": "answer in one word ."}, *MESSAGES)
    assert (read.ground_truth, read.data_source) == (7, "slime")
    assert load(tmp_path, config, {"prompt": MESSAGES, "label": 7}).messages == tuple(MESSAGES)


def test_one_image_is_a_list_of_one() -> None:
    columns = Columns.make(ColumnsConfig(preset="trl", images="image"))
    row = columns.convert({"prompt": "what ?", "solution": "x", "image": "a.png"}, "a row")
    assert row["images"] == ["a.png"] and row["videos"] is None


def test_rows_in_our_columns_stay_as_they_are() -> None:
    assert Columns.make(ColumnsConfig()) == OURS
    assert OURS.convert(VERL, "a row") is VERL


@pytest.mark.parametrize(
    ("config", "row", "lacks"),
    [
        (ColumnsConfig(preset="nemo_rl"), {"prompt": QUESTION, "output": "7"}, "input"),
        (ColumnsConfig(preset="trl"), {"prompt": QUESTION, "answer": "7"}, "solution"),
        (ColumnsConfig(answer="meta.answer"), {**VERL, "meta": {"other": 1}}, "meta.answer|answer"),
    ],
)
def test_a_column_that_is_not_there_is_named(
    tmp_path: Path, config: ColumnsConfig, row: dict[str, Any], lacks: str
) -> None:
    with pytest.raises(ValueError, match=rf"rows.jsonl line 1.* lacks `({lacks})`; it has "):
        load(tmp_path, config, row)
    data = DataConfig(train=[str(tmp_path / "rows.jsonl")], columns=config, workers=0)
    with pytest.raises(ValueError, match=rf"rows.jsonl line 1.* lacks `({lacks})`; it has "):
        open_prompts(data, 0, make_tokenizer, are_right).take(1)
