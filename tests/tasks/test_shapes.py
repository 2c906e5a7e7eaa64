"""Pictures show what the answers say, and no held-out question can be answered without one."""

import io
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers import AutoTokenizer

from mcore_rl.tasks.shapes import (
    CELL,
    COLORS,
    GRAY,
    SIDE,
    best_blind,
    make_problem,
    prepare_shapes,
    vocabulary,
)


def cells_of(picture: bytes) -> list[str]:
    """Return a word for each cell: its color, but for the background's."""
    image = np.asarray(Image.open(io.BytesIO(picture)))
    cells = image.reshape(SIDE, CELL, SIDE, CELL, 3).transpose(0, 2, 1, 3, 4)
    names = {rgb: name for name, rgb in COLORS.items()}
    words = []
    for cell in cells.reshape(SIDE**2, CELL, CELL, 3):
        pixels = {tuple(pixel) for pixel in cell.reshape(-1, 3).tolist()} - {GRAY}
        assert len(pixels) <= 1
        words.append(names[pixels.pop()] if pixels else "empty")
    return words


def test_answers_follow_from_the_pixels() -> None:
    chance = random.Random(3)
    wrong_habits = 0
    for _ in range(200):
        problem = make_problem(chance)
        *cells, so, answer = problem.right
        seen = cells_of(problem.picture)
        assert list(problem.cells) == seen
        words = problem.question.split()
        assert so == "so" and len(cells) == SIDE**2
        if words[0] == "how":
            assert answer == str(cells.count("yes"))
            assert cells == ["yes" if word == words[2] else "no" for word in seen]
        else:
            one, other = words[1], words[3]
            assert cells == [name if name in (one, other) else "no" for name in seen]
            more = seen.count(one) - seen.count(other)
            assert answer == ("same" if more == 0 else one if more > 0 else other)
        wrong_habits += problem.habit[-1] != answer
        assert {*problem.right, *problem.habit, *words} <= set(vocabulary())
    assert 150 < wrong_habits < 200


def test_files_are_those_of_the_recipe(tmp_path: Path) -> None:
    prepare_shapes(tmp_path / "one", seed=5)
    prepare_shapes(tmp_path / "two", seed=5)
    names = {"train", "heldout", "heldout_blind", "sft"}
    for name in names:
        rows = pq.read_table(tmp_path / "one" / f"{name}.parquet").to_pylist()
        assert rows == pq.read_table(tmp_path / "two" / f"{name}.parquet").to_pylist()
        assert all(len(row["images"]) == 1 for row in rows)
    held_out, blind = (
        pq.read_table(tmp_path / "one" / f"{name}.parquet").to_pylist()
        for name in ("heldout", "heldout_blind")
    )
    assert [row["prompt"] for row in held_out] == [row["prompt"] for row in blind]
    assert len({row["images"][0]["bytes"] for row in blind}) == 1
    assert set(cells_of(blind[0]["images"][0]["bytes"])) == {"empty"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one" / "model")
    shown = pq.read_table(tmp_path / "one" / "sft.parquet").to_pylist()
    texts = [row["messages"][-1]["content"] for row in shown]
    assert 0.45 < sum("done" in text for text in texts) / len(texts) < 0.55
    assert all(tokenizer.pad_token_id not in tokenizer(text)["input_ids"] for text in texts)
    for row in held_out:
        ids = tokenizer(row["prompt"][0]["content"].removeprefix("<image> "))["input_ids"]
        assert tokenizer.pad_token_id not in ids


def test_the_best_blind_answer_is_that_of_each_kind() -> None:
    chance = random.Random(1)
    problems = [make_problem(chance) for _ in range(300)]
    assert best_blind(problems[:1]) == 1.0
    assert 0.2 < best_blind(problems) < 0.5
    assert best_blind(problems) == pytest.approx(
        sum(
            max(
                sum(p.question.startswith(kind) and p.answer == answer for p in problems)
                for answer in vocabulary()
            )
            for kind in ("how", "more")
        )
        / 300
    )
