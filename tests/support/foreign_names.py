"""Finds where the code replaces names of packages that are not this project's, by its syntax."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.policy import parse, python_files

OWN = ("mcore_rl", "checkpoint_tools", "launch", "sglang_on_cpu", "import_standin")
FOLDERS = ("mcore_rl", "checkpoint_tools", "launch")
MADE_TO_BE_SET = (
    *("os.environ", "sys.argv", "sys.path", "sys.stdout", "sys.stderr", "tempfile.tempdir"),
    *("sys.breakpointhook", "sys.excepthook", "sys.unraisablehook"),
)
"""Python documents that programs set them."""
CHANGERS = {"update", "setdefault", "pop", "append", "insert", "register", "extend"}
"""Methods that change a table of somebody else's, as an assignment to one of its items does."""
UNKNOWN = "?"
ANY = "*"


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
    return list(_Module(path, parse(path)).hits())


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
        outer = _names_of([node for node in self._tree.body if not _is_definition(node)], {})
        for name, nodes in _outermost(self._tree):
            known = _names_of(nodes, outer)
            found = _Function(known, _callables(self._tree), _own_attributes(self._tree))
            for foreign, line in found.assigned(nodes):
                root = foreign.partition(".")[0]
                if root in self._own or foreign.startswith(MADE_TO_BE_SET):
                    continue
                yield Hit(self._name, name, foreign, line)


class _Function:
    """Finds the assignments of an outermost function; `known` is local name -> dotted name."""

    def __init__(self, known: dict[str, str], callables: set[str], attributes: set[str]) -> None:
        self._known = known
        self._callables = callables
        self._attributes = attributes

    def assigned(self, nodes: list[ast.AST]) -> Iterator[tuple[str, int]]:
        for node in (each for root in nodes for each in ast.walk(root)):
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

    def _called(self, call: ast.Call) -> Iterator[tuple[str, int]]:
        function = call.func
        if isinstance(function, ast.Name) and function.id in ("setattr", "delattr"):
            if _is_self(call.args[0]):
                return
            owner = resolve(call.args[0], self._known) or UNKNOWN
            name = call.args[1]
            attribute = name.value if isinstance(name, ast.Constant) else ANY
            yield f"{owner}.{attribute}", call.lineno
        elif isinstance(function, ast.Attribute) and function.attr in CHANGERS:
            table = resolve(function.value, self._known)
            if table and "." in table and table != "sys.modules" and _is_table(function):
                yield table, call.lineno

    def _is_callable(self, value: ast.expr | None) -> bool:
        if isinstance(value, ast.Lambda):
            return True
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            name = value.func.id
            return name == "partial" or (name[:1].isupper() and self._is_own(name))
        return isinstance(value, ast.Name) and self._is_own(value.id)

    def _is_own(self, name: str) -> bool:
        """Return whether a local name is a function or class of ours, or a class imported so."""
        known = self._known.get(name, "")
        is_class = known.rpartition(".")[2][:1].isupper()
        return name in self._callables or (known.startswith(OWN) and is_class)


def resolve(expression: ast.expr, known: dict[str, str]) -> str | None:
    """Return the dotted name that an expression stands for, "?" for a part of a layer specification
    of megatron-core, or None if it is no import's.
    """
    match expression:
        case ast.Name(id=name):
            return known.get(name)
        case ast.Attribute(attr="submodules"):  # of a layer specification of megatron-core
            return UNKNOWN
        case ast.Attribute(value=value, attr=attribute):
            owner = resolve(value, known)
            return owner if owner in (None, UNKNOWN) else f"{owner}.{attribute}"
        case ast.Call(func=function, args=[ast.Constant(value=str(module))]) if (
            ast.unparse(function).rpartition(".")[2] == "import_module"
        ):
            return module
        case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), *_]):
            found = resolve(owner, known)
            return found and f"{found}.{name}"
        case ast.Subscript(
            value=ast.Call(func=ast.Name(id="vars"), args=[owner]), slice=ast.Constant(value=name)
        ):
            found = resolve(owner, known)
            return found and f"{found}.{name}"
    return None


def _names_of(nodes: list[ast.AST], outer: dict[str, str]) -> dict[str, str]:
    """Return what imports and plain assignments of the statements make of local names."""
    known = dict(outer)
    for node in (each for root in nodes for each in ast.walk(root)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                known[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                found = resolve(node.value, known)
                if isinstance(target, ast.Name) and found is not None:
                    known[target.id] = found
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for argument in (*node.args.args, *node.args.kwonlyargs):
                known.pop(argument.arg, None)
    return known


def _outermost(tree: ast.Module) -> Iterator[tuple[str, list[ast.AST]]]:
    yield "", [node for node in tree.body if not _is_definition(node)]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, [node]
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                yield f"{node.name}.{getattr(inner, 'name', '')}".rstrip("."), [inner]


def _callables(tree: ast.Module) -> set[str]:
    return {node.name for node in ast.walk(tree) if _is_definition(node)}  # type: ignore[attr-defined]


def _own_attributes(tree: ast.Module) -> set[str]:
    """Return what the module's own classes assign to attributes of `self`."""
    return {
        node.attr
        for node in ast.walk(tree)
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
