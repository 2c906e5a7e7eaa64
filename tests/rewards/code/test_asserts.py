"""Assertions are taken apart, and hold or not where the program cannot reach them."""

import pytest

from mcore_rl.rewards.code.tests import check_assertions, read_assertion

TEXTS = [
    "assert f([3, 1]) == [1, 3]",
    "assert f((2, 1)) == [1, 2], 'sorted'",
    "import math\nassert math.isclose(sum(f([0.5, 0.25])), 0.75)",
    "assert f([1]) != f([2])",
    "assert f({1}) == [2]",
]


def test_calls_of_the_program_are_found() -> None:
    assert read_assertion(TEXTS[3]).calls == (
        ("f", ["list", [["list", [1]]]]),
        ("f", ["list", [["list", [2]]]]),
    )
    assert len(read_assertion(TEXTS[2]).calls) == 1


def test_assertions_hold_for_a_right_program_alone() -> None:
    assertions = [read_assertion(text) for text in TEXTS]
    assert check_assertions("f = sorted", assertions) == [True, True, True, True, False]
    assert check_assertions("f = list", assertions) == [False, False, True, True, False]


@pytest.mark.parametrize(
    ("result", "holds"),
    [
        ("float('inf')", "f(0) == float('inf')"),
        ("[1, -float('inf')]", "f(0)[1] < 0"),
        ("{'a': float('nan')}", "f(0)['a'] != f(0)['a']"),
    ],
)
def test_values_without_a_literal_are_filled_in(result: str, holds: str) -> None:
    program = f"def f(x): return {result}"
    assert check_assertions(program, [read_assertion(f"assert {holds}")]) == [True]


@pytest.mark.parametrize(
    "program",
    [
        "class Yes:\n    __eq__ = __ne__ = lambda self, other: True\ndef f(x): return Yes()",
        "class Yes(list):\n    __eq__ = lambda self, other: True\ndef f(x): return Yes()",
        "import os\nos._exit(0)",
        "import sys\nprint('held')\nsys.exit(0)",
        "import builtins\nbuiltins.AssertionError = None\nbuiltins.sorted = None\nf = lambda x: 0",
        "def f(x):\n    print('held')\n    return None",
        "__debug__hack = 0\ndef f(x): raise SystemExit(0)",
    ],
)
def test_pretending_does_not_help(program: str) -> None:
    assert check_assertions(program, [read_assertion(TEXTS[0])]) == [False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("assert True", "calls no function"),
        ("f(1)", "does not end with an assert"),
        ("assert (", "is no Python"),
        ("assert f(x) == 1", "arguments that are not constant"),
        ("assert f(f(1)) == 1", "arguments that are not constant"),
        ("assert f(a=1) == 1", "arguments that are not constant"),
    ],
)
def test_what_cannot_be_checked_apart_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_assertion(text)
