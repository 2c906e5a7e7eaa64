"""Every option has a reader: an attribute access outside config/ on an object known to be of its
class.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from mcore_rl import config
from mcore_rl.config.bounds import Options
from tests.support.policy import parse, python_files

Field = tuple[str, str]
"""(configuration class, field)"""
CLASSES = {
    name: cls
    for name, cls in vars(config).items()
    if isinstance(cls, type) and is_dataclass(cls) and issubclass(cls, Options)
}
OPTIONS: set[Field] = {(name, f.name) for name, cls in CLASSES.items() for f in fields(cls)}


def name_kind(hint: Any) -> str:
    """Return the name of a field's class, or that of its items."""
    items = get_args(hint)
    return getattr(items[0] if get_origin(hint) is list else hint, "__name__", "")


KINDS: dict[Field, str] = {
    (name, option): name_kind(get_type_hints(CLASSES[name])[option]) for name, option in OPTIONS
}

HOLDERS: dict[str, dict[str, str]] = {}
"""Other classes of the package: class -> field -> the configuration class it holds"""


def test_every_option_is_read() -> None:
    assert not (names := unread(OPTIONS)), f"nothing reads {', '.join(names)}"


def test_an_option_that_nothing_reads_is_found() -> None:
    assert unread({("RunConfig", "steps"), ("RunConfig", "fake_leaf")}) == ["RunConfig.fake_leaf"]


def test_the_search_tells_a_reader_from_an_option_of_the_same_name() -> None:
    def read(source: str) -> set[Field]:
        return fields_read([ast.parse(source)])

    assert read("def f(c: Config): return c.rollout.tp") == {
        ("Config", "rollout"),
        ("RolloutConfig", "tp"),
    }
    assert read("def f(c: RolloutConfig | None): c.tp") == {("RolloutConfig", "tp")}
    assert read("def f(c: Config):\n r = c.rollout\n g(r.tp)") >= {("RolloutConfig", "tp")}
    assert read(
        "class A:\n def __init__(self, c: KLConfig):\n  self.c = c\n def g(self): self.c.coef"
    ) == {("KLConfig", "coef")}
    assert read("@dataclass\nclass A:\n c: KLConfig\n def g(self): self.c.coef") == {
        ("KLConfig", "coef")
    }
    held = "class A:\n c: KLConfig\ndef f(a: A): return a.c.coef"
    assert read(held) == {("KLConfig", "coef")}
    assert read("def f(c: LoraConfig): return [a.eval for a in c.adapters]") >= {
        ("AdapterConfig", "eval")
    }
    listed = "def f(c: Sequence[AdapterConfig]):\n for i, a in enumerate(c): a.eval"
    assert read(listed) == {("AdapterConfig", "eval")}
    mapped = "def f(c: Mapping[str, KLConfig]):\n k = c[0]\n k.coef"
    assert read(mapped) == {("KLConfig", "coef")}
    assert read("c = load_recipe('x', [])\nc.rollout") == {("Config", "rollout")}
    assert not read("def f(spec: EngineSpec): return spec.tp")
    assert not read("def f(c: KLConfig): c.coef = 1.0")
    assert not read("def f(c: KLConfig): return c.fake_leaf")
    assert not read("def f(c: KLConfig): ...\ndef g(c): return c.coef")


def unread(options: set[Field]) -> list[str]:
    return sorted(".".join(option) for option in options - read_by_the_package())


@cache
def read_by_the_package() -> frozenset[Field]:
    files = {path: parse(path) for path in python_files("mcore_rl")}
    own = [files.pop(path) for path in list(files) if path.parent == Path("mcore_rl/config")]
    return frozenset(fields_read(files.values()).union(*map(read_by_properties, own)))


def read_by_properties(tree: ast.Module) -> set[Field]:
    """Fields that a property of their own class turns into something others read."""
    found: set[Field] = set()
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for method in (
            node for node in cls.body if isinstance(node, ast.FunctionDef) and node.decorator_list
        ):
            found |= {
                (cls.name, node.attr)
                for node in ast.walk(method)
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
            }
    return found


def fields_read(trees: Iterable[ast.Module]) -> set[Field]:
    found: set[Field] = set()
    trees = list(trees)
    learn_holders(trees)
    for tree in trees:
        scope = Scope()
        scope.learn_attributes(tree)
        scope.visit(tree)
        found |= scope.read
    return found


