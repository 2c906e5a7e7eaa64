"""Reads the tests of a problem from its ground truth, and judges what a program did on them.

Three forms:

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
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from mcore_rl.rewards.code.asserts import Assertion, check_assertions, read_assertion
from mcore_rl.rewards.code.calls import CALL_LANGUAGES, arguments_file
from mcore_rl.rewards.code.compiled import run_other
from mcore_rl.rewards.code.driver import pack, unpack
from mcore_rl.rewards.code.execution import (
    CaseRun,
    CaseSettings,
    call_case,
    run_cases,
    script_case,
)
from mcore_rl.rewards.code.languages import Program, read_languages

_TOLERANCE = 1e-9
"""Relative difference at which two floats are the same answer."""


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
        return value == expected or math.isclose(value, expected, rel_tol=_TOLERANCE)
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, Mapping):
        mine = {str(key): entry for key, entry in value.items()}
        wanted = {str(key): entry for key, entry in expected.items()}
        return mine.keys() == wanted.keys() and all(same_value(mine[k], wanted[k]) for k in mine)
    return type(value) is type(expected) and value == expected


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
