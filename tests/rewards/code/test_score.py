"""Many responses at once: numbers for programs, errors for what is not their fault."""

import threading
import time

import pytest

from mcore_rl.rewards.code import execution as code_execution
from mcore_rl.rewards.code.places import execute
from mcore_rl.rewards.code.score import run_in_parallel, score_of, score_responses
from mcore_rl.services.sandbox.execution import CodeRequest, CodeResult
from mcore_rl.services.sandbox.limits import SandboxError

TRUTH = {"inputs": ["1", "2"], "outputs": ["2", "4"]}


def test_numbers() -> None:
    assert score_of([True, False]) == {"score": 0.5, "passed": 0.5, "solved": 0.0}
    assert score_of([True])["solved"] == 1.0


def test_each_response_has_its_numbers_or_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def sometimes(request: CodeRequest, url: str) -> CodeResult:
        if "unlucky" in request.stdin:
            raise SandboxError("no namespace")
        return execute(request, url)

    monkeypatch.setattr(code_execution, "execute", sometimes)
    double = "```python\nprint(2 * int(input()))\n```"
    responses = [double, "```python\nprint(2)\n```", "none", "```python\n'unlucky'\n```", double]
    truths = [TRUTH, TRUTH, TRUTH, TRUTH, {}]
    answers = score_responses(responses, truths)
    assert [a["score"] for a in answers[:3] if isinstance(a, dict)] == [1.0, 0.5, 0.0]
    assert isinstance(answers[3], SandboxError) and isinstance(answers[4], ValueError)


def test_a_program_counts_in_the_languages_of_its_problem() -> None:
    doubled = "```bash\nread n; echo $((2 * n))\n```"
    truths = [TRUTH | {"language": "bash"}, TRUTH | {"language": ["python", "bash"]}, TRUTH]
    answers = score_responses([doubled] * 3, truths)
    assert [answer["score"] for answer in answers if isinstance(answer, dict)] == [1.0, 1.0, 0.0]


def test_entries_are_worked_on_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    together = threading.Barrier(3, timeout=30)

    def meet(number: int) -> int:
        together.wait()
        time.sleep(0.01 * (3 - number))
        return number

    assert run_in_parallel(meet, [0, 1, 2]) == [0, 1, 2]
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert run_in_parallel(meet, [0, 1, 2], "http://server") == [0, 1, 2]
