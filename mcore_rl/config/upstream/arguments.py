"""Spells options of SGLang's ServerArgs as arguments of its command line."""

import ast
import json
from collections.abc import Mapping
from typing import Any

from mcore_rl.config.upstream.fields import SERVER, UpstreamField, read_fields


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
