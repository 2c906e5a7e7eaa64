"""Checks assertions about a program in a process that the program cannot touch.

    assert sorted(f([3, 1])) == [1, 3]
        1. the calls with constant arguments, f([3, 1]), run in the program's sandbox
        2. their values take the calls' places: assert sorted([1, 3]) == [1, 3]
        3. the assertion runs in another sandbox, without the program

So a program cannot pass by an object that is equal to everything, or by patching builtins.
"""

import ast
import builtins
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.rewards.code.driver import pack, unpack
from mcore_rl.rewards.code.execution import CaseRun, CaseSettings, call_case, run_cases, script_case

_HELD = "held"
"""The second program prints this if the assertion holds."""


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
    filled = [_filled(each, [next(runs) for _ in each.calls]) for each in assertions]
    checks = [f"{text}\nprint({_HELD!r})" for text in filled if text is not None]
    if not checks:
        return [False] * len(filled)
    numbers = [script_case("", program=number) for number in range(len(checks))]
    held = iter([_holds(run) for run in run_cases(checks, numbers, settings)])
    return [text is not None and next(held) for text in filled]


def _holds(run: CaseRun) -> bool:
    return run.is_clean and run.out == f"{_HELD}\n"


def _filled(assertion: Assertion, runs: Sequence[CaseRun]) -> str | None:
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
        return ast.parse(repr(self._value_of[id(node)]), mode="eval").body


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
