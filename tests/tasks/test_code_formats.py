"""Rows of APPS, TACO and LiveCodeBench become prompts with tests that tell right from wrong."""

import base64
import datetime
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from mcore_rl.rewards.code.languages import Program
from mcore_rl.rewards.code.score import score_responses
from mcore_rl.rewards.code.tests import read_tests
from mcore_rl.tasks.published import prepare_code_files, read_problem

APPS = {
    "problem_id": 7,
    "question": "Read a number and print its double.",
    "solutions": "[]",
    "input_output": json.dumps({"inputs": ["1\n", "5\n"], "outputs": ["2\n", "10\n"]}),
    "difficulty": "introductory",
    "url": "https://example.org/7",
    "starter_code": "",
}
APPS_CALL = {
    **APPS,
    "input_output": json.dumps({"fn_name": "double", "inputs": [[1], [5]], "outputs": [[2], [10]]}),
    "starter_code": "def double(n):\n\t",
}
TACO = {**APPS, "name": "double it", "tags": "[]", "raw_tags": "[]", "time_limit": "1.0 seconds"}
STDIN = [{"input": "5\n", "output": "10", "testtype": "stdin"}]
CALLS = [{"input": '[1, 2]\n"x"', "output": "[2, 1]", "testtype": "functional"}]


def packed(content: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(content))).decode()


def livecodebench(private: Any, **changes: Any) -> dict[str, Any]:
    return {
        "question_title": "Double",
        "question_content": "Read a number and print its double.",
        "platform": "atcoder",
        "question_id": "abc_1",
        "contest_id": "abc",
        "contest_date": "2024-01-01T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps([{"input": "1\n", "output": "2", "testtype": "stdin"}]),
        "private_test_cases": private,
        "metadata": "{}",
        **changes,
    }


def truth_of(row: dict[str, Any]) -> dict[str, Any]:
    problem = read_problem(row, "row 0")
    assert problem is not None
    return json.loads(problem["reward_model"]["ground_truth"])


@pytest.mark.parametrize(
    ("row", "program"),
    [
        (APPS, "print(2 * int(input()))"),
        (TACO, "print(2 * int(input()))"),
        (APPS_CALL, "def double(n): return 2 * n"),
        (APPS_CALL, "class Solution:\n    def double(self, n): return [2 * n]"),
        (livecodebench(json.dumps(STDIN)), "print(2 * int(input()))"),
        (livecodebench(packed(json.dumps(STDIN))), "print(2 * int(input()))"),
    ],
)
def test_a_right_program_passes_the_tests_of_a_row(row: dict[str, Any], program: str) -> None:
    truth = truth_of(row)
    public = truth.pop("public", None)
    for tests in filter(None, (truth, public)):
        assert all(read_tests(tests).results(Program(program)))
        assert not any(read_tests(tests).results(Program("def double(n): return 3")))


def test_functional_tests_of_livecodebench() -> None:
    row = livecodebench(
        packed(json.dumps(CALLS)),
        public_test_cases=json.dumps(CALLS),
        metadata=json.dumps({"func_name": "flip"}),
        starter_code="class Solution:\n    def flip(self, pair, name):",
    )
    truth = truth_of(row)
    assert truth["inputs"] == [[[1, 2], "x"]] and truth["outputs"] == [[2, 1]]
    program = "class Solution:\n    def flip(self, pair, name): return pair[::-1]"
    assert read_tests(truth).results(Program(program)) == [True]
    problem = read_problem(row, "row 0")
    assert problem and "class Solution" in problem["prompt"][0]["content"]


def test_hidden_tests_are_not_in_the_prompt() -> None:
    secret = [{"input": "secret-in", "output": "secret-out", "testtype": "stdin"}]
    for row in (
        livecodebench(packed(json.dumps(secret))),
        {**APPS, "input_output": json.dumps({"inputs": ["secret-in"], "outputs": ["secret-out"]})},
    ):
        problem = read_problem(row, "row 0")
        assert problem and "secret" not in json.dumps(problem["prompt"])
        assert "secret" not in json.dumps(problem["extra_info"])


