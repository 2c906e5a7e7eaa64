"""Functions of other languages are called with the values of a test and give plain values."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.rewards.code.calls import (
    CALL_LANGUAGES,
    arguments_file,
    read_packed_result,
    with_call,
)
from mcore_rl.rewards.code.driver import pack
from mcore_rl.rewards.code.languages import Program
from mcore_rl.rewards.code.tests import read_tests
from mcore_rl.services.sandbox.languages import find_languages

FOUND = find_languages()
TWICE = {
    "go": (
        'package main\nimport "fmt"\nfunc twice(xs []int, s string) ([]int, string) {\n'
        'fmt.Println("noise")\nvar out []int\nfor _, x := range xs { out = append(out, 2*x) }\n'
        "return out, s }"
    ),
    "nodejs": "var twice = (xs, s) => { console.log('noise'); return [xs.map(x => 2*x), s] } // x",
    "typescript": (
        "enum K { Two = 2 }\n"
        "const twice = (xs: number[], s: string): [number[], string] => [xs.map(x => K.Two*x), s]"
    ),
}
CALLS = {
    "fn_name": "twice",
    "inputs": [[[1, 2], "a"], [[], "b"], [[-5], "\u00e9\n"]],
    "outputs": [[[2, 4], "a"], [[], "b"], [[-10], "\u00e9\n"]],
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=9,
)


def results(language: str, source: str, truth: dict[str, Any]) -> list[bool]:
    if language not in FOUND:
        pytest.skip(f"this machine has no {language}")
    return read_tests(truth | {"language": language}).results(Program(source, language))


@pytest.mark.parametrize("language", TWICE)
def test_a_function_is_called(language: str) -> None:
    assert results(language, TWICE[language], CALLS) == [True, True, True]
    wrong = TWICE[language].replace("2*x", "3*x").replace("K.Two*x", "3*x")
    assert results(language, wrong, CALLS) == [False, True, False]


@pytest.mark.parametrize(
    ("language", "source"),
    [
        ("nodejs", "class Solution { f(a, b) { return a + b } }"),
        ("nodejs", "import fs from 'node:fs'\nexport async function f(a, b) { return a + b }"),
        ("typescript", "function f(a: number, b: number): number { return a + b }"),
        ("go", "func f(a, b float64) float64 { return a + b }"),
        ("go", "package solution\nfunc f(a int, b ...int) int { return a + b[0] }"),
        ("go", "package main\nfunc f(a, b int) int { return a + b }\nfunc main() { panic(1) }"),
    ],
)
def test_forms_of_functions(language: str, source: str) -> None:
    is_variadic = "..." in source
    inputs = [[1, [2]], [30, [4]]] if is_variadic else [[1, 2], [30, 4]]
    truth = {"fn_name": "f", "inputs": inputs, "outputs": [3, 34]}
    assert results(language, source, truth) == [True, True]


CHEATS = {
    "exits early": ("nodejs", "function f() {}\nprocess.exit(0)"),
    "gives no value": ("nodejs", "function f() {}"),
    "prints what it should return": ("nodejs", "function f() { console.log(3) }"),
    "writes what is no JSON": (
        "nodejs",
        "require('fs').writeFileSync('result.json', '[[');process.exit(0);function f() {}",
    ),
    "leaves a link as its result": (
        "nodejs",
        "require('fs').symlinkSync('arguments.json', 'result.json');process.exit(0)",
    ),
    "gives its arguments back": ("go", "func f(a, b int) []int { return []int{a, b} }"),
    "takes other arguments": ("go", "func f(a string) int { return 3 }"),
    "does not compile": ("go", "func f(a, b int) int { return }"),
    "panics": ("go", "func f(a, b int) int { panic(a) }"),
}


@pytest.mark.parametrize("name", CHEATS)
def test_programs_without_the_right_value_pass_nothing(name: str) -> None:
    language, source = CHEATS[name]
    truth = {"fn_name": "f", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}
    assert results(language, source, truth) == [False, False]


def test_errors_name_the_programs_own_line() -> None:
    if "go" not in FOUND:
        pytest.skip("this machine has no go")
    tests = read_tests(CALLS | {"language": "go"})
    [run, *_] = tests.runs(Program("package main\n\nfunc twice() { nothing() }", "go"))
    assert "program.go:3:" in run.error


@pytest.mark.parametrize("language", CALL_LANGUAGES[1:])
@given(source=st.text())
def test_a_program_stands_whole_in_what_runs(language: str, source: str) -> None:
    if language == "go" and "package" in source:
        return
    assert source in with_call(source, language, "f")


@given(JSON)
def test_values_come_back_as_they_went_in(value: Any) -> None:
    assert json.loads(read_packed_result(arguments_file(pack(value)))) == pack(value)


@pytest.mark.parametrize("content", [None, b"", b"[", b"\xff", b"[" * 100_000])
def test_a_file_without_a_value_is_no_result(content: bytes | None) -> None:
    assert read_packed_result(content) == ""


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        arguments_file(pack([{1, 2}]))