@dataclass
class Scope:
    """Names whose configuration class is known: by annotation, by assignment, or as an
    attribute of self.
    """

    names: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, str] = field(default_factory=dict)
    read: set[Field] = field(default_factory=set)

    def learn_attributes(self, tree: ast.Module) -> None:
        """Learn what self.<name> is, from class bodies and assignments of annotated parameters."""
        for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for node in ast.walk(cls):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    inner = Scope(dict(parameters(node)))
                    for target, value in assignments(node):
                        if isinstance(target, ast.Attribute) and (kind := inner.kind(value)):
                            self.attributes[target.attr] = kind
            for node in cls.body:
                if isinstance(node, ast.AnnAssign) and (kind := annotated(node.annotation)):
                    self.attributes[ast.unparse(node.target)] = kind

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner = Scope({**self.names, **dict(parameters(node))}, self.attributes, self.read)
            shadowed = {arg.arg for arg in arguments(node)} - dict(parameters(node)).keys()
            inner.names = {name: kind for name, kind in inner.names.items() if name not in shadowed}
            inner.visit_children(node)
        else:
            for target, value in assignments_of(node):
                if isinstance(target, ast.Name) and (kind := self.kind(value)):
                    self.names[target.id] = kind
            self.visit_children(node)

    def visit_children(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self.visit(child)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = self.kind(node.value)
            if owner in CLASSES and node.attr in {f.name for f in fields(CLASSES[owner])}:
                self.read.add((owner, node.attr))

    def kind(self, node: ast.AST | None) -> str | None:
        """The configuration class of an expression, if it is known to be one."""
        if isinstance(node, ast.Subscript):
            return self.kind(node.value)
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Call):
            return {"load_recipe": "Config"}.get(ast.unparse(node.func).rpartition(".")[2])
        if isinstance(node, ast.Attribute):
            if ast.unparse(node.value) == "self":
                return self.attributes.get(node.attr)
            owner = self.kind(node.value) or ""
            if owner in HOLDERS:
                return HOLDERS[owner].get(node.attr)
            kind = KINDS.get((owner, node.attr))
            return kind if kind in CLASSES else None
        return None


def annotated(annotation: ast.expr | None) -> str | None:
    """The configuration class an annotation names: X, config.X, X | None, "X", Mapping[str, X],
    Sequence[X], list[X].

    A class of the package that holds such a class (StepOptions) counts as one.
    """
    text = ast.unparse(annotation).strip("'\"") if annotation else ""
    if isinstance(annotation, ast.Subscript) and text.startswith(
        ("Mapping[", "dict[", "Sequence[", "list[")
    ):
        text = text.removesuffix("]").partition("[")[2].rpartition(", ")[2]
    names = [part.strip().rpartition(".")[2] for part in text.split("|")]
    return next((name for name in names if name in CLASSES or name in HOLDERS), None)


def learn_holders(trees: Iterable[ast.Module]) -> None:
    """Find the classes of the package whose fields are configuration classes."""
    for tree in trees:
        for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            held = {
                ast.unparse(node.target): kind
                for node in cls.body
                if isinstance(node, ast.AnnAssign) and (kind := annotated(node.annotation))
            }
            if held:
                HOLDERS[cls.name] = held


def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def parameters(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
) -> Iterator[tuple[str, str]]:
    for arg in arguments(node):
        if kind := annotated(arg.annotation):
            yield arg.arg, kind


def assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    for node in ast.walk(tree):
        yield from assignments_of(node)


def assignments_of(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """(target, value) of a plain assignment or a loop, tuples taken apart."""
    if isinstance(node, ast.For):
        yield from loop_variables(node.target, node.iter)
    for generator in getattr(node, "generators", ()):
        yield from loop_variables(generator.target, generator.iter)
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return
    value = node.value
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from zip(target.elts, value.elts, strict=False)
        else:
            yield target, value


def loop_variables(target: ast.expr, values: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(name, the list whose items it takes), also of enumerate(list)."""
    if isinstance(values, ast.Call) and ast.unparse(values.func) == "enumerate":
        assert isinstance(target, ast.Tuple), "two names take what enumerate gives"
        target, values = target.elts[1], values.args[0]
    yield target, values
