"""The scorer that a recipe describes, and wrong options that are refused."""

from pathlib import Path

import pytest

from mcore_rl.config import RewardConfig
from mcore_rl.rewards.make import make_scorer
from tests.support.samples import make_sample


def test_a_function_scores() -> None:
    scorer = make_scorer(RewardConfig(path="recipes/rewards/arithmetic.py"), 512, {})
    samples = [make_sample(1, "the answer is 2"), make_sample(1, "it is 3")]
    assert scorer(samples).rewards_N == [1.0, 0.0]


def test_a_missing_function_is_refused(tmp_path: Path) -> None:
    reward = RewardConfig(path=str(tmp_path / "none.py"))
    with pytest.raises(ValueError, match=r"reward.path=.*none.py"):
        make_scorer(reward, 512, {})
