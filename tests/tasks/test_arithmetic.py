"""The word problems: right answers, held-out problems unseen, demonstrations with the documented
share of slips.
"""

import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from mcore_rl.rewards.user_function import load_function
from mcore_rl.tasks.arithmetic import (
    SLIP_SHARE,
    ArithmeticProblem,
    demonstrate,
    make_tokenizer,
    prepare_arithmetic,
    vocabulary,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("arithmetic")
    prepare_arithmetic(path, seed=3)
    return path


def questions(path: Path) -> list[str]:
    column = "messages" if path.stem == "sft" else "prompt"
    return [row[column][0]["content"] for row in pq.read_table(path).to_pylist()]


def test_held_out_problems_are_in_no_other_file(folder: Path) -> None:
    held_out = set(questions(folder / "heldout.parquet"))
    assert len(held_out) == 256
    assert not held_out & {*questions(folder / "train.parquet"), *questions(folder / "sft.parquet")}


def test_every_text_is_covered_by_the_vocabulary(folder: Path) -> None:
    tokenizer, known = make_tokenizer(), set(vocabulary())
    rows = pq.read_table(folder / "sft.parquet").to_pylist()
    words = {
        word for row in rows for message in row["messages"] for word in message["content"].split()
    }
    assert words <= known
    text = "Ada has 12 apples ; 12 - 5 = 7"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (
        json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
        == len(tokenizer)
        == len(known)
    )


def test_the_share_of_slips_is_what_it_says() -> None:
    rng, problem = random.Random(0), ArithmeticProblem("", 20, (("-", 5),))
    slips = sum(demonstrate(problem, rng) == "20 + 5 = 25" for _ in range(4000)) / 4000
    assert slips == pytest.approx(SLIP_SHARE, abs=0.03)
    assert demonstrate(problem, rng, slip_share=0.0) == "20 - 5 = 15"
    assert (
        demonstrate(ArithmeticProblem("", 20, (("+", 5), ("-", 3))), rng, slip_share=0.0)
        == "20 + 5 = 25 ; 25 - 3 = 22"
    )


def test_a_right_demonstration_earns_the_reward_and_a_slip_does_not() -> None:
    reward = load_function("recipes/rewards/arithmetic.py", "reward")
    rng, problem = random.Random(0), ArithmeticProblem("", 20, (("+", 5), ("-", 3)))

    def score(text: str) -> float:
        return reward.call(("", text, str(problem.answer), {}))

    assert score(demonstrate(problem, rng, slip_share=0.0)) == 1.0
    assert score(demonstrate(problem, rng, slip_share=1.0)) == 0.0
    assert score("no number") == 0.0


def test_the_same_seed_makes_the_same_problems(folder: Path, tmp_path: Path) -> None:
    prepare_arithmetic(tmp_path, seed=3)
    assert questions(tmp_path / "train.parquet") == questions(folder / "train.parquet")
