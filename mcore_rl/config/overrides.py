"""Turns overrides as a shell passes them into the ones that Hydra's grammar takes.

run.dir=runs/step=10 (copy)  ->  run.dir='runs/step=10 (copy)'     a text stays as it was typed
data.train=[é.jsonl,b.jsonl] ->  data.train=['é.jsonl','b.jsonl']
agents.options={turns: 3}     ->  ++agents.options={turns: 3}       a key that no file has

~parallel.dp takes an option, or a group, out again: it gets its default back. A key of an option
with free names (~agents.options.url) and a choice of the list of defaults (~algorithm) are Hydra's
own to delete.
"""

import os
import re
from collections.abc import Sequence
from types import UnionType
from typing import Any, Union, get_args, get_origin

from omegaconf import DictConfig, OmegaConf

from mcore_rl.config import Config
from mcore_rl.config.bounds import is_group, options_of
from mcore_rl.config.tree import defaults_of, leaves_under, mappings_under, spell

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


SIGN = "~"


def split_removals(overrides: Sequence[str], choices: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of options and groups to take out, and the other overrides.

    choices   groups of files, such as algorithm, whose removal is Hydra's

    Raises ValueError if another override sets what is to be taken out.
    """
    leaves = leaves_under(Config)
    removed = [
        name
        for name in (word[1:] for word in overrides if word.startswith(SIGN))
        if name in leaves
        or (name not in choices and any(leaf.startswith(f"{name}.") for leaf in leaves))
    ]
    others = [word for word in overrides if word[1:] not in removed or word[0] != SIGN]
    for name in removed:
        for word in others:
            if f"{word.lstrip('+~').partition('=')[0]}.".startswith(f"{name}."):
                raise ValueError(f"{SIGN}{name} takes out what {word} sets: leave one of them out")
    return removed, others


def take_out(tree: DictConfig, names: Sequence[str]) -> None:
    """Set options of a composed recipe back to their defaults.

    Raises ValueError for a name whose options all have their defaults anyway.
    """
    for name in names:
        defaults = dict(defaults_of(Config, name))
        changed = [leaf for leaf, value in defaults.items() if _read(tree, leaf) != value]
        if not changed:
            shown = "" if len(defaults) > 1 else f" ({name}={spell(defaults[name])})"
            raise ValueError(
                f"{SIGN}{name}: there is nothing to take out, as the recipe does not set it: the"
                f" default holds{shown}; leave it out"
            )
        for leaf in changed:
            OmegaConf.update(tree, leaf, defaults[leaf], merge=False)


def _read(tree: DictConfig, name: str) -> object:
    value = OmegaConf.select(tree, name)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
