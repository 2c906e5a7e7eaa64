"""tests/ mirrors the package: a module with logic has a test file of its name that imports it."""

import ast
from pathlib import Path

from tests.support.policy import ROOT, parse, python_files, read

GLUE = {
    "mcore_rl/cluster/critic.py",
    "mcore_rl/cluster/node_agent/joined_nodes.py",
    "mcore_rl/cluster/node_agent/roll_call.py",
}
"""They pass calls on to Ray, or to an object that has tests; tests/e2e runs them."""
NOT_MIRRORED = {"e2e", "scenarios", "house", "recipes"}
WHOLE_COMMANDS = {
    f"tests/checkpoint_tools/test_{name}.py"
    for name in ("convert", "corruption", "dequantize_refusals", "resume")
}
"""They run whole commands on the checkpoints that the folder's other tests read, too."""
STANDINS = "mcore_rl/cpu/standins/"
"""Loaded by SGLang alone; tests/scenarios/device runs them in a process of its own."""


def test_every_module_with_logic_has_a_test_file_that_imports_it() -> None:
    problems = []
    for path in python_files("mcore_rl", "checkpoint_tools", "launch"):
        if str(path) in GLUE or str(path).startswith(STANDINS) or not has_logic(parse(path)):
            continue
        mirror = mirror_of(path)
        if not (ROOT / mirror).is_file():
            problems.append(f"{path} lacks {mirror}")
        elif not imports(mirror, path):
            problems.append(f"{mirror} does not import {path}")
    assert not problems, "\n".join(problems)


def test_every_test_file_is_the_mirror_of_a_module_or_lies_with_the_scenarios() -> None:
    mirrors = {
        str(mirror_of(path)) for path in python_files("mcore_rl", "checkpoint_tools", "launch")
    }
    strays = [
        str(path)
        for path in python_files("tests")
        if path.name.startswith("test_")
        and path.parts[1] not in NOT_MIRRORED
        and str(path) not in mirrors | WHOLE_COMMANDS
    ]
    assert not strays, f"move to tests/scenarios: {strays}"


def test_the_exceptions_are_still_there() -> None:
    assert all((ROOT / path).is_file() for path in GLUE | WHOLE_COMMANDS)


def has_logic(tree: ast.Module) -> bool:
    """Whether a function does anything; protocols and values alone have nothing to test."""
    return any(
        not isinstance(statement, ast.Expr | ast.Pass)
        or not isinstance(getattr(statement, "value", None), ast.Constant)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in node.body
    )


def mirror_of(path: Path) -> Path:
    """The test file of a module; that of a package is named after its folder."""
    parts = path.parts[1:] if path.parts[0] == "mcore_rl" else path.parts
    name = path.parent.name if path.stem == "__init__" else path.stem
    return Path("tests", *parts[:-1], f"test_{name}.py")


def imports(test: Path, path: Path) -> bool:
    """Whether the test's text names the module, or imports it from its package."""
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    package, _, name = module.rpartition(".")
    text = read(test)
    return module in text or any(
        isinstance(node, ast.ImportFrom)
        and node.module == package
        and name in {alias.name for alias in node.names}
        for node in ast.walk(parse(test))
    )
