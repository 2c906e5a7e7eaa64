"""Episodes of programs: solved at once, repaired, failed; with a real sandbox."""

import asyncio
import json
from typing import Any

import pytest

from mcore_rl.agents.environments.code_env import CodeEnvironment, CodeOptions
from mcore_rl.agents.environments.environment import Step
from mcore_rl.rewards.code import execution as code_execution
from mcore_rl.services.sandbox.execution import CodeRequest, CodeResult
from mcore_rl.services.sandbox.limits import SandboxError

STEPS = json.dumps(
    {
        "public": {"inputs": [[3, 4]], "outputs": [7]},
        "inputs": [[1, 1], [5, 6]],
        "outputs": [2, 11],
    }
)
PYTHON = {
    "public": {"inputs": ["1"], "outputs": ["2"]},
    "inputs": ["2", "3"],
    "outputs": ["4", "6"],
}


def play(truth: Any, answers: list[str], **options: Any) -> list[Step]:
    async def episode() -> list[Step]:
        environment = CodeEnvironment(CodeOptions(**options))
        await environment.reset({"messages": [], "ground_truth": truth})
        steps = [await environment.step({"content": answer}) for answer in answers]
        await environment.close()
        return steps

    return asyncio.run(episode())


def test_a_program_that_passes_ends_the_episode() -> None:
    [step] = play(STEPS, ["a = a + b"], language="steps")
    assert step.done and step.reward == 1.0
    assert step.metrics == {"first_passes_public": 1.0, "attempts": 1.0, "solved": 1.0}


def test_a_failed_public_test_is_told_and_the_repair_is_worth_less() -> None:
    first, second = play(STEPS, ["a = a - b", "a = a + b"], language="steps", repair_discount=0.8)
    assert not first.done and first.reward == 0.0
    assert first.messages == [{"role": "user", "content": "wrong : a = 3 b = 4 gives - 1 not 7"}]
    assert second.done and second.reward == 0.8 and second.metrics["attempts"] == 2.0


def test_hidden_tests_decide_and_are_never_told() -> None:
    [step] = play(STEPS, ["a = 7 + 0"], language="steps")
    assert step.done and step.reward == 0.0 and step.messages == []


def test_python_programs_and_shares() -> None:
    half = "```python\nn = int(input())\nprint(2 * n if n < 3 else 0)\n```"
    [step] = play(PYTHON, [half], reward="share")
    assert step.done and step.reward == 0.5
    crash, last = play(PYTHON, ["```python\n1 / 0\n```", "no program"])
    assert "ZeroDivisionError" in crash.messages[0]["content"]
    assert last.done and last.reward == 0.0


def test_a_sandbox_that_fails_is_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(request: CodeRequest, url: str) -> CodeResult:
        raise SandboxError("no namespaces")

    monkeypatch.setattr(code_execution, "execute", failing)
    for truth, answer, language in (
        (STEPS, "a = 7 + 0", "steps"),
        (PYTHON, "```python\n1\n```", "python"),
    ):
        with pytest.raises(SandboxError, match="no namespaces"):
            play(truth, [answer], language=language)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"language": "cobol"}, "language is 'cobol'"),
        ({"attempts": 0}, "attempts is 0"),
        ({"repair_discount": 1.5}, r"repair_discount 1\.5"),
        ({"reward": "some"}, "reward is 'some'"),
    ],
)
def test_options_without_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CodeOptions(**options)
