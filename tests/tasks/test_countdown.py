"""Countdown problems: solvable, held out by identity, demonstrated in form alone, checked step by
step.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.rewards.user_function import load_function
from mcore_rl.tasks.countdown import (
    GIVEN,
    NUM_GIVEN,
    CountdownProblem,
    compare,
    demonstrate,
    prepare_countdown,
    random_steps,
    vocabulary,
)
from mcore_rl.tasks.tiny_models import make_word_tokenizer

NUMBERS = st.lists(st.integers(*GIVEN), min_size=NUM_GIVEN, max_size=NUM_GIVEN)
PROBLEM = CountdownProblem((3, 8, 5), 10)
SOLUTION = "8 + 5 = 13 high ; 13 - 3 = 10 reached"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("countdown")
    prepare_countdown(path, seed=3)
    return path


@pytest.fixture(scope="module")
def score() -> Callable[[CountdownProblem, str], float]:
    function = load_function("recipes/rewards/countdown.py", "reward")

    def call(problem: CountdownProblem, response: str) -> float:
        value = function.call(("", response, problem.ground_truth, {}))
        assert isinstance(value, float)
        return value

    return call


def identities(path: Path) -> list[tuple[int, ...]]:
    """The numbers, sorted, and the target of each question of a file."""
    column = "messages" if path.stem == "sft" else "prompt"
    questions = [row[column][0]["content"].split() for row in pq.read_table(path).to_pylist()]
    return [(*sorted(map(int, q[1 : 1 + NUM_GIVEN])), int(q[-1])) for q in questions]


def test_held_out_problems_are_in_no_other_file_in_any_order(folder: Path) -> None:
    held_out = identities(folder / "heldout.parquet")
    assert len(held_out) == len(set(held_out)) == 256
    assert not {*held_out} & {*identities(folder / "train.parquet")}
    assert not {*held_out} & {*identities(folder / "sft.parquet")}


def test_every_text_is_covered_by_the_vocabulary(folder: Path) -> None:
    tokenizer = make_word_tokenizer(vocabulary())
    for row in pq.read_table(folder / "sft.parquet").to_pylist()[:2000]:
        for message in row["messages"]:
            assert tokenizer.decode(tokenizer.encode(message["content"])) == message["content"]


@given(NUMBERS, st.randoms(use_true_random=False))
def test_random_steps_use_each_number_once_and_are_rewarded_where_they_end(
    score: Callable[[CountdownProblem, str], float], numbers: list[int], rng: random.Random
) -> None:
    state = rng.getstate()
    steps = random_steps(numbers, rng)
    assert len(steps) == NUM_GIVEN - 1 and all(step.result >= 0 for step in steps)
    reached = CountdownProblem(tuple(numbers), steps[-1].result)
    missed = CountdownProblem(tuple(numbers), steps[-1].result + 1)
    for problem, reward in ((reached, 1.0), (missed, 0.0)):
        rng.setstate(state)
        assert score(problem, demonstrate(problem, rng)) == reward


def test_demonstrations_ignore_the_number_to_reach(folder: Path) -> None:
    """They solve as many problems as blind luck does, and no more."""
    rows = pq.read_table(folder / "sft.parquet").to_pylist()
    solved = sum(row["messages"][1]["content"].endswith("reached") for row in rows) / len(rows)
    rng = random.Random(0)
    luck = 0
    for _ in range(20000):
        numbers = [rng.randint(*GIVEN) for _ in range(NUM_GIVEN)]
        luck += random_steps(numbers, rng)[-1].result == random_steps(numbers, rng)[-1].result
    assert solved == pytest.approx(luck / 20000, abs=0.02)
    assert 0.2 < solved < 0.4


@pytest.mark.parametrize(
    "response",
    [
        "8 + 5 = 13 high ; 13 - 4 = 9 low",  # 4 is not given
        "8 + 5 = 13 high ; 8 + 3 = 11 high",  # 8 is used twice
        "8 + 5 = 13 high ; 13 - 3 = 11 high",  # wrong arithmetic
        "8 + 5 = 13 low ; 13 - 3 = 10 reached",  # wrong comparison
        "8 + 5 = 12 high ; 12 - 2 = 10 reached",
        "5 + 8 = 13 high",  # ends too early
        "8 + 5 = 13 high ; 13 - 3 = 10",
        "10",
        "",
    ],
)
def test_anything_but_right_steps_to_the_target_earns_nothing(
    score: Callable[[CountdownProblem, str], float], response: str
) -> None:
    assert score(PROBLEM, SOLUTION) == 1.0
    assert score(PROBLEM, response) == 0.0


def test_results_are_compared_with_the_target() -> None:
    assert [compare(number, 10) for number in (9, 10, 11)] == ["low", "reached", "high"]


def test_the_same_seed_makes_the_same_problems(folder: Path, tmp_path: Path) -> None:
    prepare_countdown(tmp_path, seed=3)
    for name in ("train", "heldout", "sft"):
        assert identities(tmp_path / f"{name}.parquet") == identities(folder / f"{name}.parquet")
