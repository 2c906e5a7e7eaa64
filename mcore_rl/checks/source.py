"""Reads the names of Python files without running them: nothing heavy is imported for a mistake."""

import ast
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


def parse(option: str, file: Path) -> ast.Module:
    """Return the syntax tree of a file; raise ValueError naming option and line if it has none."""
    try:
        return ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise ValueError(f"{option}: {file} line {line} is not Python: {error}; mend it") from None


def check_name(option: str, tree: ast.Module, file: Path, name: str) -> None:
    """Raise ValueError if a file surely defines no `name`; it lists its functions and classes."""
    defined = set(_list_names(tree.body))
    if "*" in defined or name in defined:
        return
    own = [node.name for node in tree.body if isinstance(node, Function | ast.ClassDef)]
    there = f"{', '.join(own)}: name one of them" if own else "none"
    raise ValueError(f"{option}: {file} has no {name!r}; it has {there}")


def find_function(tree: ast.Module, name: str) -> Function | None:
    """Return the function of that name at the top of a file, None for anything else."""
    found = [node for node in tree.body if isinstance(node, Function) and node.name == name]
    return found[-1] if found else None


def takes(function: Function, keywords: Iterable[str]) -> bool:
    """Return whether a function can be called with exactly these keyword arguments."""
    given = set(keywords)
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    with_default = plain[len(plain) - len(arguments.defaults) :]
    needed = {argument.arg for argument in plain[: len(plain) - len(with_default)]}
    optional = {argument.arg for argument in with_default}
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        (needed if default is None else optional).add(argument.arg)
    return needed <= given and (arguments.kwarg is not None or given <= needed | optional)


def check_registered(option: str, name: str, file: Path, registry: str) -> None:
    """Raise ValueError if no function of `file` is registered as `name`, by `registry`.register."""
    known = sorted(_list_registered(ast.parse(file.read_bytes()), registry))
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    choices = ", ".join(map(repr, known))
    raise ValueError(f"{option}={name!r}{hint}: expected one of {choices}")


def list_needs(file: Path, registry: str, name: str) -> set[str]:
    """Return the needs that are true where a function is registered as `name`; none if unknown."""
    calls = _find_registrations(ast.parse(file.read_bytes()), registry)
    return {
        keyword.arg
        for call in calls
        if isinstance(call.args[0], ast.Constant) and call.args[0].value == name
        for argument in call.args[1:]
        if isinstance(argument, ast.Call)
        for keyword in argument.keywords
        if keyword.arg and isinstance(keyword.value, ast.Constant) and keyword.value.value
    }


def list_imports(tree: ast.Module) -> list[str]:
    """Return the packages that a file surely imports when it is run."""
    modules: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.append(node.module)
    return [module.partition(".")[0] for module in modules]


def _list_registered(tree: ast.Module, registry: str) -> Iterator[str]:
    for call in _find_registrations(tree, registry):
        if isinstance(call.args[0], ast.Constant):
            yield str(call.args[0].value)


def _find_registrations(tree: ast.Module, registry: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        if isinstance(owner, ast.Name) and owner.id == registry and node.func.attr == "register":
            yield node


def _list_names(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield what statements define at the top of a file, also under `if` and `try`."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            yield from (name.id for name in ast.walk(node) if isinstance(name, ast.Name))
        else:
            for field in ("body", "orelse", "finalbody"):
                yield from _list_names(getattr(node, field, ()))
            for handler in getattr(node, "handlers", ()):
                yield from _list_names(handler.body)
