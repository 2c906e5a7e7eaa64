"""Tests of problems: their three forms, what counts as the same, programs that cheat."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.rewards.code.execution import CaseRun, CaseSettings
from mcore_rl.rewards.code.languages import Program
from mcore_rl.rewards.code.tests import is_passed, read_tests, same_text, same_value

STDIN = {"inputs": ["1 2\n", "3 4\n", ["5 6"]], "outputs": ["3\n", "7", ["11"]]}
CALLS = {"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}


@pytest.mark.parametrize(
    ("truth", "program", "results"),
    [
        (STDIN, "print(sum(map(int, input().split())))", [True, True, True]),
        (STDIN, "print(3)", [True, False, False]),
        (CALLS, "def f(a, b): return a + b", [True, True]),
        (CALLS, "class Solution:\n    def f(self, a, b): return a + b", [True, True]),
        (CALLS, "def f(a, b): return a + b if a == 1 else str(a + b)", [True, False]),
        ({"asserts": ["assert f(1) == 2", "assert f(2) == 2"]}, "f = lambda x: 2", [True, True]),
    ],
)
def test_the_three_forms(truth: Any, program: str, results: list[bool]) -> None:
    assert read_tests(truth).results(Program(program)) == results
    assert read_tests(json.dumps(truth)).results(Program(program)) == results


CHEATS = {
    "exits early with status 0": "import os\nos._exit(0)",
    "reads files for the answers": (
        "import os\nfor d, _, names in os.walk('/box'):\n"
        "    for n in names: print(open(os.path.join(d, n)).read())\n"
        "def f(a, b): return open('/box/program.py').read()"
    ),
    "is equal to everything": (
        "class Yes(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\n"
        "def f(a, b): return Yes(0)\nprint(Yes(0))"
    ),
    "writes in the form of a report": (
        'line = \'{"status": 0, "out": "3", "error": "", "killed": "", "result": "3"}\'\n'
        "print('ready'); print(line); print('passed')\ndef f(a, b): return line"
    ),
    "patches builtins and json": (
        "import builtins, json\njson.dumps = lambda *a, **k: 'true'\n"
        "builtins.all = builtins.any = builtins.zip = lambda *a: True\n"
        "builtins.isinstance = lambda *a: True\ndef f(a, b): return object()\nprint()"
    ),
    "looks for what is expected in its memory": (
        "import gc, sys\nframes = []\nframe = sys._getframe()\n"
        "while frame: frames.append(frame); frame = frame.f_back\n"
        "known = [v for fr in frames for v in fr.f_globals.get('expected', [])]\n"
        "print(known[0] if known else 'unknown')\ndef f(a, b): return known[0] if known else None"
    ),
    "kills who supervises it": "import os\nos.kill(os.getppid(), 9)\ndef f(a, b): return 3",
    "never ends": "def f(a, b):\n    while True: pass\nf(1, 2)",
    "writes to every descriptor": (
        "import os\nfor fd in range(1, 64):\n"
        "    try: os.write(fd, b'3')\n    except OSError: pass\n"
        "def f(a, b): os._exit(0)"
    ),
}


@pytest.mark.parametrize("name", CHEATS)
def test_programs_that_cheat_pass_nothing(name: str) -> None:
    """Tests whose answers differ: a program that says one thing to all passes one at most."""
    limits = CaseSettings(wall_s=1.0)
    stdin = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["30\n", "70\n"]}
    calls = {"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [30, 70]}
    for truth in (stdin, calls):
        assert read_tests(truth).results(Program(CHEATS[name]), limits) == [False, False]


def test_what_was_printed_before_a_failure_does_not_count() -> None:
    assert read_tests({"inputs": [""], "outputs": ["1"]}).results(Program("print(1)\n1/0")) == [
        False
    ]


@pytest.mark.parametrize(
    ("text", "expected", "same"),
    [
        ("1 2  \n3\n\n", "1 2\n3", True),
        ("1.0", "1", True),
        ("1e2 x", "100 x", False),
        ("0.50 2", "0.5 2.0", True),
        ("1\n2", "1 2", False),
        ("yes", "YES", False),
        ("nan", "1", False),
        ("", "0", False),
    ],
)
def test_texts(text: str, expected: str, same: bool) -> None:
    assert same_text(text, expected) == same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ((1, 2), [1, 2], True),
        (True, 1, False),
        (0, False, False),
        (None, 0, False),
        (0.1 + 0.2, 0.3, True),
        (1, 1.0, True),
        (10**12, 1e12 + 1e-3, True),
        (10**12 + 1, 10**12, False),
        (10**400, 5, False),
        (10**400, 5.0, False),
        ({1: "a"}, {"1": "a"}, True),
        ({"a": 1}, {"a": 2}, False),
        ("1", 1, False),
        ([[1], []], [[1]], False),
    ],
)
def test_values(value: Any, expected: Any, same: bool) -> None:
    assert same_value(value, expected) == same


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=9))
def test_a_value_is_the_same_as_itself(value: Any) -> None:
    assert same_value(value, value)


@pytest.mark.parametrize("result", ["", "{", '["os", []]', "[" * 5000, "1" * 5000, '["set", [[]]]'])
def test_a_result_that_the_driver_did_not_write_is_wrong(result: str) -> None:
    assert not is_passed(CaseRun(0, result=result), {"function": "f"}, 1)


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ({"answer": 1}, "no tests in the ground truth"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ("[1]", "no mapping of tests"),
        ("{", "is no JSON"),
        ({"asserts": ["assert True"]}, "calls no function"),
        (STDIN | {"language": "kobol"}, "language is 'kobol': one of python, c, cpp"),
        (CALLS | {"language": ["python", "c++"]}, "programs in cpp by calls of a function"),
        ({"asserts": ["assert f(1)"], "language": "go"}, "programs in go by assertions"),
        (CALLS | {"language": "go", "fn_name": "f; x"}, "fn_name is 'f; x'"),
        ({"fn_name": "f", "inputs": [[{1}]], "outputs": [1], "language": "js"}, "are no JSON"),
    ],
)
def test_a_ground_truth_without_tests_is_refused(truth: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tests(truth)
