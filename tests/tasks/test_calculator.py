"""Sums are right, held-out ones are not shown, and demonstrations have the planted habits."""

import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mcore_rl.tasks.calculator import (
    CHAT_TEMPLATE,
    Sum,
    demonstrate,
    prepare_calculator,
    vocabulary,
)
from mcore_rl.tasks.tiny_models import make_word_tokenizer


def test_a_sum() -> None:
    problem = Sum((47, 85, 16), ("+", "-"))
    assert problem.question == "what is 47 + 85 - 16 ?" and problem.value == 116
    assert problem.without_last() == "47 + 85"


def test_demonstrations_guess_forget_or_ask() -> None:
    rng = random.Random(0)
    problem = Sum((47, 85, 16), ("+", "-"))
    kinds = {"guess": 0, "forget": 0, "ask": 0}
    for _ in range(2000):
        turns = demonstrate(problem, rng)
        if len(turns) == 1:
            kinds["guess"] += 1
            continue
        called, answered = turns
        assert answered[:2] == called
        result = answered[3]["content"]
        assert answered[2] == {"role": "tool", "content": result, "tool_calls": None}
        assert result in ("116", "132")
        kinds["ask" if result == "116" else "forget"] += 1
    assert {name: count / 2000 for name, count in kinds.items()} == pytest.approx(
        {"guess": 0.35, "forget": 0.4, "ask": 0.25}, abs=0.04
    )


def test_no_word_is_unknown() -> None:
    tokenizer = make_word_tokenizer(vocabulary(), CHAT_TEMPLATE, ("<|tool|>",))
    rng = random.Random(1)
    for _ in range(50):
        for turn in demonstrate(Sum((9, 99, 0), ("+", "-")), rng):
            ids = tokenizer.apply_chat_template(turn, tokenize=True, return_dict=False)
            assert tokenizer.pad_token_id not in ids


def test_held_out_problems_are_new(tmp_path: Path) -> None:
    prepare_calculator(tmp_path)
    questions = {
        name: {row["prompt"][0]["content"] for row in read(tmp_path / f"{name}.parquet")}
        for name in ("train", "heldout")
    }
    shown = {row["messages"][0]["content"] for row in read(tmp_path / "sft.parquet")}
    assert len(questions["heldout"]) == 256 and len(questions["train"]) == 6000
    assert not questions["heldout"] & (questions["train"] | shown)


def read(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()
