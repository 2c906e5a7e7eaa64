"""Reads the tests of a problem from its ground truth, and judges what a program did on them.

A ground truth has one of three forms:

    {"inputs": [text, ...], "outputs": [text, ...]}
        texts on standard input, and what the program must print for each
    {"fn_name": "f", "inputs": [[arguments], ...], "outputs": [value, ...]}
        calls of a function, or of a method of a class Solution, and what each must return; with
        "wrapped": true, outputs are lists of one value, and the value itself is right as well
    {"asserts": ["assert f(1) == 2", ...]}
        assertions about calls with constant arguments

"language" beside them names the language of the program, or several that are allowed. Functions are
called in CALL_LANGUAGES, and assertions are for Python alone. In SQL the texts are scripts that
make the tables.

An assertion is checked in a process that the program cannot touch:

    assert sorted(f([3, 1])) == [1, 3]
        1. the calls with constant arguments, f([3, 1]), run in the program's sandbox
        2. their values take the calls' places: assert sorted([1, 3]) == [1, 3]
        3. the assertion runs in another sandbox, without the program

So a program cannot pass by an object that is equal to everything, or by patching builtins.
"""

import ast
import builtins
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from mcore_rl.rewards.code.calls import CALL_LANGUAGES, arguments_file
from mcore_rl.rewards.code.driver import pack, unpack
from mcore_rl.rewards.code.execution import (
    CaseRun,
    CaseSettings,
    call_case,
    run_cases,
    run_other,
    script_case,
)
from mcore_rl.rewards.code.languages import Program, read_languages

_HELD = "held"
"""The second program prints this if the assertion holds."""
_TOLERANCE = 1e-9
"""Relative difference at which two floats are the same answer."""


@dataclass(frozen=True)
class Assertion:
    """A statement and the calls of the program in it: (function, packed arguments) in order."""

    text: str
    calls: tuple[tuple[str, Any], ...]


def read_assertion(text: str) -> Assertion:
    """Return an assertion with its calls; imports may stand before it.

    A call of the program is one of a plain name that is neither a builtin nor imported. Raises
    ValueError if there is none, or if an argument is not constant.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"the assertion {text!r:.200} is no Python: {error}") from None
    if not tree.body or not isinstance(tree.body[-1], ast.Assert):
        raise ValueError(f"the test {text!r:.200} does not end with an assert statement")
    calls = []
    for node in _calls_in(tree):
        try:
            arguments = [ast.literal_eval(argument) for argument in node.args]
        except ValueError:
            raise ValueError(_refusal(text, node)) from None
        if node.keywords:
            raise ValueError(_refusal(text, node))
        calls.append((ast.unparse(node.func), pack(arguments)))
    if not calls:
        raise ValueError(f"the assertion {text!r:.200} calls no function of the program")
    return Assertion(text, tuple(calls))


def check_assertions(
    program: str, assertions: Sequence[Assertion], settings: CaseSettings | None = None
) -> list[bool]:
    """Return whether each assertion holds. Raises SandboxError if there is no sandbox."""
    tests = [call_case(name, given) for each in assertions for name, given in each.calls]
    runs = iter(run_cases([program], tests, settings))
    filled = [_fill_in(each, [next(runs) for _ in each.calls]) for each in assertions]
    checks = [f"{text}\nprint({_HELD!r})" for text in filled if text is not None]
    if not checks:
        return [False] * len(filled)
    numbers = [script_case("", program=number) for number in range(len(checks))]
    held = iter([_holds(run) for run in run_cases(checks, numbers, settings)])
    return [text is not None and next(held) for text in filled]


def _holds(run: CaseRun) -> bool:
    return run.is_clean and run.out == f"{_HELD}\n"


def _fill_in(assertion: Assertion, runs: Sequence[CaseRun]) -> str | None:
    """Return the assertion with values in place of calls; None if a call gave none."""
    values = []
    for run in runs:
        if not run.is_clean:
            return None
        try:
            values.append(unpack(json.loads(run.result)))
        except (ValueError, TypeError, RecursionError):
            return None
    tree = ast.parse(assertion.text)
    filled = _Filler(dict(zip(map(id, _calls_in(tree)), values, strict=True))).visit(tree)
    return ast.unparse(filled)


class _Filler(ast.NodeTransformer):
    def __init__(self, value_of: dict[int, Any]) -> None:
        self._value_of = value_of

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if id(node) not in self._value_of:
            return self.generic_visit(node)
        return _write_value(self._value_of[id(node)])


def _write_value(value: Any) -> ast.expr:
    """Return the expression for a value; infinity and NaN have no literal."""
    tree = ast.parse(repr(value), mode="eval")
    return _NumberNamer().visit(tree).body


class _NumberNamer(ast.NodeTransformer):
    """Puts `float('inf')` and `float('nan')` in place of the names that repr gives them."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in ("inf", "nan"):
            return node
        return ast.parse(f"float({node.id!r})", mode="eval").body


def _calls_in(tree: ast.Module) -> list[ast.Call]:
    """Return the calls of the program; a call among the arguments of another is no constant."""
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id not in imported
        and not hasattr(builtins, node.func.id)
    ]


def _refusal(text: str, node: ast.Call) -> str:
    return (
        f"the assertion {text!r:.200} calls {ast.unparse(node.func)} with arguments that are not"
        ' constant: write the test as {"fn_name", "inputs", "outputs"}'
    )


