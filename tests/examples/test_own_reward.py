"""The example of a reward scores samples as a recipe's reward."""

import pytest

from mcore_rl.config import RewardConfig
from mcore_rl.rewards.make import make_scorer
from tests.support.samples import make_sample


def test_near_answers_get_a_part_of_the_marks() -> None:
    reward = RewardConfig(path="examples/own_reward.py", name="score_closeness")
    scorer = make_scorer(reward, 512, {})
    answers = ["it is 2", "2 + 2 = 4", "it is 12", "I do not know"]
    scores = scorer([make_sample(1, answer) for answer in answers])
    assert scores.rewards_N == pytest.approx([1.0, 0.5 / 3, 0.5 / 11, 0.0])
