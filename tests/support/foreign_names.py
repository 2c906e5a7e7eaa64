"""Finds where the code replaces names of packages that are not this project's, by its syntax."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.dotted_names import (
    ANY,
    UNKNOWN,
    loop_names,
    names_of,
    owner_of_vars,
    put_texts,
    resolve,
    text_of,
    walk,
)
from tests.support.policy import python_files, read

OWN = ("mcore_rl", "checkpoint_tools", "launch", "sglang_on_cpu", "import_standin")
FOLDERS = ("mcore_rl", "checkpoint_tools", "launch")
MADE_TO_BE_SET = (
    *("os.environ", "sys.argv", "sys.path", "sys.stdout", "sys.stderr", "tempfile.tempdir"),
    *("sys.breakpointhook", "sys.excepthook", "sys.unraisablehook"),
)
"""Python documents that programs set them."""
CHANGERS = {"update", "setdefault", "pop", "append", "insert", "register", "extend"}
"""Methods that change a table of somebody else's, as an assignment to one of its items does."""
SETTERS = {
    *("setattr", "delattr", "type.__setattr__", "type.__delattr__"),
    *("object.__setattr__", "object.__delattr__"),
}


@dataclass(frozen=True)
class Hit:
    """A foreign name that is assigned in an outermost function (or "" for a module's own lines).

    `name` is dotted. It begins with "?" where only the attribute is known, and ends with "*" where
    only its owner is.
    """

    module: str
    function: str
    name: str
    line: int

    @property
    def where(self) -> tuple[str, str]:
        return self.module, self.function

    def is_of(self, name: str) -> bool:
        """Return whether the foreign name `name` could be the one that is assigned."""
        owner, _, attribute = self.name.rpartition(".")
        if owner == UNKNOWN:
            return attribute in (ANY, name.rpartition(".")[2])
        return name == self.name or (attribute == ANY and name.startswith(f"{owner}."))


def find_replaced(path: Path) -> list[Hit]:
    """Return the foreign names that a module replaces."""
    return list(_Module(path, put_texts(ast.parse(read(path)))).hits())


@cache
def find_all() -> list[Hit]:
    """Return the foreign names that the packages replace."""
    return [hit for path in python_files(*FOLDERS) for hit in find_replaced(path)]


class _Module:
    def __init__(self, path: Path, tree: ast.Module) -> None:
        self._tree = tree
        parts = list(path.with_suffix("").parts)
        if "standins" in parts:  # they are imported by the names that they have on their own
            parts = parts[parts.index("standins") + 1 :]
        self._name = ".".join(parts).removesuffix(".__init__")
        self._own = {*OWN, parts[0]}

    def hits(self) -> Iterator[Hit]:
        outer = names_of([node for node in self._tree.body if not _is_definition(node)], {})
        callables = _callables(self._tree)
        wrappers = _wrappers(self._tree)
        attributes = _own_attributes(self._tree)
        for name, nodes in _outermost(self._tree):
            known = names_of(nodes, outer)
            found = _Function(known, callables, wrappers, attributes)
            for foreign, line in found.assigned(nodes):
                root = foreign.partition(".")[0]
                if root in self._own or foreign.startswith(MADE_TO_BE_SET):
                    continue
                yield Hit(self._name, name, foreign, line)


