"""MATH answers as math-verify compares them: equal in another form, or wrong but look-alike."""

import pytest

from mcore_rl.config import RewardConfig
from mcore_rl.rewards.scorer import Scorer
from tests.rewards.test_scorer import make_sample_of

RIGHT = [
    (r"\frac{1}{2}", r"so \boxed{0.5}"),
    (r"\frac{1}{2}", r"\boxed{\dfrac12}"),
    (r"\boxed{\sqrt{2}}", r"\boxed{2^{1/2}}"),
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}"),
    ("x+1", r"\boxed{1+x}"),
    (r"\sin^2 x+\cos^2 x", r"\boxed{1}"),
    ("(1,2)", r"\boxed{(1, 2)}"),
    (r"\{1,2\}", r"\boxed{\{2,1\}}"),
    ("1,2", r"\boxed{2, 1}"),
    (r"[0,\infty)", r"\boxed{[0, \infty)}"),
    ("x>2", r"\boxed{2<x}"),
    (r"10\%", r"\boxed{10\%}"),
    ("1000", r"\boxed{1,000}"),
    ("5", r"\boxed{x=5}"),
    ("5", r"\boxed{5\text{ cm}}"),
    (r"90^\circ", r"\boxed{90}"),
    (
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        r"\boxed{\begin{pmatrix}1&2\\3&\frac{8}{2}\end{pmatrix}}",
    ),
    (r"-\frac{3}{4}", r"first \boxed{1}, but then \boxed{-\frac34}"),
    ("10", "The answer is $10$."),
    ("C", r"\boxed{C}"),
    (r"\text{Tuesday}", r"\boxed{\text{Tuesday}}"),
]
WRONG = [
    ("(1,2)", r"\boxed{(2,1)}"),
    (r"[0,\infty)", r"\boxed{(0, \infty)}"),
    (r"\frac{\pi}{4}", r"\boxed{0.785}"),
    ("x>2", r"\boxed{x<2}"),
    ("12", r"\boxed{12} or rather \boxed{13}"),
    ("C", r"\boxed{B}"),
    ("3", "no idea"),
    ("3", r"\boxed{"),
    ("3", ""),
]


@pytest.mark.parametrize("workers", [0, 1])
def test_answers_are_compared_as_mathematics(workers: int) -> None:
    table = [*((*pair, 1.0) for pair in RIGHT), *((*pair, 0.0) for pair in WRONG)]
    samples = [make_sample_of(response, truth) for truth, response, _ in table]
    with Scorer(RewardConfig(path="recipes/rewards/math.py", workers=workers), 100) as scorer:
        scores = scorer(samples)
    found = zip(table, scores.rewards_N, scores.errors, strict=True)
    assert not [(row, reward, error) for row, reward, error in found if reward != row[2] or error]
    assert scores.parts["form"][0] == 1 and scores.parts["form"][-1] == 0


@pytest.mark.slow
def test_a_comparison_without_end_costs_its_sample_alone() -> None:
    tower = r"\boxed{9^{9^{9^{9^{9}}}}!}"
    config = RewardConfig(path="recipes/rewards/math.py", workers=1, timeout_s=5.0)
    with Scorer(config, 100) as scorer:
        scores = scorer(
            [make_sample_of(tower, r"\sum_{k=1}^{99999999} k!"), make_sample_of(r"\boxed{3}", "3")]
        )
    assert "no answer within reward.timeout_s=5" in scores.errors[0] and not scores.errors[1]
    assert scores.has_outcome_N == [False, True] and scores.outcomes() == [1.0]
