"""Says whether a value fits an upstream field, and how SGLang's command line spells the value."""

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any

from mcore_rl.config.upstream.fields import SERVER, UpstreamField, read_fields

DTYPES = ("float32", "bfloat16", "float16", "uint8")
"""Names of torch's dtypes that a recipe may give."""
_PLAIN: Mapping[str, Callable[[object], bool]] = {
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "float": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "None": lambda value: value is None,
}
_LISTS = ("List", "list", "Tuple", "tuple", "set", "Set", "Sequence")


def fits(kind: ast.expr, value: object) -> bool:
    """Return whether `value` may be of the declared type; True for types not known here."""
    if isinstance(kind, ast.Constant):
        return value is None if kind.value is None else True
    if isinstance(kind, ast.BinOp):  # X | Y
        return fits(kind.left, value) or fits(kind.right, value)
    if isinstance(kind, ast.Subscript):
        return _fits_generic(ast.unparse(kind.value), _parameters(kind), value)
    name = ast.unparse(kind)
    if name == "torch.dtype":
        return value in DTYPES
    check = _PLAIN.get(name)
    return check is None or check(value)


def is_code(kind: ast.expr) -> bool:
    """Return whether the type is one that only Python code can give, such as a function."""
    return any(name in ast.unparse(kind) for name in ("Callable", "ContextManager", "RecipeConfig"))


def _fits_generic(name: str, parameters: list[ast.expr], value: object) -> bool:
    name = name.rpartition(".")[2]
    if name == "Literal":
        return value in [p.value for p in parameters if isinstance(p, ast.Constant)]
    if name == "Optional":
        return value is None or fits(parameters[0], value)
    if name == "Union":
        return any(fits(parameter, value) for parameter in parameters)
    if name in ("Dict", "dict", "Mapping"):
        return isinstance(value, Mapping)
    if name in _LISTS:
        return isinstance(value, list | tuple) and all(
            any(fits(parameter, item) for parameter in parameters) for item in value
        )
    return True


def _parameters(kind: ast.Subscript) -> list[ast.expr]:
    return kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]


def server_arguments(options: Mapping[str, Any]) -> list[str]:
    """Return checked options of ServerArgs as arguments of SGLang's command line."""
    fields = read_fields(SERVER) if options else {}
    return [part for name, value in options.items() for part in _argument(fields[name], value)]


def problem_on_command_line(field: UpstreamField, value: object) -> str | None:
    """Return why the command line cannot set a field to this value; None if it can."""
    if not field.has_cli:
        return "SGLang's command line has no such option"
    default = _default(field)
    if value is False and default not in (False, None):
        return f"it is {default} by default, and SGLang's command line cannot switch it off"
    return None


def _argument(field: UpstreamField, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    if value is True and field.is_flag:
        return [field.cli_name]
    if field.is_json or isinstance(value, Mapping):
        return [field.cli_name, json.dumps(value)]
    if isinstance(value, list | tuple):
        return [field.cli_name, *map(str, value)]
    return [field.cli_name, str(value)]


def _default(field: UpstreamField) -> object:
    return field.default.value if isinstance(field.default, ast.Constant) else None