class _Function:
    """Finds the assignments of an outermost function; `known` is local name -> dotted name."""

    def __init__(
        self,
        known: dict[str, str],
        callables: set[str],
        wrappers: set[str],
        attributes: set[str],
    ) -> None:
        self._known = known
        self._callables = callables
        self._wrappers = wrappers
        self._attributes = attributes

    def assigned(self, nodes: list[ast.AST]) -> Iterator[tuple[str, int]]:
        for node in (each for root in nodes for each in walk(root)):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    yield from self._targets(target, node.value)
            elif isinstance(node, ast.AugAssign | ast.AnnAssign):
                yield from self._targets(node.target, node.value)
            elif isinstance(node, ast.Delete):
                for target in node.targets:
                    yield from self._targets(target, None)
            elif isinstance(node, ast.Call):
                yield from self._called(node)
            elif isinstance(node, ast.For):
                for names in loop_names(node, self._known):
                    known = {**self._known, **names}
                    turn = _Function(known, self._callables, self._wrappers, self._attributes)
                    yield from turn.assigned([*node.body])

    def _targets(self, target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, int]]:
        if isinstance(target, ast.Tuple | ast.List):
            values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            for number, inner in enumerate(target.elts):
                yield from self._targets(inner, values[number] if number < len(values) else None)
        elif isinstance(target, ast.Attribute):
            owner = resolve(target.value, self._known)
            if owner is not None:
                yield f"{owner}.{target.attr}", target.lineno
            elif target.attr not in self._attributes and self._is_callable(value):
                yield f"{UNKNOWN}.{target.attr}", target.lineno
        elif isinstance(target, ast.Subscript):
            table = resolve(target.value, self._known)
            if table == "sys.modules":
                if isinstance(target.slice, ast.Constant) and target.slice.value != "__main__":
                    yield f"sys.modules.{target.slice.value}", target.lineno
            elif table is not None:
                yield table, target.lineno
            elif owner := owner_of_vars(target.value, self._known):
                yield f"{owner}.{text_of(target.slice)}", target.lineno

    def _called(self, call: ast.Call) -> Iterator[tuple[str, int]]:
        function = call.func
        resolved = resolve(function, self._known) or ""
        if resolved.startswith("unittest.mock.patch"):
            is_text = resolved == "unittest.mock.patch"
            owner = "" if is_text else f"{resolve(call.args[0], self._known) or UNKNOWN}."
            yield f"{owner}{text_of(call.args[0 if is_text else 1])}", call.lineno
        elif ast.unparse(function) in SETTERS:
            if _is_self(call.args[0]):
                return
            owner = resolve(call.args[0], self._known) or UNKNOWN
            yield f"{owner}.{text_of(call.args[1])}", call.lineno
        elif isinstance(function, ast.Attribute) and function.attr in CHANGERS:
            table = resolve(function.value, self._known)
            if table and "." in table and table != "sys.modules" and _is_table(function):
                yield table, call.lineno
            elif owner := owner_of_vars(function.value, self._known):
                yield f"{owner}.{ANY}", call.lineno

    def _is_callable(self, value: ast.expr | None) -> bool:
        if isinstance(value, ast.Lambda):
            return True
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            name = value.func.id
            return name in ("partial", *self._wrappers) or (
                name[:1].isupper() and self._is_own(name)
            )
        return isinstance(value, ast.Name) and self._is_own(value.id)

    def _is_own(self, name: str) -> bool:
        """Return whether a local name is a function or class of ours, or a class imported so."""
        known = self._known.get(name, "")
        is_class = known.rpartition(".")[2][:1].isupper()
        return name in self._callables or (known.startswith(OWN) and is_class)


def _outermost(tree: ast.Module) -> Iterator[tuple[str, list[ast.AST]]]:
    yield "", [node for node in tree.body if not _is_definition(node)]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, [node]
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                yield f"{node.name}.{getattr(inner, 'name', '')}".rstrip("."), [inner]


def _callables(tree: ast.Module) -> set[str]:
    return {node.name for node in walk(tree) if _is_definition(node)}  # type: ignore[attr-defined]


def _wrappers(tree: ast.Module) -> set[str]:
    """Return the functions that return a function or a class of their own."""
    return {
        node.name
        for node in walk(tree)
        if isinstance(node, ast.FunctionDef)
        and {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef | ast.ClassDef)}
        & {
            inner.value.id
            for inner in node.body
            if isinstance(inner, ast.Return) and isinstance(inner.value, ast.Name)
        }
    }


def _own_attributes(tree: ast.Module) -> set[str]:
    """Return what the module's own classes assign to attributes of `self`."""
    return {
        node.attr
        for node in walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and _is_self(node.value)
    }


def _is_definition(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


def _is_self(owner: ast.expr) -> bool:
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls")


def _is_table(function: ast.Attribute) -> bool:
    """A class that registers, or a table in a class or module; not a function of a module."""
    return function.attr == "register" or isinstance(function.value, ast.Attribute)