@dataclass(frozen=True)
class ProgramTests:
    """The tests of a problem. One of the two fields has entries.

    cases       (test to run, expected): printed text or returned value
    assertions  statements about calls
    languages   in which the program may be written
    """

    cases: Sequence[tuple[Mapping[str, Any], Any]] = ()
    assertions: Sequence[Assertion] = ()
    languages: tuple[str, ...] = ("python",)

    def __len__(self) -> int:
        return len(self.cases) + len(self.assertions)

    def results(self, program: Program, settings: CaseSettings | None = None) -> list[bool]:
        """Return whether the program passes each test.

        What is expected never enters the program's sandbox. Raises SandboxError if there is none.
        """
        if self.assertions:
            return check_assertions(program.source, self.assertions, settings)
        return [
            is_passed(run, test, expected)
            for run, (test, expected) in zip(self.runs(program, settings), self.cases, strict=True)
        ]

    def runs(self, program: Program, settings: CaseSettings | None = None) -> list[CaseRun]:
        """Return how the program ended on each of `cases`."""
        tests = [test for test, _ in self.cases]
        if program.language == "python":
            return run_cases([program.source], tests, settings)
        return run_other(program, tests, settings)


def read_tests(ground_truth: Any) -> ProgramTests:
    """Return the tests in a ground truth, a mapping or its JSON text.

    Raises ValueError if it has no test, inputs without outputs, or a language that cannot be.
    """
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except json.JSONDecodeError as error:
        raise ValueError(f"the ground truth {ground_truth!r:.100} is no JSON: {error}") from None
    if not isinstance(truth, Mapping):
        raise ValueError(f"the ground truth {truth!r:.100} is no mapping of tests")
    languages = read_languages(truth.get("language"))
    if truth.get("asserts"):
        _refuse_others(languages, "assertions", ("python",))
        return ProgramTests(assertions=[read_assertion(text) for text in truth["asserts"]])
    inputs, outputs = truth.get("inputs") or (), truth.get("outputs") or ()
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(
            f"no tests in the ground truth, whose keys are {sorted(truth)}: it has {len(inputs)}"
            f" inputs and {len(outputs)} outputs; give as many of both, or asserts"
        )
    function = truth.get("fn_name")
    if function:
        _refuse_others(languages, "calls of a function", CALL_LANGUAGES)
        wrapped = {"wrapped": bool(truth.get("wrapped"))}
        tests = [call_case(function, pack(list(given))) | wrapped for given in inputs]
        if languages != ("python",):
            _refuse_uncallable(function, tests)
    else:
        tests = [script_case(_text(given)) for given in inputs]
    return ProgramTests(list(zip(tests, outputs, strict=True)), languages=languages)


def _refuse_others(languages: Sequence[str], tests: str, able: Sequence[str]) -> None:
    if others := [name for name in languages if name not in able]:
        raise ValueError(
            f"the ground truth tests programs in {', '.join(others)} by {tests}, which can only"
            f" be made in {', '.join(able)}: give texts as inputs and outputs"
        )


def _refuse_uncallable(function: Any, tests: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless the function has a plain name and arguments that JSON can hold."""
    if not (isinstance(function, str) and function.isascii() and function.isidentifier()):
        raise ValueError(f"fn_name is {function!r:.100}: give the name of a function")
    for test in tests:
        try:
            arguments_file(test["arguments"])
        except TypeError as error:
            raise ValueError(
                f"arguments {unpack(test['arguments'])!r:.200} of {function} are no JSON ({error}):"
                " give numbers, texts, lists and mappings, or Python as the only language"
            ) from None


def is_passed(run: CaseRun, test: Mapping[str, Any], expected: Any) -> bool:
    """Return whether a program ended by itself and gave what was expected."""
    if not run.is_clean:
        return False
    if "function" not in test:
        return same_text(run.out, _text(expected))
    try:
        value = unpack(json.loads(run.result))
        if test.get("wrapped") and same_value(value, expected[0]):
            return True
        return same_value(value, expected)
    except (ValueError, TypeError, RecursionError):  # no result, or none that pack() wrote
        return False


def same_text(text: str, expected: str) -> bool:
    """Compare lines without blanks at their ends and empty lines at the end; 1.0 is 1."""
    lines, wanted = _plain(text), _plain(expected)
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def same_value(value: Any, expected: Any) -> bool:
    """Compare as JSON does: a tuple is a list, keys are texts, True is not 1; floats nearly."""
    if isinstance(value, bool) or isinstance(expected, bool) or value is None:
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return value == expected or _is_near(value, expected)
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, Mapping):
        mine = {str(key): entry for key, entry in value.items()}
        wanted = {str(key): entry for key, entry in expected.items()}
        return mine.keys() == wanted.keys() and all(same_value(mine[k], wanted[k]) for k in mine)
    return type(value) is type(expected) and value == expected


def _is_near(value: float, expected: float) -> bool:
    """Return whether a float is nearly another number; two integers never are."""
    if isinstance(value, int) and isinstance(expected, int):
        return False
    try:
        return math.isclose(value, expected, rel_tol=_TOLERANCE)
    except OverflowError:  # a whole number that no float comes near
        return False


def _plain(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same_line(line: str, wanted: str) -> bool:
    if line == wanted:
        return True
    words, wanted_words = line.split(), wanted.split()
    if len(words) != len(wanted_words):
        return False
    try:
        return all(Decimal(a) == Decimal(b) for a, b in zip(words, wanted_words, strict=True))
    except InvalidOperation:
        return False


def _text(value: Any) -> str:
    """Return a text of a test; APPS has some of them as lists of lines."""
    return value if isinstance(value, str) else "\n".join(map(str, value))
