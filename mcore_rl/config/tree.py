"""Lists, reads and replaces options by dotted name, in a configuration or its class."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields, replace
from functools import cache, reduce
from typing import Any, TypeVar

from mcore_rl.config.bounds import is_group, options_of

Settings = Mapping[str, Any]
"""Options by dotted name."""
C = TypeVar("C")


def leaves_under(cls: type, prefix: str = "") -> list[str]:
    """Dotted names of all options under a configuration class, each with `prefix` in front."""
    names: list[str] = []
    for name, (kind, _) in options_of(cls).items():
        dotted = f"{prefix}{name}"
        names += leaves_under(kind, f"{dotted}.") if is_group(kind) else [dotted]
    return names


def mappings_under(cls: type) -> list[str]:
    """Dotted names of the options under a configuration class that hold options by free names."""
    return [
        name for name in leaves_under(cls) if isinstance(dict(defaults_of(cls, name))[name], dict)
    ]


def value_of(config: object, key: str) -> Any:
    """The value of the option or group `key` ("model.path") of a configuration."""
    return reduce(getattr, key.split("."), config)


@cache
def defaults_of(cls: type, key: str) -> tuple[tuple[str, Any], ...]:
    """(dotted name, default) of every option under `key`, an option or group of the class."""
    first, _, rest = key.partition(".")
    default = _default(next(f for f in fields(cls) if f.name == first))
    if rest:
        default = value_of(default, rest)
    kind = type(default)
    if not is_group(kind):
        return ((key, default),)
    return tuple((f"{key}.{name}", value_of(default, name)) for name in leaves_under(kind))


def with_settings(config: C, settings: Settings) -> C:
    """The configuration with options replaced, all at once: only together they need to be right.

    Raises ValueError as its class does.
    """
    values: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        group, dot, name = key.partition(".")
        if dot:
            groups.setdefault(group, {})[name] = value
        else:
            values[key] = value
    inner = {group: with_settings(getattr(config, group), own) for group, own in groups.items()}
    whole: Any = config
    return replace(whole, **values, **inner)


def list_changes(before: C, after: C, names: Iterable[str]) -> Iterator[tuple[str, Any, Any]]:
    """Yield those of the options that differ between two configurations, with both values."""
    for name in names:
        values = value_of(before, name), value_of(after, name)
        if values[0] != values[1]:
            yield name, *values


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted name; an empty mapping is a leaf."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        is_leaf = not isinstance(value, Mapping) or not value
        leaves |= {name: value} if is_leaf else flatten(value, f"{name}.")
    return leaves


def spell(value: object) -> str:
    """Return the value as a recipe spells it."""
    if value is None:
        return "null"
    if value == "":
        return "''"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _default(option: Field[Any]) -> Any:
    if option.default_factory is not MISSING:
        return option.default_factory()
    return option.default
