"""Rewards by file and name."""

from pathlib import Path

import pytest

from mcore_rl.rewards.functions import load_reward, score_samples
from mcore_rl.types import Prompt, Sample


def make_samples(*texts: str) -> list[Sample]:
    return [
        Sample(Prompt(i, (1,), (), "unit", "7"), 0, (), (), "stop", (), text) for i, text in enumerate(texts)
    ]


@pytest.fixture
def reward_file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(
        "def score(*, data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 2.0 if solution_str == ground_truth else 0, 'extra': 1}\n"
        "def fails(*, data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1 / 0\n"
        "def narrow(solution_str):\n"
        "    return 0.0\n"
    )
    return str(path)


def test_numbers_and_mappings_are_scores(reward_file: str) -> None:
    assert score_samples(load_reward(reward_file, "score"), make_samples("7", "8")) == [2.0, 0.0]


def test_an_exception_names_the_sample(reward_file: str) -> None:
    with pytest.raises(
        RuntimeError, match=r"reward of prompt 0 \(unit\) raised ZeroDivisionError.*ground truth '7'"
    ):
        score_samples(load_reward(reward_file, "fails"), make_samples("7"))


def test_wrong_names_and_signatures_are_refused(reward_file: str) -> None:
    with pytest.raises(ValueError, match="no such file"):
        load_reward("/nowhere.py", "score")
    with pytest.raises(ValueError, match="it has fails, narrow, score"):
        load_reward(reward_file, "scores")
    with pytest.raises(ValueError, match="must take the keyword arguments data_source"):
        load_reward(reward_file, "narrow")
