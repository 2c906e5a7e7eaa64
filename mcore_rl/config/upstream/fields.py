"""Reads the fields of upstream option classes from their installed source, without importing it.

    megatron-core   TransformerConfig, MLATransformerConfig, ModelParallelConfig, OptimizerConfig,
                    DistributedDataParallelConfig: annotated class attributes
    SGLang          arg_groups/fields/*.py: attributes annotated A[type, Arg(help=..., ...)];
                    server_args.py: arguments for fields whose choices are computed

An import of megatron-core or SGLang takes seconds; parsing the few files takes milliseconds.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class UpstreamField:
    """One option of an upstream class, as its source declares it.

    kind        the annotation of its type
    choices     the only values it takes; empty: not listed
    cli_name    its name on SGLang's command line
    has_cli     whether SGLang's command line has it
    is_json     whether the command line takes its value as one string of JSON
    """

    name: str
    kind: ast.expr
    default: ast.expr | None
    choices: tuple[object, ...] = ()
    cli_name: str = ""
    has_cli: bool = True
    is_json: bool = False

    @property
    def is_flag(self) -> bool:
        """Return whether the field is true or false."""
        return any(isinstance(n, ast.Name) and n.id == "bool" for n in ast.walk(self.kind))


@dataclass(frozen=True)
class UpstreamClass:
    """An upstream class of options: the files that declare it, and the classes read in them.

    name      as upstream calls it
    package   top-level package
    files     paths within the package; a folder stands for all its modules
    classes   classes whose fields count; empty: all of the files
    """

    name: str
    package: str
    files: tuple[str, ...]
    classes: tuple[str, ...] = ()


TRANSFORMER = UpstreamClass(
    "TransformerConfig",
    "megatron",
    ("core/model_parallel_config.py", "core/transformer/transformer_config.py"),
    ("ModelParallelConfig", "TransformerConfig", "MLATransformerConfig"),
)
OPTIMIZER = UpstreamClass(
    "OptimizerConfig", "megatron", ("core/optimizer/optimizer_config.py",), ("OptimizerConfig",)
)
DDP = UpstreamClass(
    "DistributedDataParallelConfig",
    "megatron",
    ("core/distributed/distributed_data_parallel_config.py",),
    ("DistributedDataParallelConfig",),
)
SERVER = UpstreamClass("ServerArgs", "sglang", ("srt/arg_groups/fields",))
_SERVER_CHOICES = "srt/arg_groups/choices.py"
_SERVER_ARGUMENTS = "srt/server_args.py"


@cache
def is_installed(upstream: UpstreamClass) -> bool:
    """Return whether the package that declares the class is installed here."""
    return find_spec(upstream.package) is not None


@cache
def read_fields(upstream: UpstreamClass) -> Mapping[str, UpstreamField]:
    """Return the fields of an upstream class by name.

    Raises ValueError if its package is not installed, or does not declare them where expected.
    """
    root = _package_dir(upstream)
    paths = [root / file for file in upstream.files]
    modules = [module for path in paths for module in _modules(path)]
    lists = _lists_of(root / _SERVER_CHOICES) if upstream is SERVER else {}
    arguments = _arguments_of(root / _SERVER_ARGUMENTS) if upstream is SERVER else {}
    fields = {
        field.name: field
        for module in modules
        for node in _classes_of(module, upstream.classes)
        for field in _fields_of(node, lists)
    }
    for name, cli_name in arguments.items():
        if name in fields:
            fields[name] = replace(fields[name], cli_name=cli_name, has_cli=True)
    if not fields:
        raise ValueError(
            f"{upstream.name} is not declared in {', '.join(map(str, paths))}: this version of"
            f" {upstream.package} is not supported"
        )
    return fields


def _package_dir(upstream: UpstreamClass) -> Path:
    found = find_spec(upstream.package)
    places = list(found.submodule_search_locations or ()) if found else []
    if not places:
        raise ValueError(
            f"{upstream.package} is not installed here, so options of {upstream.name} cannot be"
            " checked: install mcore_rl with an extra, see README.md"
        )
    roots = [Path(place) for place in places]  # several for a namespace package, such as megatron
    return next((root for root in roots if (root / upstream.files[0]).exists()), roots[0])


def _modules(path: Path) -> list[Path]:
    return sorted(path.glob("*.py")) if path.is_dir() else [path]


def _classes_of(module: Path, names: Sequence[str]) -> Iterator[ast.ClassDef]:
    tree = ast.parse(module.read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and (not names or node.name in names):
            yield node


def _fields_of(
    node: ast.ClassDef, lists: Mapping[str, tuple[object, ...]]
) -> Iterator[UpstreamField]:
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name = statement.target.id
        if name.startswith("_"):
            continue
        kind, keywords = _split_annotation(statement.annotation)
        if kind is None:
            continue  # a value that SGLang derives by itself
        yield UpstreamField(
            name,
            kind,
            statement.value,
            _choices(keywords.get("choices"), lists),
            _text(keywords.get("cli_name")) or "--" + name.replace("_", "-"),
            has_cli=_is_marked(statement.annotation) and "no_cli" not in keywords,
            is_json="type_parser" in keywords and "json" in ast.unparse(keywords["type_parser"]),
        )


def _split_annotation(annotation: ast.expr) -> tuple[ast.expr | None, Mapping[str, ast.expr]]:
    """Return (type, keywords of Arg) of `A[type, Arg(...)]`; (None, {}) for derived values."""
    if not _is_marked(annotation):
        return annotation, {}
    assert isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple)
    kind, *marks = annotation.slice.elts
    calls = [mark for mark in marks if isinstance(mark, ast.Call)]
    if any(ast.unparse(call.func) == "Derived" for call in calls):
        return None, {}
    keywords = {
        keyword.arg: keyword.value
        for call in calls
        for keyword in call.keywords
        if keyword.arg is not None
    }
    return kind, keywords


def _is_marked(annotation: ast.expr) -> bool:
    return isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "A"


def _choices(node: ast.expr | None, lists: Mapping[str, tuple[object, ...]]) -> tuple[object, ...]:
    if isinstance(node, ast.Name):
        return lists.get(node.id, ())
    return _literal_list(node) if node is not None else ()


def _lists_of(module: Path) -> dict[str, tuple[object, ...]]:
    """Return the lists of plain values that a module assigns to names."""
    if not module.is_file():
        return {}
    return {
        target.id: _literal_list(node.value)
        for node in ast.parse(module.read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _arguments_of(module: Path) -> dict[str, str]:
    """Return field -> argument for those that a module adds one by one.

    They are marked no_cli, as it computes their choices: `parser.add_argument("--sampling-backend",
    default=_declared_default("sampling_backend"), ...)`. Deprecated spellings name no field.
    """
    if not module.is_file():
        return {}
    calls = [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Call)]
    found = {}
    for call in calls:
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "add_argument":
            continue
        default = next((word.value for word in call.keywords if word.arg == "default"), None)
        if isinstance(default, ast.Call) and ast.unparse(default.func) == "_declared_default":
            found[_text(default.args[0])] = _text(call.args[0])
    return found


def _literal_list(node: ast.expr) -> tuple[object, ...]:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return ()  # computed: SGLang checks it when an engine starts
    return tuple(value) if isinstance(value, list | tuple | set) else ()


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
