"""Keeps secrets of a recipe out of what a run writes: its config.yaml and what trackers get.

`remember_secrets` sees the tree before its interpolations are resolved, and
`dump_config` writes those that took a value from the environment as the recipe has them.
"""

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mcore_rl.config import Config
from mcore_rl.config.tree import mappings_under
from mcore_rl.process.redaction import (
    HIDDEN,
    is_secret_name,
    redact,
    remember_likely_secret,
    remember_secret,
)

Path = tuple[str | int, ...]

_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*([^,}\s]+)\s*(?:,([^}]*))?\}")
_interpolations: dict[Path, tuple[str, frozenset[str]]] = {}
"""Where a value came from the environment -> the recipe's text, and the values in it."""


def remember_secrets(tree: DictConfig) -> None:
    """Note which leaves of a composed tree hold values of environment variables or secrets."""
    raw = OmegaConf.to_container(tree, resolve=False)
    resolved = OmegaConf.to_container(tree, resolve=True, throw_on_missing=False)
    taken: set[str] = set()
    for _, text in _leaves(raw):
        for name, default in _VARIABLE.findall(text if isinstance(text, str) else ""):
            value = os.environ.get(name) or str(default).strip()
            if value:
                taken.add(value)
            if is_secret_name(name):
                remember_secret(value)
            else:
                remember_likely_secret(value)
    for path, value in _leaves(resolved):
        if isinstance(value, str) and is_secret_name(_name_of(path)):
            remember_secret(value)
        found = frozenset(part for part in taken if part in str(value))
        text = _at(raw, path)
        if found and ("${" in text or text == HIDDEN):
            _interpolations[path] = (text, found)


def dump_config(config: Config) -> dict[str, Any]:
    """Return the configuration as plain values without secrets.

    Values from the environment are the interpolations that the recipe has. Of URLs, userinfo and
    token-like parameters are ***; so are strings under names like api_key among free options.
    """
    values = OmegaConf.to_container(OmegaConf.structured(config))
    assert isinstance(values, dict)
    free = [tuple(name.split(".")) for name in mappings_under(Config)]

    def write(path: Path, value: Any) -> Any:
        text, taken = _interpolations.get(path, ("", frozenset()))
        if any(part in str(value) for part in taken):
            return text
        if not isinstance(value, str):
            return value
        is_free = any(path[: len(group)] == group for group in free)
        if value and is_free and is_secret_name(_name_of(path)):
            return HIDDEN
        return redact(value)

    return _map_leaves(values, write)


def _name_of(path: Path) -> str:
    """Return the last name in a path; elements of a list have that of the list."""
    return next((str(step) for step in reversed(path) if isinstance(step, str)), "")


def _map_leaves(value: Any, write: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    if isinstance(value, dict):
        return {name: _map_leaves(part, write, (*path, name)) for name, part in value.items()}
    if isinstance(value, list):
        return [_map_leaves(part, write, (*path, i)) for i, part in enumerate(value)]
    return write(path, value)


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, (*path, name))
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _leaves(part, (*path, i))
    else:
        yield path, value


def _at(raw: Any, path: Path) -> str:
    """Return the recipe's text at `path`, or *** if a whole group above it is an interpolation."""
    for step in path:
        if isinstance(raw, str):
            return HIDDEN
        raw = raw[step]
    return str(raw)
