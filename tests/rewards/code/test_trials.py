"""Trials of programs: what the policy is told, and how many sandboxes that takes."""

import asyncio
from typing import Any

import pytest

from mcore_rl.rewards.code import execution as code_execution
from mcore_rl.rewards.code.languages import PairLanguage
from mcore_rl.rewards.code.places import execute
from mcore_rl.rewards.code.trials import make_trial
from mcore_rl.services.sandbox.execution import CodeRequest, CodeResult
from mcore_rl.tasks.code_steps import STEPS

SUM = {"public": {"inputs": [[3, 4]], "outputs": [7]}, "inputs": [[1, 1]], "outputs": [2]}


def test_programs_in_steps_that_come_together_share_a_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = []

    def counting(request: CodeRequest, url: str) -> CodeResult:
        runs.append(request.stdin)
        return execute(request, url)

    monkeypatch.setattr(code_execution, "execute", counting)

    async def try_all() -> list[bool]:
        texts = ["a = a + b", "a = a - b", "a = a + b", "import os"]
        verdicts = await asyncio.gather(*(make_trial(STEPS, SUM).run(text) for text in texts))
        return [verdict.passes_public for verdict in verdicts]

    assert asyncio.run(try_all()) == [True, False, True, False]
    assert len(runs) == 1
    assert runs[0].count('"function"') == 2, "equal programs run once, what is no program never"


@pytest.mark.parametrize(
    ("truth", "answer", "told"),
    [
        ({"inputs": ["1"], "outputs": ["5"]}, "print(4)", "Input: 1\nExpected: 5\nGot: 4"),
        ({"inputs": ["1"], "outputs": ["5"]}, "exit(3)", "exit status 3"),
        (
            {"fn_name": "f", "inputs": [[1, "x"]], "outputs": [5]},
            "def f(a, b): return (a, b)",
            "Input: f(1, 'x')\nExpected: 5\nGot: (1, 'x')",
        ),
    ],
)
def test_the_first_failed_public_test_is_told(truth: Any, answer: str, told: str) -> None:
    whole = {"public": truth, **truth}
    verdict = asyncio.run(make_trial("python", whole).run(f"```python\n{answer}\n```"))
    assert not verdict.passes_public and told in verdict.feedback


def test_without_public_tests_hidden_ones_decide() -> None:
    async def judge() -> list[bool]:
        trial = make_trial("python", {"inputs": ["1", "2"], "outputs": ["1", "0"]})
        return await trial.run_hidden(await trial.run("```\nprint(input())\n```"))

    assert asyncio.run(judge()) == [True, False]


def test_the_language_of_a_problem_is_asked_for() -> None:
    problem = {"public": {"inputs": ["1"], "outputs": ["1"]}, "inputs": ["2"], "outputs": ["2"]}

    async def told(language: str, truth: dict[str, Any], answer: str) -> str:
        return (await make_trial(language, truth).run(answer)).feedback

    assert "as a ```bash block" in asyncio.run(told("bash", problem, "cat"))
    assert "as a ```bash block" in asyncio.run(told("cpp", problem | {"language": "sh"}, "cat"))
    assert not asyncio.run(told("bash", problem, "```sh\ncat\n```"))


@pytest.mark.parametrize(
    ("language", "truth", "message"),
    [
        (STEPS, {"inputs": [], "outputs": []}, "needs as many of both"),
        ("python", {"public": {"inputs": ["1"], "outputs": ["1"]}}, "no tests"),
        ("python", {**SUM, "public": {"asserts": ["assert f(1) == 1"]}}, "are assertions"),
    ],
)
def test_problems_that_cannot_be_tried_are_refused(
    language: str | PairLanguage, truth: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trial(language, truth)
