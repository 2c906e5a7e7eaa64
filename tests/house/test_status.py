"""Rows of docs/status.md name tests that exist, with their speed and bounds, and what ran where."""

import ast
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cache
from pathlib import Path

import pytest

from tests.house.test_documents import check as check_command
from tests.support.policy import ROOT, read

COLUMNS = ["capability", "unit test", "CPU run", "one GPU", "several GPUs", "several nodes"]
NOWHERE = ("-", "not yet")
RAN = re.compile(r"(\d{4}-\d\d-\d\d): `([^`]+)`")
"""When something ran on GPUs, and the command."""
TEST = re.compile(r"`([\w/.]+\.py)::(test_\w+)`(?: \*\((slow|some slow)\)\*)?")
BOUND = re.compile(r"\b\d+(?:\.\d+)?e-\d+\b")
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)")
COMPARES = ("approx", "assert", "allclose", "isclose", "check")
"""Beginnings of the names of functions that compare."""


def claims(text: str) -> list[list[str]]:
    """Return the cells of each row of the table, without its head and the names of areas."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert rows[0] == COLUMNS
    return [row for row in rows[1:] if any(row[1:])]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(read(path))


def find_speed(path: Path, name: str) -> str:
    """Return "slow", "some slow" (parameters of it) or "" for a test; fails if there is none."""
    body = parse(path).body
    functions = [
        node
        for node in body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ]
    assert functions, f"{path} has no {name}"
    values = {
        target.id: node.value
        for node in body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    of_file = [values["pytestmark"]] if "pytestmark" in values else []
    marked = [*functions[0].decorator_list, *of_file]
    if any(is_slow(node, values) for node in marked):
        return "slow"
    return "some slow" if any(mentions_slow(node, values) for node in marked) else ""


def is_slow(node: ast.expr, values: Mapping[str, ast.expr]) -> bool:
    """Whether `node`, a mark, a list of marks or the name of either, marks the whole test."""
    if isinstance(node, ast.Name) and node.id in values:
        return is_slow(values[node.id], values)
    if isinstance(node, ast.List | ast.Tuple):
        return any(is_slow(element, values) for element in node.elts)
    return isinstance(node, ast.Attribute) and node.attr == "slow"


def mentions_slow(node: ast.AST, values: Mapping[str, ast.expr]) -> bool:
    """Whether a mark of `node`'s parameters is slow, also if these stand in a list beside it."""
    return any(
        (isinstance(part, ast.Attribute) and part.attr == "slow")
        or (
            isinstance(part, ast.Name)
            and part.id in values
            and part.id != "pytestmark"
            and mentions_slow(values[part.id], {k: v for k, v in values.items() if k != part.id})
        )
        for part in ast.walk(node)
    )


def find_bounds(path: Path, name: str, seen: set[tuple[Path, str]] | None = None) -> set[float]:
    """Return the numbers that a test, and what it uses of its file and of tests/support, compares
    with.
    """
    seen = set() if seen is None else seen
    found: set[float] = set()
    if (path, name) in seen:
        return found
    seen.add((path, name))
    here, elsewhere = defined_names(path)
    if name in elsewhere:
        return find_bounds(*elsewhere[name], seen)
    for node in here.get(name, ()):
        for part in ast.walk(node):
            if is_comparison(part):
                found |= find_numbers(path, part, node)
            used = part.id if isinstance(part, ast.Name) else getattr(part, "arg", None)
            if isinstance(used, str) and used != name:  # an argument may be a fixture
                found |= find_bounds(path, used, seen)
    return found


def is_comparison(node: ast.AST) -> bool:
    """Whether `node` bounds something from above, or calls a function that does, by its name."""
    if isinstance(node, ast.Call):
        function = ast.unparse(node.func).rpartition(".")[2]
        return function.startswith(COMPARES)
    is_floor = isinstance(node, ast.Compare) and all(
        isinstance(operator, ast.Gt | ast.GtE) for operator in node.ops
    )
    return isinstance(node, ast.Compare) and not is_floor


def find_numbers(path: Path, expression: ast.AST, within: ast.stmt) -> set[float]:
    """Return the numbers in a part of the statement `within`, and behind the names in the part."""
    found: set[float] = set()
    for part in ast.walk(expression):
        if isinstance(part, ast.Constant) and isinstance(part.value, float | int):
            found.add(float(part.value))
        elif isinstance(part, ast.Name):
            for node in [*local_values(within, part.id), *assigned_values(path, part.id)]:
                found |= numbers_in(node)
    return found


def local_values(function: ast.stmt, name: str) -> list[ast.expr]:
    """Return what a function assigns to a name, or the parameters that pytest gives it."""
    found = [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    ]
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = {
            argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)
        }
        if name in arguments:
            found += function.decorator_list
    return found


