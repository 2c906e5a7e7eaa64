"""GSM8K from a local copy."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mcore_rl.tasks.published import final_answer, prepare_gsm8k


def write_split(folder: Path, name: str, answer: str) -> None:
    (folder / name).write_text(json.dumps({"question": "How many?", "answer": answer}) + "\n")


def test_local_copy_becomes_prompts_and_conversations(tmp_path: Path) -> None:
    write_split(tmp_path, "train.jsonl", "500 + 734 = 1234\n#### 1,234")
    write_split(tmp_path, "test.jsonl", "2\n#### 2")
    prepare_gsm8k(str(tmp_path), tmp_path / "out")
    (row,) = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert row["reward_model"]["ground_truth"] == "1234"
    assert row["prompt"][0]["content"].startswith("How many? ")
    (conversation,) = pq.read_table(tmp_path / "out" / "sft.parquet").to_pylist()
    assert conversation["messages"][1]["content"].endswith("#### 1,234")
    assert (tmp_path / "out" / "heldout.parquet").exists()


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no .parquet or .jsonl file with 'train' in its name"):
        prepare_gsm8k(str(tmp_path), tmp_path / "out")
    with pytest.raises(ValueError, match="a GSM8K answer without '####'"):
        final_answer("42")
