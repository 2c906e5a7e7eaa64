"""The reward of programs: input and output, calls, assertions, and programs that cheat."""

import json
from typing import Any

import pytest

from mcore_rl.config import RewardConfig
from mcore_rl.rewards.scorer import Scorer
from tests.rewards.test_scorer import make_sample_of

ADD = "```python\ndef f(a, b):\n    return a + b\n```"
STDIN = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
CALLS = {"fn_name": "f", "inputs": [[1, 2], ["a", "b"], [[1], [2]]], "outputs": [3, "ab", [1, 2]]}
ASSERTS = {"asserts": ["assert f(1, 2) == 3", "assert f(1, 2) == 4"]}


@pytest.mark.parametrize(
    ("response", "truth", "share"),
    [
        ("So:\n```python\nprint(sum(map(int, input().split())))\n```", STDIN, 1.0),
        ("```\nprint(3)\n```", STDIN, 0.5),
        ("```py\nprint(1)\n```\nbetter\n```py\nprint(3, '  \\n')\n```", STDIN, 0.5),
        ("print(3)", STDIN, 0.0),
        (ADD, json.dumps(CALLS), 1.0),
        ("```python\ndef f(a, b):\n    print('x')\n    return 3\n```", CALLS, 1 / 3),
        ("```python\nf = lambda a, b: {1: object()}\n```", CALLS, 0.0),
        (ADD, ASSERTS, 0.5),
        ("```python\nimport os\nos._exit(0)\n```", ASSERTS, 0.0),
        ("```python\nimport sys\nprint('true')\nsys.exit()\n```", ASSERTS, 0.0),
        ("```python\ndef f(a, b)\n```", ASSERTS, 0.0),
    ],
)
def test_the_reward_is_the_share_of_tests_passed(response: str, truth: Any, share: float) -> None:
    config = RewardConfig(path="recipes/rewards/code.py")
    with Scorer(config, 100) as scorer:
        scores = scorer([make_sample_of(response, truth)])
    assert scores.errors == [""]
    assert scores.rewards_N == pytest.approx([share])
    assert scores.parts["solved"] == [float(share == 1)]


def test_a_ground_truth_without_tests_is_an_error() -> None:
    with Scorer(
        RewardConfig(path="recipes/rewards/code.py", name="reward_one", workers=1), 100
    ) as scorer:
        scores = scorer([make_sample_of(ADD, {"answer": 1})])
    assert "no tests in the ground truth, whose keys are ['answer']" in scores.errors[0]


def test_an_error_costs_its_sample_alone() -> None:
    with Scorer(RewardConfig(path="recipes/rewards/code.py"), 100) as scorer:
        scores = scorer([make_sample_of(ADD, {"answer": 1}), make_sample_of(ADD, CALLS)])
    assert scores.has_outcome_N == [False, True] and scores.outcomes() == [1.0]
    assert "no tests" in scores.errors[0] and scores.errors[1] == ""
