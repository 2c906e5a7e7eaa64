"""Turns overrides as a shell passes them into the ones that Hydra's grammar takes.

run.dir=runs/step=10 (copy)  ->  run.dir='runs/step=10 (copy)'     a text stays as it was typed
data.train=[é.jsonl,b.jsonl] ->  data.train=['é.jsonl','b.jsonl']
agents.options={turns: 3}     ->  ++agents.options={turns: 3}       a key that no file has
"""

import os
import re
from types import UnionType
from typing import Any, Union, get_args, get_origin

from mcore_rl.config.bounds import is_group, options_of
from mcore_rl.config.tree import mappings_under

_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_PREFIX = re.compile(r"\+{0,2}")


def to_hydra(override: str, cls: type) -> str:
    """Return `override` of an option of the configuration class in the form that Hydra reads.

    Texts, and elements of lists of texts, are quoted unless they are already: otherwise Hydra
    refuses many paths and reads 1e5 as a number. Options with free names may get keys that no file
    has. An override of anything else is returned as it is.
    """
    name, equals, value = override.partition("=")
    if not equals:
        return override
    prefix = _PREFIX.match(name)
    assert prefix is not None
    name = name[prefix.end() :]
    mappings = mappings_under(cls)
    is_free = name in mappings or any(name.startswith(f"{mapping}.") for mapping in mappings)
    start = "++" if is_free else prefix.group()
    return f"{start}{name}={_quote_value(value, find_type(cls, name))}"


def quote(text: str) -> str:
    """Return `text` as a quoted string of Hydra's grammar."""
    # Backslashes are read as such unless a quote follows, be it the closing one.
    escaped = re.sub(r"(\\*)('|\Z)", lambda m: 2 * m[1] + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"


def _quote_value(value: str, kind: Any) -> str:
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if value == "null" or (bool in kinds and value.lower() in ("true", "false")):
        return value
    if str in kinds:
        return value if _QUOTED.fullmatch(value) else _quote_text(value)
    if any(get_origin(inner) in (list, tuple) and get_args(inner)[0] is str for inner in kinds):
        return _quote_elements(value)
    return value


def _quote_text(text: str) -> str:
    """Quote a text; ~/ is the home folder, which shells expand at the beginning of words only."""
    return quote(os.path.expanduser(text) if text.startswith("~/") else text)


def _quote_elements(value: str) -> str:
    """Quote the elements of [a,b], or make a list of a single one.

    A list with quotes or brackets inside is the user's to write.
    """
    inside = value.strip()
    if inside.startswith("[") and inside.endswith("]"):
        inside = inside[1:-1]
    elif "," in inside:
        return value
    if not inside.strip() or re.search(r"['\"\[\]{}]", inside):
        return value
    return f"[{','.join(_quote_text(element.strip()) for element in inside.split(','))}]"


def find_type(cls: type, name: str) -> Any:
    """Return the type of an option by its dotted name, None if the class has no such option."""
    first, _, rest = name.partition(".")
    kind, _ = options_of(cls).get(first, (None, None))
    if not rest:
        return kind
    if is_group(kind):
        return find_type(kind, rest)
    return get_args(kind)[1] if get_origin(kind) is dict else None