def assigned_values(path: Path, name: str) -> list[ast.stmt]:
    here, elsewhere = defined_names(path)
    if name in elsewhere:
        return assigned_values(*elsewhere[name])
    return [node for node in here.get(name, ()) if isinstance(node, ast.Assign | ast.AnnAssign)]


def numbers_in(node: ast.AST) -> set[float]:
    return {
        float(part.value)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, float | int)
    }


@cache
def defined_names(path: Path) -> tuple[dict[str, list[ast.stmt]], dict[str, tuple[Path, str]]]:
    """Return the statements that define each name of a file, and those that it imports."""
    here: dict[str, list[ast.stmt]] = {}
    elsewhere: dict[str, tuple[Path, str]] = {}
    for node in parse(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            here.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        here.setdefault(part.id, []).append(node)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            file = Path(*(node.module or "").split(".")).with_suffix(".py")
            if (ROOT / file).is_file():
                elsewhere |= {a.asname or a.name: (file, a.name) for a in node.names}
    return here, elsewhere


def check(row: Sequence[str]) -> None:
    """Fails unless a row names tests that exist, with their speed and its bounds, and what ran."""
    claim = " ".join(row)
    named = TEST.findall(claim)
    assert named, f"no test is named for: {claim}"
    bounds: set[float] = set()
    for file, name, speed in named:
        path = Path("tests") / file
        assert (ROOT / path).is_file(), f"no file {path}, named by: {claim}"
        actual = find_speed(path, name)
        assert speed == actual, f"{file}::{name} is marked {speed!r}, is {actual!r}: {claim}"
        bounds |= find_bounds(path, name)
    for bound in BOUND.findall(row[0]):
        assert float(bound) in bounds, f"{bound} stands in no test that is named by: {claim}"
    for cell in row[1:]:
        check_cell(cell)


def check_cell(cell: str) -> None:
    """Fails unless a cell has tests, or a date and a command that exists, or says where it did not
    run.
    """
    if cell in NOWHERE or not re.sub(r"<br>", "", TEST.sub("", cell)).strip():
        return
    ran = RAN.fullmatch(cell)
    assert ran, f"neither tests nor a date and a command: {cell}"
    date.fromisoformat(ran[1])
    check_command(shlex.split(ran[2]))


def test_rows_name_tests_that_hold_their_bounds() -> None:
    found = claims(read(Path("docs/status.md")))
    assert len(found) > 40
    for row in found:
        assert len(row) == len(COLUMNS), row
        check(row)


def test_figures_of_gpus_in_the_readme_are_those_of_the_benchmarks() -> None:
    paragraph = read(Path("README.md")).split("**On GPUs so far**")[1].split("**Not yet**")[0]
    figures = NUMBER.findall(paragraph)
    assert len(figures) > 6
    assert not set(figures) - set(NUMBER.findall(read(Path("docs/benchmarks.md"))))


def test_rows_beside_other_systems_name_a_command_or_a_test_that_exists() -> None:
    table = read(Path("README.md")).split("## Beside ")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) > 10
    for _, ours, shown, *_ in rows[1:]:
        named = [*re.findall(r"`([^`]+)`", shown), *re.findall(r"\]\((docs/status\.md)\)", shown)]
        assert named or "**no" in ours, f"nothing shows {ours}"
        for name in named:
            file, is_test, function = name.partition("::")
            if is_test:
                find_speed(Path("tests") / file, function)
            else:
                check_command(shlex.split(name))


def test_a_claim_beyond_its_test_is_found() -> None:
    """The check fails on a missing test or file, on another bound or speed, on what did not run."""
    file = "scenarios/train/test_layouts.py"
    test = f"`{file}::test_layouts_agree_with_one_process` *(some slow)*"
    check(["within 1e-6", test, "-", "2026-11-28: `make gpu-check STAGES=te`", "not yet", "-"])
    for row, message in [
        (["Layouts agree.", "-"], "no test is named"),
        (["Layouts agree.", f"`{file}::test_of_nothing`"], "has no test_of_nothing"),
        (["Layouts agree.", "`scenarios/train/test_none.py::test_x`"], "no file"),
        (["within 1e-3", test], "1e-3 stands in no test"),  # not compared with
        (["within 1.25e-9", test], "1.25e-9 stands in no test"),
        (["within 1e-6", test.replace("some ", "")], "is marked 'slow'"),
        (["within 1e-6", test, "it works"], "neither tests nor a date and a command"),
        (["within 1e-6", test, "2026-11-28: `make nonsense`"], "make has no target"),
    ]:
        with pytest.raises(AssertionError, match=re.escape(message)):
            check(row)
