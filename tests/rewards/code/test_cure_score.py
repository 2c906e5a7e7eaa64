"""Programs of a problem run on its unit tests, in a sandbox."""

import json
from functools import partial
from typing import Any

import pytest

from mcore_rl.rewards.code.cure import execute_pairs, execute_programs, score_samples
from mcore_rl.tasks.code_steps import STEPS

execute_steps = partial(execute_pairs, STEPS)
TRUTH = json.dumps({"inputs": [[3, 4], [5, 6]], "outputs": [7, 11]})
PYTHON = {"inputs": ["1", "2"], "outputs": ["2", "4"]}


def infos(num_programs: int, num_tests: int) -> list[dict[str, Any]]:
    return [
        {"episode": {"is_test": float(i >= num_programs)}} for i in range(num_programs + num_tests)
    ]


def numbers(answers: list[Any], name: str) -> list[float]:
    return [answer[name] for answer in answers]


def test_programs_in_steps() -> None:
    programs = ["a = a + b", "a = 7 + 0", "import os", "a = a // 0"]
    tests = ["a = 1 b = 2 ; 3", "a = 1 b = 2 ; 9 ; - 1", "a = 3 b = 4 ; 7", "no test"]
    answers = score_samples([*programs, *tests], [TRUTH] * 8, infos(4, 4), execute_steps)
    assert numbers(answers[:4], "program") == [1.0, 0.5, 0.0, 0.0]
    assert numbers(answers[4:], "test") == pytest.approx([1.0, 0.0, 2 / 3, 0.0])
    assert numbers(answers, "is_test") == [0.0] * 4 + [1.0] * 4


def test_python_programs() -> None:
    programs = ["```python\nprint(2 * int(input()))\n```", "```python\nprint(2)\n```", "none"]
    good = "Input:\n```\n5\n```\nOutput:\n```\n10\n```"
    blind = "```\n1\n```\n```\n2\n```"
    wrong = "```\n5\n```\n```\n11\n```"
    answers = score_samples(
        [*programs, good, blind, wrong, "hm"], [PYTHON] * 7, infos(3, 4), execute_programs
    )
    assert numbers(answers[:3], "program") == [1.0, 0.5, 0.0]
    assert numbers(answers[3:], "test") == [1.0, 0.5, 0.0, 0.0]


def test_problems_are_apart_and_one_that_cannot_be_tested_costs_itself_alone() -> None:
    other = {"asserts": ["assert f(1) == 2"]}
    program = "```python\nprint(2 * int(input()))\n```"
    answers = score_samples([program, program], [PYTHON, other], infos(2, 0), execute_programs)
    assert isinstance(answers[0], dict) and answers[0]["program"] == 1.0
    assert isinstance(answers[1], ValueError) and "standard input" in str(answers[1])


def test_a_group_without_programs_tells_nothing_of_tests() -> None:
    [answer] = score_samples(["a = 1 b = 2 ; 3"], [TRUTH], infos(0, 1), execute_steps)
    assert isinstance(answer, dict) and answer["test"] == 0.0


def test_answers_that_were_cut_off_are_wrong_ones() -> None:
    """Half a program passes no test; half a test is passed by no program, right or wrong."""
    texts = ["a = a + b", "a = a +", "a = 1 b = 2 ; 3", "a = 1 b = 2 ;"]
    answers = score_samples(texts, [TRUTH] * 4, infos(2, 2), execute_steps)
    assert numbers(answers, "program") == [1.0, 0.0, 0.0, 0.0]
    assert numbers(answers, "test") == [0.0, 0.0, 1.0, 0.0]
    whole = "```python\nprint(2 * int(input()))\n```"
    test = "```\n5\n```\n```\n10\n```"
    texts = [whole, whole[:-4], test, test[:-4]]
    answers = score_samples(texts, [PYTHON] * 4, infos(2, 2), execute_programs)
    assert numbers(answers, "program") == [1.0, 0.0, 0.0, 0.0]
    assert numbers(answers, "test") == [0.0, 0.0, 1.0, 0.0]


def test_a_sample_without_a_role_costs_itself_alone() -> None:
    roles = [*infos(1, 0), {"episode": {}}, {}, *infos(0, 1)]
    texts = ["a = a + b", "a = a + b", "a = a + b", "a = 1 b = 2 ; 3"]
    answers = score_samples(texts, [TRUTH] * 4, roles, execute_steps)
    assert numbers([answers[0], answers[3]], "program") == [1.0, 0.0]
    assert numbers([answers[0], answers[3]], "test") == [0.0, 1.0]
    for answer in answers[1:3]:
        assert isinstance(answer, ValueError)
        assert "set agents.environment=cure, or give 'is_test' among the metrics" in str(answer)