def test_programs_in_another_language_are_asked_for_and_tested() -> None:
    problem = read_problem(livecodebench(json.dumps(STDIN)), "row 0", "bash")
    assert problem is not None
    asked = problem["prompt"][0]["content"]
    assert "Write a Bash program" in asked and "one ```bash block" in asked
    truth = json.loads(problem["reward_model"]["ground_truth"])
    [answer] = score_responses(["```bash\nread n; echo $((2 * n))\n```"], [truth])
    assert isinstance(answer, dict) and answer["solved"] == 1.0
    assert read_problem(APPS_CALL, "row 0", "bash") is None, "no function of it can be called"


def test_a_function_in_another_language_is_asked_for_with_its_beginning_in_python() -> None:
    problem = read_problem(APPS_CALL, "row 0", "go")
    assert problem is not None
    asked = problem["prompt"][0]["content"]
    function = json.loads(APPS_CALL["input_output"])["fn_name"]
    assert f"Write the Go function {function}." in asked and f"```python\ndef {function}" in asked
    truth = json.loads(problem["reward_model"]["ground_truth"])
    assert (truth["language"], truth["fn_name"]) == ("go", function)


class Bomb:
    def __reduce__(self) -> Any:
        return print, ("executed",)


@pytest.mark.parametrize(
    ("private", "message"),
    [
        (packed(Bomb()), r"it asks for builtins\.print"),
        (packed(datetime.date(2024, 1, 1)), r"it asks for datetime\.date"),
        (packed([1, 2]), "packs list, not a text"),
        (packed("not json"), "is not JSON"),
        ("%%%", "neither JSON nor a packed text"),
        (base64.b64encode(b"no zlib").decode(), "neither JSON nor a packed text"),
        (base64.b64encode(zlib.compress(b"no pickle")).decode(), "neither JSON nor a packed text"),
        (packed(json.dumps(STDIN))[:-8], "neither JSON nor a packed text|cut short"),
        (json.dumps(CALLS), "of kinds"),
        (json.dumps([{**STDIN[0], "testtype": "other"}]), "of kinds"),
    ],
)
def test_tests_that_cannot_be_trusted_are_refused(
    private: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=rf"row 3.*({message})"):
        read_problem(livecodebench(private), "row 3")
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x"}, "neither a row of APPS or TACO"),
        ({**APPS, "input_output": "{"}, "`input_output` is not JSON"),
        ({**APPS, "input_output": '{"inputs": ["1"], "outputs": []}'}, "1 inputs and 0 outputs"),
        ({**APPS, "question": None}, "lacks `question`"),
    ],
)
def test_a_malformed_row_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"row 3.*{message}"):
        read_problem(row, "row 3")


def test_files_become_a_prompt_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [APPS, {**APPS, "input_output": ""}, livecodebench(packed(json.dumps(STDIN)))]
    source.write_text("\n".join(map(json.dumps, rows)))
    prepare_code_files([str(source)], tmp_path / "train.parquet")
    written = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert [row["data_source"] for row in written] == ["apps", "livecodebench"]
    assert [row["extra_info"]["name"] for row in written] == ["7", "abc_1"]
    assert "2 problems in" in (out := capsys.readouterr().out) and "1 rows without tests" in out
    prepare_code_files([str(source)], tmp_path / "cpp.parquet", "c++")
    prompts = pq.read_table(tmp_path / "cpp.parquet")["prompt"].to_pylist()
    assert all("Write a C++ program" in prompt[0]["content"] for prompt in prompts)
    with pytest.raises(ValueError, match="language is 'kobol'"):
        prepare_code_files([str(source)], tmp_path / "none.parquet", "kobol")
    source.write_text(json.dumps({**APPS, "input_output": ""}))
    with pytest.raises(ValueError, match="no problem with tests"):
        prepare_code_files([str(source)], tmp_path / "none.parquet")
